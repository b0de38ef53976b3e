"""What went wrong, in one paragraph: which evidence counts, and what follows from it.

The first failure of the job is the cause, others follow from it. Calls that differ explain it in any case; else the
ranks' waits at that moment do, followed to where they end; else the group's own report is quoted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pycomm.trace.format import COMPLETED, Cause
from pycomm.trace.job import Group, Job
from pycomm.trace.mismatch import find_mismatch
from pycomm.trace.sentences import Teller
from pycomm.trace.waits import TROUBLE, End, Moment, Wait
from pycomm.trace.words import capital, listed, ranks_text, span, when

#: A wait without a failure is called one from here on, or from half of its timeout.
PATIENCE_NS = 10 * 10**9
#: What the waits say nothing about.
_QUOTED = (Cause.ABORTED, Cause.MISMATCH, Cause.PARTS_MISMATCH, Cause.MESSAGE_MISMATCH)


@dataclass(frozen=True)
class Verdict:
    """What a job's dumps say."""

    kind: str  # a Cause: "fine", "mismatch", "died", "exited", "left", "stopped", "absent", "circle", ...
    ranks: tuple[int, ...]  # the culprits, if they can be told
    text: str  # the paragraph

    @property
    def wrong(self) -> bool:
        """Whether anything went wrong."""
        return self.kind != Cause.FINE


def diagnose(job: Job) -> Verdict:
    """Finds the first cause among everything that is recorded."""
    return _Diagnosis(job).verdict()


class _Diagnosis:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._moment = Moment(job)
        self._tell = Teller(self._moment)

    def verdict(self) -> Verdict:
        if mismatch := find_mismatch(self._job):
            return self._wrong(Cause.MISMATCH, mismatch.odd, self._tell.mismatch(mismatch))
        if self._moment.failed:
            return self._of_failure(self._moment.failed)
        return self._without_failure()

    def _wrong(self, kind: str, ranks: tuple[int, ...], sentences: Iterable[str]) -> Verdict:
        told = [*sentences, self._consequences(), self._sources(ranks)]
        return Verdict(kind, ranks, " ".join(filter(None, told)))

    def _by_end(self, end: End) -> Verdict:
        return self._wrong(end.cause, end.ranks, self._tell.cause(end))

    # ---- a failure

    def _of_failure(self, group: Group) -> Verdict:
        waits = [wait for wait in self._moment.all_waits() if wait.group is group]
        if group.cause == Cause.INTERRUPTED:
            return self._interrupted(group, [wait for wait in waits if wait.rank == group.culprit])
        if group.cause in _QUOTED:
            return self._quoted(group)
        # A deadline, a rank that is gone or stands still, a deadlock: the waits tell.
        end = self._moment.end(waits or self._moment.all_waits())
        return self._by_end(end) if end else self._quoted(group)

    def _quoted(self, group: Group, *more: str) -> Verdict:
        ranks = () if group.culprit is None else (group.culprit,)
        last = [self._tell.last(rank) for rank in ranks]
        return self._wrong(group.cause, ranks, [self._report(group), *more, *last])

    def _report(self, group: Group) -> str:
        return self._tell.report(group, group.failure.text if group.failure else "")

    def _interrupted(self, group: Group, waits: list[Wait]) -> Verdict:
        """By somebody who lost patience, perhaps: then what was waited for is the cause."""
        if not waits:
            return self._quoted(group)
        waited = f"It had waited {span(waits[0].waited_ns)} by then"
        if end := self._moment.end([wait for wait in waits if self._is_long(wait)]):
            told = [f"{waited}, and that is the cause to look for.", *self._tell.cause(end)]
            return self._wrong(Cause.INTERRUPTED, end.ranks, [self._report(group), *told])
        return self._quoted(group, f"{waited}, so nothing else seems wrong.")

    # ---- no failure

    def _without_failure(self) -> Verdict:
        waits = self._moment.all_waits()
        long = [wait for wait in waits if self._is_long(wait)]
        if end := self._moment.end(long) or self._lost_in_idle():
            return self._by_end(end)
        return self._stuck(long) if long else Verdict(Cause.FINE, (), self._fine(waits))

    def _is_long(self, wait: Wait) -> bool:
        half = wait.record.timeout_ms * 10**6 // 2
        gone = any(self._moment.trouble(wait.group, other) for other in wait.awaited)
        return gone or wait.waited_ns >= (min(PATIENCE_NS, half) if half else PATIENCE_NS)

    def _lost_in_idle(self) -> End | None:
        """Ranks that are gone or stand still, while nobody waits for them."""
        lost: dict[Cause, set[int]] = {}
        for group in self._job.groups:
            for rank in group.ranks:
                if (cause := self._moment.trouble(group, rank)) and cause is not Cause.LEFT:
                    lost.setdefault(cause, set()).add(rank)
        first = min(lost, key=TROUBLE.index, default=None)
        return End(first, tuple(sorted(lost[first]))) if first else None

    def _stuck(self, waits: list[Wait]) -> Verdict:
        """All have met, and yet it does not end."""
        first = waits[0]
        ranks = ranks_text({wait.rank for wait in waits if wait.group is first.group})
        operation = self._tell.names.operation(first.group, first.record)
        told = (
            f"{capital(ranks)} had been in {operation}, for {span(first.waited_ns)} when the dump was written at "
            f"{self._tell.time}, although all ranks that it needs have entered it and none is gone or stopped.",
            "Is the machine overloaded? If the operation does not end, this is a bug of pycomm: please report it with "
            "these dumps.",
        )
        return self._wrong(Cause.STUCK, (), told)

    def _fine(self, waits: list[Wait]) -> str:
        ranks, groups = self._job.ranks, self._job.groups
        told = f"Nothing went wrong in what {_number(ranks, 'rank')} in {_number(groups, 'group')} recorded"
        done = [
            (record.finished_ns, group, record)
            for group in groups
            for records in group.records.values()
            for record in records
            if record.state == COMPLETED and record.finished_ns is not None
        ]
        if done:
            finished, group, record = max(done, key=lambda entry: entry[0])
            what = self._tell.names.operation(group, record)
            told += f"; the last to be completed was {what}, at {when(finished)}"
        for wait in waits[:1]:
            what = self._tell.names.operation(wait.group, wait.record)
            told += f". Rank {wait.rank} was in {what}, but only since {span(wait.waited_ns)}"
        return told + "."

    # ---- the end of every paragraph

    def _consequences(self) -> str:
        failed = [group for group in self._job.groups if group.failure]
        names = [self._tell.names.group(g) for g in failed if g is not self._moment.failed]
        if not names:
            return ""
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{capital(listed(names[:3]))}{more} failed after that."

    def _sources(self, ranks: tuple[int, ...]) -> str:
        silent = [rank for rank in ranks if rank not in self._job.dumps]
        if not silent or not self._job.dumps:
            return ""
        seen_by = ranks_text(list(self._job.dumps))
        return f"{capital(ranks_text(silent))} wrote no dump: this is what {seen_by} saw."


def _number(known: list[int] | list[Group], noun: str) -> str:
    return f"{len(known)} {noun}{'s' if len(known) != 1 else ''}"
