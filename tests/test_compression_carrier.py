"""Compression over a backend that is not pycomm's: Gloo, as between hosts."""

from __future__ import annotations

import functools
import gc
import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradients import batch, everywhere, net, new_group
from harness import G, attempt, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp

import pycomm
from pycomm.backend import get_communicator
from pycomm.compression import FP16, Averager, HookState, Int8, PowerSGD, TopK, hook
from pycomm.compression.background import Background
from pycomm.compression.carrier import ForeignCarrier, carrier_of
from pycomm.compression.codecs import NAMED
from pycomm.extension import core

CODECS = sorted({(made.format, made().block) for made in NAMED.values()})
COUNTS = [0, 1, 63, 64, 65, 257, 1000, 4097, 20_000]


def bits(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Of all of them."""
    return torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_bits_are_those_of_shared_memory(n: int) -> None:
    """Values and residuals, for lists of any lengths and dtypes, with factors, divisors and chance."""

    def worker(rank: int, n: int) -> None:
        ours, theirs = get_communicator(), ForeignCarrier(new_group("gloo"))
        assert (theirs.rank, theirs.world_size) == (rank, n)
        for codec in (core.Codec(*one) for one in CODECS):
            for count in COUNTS:
                dtype = [torch.float32, torch.float16, torch.bfloat16][count % 3]
                cuts = [count // 3, count - count // 3]
                lists = [
                    [torch.randn(cut, generator=G(rank + 7 * cut)).to(dtype) for cut in cuts]
                    for _ in range(2)
                ]
                residuals = [torch.randn(count, generator=G(rank)) / 100 for _ in range(2)]
                how: dict[str, Any] = {"factor": 0.5, "seed": 5 + rank}
                how["stochastic"] = count % 2 == 1
                keeps = count % 5 > 0
                if not keeps:
                    how["divisor"] = 3.0
                kept = residuals if keeps else [None, None]
                ours.compressed_all_reduce(
                    lists[0], codec, residual=kept[0], algorithm="two_shot", **how
                )
                theirs.compressed_all_reduce(lists[1], codec, residual=kept[1], **how)
                assert torch.equal(bits(lists[0]), bits(lists[1])), (codec.format, count)
                assert torch.equal(*residuals), (codec.format, count)
                assert everywhere(bits(lists[1]))

    run(n, worker, wall=60)


def test_plain_sums() -> None:
    """Of what is not compressed: in float32, whatever the dtype."""

    def worker(rank: int, n: int) -> None:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            tensors = [torch.full((3, 2), 2.0**15, dtype=dtype), torch.ones(5, dtype=dtype)]
            carrier_of(new_group("gloo")).compressed_all_reduce(
                tensors, core.Codec("fp32"), factor=2.0, divisor=2.0 * n
            )
            assert tensors[0].eq(2.0**15).all()  # the sum is no float16
            assert tensors[1].eq(1).all()

    run(3, worker)


def test_all_reduce_and_sync_gradients() -> None:
    """The public calls, on a group of either backend."""

    def worker(rank: int, n: int) -> None:
        gloo = new_group("gloo")
        results = []
        for group in (None, gloo):
            value = torch.arange(300.0) * (rank + 1)
            pycomm.all_reduce(value, "avg", group, compression="bf16")
            assert torch.allclose(value, torch.arange(300.0) * 1.5, rtol=2**-7)
            parameter = nn.Parameter(torch.zeros(40, 40))
            named = [("w", parameter)]
            total = torch.zeros(40, 40)
            for step in range(20):
                parameter.grad = torch.randn(40, 40, generator=G(rank + 2 * step))
                pycomm.sync_gradients(named, group, compression="int8", weight=1.0 + rank)
                total += parameter.grad
            results.append(total)
            parameter.grad = None
            pycomm.sync_gradients(named, group, compression="int8")
            assert parameter.grad is None
        exact = sum(
            torch.randn(40, 40, generator=G(r + 2 * step)) * (1 + r) / 3
            for step in range(20)
            for r in range(2)
        )
        # One step's rounding is left out at the end, not twenty steps': residuals were kept.
        assert all((total - exact).abs().max() < 0.03 for total in results)

    run(2, worker)


def test_residuals_go_with_the_parameters() -> None:
    """sync_gradients keeps none of a list whose first parameter is gone, nor those of another compressor."""

    def worker(rank: int, n: int) -> None:
        from pycomm.compression import lists

        parameter = nn.Parameter(torch.zeros(40, 40))
        for compression in ("int8", "fp8", "fp8"):
            parameter.grad = torch.randn(40, 40, generator=G(rank))
            pycomm.sync_gradients([parameter], compression=compression)
        kept = lists._kept[parameter]
        assert kept.step == 2
        assert kept.residuals().keys() == {"0"}
        assert len(lists._kept) == 1
        del parameter
        gc.collect()
        assert len(lists._kept) == 0

    run(2, worker)


def train(model: nn.Module, rank: int, steps: range) -> list[torch.Tensor]:
    """Gradients of every step."""
    found = []
    for step in steps:
        model.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        found.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    return found


@pytest.mark.parametrize(
    "compressor", [FP16(), Int8(), TopK(0.1), PowerSGD(2)], ids=lambda one: one.format
)
def test_ddp_over_gloo(compressor: Any) -> None:
    """Ours, and torch's with a HookState, a compressor itself, or a state from before the model: the same bits."""

    def worker(rank: int, n: int) -> None:
        gloo = new_group("gloo")
        ours = pycomm.DistributedDataParallel(net(), process_group=gloo, compression=compressor)
        theirs = [TorchDdp(net(), process_group=gloo) for _ in range(2)]
        early = HookState(compressor, None, gloo)
        theirs[0].register_comm_hook(HookState(compressor, theirs[0], gloo), hook)
        theirs[1].register_comm_hook(early, hook)
        exact = TorchDdp(net(), process_group=gloo)
        results = [train(model, rank, range(4)) for model in (ours, *theirs)]
        for a, b, c in zip(*results, strict=True):
            assert torch.equal(a, b)
            if not isinstance(compressor, PowerSGD):  # whose first basis is chosen by name
                assert torch.equal(b, c)
            assert everywhere(a)
        if isinstance(compressor, FP16):
            for a, b in zip(results[0], train(exact, rank, range(4)), strict=True):
                assert torch.allclose(a, b, rtol=2**-9, atol=1e-5)
        if compressor.error_feedback:
            assert set(ours.compression_residuals()) == {"0.weight", "2.weight"}
            assert set(early.residuals()) == {"0", "2"}
            again = HookState(compressor, None, gloo)
            resumed = TorchDdp(ours.module, process_group=gloo)
            resumed.register_comm_hook(again, hook)
            again.load_state_dict(early.state_dict())
            assert torch.equal(
                train(resumed, rank, range(4, 5))[0], train(theirs[1], rank, range(4, 5))[0]
            )
        ours.set_weight(1.0 + rank)
        assert everywhere(train(ours, rank, range(5, 6))[0])
        ours._update_process_group(new_group("pycomm"))
        assert everywhere(train(ours, rank, range(6, 7))[0])

    run(2, worker, wall=60)


@pytest.mark.parametrize("compression", ["int8", TopK(0.1), PowerSGD(2)], ids=str)
def test_buckets_travel_beside_backward(compression: Any) -> None:
    """Rank 1 begins when rank 0's backward has come to its last gradient: with a hook that waits, nobody would."""

    def worker(rank: int, n: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64) for _ in range(4)]
        model = pycomm.DistributedDataParallel(
            nn.Sequential(*layers),
            process_group=new_group("gloo"),
            compression=compression,
            bucket_cap_mb=0.001,
        )
        for step in range(3):
            loss = model(torch.randn(8, 64, generator=G(rank))).square().mean()
            passed = functools.partial(store.set, f"passed {step}", "yes")
            handle = layers[0].weight.register_hook(lambda _, passed=passed: passed())
            if rank == 1:
                store.wait([f"passed {step}"], timedelta(seconds=20))
            loss.backward()
            handle.remove()
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            assert everywhere(torch.cat(gradients))
        assert model._get_ddp_logging_data()["rebuilt_bucket_sizes"].count(",") > 0

    run(2, worker)


def test_an_error_in_the_background_ends_backward() -> None:
    """It is raised where backward waits, once for all buckets of the step; the next step goes on."""

    def worker(rank: int, n: int) -> None:
        gloo = new_group("gloo")
        model = TorchDdp(net(), process_group=gloo, bucket_cap_mb=0.001)
        state = HookState("int8", model, gloo)
        model.register_comm_hook(state, hook)
        train(model, rank, range(1))
        average = state._averager.average
        calls = []

        def broken(*arguments: Any) -> None:
            calls.append(arguments)
            raise pycomm.InvalidArgument("of this test")

        state._averager.average = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(RuntimeError, match="of this test"):
            train(model, rank, range(1, 2))
        assert len(calls) == 1
        state._averager.average = average  # type: ignore[method-assign]
        again = TorchDdp(model.module, process_group=gloo, bucket_cap_mb=0.001)
        again.register_comm_hook(state, hook)
        assert everywhere(train(again, rank, range(2, 3))[0])

    run(2, worker)


def test_a_compressor_is_a_hooks_state() -> None:
    """As accelerate and Lightning hand it over; equal ones of two models keep apart, and nothing after them."""

    def worker(rank: int, n: int) -> None:
        states = [Int8(), Int8()]
        models = [TorchDdp(net()) for _ in states]
        for model, state in zip(models, states, strict=True):
            model.register_comm_hook(state, hook)
        first, second = train(models[0], rank, range(3)), train(models[1], rank, range(3))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        one = pycomm.DistributedDataParallel(net(), compression="int8")
        exact = train(TorchDdp(net()), rank, range(3))
        for a, b in zip(first, exact, strict=True):
            assert 0 < (a - b).norm() < 0.02 * b.norm()
        assert one.compression_residuals().keys() == {"0.weight", "2.weight"}

    run(2, worker)


def test_what_gains_nothing_is_left_alone() -> None:
    """Fewer bytes or none of it: 16 bits for 16-bit gradients, top-k's gathers on many ranks."""

    def worker(rank: int, n: int) -> None:
        half = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
        single = nn.Parameter(torch.zeros(64, 64))
        assert [FP16().gains(p, n) for p in (half, single)] == [False, True]
        assert [Int8().gains(p, n) for p in (half, single)] == [True, True]
        assert [TopK(0.4).gains(single, ranks) for ranks in (2, 3)] == [True, False]
        assert [TopK(0.1).gains(half, ranks) for ranks in (4, 5)] == [True, False]
        assert [PowerSGD(rank).gains(single, n) for rank in (31, 32)] == [True, False]
        for compressor in (FP16(error_feedback=True), TopK(0.6)):
            averager = Averager(compressor, [("w", half), ("v", single)])
            for p in (half, single):
                p.grad = torch.full_like(p, float(rank)) + torch.arange(64.0).to(p.dtype)
            pycomm.sync_gradients([half], compression=averager)
            assert "w" not in averager.residuals()
            assert half.grad is not None
            assert torch.equal(
                half.grad, torch.full_like(half, 0.5) + torch.arange(64.0).bfloat16()
            )

    run(2, worker)


def test_refusals() -> None:
    """In words, before anything is sent."""

    def worker(rank: int, n: int) -> list[Any]:
        gloo = new_group("gloo")
        value = torch.ones(100)
        found = [
            attempt(lambda: pycomm.all_reduce(value, group=gloo, timeout=timedelta(seconds=1))),
            attempt(
                lambda: pycomm.all_reduce(value.double(), group=gloo, compression="int8"),
            ),
            attempt(lambda: pycomm.all_reduce(value, "max", gloo, compression="int8")),
            attempt(lambda: pycomm.all_reduce(value[::2], group=gloo, compression="int8")),
            attempt(
                lambda: pycomm.all_reduce(
                    value, group=gloo, compression="int8", residual=torch.ones(99)
                )
            ),
        ]
        assert value.eq(1).all()
        return found

    for found in run(2, worker):
        for one in found:
            assert "InvalidArgument" in one.kinds, one
        assert "new_group" in found[0].message
        assert "float64" in found[1].message


def test_no_default_group() -> None:
    """Says what to call."""
    with pytest.raises(pycomm.InvalidArgument, match="init_process_group"):
        carrier_of(None)


def test_a_lost_rank_is_told_in_our_words() -> None:
    """With rank, operation and size, and Gloo's own."""

    def worker(rank: int, n: int) -> Any:
        gloo = new_group("gloo")
        value = torch.ones(100_000)
        pycomm.all_reduce(value, group=gloo, compression="int8")
        if rank == 1:
            os._exit(1)
        return attempt(lambda: pycomm.all_reduce(value, group=gloo, compression="int8"))

    found = run(2, worker, may_die=[1])[0]
    assert "Error" in found.kinds
    for words in ("rank 0: all_reduce(count=100000, wire=int8) with ranks [1]", "backend gloo"):
        assert words in found.message, found.message


def test_the_background_leaves_other_threads_alone() -> None:
    """They have as many OpenMP threads as before; its own thread ends with it."""
    before = torch.get_num_threads()
    background = Background()
    future = background.submit(lambda: torch.full((3,), float(torch.get_num_threads())))
    assert future.wait().tolist() == [before] * 3
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [before]
    thread = background._thread
    assert thread is not None
    del background
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
