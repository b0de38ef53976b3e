"""What a schedule consists of: actions, batches of messages, and one program of them for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from pycomm.errors import InvalidArgument


class Kind(StrEnum):
    """What an action does with a microbatch.

    Of a message the stage is the one of the rank that runs the action: SEND_F of stage 2 goes to stage 3, whose RECV_F
    takes it; SEND_B of stage 3 is the gradient of that tensor, which RECV_B of stage 2 takes.
    """

    F = "F"  # forward
    B = "B"  # full backward: I and W at once
    I = "I"  # gradient of the stage's input  # noqa: E741
    W = "W"  # gradient of the stage's weights
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})


class Action(NamedTuple):
    """One thing that a rank does; as text ``2F5``: stage 2, forward, microbatch 5."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Batch(NamedTuple):
    """Messages that a rank starts together and then waits for, because their directions cross."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.actions))})"


Step: TypeAlias = Action | Batch
Program: TypeAlias = tuple[Step, ...]


@dataclass(frozen=True)
class Limits:
    """What a rank may hold at once, each with one count per rank.

    activations: of microbatches in stages, from their F to the end of their B or W. weights: of W that are due, from I.
    """

    activations: tuple[int, ...]
    weights: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Who does what, in which order: `programs` has one program for each rank.

    placement: the rank of each stage. limits: what it promises to hold at most; validate() looks at that.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    programs: tuple[Program, ...]
    limits: Limits | None = None

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.programs)

    @property
    def stages(self) -> int:
        """How many there are, on all ranks."""
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return self.stages // self.ranks

    def stages_of(self, rank: int) -> list[int]:
        """Those that are placed on this rank, the first one of the model first."""
        return [stage for stage, where in enumerate(self.placement) if where == rank]

    def compute(self, rank: int) -> list[Action]:
        """A rank's program without messages."""
        return [action for action in actions_of(self.programs[rank]) if action.kind in COMPUTE]


def actions_of(program: Program) -> Iterator[Action]:
    """A program's actions, those of batches one by one."""
    for step in program:
        if isinstance(step, Batch):
            yield from step.actions
        else:
            yield step


def needs(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """What an action of computation waits for: one of each group, as both B and I give the gradient of an input."""
    stage, kind, microbatch = action
    if kind == Kind.F:
        return [(Action(stage - 1, Kind.F, microbatch),)] if stage else []
    if kind == Kind.W:
        return [(Action(stage, Kind.I, microbatch),)]
    found: list[tuple[Action, ...]] = [(Action(stage, Kind.F, microbatch),)]
    if stage + 1 < stages:
        found.append(tuple(Action(stage + 1, kind, microbatch) for kind in (Kind.B, Kind.I)))
    return found


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stages in a loop over ranks: rank r has r, r + ranks, r + 2 ranks and so on."""
    return tuple(range(ranks)) * chunks


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Two stages for each rank, there and back: rank r has r and 2 ranks - 1 - r."""
    return (*range(ranks), *reversed(range(ranks)))


def check_count(name: str, value: int) -> None:
    """Of ranks, microbatches, chunks: raises unless it is 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"a schedule's {name} must be a whole number of 1 or more: {value!r}")
