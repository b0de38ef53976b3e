"""pycomm.compression in training: DDP, hooks, plain lists; checkpoints, weights, loss scales. CMP-01 and CMP-03."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Iterable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from gradients import batch, everywhere, load, net, save
from harness import attempt, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp

import pycomm
from pycomm import compression
from pycomm.compression import BF16, FP8, FP16, Averager, HookState, Int8, hook
from pycomm.compression.lists import set_aside
from pycomm.errors import InvalidArgument
from pycomm.optim import GradScaler

NAMES: Final = ("fp16", "bf16", "fp8", "fp8_e5m2", "int8")
#: Half the distance of neighbours at 1, for int8 by a block's largest; twice, for two roundings.
BOUND: Final = {"fp16": 2**-10, "bf16": 2**-7, "fp8": 2**-3, "fp8_e5m2": 2**-2, "int8": 1 / 127}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int]
) -> torch.Tensor:
    """The parameters afterwards, in one."""
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def sgd(model: nn.Module) -> torch.optim.SGD:
    """With momentum."""
    return torch.optim.SGD(model.parameters(), 0.1, 0.9)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Two gradients that are there, bit by bit."""
    return a is not None and b is not None and torch.equal(a, b)


def refused(step: Any) -> bool:
    """As a wrong argument."""
    found: Any = attempt(step)
    return "InvalidArgument" in found.kinds


def gradients(model: nn.Module) -> torch.Tensor:
    """All of them in one."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def mean_gradients(n: int, step: int) -> torch.Tensor:
    """Of the plain module, in float64 over the ranks' batches."""
    total: torch.Tensor | None = None
    for rank in range(n):
        model = net()
        model(batch(rank, step)).square().mean().backward()
        own = gradients(model).double()
        total = own if total is None else total + own
    assert total is not None
    return total / n


# ---- DDP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_gradients(n: int, overlap: bool) -> None:
    """Near the mean, with the same bits on all ranks; small parameters exactly as without compression."""

    def worker(rank: int, n: int) -> None:
        exact = pycomm.DistributedDataParallel(net())
        exact(batch(rank, 0)).square().mean().backward()
        want = mean_gradients(n, 0)
        for name in NAMES:
            model = pycomm.DistributedDataParallel(net(), compression=name, overlap=overlap)
            for _ in range(2):  # in the second one buckets are others
                model.zero_grad()
                model(batch(rank, 0)).square().mean().backward()
                got = gradients(model)
                assert everywhere(got)
                error = (got.double() - want).abs()
                assert error.max() <= 1.1 * BOUND[name] * n * want.abs().max(), name
                assert error.max() > 0
            for (label, p), q in zip(
                model.module.named_parameters(), exact.parameters(), strict=True
            ):
                assert p.grad is not None
                assert q.grad is not None
                if "bias" in label or p.numel() < 1024:
                    assert torch.equal(p.grad, q.grad), label

    run(n, worker, wall=60)


def test_gradients_that_overflow_a_cast() -> None:
    """CMP-01: a mean that fits is right although sums or single gradients do not; infinity passes, and is forgotten."""

    def worker(rank: int, n: int) -> None:
        for name in ("fp16", "bf16", "fp8", "int8"):
            for block in {FP16: (0, 64), BF16: (0,), FP8: (64,), Int8: (64,)}[
                compression.NAMED[name]
            ]:
                model = pycomm.DistributedDataParallel(
                    nn.Linear(1, 1), compression=compression.NAMED[name](block=block, small=True, error_feedback=True)
                )  # fmt: skip

                def step(value: float, model: Any = model) -> float:
                    model.zero_grad()
                    model(torch.full((1, 1), value)).sum().backward()
                    return float(model.module.weight.grad)

                tolerance = 4 * BOUND[name]
                assert step(40000.0) == pytest.approx(40000, rel=tolerance)
                assert step(1e5 if rank == 0 else 0.0) == pytest.approx(25000, rel=2 * tolerance)
                assert not math.isfinite(step(math.inf if rank == 0 else 1.0))
                for residual in model.compression_residuals().values():
                    assert residual.isfinite().all()
                    residual.zero_()
                assert step(2.0) == pytest.approx(2.0, rel=tolerance)

    run(4, worker)


def test_case_cmp_01() -> None:
    """As it is written there."""

    def worker(rank: int, n: int) -> None:
        model = pycomm.DistributedDataParallel(
            nn.Linear(1, 1), compression="fp16", error_feedback=True
        )

        def step(value: float) -> float:
            model.zero_grad()
            model(torch.full((1, 1), value)).sum().backward()
            return float(model.module.weight.grad)

        assert abs(step(40000.0) - 40000) < 40
        assert abs(step(1e5 if rank == 0 else 0.0) - 25000) < 60
        assert not math.isfinite(step(float("inf") if rank == 0 else 1.0))
        assert abs(step(2.0) - 2.0) < 0.1

    run(4, worker)


def test_warm_up_and_exclusion() -> None:
    """Steps and parameters that are left alone get the bits of no compression."""

    def worker(rank: int, n: int) -> None:
        exact = pycomm.DistributedDataParallel(net())
        names = [name for name, _ in exact.module.named_parameters()]
        for encoding in (
            FP16(warmup_steps=2),
            FP16(never_compress=["^0[.]"]),
            FP16(never_compress=lambda name, parameter: parameter.shape[0] == 64),
            FP16(least_count=5000),
        ):
            model = pycomm.DistributedDataParallel(net(), compression=encoding)
            for step in range(4):
                for one in (exact, model):
                    one.zero_grad()
                    one(batch(rank, step)).square().mean().backward()
                pairs = zip(exact.parameters(), model.parameters(), strict=True)
                differ = [
                    name
                    for name, (p, q) in zip(names, pairs, strict=True)
                    if not same(p.grad, q.grad)
                ]
                if encoding.warmup_steps:
                    assert differ == ([] if step < 2 else ["0.weight", "2.weight"])
                else:
                    assert differ == (["2.weight"] if encoding.least_count == 1024 else [])

    run(2, worker)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_error_feedback_conserves(name: str) -> None:
    """Sent gradients and all ranks' residuals add up to the mean of the gradients, over steps and rebuilt buckets."""

    def worker(rank: int, n: int) -> None:
        model = pycomm.DistributedDataParallel(net(), compression=name, bucket_cap_mb=0.001)
        sent = torch.zeros_like(gradients_of_shape(model))
        came = torch.zeros_like(sent, dtype=torch.float64)
        for step in range(6):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            sent += gradients(model)
            came += mean_gradients(n, step)
        names = [name for name, _ in model.module.named_parameters()]
        kept = model.compression_residuals()
        left = torch.cat([
            kept[name] if name in kept else torch.zeros(p.numel())
            for name, p in zip(names, model.parameters(), strict=True)
        ])  # fmt: skip
        dist.all_reduce(left)
        assert left.abs().max() > 0
        assert (sent + left - came).abs().max() < 1e-6

    run(2, worker)


def gradients_of_shape(model: nn.Module) -> torch.Tensor:
    """A tensor of as many elements."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_no_sync_and_clipping() -> None:
    """Accumulated gradients are averaged once; clipping sees what all ranks have."""

    def worker(rank: int, n: int) -> None:
        model = pycomm.DistributedDataParallel(net(), compression="fp16", error_feedback=True)
        for _ in range(3):
            model.zero_grad()
            with model.no_sync():
                model(batch(rank, 0)).square().mean().backward()
            model(batch(rank, 1)).square().mean().backward()
            want = mean_gradients(n, 0) + mean_gradients(n, 1)
            assert (gradients(model) - want).abs().max() < 4 * BOUND["fp16"] * want.abs().max()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            assert everywhere(norm.reshape(1))
            assert everywhere(gradients(model))

    run(2, worker)


def test_refusals() -> None:
    """In words, at construction or the first forward, on every rank."""

    def worker(rank: int, n: int) -> list[Any]:
        def double() -> Any:
            model = pycomm.DistributedDataParallel(net().double(), compression="int8")
            return model(batch(rank, 0).double())

        model = pycomm.DistributedDataParallel(net(), compression="int8")
        plain = pycomm.DistributedDataParallel(net())
        return [
            attempt(double),
            attempt(lambda: model.register_comm_hook(None, lambda *_: None)),
            attempt(lambda: pycomm.DistributedDataParallel(net(), compression="int4")),
            attempt(lambda: pycomm.DistributedDataParallel(net(), error_feedback=True)),
            attempt(plain.compression_state_dict),
        ]

    for found in run(2, worker):
        assert all("InvalidArgument" in error.kinds for error in found), found
        assert "mixed_precision" in found[0].message


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def build(
    world: int, name: str = "int8", **arguments: Any
) -> tuple[pycomm.DistributedDataParallel, torch.optim.SGD]:
    """A model and its optimizer."""
    model = pycomm.DistributedDataParallel(
        net(), compression=name, error_feedback=True, **arguments
    )
    return model, sgd(model)


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_resuming_is_bit_exact(name: str) -> None:
    """CMP-03: training that was interrupted gives the parameters of training that was not."""

    def worker(rank: int, n: int) -> None:
        whole = build(n, name)
        want = train(*whole, rank, range(8))
        half = build(n, name)
        train(*half, rank, range(4))
        blob = save(*half)
        resumed = build(n, name)
        load(*resumed, blob)
        assert torch.equal(train(*resumed, rank, range(4, 8)), want)
        forgetful = build(n, name)
        load(*forgetful, blob)
        for residual in forgetful[0].compression_residuals().values():
            residual.zero_()
        assert not torch.equal(train(*forgetful, rank, range(4, 8)), want)

    run(2, worker)


@pytest.mark.parametrize("to", [1, 3, 4])
def test_another_number_of_ranks(to: int, tmp_path: Any) -> None:
    """CMP-03: the sum of the residuals is shared out; other buckets do not matter."""
    file = tmp_path / "checkpoint"

    def before(rank: int, n: int) -> dict[str, torch.Tensor]:
        model, optimizer = build(n)
        train(model, optimizer, rank, range(3))
        blob = save(model, optimizer)
        if rank == 0:
            file.write_bytes(blob)
        return {name: residual.clone() for name, residual in model.compression_residuals().items()}

    def after(rank: int, n: int) -> dict[str, torch.Tensor]:
        model, optimizer = build(n, bucket_cap_mb=0.001)
        load(model, optimizer, file.read_bytes())
        kept = {name: residual.clone() for name, residual in model.compression_residuals().items()}
        assert torch.isfinite(train(model, optimizer, rank, range(3, 5))).all()
        return kept

    old, new = run(2, before), run(to, after)
    assert old[0].keys() == new[0].keys() == {"0.weight", "2.weight"}
    for name in old[0]:
        total = sum(of_rank[name].double() for of_rank in old)
        again = sum(of_rank[name].double() for of_rank in new)
        assert (total - again).abs().max() < 1e-9
        assert total.abs().max() > 1e-6


def test_a_state_of_another_model(caplog: pytest.LogCaptureFixture) -> None:
    """Unknown parameters begin at zero, with a warning; what is no state is refused."""

    def worker(rank: int, n: int) -> tuple[Any, Any]:
        model, optimizer = build(n)
        train(model, optimizer, rank, range(2))
        state = model.compression_state_dict()
        state["residuals"]["0.weight"] = torch.zeros(3)
        del state["residuals"]["2.weight"]
        with pytest.MonkeyPatch.context() as patch:
            told: list[str] = []
            patch.setattr(
                "pycomm.compression.state.log.warning", lambda text, *args: told.append(text % args)
            )
            model.load_compression_state_dict(state)
        assert "0.weight, 2.weight" in told[0]
        assert not any(residual.any() for residual in model.compression_residuals().values())
        return attempt(lambda: model.load_compression_state_dict({})), None

    for found, _ in run(2, worker):
        assert "InvalidArgument" in found.kinds


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "fp16"])
def test_weighted_by_samples(name: str | None) -> None:
    """Ranks with 3, 0 and 5 samples give the gradient of all 8; a rank without any takes part."""

    def worker(rank: int, n: int) -> None:
        counts = (3, 0, 5)
        model = pycomm.DistributedDataParallel(net(), compression=name)
        for _ in range(2):
            model.zero_grad()
            model.set_weight(counts[rank])
            batch_of_rank = batch(rank, 0, max(counts[rank], 1))
            loss = model(batch_of_rank).square().mean()
            (loss if counts[rank] else 0 * loss).backward()
            whole = net()
            whole(torch.cat([batch(r, 0, counts[r]) for r in range(n)])).square().mean().backward()
            want = gradients(whole)
            got = gradients(model)
            assert (got - want).abs().max() < (
                4 * BOUND["fp16"] if name else 1e-6
            ) * want.abs().max()
            assert everywhere(got)
        model.set_weight(None)
        model.zero_grad()
        model(batch(rank, 3)).square().mean().backward()
        assert (gradients(model) - mean_gradients(n, 3)).abs().max() < 1e-3
        for weights in ((0, 0, 0), (-1, 1, 1), (math.nan, 1, 1)):
            assert refused(functools.partial(model.set_weight, weights[rank]))

    run(3, worker)


# ---- without pycomm's DDP -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_hook_of_torchs_ddp(name: str) -> None:
    """The same gradients as pycomm's DDP while buckets are the same; state and residuals by name; resumes."""

    def worker(rank: int, n: int) -> None:
        ours = pycomm.DistributedDataParallel(net(), compression=name, error_feedback=True)
        theirs = TorchDdp(net())
        state = HookState(compression.encoding_of(name, error_feedback=True), theirs)
        theirs.register_comm_hook(state, hook)
        for step in range(5):
            for model in (ours, theirs):
                model.zero_grad()
                model(batch(rank, step)).square().mean().backward()
            want = mean_gradients(n, step)
            for model in (ours, theirs):
                assert (gradients(model) - want).abs().max() < 8 * BOUND[name] * want.abs().max()
                assert everywhere(gradients(model))
            assert state.residuals().keys() == ours.compression_residuals().keys()
        saved = state.state_dict()
        again = TorchDdp(net())
        other = HookState(compression.encoding_of(name, error_feedback=True), again)
        other.load_state_dict(pickle.loads(pickle.dumps(saved)))
        again.register_comm_hook(other, hook)
        for residual_name, residual in other.residuals().items():
            assert torch.equal(residual, state.residuals()[residual_name])
        for _ in range(2):  # the first buckets of a model are others, so the first sums may be
            for model in (theirs, again):
                model.zero_grad()
                model(batch(rank, 9)).square().mean().backward()
            assert (gradients(theirs) - gradients(again)).abs().max() < 8 * BOUND[
                name
            ] * want.abs().max()

    run(2, worker)


def test_all_reduce() -> None:
    """Sums and means of a tensor, compressed or not, with a residual if one is given."""

    def worker(rank: int, n: int) -> None:
        value = torch.arange(5000.0).reshape(50, 100) + rank
        want = torch.arange(5000.0).reshape(50, 100) * 3 + 3
        assert torch.equal(pycomm.all_reduce(value.clone()), want)
        for name in NAMES:
            got = pycomm.all_reduce(value.clone(), compression=name)
            assert (got - want).abs().max() <= 1.1 * BOUND[name] * want.max()
            mean = pycomm.all_reduce(value.clone(), "avg", compression=name)
            assert (mean - want / 3).abs().max() <= 1.1 * BOUND[name] * want.max() / 3
        residual = torch.zeros(5000)
        total = sum(
            pycomm.all_reduce(value.clone(), compression="int8", residual=residual)
            for _ in range(50)
        )
        assert (total / 50 - want).abs().max() < 0.1 * BOUND["int8"] * want.max()
        for wrong in (
            lambda: pycomm.all_reduce(value, "max", compression="fp16"),
            lambda: pycomm.all_reduce(value, residual=residual),
            lambda: pycomm.all_reduce(value.double(), compression="fp16"),
            lambda: pycomm.all_reduce(value.t(), compression="fp16"),
        ):
            assert refused(wrong)

    run(3, worker)


def test_sync_gradients() -> None:
    """Code without DDP: means in buckets, missing gradients count as zero, layouts stay, weights, residuals."""

    def worker(rank: int, n: int) -> None:
        model = net()
        extra = nn.Parameter(torch.ones(6, 4).t())
        unused = nn.Parameter(torch.ones(3))
        model(batch(rank, 0)).square().mean().backward()
        if rank == 1:
            extra.grad = torch.full((4, 6), 4.0)
        named = [*model.named_parameters(), ("extra", extra), ("unused", unused)]
        pycomm.sync_gradients(named, bucket_bytes=3000)
        assert (gradients(model) - mean_gradients(n, 0)).abs().max() < 1e-6
        assert same(extra.grad, torch.full((4, 6), 2.0))
        assert unused.grad is None
        averager = Averager(Int8(), named)
        for _ in range(3):
            model.zero_grad()
            model(batch(rank, 0)).square().mean().backward()
            pycomm.sync_gradients(model.parameters(), compression=averager, weight=1.0 + rank)
            assert everywhere(gradients(model))
        assert averager.residuals().keys() == {"0.weight", "2.weight"}
        assert averager.step == 3
        wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        wide.grad = torch.ones(2, dtype=torch.float64)
        assert refused(lambda: pycomm.sync_gradients([wide]))

    run(2, worker)


# ---- mixed precision ------------------------------------------------------------------------------------------------


def test_grad_scaler_agrees() -> None:
    """An infinity on one rank: no rank steps, all lower the scale, residuals follow it, and training goes on."""

    def worker(rank: int, n: int) -> None:
        model, optimizer = build(n, "int8")
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1000, keepers=[model])
        local = nn.Parameter(torch.ones(2))  # of no group: only this rank has it
        alone = torch.optim.SGD([local], 0.5)

        def step(bad: bool) -> None:
            optimizer.zero_grad()
            alone.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(rank, 0)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.scale(local.sum() * (math.inf if bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.step(alone)
            scaler.update()

        step(False)
        assert scaler.get_scale() == 1024
        before = train(model, optimizer, rank, ()), local.detach().clone()
        kept = {name: residual.clone() for name, residual in model.compression_residuals().items()}
        step(rank == 1)
        assert scaler.get_scale() == 512
        assert torch.equal(local, before[1])
        assert everywhere(train(model, optimizer, rank, ()))
        for name, residual in model.compression_residuals().items():
            assert residual.abs().max() < 2 * max(float(kept[name].abs().max()), 1e-3)
        step(False)
        assert not torch.equal(local, before[1])
        assert everywhere(train(model, optimizer, rank, ()))

    run(2, worker)


# ---- reports --------------------------------------------------------------------------------------------------------


def test_report() -> None:
    """Of every layer: how it travels, and what that costs."""

    def worker(rank: int, n: int) -> None:
        model = pycomm.DistributedDataParallel(net(), compression=Int8(block=64))
        model(batch(rank, 0)).square().mean().backward()
        before = {
            name: residual.clone() for name, residual in model.compression_residuals().items()
        }
        layers = {layer.name: layer for layer in model.compression_report()}
        assert len(layers) == 6
        assert layers["0.bias"].format == "fp32"
        weight = layers["0.weight"]
        assert (weight.format, weight.count, weight.non_finite) == ("int8", 2560, 0)
        assert 3.7 < weight.ratio < 4
        assert 0 < weight.relative_error < 0.05
        assert weight.residual_norm == pytest.approx(float(before["0.weight"].norm()))
        table = compression.markdown(layers.values())
        assert table.count("\n") == 7
        assert "| 0.weight | 2560 | int8 |" in table
        for name, residual in model.compression_residuals().items():
            assert torch.equal(residual, before[name])

    run(2, worker)


def test_encodings_are_values() -> None:
    """They pickle, compare and refuse nonsense."""
    for name in NAMES:
        encoding = compression.encoding_of(name)
        assert pickle.loads(pickle.dumps(encoding)) == encoding
        assert pickle.loads(pickle.dumps(encoding)).codec.format == encoding.format
        assert compression.encoding_of(encoding) is encoding
        assert encoding.ratio == pytest.approx(2 if name in ("fp16", "bf16") else 4, rel=0.02)
    for wrong in (
        lambda: Int8(block=0),
        lambda: FP16(block=65),
        lambda: FP16(warmup_steps=-1),
        lambda: compression.encoding_of("zip"),
        lambda: compression.encoding_of(FP16(), block=64),
    ):
        with pytest.raises(InvalidArgument):
            wrong()


@pytest.mark.parametrize(
    ("gradient", "is_used"),
    [
        ([], False),
        ([0.0, -0.0], False),
        ([0.0, 1e-45], True),
        ([math.nan, 0.0], True),
        ([-math.inf, 0.0], True),
    ],
)
def test_residuals_are_set_aside_without_a_look_at_the_values(
    gradient: list[float], is_used: bool
) -> None:
    """As on the GPU, where the host does not wait to see which gradients are zero."""
    values = torch.tensor(gradient)
    before = torch.arange(1.0, len(values) + 1)
    residual = before.clone()
    kept = set_aside(residual, values)
    assert torch.equal(residual, before if is_used else torch.zeros_like(before))
    assert torch.equal(kept, torch.zeros_like(before) if is_used else before)
