"""How long the stages' actions take, and what their activations weigh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pycomm.errors import InvalidArgument
from pycomm.pipeline.schedules.action import Action, Kind


@dataclass(frozen=True)
class Costs:
    """Times of F, I, W and B for one microbatch, in any unit.

    A number is that of a whole rank, whose chunks share it evenly; a sequence has one number per stage. full: of B,
    which is I and W at once; I + W if None. transfer: of a message between two ranks, from the end of what computed
    it. activation: what a microbatch keeps in a stage from F to B or W, in any unit of memory; a number again is a
    whole rank's.
    """

    forward: float | Sequence[float] = 1.0
    input: float | Sequence[float] = 1.0
    weight: float | Sequence[float] = 1.0
    full: float | Sequence[float] | None = None
    transfer: float = 0.0
    activation: float | Sequence[float] = 1.0

    def of_stages(self, stages: int, chunks: int) -> StageCosts:
        """For so many stages, so many of them on each rank."""
        forward = _spread("forward", self.forward, stages, chunks)
        input_ = _spread("input", self.input, stages, chunks)
        weight = _spread("weight", self.weight, stages, chunks)
        full = [i + w for i, w in zip(input_, weight, strict=True)]
        if self.full is not None:
            full = _spread("full", self.full, stages, chunks)
        if not 0 <= self.transfer < math.inf:
            raise InvalidArgument(f"transfer must be 0 or more: {self.transfer}")
        activation = _spread("activation", self.activation, stages, chunks)
        return StageCosts(forward, input_, weight, full, self.transfer, activation)

    @property
    def stages(self) -> int | None:
        """For how many stages these are, or None if for any number."""
        values = (self.forward, self.input, self.weight, self.full, self.activation)
        counts = {len(value) for value in values if isinstance(value, Sequence)}
        if len(counts) > 1:
            raise InvalidArgument(f"costs are for different numbers of stages: {sorted(counts)}")
        return counts.pop() if counts else None


class StageCosts(NamedTuple):
    """Costs, one of each kind per stage."""

    forward: list[float]
    input: list[float]
    weight: list[float]
    full: list[float]
    transfer: float
    activation: list[float]

    def of(self, action: Action) -> float:
        """How long an action of computation takes."""
        match action.kind:
            case Kind.F:
                return self.forward[action.stage]
            case Kind.I:
                return self.input[action.stage]
            case Kind.W:
                return self.weight[action.stage]
            case _:
                return self.full[action.stage]


def _spread(name: str, value: float | Sequence[float], stages: int, chunks: int) -> list[float]:
    if not isinstance(value, Sequence):
        values = [value / chunks] * stages
    elif len(value) == stages:
        values = [float(one) for one in value]
    else:
        raise InvalidArgument(f"{name} has {len(value)} costs for {stages} stages: give one each")
    if not all(0 <= one < math.inf for one in values):
        raise InvalidArgument(f"{name} must be 0 or more, of every stage: {value}")
    return values
