"""Operations in which ranks called different things, and which rank is the odd one out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from pycomm.trace.format import FAILED, Cause, Record
from pycomm.trace.job import Group, Job
from pycomm.trace.words import ranks_text

#: Of these every rank passes the same count; of the others each rank may have its own.
_EQUAL_COUNTS = ("all_reduce", "reduce", "broadcast")
_LONGEST_PATTERN = 16

Signature = tuple[str, str, str | None, int | None, int | None]
Camp = tuple[list[int], Record]  # ranks that called the same, and what


@dataclass(frozen=True)
class Mismatch:
    """One operation that ranks disagree on."""

    group: Group
    sequence: int
    camps: list[Camp]  # the largest first
    odd: tuple[int, ...]  # the culprits; empty if either side may be
    why: str  # how that is known
    differs: list[str]  # "count", ...


def find_mismatch(job: Job) -> Mismatch | None:
    """The first operation of any group that its ranks disagree on."""
    found = [mismatch for group in job.groups if (mismatch := _find(group))]
    return min(found, key=lambda m: min(call.started_ns or 0 for _, call in m.camps), default=None)


def _find(group: Group) -> Mismatch | None:
    for sequence in sorted({r.sequence for rank in group.ranks for r in group.collectives(rank)}):
        calls = {rank: call for rank in group.ranks if (call := group.collective(rank, sequence))}
        with_counts = _counts_matter(group, list(calls.values()))
        camps: dict[Signature, list[int]] = {}
        for rank, call in calls.items():
            camps.setdefault(_signature(call, with_counts), []).append(rank)
        if len(camps) > 1:
            ranked = sorted(camps.values(), key=lambda camp: (-len(camp), camp))
            return _explain(group, sequence, [(camp, calls[camp[0]]) for camp in ranked])
    return None


def _counts_matter(group: Group, calls: list[Record]) -> bool:
    """Whether different counts are an error: always of some operations, of others if nothing else explains one."""
    if all(call.operation in _EQUAL_COUNTS for call in calls):
        return True
    return group.cause == Cause.MISMATCH and any(call.state == FAILED for call in calls)


def _signature(record: Record, with_counts: bool = True) -> Signature:
    count = record.count if with_counts else None
    return record.operation, record.dtype, record.op, record.root, count


def _explain(group: Group, sequence: int, camps: list[Camp]) -> Mismatch:
    names = ("operation", "dtype", "op", "root", "count")
    differs = [n for n in names if len({getattr(call, n) for _, call in camps}) > 1]
    if "operation" in differs:
        differs = ["operation"]
    usual, why = _usual(group, sequence, camps)
    odd = sorted(rank for camp, _ in camps if usual and camp != usual for rank in camp)
    shift = _shift(group, camps)
    if odd:
        why += (
            f", so {ranks_text(odd)} {'are the odd ones' if len(odd) > 1 else 'is the odd one'} out"
        )
    return Mismatch(
        group, sequence, camps, tuple(odd), "; ".join(filter(None, [why, shift])), differs
    )


def _shift(group: Group, camps: list[Camp]) -> str:
    """Whether a rank has one operation more than another, as what it calls or has queued afterwards tells."""
    for ((rank, *_), call), ((other, *_), theirs) in permutations(camps, 2):
        known = [r for r in group.records[rank] if not r.is_message]
        after = next((r for r in known if r.record_id > call.record_id), None)
        if after and _signature(after) == _signature(theirs):
            return f"rank {rank}'s next call is what rank {other} called here, as if it had one operation more"
    return ""


def _usual(group: Group, sequence: int, camps: list[Camp]) -> tuple[list[int], str]:
    """Who made the right call, by the majority or by what came next in earlier rounds; and why, as a clause."""
    ranks, calls = [ranks for ranks, _ in camps], sum(len(ranks) for ranks, _ in camps)
    if 2 * len(ranks[0]) > calls:
        return ranks[0], f"{len(ranks[0])} of {calls} ranks agree"
    expected = [_signature(record) for record in _expected(group, sequence)]
    usual = [ranks for ranks, call in camps if [_signature(call)] == expected]
    if len(usual) != 1:
        return [], ""
    return usual[0], f"in earlier rounds the call of {ranks_text(usual[0])} came next"


def _expected(group: Group, sequence: int) -> list[Record]:
    """What came after the last time that the ranks made the same calls as just before this operation."""
    longest = max(group.ranks, key=lambda rank: len(group.collectives(rank)))
    history = [r for r in group.collectives(longest) if r.sequence < sequence]
    signatures = [_signature(record) for record in history]
    for length in range(min(_LONGEST_PATTERN, len(history) - 1), 0, -1):
        for end in range(len(history) - 1, length - 1, -1):
            if signatures[end - length : end] == signatures[-length:]:
                return [history[end]]
    return []
