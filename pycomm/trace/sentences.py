"""The sentences of a diagnosis: what a culprit did, who waited for it, what it did last, what to do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from pycomm.trace.failure import Kind
from pycomm.trace.format import ANY_SOURCE, COMPLETED, FAILED, Record
from pycomm.trace.job import Group
from pycomm.trace.mismatch import Mismatch
from pycomm.trace.waits import Cause, End, Moment, Wait
from pycomm.trace.words import Names, call, call_at, capital, listed, ranks_text, span, when

_MOST_TOLD = 3
#: A dump that is so much younger than the failure is one of a rank that came late.
_LATE_NS = 10**9

#: What to do about a difference between the ranks' calls.
_ADVICE_ON = {
    "operation": "Compare the branches that lead there: every rank must make the same calls in the same order.",
    "count": "Make the tensors equally long on every rank: look at the last batch, at padding and at parameters.",
    "dtype": "Use one dtype on every rank: look for a cast or an autocast that only some ranks run.",
    "op": "Pass the same op on every rank.",
    "root": "Pass the same source or destination rank on every rank.",
}


class Teller:
    """Sentences about one moment of a job."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._job = moment.job
        self._failed = moment.failed
        self._told: list[Wait] = []
        self._told_message: Record | None = None
        self.names = Names(moment.job)

    # ---- the time

    def time(self) -> str:
        """When the group failed or the dump was written."""
        return when(self._moment.ns)

    def _until(self, wait: Wait) -> str:
        failure = self._failed.failure if self._failed else None
        if failure is None:
            limit = wait.record.timeout_ms * 10**6
            left = (
                f"; its timeout of {span(limit)} has not passed" if limit > wait.waited_ns else ""
            )
            return f"and still did when the dump was written at {self.time()}{left}"
        what = "the timeout" if failure.kind is Kind.TIMEOUT else "the group failed"
        return f"until {what} at {self.time()}"

    # ---- a rank that others wait for

    def cause(self, end: End) -> list[str]:
        """Who did what, where, and who waited for it."""
        if end.cause is Cause.CIRCLE:
            tags = [self._other_messages(wait) for wait in end.waits if wait.record.is_message]
            return [self._circle(end), *tags, self._advice_on_circle(end)]
        first = max(end.waits, key=lambda wait: (wait.group is self._failed, wait.waited_ns))
        ranks = set(end.ranks)
        end, elsewhere = _narrowed(end, first)
        self._told.append(first)
        if first.record.is_message:
            told = [self._message(end, first), self._other_messages(first)]
        else:
            told = [self._collective(end, first), self._late(end, first)]
        told += [self.last(rank) for rank in end.ranks[:_MOST_TOLD]]
        return [
            *told,
            self._chain(end, first),
            self._elsewhere(elsewhere, ranks),
            self._advice(end, first),
        ]

    def _collective(self, end: End, first: Wait) -> str:
        operation = self.names.operation(first.group, first.record)
        who, many = self._who(end.ranks), len(end.ranks) > 1
        they, it = ("they", "them") if many else ("it", "it")
        waiters = ranks_text({wait.rank for wait in end.waits})
        longest = span(max(wait.waited_ns for wait in end.waits))
        waited = f"waited for {it} for {longest}, {self._until(first)}"
        if end.cause is Cause.ABSENT:
            return f"{who} did not come to {operation}, in which {waiters} {waited}."
        inside = [w for r in end.ranks for w in self._moment.waits[r] if _is_same(w, first)]
        if len(inside) == len(end.ranks):
            entered = f"{span(max(wait.waited_ns for wait in inside))} after {they} had entered it"
            did = self._did(end, first)
            return f"{who} {did} inside {operation}, {entered}; {waiters}, in the same operation, {waited}."
        if end.cause is Cause.LEFT:
            more = first.record.sequence - first.group.state(end.ranks[0]).sequence
            calls = "one call" if more == 1 else f"{more} calls" if more > 1 else "calls"
            make = "make" if len(end.waits) > 1 else "makes"
            return (
                f"{who} left the group in good order, but {waiters} went on with {operation}, and {waited}: "
                f"{waiters} {make} {calls} more than {ranks_text(end.ranks)}."
            )
        did = self._did(end, first)
        before = "and did not come" if end.cause is Cause.STOPPED else f"before {they} came"
        return f"{who} {did} {before} to {operation}, in which {waiters} {waited}."

    def _message(self, end: End, first: Wait) -> str:
        message = self.names.operation(first.group, first.record)
        receives = first.record.operation == "recv"
        waited = f"rank {first.rank} waited for {span(first.waited_ns)}, {self._until(first)}"
        if first.record.peer == ANY_SOURCE and end.cause is Cause.ABSENT:
            return f"No rank sent what rank {first.rank} wanted to receive: in {message}, {waited}."
        who = self._who(end.ranks)
        if end.cause is Cause.ABSENT:
            did = "did not send what" if receives else "did not receive what"
            wanted = "wanted to receive" if receives else "sent"
            return f"{who} {did} rank {first.rank} {wanted}: in {message}, {waited}."
        for_it = "to receive from it" if receives else "to send to it"
        return f"{who} {self._did(end, first)} while rank {first.rank} wanted {for_it}: in {message}, {waited}."

    def _who(self, ranks: tuple[int, ...]) -> str:
        if len(ranks) > _MOST_TOLD:
            return capital(ranks_text(ranks))
        return capital(listed([self.names.process(rank) for rank in ranks]))

    def _did(self, end: End, wait: Wait) -> str:
        if end.cause is Cause.STOPPED:
            return f"{'stand' if len(end.ranks) > 1 else 'stands'} still, stopped by a signal or a debugger,"
        if end.cause is Cause.EXITED:
            why = self._farewell(wait.group, end.ranks[0])
            return (
                f"left because of {why}," if why else "ended without destroying the process group"
            )
        return "left the group" if end.cause is Cause.LEFT else "died"

    def _farewell(self, group: Group, rank: int) -> str:
        told = [state.farewell for _, state in group.states[rank] if state.farewell]
        if group.failure and group.culprit == rank and group.failure.why:
            told.insert(0, group.failure.why)
        return told[0] if told else ""

    def _late(self, end: End, first: Wait) -> str:
        """Whether the culprit came after all, or what it said itself."""
        rank = end.ranks[0]
        record = first.group.collective(rank, first.record.sequence)
        came = record.started_ns if record else None
        if end.cause is Cause.ABSENT and came and came > self._moment.ns:
            return f"Rank {rank} came {span(came - self._moment.ns)} after that, too late."
        own = self._job.dumps.get(rank)
        if own is None or self._failed is None:
            return ""
        if end.cause is not Cause.ABSENT and own.reason:
            return f"The reason of its own dump is: {own.reason}."
        if own.time_ns < self._moment.ns + _LATE_NS:
            return ""
        late = span(own.time_ns - self._moment.ns)
        return f"Rank {rank} wrote its own dump {late} after that ({own.reason}), so it was alive, but late."

    def _other_messages(self, first: Wait) -> str:
        """Messages between the two that nobody has taken: often the wanted one has another tag."""
        record, group = first.record, first.group
        if record.peer in (None, ANY_SOURCE) or record.peer == first.rank:
            return ""
        peer = record.peer
        twin = "send" if record.operation == "recv" else "recv"
        theirs = [m for m in group.messages(peer) if m.operation == twin and m.peer == first.rank]
        mine = [
            m
            for m in group.messages(first.rank)
            if m.operation == record.operation and m.peer == peer
        ]
        taken = [m.tag for m in mine if m.state == COMPLETED]
        for message in theirs:
            if message.tag in taken:
                taken.remove(message.tag)
            elif message.tag != record.tag:
                self._told_message = message
                did = "did send it" if twin == "send" else "wanted to receive from it"
                return f"Rank {peer} {did} a message of another tag: {self.names.operation(group, message)}."
        return ""

    # ---- what a rank did last

    def last(self, rank: int) -> str:
        """``The last that rank 1 did was operation 11, ..., completed 2.3 s before that.``"""
        if told := self._in_progress(rank):
            return told
        known = [
            (record.finished_ns, group, record)
            for group in self._job.groups
            if rank in group.ranks
            for record in group.records[rank]
            if record.finished_ns is not None
            and record.finished_ns <= self._moment.ns
            and record.operation != "flag_latency"
        ]
        if not known:
            return f"Rank {rank} had not completed anything that is still recorded."
        finished, group, record = max(known, key=lambda entry: entry[0])
        before = span(self._moment.ns - finished)
        if record is self._told_message:
            return f"That was the last that rank {rank} did, {before} before."
        how = "which failed" if record.state == FAILED else "completed"
        same = any(call_at(record) == call_at(told.record) for told in self._told)
        what = (
            self.names.number(group, record) + ", the same call"
            if same
            else self.names.operation(group, record)
        )
        return f"The last that rank {rank} did was {what}, {how} {before} before that."

    def _in_progress(self, rank: int) -> str:
        waits = [
            wait
            for wait in self._moment.waits[rank]
            if not any(_is_same(wait, told) for told in self._told)
        ]
        if not waits:
            return ""
        wait = max(waits, key=lambda w: w.since_ns)
        what = self.names.operation(wait.group, wait.record)
        return f"At that time rank {rank} had been in {what}, for {span(wait.waited_ns)}."

    def _chain(self, end: End, first: Wait) -> str:
        """Who waited for those that waited."""
        links = [
            f"rank {wait.rank} waited for rank {following.rank} in {self.names.operation(wait.group, wait.record)}"
            for wait, following in pairwise(end.chain_to(first))
        ]
        return f"In turn, {', and '.join(links[:_MOST_TOLD])}." if links else ""

    def _elsewhere(self, waits: list[Wait], culprits: set[int]) -> str:
        """Other operations that a culprit did not come to."""
        told = [
            f"{ranks_text(culprits & set(wait.awaited))} in {self.names.operation(wait.group, wait.record)}"
            for wait in waits
        ]
        more = f" and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
        return f"Also waited for: {'; '.join(told[:_MOST_TOLD])}{more}." if told else ""

    # ---- a circle

    def _circle(self, end: End) -> str:
        failed = self._failed is not None
        longest = max(wait.waited_ns for wait in end.waits)
        if len(end.waits) == 1:
            wait = end.waits[0]
            what = self.names.operation(wait.group, wait.record)
            return (
                f"{capital(self.names.process(wait.rank))} waited for itself in {what}, for {span(longest)}, "
                f"{self._until(wait)}."
            )
        links = []
        none = "Neither" if len(end.waits) == 2 else "None of them"
        for wait, following in zip(end.waits, [*end.waits[1:], end.waits[0]], strict=True):
            what = self.names.operation(wait.group, wait.record)
            waits = "waited" if failed else "waits"
            links.append(
                f"{self.names.process(wait.rank)} {waits} for rank {following.rank} in {what}"
            )
        if failed:
            lasted = f"{none} could go on, for {span(longest)}, {self._until(end.waits[0])}"
        else:
            lasted = f"{none} can go on; it had lasted {span(longest)} when the dump was written at {self.time()}"
        return f"Deadlock: {', while '.join(links)}. {lasted}."

    # ---- what to do

    def _advice(self, end: End, first: Wait) -> str:
        rank = end.ranks[0]
        pid = self._job.pid(rank)
        again = " The group has ended, so the job must be started again." if self._failed else ""
        if end.cause in (Cause.DIED, Cause.EXITED):
            text = f"See rank {rank}'s own output for a traceback or a signal"
            oom = "; without one, the kernel may have killed it to free memory (dmesg -T | grep -i 'out of memory')"
            unexplained = end.cause is Cause.DIED and rank not in self._job.dumps
            return text + (oom if unexplained else "") + "."
        if end.cause is Cause.STOPPED:
            return f"Continue it (kill -CONT {pid}) or find out who stopped it.{again}"
        if end.cause is Cause.LEFT:
            return (
                "Look for what makes ranks do a different number of steps: uneven data, an early break or return, "
                "a call that only some ranks make."
            )
        if first.record.is_message:
            return (
                "Every send needs a receive with the same tag on the other rank, and the other way round"
                f"{_where(rank, pid)}."
            )
        many = len(end.ranks) > 1
        does = "They compute, load data, hang, or" if many else "It computes, loads data, hangs, or"
        slow = "they were" if many else "it was"
        return (
            f"{does} took another branch{_where(rank, pid)}. If {slow} only slow, raise the timeout; else make every "
            "rank call the operation."
        )

    def _advice_on_circle(self, end: End) -> str:
        records = [wait.record for wait in end.waits]
        messages = [record for record in records if record.is_message]
        if len(records) == 1:
            return "A message to oneself needs both a send and a recv; post one of them asynchronously."
        if not messages:
            return (
                "Every rank must use the groups in the same order: let one of these calls come first on all ranks, or "
                "start the first with async_op=True."
            )
        if all(record.operation == "recv" for record in records):
            return "All of them receive first: let one send first, or use batch_isend_irecv."
        if len(messages) == 2 and _is_tag_mismatch(messages):
            return "One sends and the other receives, but the tags differ: let them agree."
        if len(messages) == len(records):
            return "Let one of them receive first, or use batch_isend_irecv."
        return (
            "Every send needs a receive with the same tag on the other rank, which must come before the collective. If "
            "the message was posted asynchronously, its rank may also be somewhere else."
        )

    # ---- different calls

    def mismatch(self, found: Mismatch) -> list[str]:
        """Who called what, which rank is the odd one out, and what all had completed before."""
        group = found.group
        camps = []
        for camp in sorted(found.camps, key=lambda camp: (not set(camp) & set(found.odd), camp)):
            lines = {found.calls[rank].line for rank in camp}
            record = found.calls[camp[0]]
            at = call_at(record) if len(lines) == 1 else call(record)
            camps.append(f"{ranks_text(camp)} called {at}")
        told = [
            f"The ranks disagree on operation {found.sequence}{self.names.of_group(group)}: {', but '.join(camps)}.",
            self._difference(found),
            self._completed_before(found),
        ]
        advice = _ADVICE_ON[found.differs[0]] if found.differs else ""
        return [*filter(None, told), advice]

    def _difference(self, found: Mismatch) -> str:
        names = [f"the {name}" for name in found.differs if name != "operation"]
        parts = [f"they differ in {listed(names)}"] if names else []
        parts += found.why
        return f"{capital('; '.join(parts))}." if parts else ""

    def _completed_before(self, found: Mismatch) -> str:
        rank = min(found.calls)
        record = found.group.collective(rank, found.sequence - 1)
        at = f" at {self.time()}" if self._failed else ""
        if record is None or record.finished_ns is None:
            return f"It failed{at}." if at else ""
        before = span(self._moment.ns - record.finished_ns)
        return (
            f"It failed{at}; the last that all ranks had completed was operation {record.sequence}, {call_at(record)}, "
            f"{before} before that."
            if at
            else f"The last that all ranks had completed was operation {record.sequence}, {call_at(record)}."
        )


def _narrowed(end: End, first: Wait) -> tuple[End, list[Wait]]:
    """The culprits that one operation waits for; and a wait for each other operation that waits for some."""
    here = [wait for wait in end.waits if _is_same(wait, first)]
    ranks = tuple(r for r in end.ranks if any(r in wait.awaited for wait in here))
    others: list[Wait] = []
    for wait in end.waits:
        if not any(_is_same(wait, known) for known in [first, *others]):
            others.append(wait)
    return replace(end, ranks=ranks, waits=tuple(here)), others


def _is_same(wait: Wait, other: Wait) -> bool:
    """Whether two ranks wait in one collective; a message is one rank's."""
    if wait.record.is_message or other.record.is_message:
        return wait is other
    return wait.group is other.group and wait.record.sequence == other.record.sequence


def _is_tag_mismatch(records: list[Record]) -> bool:
    return {r.operation for r in records} == {"send", "recv"} and len({r.tag for r in records}) == 2


def _where(rank: int, pid: int) -> str:
    return f"; see what rank {rank} does (py-spy dump --pid {pid})" if pid else ""
