"""Who waited for whom at one moment, and where the chains of waiting ranks end.

A rank in a collective waits for those that have not entered it; in a receive for the sender, in a send that is not
done for the receiver. Whoever is waited for and waits for nobody is the cause; if there is no such rank, a circle is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from pycomm.trace.failure import Kind
from pycomm.trace.format import ANY_SOURCE, COMPLETED, Record
from pycomm.trace.job import Group, Job


@dataclass(frozen=True, slots=True)
class Wait:
    """One rank in one operation that was not done at the moment."""

    group: Group
    rank: int
    record: Record
    awaited: tuple[int, ...]  # empty: all it needs are there
    since_ns: int
    until_ns: int

    @property
    def waited_ns(self) -> int:
        """How long it had waited."""
        return max(self.until_ns - self.since_ns, 0)


class Cause(Enum):
    """Why a rank does not do what others wait for; the first that is found is told."""

    DIED = auto()
    EXITED = auto()
    LEFT = auto()
    STOPPED = auto()
    CIRCLE = auto()
    ABSENT = auto()  # alive, and in no operation that waits


@dataclass(frozen=True)
class End:
    """Where the chains of waiting ranks end."""

    cause: Cause
    ranks: tuple[int, ...]  # the culprits; of a circle all its ranks, in order
    waits: tuple[Wait, ...]  # all that wait for a culprit; of a circle once around
    found_by: dict[int, Wait] = field(
        default_factory=dict
    )  # of every rank on the way, who waits for it
    start: tuple[Wait, ...] = ()

    def chain_to(self, wait: Wait) -> list[Wait]:
        """How a wait was found: from one of the first, each for the rank of the next."""
        chain = [wait]
        while chain[0] not in self.start and chain[0].rank in self.found_by:
            before = self.found_by[chain[0].rank]
            if before in chain:
                break
            chain.insert(0, before)
        return chain


class Moment:
    """The job at one time: when its first group failed, or when the dumps were written."""

    def __init__(self, job: Job, ns: int, failed: Group | None) -> None:
        self.job = job
        self.ns = ns
        self.failed = failed
        self.waits: dict[int, list[Wait]] = {rank: [] for rank in job.ranks}
        self.last_sign = {
            rank: max((r.moved_ns for g in job.groups for r in g.records.get(rank, ())), default=0)
            for rank in job.ranks
        }
        for group in job.groups:
            for rank in group.ranks:
                for record in group.records[rank]:
                    if self._is_under_way(record):
                        self.waits[rank].append(self._wait(group, rank, record))

    # ---- one rank

    def _is_under_way(self, record: Record) -> bool:
        began = record.started_ns is not None and record.started_ns <= self.ns
        ended = record.finished_ns is not None and record.finished_ns < self.ns
        return began and not ended and record.state != COMPLETED

    def _wait(self, group: Group, rank: int, record: Record) -> Wait:
        awaited = (
            self._awaited_by_message(group, rank, record)
            if record.is_message
            else self._awaited_by_collective(group, rank, record)
        )
        assert record.started_ns is not None
        return Wait(group, rank, record, awaited, record.started_ns, self.ns)

    def _awaited_by_collective(self, group: Group, rank: int, record: Record) -> tuple[int, ...]:
        others = [other for other in group.ranks if other != rank]
        missing = tuple(o for o in others if not self.has_entered(group, o, record.sequence))
        if missing and record.met_ns is None:
            return missing
        # All have met: only one that is gone or stands still can keep the others.
        return tuple(
            o for o in others if self.trouble(group, o) and not self._is_done(group, o, record)
        )

    def _is_done(self, group: Group, rank: int, record: Record) -> bool:
        theirs = group.collective(rank, record.sequence)
        return theirs is not None and theirs.state == COMPLETED

    def _awaited_by_message(self, group: Group, rank: int, record: Record) -> tuple[int, ...]:
        assert record.peer is not None
        if record.peer == ANY_SOURCE:
            return tuple(other for other in group.ranks if other != rank)
        meets = any(
            self._is_under_way(other) and fits(record, rank, other, record.peer)
            for other in group.messages(record.peer)
        )
        return () if meets and not self.trouble(group, record.peer) else (record.peer,)

    def has_entered(self, group: Group, rank: int, sequence: int) -> bool:
        """Whether a rank had entered the collective of that number by then."""
        record = group.collective(rank, sequence)
        if record is not None:
            assert record.started_ns is not None
            return record.started_ns <= self.ns
        last = max((r.sequence for r in group.collectives(rank)), default=0)
        # Records of it may have been overwritten by later ones.
        return last > sequence or (last < sequence <= group.state(rank).sequence)

    def trouble(self, group: Group, rank: int) -> Cause | None:
        """Whether a rank's process was gone, or stood still, as far as this group knows."""
        if group is self.failed and (told := _told_by(group, rank)):
            return told
        # What is seen of it: as early as possible, since the failure itself ends ranks.
        seen = [state for ns, state in group.states[rank] if ns >= self.ns] or [group.state(rank)]
        state = seen[0] if self.failed else seen[-1]
        if state.stopped:
            return Cause.STOPPED
        if _timed_out(group) or self._ended_the_group(rank) or self.last_sign[rank] >= self.ns:
            return None  # the death of a rank is noticed before any deadline
        if told := _told_by(group, rank):
            return told
        if state.left:
            return Cause.EXITED if state.farewell else Cause.LEFT
        return None if state.alive else Cause.DIED

    def _ended_the_group(self, rank: int) -> bool:
        """Whether a rank did so itself, and so was there; it is often gone soon afterwards."""
        group = self.failed
        on_purpose = (Kind.INTERRUPTED, Kind.ABORTED)
        return bool(
            group and group.failure and group.failure.kind in on_purpose and group.culprit == rank
        )

    # ---- all ranks

    def end(self, start: list[Wait]) -> End | None:
        """Where the chains that start with these waits end; None if nobody is waited for."""
        parents, troubled = self._reach(start)
        reached = list(parents)
        if troubled:
            worst = min(troubled.values(), key=lambda cause: cause.value)
            culprits = tuple(sorted(r for r, cause in troubled.items() if cause is worst))
            return End(worst, culprits, self._on(culprits), parents, tuple(start))
        if circle := self._circle(reached):
            return End(Cause.CIRCLE, tuple(wait.rank for wait in circle), tuple(circle))
        idle = tuple(sorted(rank for rank in reached if not self._awaited(rank)))
        return End(Cause.ABSENT, idle, self._on(idle), parents, tuple(start)) if idle else None

    def _on(self, culprits: tuple[int, ...]) -> tuple[Wait, ...]:
        """All that wait for a culprit; of two that are gone, one may have waited for the other."""
        every = [wait for of_rank in self.waits.values() for wait in of_rank]
        on_them = [wait for wait in every if set(wait.awaited) & set(culprits)]
        return tuple(wait for wait in on_them if wait.rank not in culprits) or tuple(on_them)

    def _trouble_of(self, wait: Wait, rank: int) -> Cause | None:
        """Why a rank cannot come to where it is waited for: what its group knows, or others of its process."""
        causes = {
            group: self.trouble(group, rank) for group in self.job.groups if rank in group.ranks
        }
        if here := causes[wait.group]:
            return here
        timed_out = self.failed is not None and _timed_out(self.failed)
        return next(
            (
                c
                for c in causes.values()
                if c is Cause.STOPPED or (c is Cause.DIED and not timed_out)
            ),
            None,
        )

    def _awaited(self, rank: int) -> list[tuple[int, Wait]]:
        return [(other, wait) for wait in self.waits[rank] for other in wait.awaited]

    def _reach(self, start: list[Wait]) -> tuple[dict[int, Wait], dict[int, Cause]]:
        """Every rank that is waited for, with the wait that it was found by; and which of them cannot come."""
        parents: dict[int, Wait] = {}
        troubled: dict[int, Cause] = {}
        todo = deque((other, wait) for wait in start for other in wait.awaited)
        while todo:
            rank, wait = todo.popleft()
            if cause := self._trouble_of(wait, rank):
                troubled.setdefault(rank, cause)
            if rank in parents:
                continue
            parents[rank] = wait
            if not cause:
                todo.extend(self._awaited(rank))
        return parents, troubled

    def _circle(self, ranks: list[int]) -> list[Wait] | None:
        """The shortest circle of ranks that wait for each other."""
        best: list[Wait] | None = None
        for first in sorted(ranks):
            parents: dict[int, Wait] = {}
            todo = deque([first])
            while todo and first not in parents:
                for other, wait in self._awaited(todo.popleft()):
                    if other not in parents:
                        parents[other] = wait
                        todo.append(other)
            if first not in parents:
                continue
            circle = [parents[first]]
            while circle[0].rank != first:
                circle.insert(0, parents[circle[0].rank])
            if best is None or len(circle) < len(best):
                best = circle
        return best


def _told_by(group: Group, rank: int) -> Cause | None:
    """What a group's failure says of a rank."""
    if group.failure is None or group.culprit != rank:
        return None
    told = {
        Kind.DIED: Cause.DIED,
        Kind.EXITED: Cause.EXITED,
        Kind.LEFT: Cause.LEFT,
        Kind.STOPPED: Cause.STOPPED,
    }
    return told.get(group.failure.kind)


def _timed_out(group: Group) -> bool:
    return group.failure is not None and group.failure.kind is Kind.TIMEOUT


def fits(message: Record, rank: int, other: Record, peer: int) -> bool:
    """Whether one rank's send and another's receive name each other."""
    return (
        {message.operation, other.operation} == {"send", "recv"}
        and message.tag == other.tag
        and other.peer in (rank, ANY_SOURCE)
        and message.peer in (peer, ANY_SOURCE)
    )
