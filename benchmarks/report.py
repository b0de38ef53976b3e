"""A finished run as tables; it can be shown and drawn again without timing anything:

python benchmarks/report.py runs/bench/results.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bars import bars_table
from names import BOUND, COMMUNICATOR, FLOOR, GLOO, OWN, PYCOMM, SHARED, VARIANTS
from plot import plot
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rows import BUSY_NS, NEAR_NS, Ratio, Row, Run
from words import (
    TIMES,
    format_bytes,
    format_flags,
    format_ratio,
    format_span,
    format_time,
    three_digits,
)

__all__ = ["format_bytes", "format_flags", "format_time", "open_console", "publish"]

BUSY_SHARE = 0.1  # CPU time of other processes above which a run is called disturbed


def title(run: Run, op: str) -> str:
    world_size = run.settings["world_size"]
    return f"{op}, {run.settings['dtype']}, {world_size} rank{'s' * (world_size > 1)}"


def with_quartiles(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return f"{format_ratio(ratio.median)} [{format_span((ratio.low, ratio.high), format_ratio)}]"


def percent(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.median:.0%}"


# ------------------------------------------------------------------------------------- for a screen


def rich_table(run: Run, op: str) -> Table:
    """Every row of an operation, with what was derived from it."""
    table = Table(title=title(run, op), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    headings = ["median", "min", "p99", "CoV", "busbw\nGB/s", f"{TIMES} gloo"]
    headings += [f"{TIMES} best other [quartiles]", "which", "DRAM\nat least", "of\nbound"]
    for heading in [*headings, "flag latency"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for size_bytes in run.sizes(op):
        rows = [run.find(op, size_bytes, variant) for variant in run.variants(op)]
        for row in filter(None, rows):
            style = "bold" if row.variant in OWN else None
            table.add_row(*rich_cells(row), style=style)
        table.add_section()
    return table


def rich_cells(row: Row) -> list[str]:
    first = row.variant == GLOO  # the first of its case: what they share is shown there
    return [
        format_bytes(row.size_bytes) if first else "",
        row.variant,
        format_time(row.time_us),
        format_time(row.time_us_min),
        format_time(row.time_us_p99),
        f"{row.variation:.0%}",
        f"{row.busbw_GBps:.3g}",
        "" if first else format_ratio(row.ratio_to_gloo.median),
        with_quartiles(row.ratio_to_best),
        row.best_other or "",
        format_bytes(row.memory_bytes) if first else "",
        percent(row.bound_fraction),
        format_flags(row) if first else "",
    ]


# ------------------------------------------------------------------------------------- for a README


def markdown(run: Run) -> str:
    """A table per operation: a line per size, variants side by side, ready for the README."""
    tables = [f"**{title(run, op)}**\n\n{markdown_table(run, op)}" for op in run.ops()]
    return "\n\n".join([*tables, *caption(run)]) + "\n"


def caption(run: Run) -> list[str]:
    """How to read the tables, and how to make them again."""
    machine, settings = run.machine, run.settings
    floors = [
        f"{op} {format_time(rows[0].time_us)} ({format_bytes(rows[0].size_bytes)})"
        for op in run.ops()
        if (rows := run.line(op, FLOOR))
    ]
    floor = "torch's own dispatch takes (its fake backend, which moves nothing): "
    return [
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, torch "
        f"{machine['torch']}, pycomm {machine['pycomm']} ({machine['commit']}), one thread a rank. "
        f"Medians of {settings['repeats']} interleaved repeats of at least "
        f"{settings['min_time_ms']:g} ms; the slowest rank's time per call; ordinary private memory; "
        f"{'each rank on a core of its own; ' * settings['bind']}"
        "all_reduce, broadcast and reduce in place; send_recv is a ping-pong's time one way. "
        f"{TIMES}: how many times faster than the other, the median [quartiles] of the ratios within "
        "each repeat; than the best other: than the fastest engine but pycomm of each repeat. GB = 1e9 "
        "bytes. Of bound: the time that the least memory traffic takes, of the time. Flags: one-way "
        f"flag latency between the ranks' cores around the repeats, near below {NEAR_NS:.0f} ns, "
        f"busy above {BUSY_NS / 1e3:.0f} µs (a rank had to wait for a core). "
        f"Other processes had {machine['cpu_share_of_others']:.0%} of the CPU time meanwhile.",
        *([f"Of the times through torch.distributed, {floor}{', '.join(floors)}."] * bool(floors)),
        *[f"{name} {version}." for name, version in machine["peers"].items()],
        *["; ".join(run.notes) + "."] * bool(run.notes),
        f"`{machine['command']}`",
    ]


def markdown_table(run: Run, op: str) -> str:
    columns = [it for it in run.variants(op) if it not in (FLOOR, BOUND)]
    names = {PYCOMM: f"pycomm, `dist.{op}`", COMMUNICATOR: f"`Communicator.{op}`"}
    headings = ["size", *[names.get(it, it) for it in columns]]
    for variant in (PYCOMM, COMMUNICATOR):
        short = "direct" if variant == COMMUNICATOR else "dist"
        headings += [f"{short} {TIMES} gloo", f"{short} {TIMES} best other"] * (variant in columns)
    headings += ["of bound", *["shared of bound"] * (SHARED in columns), "flags"]
    lines = [headings, ["---:"] * len(headings)]
    lines += [markdown_cells(run, op, size_bytes, columns) for size_bytes in run.sizes(op)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_cells(run: Run, op: str, size_bytes: int, columns: list[str]) -> list[str]:
    rows = {it: row for it in VARIANTS if (row := run.find(op, size_bytes, it))}
    cells = [format_bytes(size_bytes)]
    cells += [format_time(rows[it].time_us) if it in rows else "" for it in columns]
    for variant in (PYCOMM, COMMUNICATOR):
        if variant in columns and (row := rows.get(variant)):
            cells += [f"**{format_ratio(row.ratio_to_gloo.median)}**", best_cell(row)]
        elif variant in columns:
            cells += ["", ""]
    own = rows.get(PYCOMM) or rows.get(COMMUNICATOR)
    cells.append(percent(own.bound_fraction) if own else "")
    if SHARED in columns:
        cells.append(percent(rows[SHARED].bound_fraction) if SHARED in rows else "")
    return [*cells, format_flags(rows[GLOO])]


def best_cell(row: Row) -> str:
    return f"{with_quartiles(row.ratio_to_best)} ({row.best_other})" if row.best_other else ""


# ---------------------------------------------------------------------------------------- all of it


def open_console() -> Console:
    """Wide enough for the tables where the output is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 200)


def publish(run: Run, folder: Path, console: Console) -> None:
    """Show the tables and write them, and a plot per operation, beside the run's results.json."""
    written = [folder / "results.json", folder / "results.md"]
    for op in run.ops():
        console.print(rich_table(run, op))
        written.append(folder / f"{op}.png")
        plot(run, op, written[-1])
    written[1].write_text(markdown(run))
    print_bound(run, console)
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)
    others = run.machine["cpu_share_of_others"]
    if others > BUSY_SHARE:
        console.print(
            f"[yellow]Other processes had {others:.0%} of the CPU time meanwhile: repeat on a "
            "quiet machine before trusting these figures.[/]"
        )


def print_bound(run: Run, console: Console) -> None:
    """The memory bound in figures, and how near the largest all_reduce came."""
    if not (bounds := run.line("all_reduce", BOUND)):
        return
    bound, rows = bounds[-1], [run.line("all_reduce", it)[-1:] for it in VARIANTS]
    speed = three_digits(bound.memory_bytes / bound.time_us / 1e3)
    shares = [f"{r[0].variant} {percent(r[0].bound_fraction)}" for r in rows if r and r[0] != bound]
    size = format_bytes(bound.size_bytes)
    console.print(
        f"Memory bound at {size}: {speed} GB/s, so an all_reduce in place takes at least "
        f"{format_time(bound.time_us)}. Of it: {', '.join(s for s in shares if s[-1] == '%')}.",
        soft_wrap=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Show a finished run again, and redraw its table and plot."
    )
    parser.add_argument("run", type=Path, help="the results.json of a run")
    parser.add_argument(
        "--check-bars", action="store_true", help="exit 1 unless the speed bars hold"
    )
    args = parser.parse_args()
    console = open_console()
    run = Run.load(args.run)
    publish(run, args.run.parent, console)
    table, passed = bars_table(run)
    if args.check_bars:
        console.print(table)
    return 0 if passed or not args.check_bars else 1


if __name__ == "__main__":
    sys.exit(main())
