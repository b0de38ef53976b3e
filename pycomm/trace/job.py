"""All dumps of one run put together: of every group the ranks' states, records and the failure.

Every dump shows all ranks of its groups, at its own time. Of each operation the most advanced record counts; of the
states all are kept, since a rank that was alive when the group failed is often dead a second later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from pycomm.trace.format import (
    ANY_SOURCE,
    FAILED,
    STATES,
    Dump,
    Failure,
    GroupView,
    RankState,
    Record,
)

Key = tuple[str, tuple[int, ...], int]
Views = list[tuple[Dump, GroupView]]


@dataclass(frozen=True, eq=False)
class Group:
    """One group, from all dumps. Ranks, roots and peers are those of the job."""

    name: str
    ranks: tuple[int, ...]
    failure: Failure | None
    states: dict[int, list[tuple[int, RankState]]]  # oldest first, with the time of the dump
    records: dict[int, tuple[Record, ...]]
    seen_ns: int  # the newest view

    def state(self, rank: int) -> RankState:
        """The newest state of a rank."""
        return self.states[rank][-1][1]

    def pid(self, rank: int) -> int:
        """A rank's process; 0 if unknown."""
        return max(state.pid for _, state in self.states[rank])

    def collectives(self, rank: int) -> list[Record]:
        """A rank's collectives that have begun, oldest first."""
        return list(self._by_sequence[rank].values())

    def collective(self, rank: int, sequence: int) -> Record | None:
        """A rank's operation of that number, if it has begun and is still recorded."""
        return self._by_sequence[rank].get(sequence)

    def queued(self, rank: int) -> list[Record]:
        """A rank's collectives that have not begun, oldest first."""
        return [r for r in self.records[rank] if not r.is_message and r.started_ns is None]

    def messages(self, rank: int) -> list[Record]:
        """A rank's sends and receives, oldest first."""
        return [r for r in self.records[rank] if r.is_message]

    @cached_property
    def _by_sequence(self) -> dict[int, dict[int, Record]]:
        return {
            rank: {r.sequence: r for r in known if not r.is_message and r.started_ns is not None}
            for rank, known in self.records.items()
        }

    def is_complete(self, rank: int) -> bool:
        """Whether the records reach back to the first operation."""
        records = self.records[rank]
        return not records or records[0].record_id <= 1

    @property
    def cause(self) -> str:
        """Why it failed; nothing if it has not."""
        return self.failure.cause if self.failure else ""

    @property
    def culprit(self) -> int | None:
        """The rank of the job that the failure names."""
        known = self.failure is not None and self.failure.culprit >= 0
        return self.ranks[self.failure.culprit] if known and self.failure else None

    @property
    def failed_ns(self) -> int | None:
        """When the first operation failed."""
        records = (record for known in self.records.values() for record in known)
        return min(
            (r.finished_ns for r in records if r.state == FAILED and r.finished_ns), default=None
        )


@dataclass(frozen=True)
class Job:
    """Everything that is known of a run."""

    groups: list[Group]
    dumps: dict[int, Dump]  # by the rank that wrote it
    notes: list[str] = field(default_factory=list)  # what was left out, in words

    @property
    def ranks(self) -> list[int]:
        """All ranks that are known of."""
        return sorted({rank for group in self.groups for rank in group.ranks} | set(self.dumps))

    def groups_of(self, rank: int) -> list[Group]:
        """The groups that a rank is in."""
        return [group for group in self.groups if rank in group.states]

    def pid(self, rank: int) -> int:
        """A rank's process; 0 if unknown."""
        return max((group.pid(rank) for group in self.groups_of(rank)), default=0)

    def first_failed(self) -> Group | None:
        """The group whose failure came first; others failed after it, and often because of it."""
        failed = [group for group in self.groups if group.failure]
        return min(failed, key=lambda group: group.failed_ns or group.seen_ns, default=None)


def put_together(dumps: list[Dump]) -> Job:
    """One job from dumps of different ranks. Those of another run are left out, and named in the notes."""
    kept: dict[int, Dump] = {}
    views: dict[Key, Views] = {}
    notes = []
    for dump in sorted(dumps, key=lambda dump: -dump.time_ns):
        own = list(_keyed(dump))
        if why := _why_another_run(dump, own, kept, views):
            notes.append(f"{dump.file} is left out: {why}, which is newer")
            continue
        kept[dump.rank] = dump
        for key, view in own:
            views.setdefault(key, []).append((dump, view))
    groups = [_merge(key, seen[::-1]) for key, seen in views.items()]
    groups.sort(key=lambda group: (-len(group.ranks), group.ranks, group.name))
    return Job(groups, dict(sorted(kept.items())), notes)


def _keyed(dump: Dump) -> Iterator[tuple[Key, GroupView]]:
    """The groups of a dump; several of one name and ranks are told apart by their order."""
    seen: dict[tuple[str, tuple[int, ...]], int] = {}
    for view in dump.groups:
        alike = (view.name, view.ranks)
        seen[alike] = seen.get(alike, -1) + 1
        yield (*alike, seen[alike]), view


def _why_another_run(
    dump: Dump, own: list[tuple[Key, GroupView]], kept: dict[int, Dump], views: dict[Key, Views]
) -> str:
    """Why a dump does not belong to the newer ones; empty if it does."""
    if dump.rank in kept:
        return f"it is of rank {dump.rank}, as {kept[dump.rank].file} is"
    for key, view in own:
        for newer, other in views.get(key, ()):
            for rank, state, theirs in zip(view.ranks, view.states, other.states, strict=True):
                if 0 != state.pid != theirs.pid != 0:
                    return (
                        f"it is of another run: rank {rank} has pid {state.pid} in it, but {theirs.pid} in "
                        f"{newer.file}"
                    )
            if not _same_operations(view, other):
                return f"it is of another group: its operations are not those of {newer.file}"
    return ""


def _same_operations(view: GroupView, other: GroupView) -> bool:
    for mine, theirs in zip(view.records, other.records, strict=True):
        known = {record.record_id: _call(record) for record in theirs}
        if any(known.get(record.record_id, _call(record)) != _call(record) for record in mine):
            return False
    return True


def _call(record: Record) -> tuple[str, int, str]:
    return record.operation, record.count, record.dtype


def _merge(key: Key, seen: Views) -> Group:
    """The views of one group, oldest first, as one."""
    name, ranks, number = key
    states, records = {}, {}
    for local, rank in enumerate(ranks):
        states[rank] = [(dump.time_ns, view.states[local]) for dump, view in seen]
        records[rank] = _merge_records([view.records[local] for _, view in seen], ranks)
    return Group(
        name=name if number == 0 else f"{name}#{number + 1}",
        ranks=ranks,
        failure=next((view.failure for _, view in seen if view.failure), None),
        states=states,
        records=records,
        seen_ns=max(dump.time_ns for dump, _ in seen),
    )


def _merge_records(views: list[tuple[Record, ...]], ranks: tuple[int, ...]) -> tuple[Record, ...]:
    best: dict[int, Record] = {}
    for record in (record for view in views for record in view):
        known = best.get(record.record_id)
        if known is None or STATES.index(record.state) >= STATES.index(known.state):
            best[record.record_id] = record
    return tuple(_of_the_job(best[number], ranks) for number in sorted(best))


def _of_the_job(record: Record, ranks: tuple[int, ...]) -> Record:
    """The record with root and peer as ranks of the job."""
    if record.root is not None:
        return replace(record, root=ranks[record.root])
    if record.peer is not None and record.peer != ANY_SOURCE:
        return replace(record, peer=ranks[record.peer])
    return record
