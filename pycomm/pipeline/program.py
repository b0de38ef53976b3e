"""A rank's program, prepared to be run again and again: when receives are posted, and where a stage's gradients end."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from pycomm.pipeline.agreement import digest
from pycomm.pipeline.messages import tag_of
from pycomm.pipeline.schedules import Action, Kind, Schedule, lower
from pycomm.pipeline.schedules.action import COMPUTE, actions_of
from pycomm.pipeline.schedules.lower import peer_of

_BACKWARD: Final = frozenset({Kind.B, Kind.I, Kind.W})
#: Receives are posted ahead of so many computations more than the one that needs them.
_AHEAD: Final = 1


@dataclass(frozen=True)
class Program:
    """A rank's actions, and what else happens with each."""

    actions: tuple[Action, ...]
    #: By action: receives that are posted before it.
    posts: tuple[tuple[Action, ...], ...]
    #: The last backward of each stage.
    ends: frozenset[int]
    #: Of a message: the peer, and its first tag.
    routes: dict[Action, tuple[int, int]]
    digest: int
    trains: bool

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> Program:
        """The rank's part of a schedule, with messages."""
        lowered = lower(schedule)
        actions = tuple(actions_of(lowered.programs[rank]))
        computes = [i for i, action in enumerate(actions) if action.kind in COMPUTE]
        posts: list[tuple[Action, ...]] = [()] * len(actions)
        for index, action in enumerate(actions):
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                ahead = bisect_left(computes, index) - _AHEAD
                posts[computes[ahead] if ahead >= 0 else 0] += (action,)
        last = {a.stage: i for i, a in enumerate(actions) if a.kind in _BACKWARD}
        count = lowered.microbatches
        routes = {
            a: (peer_of(a, lowered), tag_of(a, count)) for a in actions if a.kind not in COMPUTE
        }
        text = digest((lowered.name, lowered.placement, lowered.programs))
        return cls(actions, tuple(posts), frozenset(last.values()), routes, text, bool(last))
