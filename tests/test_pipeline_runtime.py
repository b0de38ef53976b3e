"""Pipelines train as the whole model does: every schedule, shape and count; and fail in words, on all ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import DIED, G, Refused, attempt, run, seeded
from torch import Tensor, nn
from torch.nn import functional

import pycomm
from pycomm.optim import GradScaler, clip_grad_norm_
from pycomm.pipeline import Pipeline, PipelineStage, pop, stash
from pycomm.pipeline.schedules import NAMES, Schedule, build, simulate

mse = functional.mse_loss
F64 = torch.float64
WIDTH = 6


def mlp(layers: int, dtype: torch.dtype = F64) -> nn.Sequential:
    """Alike on all ranks."""

    def make() -> nn.Sequential:
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))
        )

    return seeded(make).to(dtype)


def data(rows: int, seed: int = 5, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    chance = G(seed)
    x, y = (torch.randn(rows, WIDTH, generator=chance, dtype=F64) for _ in range(2))
    return x.to(dtype), y.to(dtype)


def stages_of(
    schedule: Schedule, rank: int, model: nn.Sequential, **options: Any
) -> list[PipelineStage]:
    return [
        PipelineStage(model[index], index, schedule.stages, **options)
        for index in schedule.stages_of(rank)
    ]


def whole(model: nn.Module, x: Tensor, y: Tensor, loss_fn: Callable[..., Tensor] = mse) -> Tensor:
    """The dense model's loss, whose gradients are added."""
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss.detach()


def check(pipeline: Pipeline, dense: nn.Sequential, tolerance: float = 1e-14) -> None:
    """This rank's gradients are the dense model's."""
    for index, stage in pipeline.stages.items():
        for own, other in zip(stage.module.parameters(), dense[index].parameters(), strict=True):
            assert own.grad is not None
            assert other.grad is not None
            assert (own.grad - other.grad).abs().max() <= tolerance, index


def chunks_of(name: str) -> int | None:
    return 2 if name == "auto" else None


# ---- gradients of the whole model


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_schedule(n: int, backend: str) -> None:
    """More and fewer microbatches than ranks, one, and ones of unequal sizes; steps add up; simulated peaks hold."""

    def worker(rank: int, n: int) -> None:
        for name in NAMES:
            for microbatches, rows in ((1, 1), (2, 5), (5, 13)):
                schedule = build(name, n, microbatches, chunks_of(name))
                model = mlp(schedule.stages)
                dense = copy.deepcopy(model)
                pipeline = Pipeline(schedule, stages_of(schedule, rank, model), loss_fn=mse)
                x, y = data(rows)
                for _ in range(2):
                    expected = whole(dense, x, y)
                    losses: list[Tensor] = []
                    found = pipeline.step(x, target=y, losses=losses)
                    is_last = schedule.placement[-1] == rank
                    assert (found is not None) == is_last
                    assert len(losses) == (microbatches if is_last else 0)
                    assert found is None or abs(found - expected) < 1e-14
                check(pipeline, dense)
                peak = simulate(schedule).peak_activations[rank]
                assert pipeline.peak_activations <= peak
                if not (0 in pipeline.stages and name.startswith(("z", "dual", "auto"))):
                    assert pipeline.peak_activations == peak, name

    run(n, worker, backend=backend, wall=60)


def test_other_sizes_and_modes() -> None:
    """PIPE-03, and what is between its steps: other shapes, evaluation, frozen layers, a scaled loss, halves."""

    def worker(rank: int, n: int) -> None:
        schedule = build("1f1b", n, 3)
        model = mlp(n)
        dense = copy.deepcopy(model)
        pipeline = Pipeline(schedule, stages_of(schedule, rank, model), loss_fn=mse)
        for rows in (6, 4, 6, 9):
            x, y = data(rows, rows)
            expected = whole(dense, x, y)
            assert abs(float(pipeline.step(x, target=y, everywhere=True) or 0) - expected) < 1e-14
            output, loss = pipeline.evaluate(x, target=y, everywhere=True)
            assert abs(float(loss or 0) - mse(dense(x), y)) < 1e-14
            assert (output is not None) == (rank == n - 1)
            assert output is None or torch.equal(
                output, torch.cat([dense(p) for p in x.tensor_split(3)])
            )
            assert pipeline.evaluate(x).loss is None
        check(pipeline, dense)
        before = [p.grad.clone() for p in model[rank].parameters() if p.grad is not None]
        pipeline.step(x, target=y, loss_scale=0.0)
        assert all(
            torch.equal(p.grad, g)
            for p, g in zip(model[rank].parameters(), before, strict=True)
            if p.grad is not None
        )
        for frozen in (model, dense):
            frozen[0].requires_grad_(False)
        pipeline.step(x, target=y)
        whole(dense, x, y)
        check(pipeline, dense)
        model.requires_grad_(False)
        assert pipeline.step(x, target=y, everywhere=True) is not None

    run(2, worker)


class Seeded(nn.Module):
    """Dropout that is the same wherever, and as often as, a row is seen."""

    def forward(self, x: Tensor) -> Tensor:
        seeds = (x.detach()[:, 0] * 2**20).long()
        masks = [torch.rand(WIDTH, generator=G(int(seed) % 2**31), dtype=x.dtype) for seed in seeds]
        return x * (torch.stack(masks) > 0.3)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv"])
def test_options_of_stages(name: str) -> None:
    """Dropout, checkpointing, autocast; the loss in the last module; keyword-free inputs of several kinds."""

    def worker(rank: int, n: int) -> None:
        schedule = build(name, n, 3)
        x, y = data(7)
        for options, layers, tolerance in (
            ({}, Seeded, 1e-14),
            ({"checkpoint": True}, Seeded, 1e-14),
            ({"autocast": torch.bfloat16}, nn.Identity, 0.05),
        ):
            dtype = torch.float32 if options.get("autocast") else F64
            model = nn.Sequential(
                *(nn.Sequential(part, layers()) for part in mlp(schedule.stages, dtype))
            )
            dense = copy.deepcopy(model)
            pipeline = Pipeline(schedule, stages_of(schedule, rank, model, **options), loss_fn=mse)
            pipeline.step(x.to(dtype), target=y.to(dtype))
            with torch.autocast("cpu", torch.bfloat16) if dtype != F64 else nullcontext():
                whole(dense, x.to(dtype), y.to(dtype))
            check(pipeline, dense, tolerance)
            halves = Pipeline(schedule, stages_of(schedule, rank, mlp(schedule.stages, torch.bfloat16)),
                              loss_fn=mse)  # fmt: skip
            loss = halves.step(x.bfloat16(), target=y.bfloat16())
            assert loss is None or loss.dtype == torch.float32

    run(2, worker)


# ---- what stages hand on


class Outputs(nn.Module):
    """Masks, ids, None, a dict, a number, and a tensor whose gradient is sometimes missing (PIPE-05)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y, {"mask": x > 0, "ids": torch.arange(len(x)), "more": (None, y * 2)}, 3


class Inputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, y: Tensor, others: dict[str, Any], number: int) -> Tensor:
        nothing, doubled = others["more"]
        assert nothing is None
        assert others["mask"].dtype == torch.bool
        assert others["ids"].tolist() == list(range(len(y)))
        if number == 3 and len(y) > 2:  # else `doubled` has no gradient
            y = y + doubled
        return self.linear(y * others["mask"]) + y.new_tensor(others["ids"].unsqueeze(1) * 0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_outputs_of_all_kinds(name: str) -> None:
    def worker(rank: int, n: int) -> None:
        parts = seeded(lambda: [Outputs().double(), Inputs().double()])
        dense = copy.deepcopy(parts)
        x, y = data(8)
        for begin, end in ((0, 3), (3, 6), (6, 8)):
            loss = mse(dense[1](*dense[0](x[begin:end])), y[begin:end]) * (end - begin) / 8
            loss.backward()
        pipeline = Pipeline(name, PipelineStage(parts[rank], rank, n), 3, loss_fn=mse)
        pipeline.step(x, target=y)
        check(pipeline, nn.Sequential(*dense))

    run(2, worker)


class Down(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(WIDTH, WIDTH), name

    def forward(self, x: Tensor) -> Tensor:
        stash(self.name, x)
        return self.linear(x).tanh()


class Up(Down):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * pop(self.name)


def unet() -> nn.Sequential:
    """Two skips, one within the other, over four stages."""
    return seeded(lambda: nn.Sequential(Down("a"), Down("b"), Up("b"), Up("a"))).double()


@pytest.mark.parametrize(("name", "n"), [("1f1b", 4), ("zb_h1", 4), ("interleaved", 2), ("zbv", 2)])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_skips(name: str, n: int, checkpoint: bool) -> None:
    def worker(rank: int, n: int) -> None:
        schedule = build(name, n, 4)
        model = unet()
        dense = copy.deepcopy(model)
        pipeline = Pipeline(
            schedule, stages_of(schedule, rank, model, checkpoint=checkpoint), loss_fn=mse
        )
        x, y = data(9)
        for _ in range(2):
            whole(dense, x, y)
            pipeline.step(x, target=y)
        check(pipeline, dense)

    run(n, worker)


class Last(nn.Module):
    """The output layer, whose weight is the first stage's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


@pytest.mark.parametrize(("name", "n"), [("1f1b", 3), ("zbv", 2), ("interleaved", 2)])
def test_tied_parameters(name: str, n: int) -> None:
    """Summed over their ranks once, however many steps add up; counted once in the norm."""

    def worker(rank: int, n: int) -> None:
        schedule = build(name, n, 3)
        model = mlp(schedule.stages - 1)
        model.append(Last(model[0][0].weight))  # type: ignore[index]
        dense = copy.deepcopy(model)
        owners = {0, schedule.stages - 1}
        stages = [
            PipelineStage(
                model[i], i, schedule.stages,
                tied={"weight": model[0][0].weight} if i in owners else {},  # type: ignore[index]
            )
            for i in schedule.stages_of(rank)
        ]  # fmt: skip
        pipeline = Pipeline(schedule, stages, loss_fn=mse)
        x, y = data(8)
        for _ in range(3):
            whole(dense, x, y)
            pipeline.step(x, target=y)
        check(pipeline, dense)
        own = [p for stage in stages for p in stage.module.parameters()]
        theirs = float(
            torch.nn.utils.get_total_norm(
                [p.grad for p in dense.parameters() if p.grad is not None]
            )
        )
        ours = clip_grad_norm_(
            set(own),
            1e9,
            pipeline_group=dist.group.WORLD,
            counted_elsewhere=pipeline.counted_elsewhere,
        )
        assert abs(float(ours) - theirs) < 1e-12 * theirs

    run(n, worker)


# ---- replicas


def test_replicas() -> None:
    """Two pipelines of two stages: averages once, also of steps that add up, at once or behind no_sync."""

    def worker(rank: int, n: int) -> None:
        mesh = pycomm.init_mesh(dp=2, pp=2)
        replica, stage = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
        for name, quiet in (("1f1b", False), ("zb_h1", True)):
            model = mlp(2)
            dense = copy.deepcopy(model)
            pipeline = Pipeline(
                name,
                PipelineStage(model[stage], stage, 2, mesh["pp"]),
                3,
                loss_fn=mse,
                data_group=mesh["dp"],
            )
            for seed in (1, 2):
                x, y = data(12, seed)
                whole(dense, x, y)
                with pipeline.no_sync() if quiet and seed == 1 else nullcontext():
                    pipeline.step(x[replica::2], target=y[replica::2])
            check(pipeline, dense)

    run(4, worker)


def test_norm_and_scale_of_all_axes() -> None:
    """One norm on four ranks, that of the whole model; an overflow in one stage's replica skips the step everywhere."""

    def worker(rank: int, n: int) -> Any:
        mesh = pycomm.init_mesh(dp=2, pp=2)
        replica, stage = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
        model = mlp(2, torch.float32)
        dense = copy.deepcopy(model)
        pipeline = Pipeline(
            "1f1b",
            PipelineStage(model[stage], stage, 2, mesh["pp"]),
            3,
            loss_fn=mse,
            data_group=mesh["dp"],
        )
        own = list(model[stage].parameters())
        optimizer = torch.optim.SGD(own, 0.1)
        groups = [mesh["pp"].get_group(), mesh["dp"].get_group()]
        scaler = GradScaler(init_scale=8.0, growth_interval=1000, groups=groups)
        x, y = data(12, dtype=torch.float32)

        def scale() -> float:
            return float(scaler.scale(torch.ones(())))

        pipeline.step(x[replica::2], target=y[replica::2], loss_scale=scale())
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(own, 1.0, pipeline_group=mesh["pp"], data_group=mesh["dp"])
        before = [p.detach().clone() for p in own]
        scaler.step(optimizer)
        scaler.update()
        stepped = not any(map(torch.equal, before, own))
        before = [p.detach().clone() for p in own]
        optimizer.zero_grad()
        pipeline.step(x[replica::2], target=y[replica::2], loss_scale=scale())
        if rank == 3:
            own[0].grad[0] = torch.inf  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        whole(dense, x, y)
        gradients = [p.grad for p in dense.parameters() if p.grad is not None]
        theirs = float(torch.nn.utils.get_total_norm(gradients))
        same = all(map(torch.equal, before, own))
        return abs(float(norm) - theirs) < 1e-5 * theirs, stepped, same, scaler.get_scale()

    assert run(4, worker) == [(True, True, True, 4.0)] * 4


# ---- refusals and failures


def test_bad_calls_are_refused_on_all_ranks() -> None:
    """Before anything is sent: the pipeline goes on afterwards (PIPE-01's fewer rows than microbatches, too)."""

    def worker(rank: int, n: int) -> list[Any]:
        model = mlp(n)
        dense = copy.deepcopy(model)
        pipeline = Pipeline("1f1b", PipelineStage(model[rank], rank, n), 3, loss_fn=mse)
        x, y = data(6)
        found = [
            attempt(lambda: pipeline.step(x[:2], target=y[:2])),
            attempt(lambda: pipeline.step(x, target=y[:5])),
            attempt(lambda: pipeline.step(x, y[:5], target=y)),
            attempt(lambda: pipeline.step(target=y)),
            attempt(lambda: pipeline.step(x, target=y) if rank else pipeline.evaluate(x, target=y)),
            attempt(lambda: pipeline.step(x, target=y, everywhere=rank == 0)),
        ]
        pipeline.step(x, target=y)
        whole(dense, x, y)
        check(pipeline, dense)
        return found

    for rank, found in enumerate(run(2, worker)):
        assert all(isinstance(one, Refused) for one in found), found
        few, targets, inputs, none, other, modes = (one.message for one in found)
        assert "a batch of 2 rows does not give 3 microbatches" in few
        assert "inputs of 6 rows, but rank 1 targets of 5" in targets
        assert ("the batch's, the same for all" if rank == 0 else "rank 0 are wrong") in inputs
        assert ("which needs inputs" if rank == 0 else "rank 0 are wrong") in none
        assert "different schedules" in other
        assert "different modes" in modes


def test_pipelines_that_cannot_be() -> None:
    stage = PipelineStage(mlp(1), 0, 1)
    with pytest.raises(pycomm.InvalidArgument, match="stages count from 0"):
        PipelineStage(mlp(1), 2, 2)
    with pytest.raises(pycomm.InvalidArgument, match="has no parameters"):
        PipelineStage(mlp(1), 0, 1, tied={"other": nn.Parameter(torch.ones(1))})
    with pytest.raises(pycomm.InvalidArgument, match="needs a stage"):
        Pipeline("1f1b", [])
    with pytest.raises(pycomm.InvalidArgument, match="for 2 ranks, the group has 1"):
        Pipeline(build("1f1b", 2, 3), stage)
    with pytest.raises(
        pycomm.InvalidArgument, match=r"has stages \[0, 1\] of 2 here, not \[0\] of 1"
    ):
        Pipeline(build("interleaved", 1, 3), stage)
    with pytest.raises(pycomm.InvalidArgument, match="for 3 microbatches, not 4"):
        Pipeline(build("1f1b", 1, 3), stage, 4)
    with pytest.raises(pycomm.InvalidArgument, match="one element, not float64"):
        Pipeline("gpipe", stage, 1).step(torch.ones(2, WIDTH, dtype=F64))


class Spoils(nn.Module):
    """Goes wrong with the second microbatch: an exception, the end of its process, or another shape."""

    def __init__(self, inside: nn.Module, how: str) -> None:
        super().__init__()
        self.inside, self.how, self.calls = inside, how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 5:
            if self.how == "raises":
                raise ValueError("no such thing")
            if self.how == "dies":
                os._exit(3)
            x = torch.cat([x, x])
        y: Tensor = self.inside(x)
        return y


@pytest.mark.parametrize("how", ["raises", "dies", "another shape"])
def test_a_stage_that_fails_is_named_on_all_ranks(how: str) -> None:
    def worker(rank: int, n: int) -> Any:
        model = mlp(n)
        part = Spoils(model[rank], how) if rank == 1 else model[rank]
        pipeline = Pipeline("1f1b", PipelineStage(part, rank, n), 3, loss_fn=mse)
        x, y = data(6)
        pipeline.step(x, target=y)
        first = attempt(lambda: pipeline.step(x, target=y), (RuntimeError, ValueError))
        again = attempt(lambda: pipeline.step(x, target=y))
        return first, again

    results = run(3, worker, may_die=[1])
    kinds = {"raises": "ValueError", "another shape": "MismatchError"}
    for rank, result in enumerate(results):
        if rank == 1 and how == "dies":
            assert result is DIED
            continue
        first, again = result
        assert isinstance(first, Refused)
        assert isinstance(again, Refused)
        if how == "dies":
            assert "PeerDiedError" in first.kinds
            assert "rank 1" in first.message
        elif rank == 1:
            assert kinds[how] in first.kinds
        else:
            assert "rank 1, 1" in first.message, first.message
            assert kinds[how] in first.message
        assert "an earlier step failed" in again.message


def test_shapes_that_depend_on_data() -> None:
    """With dynamic=True."""

    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.repeat(1, self.calls)

    def worker(rank: int, n: int) -> Any:
        part: nn.Module = Grows() if rank == 0 else nn.Identity()

        def sum_of(output: Tensor) -> Tensor:
            return output.sum()

        pipeline = Pipeline("1f1b", PipelineStage(part, rank, n), 2, loss_fn=sum_of, dynamic=True)
        losses: list[Tensor] = []
        for _ in range(2):
            pipeline.step(torch.ones(4, 1), losses=losses)
        return [loss.item() for loss in losses]

    assert run(2, worker)[1] == [2, 4, 6, 8]


# ---- measuring


def test_measured_costs_make_a_schedule() -> None:
    """All ranks get the same, gradients stay, and the schedule made of them trains."""

    def worker(rank: int, n: int) -> Any:
        schedule = build("interleaved", n, 4)
        model = mlp(schedule.stages)
        dense = copy.deepcopy(model)
        stages = stages_of(schedule, rank, model)
        pipeline = Pipeline(schedule, stages, loss_fn=mse)
        x, y = data(8)
        pipeline.step(x, target=y)
        costs = pipeline.measure(x, target=y, steps=2)
        whole(dense, x, y)
        check(pipeline, dense)
        made = build("auto", n, 4, costs=costs)
        if made.placement == schedule.placement:
            other = Pipeline(made, stages, loss_fn=mse)
            whole(dense, x, y)
            other.step(x, target=y)
            check(pipeline, dense)
        return costs

    first, second = run(2, worker)
    assert first == second
    assert len(first.forward) == len(first.activation) == 4
    assert min(*first.forward, *first.input, *first.weight, *first.full) > 0
    assert min(first.activation) > 0
