"""The sentences of a diagnosis: what a culprit did, who waited for it, what it did last, what to do."""

from __future__ import annotations

from itertools import pairwise

from pycomm.trace.format import COMPLETED, FAILED, Cause, Record
from pycomm.trace.job import Group
from pycomm.trace.mismatch import Mismatch
from pycomm.trace.waits import End, Moment, Wait, fits
from pycomm.trace.words import Names, call, call_at, capital, listed, ranks_text, span, when

_MOST_TOLD = 3

_DIFFERENT_CALLS = "every rank must make the same calls in the same order"
#: What to do about a difference between the ranks' calls.
_ADVICE_ON = {
    "operation": f"Compare the branches that lead there: {_DIFFERENT_CALLS}.",
    "count": "Make the tensors equally long on every rank: look at the last batch, at padding and at parameters.",
    "dtype": "Use one dtype on every rank: look for a cast or an autocast that only some ranks run.",
    "op": "Pass the same op on every rank.",
    "root": "Pass the same source or destination rank on every rank.",
}
_TWINS = "Every send needs a receive with the same tag on the other rank, and the other way round"


class Teller:
    """Sentences about one moment of a job."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._job = moment.job
        self._failed = moment.failed
        self.names = Names(moment.job)
        self.time = when(moment.ns)  # when the group failed or the dump was written

    # ---- ranks that others wait for

    def cause(self, end: End) -> list[str]:
        """Who did what, where, and who waited for it."""
        if end.cause is Cause.CIRCLE:
            return self._circle(end)
        first_of: dict[object, Wait] = {}
        for wait in end.waits:
            first_of.setdefault(wait.operation, wait)
        operations = list(first_of.values())[:_MOST_TOLD]
        told = [self._awaited(end, wait) for wait in operations] or [self._in_idle(end)]
        told += [self._other_message(wait) for wait in operations]
        told += [self.last(rank) for rank in end.ranks[:_MOST_TOLD]]
        late = [self._later(rank, end) for rank in end.ranks[:_MOST_TOLD]]
        return [*told, *late, self._chain(end), self._advice(end)]

    def _awaited(self, end: End, first: Wait) -> str:
        """What the culprits of one operation did, and who waited for them in it."""
        waits = [wait for wait in end.waits if wait.operation == first.operation]
        awaited = {rank for wait in waits for rank in wait.awaited}
        culprits = [rank for rank in end.ranks if rank in awaited]
        waiters = ranks_text({wait.rank for wait in waits})
        they, it = ("they", "them") if len(culprits) > 1 else ("it", "it")
        is_inside = all(
            any(w.operation == first.operation for w in self._moment.waits[r]) for r in culprits
        )
        before = "inside" if is_inside else f"before {they} came to"
        if end.cause is Cause.ABSENT:
            verbs = {"recv": "sent nothing for", "send": "received nothing of"}
            did = verbs.get(first.record.operation, "did not come to")
        else:
            did = f"{self._did(end, culprits)} {before}"
        longest = span(max(wait.waited_ns for wait in waits))
        return (
            f"{self._who(culprits)} {did} {self.names.operation(first.group, first.record)}, in which {waiters} waited "
            f"for {it} for {longest}, {self._until(first)}."
        )

    def _in_idle(self, end: End) -> str:
        did = self._did(end, list(end.ranks)).rstrip(",")
        return f"{self._who(list(end.ranks))} {did}; nobody waited for it when the dump was written at {self.time}."

    def _who(self, ranks: list[int]) -> str:
        if len(ranks) > _MOST_TOLD:
            return capital(ranks_text(ranks))
        return capital(listed([self.names.process(rank) for rank in ranks]))

    def _did(self, end: End, ranks: list[int]) -> str:
        if end.cause is Cause.EXITED:
            states = [s for g in self._job.groups_of(ranks[0]) for _, s in g.states[ranks[0]]]
            why = next((state.farewell for state in states if state.farewell), "")
            return (
                f"left because of {why}," if why else "ended without destroying the process group"
            )
        if end.cause is Cause.STOPPED:
            stands = "stand" if len(ranks) > 1 else "stands"
            return f"{stands} still, stopped by a signal or a debugger,"
        return "left the group in good order" if end.cause is Cause.LEFT else "died"

    def _until(self, wait: Wait) -> str:
        if self._failed is None:
            limit = wait.record.timeout_ms * 10**6
            left = (
                f"; its timeout of {span(limit)} has not passed" if limit > wait.waited_ns else ""
            )
            return f"and still did when the dump was written at {self.time}{left}"
        what = "the timeout" if self._failed.cause == Cause.TIMEOUT else "the group failed"
        return f"until {what} at {self.time}"

    def _other_message(self, wait: Wait) -> str:
        """A message between the two that nobody has taken: often the wanted one has another tag."""
        if wait.record.peer not in wait.group.ranks or wait.record.peer == wait.rank:
            return ""
        rank, peer, twin = wait.rank, wait.record.peer, "send"
        if wait.record.operation == "send":
            twin = "recv"
        taken = [m for m in wait.group.messages(rank) if m.state == COMPLETED and m.peer == peer]
        for message in wait.group.messages(peer):
            if message.operation != twin or message.peer != rank or message.tag == wait.record.tag:
                continue
            match = next((m for m in taken if fits(m, rank, message)), None)
            if match is None:
                did = "did send it" if twin == "send" else "wanted to receive from it"
                what = self.names.operation(wait.group, message)
                return f"Rank {peer} {did} a message of another tag: {what}."
            taken.remove(match)
        return ""

    def _later(self, rank: int, end: End) -> str:
        """Whether a culprit came after all, or what it said itself, which shows that it was alive."""
        moment = self._moment.ns
        for wait in [wait for wait in end.waits[:1] if rank in wait.group.ranks]:
            came = wait.group.collective(rank, wait.record.sequence)
            if end.cause is Cause.ABSENT and came and (came.started_ns or 0) > moment:
                return f"Rank {rank} came {span((came.started_ns or 0) - moment)} after that, too late."
        own = self._job.dumps.get(rank)
        if own is None or self._failed is None or not own.reason:
            return ""
        apart = f"{span(abs(own.time_ns - moment))} {'before' if own.time_ns < moment else 'after'} that"
        return f"Rank {rank} wrote its own dump {apart}: {own.reason.rstrip('. ')}."

    def _chain(self, end: End) -> str:
        """Who waited for those that waited."""
        links = [
            f"rank {wait.rank} waited for rank {following.rank} in {self.names.operation(wait.group, wait.record)}"
            for wait, following in pairwise(end.chain)
        ]
        return f"In turn, {', and '.join(links[:_MOST_TOLD])}." if links else ""

    def _advice(self, end: End) -> str:
        rank = end.ranks[0]
        pid = self._job.pid(rank)
        look = f"; see what rank {rank} does (py-spy dump --pid {pid})" if pid else ""
        if end.cause is Cause.STOPPED:
            return f"Continue it (kill -CONT {pid}) or find out who stopped it."
        if end.cause is Cause.LEFT:
            return (
                "Look for what makes ranks do a different number of steps: uneven data, an early break or return, "
                "a call that only some ranks make."
            )
        if end.cause is not Cause.ABSENT:
            killed = end.cause is Cause.DIED and rank not in self._job.dumps
            oom = "; without one, the kernel may have killed it to free memory (dmesg -T | grep -i 'out of memory')"
            return (
                f"See rank {rank}'s own output for a traceback or a signal{oom if killed else ''}."
            )
        if end.waits[0].record.is_message:
            return f"{_TWINS}{look}."
        return (
            f"It computes, loads data, hangs, or took another branch{look}. If it was only slow, raise the timeout; "
            "else make every rank call the operation."
        )

    def _circle(self, end: End) -> list[str]:
        waits = "waited" if self._failed else "waits"
        links = [
            f"{self.names.process(wait.rank)} {waits} for rank {following.rank} in "
            f"{self.names.operation(wait.group, wait.record)}"
            for wait, following in pairwise([*end.waits, end.waits[0]])
        ]
        longest = max(end.waits, key=lambda wait: wait.waited_ns)
        lasted = f"That lasted {span(longest.waited_ns)}, {self._until(longest)}"
        messages = [wait.record for wait in end.waits if wait.record.is_message]
        if not messages:
            advice = (
                "Every rank must use the groups in the same order: let one of these calls come first on all ranks, or "
                "start the first with async_op=True."
            )
        elif len(messages) == len(links):
            advice = "Let one send first and the other receive first, with the same tag, or use batch_isend_irecv."
        else:
            advice = f"{_TWINS}, which must come before the collective."
        others = [self._other_message(wait) for wait in end.waits]
        return [f"Deadlock: {', while '.join(links)}. {lasted}.", *others, advice]

    # ---- what a rank did last

    def last(self, rank: int) -> str:
        """``The last that rank 1 did was operation 11, ..., completed 2.3 s before that.``"""
        moment = self._moment
        if waits := moment.waits[rank]:
            wait = min(waits, key=lambda wait: wait.waited_ns)
            what = self.names.operation(wait.group, wait.record)
            return f"At that time rank {rank} had been in {what}, for {span(wait.waited_ns)}."
        known = [
            (record.finished_ns, group, record)
            for group in self._job.groups_of(rank)
            for record in group.records[rank]
            if record.finished_ns is not None and record.finished_ns <= moment.ns
            if record.operation != "flag_latency"
        ]
        if not known:
            return f"Rank {rank} had not completed anything that is still recorded."
        finished, group, record = max(known, key=lambda entry: entry[0])
        how = "which failed" if record.state == FAILED else "completed"
        what = self.names.operation(group, record)
        return f"The last that rank {rank} did was {what}, {how} {span(moment.ns - finished)} before that."

    # ---- what else a group's failure tells

    def report(self, group: Group, text: str) -> str:
        """The group's own words."""
        ranks = f" (rank r in this text is the r-th of {ranks_text(group.ranks)})"
        whose = "" if group.ranks == tuple(range(len(group.ranks))) else ranks
        name = capital(self.names.group(group))
        return f'{name} failed at {self.time}, and reports{whose}: "{text.rstrip(". ")}".'

    def mismatch(self, found: Mismatch) -> list[str]:
        """Who called what, which rank is the odd one out, and what all had completed before."""
        camps = [
            f"{ranks_text(ranks)} called {self._call_of(found.group, found.sequence, ranks, record)}"
            for ranks, record in sorted(
                found.camps, key=lambda camp: not set(camp[0]) & set(found.odd)
            )
        ]
        names = [f"the {name}" for name in found.differs if name != "operation"]
        how = [f"they differ in {listed(names)}"] if names else []
        why = "; ".join([*how, *filter(None, [found.why])])
        where = self.names.of_group(found.group)
        return [
            f"The ranks disagree on operation {found.sequence}{where}: {', but '.join(camps)}.",
            f"{capital(why)}." if why else "",
            self._completed_before(found),
            _ADVICE_ON[found.differs[0]],
        ]

    def _call_of(self, group: Group, sequence: int, ranks: list[int], record: Record) -> str:
        twins = [group.collective(rank, sequence) for rank in ranks]
        return call_at(record) if len({twin.line for twin in twins if twin}) == 1 else call(record)

    def _completed_before(self, found: Mismatch) -> str:
        before = found.group.collective(found.camps[0][0][0], found.sequence - 1)
        failed = f"It failed at {self.time}. " if self._failed else ""
        if before is None or before.finished_ns is None:
            return failed.strip()
        ago = f", {span(self._moment.ns - before.finished_ns)} before that" if failed else ""
        return f"{failed}The last that all ranks had completed was operation {before.sequence}, {call_at(before)}{ago}."
