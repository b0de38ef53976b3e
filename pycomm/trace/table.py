"""The last operations of every group, one row each and one column per rank."""

from __future__ import annotations

import importlib
import shutil
from typing import IO

from pycomm.trace.format import FAILED, STARTED, Record
from pycomm.trace.job import Group, Job
from pycomm.trace.words import Names, call_at, capital, span, when

Rows = list[list[str]]  # the first is the heading
_WORTH_TELLING_NS = 10**6


def print_tables(job: Job, last: int, file: IO[str]) -> None:
    """Prints the dumps, and the last operations of every group: with rich on a terminal, as plain text otherwise."""
    names = Names(job)
    dumps = [[str(r), d.host, str(d.pid), when(d.time_ns), d.reason] for r, d in job.dumps.items()]
    _print("Dumps", [["rank", "host", "pid", "written", "reason"], *dumps], file)
    for group in job.groups:
        title = capital(names.group(group))
        if group.failure:
            print(f"\n{title} failed: {group.failure.text}", file=file)
        _print(f"{title}: the last operations", _collectives(group, last), file)
        if any(group.messages(rank) for rank in group.ranks):
            _print(f"{title}: the last messages of every rank", _messages(group, last), file)


# ---- what is in them


def _heading(group: Group) -> list[str]:
    heading = []
    for rank in group.ranks:
        state = group.state(rank)
        words = {", left": state.left, ", dead": not state.alive, ", stopped": state.stopped}
        how = next((word for word, holds in words.items() if holds), "")
        heading.append(f"rank {rank} ({group.pid(rank) or '?'}{how})")
    return heading


def _collectives(group: Group, last: int) -> Rows:
    known = sorted({r.sequence for rank in group.ranks for r in group.collectives(rank)})[-last:]
    rows = [["", "operation", *_heading(group)]]
    for sequence in known:
        records = [group.collective(rank, sequence) for rank in group.ranks]
        calls = {call_at(record) for record in records if record}
        same = calls.pop() if len(calls) == 1 else ""
        cells = [_cell(group, record, not same) for record in records]
        rows.append([str(sequence), same or "(differs)", *cells])
    queued = [len(group.queued(rank)) for rank in group.ranks]
    if any(queued):
        rows.append(["", "queued", *(str(number or "") for number in queued)])
    return rows


def _messages(group: Group, last: int) -> Rows:
    of_ranks = [group.messages(rank)[-last:] for rank in group.ranks]
    most = max(map(len, of_ranks))
    columns = []
    for known in of_ranks:
        blank = [""] * (most - len(known))
        columns.append(blank + [_cell(group, message, True) for message in known])
    rows = [[str(row), *cells] for row, cells in enumerate(zip(*columns, strict=True), start=1)]
    return [["", *_heading(group)], *rows]


def _cell(group: Group, record: Record | None, with_call: bool) -> str:
    if record is None:
        return "-"
    progress = _progress(group, record)
    return f"{call_at(record)}: {progress}" if with_call else progress


def _progress(group: Group, record: Record) -> str:
    """``done in 2 ms``, ``failed after 8.0 s``, ``under way for 3.0 s``."""
    if record.started_ns is None:
        return "queued"
    end = group.seen_ns if record.finished_ns is None else record.finished_ns
    took = span(max(end - record.started_ns, 0))
    if record.state in (STARTED, FAILED):
        return f"{'failed after' if record.state == FAILED else 'under way for'} {took}"
    waited = (record.met_ns or 0) - record.started_ns
    return f"done in {took}" + (
        f", {span(waited)} of it waiting" if waited >= _WORTH_TELLING_NS else ""
    )


# ---- how they are printed


def _print(title: str, rows: Rows, file: IO[str]) -> None:
    if file.isatty():
        try:
            return _print_rich(title, rows, file)
        except ModuleNotFoundError:
            pass
    print(f"\n{title}", file=file)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip(), file=file)
    return None


def _print_rich(title: str, rows: Rows, file: IO[str]) -> None:
    """Folds what is too wide."""
    text = importlib.import_module("rich.text").Text
    table = importlib.import_module("rich.table").Table(title=text(title), show_lines=True)
    for heading in rows[0]:
        table.add_column(text(heading), overflow="fold")
    for row in rows[1:]:
        table.add_row(*(text(cell, style="red" if "failed" in cell else "") for cell in row))
    width = shutil.get_terminal_size().columns
    importlib.import_module("rich.console").Console(file=file, width=width).print(table)
