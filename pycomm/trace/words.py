"""How ranks, times and operations are named."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from pycomm.trace.format import ANY_SOURCE, Record
from pycomm.trace.job import Group, Job

_NS = 1e-9


def ranks_text(ranks: Collection[int]) -> str:
    """``rank 1``, ``ranks 0 and 2``, ``ranks 0-6 and 9``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 3 else [str(rank) for rank in run]
    return f"rank{'s' if len(ranks) != 1 else ''} {listed(parts)}"


def listed(parts: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]])) if parts else "none"


def capital(text: str) -> str:
    """The text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def span(ns: int) -> str:
    """A duration."""
    seconds = ns * _NS
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def when(ns: int) -> str:
    """A time of day, with the date and the reader's time zone."""
    moment = datetime.fromtimestamp(ns // 10**9).astimezone()
    return f"{moment:%Y-%m-%d %H:%M:%S}.{ns // 10**6 % 1000:03d} {moment:%Z}"


def call(record: Record) -> str:
    """``all_reduce(count=5, dtype=float32, op=sum)``, as error messages have it."""
    if record.operation in ("barrier", "monitored_barrier", "flag_latency"):
        return f"{record.operation}()"
    parts = [f"count={record.count}"]
    if record.shape is not None and len(record.shape) != 1:
        parts.append(f"shape={list(record.shape)}")
    parts.append(f"dtype={record.dtype}")
    if record.op is not None:
        parts.append(f"op={record.op}")
    if record.root is not None:
        parts.append(f"root={record.root}")
    if record.peer is not None:
        whom = "any rank" if record.peer == ANY_SOURCE else f"rank {record.peer}"
        parts += [f"{'to' if record.operation == 'send' else 'from'} {whom}", f"tag={record.tag}"]
    return f"{record.operation}({', '.join(parts)})"


def call_at(record: Record) -> str:
    """The call and the line of the program."""
    return call(record) + (f" at {record.line}" if record.line else "")


class Names:
    """Names of a job's groups: left out where there is only one."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def group(self, group: Group) -> str:
        """``group dp``, with its ranks if its name says too little."""
        alike = [other for other in self._job.groups if other.name == group.name]
        if len(alike) > 1:
            name = f"group {group.name}" if group.name else "the group"
            return f"{name} of {ranks_text(group.ranks)}"
        if group.name:
            return f"group {group.name}"
        return "the group" if len(self._job.groups) == 1 else "the default group"

    def of_group(self, group: Group) -> str:
        """The same after a noun: `` of group dp``, or nothing."""
        return f" of {self.group(group)}" if len(self._job.groups) > 1 else ""

    def operation(self, group: Group, record: Record) -> str:
        """``operation 12 of group dp, all_reduce(count=5, dtype=float32, op=sum) at train.py:88 in step``."""
        return f"{self.number(group, record)}, {call_at(record)}"

    def number(self, group: Group, record: Record) -> str:
        """``operation 12 of group dp``."""
        kind = "message" if record.is_message else "operation"
        return f"{kind} {record.sequence}{self.of_group(group)}"

    def process(self, rank: int) -> str:
        """``rank 1 (pid 4711)``."""
        pid = self._job.pid(rank)
        return f"rank {rank} (pid {pid})" if pid else f"rank {rank}"
