"""What ranks compare before a step sends anything: schedule, mode and sizes; and what they conclude from it alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pycomm.errors import Error, InvalidArgument, MismatchError
from pycomm.pipeline.schedules.action import Schedule
from pycomm.pipeline.teams import Teams
from pycomm.pipeline.values import tensors_of

#: Of a rank that does not see the batch.
UNSEEN = -1


@dataclass(frozen=True)
class Rank:
    """What one rank says of its call."""

    program: int  # of the schedule
    mode: int
    sight: int  # of the tensors that it sees
    size: int  # rows of the batch, or UNSEEN
    is_wrong: bool
    content: int = 0  # of those tensors, in a first call that several ranks pass the same batch

    def row(self) -> list[int]:
        """As numbers."""
        return [self.program, self.mode, self.sight, self.size, int(self.is_wrong), self.content]

    @classmethod
    def of(cls, row: list[int]) -> Rank:
        """The inverse."""
        return cls(row[0], row[1], row[2], row[3], bool(row[4]), row[5])


@dataclass(frozen=True)
class Agreement:
    """The same on all ranks."""

    #: Of calls whose messages look alike.
    key: tuple[Rank, ...]
    size: int
    microbatches: int

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Of the batch, where each microbatch begins and ends; sizes differ by one at most."""
        small, more = divmod(self.size, self.microbatches)
        ends = [small * (i + 1) + min(i + 1, more) for i in range(self.microbatches)]
        return list(zip([0, *ends], ends, strict=False))


def agree(teams: Teams, mine: Rank, schedule: Schedule, error: Error | None) -> Agreement:
    """Collective, some bytes. `error`: what is wrong with this rank's arguments.

    Raises it, and InvalidArgument on all others; MismatchError on all ranks where they differ.
    """
    group = teams.group
    ranks = tuple(Rank.of(row) for row in group.gather_numbers(mine.row()))
    if error is not None:
        raise error
    who = f"rank {group.rank}"
    if wrong := [rank for rank, said in enumerate(ranks) if said.is_wrong]:
        raise InvalidArgument(
            f"{who}: the arguments of rank {wrong[0]} are wrong, as it says itself"
        )
    for what, values in (
        ("schedules", [said.program for said in ranks]),
        ("modes (step or evaluate, loss or not)", [said.mode for said in ranks]),
    ):
        if others := [rank for rank, value in enumerate(values) if value != values[0]]:
            raise MismatchError(
                f"{who}: rank {others[0]} and rank 0 of the pipeline have different {what}"
            )
    for stage, what in ((0, "inputs"), (-1, "targets")):
        _check_alike(ranks, teams.ranks_of(schedule.placement[stage]), what, who)
    first, last = (teams.rank_of(schedule.placement[stage]) for stage in (0, -1))
    size, targets = ranks[first].size, ranks[last].size
    if targets not in (UNSEEN, size):
        raise MismatchError(
            f"{who}: rank {first} has inputs of {size} rows, but rank {last} targets of {targets}"
        )
    if size < schedule.microbatches:
        raise InvalidArgument(
            f"{who}: a batch of {size} rows does not give {schedule.microbatches} microbatches one row each"
        )
    most = max(team.replicas for team in teams.sizes)
    if size // schedule.microbatches < most:
        raise InvalidArgument(
            f"{who}: a batch of {size} rows does not give {most} replicas a row of each of {schedule.microbatches} "
            "microbatches"
        )
    key = tuple(replace(said, content=0) for said in ranks)
    return Agreement(key, size, schedule.microbatches)


def _check_alike(ranks: Sequence[Rank], team: Sequence[int], what: str, who: str) -> None:
    """A team's ranks are all given the whole batch, of which each takes its rows."""
    for rank in team:
        here, there = ranks[rank], ranks[team[0]]
        if (here.size, here.content) != (there.size, there.content):
            raise MismatchError(
                f"{who}: ranks {team[0]} and {rank}, of one team, have different {what}"
                f"{'' if here.size == there.size else f', of {there.size} and {here.size} rows'}; all ranks of a team "
                "are given the same whole batch, of which each replica takes its rows"
            )


def rows_of(values: Any, what: str) -> int:
    """The first dimension of all tensors; UNSEEN if there are none. Raises InvalidArgument if they differ."""
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors_of(values)}
    if None in sizes or len(sizes) > 1:
        found = ", ".join(map(str, [tuple(t.shape) for t in tensors_of(values)]))
        raise InvalidArgument(
            f"the {what}' first dimension must be the batch's, the same for all: {found}"
        )
    return sizes.pop() if sizes else UNSEEN  # type: ignore[return-value]


def digest(value: object) -> int:
    """A number that tells values apart by their text, the same in all processes."""
    return int.from_bytes(
        hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True
    )
