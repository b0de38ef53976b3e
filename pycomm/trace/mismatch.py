"""Operations in which ranks called different things, and which rank is the odd one out."""

from __future__ import annotations

from dataclasses import dataclass

from pycomm.trace.failure import Kind
from pycomm.trace.format import FAILED, Record
from pycomm.trace.job import Group, Job
from pycomm.trace.words import ranks_text

#: Of these every rank passes the same count; of the others each rank may have its own.
_EQUAL_COUNTS = ("all_reduce", "reduce", "broadcast")
_LONGEST_PATTERN = 16

Signature = tuple[str, str, str | None, int | None, int | None]


@dataclass(frozen=True)
class Mismatch:
    """One operation that ranks disagree on."""

    group: Group
    sequence: int
    calls: dict[int, Record]
    camps: list[list[int]]  # ranks that called the same, the largest first
    odd: tuple[int, ...]  # the culprits; empty if either side may be
    why: list[str]  # how that is known, and what else is; parts of a sentence
    differs: tuple[str, ...]  # "count", ...


def find_mismatch(job: Job) -> Mismatch | None:
    """The first operation of any group that its ranks disagree on."""
    found = [mismatch for group in job.groups if (mismatch := _find(group))]
    return min(found, key=lambda m: min(r.started_ns or 0 for r in m.calls.values()), default=None)


def _find(group: Group) -> Mismatch | None:
    by_sequence: dict[int, dict[int, Record]] = {}
    for rank in group.ranks:
        for record in group.collectives(rank):
            by_sequence.setdefault(record.sequence, {})[rank] = record
    for sequence in sorted(by_sequence):
        calls = by_sequence[sequence]
        with_counts = _counts_matter(group, calls)
        camps: dict[Signature, list[int]] = {}
        for rank, record in calls.items():
            camps.setdefault(_signature(record, with_counts), []).append(rank)
        if len(camps) > 1:
            return _explain(group, sequence, calls, list(camps.values()))
    return None


def _counts_matter(group: Group, calls: dict[int, Record]) -> bool:
    """Whether different counts are an error: always of some operations, of others if nothing else explains one."""
    if all(record.operation in _EQUAL_COUNTS for record in calls.values()):
        return True
    failure = group.failure
    failed = any(record.state == FAILED for record in calls.values())
    is_mismatch = failure is not None and failure.kind is Kind.MISMATCH
    return (
        failed and is_mismatch and failure is not None and "counts of its own" not in failure.text
    )


def _signature(record: Record, with_counts: bool) -> Signature:
    count = record.count if with_counts else None
    return record.operation, record.dtype, record.op, record.root, count


def _explain(
    group: Group, sequence: int, calls: dict[int, Record], camps: list[list[int]]
) -> Mismatch:
    camps.sort(key=lambda camp: (-len(camp), camp))
    kinds = [calls[camp[0]] for camp in camps]
    names = ("operation", "dtype", "op", "root", "count")
    differs = tuple(name for name in names if len({getattr(k, name) for k in kinds}) > 1)
    if "operation" in differs:
        differs = ("operation",)
    odd, why = _odd_one_out(group, sequence, calls, camps)
    return Mismatch(group, sequence, calls, camps, odd, why, differs)


def _odd_one_out(
    group: Group, sequence: int, calls: dict[int, Record], camps: list[list[int]]
) -> tuple[tuple[int, ...], list[str]]:
    """Who broke the rule, by the majority or by what came next in earlier rounds; and why, in parts of a sentence."""
    if len(camps[0]) > sum(map(len, camps[1:])):
        odd = sorted(rank for camp in camps[1:] for rank in camp)
        why = f"{len(camps[0])} of {len(calls)} ranks agree, so {_is_odd(odd)}"
        return tuple(odd), [why, *_shift(group, calls, odd[0], camps[0][0])]
    expected = [_signature(record, True) for record in _expected(group, sequence)]
    usual = [camp for camp in camps if [_signature(calls[camp[0]], True)] == expected[:1]]
    if len(usual) != 1:
        first, second = camps[0][0], camps[1][0]
        return (), _shift(group, calls, first, second) or _shift(group, calls, second, first)
    odd = sorted(rank for camp in camps if camp is not usual[0] for rank in camp)
    skips = [_signature(calls[odd[0]], True)] == expected[1:]
    left_out = f"; {_it(odd)} to have left that call out" if skips else ""
    why = f"in earlier rounds the call of {ranks_text(usual[0])} came next, so {_is_odd(odd)}{left_out}"
    return tuple(odd), [why] if skips else [why, *_shift(group, calls, odd[0], usual[0][0])]


def _is_odd(ranks: list[int]) -> str:
    several = len(ranks) > 1
    return f"{ranks_text(ranks)} {'are the odd ones' if several else 'is the odd one'} out"


def _it(ranks: list[int]) -> str:
    return "they seem" if len(ranks) > 1 else "it seems"


def _shift(group: Group, calls: dict[int, Record], odd: int, other: int) -> list[str]:
    """Whether a rank has one operation more or less than another, as what they call afterwards tells."""
    mine, theirs = calls[odd], calls[other]
    after_mine = [_signature(r, True) for r in _following(group, odd, mine)[:1]]
    after_theirs = [_signature(r, True) for r in _following(group, other, theirs)[:1]]
    if after_mine == [_signature(theirs, True)]:
        return [
            f"rank {odd}'s next call is what rank {other} called here, so rank {odd} has one operation more"
        ]
    if after_theirs == [_signature(mine, True)]:
        return [
            f"rank {odd}'s call is rank {other}'s next one, so rank {odd} has left one operation out"
        ]
    return []


def _following(group: Group, rank: int, record: Record) -> list[Record]:
    """What a rank called after an operation, also what is still queued."""
    return [r for r in group.records[rank] if not r.is_message and r.record_id > record.record_id]


def _expected(group: Group, sequence: int) -> list[Record]:
    """What came after the last time that the ranks made the same calls as just before this operation."""
    longest = max(group.ranks, key=lambda rank: len(group.collectives(rank)))
    history = [r for r in group.collectives(longest) if r.sequence < sequence]
    signatures = [_signature(record, True) for record in history]
    for length in range(min(_LONGEST_PATTERN, len(history) - 1), 0, -1):
        pattern = signatures[-length:]
        for end in range(len(history) - 1, length - 1, -1):
            if signatures[end - length : end] == pattern:
                return history[end : end + 2]
    return []
