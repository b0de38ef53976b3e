"""What a pipeline's stages take: times of F, B, I and W, and the bytes of activations, as build("auto") wants them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pycomm.errors import InvalidArgument
from pycomm.pipeline.program import Program
from pycomm.pipeline.schedules import Action, Costs, Kind, Schedule
from pycomm.pipeline.schedules.action import COMPUTE, actions_of
from pycomm.pipeline.step import Step

if TYPE_CHECKING:
    from pycomm.pipeline.runtime import Pipeline


def measure(pipeline: Pipeline, inputs: Any, target: Any, steps: int) -> Costs:
    """Collective: medians over microbatches and steps, of every stage, the same on all ranks.

    Runs so many steps whole and so many with B taken apart into I and W, after one of each that warms up. Gradients are
    left as they were; buffers, such as those of batch norms, are not.
    """
    if steps < 1:
        raise InvalidArgument(f"steps must be 1 or more: {steps}")
    parameters = [p for stage in pipeline.stages.values() for p in stage.module.parameters()]
    before = [parameter.grad for parameter in parameters]
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    weights: dict[int, float] = {}
    rank = pipeline.teams.team
    with pipeline.no_sync():
        for kinds in ((Kind.B,), (Kind.I, Kind.W)):
            program = Program.of(_with(pipeline.schedule, kinds), rank)
            for number in range(steps + 1):
                for parameter in parameters:
                    parameter.grad = None
                found = pipeline.run(program, inputs, target, make=_Timed)
                assert isinstance(found, _Timed)
                weights |= found.bytes
                for action, took in found.times if number else ():
                    seconds[action.stage, action.kind].append(took)
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
    mine = {place: median(times) for place, times in seconds.items()}
    return _of_all(pipeline, mine, weights)


def _of_all(
    pipeline: Pipeline, seconds: dict[tuple[int, Kind], float], weights: dict[int, float]
) -> Costs:
    """Collective."""
    everyone: list[Any] = [(seconds, weights)]
    if pipeline.group.process_group is not None:
        everyone *= pipeline.group.world_size
        dist.all_gather_object(everyone, (seconds, weights), group=pipeline.group.process_group)
    times = {place: took for found, _ in everyone for place, took in found.items()}
    bytes = {stage: weight for _, found in everyone for stage, weight in found.items()}
    stages = range(pipeline.schedule.stages)

    def of(kind: Kind) -> list[float]:
        return [times[stage, kind] for stage in stages]

    return Costs(
        of(Kind.F), of(Kind.I), of(Kind.W), full=of(Kind.B), activation=[bytes[s] for s in stages]
    )


def _with(schedule: Schedule, kinds: tuple[Kind, ...]) -> Schedule:
    """The same with all backwards as B, or as I with W right behind."""

    def program(rank: int) -> list[Action]:
        found = []
        for action in actions_of(schedule.programs[rank]):
            if action.kind == Kind.F:
                found.append(action)
            elif action.kind in (Kind.B, Kind.I):
                found += [action._replace(kind=kind) for kind in kinds]
        return found

    programs = tuple(tuple(program(rank)) for rank in range(schedule.ranks))
    return replace(schedule, programs=programs, limits=None)


class _Timed(Step):
    """Which notes how long computations take, and how many bytes forwards keep."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.times: list[tuple[Action, float]] = []
        self.bytes: dict[int, float] = {}
        self.act = {
            kind: self._timed(act) if kind in COMPUTE else act for kind, act in self.act.items()
        }

    def _timed(self, act: Callable[[Action], None]) -> Callable[[Action], None]:
        def run(action: Action) -> None:
            kept: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            is_first = action.kind == Kind.F and action.microbatch == 0
            began = time.perf_counter()
            if is_first:
                with saved_tensors_hooks(pack, lambda tensor: tensor):
                    act(action)
                own = {
                    p.untyped_storage().data_ptr()
                    for p in self.pipeline.stages[action.stage].module.parameters()
                }
                self.bytes[action.stage] = sum(n for at, n in kept.items() if at not in own)
            else:
                act(action)
            self.times.append((action, time.perf_counter() - began))

        return run
