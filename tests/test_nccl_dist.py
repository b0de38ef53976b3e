"""torch.distributed on GPU groups: every call of the adapter, over the fake NCCL.

CPU tensors stand in for CUDA's: a group whose only communicator is one of GPUs takes them, and the fake calls their
memory a device's. What needs torch's own CUDA (its streams, its futures with events) is not seen here.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from fake_nccl import Fake, build
from harness import Refused, attempt, run
from torch import nn

import pycomm
from pycomm.backend import find_communicator
from pycomm.extension import c10d, core

# Older torches have the older names alone.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
#: A name that only these tests register.
NAME: Final = "pycomm_fake_gpu"


def start(fake: Fake, timeout: float = 20.0, **settings: Any) -> Any:
    """Makes the default group one of the fake's GPUs; returns the communicator."""
    communicator = fake.communicator(timeout, c10d.make_board(fake.store), **settings)
    c10d.set_stand_in_stream(fake.stream)

    def create(options: Any, _: Any) -> Any:
        if options.group_size == fake.world_size:
            return c10d.C10dBackend(communicator._address())
        part = core.NcclCommunicator(
            fake.api(), c10d.make_board(options.store), options.group_rank, options.group_size,
            timedelta(seconds=timeout), core.NcclSettings(),
        )  # fmt: skip
        return c10d.C10dBackend(part._address())

    if NAME.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    dist.init_process_group(
        NAME, store=fake.store, rank=fake.rank, world_size=fake.world_size,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    return communicator


def on_gpus(n: int, worker: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """The results of worker(fake, *args) on n ranks in one group."""
    library = build()

    def main(rank: int, world_size: int) -> Any:
        fake = Fake(library, str(folder), rank, world_size)
        start(fake)
        result = worker(fake, *args)
        dist.destroy_process_group()
        return result

    return run(n, main, init=False)


def own(fake: Fake, count: int = 6) -> torch.Tensor:
    """Different on every rank."""
    return torch.arange(count, dtype=torch.float32) + 10 * fake.rank


def owns(n: int, count: int = 6) -> list[torch.Tensor]:
    """All ranks' own()."""
    return [torch.arange(count, dtype=torch.float32) + 10 * rank for rank in range(n)]


# ---- every call ----------------------------------------------------------------------------------


def calls(fake: Fake, async_op: bool) -> dict[str, torch.Tensor]:
    """The results of every collective; ``async_op`` ones are waited for by streams alone."""
    n, rank = fake.world_size, fake.rank
    results: dict[str, torch.Tensor] = {}
    works = []
    alive = []  # torch's allocator for GPUs gives memory back in a stream's order, the CPU's at once

    def mine(count: int = 6, more: int = 0) -> torch.Tensor:
        alive.append(own(fake, count) + more)
        return alive[-1]

    def note(name: str, result: torch.Tensor, work: Any) -> None:
        results[name] = result
        assert (work is not None) == async_op
        if async_op:
            works.append(work)

    t = mine()
    note("all_reduce", t, dist.all_reduce(t, async_op=async_op))
    t = mine()
    note("avg", t, dist.all_reduce(t, dist.ReduceOp.AVG, async_op=async_op))
    t = mine()
    note("reduce", t, dist.reduce(t, n - 1, async_op=async_op))
    t = mine()
    note("broadcast", t, dist.broadcast(t, n - 1, async_op=async_op))
    rows = torch.zeros(n, 6)
    note("all_gather", rows, dist.all_gather(list(rows), mine(), async_op=async_op))
    flat = torch.zeros(n * 6)
    note(
        "all_gather_single",
        flat,
        all_gather_single(flat, mine(), async_op=async_op),
    )
    rows = torch.zeros(n, 6)
    lists = list(rows) if rank == 0 else None
    note("gather", rows, dist.gather(mine(), lists, 0, async_op=async_op))
    t = torch.zeros(6)
    parts = [mine(6, 100 * peer) for peer in range(n)] if rank == n - 1 else None
    note("scatter", t, dist.scatter(t, parts, n - 1, async_op=async_op))
    t = torch.zeros(6)
    parts = [mine(6, 100 * peer) for peer in range(n)]
    note("reduce_scatter", t, dist.reduce_scatter(t, parts, async_op=async_op))
    t = torch.zeros(6)
    whole = torch.cat([mine(6, 100 * peer) for peer in range(n)])
    note(
        "reduce_scatter_single",
        t,
        reduce_scatter_single(t, whole, async_op=async_op),
    )
    rows = torch.zeros(n, 6)
    parts = [mine(6, 100 * peer) for peer in range(n)]
    note("all_to_all", rows, dist.all_to_all(list(rows), parts, async_op=async_op))
    # Rank r sends peer + 1 elements to each peer.
    splits = [peer + 1 for peer in range(n)]
    sent = torch.full((sum(splits),), float(rank))
    received = torch.zeros(n * (rank + 1))
    note(
        "all_to_all_single",
        received,
        dist.all_to_all_single(
            received, sent, [rank + 1] * n, splits,
            async_op=async_op,
        ),
    )  # fmt: skip
    for work in works:
        work.wait()
    fake.synchronize()
    return results


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_collective(n: int, async_op: bool, tmp_path: Path) -> None:
    """On the caller's stream, and on the communicator's."""
    every = owns(n)
    total = torch.stack(every).sum(0)
    for rank, results in enumerate(on_gpus(n, calls, tmp_path, async_op)):
        shifted = total + 100 * n * rank
        right = {
            "all_reduce": total,
            "avg": total / n,
            "reduce": total if rank == n - 1 else every[rank],
            "broadcast": every[n - 1],
            "all_gather": torch.stack(every),
            "all_gather_single": torch.cat(every),
            "gather": torch.stack(every) if rank == 0 else torch.zeros(n, 6),
            "scatter": every[n - 1] + 100 * rank,
            "reduce_scatter": shifted,
            "reduce_scatter_single": shifted,
            "all_to_all": torch.stack(every) + 100 * rank,
            "all_to_all_single": torch.arange(n).repeat_interleave(rank + 1).float(),
        }
        assert results.keys() == right.keys()
        for name, value in right.items():
            assert torch.equal(results[name], value), (name, rank, results[name], value)


def test_messages_and_batches(tmp_path: Path) -> None:
    """send and recv, and crossing pairs that only start together."""

    def worker(fake: Fake) -> Any:
        peer = 1 - fake.rank
        got = torch.zeros(6)
        if fake.rank == 0:
            dist.send(own(fake), 1)
        else:
            dist.recv(got, 0)
        crossed, sent = torch.zeros(10_000), own(fake, 10_000)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, crossed, peer)]
        )
        for work in works:
            work.wait()
        fake.synchronize()
        tagged = attempt(lambda: dist.send(got, peer, tag=3))
        anyone = attempt(lambda: dist.recv(got))
        return got, crossed, tagged, anyone

    first, second = on_gpus(2, worker, tmp_path)
    assert torch.equal(second[0], owns(2)[0])
    assert torch.equal(first[1], owns(2, 10_000)[1])
    assert torch.equal(second[1], owns(2, 10_000)[0])
    for _, _, tagged, anyone in (first, second):
        assert isinstance(tagged, Refused)
        assert "tags" in tagged.message
        assert isinstance(anyone, Refused)
        assert "name it" in anyone.message


def test_coalesced_calls_are_one_group(tmp_path: Path) -> None:
    """all_reduce by list, the coalescing manager with and without async_ops; results are right, NCCL sees groups."""

    def worker(fake: Fake) -> Any:
        many = [own(fake, count) for count in (1, 5, 9)]
        dist.all_reduce_coalesced(many)
        later = [own(fake, count) for count in (1, 5, 9)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for t in later:
                dist.all_reduce(t)
        manager.wait()
        device = torch.device("cpu")
        gathered = [torch.zeros(2 * count) for count in (2, 3)]
        inputs = [own(fake, count) for count in (2, 3)]
        with dist._coalescing_manager(device=device) as manager:
            for part, t in zip(inputs, gathered, strict=True):
                all_gather_single(t, part)
        with dist._coalescing_manager(device=device, async_ops=True) as manager:
            kept = own(fake)
            dist.broadcast(kept, 1)
        manager.wait()
        fake.synchronize()
        return many, later, gathered, kept

    for many, later, gathered, kept in on_gpus(2, worker, tmp_path):
        for results in (many, later):
            for count, t in zip((1, 5, 9), results, strict=True):
                assert torch.equal(t, sum(owns(2, count), torch.zeros(count)))
        for count, t in zip((2, 3), gathered, strict=True):
            assert torch.equal(t, torch.cat(owns(2, count)))
        assert torch.equal(kept, owns(2)[1])


def test_a_refused_call_drops_its_group(tmp_path: Path) -> None:
    """What was collected before it is not sent; the next calls are."""

    def worker(fake: Fake) -> Any:
        lost, t = own(fake), own(fake)
        works: list[Any] = []

        def refused() -> None:
            with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True):
                works.append(dist.broadcast(lost, 0, async_op=True))
                dist.broadcast(torch.zeros(4, 4).t(), 0)  # results of a group are contiguous

        error = attempt(refused)
        dist.broadcast(t, 1)  # all_reduce would be caught in torch's own list, which it leaves open
        fake.synchronize()
        ends = [attempt(works[0].wait), attempt(works[0].get_future().wait)]
        return error, lost, t, ends

    for rank, (error, lost, t, ends) in enumerate(on_gpus(2, worker, tmp_path)):
        for end in ends:  # a work that was dropped is waited for by nobody for ever
            assert isinstance(end, Refused)
            assert f"rank {rank}: it was not sent" in end.message
        assert isinstance(error, Refused)
        assert "not contiguous" in error.message
        assert torch.equal(lost, owns(2)[rank])
        assert torch.equal(t, owns(2)[1])


@pytest.mark.parametrize("async_op", [False, True])
def test_tensors_that_are_not_contiguous(async_op: bool, tmp_path: Path) -> None:
    """Inputs are copied before, results after, in the caller's stream's order."""

    def worker(fake: Fake) -> Any:
        whole = own(fake, 12).view(3, 4)
        t = whole.t()
        work = dist.all_reduce(t, async_op=async_op)
        if work is not None:
            work.wait()
        fake.synchronize()
        return t.contiguous()

    for t in on_gpus(1, worker, tmp_path):
        assert torch.equal(t, owns(1, 12)[0].view(3, 4).t())


def test_barriers(tmp_path: Path) -> None:
    """A barrier ends when all have come; monitored_barrier is refused in words."""

    def worker(fake: Fake) -> Any:
        flag = fake.store
        if fake.rank == 1:
            flag.set("reached", "yes")
        dist.barrier()
        there = flag.check(["reached"])
        return there, attempt(lambda: dist.monitored_barrier())

    for there, refused in on_gpus(2, worker, tmp_path):
        assert there
        assert isinstance(refused, Refused)


# ---- works ---------------------------------------------------------------------------------------


def test_wait_orders_the_stream_and_not_the_host(tmp_path: Path) -> None:
    """While the stream is blocked an asynchronous operation is not done, and wait() returns all the same."""

    def worker(fake: Fake) -> Any:
        word = ctypes.c_int(0)
        fake.calls.fake_block(ctypes.c_void_p(fake.stream), ctypes.byref(word))
        t = own(fake)
        work: Any = dist.all_reduce(t, async_op=True)
        seen = [work.is_completed()]
        work.wait()  # the caller's stream is behind it; the host is not
        seen.append(work.is_completed())
        late = attempt(lambda: work.wait(timedelta(milliseconds=50)))
        word.value = 1
        fake.synchronize()
        done = work.wait(timedelta(seconds=10))
        future = work.get_future().wait()
        return seen, late, done, work.is_completed(), t, future

    for seen, late, done, completed, t, future in on_gpus(2, worker, tmp_path):
        assert seen == [False, False]
        assert isinstance(late, Refused)
        assert "ended before the operation" in late.message
        assert done
        assert completed
        assert torch.equal(t, sum(owns(2), torch.zeros(6)))
        assert torch.equal(future[0], t)


def test_inputs_live_until_the_operation_is_done(tmp_path: Path) -> None:
    """A tensor that the caller forgets is kept, and is given up when the work is done."""

    def worker(fake: Fake) -> Any:
        import weakref

        word = ctypes.c_int(0)
        fake.calls.fake_block(ctypes.c_void_p(fake.stream), ctypes.byref(word))
        gathered, t = torch.zeros(2 * 6), own(fake)
        storage = weakref.ref(t.untyped_storage())
        address = t.data_ptr()
        work: Any = all_gather_single(gathered, t, async_op=True)
        del t
        other = torch.full((6,), -1.0)  # would get the memory, had it been given up
        reused = other.data_ptr() == address
        word.value = 1
        work.wait(timedelta(seconds=10))
        return gathered, reused, storage() is None

    for gathered, reused, _ in on_gpus(2, worker, tmp_path):
        assert torch.equal(gathered, torch.cat(owns(2)))
        assert not reused


def test_a_dead_rank_is_told(tmp_path: Path) -> None:
    """The failure that the core finds reaches torch's calls as pycomm's exception, with the call."""

    def worker(fake: Fake) -> Any:
        t = own(fake)
        dist.all_reduce(t)
        fake.synchronize()
        if fake.rank == 1:
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()  # type: ignore[union-attr]
            return None
        work: Any = attempt(lambda: dist.all_reduce(t, async_op=True))
        first = work
        if not isinstance(work, Refused):
            first = attempt(lambda: work.wait(timedelta(seconds=15)))
        return first, attempt(lambda: dist.all_reduce(t))

    library = build()

    def main(rank: int, world_size: int) -> Any:
        fake = Fake(library, str(tmp_path), rank, world_size)
        start(fake)
        return worker(fake)

    (first, second), _ = run(2, main, init=False)
    for refused in (first, second):
        assert isinstance(refused, Refused)
        assert "AbortedError" in refused.kinds
        assert "rank 1 aborted" in refused.message


# ---- DDP -----------------------------------------------------------------------------------------


def test_ddp_averages_through_nccl(tmp_path: Path) -> None:
    """pycomm's hook on a group of GPUs: the gradients of the whole batch, in buckets, beside backward and not."""

    def main(rank: int, world_size: int, overlap: bool) -> Any:
        os.environ["FAKE_CUDA_SYNCHRONOUS"] = "1"
        fake = Fake(build(), str(tmp_path / str(overlap)), rank, world_size)
        start(fake)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
        ddp = pycomm.DistributedDataParallel(model, bucket_cap_mb=1e-3, overlap=overlap)
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        steps = []
        for _ in range(3):
            ddp.zero_grad()
            ddp(data[rank::world_size]).square().mean().backward()
            steps.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        calls = pycomm.get_communicator().sequence
        hooked = ddp._hook_target is not None and ddp._direct is None
        dist.destroy_process_group()
        return steps, calls, hooked

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    whole(data).square().mean().backward()
    for overlap in (False, True):
        (tmp_path / str(overlap)).mkdir()
        for steps, calls, hooked in run(2, main, overlap, init=False):
            assert hooked
            assert calls >= 3 * 2  # buckets
            for gradients in steps:
                for ours, parameter in zip(gradients, whole.parameters(), strict=True):
                    torch.testing.assert_close(ours, parameter.grad)


# ---- groups --------------------------------------------------------------------------------------


def test_group_of_some_ranks(tmp_path: Path) -> None:
    """new_group makes an NCCL communicator of its own, and names itself in errors."""

    def worker(fake: Fake) -> Any:
        pair: Any = dist.new_group([0, 2])
        t = own(fake)
        if fake.rank != 1:
            dist.all_reduce(t, group=pair)
        dist.all_reduce(t)
        fake.synchronize()
        return t

    every = owns(3)
    right = 2 * (every[0] + every[2]) + every[1]
    for t in on_gpus(3, worker, tmp_path):
        assert torch.equal(t, right)


def test_one_group_for_both_kinds_of_tensors(tmp_path: Path) -> None:
    """Backend "pycomm": shared memory at once, NCCL when it is first asked for, by the library of the environment."""

    def main(rank: int, world_size: int) -> Any:
        os.environ["PYCOMM_NCCL_LIB"] = os.environ["PYCOMM_CUDART_LIB"] = build()
        fake = Fake(build(), str(tmp_path), rank, world_size)
        dist.init_process_group(
            "pycomm",
            store=fake.store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=20),
        )
        t = own(fake)
        dist.all_reduce(t)
        shared = t.clone()
        gpu = pycomm.get_communicator(device="cuda")
        core.set_stream_source(lambda device: fake.stream)
        gpu.all_reduce(t)
        fake.synchronize()
        again = pycomm.get_communicator(device="cuda")
        cpu = pycomm.get_communicator()
        dist.destroy_process_group()
        return shared, t, gpu is again, gpu.transport, cpu.transport

    for shared, t, same, gpu, cpu in run(2, main, init=False):
        assert torch.equal(shared, sum(owns(2), torch.zeros(6)))
        assert torch.equal(t, 2 * shared)
        assert same
        assert (gpu, cpu) == ("nccl", "shm")


def test_cuda_part_of_a_group_alone(tmp_path: Path) -> None:
    """``cpu:gloo,cuda:pycomm``: Gloo for CPU tensors, and nothing of shared memory."""

    def main(rank: int, world_size: int) -> Any:
        os.environ["PYCOMM_NCCL_LIB"] = os.environ["PYCOMM_CUDART_LIB"] = build()
        fake = Fake(build(), str(tmp_path), rank, world_size)
        dist.init_process_group(
            "cpu:gloo,cuda:pycomm", store=fake.store, rank=rank, world_size=world_size,
            timeout=timedelta(seconds=20),
        )  # fmt: skip
        t = own(fake)
        dist.all_reduce(t)
        group = dist.group.WORLD
        assert group is not None
        assert find_communicator(group) is None
        gpu = pycomm.get_communicator(device="cuda")
        core.set_stream_source(lambda device: fake.stream)
        gpu.all_reduce(t)
        fake.synchronize()
        dist.destroy_process_group()
        return t, gpu.transport

    for t, transport in run(2, main, init=False):
        assert torch.equal(t, 2 * sum(owns(2), torch.zeros(6)))
        assert transport == "nccl"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_in_words() -> None:
    """The group works; only asking for its CUDA part fails, each time, naming the rank."""

    def main(rank: int, world_size: int) -> Any:
        refused = [attempt(lambda: pycomm.get_communicator(device="cuda")) for _ in range(2)]
        t = torch.ones(3)
        dist.all_reduce(t)
        return refused, t

    for rank, (refused, t) in enumerate(run(2, main)):
        for one in refused:
            assert isinstance(one, Refused)
            assert f"rank {rank}: " in one.message
            assert any(words in one.message for words in ("no GPU can be used", "CUDA runtime"))
        assert t.tolist() == [2.0] * 3
