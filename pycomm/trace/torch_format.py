"""Records as torch's own flight recorder writes them: one pickle per rank, for torch.distributed.flight_recorder.

Torch's analyser pairs the entries of all ranks by group and number, so what it cannot pair is left out: operations
that some rank has overwritten, receives from any source, messages when a rank's records do not reach back to its first
one. A message becomes an entry in a group of its two ranks, since the analyser expects all ranks of a group in each.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from typing import Any

from pycomm.trace.format import ANY_SOURCE, COMPLETED, FAILED, STARTED, Record
from pycomm.trace.job import Group, Job

#: The analyser infers the prefix of the names, if no other name in the folder ends in digits.
PREFIX = "torch_trace_rank_"
#: Of torch's format, as of torch 2.13 and 2.14.
VERSION = "2.10"
#: The analyser refuses backends that it does not know.
BACKEND = "gloo"

_BARRIERS = ("barrier", "monitored_barrier", "flag_latency")
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
    "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
}
_LINE = re.compile(r"(?P<file>.*?):(?P<line>\d+)(?: in (?P<name>.*))?")


def file_name(rank: int) -> str:
    """What the analyser reads a rank's entries from."""
    return f"{PREFIX}{rank}"


def pickled(job: Job, rank: int) -> bytes:
    """The content of a rank's file."""
    config: dict[str, dict[str, str]] = {}
    status: dict[str, dict[str, int]] = {}
    entries: list[dict[str, Any]] = []
    for number, group in enumerate(job.groups):
        if rank not in group.ranks:
            continue
        name = group.name or f"ranks {','.join(map(str, group.ranks))}"
        config[name] = _config(name, group.ranks)
        status[name] = _status(group, rank)
        entries += (_entry(e, name, number, len(group.ranks)) for e in _collectives(group, rank))
        for pair, e in _messages(group, rank, name):
            config.setdefault(pair, _config(pair, (e[0].peer, rank)))
            entries.append(_entry(e, pair, number, 2))
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for index, entry in enumerate(entries):
        entry["record_id"] = index
    return pickle.dumps(
        {
            "version": VERSION,
            "comm_lib_version": "",
            "entries": entries,
            "pg_config": config,
            "pg_status": status,
        }
    )


def _config(name: str, ranks: Any) -> dict[str, str]:
    return {"name": name, "desc": "undefined", "ranks": str(sorted(ranks))}


def _status(group: Group, rank: int) -> dict[str, int]:
    """The last collective that was queued, started and completed."""
    started = max((r.sequence for r in group.collectives(rank)), default=-1)
    completed = [r.sequence for r in group.collectives(rank) if r.state == COMPLETED]
    return {
        "last_enqueued_collective": started + len(group.queued(rank)),
        "last_started_collective": started,
        "last_completed_collective": max(completed, default=-1),
    }


# ---- what is paired: (record, number in its group, elements, name)

_Paired = tuple[Record, int, int, str]


def _collectives(group: Group, rank: int) -> Iterator[_Paired]:
    """The collectives that all ranks still have a record of, and those that follow."""
    first = max((_oldest(group, r) for r in group.ranks), default=1)
    last = max((r.sequence for r in group.collectives(rank)), default=0)
    for record in group.collectives(rank):
        if record.sequence >= first:
            yield record, record.sequence, _elements(group, record), _operation(record)
    for ahead, record in enumerate(group.queued(rank), start=1):
        yield record, last + ahead, record.count, _operation(record)


def _operation(record: Record) -> str:
    return "barrier" if record.operation in _BARRIERS else record.operation


def _oldest(group: Group, rank: int) -> int:
    collectives = group.collectives(rank)
    return collectives[0].sequence if collectives and not group.is_complete(rank) else 1


def _elements(group: Group, record: Record) -> int:
    """The count; of an operation that is done, the greatest of all ranks, since it was right that they differ."""
    twins = [group.collective(rank, record.sequence) for rank in group.ranks]
    done = all(twin is not None and twin.state == COMPLETED for twin in twins)
    return max(twin.count for twin in twins if twin) if done else record.count


def _messages(group: Group, rank: int, name: str) -> Iterator[tuple[str, _Paired]]:
    """A rank's messages, numbered by sender, receiver and tag."""
    if not all(group.is_complete(r) for r in group.ranks):
        return
    from_any = {(r, m.tag) for r in group.ranks for m in group.messages(r) if m.peer == ANY_SOURCE}
    numbers: dict[str, int] = {}
    for record in group.messages(rank):
        if record.peer in (None, rank, ANY_SOURCE):
            continue
        source, target = (rank, record.peer) if record.operation == "send" else (record.peer, rank)
        if (target, record.tag) in from_any:
            continue
        pair = f"{name}: {source} to {target}, tag {record.tag}"
        numbers[pair] = numbers.get(pair, 0) + 1
        s, t = (0, 1) if source < target else (1, 0)  # by their order in the pair
        arrow = f"send {s}->{t}" if record.operation == "send" else f"recv {t}<-{s}"
        yield pair, (record, numbers[pair], record.count, arrow)


# ---- one entry


def _entry(paired: _Paired, name: str, number: int, world_size: int) -> dict[str, Any]:
    record, sequence, elements, operation = paired
    # Flat sizes, since equal counts of other shapes are no mismatch.
    inputs = elements * (world_size if operation == "reduce_scatter" else 1)
    outputs = elements * (world_size if operation == "all_gather" else 1)
    created = record.created_ns or record.started_ns or 0
    return {
        "record_id": 0,
        "pg_id": number,
        "process_group": (name, "undefined"),
        "collective_seq_id": sequence,
        "p2p_seq_id": sequence if record.is_message else 0,
        "op_id": sequence,
        "is_p2p": record.is_message,
        "profiling_name": f"{BACKEND}:{operation}",
        "input_sizes": [[inputs]],
        "output_sizes": [[outputs]],
        "input_dtypes": [_DTYPES.get(record.dtype, record.dtype)],
        "output_dtypes": [_DTYPES.get(record.dtype, record.dtype)],
        # What has failed was begun and never completed.
        "state": STARTED if record.state == FAILED else record.state,
        "retired": record.finished_ns is not None,
        "time_created_ns": created,
        "time_discovered_started_ns": record.started_ns,
        "time_discovered_completed_ns": record.finished_ns if record.state == COMPLETED else None,
        "timeout_ms": record.timeout_ms,
        "frames": _frames(record.line),
        "thread_id": "",
        "thread_name": "",
    }


def _frames(line: str) -> list[dict[str, Any]]:
    if not (found := _LINE.fullmatch(line)):
        return []
    return [
        {"filename": found["file"], "line": int(found["line"]), "name": found["name"] or "<module>"}
    ]
