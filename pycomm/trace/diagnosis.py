"""What went wrong, in one paragraph: which evidence counts, and what follows from it.

The first failure of the job is the cause, others follow from it. Calls that differ explain it in any case; else the
ranks' waits at that moment do, followed to where they end; else the group's own report is quoted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pycomm.trace.failure import Failure, Kind
from pycomm.trace.format import COMPLETED, FAILED
from pycomm.trace.job import Group, Job
from pycomm.trace.mismatch import find_mismatch
from pycomm.trace.sentences import Teller
from pycomm.trace.waits import Cause, Moment, Wait
from pycomm.trace.words import capital, listed, ranks_text, span, when

#: A wait without a failure is called one from here on, or from half of its timeout.
PATIENCE_NS = 10 * 10**9


@dataclass(frozen=True)
class Verdict:
    """What a job's dumps say."""

    kind: str  # "fine", "mismatch", "died", "exited", "left", "stopped", "absent", "circle", ...
    ranks: tuple[int, ...]  # the culprits, if they can be told
    text: str  # the paragraph

    @property
    def wrong(self) -> bool:
        """Whether anything went wrong."""
        return self.kind != "fine"


def diagnose(job: Job) -> Verdict:
    """Finds the first cause among everything that is recorded."""
    return _Diagnosis(job).verdict()


class _Diagnosis:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._failed = job.first_failed()
        self._moment = Moment(job, self._time(), self._failed)
        self._tell = Teller(self._moment)

    def _time(self) -> int:
        """When the first group failed, else when the newest dump was written."""
        if self._failed is None:
            return max((dump.time_ns for dump in self._job.dumps.values()), default=0)
        return self._failed.failed_ns or self._failed.seen_ns

    def verdict(self) -> Verdict:
        if mismatch := find_mismatch(self._job):
            return self._wrong("mismatch", mismatch.odd, self._tell.mismatch(mismatch))
        if self._failed is None or self._failed.failure is None:
            return self._without_failure()
        tell: dict[Kind, Callable[[Group, Failure], Verdict]] = {
            Kind.INTERRUPTED: self._interrupted,
            Kind.ABORTED: self._aborted,
            Kind.MISMATCH: self._quoted_mismatch,
            Kind.MESSAGE_MISMATCH: self._message_mismatch,
        }
        failure = self._failed.failure
        return tell.get(failure.kind, self._by_waits)(self._failed, failure)

    def _wrong(self, kind: str, ranks: tuple[int, ...], sentences: list[str]) -> Verdict:
        told = [*sentences, self._consequences(), self._sources(ranks)]
        return Verdict(kind, ranks, " ".join(filter(None, told)))

    # ---- a failure

    def _by_waits(self, group: Group, failure: Failure) -> Verdict:
        """A deadline, a rank that is gone or stands still, a deadlock: the waits tell."""
        if end := self._moment.end(self._waits_of(group)):
            return self._wrong(end.cause.name.lower(), end.ranks, self._tell.cause(end))
        culprit = group.culprit
        ranks = () if culprit is None else (culprit,)
        last = [] if culprit is None else [self._tell.last(culprit)]
        return self._wrong(failure.kind.name.lower(), ranks, [self._quote(group, failure), *last])

    def _interrupted(self, group: Group, failure: Failure) -> Verdict:
        rank = self._culprit(group)
        waits = [wait for wait in self._moment.waits[rank] if wait.group is group]
        where = f" in {self._tell.names.operation(group, waits[0].record)}" if waits else ""
        told = [
            f"{capital(self._tell.names.process(rank))} was interrupted at {self._tell.time()}{where}, by Ctrl-C or "
            "another signal; that ended the group on all ranks."
        ]
        long = [wait for wait in waits if self._is_long(wait)]
        end = self._moment.end(long) if long else None
        if end is None:
            waited = (
                f"It had waited {span(waits[0].waited_ns)} there, so nothing else seems wrong."
                if waits
                else ""
            )
            told.append(waited or self._quote(group, failure))
            return self._wrong("interrupted", (rank,), told)
        told.append(
            f"It had waited {span(long[0].waited_ns)} by then, and that is the cause to look for."
        )
        return self._wrong("interrupted", end.ranks, [*told, *self._tell.cause(end)])

    def _aborted(self, group: Group, failure: Failure) -> Verdict:
        rank = self._culprit(group)
        told = [
            f"{capital(self._tell.names.process(rank))} aborted {self._tell.names.group(group)} at "
            f"{self._tell.time()}: {failure.why}."
        ]
        others = [
            w for r in group.ranks if r != rank for w in self._moment.waits[r] if w.group is group
        ]
        if others:
            longest = max(others, key=lambda wait: wait.waited_ns)
            ranks = {wait.rank for wait in others}
            who = f"{capital(ranks_text(ranks))} {'was' if len(ranks) == 1 else 'were'}"
            told.append(
                f"{who} then in "
                f"{self._tell.names.operation(group, longest.record)}, for {span(longest.waited_ns)}."
            )
        told += [self._tell.last(rank), f"See rank {rank}'s own output for why it aborted."]
        return self._wrong("aborted", (rank,), told)

    def _quoted_mismatch(self, group: Group, failure: Failure) -> Verdict:
        """Calls that differ in what is not recorded, such as the counts of single parts."""
        return self._wrong("mismatch", (), [self._quote(group, failure)])

    def _message_mismatch(self, group: Group, failure: Failure) -> Verdict:
        sender = self._culprit(group)
        failed = [
            (rank, record)
            for rank in group.ranks
            for record in group.messages(rank)
            if record.state == FAILED and record.operation == "recv"
        ]
        failed.sort(key=lambda entry: entry[1].finished_ns or 0)
        if not failed:
            return self._wrong("mismatch", (), [self._quote(group, failure)])
        receiver, wanted = failed[0]
        sent = [
            m
            for m in group.messages(sender)
            if m.operation == "send" and m.peer == receiver and m.tag == wanted.tag
            if (m.count, m.dtype) != (wanted.count, wanted.dtype)
        ]
        what = self._tell.names.operation(group, wanted)
        theirs = (
            f" is {self._tell.names.operation(group, sent[-1])}"
            if sent
            else " has another count or dtype"
        )
        told = [
            f"Rank {receiver} wanted to receive {what}, but the message that came from rank {sender}{theirs}.",
            f"It failed at {self._tell.time()}. Both calls must name the same count and dtype; messages of one tag "
            "arrive in the order in which they were sent, so one message more or less shifts all that follow.",
        ]
        return self._wrong("mismatch", (), told)

    def _culprit(self, group: Group) -> int:
        return group.ranks[0] if group.culprit is None else group.culprit

    def _quote(self, group: Group, failure: Failure) -> str:
        own = (
            ""
            if group.ranks == tuple(range(len(group.ranks)))
            else (f" (rank r in this text is the r-th of {ranks_text(group.ranks)})")
        )
        return (
            f"{capital(self._tell.names.group(group))} failed at {self._tell.time()}, and reports{own}: "
            f'"{failure.text.rstrip(".")}".'
        )

    # ---- no failure

    def _without_failure(self) -> Verdict:
        waits = [wait for of_rank in self._moment.waits.values() for wait in of_rank]
        long = sorted(filter(self._is_long, waits), key=lambda wait: wait.since_ns)
        if long and (end := self._moment.end(long)):
            return self._wrong(end.cause.name.lower(), end.ranks, self._tell.cause(end))
        if lost := self._lost_in_idle():
            return lost
        if long:
            return self._stuck(long)
        return Verdict("fine", (), self._fine(waits))

    def _waits_of(self, group: Group) -> list[Wait]:
        """The waits that failed, the longest first."""
        waits = sorted(
            (wait for of_rank in self._moment.waits.values() for wait in of_rank),
            key=lambda wait: wait.since_ns,
        )
        return [wait for wait in waits if wait.group is group] or waits

    def _is_long(self, wait: Wait) -> bool:
        half = wait.record.timeout_ms * 10**6 // 2
        gone = any(self._moment.trouble(wait.group, other) for other in wait.awaited)
        return gone or wait.waited_ns >= (min(PATIENCE_NS, half) if half else PATIENCE_NS)

    def _lost_in_idle(self) -> Verdict | None:
        """A rank that is gone or stands still, while nobody waits for it."""
        lost: dict[Cause, set[int]] = {}
        for group in self._job.groups:
            for rank in group.ranks:
                cause = self._moment.trouble(group, rank)
                if cause and cause is not Cause.LEFT:
                    lost.setdefault(cause, set()).add(rank)
        if not lost:
            return None
        cause = min(lost, key=lambda cause: cause.value)
        ranks = tuple(sorted(lost[cause]))
        did = {Cause.DIED: "died", Cause.EXITED: "left because of an exception"}.get(
            cause, "stands still"
        )
        who = listed([self._tell.names.process(rank) for rank in ranks])
        told = [
            f"{capital(who)} {did}; nobody waited for it when the dump was written at {self._tell.time()}."
        ]
        told += [self._tell.last(rank) for rank in ranks[:3]]
        told.append(f"See the output of {ranks_text(ranks)}.")
        return self._wrong(cause.name.lower(), ranks, told)

    def _stuck(self, waits: list[Wait]) -> Verdict:
        """All have met, and yet it does not end."""
        wait = waits[0]
        ranks = {w.rank for w in waits if w.group is wait.group}
        told = [
            f"{capital(ranks_text(ranks))} had been in "
            f"{self._tell.names.operation(wait.group, wait.record)}, for {span(wait.waited_ns)} when the dump was "
            f"written at {self._tell.time()}, although all ranks that it needs have entered it and none is gone or "
            "stopped.",
            "Is the machine overloaded? If the operation does not end, this is a bug of pycomm: please report it with "
            "these dumps.",
        ]
        return self._wrong("stuck", (), told)

    def _fine(self, waits: list[Wait]) -> str:
        ranks, groups = self._job.ranks, self._job.groups
        told = f"Nothing went wrong in what {_number(len(ranks), 'rank')} in {_number(len(groups), 'group')} recorded"
        done = [
            (record.finished_ns, group, record)
            for group in groups
            for records in group.records.values()
            for record in records
            if record.state == COMPLETED and record.finished_ns is not None
        ]
        if done:
            finished, group, record = max(done, key=lambda entry: entry[0])
            told += f"; the last to be completed was {self._tell.names.operation(group, record)}, at {when(finished)}"
        for wait in sorted(waits, key=lambda wait: wait.since_ns)[:1]:
            told += (
                f". Rank {wait.rank} was in {self._tell.names.operation(wait.group, wait.record)}, but only since "
                f"{span(wait.waited_ns)}"
            )
        return told + "."

    # ---- the end of every paragraph

    def _consequences(self) -> str:
        others = [
            g for g in self._job.groups if g.failure and self._failed and g is not self._failed
        ]
        if not others:
            return ""
        names = listed([self._tell.names.group(group) for group in others[:3]])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return f"{capital(names)}{more} failed after that."

    def _sources(self, ranks: tuple[int, ...]) -> str:
        silent = [rank for rank in ranks if rank not in self._job.dumps]
        if not silent or not self._job.dumps:
            return ""
        seen_by = ranks_text(list(self._job.dumps))
        return f"{capital(ranks_text(silent))} wrote no dump: this is what {seen_by} saw."


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
