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
    times = [
        record.started_ns
        for group in job.groups
        for records in group.records.values()
        for record in records
        if record.started_ns is not None
    ]
    origin = min(times, default=0)
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
    yield _name("process_name", number, 0, name)
    for rank in group.ranks:
        pid = group.pid(rank)
        who = f"rank {rank} ({pid or 'pid unknown'})"
        yield _name("thread_name", number, rank, who)
        yield _order(number, rank, rank * _ROWS_PER_RANK)
        for record in group.collectives(rank):
            yield from _events(number, rank, record, group.seen_ns, origin)
        for row, records in enumerate(_rows(group, rank), start=1):
            thread = (rank + 1) * 10**6 + row
            yield _name("thread_name", number, thread, f"{who} messages")
            yield _order(number, thread, rank * _ROWS_PER_RANK + row)
            for record in records:
                yield from _events(number, thread, record, group.seen_ns, origin)


def _rows(group: Group, rank: int) -> list[list[Record]]:
    """A rank's messages, in as few rows as there are of them at a time."""
    rows: list[list[Record]] = []
    ends: list[int] = []
    for record in sorted(group.messages(rank), key=lambda record: record.started_ns or 0):
        began = record.started_ns or 0
        free = next((row for row, end in enumerate(ends) if end <= began), None)
        if free is None:
            free = len(rows)
            rows.append([])
            ends.append(0)
        rows[free].append(record)
        ends[free] = _end(record, group.seen_ns)
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
    end = _end(record, seen_ns)
    mark = "" if record.state == COMPLETED else f" ({record.state})"
    yield {
        "ph": "X",
        "cat": "message" if record.is_message else "collective",
        "name": f"{record.operation}{mark}",
        "pid": process,
        "tid": thread,
        "ts": (began - origin) / 1e3,
        "dur": (end - began) / 1e3,
        "args": _arguments(record),
    }
    met = record.met_ns if record.met_ns is not None or record.is_message else end
    if met is not None and began < met <= end:
        yield {
            "ph": "X",
            "cat": "wait",
            "name": "waiting for other ranks",
            "pid": process,
            "tid": thread,
            "ts": (began - origin) / 1e3,
            "dur": (met - began) / 1e3,
            "args": {},
        }


def _arguments(record: Record) -> dict[str, Any]:
    known = {
        "number": record.sequence,
        "count": record.count,
        "shape": list(record.shape) if record.shape is not None else None,
        "dtype": record.dtype,
        "bytes": record.bytes,
        "op": record.op,
        "root": record.root,
        "peer": record.peer,
        "tag": record.tag,
        "line": record.line or None,
        "state": record.state,
    }
    return {name: value for name, value in known.items() if value is not None}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _order(process: int, thread: int, index: int) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": "thread_sort_index",
        "pid": process,
        "tid": thread,
        "args": {"sort_index": index},
    }
