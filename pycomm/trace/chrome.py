"""The records as a timeline: the trace format that chrome://tracing and https://ui.perfetto.dev draw.

One process per group and in it one row per rank, with a second one for its messages. An operation is an event, and
within it the time until all ranks had arrived is another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pycomm.trace.format import COMPLETED, Record
from pycomm.trace.job import Group, Job
from pycomm.trace.words import Names, capital

#: Rows of messages follow the ranks' own: messages overlap, and events of one row must not.
_ROWS_PER_RANK = 1000


def chrome_trace(job: Job) -> dict[str, Any]:
    """The content of a trace file. Times are relative to the first operation, whose own is in ``otherData``."""
    records = [r for group in job.groups for known in group.records.values() for r in known]
    origin = min((r.started_ns for r in records if r.started_ns is not None), default=0)
    names = Names(job)
    events = [
        event
        for number, group in enumerate(job.groups, start=1)
        for event in _group_events(number, group, origin, capital(names.group(group)))
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"origin_unix_ns": str(origin)},
    }


def _group_events(number: int, group: Group, origin: int, name: str) -> Iterator[dict[str, Any]]:
    yield _about("process_name", number, 0, name=name)
    for rank in group.ranks:
        who = f"rank {rank} ({group.pid(rank) or 'pid unknown'})"
        for row, records in enumerate([group.collectives(rank), *_rows(group, rank)]):
            thread = (rank + 1) * 10**6 + row if row else rank
            yield _about("thread_name", number, thread, name=f"{who} messages" if row else who)
            yield _about(
                "thread_sort_index", number, thread, sort_index=rank * _ROWS_PER_RANK + row
            )
            for record in records:
                yield from _events(number, thread, record, group.seen_ns, origin)


def _rows(group: Group, rank: int) -> list[list[Record]]:
    """A rank's messages, in as few rows as there are of them at a time."""
    rows: list[list[Record]] = []
    for record in sorted(group.messages(rank), key=lambda record: record.started_ns or 0):
        began = record.started_ns or 0
        free = next((row for row in rows if _end(row[-1], group.seen_ns) <= began), None)
        if free is None:
            rows.append([record])
        else:
            free.append(record)
    return rows


def _end(record: Record, seen_ns: int) -> int:
    """When it ended, or when it was last seen under way."""
    end = seen_ns if record.finished_ns is None else record.finished_ns
    return max(end, record.started_ns or 0)


def _events(
    process: int, thread: int, record: Record, seen_ns: int, origin: int
) -> Iterator[dict[str, Any]]:
    began = record.started_ns
    if began is None:
        return
    event = {"ph": "X", "pid": process, "tid": thread, "ts": (began - origin) / 1e3}
    end = _end(record, seen_ns)
    mark = "" if record.state == COMPLETED else f" ({record.state})"
    yield event | {
        "cat": "message" if record.is_message else "collective",
        "name": f"{record.operation}{mark}",
        "dur": (end - began) / 1e3,
        "args": _arguments(record),
    }
    met = record.met_ns if record.met_ns is not None or record.is_message else end
    if met is not None and began < met <= end:
        wait = {"cat": "wait", "name": "waiting for other ranks", "dur": (met - began) / 1e3}
        yield event | wait | {"args": {}}


def _arguments(record: Record) -> dict[str, Any]:
    names = ("count", "shape", "dtype", "bytes", "op", "root", "peer", "tag", "line", "state")
    known = {"number": record.sequence} | {name: getattr(record, name) for name in names}
    return {name: value for name, value in known.items() if value is not None and value != ""}


def _about(kind: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}
