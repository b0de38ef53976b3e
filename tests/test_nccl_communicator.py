"""NcclCommunicator over the fake NCCL: every operation, streams, groups, graphs, and how communicators come and go."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_nccl import Fake, build
from harness import Refused, attempt, run

import pycomm
from pycomm.extension import core


def ranks(n: int, worker: Any, folder: Path, *args: Any, **options: Any) -> list[Any]:
    """The results of worker(fake, *args) on n ranks that share one fake."""
    library = build()

    def main(rank: int, world_size: int) -> Any:
        return worker(Fake(library, str(folder), rank, world_size), *args)

    return run(n, main, init=False, **options)


FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "int64")


def expected(dtype: str, op: str, n: int) -> list[float]:
    """The reduction of the ranks' [1, 2, 3] + rank, in double precision."""
    parts = np.stack([np.array([1.0, 2.0, 3.0]) + rank for rank in range(n)])
    result = {
        "sum": parts.sum(0),
        "avg": parts.sum(0) / n,
        "min": parts.min(0),
        "max": parts.max(0),
        "product": parts.prod(0),
    }[op]
    return [float(int(x)) for x in result] if dtype in INTEGERS else result.tolist()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_reductions(n: int, tmp_path: Path) -> None:
    """All dtypes and ops that NCCL has, of all_reduce, reduce and reduce_scatter in both forms."""

    def worker(fake: Fake) -> dict[str, Any]:
        comm = fake.communicator()
        done: dict[str, Any] = {}
        for dtype in (*FLOATS, *INTEGERS):
            for op in ("sum", "avg", "min", "max", "product"):
                base = torch.tensor([1, 2, 3]) + fake.rank
                all_reduced, reduced = (base.clone().to(getattr(torch, dtype)) for _ in range(2))
                many = base.repeat(fake.world_size).to(all_reduced.dtype)
                scattered, listed = torch.zeros_like(all_reduced), torch.zeros_like(all_reduced)
                comm.all_reduce(all_reduced, op)
                comm.reduce(reduced, fake.world_size - 1, op)
                comm.reduce_scatter_single(scattered, many, op)
                copies = list(many.clone().chunk(fake.world_size))
                comm.reduce_scatter(listed, copies, op)
                fake.synchronize()
                done[f"{dtype} {op}"] = [
                    x.double().tolist() for x in (all_reduced, reduced, scattered, listed)
                ]
        comm.shutdown()
        return done

    for rank, result in enumerate(ranks(n, worker, tmp_path)):
        assert len(result) == 40
        for name, (all_reduced, reduced, scattered, listed) in result.items():
            dtype, op = name.split()
            right = expected(dtype, op, n)
            if name.startswith(("float16", "bfloat16")):
                right = torch.tensor(right).to(getattr(torch, name.split()[0])).tolist()
            assert all_reduced == pytest.approx(right, rel=1e-6), name
            assert scattered == listed == all_reduced, name
            assert reduced == (
                all_reduced if rank == n - 1 else [1.0 + rank, 2.0 + rank, 3.0 + rank]
            )


def test_what_is_not_plain(tmp_path: Path) -> None:
    """Complex as pairs, bool as 0 and 1, factors of premul_sum in every float type."""

    def worker(fake: Fake) -> list[Any]:
        comm = fake.communicator()
        factor = [0.5, 0.25][fake.rank]
        results = []
        for dtype in (torch.complex64, torch.complex128):
            for op in ("sum", "avg"):
                t = torch.tensor([complex(1, 2), complex(3, -1)], dtype=dtype) * (fake.rank + 1)
                comm.all_reduce(t, op)
                results.append(t)
        for op in ("sum", "product", "min", "max", "band", "bor"):
            t = torch.tensor([True, False, fake.rank == 0])
            comm.all_reduce(t, op)
            results.append(t)
        for dtype in (*(getattr(torch, name) for name in FLOATS), torch.complex64):
            t = torch.tensor([2.0, 6.0]).to(dtype)
            comm.all_reduce(t, "premul_sum", factor=factor)
            results.append(t)
        fake.synchronize()
        comm.shutdown()
        return [t.tolist() for t in results]

    for result in ranks(2, worker, tmp_path):
        assert (
            result[:4]
            == [
                [complex(3, 6), complex(9, -3)],
                [complex(1.5, 3), complex(4.5, -1.5)],
            ]
            * 2
        )
        any_of, all_of = [True, False, True], [True, False, False]
        assert result[4:10] == [any_of, all_of, all_of, any_of, all_of, any_of]
        assert result[10:] == [[1.5, 4.5]] * 5


def test_moves_of_every_dtype(tmp_path: Path) -> None:
    """Broadcast, gathers, scatters, all_to_all with even and uneven parts, messages: bit for bit."""
    dtypes = [getattr(torch, name) for name in core.support_table()]

    def worker(fake: Fake) -> list[bool]:
        comm = fake.communicator()
        n, rank = fake.world_size, fake.rank
        right = []

        def data(count: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
            bits = torch.randint(0, 2, (count * 16,), generator=torch.Generator().manual_seed(seed))
            return bits.to(torch.uint8)[: count * dtype.itemsize].view(dtype).clone()

        def same(a: torch.Tensor, b: torch.Tensor) -> None:
            right.append(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))

        kept = []  # what a stream reads must stay until it has

        def lasting(count: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
            kept.append(data(count, seed, dtype))
            return kept[-1]

        for dtype in dtypes:
            t = data(5, rank, dtype)
            comm.broadcast(t, 1)
            whole = torch.zeros(5 * n, dtype=torch.uint8).to(dtype)
            comm.all_gather_single(whole, lasting(5, 10 + rank, dtype))
            parts = [torch.zeros(2 + r, dtype=torch.uint8).to(dtype) for r in range(n)]
            comm.all_gather(parts, lasting(2 + rank, 20 + rank, dtype))
            gathered = [torch.zeros(1 + r, dtype=torch.uint8).to(dtype) for r in range(n)]
            comm.gather(gathered if rank == 0 else None, lasting(1 + rank, 30 + rank, dtype), 0)
            got = torch.zeros(4 - rank, dtype=torch.uint8).to(dtype)
            comm.scatter(
                got, [lasting(4 - r, 40 + r, dtype) for r in range(n)] if rank == 2 else None, 2
            )
            outputs = [torch.zeros(1 + r + rank, dtype=torch.uint8).to(dtype) for r in range(n)]
            comm.all_to_all(
                outputs, [lasting(1 + r + rank, 50 + 10 * rank + r, dtype) for r in range(n)]
            )
            if rank == 0:
                comm.send(lasting(6, 90, dtype), 2)
            message = torch.zeros(6, dtype=torch.uint8).to(dtype)
            if rank == 2:
                assert comm.recv(message, 0) == 0
            fake.synchronize()
            comm.barrier()
            same(t, data(5, 1, dtype))
            same(whole, torch.cat([data(5, 10 + r, dtype).view(torch.uint8) for r in range(n)]))
            for r in range(n):
                same(parts[r], data(2 + r, 20 + r, dtype))
                same(outputs[r], data(1 + r + rank, 50 + 10 * r + rank, dtype))
                if rank == 0:
                    same(gathered[r], data(1 + r, 30 + r, dtype))
            same(got, data(4 - rank, 40 + rank, dtype))
            if rank == 2:
                same(message, data(6, 90, dtype))
        comm.shutdown()
        return right

    for rank, result in enumerate(ranks(3, worker, tmp_path)):
        assert len(result) == len(dtypes) * (9 + (3 if rank == 0 else 1 if rank == 2 else 0))
        assert all(result)


def test_in_place_and_empty(tmp_path: Path) -> None:
    def worker(fake: Fake) -> list[Any]:
        comm = fake.communicator()
        whole = torch.full((4,), -1.0)
        whole[2 * fake.rank : 2 * fake.rank + 2] = fake.rank
        comm.all_gather_single(whole, whole[2 * fake.rank : 2 * fake.rank + 2])
        nothing = torch.zeros(0)
        comm.all_reduce(nothing)
        comm.broadcast(nothing, 0)
        uneven = torch.zeros(0 if fake.rank == 0 else 3)
        inputs = [torch.zeros(0), torch.ones(3)]
        comm.reduce_scatter(uneven, inputs)
        counts = [[0, 2], [1, 0]]
        out = torch.zeros(1 if fake.rank == 0 else 2)
        sent = torch.full((sum(counts[fake.rank]),), float(fake.rank + 1))
        comm.all_to_all_single(
            out, sent, [counts[r][fake.rank] for r in range(2)], counts[fake.rank]
        )
        fake.synchronize()
        comm.shutdown()
        return [whole.tolist(), uneven.tolist(), out.tolist()]

    first, second = ranks(2, worker, tmp_path)
    assert first == [[0, 0, 1, 1], [], [2]]
    assert second == [[0, 0, 1, 1], [2, 2, 2], [1, 1]]


REFUSED: list[tuple[str, Any, str]] = [
    ("int16", lambda c, t: c.all_reduce(t.to(torch.int16)), "NCCL has no 16-bit integers"),
    ("band", lambda c, t: c.all_reduce(t.to(torch.int32), "band"), "no bitwise operations"),
    ("bool bxor", lambda c, t: c.all_reduce(t.to(torch.bool), "bxor"), "no bitwise operations"),
    (
        "float8 factor",
        lambda c, t: c.all_reduce(t.to(torch.float8_e5m2), "premul_sum", factor=0.3),
        "round the factor to 8 bits",
    ),
    ("algorithm", lambda c, t: c.all_reduce(t, algorithm="ring"), "NCCL chooses its algorithm"),
    ("tag", lambda c, t: c.send(t, 0, tag=3), "have no tags"),
    ("any source", lambda c, t: c.recv(t), "cannot receive from any rank"),
    ("monitored", lambda c, t: c.monitored_barrier(), "operation of CPU tensors"),
    ("latency", lambda c, t: c.flag_latency_ns(), "shared memory's"),
    ("peer", lambda c, t: c.send(t, 5), "must be below the world size 1"),
    ("strides", lambda c, t: c.all_reduce(torch.ones(4, 4).t()), "not contiguous"),
    ("end of nothing", lambda c, t: c.end_group(), "no group of calls is open"),
]


@pytest.mark.parametrize(("name", "call", "words"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refused_before_anything_is_sent(name: str, call: Any, words: str, tmp_path: Path) -> None:
    """InvalidArgument in words, and the communicator goes on."""
    fake = Fake(build(), str(tmp_path), 0, 1)
    comm = fake.communicator()
    t = torch.ones(4)
    with pytest.raises((pycomm.InvalidArgument, pycomm.Error), match=words):
        call(comm, t)
    comm.all_reduce(t)
    comm.shutdown()


def test_devices(tmp_path: Path) -> None:
    """A tensor in host memory, on another device than its fellows, or than the group's."""
    fake = Fake(build(), str(tmp_path), 0, 1)
    comm = fake.communicator()
    bound = fake.communicator(device=0)
    host, other = torch.ones(64), torch.ones(64)
    fake.calls.fake_place(ctypes.c_void_p(host.data_ptr()), 256, -1)
    fake.calls.fake_place(ctypes.c_void_p(other.data_ptr()), 256, 1)
    with pytest.raises(pycomm.InvalidArgument, match="not in GPU memory"):
        comm.all_reduce(host)
    with pytest.raises(pycomm.InvalidArgument, match="different devices, cuda:0 and cuda:1"):
        comm.all_gather_single(other, torch.ones(64))
    with pytest.raises(
        pycomm.InvalidArgument, match="on cuda:1, but this rank's group is bound to"
    ):
        bound.all_reduce(other)
    with pytest.raises(pycomm.InvalidArgument, match="no device 7; this process sees 2"):
        fake.communicator(device=7)
    assert comm._comm_state(0) == "none"
    comm.all_reduce(other)
    assert (comm._comm_state(0), comm._comm_state(1)) == ("none", "ready")
    comm.shutdown()
    bound.shutdown()
    host.fill_(0)  # they lived until here


def test_asynchronous_operations_keep_their_order(tmp_path: Path) -> None:
    """They start after what is on the caller's stream; wait() orders that stream and not the host."""

    def worker(fake: Fake) -> list[Any]:
        comm = fake.communicator()
        comm.barrier()
        word = ctypes.c_int(0)
        t = torch.ones(3)
        fake.calls.fake_block(ctypes.c_void_p(fake.stream), ctypes.byref(word))
        work = comm.all_reduce(t, async_op=True)
        before = (work.is_done(), t.tolist())
        work.wait()  # returns although nothing has happened
        state = comm.records(fake.rank)[-1]["state"]
        comm.all_reduce(t)  # on the caller's stream, so after the first
        word.value = 1
        fake.synchronize()
        work.synchronize()
        done = work.is_done()
        after = t.tolist()
        records = [r["state"] for r in comm.records(fake.rank)]
        stats = comm.stats()
        comm.shutdown()
        return [before, state, done, after, records, stats["operations"]]

    for before, state, done, after, records, operations in ranks(2, worker, tmp_path):
        assert before == (False, [1, 1, 1])
        assert state == "scheduled"
        assert done
        assert after == [4, 4, 4]
        assert records == ["completed"] * 3
        assert operations == 3


def test_tensors_live_until_the_operation_is_done(tmp_path: Path) -> None:
    """An input that the caller drops stays; afterwards it goes."""
    import gc
    import weakref

    def worker(fake: Fake) -> list[Any]:
        comm = fake.communicator()
        word = ctypes.c_int(0)
        tensor = torch.ones(3)
        alive = weakref.ref(tensor)
        fake.calls.fake_block(ctypes.c_void_p(fake.stream), ctypes.byref(word))
        work = comm.all_reduce(tensor, async_op=True)
        del tensor
        gc.collect()
        held = alive() is not None
        word.value = 1
        work.synchronize()
        comm.shutdown()
        gc.collect()
        return [held, alive() is None]

    assert ranks(2, worker, tmp_path) == [[True, True]] * 2


def test_groups(tmp_path: Path) -> None:
    """Sends both ways, and several collectives, as one piece of work; one that is refused leaves no trace."""

    def worker(fake: Fake) -> list[Any]:
        comm = fake.communicator()
        peer = 1 - fake.rank
        out, got = torch.full((3,), float(fake.rank)), torch.zeros(3)
        comm.begin_group()
        again = attempt(comm.begin_group)
        comm.send(out, peer, async_op=True)
        comm.recv(got, peer, async_op=True)
        work = comm.end_group(async_op=True)
        work.synchronize()
        a, b = torch.ones(2), torch.ones(2, dtype=torch.int32)
        comm.begin_group()
        comm.all_reduce(a)
        refused = attempt(lambda: comm.all_reduce(b, "band"))
        comm.all_reduce(b, "max")
        comm.broadcast(got, 1)
        comm.end_group()
        fake.synchronize()
        comm.begin_group()
        nothing = comm.end_group()
        sequence = comm.sequence
        comm.shutdown()
        return [got.tolist(), a.tolist(), b.tolist(), again, refused, nothing, sequence]

    for result in ranks(2, worker, tmp_path):
        got, a, b, again, refused, nothing, sequence = result
        assert (got, a, b) == ([0, 0, 0], [2, 2], [1, 1])
        assert isinstance(again, Refused)
        assert "open already" in again.message
        assert isinstance(refused, Refused)
        assert nothing is None
        assert sequence == 3


def test_graphs(tmp_path: Path) -> None:
    """A captured collective runs with every launch of the graph, on both kinds of stream."""

    def worker(fake: Fake) -> list[Any]:
        comm = fake.communicator()
        comm.connect()
        t, u = torch.ones(3), torch.ones(3)
        stream = ctypes.c_void_p(fake.stream)
        fake.calls.fake_begin_capture(stream)
        comm.all_reduce(t)
        work = comm.all_reduce(u, async_op=True)
        work.wait()
        graph = ctypes.c_void_p(fake.calls.fake_end_capture(stream))
        captured = (t.tolist(), u.tolist())
        for _ in range(3):
            fake.calls.fake_launch_graph(graph, stream)
        fake.synchronize()
        comm.all_reduce(t)
        fake.synchronize()
        comm.shutdown()
        return [captured, t.tolist(), u.tolist()]

    for captured, t, u in ranks(2, worker, tmp_path):
        assert captured == ([1, 1, 1], [1, 1, 1])
        assert t == [16, 16, 16]
        assert u == [8, 8, 8]


@pytest.mark.parametrize("blocking", [False, True])
def test_in_progress_for_a_while(blocking: bool, tmp_path: Path) -> None:
    """A call that NCCL takes in slowly is waited for; a blocking communicator does the same work."""

    def worker(fake: Fake) -> list[float]:
        fake.fault("in_progress", 0, 450)
        comm = fake.communicator(blocking=blocking, min_ctas=1, max_ctas=8, comm_name="pipeline")
        t = torch.ones(2)
        for _ in range(3):
            comm.all_reduce(t)
        fake.synchronize()
        comm.shutdown()
        return t.tolist()

    assert ranks(2, worker, tmp_path) == [[8.0, 8.0]] * 2


# how communicators come and go


@pytest.mark.parametrize("share", [False, True])
def test_split(share: bool, tmp_path: Path) -> None:
    """By color, ordered by key; a negative color is in none; the children work and end by themselves."""

    def worker(fake: Fake) -> Any:
        comm = fake.communicator(split_share=share)
        color = [0, 1, 0, -1][fake.rank]
        part = comm.split(color, -fake.rank)
        result: Any = None
        if part is not None:
            t = torch.tensor([float(fake.rank)])
            part.all_reduce(t)
            fake.synchronize()
            result = (part.rank, part.world_size, t.item())
        whole = torch.ones(1)
        comm.all_reduce(whole)
        fake.synchronize()
        if part is not None:
            part.shutdown()
        comm.shutdown()
        return result, whole.item()

    assert ranks(4, worker, tmp_path) == [
        ((1, 2, 2.0), 4),
        ((0, 1, 1.0), 4),
        ((0, 2, 2.0), 4),
        (None, 4),
    ]


@pytest.mark.parametrize("version", ["23007", "22105"])
def test_shrink_and_grow(version: str, tmp_path: Path) -> None:
    """By NCCL where it can, else by meeting afresh: the same for the caller."""

    def worker(fake: Fake) -> Any:
        n = 3
        fake.world_size = 3
        if fake.rank < n:
            comm = fake.communicator()
            t = torch.ones(1)
            comm.all_reduce(t)
            big = comm.grow(4)
        else:
            big = core.NcclCommunicator.join(
                fake.api(), fake.store, 3, 4, pycomm_timeout(), core.NcclSettings()
            )
        u = torch.ones(1)
        big.all_reduce(u)
        fake.synchronize()
        if fake.rank == 1:
            big.barrier()
            return u.item(), None
        big.barrier()
        small = big.shrink([1])
        v = torch.tensor([float(fake.rank)])
        small.all_reduce(v)
        fake.synchronize()
        small.shutdown()
        return u.item(), (small.rank, small.world_size, v.item())

    def pycomm_timeout() -> Any:
        from datetime import timedelta

        return timedelta(seconds=8)

    results = ranks(4, worker, tmp_path, env={"FAKE_NCCL_VERSION": version})
    assert results == [(4, (0, 3, 5)), (4, None), (4, (1, 3, 5)), (4, (2, 3, 5))]


def test_registered_memory(tmp_path: Path) -> None:
    """Buffers and windows are given back before NCCL ends; a window needs an aligned address."""

    def worker(fake: Fake) -> list[Any]:
        comm = fake.communicator()
        t = torch.ones(1024)
        buffer = comm.register_buffer(t.data_ptr(), 4096)
        memory = ctypes.create_string_buffer(3 * 4096)
        aligned = -(-ctypes.addressof(memory) // 4096) * 4096
        odd = attempt(lambda: comm.register_window(aligned + 8, 64))
        window = comm.register_window(aligned, 4096)
        comm.all_reduce(t)
        fake.synchronize()
        buffer.close()
        window.close()
        comm.shutdown()
        return [odd, t[0].item()]

    for odd, value in ranks(2, worker, tmp_path):
        assert isinstance(odd, Refused)
        assert "multiple of 4096" in odd.message
        assert value == 2


def test_windows_need_a_newer_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_VERSION", "22105")
    fake = Fake(build(), str(tmp_path), 0, 1)
    comm = fake.communicator(comm_name="dp")  # a name is left out there
    with pytest.raises(
        pycomm.InvalidArgument, match=r"needs NCCL 2.27.0 or later, but .* is 2.21.5"
    ):
        comm.register_window(4096, 4096)
    for setting in ("traffic_class", "cta_policy", "nvls_ctas", "collnet_enable"):
        with pytest.raises(pycomm.InvalidArgument, match=f"the setting {setting} needs NCCL 2.2"):
            fake.communicator(**{setting: 1})
    with pytest.raises(pycomm.InvalidArgument, match=r"reducing 8-bit floats needs NCCL 2\.24\.0"):
        comm.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
    t = torch.ones(2)
    comm.all_reduce(t)
    comm.shutdown()


def test_the_environment_chooses_the_library(tmp_path: Path) -> None:
    """PYCOMM_NCCL_LIB, PYCOMM_CUDART_LIB, PYCOMM_CHECK and PYCOMM_HEARTBEAT_MS reach the communicator."""

    def worker(fake: Fake) -> Any:
        from datetime import timedelta

        from pycomm.nccl import create_nccl_communicator, load_api

        comm = create_nccl_communicator(
            fake.store, fake.rank, fake.world_size, timedelta(seconds=20), max_ctas=4
        )
        t = torch.ones(2 + fake.rank)
        result = attempt(lambda: comm.all_reduce(t))
        comm.shutdown()
        return result, load_api().path

    library = build()
    env = {
        "PYCOMM_NCCL_LIB": library,
        "PYCOMM_CUDART_LIB": library,
        "PYCOMM_CHECK": "full",
        "PYCOMM_HEARTBEAT_MS": "50",
    }
    for result, path in ranks(2, worker, tmp_path, env=env):
        assert path == library
        assert isinstance(result, Refused)
        assert result.kinds[0] == "MismatchError"


def test_what_was_stopped_never_counts_as_done(tmp_path: Path) -> None:
    """A kernel ends when NCCL is stopped, as if it had worked; whoever polls just then must not believe it."""

    def worker(fake: Fake) -> list[str]:
        import torch.distributed as dist

        seen = []
        for turn in range(12):
            comm = fake.communicator(store=dist.PrefixStore(str(turn), fake.store))
            comm.barrier()
            fake.fault("kernel_hang", 2)
            t = torch.ones(2)
            work = attempt(lambda: comm.all_reduce(t, async_op=True))  # noqa: B023
            if fake.rank == turn % 2:
                comm.abort("enough")
            result = work if isinstance(work, Refused) else attempt(work.synchronize)
            seen.append(result.kinds[0] if isinstance(result, Refused) else "done")
            fake.calls.fake_clear_faults()
            comm.shutdown()
        return seen

    assert ranks(2, worker, tmp_path) == [["AbortedError"] * 12] * 2


def test_after_shutdown(tmp_path: Path) -> None:
    fake = Fake(build(), str(tmp_path), 0, 1)
    comm = fake.communicator()
    comm.all_reduce(torch.ones(2))
    comm.shutdown()
    comm.shutdown()
    with pytest.raises(pycomm.AbortedError, match="has been shut down"):
        comm.all_reduce(torch.ones(2))


def test_the_process_ends_without_destroying(tmp_path: Path) -> None:
    """A rank that just returns leaves NCCL to its process's end, with operations under way."""

    def worker(fake: Fake) -> bool:
        comm = fake.communicator()
        comm.barrier()
        fake.fault("kernel_hang")
        comm.all_reduce(torch.ones(3), async_op=True)
        globals()["_kept"] = comm  # to the interpreter's end
        return True

    assert ranks(2, worker, tmp_path) == [True, True]
