"""Jobs as the flight recorder would see them: fakes of communicators, filled by hand with what ranks did when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from pycomm.trace import write

#: The scenes' second 0, in nanoseconds of the Unix epoch.
BEGAN = 1_764_676_987_000_000_000
TIMEOUT = 8.0


def ns(seconds: float) -> int:
    """A time of a scene."""
    return BEGAN + round(seconds * 1e9)


@dataclass
class Group:
    """What all ranks of one group share. Ranks are those of the group, times seconds of the scene."""

    name: str
    ranks: Sequence[int]
    pids: Sequence[int]
    rings: list[list[dict[str, Any]]] = field(init=False)
    states: list[dict[str, Any]] = field(init=False)
    failure: dict[str, Any] | None = None
    capacity: int | None = None

    def __post_init__(self) -> None:
        self.rings = [[] for _ in self.ranks]
        self.states = [
            {
                "pid": pid,
                "alive": True,
                "left": False,
                "stopped": False,
                "sequence": 0,
                "farewell": "",
            }
            for pid in self.pids
        ]

    def enter(
        self, rank: int, operation: str = "all_reduce", at: float = 0, **more: Any
    ) -> dict[str, Any]:
        """A rank enters its next collective."""
        self.states[rank]["sequence"] += 1
        return self._add(rank, operation, self.states[rank]["sequence"], at, more)

    def queue(
        self, rank: int, operation: str = "all_reduce", at: float = 0, **more: Any
    ) -> dict[str, Any]:
        """A rank queues a collective behind others."""
        record = self._add(rank, operation, 0, at, more)
        record.update(state="scheduled", started_ns=None)
        return record

    def post(
        self, rank: int, operation: str, peer: int, at: float = 0, **more: Any
    ) -> dict[str, Any]:
        """A rank posts a message."""
        number = 1 + sum(r["peer"] is not None for r in self.rings[rank])
        return self._add(rank, operation, number, at, {"peer": peer, "tag": 0} | more)

    def _add(
        self, rank: int, operation: str, sequence: int, at: float, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        ring = self.rings[rank]
        reduces = operation in ("all_reduce", "reduce", "reduce_scatter")
        count = 0 if "barrier" in operation else 5
        record: dict[str, Any] = {
            "record_id": ring[-1]["record_id"] + 1 if ring else 1,
            "sequence": sequence,
            "operation": operation,
            "dtype": "float32",
            "op": "sum" if reduces else None,
            "count": count,
            "shape": None,
            "root": 0 if operation in ("broadcast", "reduce", "gather", "scatter") else None,
            "peer": None,
            "tag": None,
            "state": "started",
            "created_ns": ns(at),
            "started_ns": ns(at),
            "met_ns": None,
            "finished_ns": None,
            "line": "",
            "timeout_ms": round(TIMEOUT * 1000),
        } | dict(more)
        if record["shape"] is not None:
            record["count"] = math.prod(record["shape"])
        record["bytes"] = 4 * record["count"]
        ring.append(record)
        if self.capacity is not None:
            del ring[: -self.capacity]
        return record

    def all_do(
        self, operation: str = "all_reduce", at: float = 0, took: float = 0.001, **more: Any
    ) -> None:
        """Every rank does the same collective; rank r enters it r microseconds late."""
        for rank in range(len(self.ranks)):
            record = self.enter(rank, operation, at + rank * 1e-6, **more)
            met = at + (len(self.ranks) - 1) * 1e-6
            record.update(state="completed", met_ns=ns(met), finished_ns=ns(at + took))

    def fail(self, at: float, cause: str, culprit: int = -1, report: str = "") -> None:
        """The group fails: whatever is under way ends, on each rank a little later than on the one before."""
        self.failure = {"text": report or f"it was {cause}", "cause": cause, "culprit": culprit}
        for rank, ring in enumerate(self.rings):
            if not self.states[rank]["alive"] or self.states[rank]["stopped"]:
                continue
            for record in ring:
                if record["state"] == "started":
                    record.update(state="failed", finished_ns=ns(at + rank * 1e-4))


def done(record: dict[str, Any], at: float) -> None:
    """An operation is completed."""
    record.update(state="completed", finished_ns=ns(at))


@dataclass
class Fake:
    """What one rank sees of a group: a pycomm.trace.Recorded."""

    group: Group
    rank: int

    @property
    def world_size(self) -> int:
        return len(self.group.ranks)

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def global_ranks(self) -> Sequence[int]:
        return self.group.ranks

    def records(self, rank: int, /) -> list[dict[str, Any]]:
        return [dict(record) for record in self.group.rings[rank]]

    def rank_state(self, rank: int, /) -> dict[str, Any]:
        return dict(self.group.states[rank])

    def failure_cause(self) -> dict[str, Any] | None:
        return self.group.failure


class World:
    """A job of several ranks, with a default group and others."""

    def __init__(self, size: int = 3, name: str = "") -> None:
        self.pids = [4710 + rank for rank in range(size)]
        self.groups = [Group(name, range(size), self.pids)]

    @property
    def default(self) -> Group:
        """The group of all ranks."""
        return self.groups[0]

    def group(self, name: str, *ranks: int) -> Group:
        """A new group."""
        made = Group(name, ranks, [self.pids[rank] for rank in ranks])
        self.groups.append(made)
        return made

    def end(self, rank: int, **state: Any) -> None:
        """Something happens to a rank's process: all its groups see it."""
        for group in self.groups:
            if rank in group.ranks:
                group.states[list(group.ranks).index(rank)].update(state)

    def communicators(self, rank: int) -> list[Fake]:
        """A rank's view of its groups."""
        return [Fake(g, list(g.ranks).index(rank)) for g in self.groups if rank in g.ranks]

    def dump(self, directory: Path, *ranks: int, at: float, reason: str = "test") -> None:
        """Ranks (all, if none is named) write their dumps."""
        for rank in ranks or range(len(self.pids)):
            with at_time(at):
                write.dump(self.communicators(rank), directory, reason)


def with_history(size: int = 3, name: str = "", rounds: int = 4) -> World:
    """A world in whose default group every round was a broadcast and an all-reduce, one second each."""
    world = World(size, name)
    for second in range(rounds):
        world.default.all_do("broadcast", second, line="train.py:70 in step")
        world.default.all_do("all_reduce", second + 0.5, line="train.py:88 in step")
    return world


def enter_all_but(world: World, *absent: int, at: float = 5) -> None:
    """All ranks but some enter operation 9, an all-reduce."""
    for rank in range(len(world.pids)):
        if rank not in absent:
            world.default.enter(rank, at=at, line="train.py:88 in step")


def at_time(seconds: float) -> Any:
    """Dumps are written at a time of the scene."""
    clock = mock.Mock(spec_set=["time_ns"])
    clock.time_ns.return_value = ns(seconds)
    return mock.patch.object(write, "time", clock)
