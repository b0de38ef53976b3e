"""Who waited for whom at one moment, and where the chains of waiting ranks end.

A rank in a collective waits for those that have not entered it; in a receive for the sender, in a send that is not
done for the receiver. Whoever is waited for and waits for nobody is the cause; if there is no such rank, a circle is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pycomm.trace.format import ANY_SOURCE, COMPLETED, Cause, Record
from pycomm.trace.job import Group, Job

#: Why a rank cannot come to where it is waited for; of several the first is the cause.
TROUBLE = (Cause.DIED, Cause.EXITED, Cause.LEFT, Cause.STOPPED)


@dataclass(frozen=True, slots=True)
class Wait:
    """One rank in one operation that was not done at the moment."""

    group: Group
    rank: int
    record: Record
    awaited: tuple[int, ...]  # empty: all it needs are there
    waited_ns: int

    @property
    def operation(self) -> tuple[object, ...]:
        """What is one for all ranks of a collective, and of a message its own."""
        of_rank = (self.rank, self.record.record_id) if self.record.is_message else ()
        return (id(self.group), self.record.sequence, *of_rank)


@dataclass(frozen=True)
class End:
    """Where the chains of waiting ranks end."""

    cause: Cause
    ranks: tuple[int, ...]  # the culprits; of a circle all its ranks, in order
    waits: tuple[Wait, ...] = ()  # all that wait for a culprit; of a circle once around
    chain: tuple[Wait, ...] = ()  # who waited for the first of those, and so on back


class Moment:
    """The job at one time: when its first group failed, or when the dumps were written."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.failed = failed = job.first_failed()
        newest = max((dump.time_ns for dump in job.dumps.values()), default=0)
        self.ns = (failed.failed_ns or failed.seen_ns) if failed else newest
        self._last_sign = {
            rank: max((r.moved_ns for g in job.groups_of(rank) for r in g.records[rank]), default=0)
            for rank in job.ranks
        }
        self.waits: dict[int, list[Wait]] = {rank: [] for rank in job.ranks}
        for group in job.groups:
            for rank in group.ranks:
                for record in filter(self._is_under_way, group.records[rank]):
                    self.waits[rank].append(self._wait(group, rank, record))

    def all_waits(self) -> list[Wait]:
        """Of all ranks, the longest first."""
        waits = [wait for of_rank in self.waits.values() for wait in of_rank]
        return sorted(waits, key=lambda wait: -wait.waited_ns)

    # ---- one rank

    def _is_under_way(self, record: Record) -> bool:
        began = record.started_ns is not None and record.started_ns <= self.ns
        ended = record.finished_ns is not None and record.finished_ns < self.ns
        return began and not ended and record.state != COMPLETED

    def _wait(self, group: Group, rank: int, record: Record) -> Wait:
        find = self._awaited_by_message if record.is_message else self._awaited_by_collective
        waited = max(self.ns - (record.started_ns or 0), 0)
        return Wait(group, rank, record, find(group, rank, record), waited)

    def _awaited_by_collective(self, group: Group, rank: int, record: Record) -> tuple[int, ...]:
        others = [other for other in group.ranks if other != rank]
        missing = tuple(o for o in others if not self._has_entered(group, o, record.sequence))
        if missing and record.met_ns is None:
            return missing
        # All have met: only one that is gone or stands still can keep the others.
        return tuple(o for o in others if self.trouble(group, o) and not _is_done(group, o, record))

    def _has_entered(self, group: Group, rank: int, sequence: int) -> bool:
        """Whether a rank had entered the collective of that number by then."""
        if record := group.collective(rank, sequence):
            return (record.started_ns or 0) <= self.ns
        last = max((r.sequence for r in group.collectives(rank)), default=0)
        # Records of it may have been overwritten by later ones.
        return last > sequence or (last < sequence <= group.state(rank).sequence)

    def _awaited_by_message(self, group: Group, rank: int, record: Record) -> tuple[int, ...]:
        if record.peer is None or record.peer == ANY_SOURCE:
            return tuple(other for other in group.ranks if other != rank)
        meets = any(
            self._is_under_way(other) and fits(record, rank, other)
            for other in group.messages(record.peer)
        )
        return () if meets and not self.trouble(group, record.peer) else (record.peer,)

    def trouble(self, group: Group, rank: int) -> Cause | None:
        """Whether a rank's process was gone or stood still, or had left this group."""
        if here := self._trouble_in(group, rank):
            return here
        elsewhere = [self._trouble_in(other, rank) for other in self.job.groups_of(rank)]
        return next((cause for cause in elsewhere if cause in (Cause.DIED, Cause.STOPPED)), None)

    def _trouble_in(self, group: Group, rank: int) -> Cause | None:
        if group is self.failed and group.culprit == rank and group.cause in TROUBLE:
            return Cause(group.cause)
        # As early as possible, since the failure itself ends ranks.
        since = [state for ns, state in group.states[rank] if ns >= self.ns]
        state = since[0] if self.failed and since else group.state(rank)
        if state.stopped:
            return Cause.STOPPED
        if self._was_there(rank):
            return None
        if state.left:
            return Cause.EXITED if state.farewell else Cause.LEFT
        return None if state.alive else Cause.DIED

    def _was_there(self, rank: int) -> bool:
        """Whether a rank went later than the moment, as many do after a failure."""
        if self._last_sign[rank] >= self.ns:
            return True
        if self.failed is None:
            return False
        ended_it = self.failed.cause in (Cause.INTERRUPTED, Cause.ABORTED)
        # The death of a rank is noticed before any deadline.
        return self.failed.cause == Cause.TIMEOUT or (ended_it and self.failed.culprit == rank)

    # ---- all ranks

    def end(self, start: list[Wait]) -> End | None:
        """Where the chains that start with these waits end; None if nobody is waited for."""
        found_by: dict[int, Wait] = {}  # every rank that is waited for
        troubled: dict[int, Cause] = {}
        todo = deque((rank, wait) for wait in start for rank in wait.awaited)
        while todo:
            rank, wait = todo.popleft()
            if cause := self.trouble(wait.group, rank):
                troubled.setdefault(rank, cause)
            if rank not in found_by:
                found_by[rank] = wait
                todo.extend(self._awaited(rank) if not cause else ())
        if not found_by:
            return None
        if troubled:
            worst = min(troubled.values(), key=TROUBLE.index)
            culprits = [rank for rank, cause in troubled.items() if cause is worst]
            return self._end(worst, culprits, start, found_by)
        if circle := self._circle(sorted(found_by)):
            return End(Cause.CIRCLE, tuple(wait.rank for wait in circle), tuple(circle))
        idle = [rank for rank in found_by if not self._awaited(rank)]
        return self._end(Cause.ABSENT, idle, start, found_by)

    def _end(
        self, cause: Cause, culprits: list[int], start: list[Wait], found_by: dict[int, Wait]
    ) -> End:
        on_them = [wait for wait in self.all_waits() if set(wait.awaited) & set(culprits)]
        on_them.sort(key=lambda wait: wait.group is not self.failed)
        # Of two that are gone, one may have waited for the other.
        waits = [wait for wait in on_them if wait.rank not in culprits] or on_them
        chain: list[Wait] = []
        rank = waits[0].rank
        while rank in found_by and not any(wait.rank == rank for wait in start):
            wait = found_by[rank]
            if wait in chain:
                break
            chain.insert(0, wait)
            rank = wait.rank
        return End(cause, tuple(sorted(culprits)), tuple(waits), (*chain, waits[0]))

    def _awaited(self, rank: int) -> list[tuple[int, Wait]]:
        return [(other, wait) for wait in self.waits[rank] for other in wait.awaited]

    def _circle(self, ranks: list[int]) -> list[Wait]:
        """The shortest circle of ranks that wait for each other."""
        best: list[Wait] = []
        for first in ranks:
            found_by: dict[int, Wait] = {}
            todo = deque([first])
            while todo and first not in found_by:
                for other, wait in self._awaited(todo.popleft()):
                    if other not in found_by:
                        found_by[other] = wait
                        todo.append(other)
            if first not in found_by:
                continue
            circle = [found_by[first]]
            while circle[0].rank != first:
                circle.insert(0, found_by[circle[0].rank])
            if not best or len(circle) < len(best):
                best = circle
        return best


def _is_done(group: Group, rank: int, record: Record) -> bool:
    theirs = group.collective(rank, record.sequence)
    return theirs is not None and theirs.state == COMPLETED


def fits(message: Record, rank: int, other: Record) -> bool:
    """Whether a rank's message and another one of its peer's are a send and its receive."""
    is_pair = {message.operation, other.operation} == {"send", "recv"}
    return is_pair and message.tag == other.tag and other.peer in (rank, ANY_SOURCE)
