"""TopK and PowerSGD: what arrives, what stays, and that both survive infinities, checkpoints and other world sizes."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from gradients import batch, everywhere, load, net, new_group, save
from harness import G, attempt, refused, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp

import pycomm
from pycomm import compression
from pycomm.backend import get_communicator
from pycomm.compression import Averager, HookState, Int8, PowerSGD, TopK, hook, top_k
from pycomm.errors import InvalidArgument

BOTH: Final = (TopK(0.05), PowerSGD(rank=2))
WEIGHTS: Final = {"0.weight", "2.weight"}  # of the net below, large enough to be compressed


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of it, that must be there."""
    assert parameter.grad is not None
    return parameter.grad.clone()


def backward(model: nn.Module, rank: int, step: int) -> dict[str, torch.Tensor]:
    """The gradients of a step by parameter name."""
    model.zero_grad()
    model(batch(rank, step)).square().mean().backward()
    module = getattr(model, "module", model)
    return {name: grad_of(p) for name, p in module.named_parameters()}


def mean_gradients(n: int, step: int) -> dict[str, torch.Tensor]:
    """Of the plain module, in float64 over the ranks' batches."""
    every = [backward(net(), rank, step) for rank in range(n)]
    return {name: torch.stack([one[name].double() for one in every]).mean(0) for name in every[0]}


class Lists:
    """Gradients that are averaged without a model: one matrix a step, named m."""

    def __init__(self, compressor: compression.Compressor) -> None:
        self.parameter = torch.empty(0)
        self.averager = Averager(compressor)

    def average(self, gradient: torch.Tensor, share: float | None = None) -> torch.Tensor:
        """What arrives."""
        arrived = gradient.clone()
        if self.averager.step == 0:
            self.parameter = torch.empty_like(gradient)
            self.averager = Averager(self.averager.compressor, [("m", self.parameter)])
        self.averager.average(get_communicator(), [self.parameter], [arrived], share)
        self.averager.step += 1
        return arrived

    @property
    def residual(self) -> torch.Tensor:
        """This rank's."""
        return self.averager.residuals()["m"]


def values_of(rank: int, step: int, n: int = 24, m: int = 20) -> torch.Tensor:
    """A matrix."""
    return torch.randn(n, m, generator=G(77 * step + rank))


# ---- TopK -----------------------------------------------------------------------------------------------------------


def select(values: torch.Tensor, k: int) -> torch.Tensor:
    """The reference: values of largest magnitude, of equals the lower indices, all others zero."""
    flat = values.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda i: (-abs(flat[i]), i))[:k]
    sent = torch.zeros(len(flat), dtype=values.dtype)
    sent[order] = values.flatten()[order]
    return sent.view(values.shape)


def test_largest() -> None:
    """Exactly k, of equals the lower indices, also of large tensors, constant ones, and of what is not finite."""
    for count, k in ((1, 1), (10, 1), (10, 10), (1000, 37), (70_000, 1), (70_000, 700), (70_000, 69_999)):  # fmt: skip
        for make in (
            lambda n: torch.randn(n, generator=G(1)),
            lambda n: torch.randint(-3, 4, (n,), generator=G(2)).float(),  # many are equal
            lambda n: torch.ones(n),
            lambda n: torch.zeros(n),
            lambda n: torch.where(torch.arange(n) == n // 2, 5.0, 0.0),
        ):
            values = make(count)
            chosen = top_k.largest(values, k)
            assert len(chosen) == k == len(set(chosen.tolist()))
            order = sorted((-abs(value), i) for i, value in enumerate(values.tolist()))[:k]
            assert sorted(chosen.tolist()) == sorted(i for _, i in order)
    broken = torch.zeros(100_000)
    broken[[70_000, 80_000, 90_000]] = torch.tensor([math.nan, -math.inf, 1e30])
    assert sorted(top_k.largest(broken, 2).tolist()) == [70_000, 80_000]
    assert sorted(top_k.largest(broken, 4).tolist()) == [0, 70_000, 80_000, 90_000]
    # A sample that sees only large values suggests a threshold which too few reach.
    comb = torch.zeros(4 << 14)
    comb[::4] = 1.0
    assert sorted(top_k.largest(comb, 20_000).tolist())[:6] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("ratio", [1e-9, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_top_k_against_reference(n: int, ratio: float) -> None:
    """Over steps: the sum of what the reference selects in float64, from gradient / n plus residual; conserved."""

    def worker(rank: int, n: int) -> None:
        lists = Lists(TopK(ratio, small=True, always=True))
        k = max(1, math.ceil(ratio * 480))
        residuals = [torch.zeros(24, 20) for _ in range(n)]  # of all ranks, here
        for step in range(5):
            arrived = lists.average(values_of(rank, step))
            sums = [values_of(r, step) / n + residuals[r] for r in range(n)]
            sent = [select(one, k) for one in sums]
            want = torch.stack([one.double() for one in sent]).sum(0)
            assert (arrived.double() - want).abs().max() <= 1e-6
            assert int(sent[rank].count_nonzero()) == k
            residuals = [one - part for one, part in zip(sums, sent, strict=True)]
            # Exactly: what was sent has left the residual, what was not is all there.
            assert torch.equal(lists.residual, residuals[rank].flatten())
            assert everywhere(arrived)
        assert bool(lists.residual.any()) == (ratio < 1)

    run(n, worker)


def test_ties_and_wide_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values are sent in order of their indices, step by step; so they are with 8 bytes for an index."""

    def worker(rank: int, n: int, limit: int) -> None:
        top_k._INDEX_LIMIT = limit
        assert top_k._index_dtype(21) == (torch.int64 if limit < 21 else torch.int32)
        lists = Lists(TopK(1 / 3, small=True, always=True))
        sign = torch.tensor([1.0, -1.0, 1.0] * 7)[:, None]
        gradient = sign * (1.0 if rank == 0 else 3.0)
        arrived = lists.average(gradient)
        assert torch.equal(arrived[:7], 2 * sign[:7])
        assert not arrived[7:].any()
        assert torch.equal(lists.residual[7:], gradient[7:, 0] / 2)
        # Now the others are twice as large, and the first ones as large as they were.
        arrived = lists.average(gradient)
        assert torch.equal(arrived[7:14], 4 * sign[7:14])
        assert not arrived[:7].any()
        assert not arrived[14:].any()

    for limit in (20, 2**31):
        run(2, worker, limit)


def test_top_k_of_half_precision_and_strides() -> None:
    """Sums are float32's, and rounded once; residuals have what does not fit; strides do not matter."""

    def worker(rank: int, n: int) -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            lists = Lists(TopK(0.1, small=True, always=True))
            own = [values_of(r, 0).to(dtype) for r in range(n)]
            arrived = own[rank].t().contiguous().t()
            lists.averager.average(get_communicator(), [arrived], [arrived])
            sent = [select(one.float() / n, 48) for one in own]
            assert torch.equal(arrived, (sent[0] + sent[1]).to(dtype))
            residual = lists.averager.residuals()["0"]
            assert torch.equal(residual, (own[rank].float() / n - sent[rank]).flatten())

    run(2, worker)


# ---- PowerSGD -------------------------------------------------------------------------------------------------------


def reference_step(
    sums: list[torch.Tensor], basis: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """In float64: what arrives, the residuals, and the next basis, of which only the span matters."""
    p = torch.linalg.qr(torch.stack([one @ basis for one in sums]).sum(0)).Q
    q = torch.stack([one.t() @ p for one in sums]).sum(0)
    arrived = p @ q.t()
    return arrived, [one - arrived / len(sums) for one in sums], q


@pytest.mark.parametrize("rank_of_matrix", [1, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_power_sgd_against_reference(n: int, rank_of_matrix: int) -> None:
    """Near the method in float64 over steps, with warm start and residuals; nothing is lost; equal bits."""

    def worker(rank: int, n: int) -> None:
        compressor = PowerSGD(rank_of_matrix, small=True, seed=5)
        lists = Lists(compressor)
        basis = compressor._first_basis("m", 20).double()
        residuals = [torch.zeros(24, 20, dtype=torch.float64) for _ in range(n)]
        for step in range(5):
            arrived = lists.average(values_of(rank, step))
            before = lists.residual.clone()
            sums = [values_of(r, step).double() / n + residuals[r] for r in range(n)]
            want, residuals, basis = reference_step(sums, basis)
            assert torch.linalg.matrix_rank(arrived, rtol=1e-5) == rank_of_matrix
            assert (arrived - want).abs().max() < 1e-4
            assert (before.view(24, 20) - residuals[rank]).abs().max() < 1e-4
            left = lists.residual.clone()
            dist.all_reduce(left)
            assert (sum(sums) - arrived - left.view(24, 20)).abs().max() < 1e-5
            assert everywhere(arrived)

    run(n, worker)


def test_power_sgd_is_exact_where_it_can_be() -> None:
    """A mean of rank 2 arrives in one step by rank 2; residuals are what ranks had beside it."""

    def worker(rank: int, n: int) -> None:
        lists = Lists(PowerSGD(2, small=True))
        left = torch.randn(30, 2, generator=G(1))
        mean = left @ torch.randn(2, 50, generator=G(2))
        noise = torch.randn(30, 50, generator=G(3)) * (1 if rank == 0 else -1)
        arrived = lists.average(mean + noise)
        assert (arrived - mean).abs().max() < 1e-4
        assert (lists.residual.view(30, 50) - noise / 2).abs().max() < 1e-4

    run(2, worker)


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1.0, 1e12, 1e25])
def test_power_sgd_at_any_scale(scale: float) -> None:
    """Nothing overflows or vanishes on the way: bases are orthonormal."""

    def worker(rank: int, n: int) -> None:
        lists, same = Lists(PowerSGD(3, small=True)), Lists(PowerSGD(3, small=True))
        for step in range(3):
            got = lists.average(values_of(rank, step) * scale)
            want = same.average(values_of(rank, step))
            assert (got / scale - want).abs().max() < 1e-3

    run(2, worker)


def test_power_sgd_finds_what_is_new() -> None:
    """After gradients of rank 1, or with nothing in the first rows and columns, other directions are found."""

    def worker(rank: int, n: int) -> None:
        lists = Lists(PowerSGD(3, small=True, error_feedback=False))
        one = torch.zeros(24, 20)
        one[0, 0] = 1.0
        for _ in range(3):
            assert (lists.average(one) - one).abs().max() < 1e-6
        other = torch.zeros(24, 20)
        other[-3:, -3:] = torch.eye(3)
        for _ in range(3):
            arrived = lists.average(other)
        assert (arrived - other).abs().max() < 1e-4
        assert not lists.average(torch.zeros(24, 20)).any()
        assert (lists.average(other) - other).abs().max() < 1e-4

    run(2, worker)


def test_equal_bits_with_other_thread_counts() -> None:
    """Ranks compute the products alone, of equal values: with 1, 2 and 3 threads alike."""

    def worker(rank: int, n: int) -> None:
        torch.set_num_threads(rank + 1)
        for compressor in (TopK(0.01), PowerSGD(4), PowerSGD(9)):
            lists = Lists(compressor)
            for step in range(3):
                assert everywhere(lists.average(values_of(rank, step, 777, 501)))

    run(3, worker, wall=60)


# ---- both -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", BOTH, ids=["top-k", "low rank"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_ddp(n: int, compressor: Any) -> None:
    """Over rebuilt buckets nothing is lost, bits are equal, and small parameters are those without compression."""

    def worker(rank: int, n: int) -> None:
        model = pycomm.DistributedDataParallel(net(), compression=compressor, bucket_cap_mb=0.001)
        exact = pycomm.DistributedDataParallel(net())
        assert model.compression_residuals().keys() == WEIGHTS
        sent = {name: torch.zeros(p.shape) for name, p in model.module.named_parameters()}
        came = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in sent.items()}
        for step in range(6):
            got, plain, want = (
                backward(model, rank, step), backward(exact, rank, step), mean_gradients(n, step)
            )  # fmt: skip
            assert everywhere(*got.values())
            for name, gradient in got.items():
                assert torch.equal(gradient, plain[name]) == (name not in WEIGHTS)
                sent[name] += gradient
                came[name] += want[name]
        for name, residual in model.compression_residuals().items():
            left = residual.clone()
            dist.all_reduce(left)
            assert left.abs().max() > 1e-4
            assert (sent[name] + left.view(sent[name].shape) - came[name]).abs().max() < 1e-6

    run(n, worker)


def broken(kind: float, rank: int, at: int) -> torch.Tensor:
    """A matrix in which one value on one rank is not finite."""
    values = values_of(rank, 9)
    if rank == at:
        values[3, 4] = kind
    return values


@pytest.mark.parametrize("kind", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("compressor", BOTH, ids=["top-k", "low rank"])
def test_infinity_and_nan_are_forgotten(compressor: Any, kind: float) -> None:
    """They reach all ranks in their step, on whichever they are; the next one is as if that had not been."""

    def worker(rank: int, n: int) -> None:
        for at in range(n):
            for chosen in (
                compressor,
                type(compressor)(1e-9 if "ratio" in vars(compressor) else 1),
            ):
                one, other = (Lists(replace(chosen, small=True)) for _ in range(2))
                for step in range(2):
                    one.average(values_of(rank, step))
                    other.average(values_of(rank, step))
                arrived = one.average(broken(kind, rank, at))
                assert not arrived.isfinite().all()
                assert everywhere(arrived)
                assert torch.equal(one.residual, other.residual)
                for step in (2, 3):
                    got = one.average(values_of(rank, step))
                    assert got.isfinite().all()
                    assert torch.equal(got, other.average(values_of(rank, step)))
                    assert torch.equal(one.residual, other.residual)
            # A residual that is broken itself, such as one of a damaged checkpoint, is given up.
            one.residual[5] = kind if rank == at else 1.0
            assert not one.average(values_of(rank, 4)).isfinite().all()
            assert one.average(values_of(rank, 5)).isfinite().all()

    run(2, worker)


@pytest.mark.parametrize("compressor", BOTH, ids=["top-k", "low rank"])
def test_infinity_in_ddp(compressor: Any) -> None:
    """An infinity on rank 1 is in the gradients of rank 0; then training goes on, with finite residuals."""

    def worker(rank: int, n: int) -> None:
        model = pycomm.DistributedDataParallel(net(), compression=compressor)
        backward(model, rank, 0)
        model.zero_grad()
        (model(batch(rank, 1)).sum() * (math.inf if rank == 1 else 1.0)).backward()
        for name, p in model.module.named_parameters():
            assert not p.grad.isfinite().all(), name
        got = backward(model, rank, 2)
        assert everywhere(*got.values())
        assert all(gradient.isfinite().all() for gradient in got.values())
        assert all(residual.isfinite().all() for residual in model.compression_residuals().values())

    run(2, worker)


@pytest.mark.parametrize("compressor", [*BOTH, Int8()], ids=["top-k", "low rank", "int8"])
def test_unused_parameters_keep_their_residuals(compressor: Any) -> None:
    """Those that no rank used send nothing, as the Reducer drops what arrives; those that one rank used do."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(40, 40), nn.Linear(40, 40)

        def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
            """With one of the layers, or both."""
            return sum(layer(x).square().mean() for layer in (getattr(self, name) for name in use))

    def worker(rank: int, n: int) -> None:
        torch.manual_seed(0)
        model = pycomm.DistributedDataParallel(
            Two(), compression=compressor, find_unused_parameters=True
        )
        kept = []
        for use in ("ab", "a", "ab" if rank == 0 else "a"):
            model.zero_grad()
            model(batch(rank, 0), use).backward()
            kept.append(model.compression_residuals()["b.weight"].clone())
            if use == "a" and len(kept) == 2:
                assert model.module.b.weight.grad is None
        assert kept[0].any()
        assert torch.equal(kept[0], kept[1])
        if rank == 0 or not isinstance(
            compressor, Int8
        ):  # which waits for a gradient of its own rank
            assert not torch.equal(kept[1], kept[2])
        assert everywhere(model.module.b.weight.grad)

    run(2, worker)


def test_warm_up_and_exclusion() -> None:
    """Steps and parameters that are left alone get the bits of no compression; so do matrices that would grow."""

    def worker(rank: int, n: int) -> None:
        for make in (functools.partial(TopK, 0.01), functools.partial(PowerSGD, 2)):
            for compressor, want in (
                (make(warmup_steps=2), WEIGHTS),
                (make(never_compress=["^0[.]"]), {"2.weight"}),
                (make(never_compress=lambda name, p: p.shape[0] == 32), {"0.weight"}),
                (make(least_count=2500), {"0.weight"}),
                (PowerSGD(22), {"0.weight"}),  # (32 + 64) * 22 > 32 * 64
                (PowerSGD(30), set()),
            ):
                exact = pycomm.DistributedDataParallel(net())
                model = pycomm.DistributedDataParallel(net(), compression=compressor)
                assert model.compression_residuals().keys() == want
                for step in range(3):
                    got, plain = backward(model, rank, step), backward(exact, rank, step)
                    differ = {name for name in got if not torch.equal(got[name], plain[name])}
                    assert differ == (set() if step < compressor.warmup_steps else want)

    run(2, worker, wall=60)


@pytest.mark.parametrize("compressor", [*BOTH, Int8()], ids=["top-k", "low rank", "int8"])
def test_modes_of_the_reducer(compressor: Any) -> None:
    """All are allowed: the same gradients as without; accumulation, weights, pickling, new groups."""

    def worker(rank: int, n: int) -> None:
        def make(**arguments: Any) -> Any:
            return pycomm.DistributedDataParallel(net(), compression=compressor, **arguments)

        near = 1e-2 if isinstance(compressor, Int8) else 1e-6  # who sums what differs
        plain = make()
        models = [
            make(find_unused_parameters=True), make(static_graph=True), make(gradient_as_bucket_view=True),
            make(overlap=False), pickle.loads(pickle.dumps(make())), make(process_group=new_group("gloo")),
        ]  # fmt: skip
        renewed = pickle.loads(pickle.dumps(models[0]))
        models.append(renewed)
        for step in range(3):
            want = backward(plain, rank, step)
            for model in models:
                got = backward(model, rank, step)
                assert all(torch.allclose(got[name], want[name], atol=near) for name in want)
        plain._update_process_group(new_group())
        plain.zero_grad()
        with plain.no_sync():
            plain(batch(rank, 3)).square().mean().backward()
        assert not everywhere(plain.module[0].weight.grad)
        plain(batch(rank, 4)).square().mean().backward()
        assert everywhere(plain.module[0].weight.grad)

    run(2, worker)


def test_refusals() -> None:
    """In words."""

    def worker(rank: int, n: int) -> list[Any]:
        def first(module: nn.Module | None = None, **arguments: Any) -> Any:
            arguments.setdefault("compression", TopK(0.1))
            model = pycomm.DistributedDataParallel(module or net(), **arguments)
            return model(batch(rank, 0).to(next(model.parameters()).dtype))

        joining = pycomm.DistributedDataParallel(net(), compression=TopK(0.1))

        def join() -> None:
            with joining.join():
                joining(batch(rank, 0))

        other = pycomm.DistributedDataParallel(net(), compression=TopK(0.1))
        return [
            attempt(lambda: first(net().double())),
            attempt(lambda: first(nn.Embedding(9, 9, sparse=True))),
            attempt(lambda: first(overlap=True)),
            attempt(lambda: other.register_comm_hook(None, hook)),
            attempt(lambda: pycomm.all_reduce(torch.ones(3), compression=TopK(0.1))),
            attempt(join),
        ]

    for found in zip(*run(2, worker), strict=True):
        assert refused(found)
        assert all("InvalidArgument" in one.kinds for one in found), found
    for wrong in (
        lambda: TopK(0),
        lambda: TopK(1.01),
        lambda: TopK(math.nan),
        lambda: PowerSGD(0),
        lambda: TopK(0.1, warmup_steps=-1),
    ):
        with pytest.raises(InvalidArgument):
            wrong()
    for compressor in BOTH:
        assert pickle.loads(pickle.dumps(compressor)) == compressor
        assert compression.compressor_of(compressor) is compressor


@pytest.mark.parametrize("compressor", BOTH, ids=["top-k", "low rank"])
def test_weighted_by_samples(compressor: Any) -> None:
    """Ranks with 3, 0 and 5 samples: sent and left are the gradient of all 8."""

    def worker(rank: int, n: int) -> None:
        counts = (3, 0, 5)
        model = pycomm.DistributedDataParallel(net(), compression=compressor)
        model.set_weight(counts[rank])
        loss = model(batch(rank, 0, max(counts[rank], 1))).square().mean()
        (loss if counts[rank] else 0 * loss).backward()
        whole = net()
        whole(torch.cat([batch(r, 0, counts[r]) for r in range(n)])).square().mean().backward()
        for (name, p), q in zip(model.module.named_parameters(), whole.parameters(), strict=True):
            left = model.compression_residuals().get(name, torch.zeros(p.numel())).clone()
            dist.all_reduce(left)
            assert (p.grad + left.view(p.shape) - q.grad).abs().max() < 1e-6
            assert bool(left.any()) == (name in WEIGHTS)
        model.set_weight(None)
        assert everywhere(*backward(model, rank, 1).values())

    run(3, worker)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def build(compressor: Any, **arguments: Any) -> tuple[Any, torch.optim.SGD]:
    """A model and its optimizer."""
    model = pycomm.DistributedDataParallel(net(), compression=compressor, **arguments)
    return model, torch.optim.SGD(model.parameters(), 0.1, 0.9)


def train(model: Any, optimizer: Any, rank: int, steps: Iterable[int]) -> torch.Tensor:
    """The parameters afterwards, in one."""
    for step in steps:
        backward(model, rank, step)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


@pytest.mark.parametrize("compressor", BOTH, ids=["top-k", "low rank"])
def test_resuming_is_bit_exact(compressor: Any) -> None:
    """CMP-03: training that was interrupted gives the parameters of training that was not, warm-up included."""

    def worker(rank: int, n: int) -> None:
        for steps in (0, 6):
            settings = replace(compressor, warmup_steps=steps)
            want = train(*build(settings), rank, range(8))
            half = build(settings)
            train(*half, rank, range(4))
            blob = save(*half)
            resumed = build(settings)
            load(*resumed, blob)
            assert torch.equal(train(*resumed, rank, range(4, 8)), want)
            if steps:
                continue
            for part in ("residuals", *(["bases"] if "rank" in vars(compressor) else [])):
                forgetful = build(settings)
                load(*forgetful, blob, part)
                assert not torch.equal(train(*forgetful, rank, range(4, 8)), want)

    run(2, worker)


@pytest.mark.parametrize("compressor", BOTH, ids=["top-k", "low rank"])
@pytest.mark.parametrize("to", [1, 3])
def test_another_number_of_ranks(to: int, compressor: Any, tmp_path: Any) -> None:
    """CMP-03: the sum of the residuals is shared out; bases are the same everywhere."""
    file = tmp_path / "checkpoint"

    def before(rank: int, n: int) -> dict[str, torch.Tensor]:
        model, optimizer = build(compressor)
        train(model, optimizer, rank, range(3))
        blob = save(model, optimizer)
        if rank == 0:
            file.write_bytes(blob)
        return {name: residual.clone() for name, residual in model.compression_residuals().items()}

    def after(rank: int, n: int) -> dict[str, torch.Tensor]:
        model, optimizer = build(compressor, bucket_cap_mb=0.001)
        load(model, optimizer, file.read_bytes())
        kept = {name: residual.clone() for name, residual in model.compression_residuals().items()}
        state = model.compression_state_dict()
        saved = pickle.loads(file.read_bytes())[1]
        assert state["step"] == saved["step"] == 3
        for name, basis in saved.get("bases", {}).items():
            assert torch.equal(state["bases"][name], basis)
        assert everywhere(train(model, optimizer, rank, range(3, 5)))
        return kept

    old, new = run(2, before), run(to, after)
    assert old[0].keys() == new[0].keys() == WEIGHTS
    for name in WEIGHTS:
        total = sum(of_rank[name].double() for of_rank in old)
        again = sum(of_rank[name].double() for of_rank in new)
        assert (total - again).abs().max() < 1e-8
        assert total.abs().max() > 1e-4


def test_a_basis_of_another_rank() -> None:
    """A state of PowerSGD with another rank: residuals count, bases begin anew, with a warning."""

    def worker(rank: int, n: int) -> None:
        model, optimizer = build(PowerSGD(2))
        train(model, optimizer, rank, range(2))
        state = model.compression_state_dict()
        other, _ = build(PowerSGD(3))
        other.load_compression_state_dict(state)
        told: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "pycomm.compression.low_rank.log.warning", lambda text, *args: told.append(text % args)
            )  # fmt: skip
            assert everywhere(*backward(other, rank, 2).values())
            backward(other, rank, 3)
        assert len(told) == 2
        assert "PowerSGD of rank 3: the basis of" in told[0]
        assert told[0] != told[1]
        assert other.compression_state_dict()["bases"]["0.weight"].shape == (40, 3)

    run(2, worker)


# ---- without pycomm's DDP -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", BOTH, ids=["top-k", "low rank"])
def test_hook_of_torchs_ddp(compressor: Any) -> None:
    """The same bits as pycomm's DDP, as it is the same; a state of the one can be loaded into the other."""

    def worker(rank: int, n: int) -> None:
        ours = pycomm.DistributedDataParallel(net(), compression=compressor)
        theirs = TorchDdp(net())
        state = HookState(compressor, theirs)
        theirs.register_comm_hook(state, hook)
        for step in range(4):
            got, want = backward(theirs, rank, step), backward(ours, rank, step)
            assert all(torch.equal(got[name], want[name]) for name in want)
        again = TorchDdp(net())
        other = HookState(compressor, again)
        other.load_state_dict(pickle.loads(pickle.dumps(ours.compression_state_dict())))
        again.register_comm_hook(other, hook)
        for step in range(4, 6):
            got, want = backward(again, rank, step), backward(ours, rank, step)
            assert all(torch.equal(got[name], want[name]) for name in want)
        for name, residual in other.residuals().items():
            assert torch.equal(residual, ours.compression_residuals()[name])

    run(2, worker)


@pytest.mark.parametrize("compressor", BOTH, ids=["top-k", "low rank"])
def test_sync_gradients(compressor: Any) -> None:
    """The same as DDP, in any buckets; with weights; a state by the averager."""

    def worker(rank: int, n: int) -> None:
        model, ours = net(), pycomm.DistributedDataParallel(net(), compression=compressor)
        averager = Averager(compressor, model.named_parameters())
        for step in range(3):
            backward(model, rank, step)
            pycomm.sync_gradients(model.parameters(), compression=averager, bucket_bytes=3000)
            want = backward(ours, rank, step)
            for name, p in model.named_parameters():
                assert torch.allclose(grad_of(p), want[name], atol=1e-6)
        assert averager.residuals().keys() == WEIGHTS
        resumed = Averager(compressor, model.named_parameters())
        resumed.load_state_dict(averager.state_dict())
        assert resumed.step == averager.step == 3
        results = []
        for one in (averager, resumed):
            backward(model, rank, 3)
            pycomm.sync_gradients(model.parameters(), compression=one, weight=1.0 + rank)
            results.append({name: grad_of(p) for name, p in model.named_parameters()})
            assert everywhere(*results[-1].values())
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])

    run(2, worker)


def test_few_collectives() -> None:
    """A bucket's parameters travel together: one all_gather, or two all_reduces, and one for those left alone."""

    def worker(rank: int, n: int) -> None:
        for compressor, most in ((TopK(0.1), 2), (PowerSGD(2), 3)):
            averager = Averager(compressor)
            parameters = [nn.Parameter(torch.ones(40, 40)) for _ in range(20)]
            parameters += [nn.Parameter(torch.ones(40)) for _ in range(20)]
            gradients = [torch.ones_like(p) for p in parameters]
            before = get_communicator().sequence
            averager.average(get_communicator(), parameters, gradients)
            assert get_communicator().sequence - before == most

    run(2, worker)


# ---- training -------------------------------------------------------------------------------------------------------


def excess(rank: int, n: int, compressor: Any, steps: int = 1500) -> float:
    """How far above the least squares training ends, as a share of the start; every rank has other equations."""
    count = 60
    equations = [torch.randn(80, count, generator=G(r)) for r in range(n)]
    targets = [torch.randn(80, 40, generator=G(100 + r)) for r in range(n)]
    whole, target = torch.cat(equations), torch.cat(targets)
    best = torch.linalg.lstsq(whole, target).solution
    linear = nn.Linear(count, 40, bias=False)
    nn.init.zeros_(linear.weight)
    model = pycomm.DistributedDataParallel(linear, compression=compressor)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)

    def loss_of(weight: torch.Tensor) -> float:
        return float((whole @ weight - target).square().mean())

    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2.0 / (1 + 10 * step / steps) ** 2
        optimizer.zero_grad()
        (model(equations[rank]) - targets[rank]).square().mean().backward()
        optimizer.step()
    least = loss_of(best)
    start = loss_of(torch.zeros_like(best))
    return (loss_of(linear.weight.detach().t()) - least) / (start - least)


@pytest.mark.parametrize(
    ("compressor", "enough"),
    [(TopK(0.01), 1e-2), (TopK(0.05), 1e-3), (PowerSGD(1), 1e-3)],
    ids=["top-k 1 %", "top-k 5 %", "low rank"],
)
def test_error_feedback_converges(compressor: Any, enough: float) -> None:
    """Least squares whose ranks disagree: with error feedback training finds the minimum, without it does not."""

    def worker(rank: int, n: int) -> tuple[float, float]:
        without = replace(compressor, error_feedback=False)
        return excess(rank, n, compressor), excess(rank, n, without)

    with_feedback, without = run(2, worker, wall=60)[0]
    assert with_feedback < enough
    assert without > 0.1


def test_report() -> None:
    """Of every layer: how it travels, and what is left out."""

    def worker(rank: int, n: int) -> None:
        for compressor in BOTH:
            model = pycomm.DistributedDataParallel(net(), compression=compressor)
            backward(model, rank, 0)
            before = {name: one.clone() for name, one in model.compression_residuals().items()}
            layers = {layer.name: layer for layer in model.compression_report()}
            assert len(layers) == 6
            assert layers["0.bias"].format == "fp32"
            weight = layers["0.weight"]
            assert (weight.format, weight.count, weight.non_finite) == (compressor.format, 2560, 0)
            want = 4 * 2560 / (128 * 8 if compressor.format == "top-k" else 4 * 2 * (64 + 40))
            assert weight.ratio == pytest.approx(want)
            assert 0.01 < weight.relative_error < 1
            assert weight.residual_norm == pytest.approx(float(before["0.weight"].norm()))
            assert f"| {compressor.format} |" in compression.markdown(layers.values())
            for name, residual in model.compression_residuals().items():
                assert torch.equal(residual, before[name])

    run(2, worker)
