"""The last operations of every group, one row each and one column per rank."""

from __future__ import annotations

import importlib
import shutil
from typing import IO, Any

from pycomm.trace.format import FAILED, SCHEDULED, STARTED, Record
from pycomm.trace.job import Group, Job
from pycomm.trace.words import Names, call_at, capital, span, when

Rows = list[list[str]]
_WORTH_TELLING_NS = 10**6


def print_tables(job: Job, last: int, file: IO[str]) -> None:
    """Prints the dumps, and the last operations of every group: with rich on a terminal, as plain text otherwise."""
    names = Names(job)
    print_table("Dumps", _dumps(job), file)
    for group in job.groups:
        title = capital(names.group(group))
        if group.failure:
            print(f"\n{title} failed: {group.failure.text}", file=file)
        print_table(f"{title}: the last operations", _collectives(group, last), file)
        if any(group.messages(rank) for rank in group.ranks):
            print_table(f"{title}: the last messages of every rank", _messages(group, last), file)


# ---- what is in them; the first row is the heading


def _dumps(job: Job) -> Rows:
    rows = [["rank", "host", "pid", "written", "reason"]]
    for rank, dump in job.dumps.items():
        rows.append([str(rank), dump.host, str(dump.pid), when(dump.time_ns), dump.reason])
    return rows


def _heading(group: Group) -> list[str]:
    return [
        f"rank {rank} ({group.pid(rank) or '?'}{_state_words(group, rank)})" for rank in group.ranks
    ]


def _state_words(group: Group, rank: int) -> str:
    state = group.state(rank)
    if state.left:
        return ", left"
    if not state.alive:
        return ", dead"
    return ", stopped" if state.stopped else ""


def _collectives(group: Group, last: int) -> Rows:
    known = sorted({r.sequence for rank in group.ranks for r in group.collectives(rank)})[-last:]
    rows = [["", "operation", *_heading(group)]]
    for sequence in known:
        records = [group.collective(rank, sequence) for rank in group.ranks]
        calls = {call_at(record) for record in records if record}
        same = calls.pop() if len(calls) == 1 else ""
        cells = [_cell(group, record, not same) for record in records]
        rows.append([str(sequence), same or "(differs)", *cells])
    queued = {rank: len(group.queued(rank)) for rank in group.ranks}
    if any(queued.values()):
        rows.append(["", "queued", *(str(queued[rank] or "") for rank in group.ranks)])
    return rows


def _messages(group: Group, last: int) -> Rows:
    of_ranks = [group.messages(rank)[-last:] for rank in group.ranks]
    rows = [["", *_heading(group)]]
    for index in range(max(map(len, of_ranks))):
        cells = []
        for messages in of_ranks:
            offset = index - (max(map(len, of_ranks)) - len(messages))
            cells.append(_cell(group, messages[offset], True) if offset >= 0 else "")
        rows.append([str(index + 1), *cells])
    return rows


def _cell(group: Group, record: Record | None, with_call: bool) -> str:
    if record is None:
        return "-"
    progress = _progress(group, record)
    return f"{call_at(record)}: {progress}" if with_call else progress


def _progress(group: Group, record: Record) -> str:
    """``done in 2 ms``, ``failed after 8.0 s``, ``under way for 3.0 s``."""
    if record.state == SCHEDULED or record.started_ns is None:
        return "queued"
    end = group.seen_ns if record.finished_ns is None else record.finished_ns
    took = span(max(end - record.started_ns, 0))
    if record.state == STARTED:
        return f"under way for {took}"
    waited = ""
    if record.met_ns is not None and record.met_ns - record.started_ns >= _WORTH_TELLING_NS:
        waited = f", {span(record.met_ns - record.started_ns)} of it waiting"
    return f"failed after {took}" if record.state == FAILED else f"done in {took}{waited}"


# ---- how they are printed


def print_table(title: str, rows: Rows, file: IO[str]) -> None:
    """Prints a table whose first row is the heading."""
    rich = _rich() if file.isatty() else None
    if rich:
        _print_rich(rich, title, rows, file)
    else:
        _print_plain(title, rows, file)


def _rich() -> Any:
    try:
        return importlib.import_module("rich.table"), importlib.import_module("rich.console")
    except ModuleNotFoundError:
        return None


def _print_rich(rich: Any, title: str, rows: Rows, file: IO[str]) -> None:
    tables, consoles = rich
    text = importlib.import_module("rich.text").Text
    table = tables.Table(title=text(title), title_justify="left", show_lines=True)
    for heading in rows[0]:
        table.add_column(text(heading), overflow="fold")
    for row in rows[1:]:
        styles = [_style(cell) for cell in row]
        table.add_row(*(text(cell, style=style) for cell, style in zip(row, styles, strict=True)))
    width = shutil.get_terminal_size().columns
    consoles.Console(file=file, width=width).print(table)


def _style(cell: str) -> str:
    if "failed" in cell or cell == "(differs)":
        return "red"
    return "yellow" if "under way" in cell or cell == "-" else ""


def _print_plain(title: str, rows: Rows, file: IO[str]) -> None:
    print(f"\n{title}", file=file)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip(), file=file)
