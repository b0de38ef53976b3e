"""What a benchmark run found: its rows, and how they become tables, a plot and a verdict.

Definitions are those of nccl-tests: S is the whole buffer in bytes (all_gather: the output,
reduce_scatter: the input), algbw = S / time, busbw = algbw * f(op, ranks), GB = 1e9 bytes. Sizes
K, M, G are powers of 1024. A finished run can be shown and drawn again, without timing anything:

    python benchmarks/report.py runs/bench/collectives.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

GLOO = "gloo"
PYCOMM = "pycomm"
COMMUNICATOR = "pycomm.Communicator"
FLOOR = "fake (dispatch floor)"
VARIANTS = (GLOO, PYCOMM, COMMUNICATOR, FLOOR)

NEAR_NS = 175.0  # one-way flag latency below which the ranks' cores count as "near" (a shared L3)

BUSY_SHARE = 0.1  # CPU time of other processes above which a run is called disturbed

TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"

COLORS = {GLOO: "#6b7280", PYCOMM: "#0072b2", COMMUNICATOR: "#d55e00", FLOOR: "#009e73"}


@dataclass(frozen=True)
class Case:
    """What is timed: size_bytes and count are those of the whole buffer, S."""

    op: str
    size_bytes: int
    count: int
    dtype: str
    world_size: int


@dataclass(frozen=True)
class Row(Case):
    """One variant of one case. Times are the slowest rank's, per call."""

    variant: str
    iterations: list[int]  # calls in each sample
    samples_us: list[float]  # one per repeat, in the order taken
    time_us: float  # median of the samples, as are the derived figures below
    time_us_min: float
    time_us_max: float
    time_us_quartiles: list[float]
    time_us_iqr: float
    algbw_GBps: float  # noqa: N815  (the unit's spelling)
    busbw_GBps: float  # noqa: N815
    ratio_to_gloo: (
        float  # median over repeats of gloo's time / this variant's time in the same repeat
    )
    ratio_min: float
    ratio_max: float
    ratio_quartiles: list[float]
    flag_latency_ns: list[float]  # before and after this size
    placement: list[str]  # the same two, in words


@dataclass(frozen=True)
class Run:
    """A finished run: where and how it was made, and its rows."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Run:
        data = json.loads(path.read_text())
        return cls(data["machine"], data["settings"], [Row(**row) for row in data["rows"]])

    def ops(self) -> list[str]:
        return list(dict.fromkeys(row.op for row in self.rows))

    def sizes(self, op: str) -> list[int]:
        return sorted({row.size_bytes for row in self.rows if row.op == op})

    def variants(self, op: str) -> list[str]:
        present = {row.variant for row in self.rows if row.op == op}
        return [variant for variant in VARIANTS if variant in present]

    def line(self, op: str, variant: str) -> list[Row]:
        """The rows of one variant, smallest size first."""
        rows = [row for row in self.rows if (row.op, row.variant) == (op, variant)]
        return sorted(rows, key=lambda row: row.size_bytes)

    def find(self, op: str, size_bytes: int, variant: str) -> Row | None:
        return next((row for row in self.line(op, variant) if row.size_bytes == size_bytes), None)


# --------------------------------------------------------------------------------------------- rows


def bus_factor(op: str, world_size: int) -> float:
    """What busbw multiplies algbw with: the share of S that crosses each rank's link."""
    match op:
        case "all_reduce":
            return 2 * (world_size - 1) / world_size
        case "all_gather" | "reduce_scatter":
            return (world_size - 1) / world_size
        case "broadcast":
            return 1.0
    raise ValueError(f"no bus factor for {op!r}")


def placement(flag_latency_ns: float) -> str:
    return "near" if flag_latency_ns < NEAR_NS else "far"


def quartiles(values: Sequence[float]) -> list[float]:
    return [float(q) for q in np.percentile(values, (25, 75))]


def make_row(
    case: Case,
    variant: str,
    iterations: list[int],
    samples_us: list[float],
    gloo_us: list[float],
    flag_latency_ns: list[float],
) -> Row:
    """Derive a row from its samples and gloo's samples of the same repeats."""
    time_us = float(np.median(samples_us))
    low, high = quartiles(samples_us)
    ratios = [gloo / own for gloo, own in zip(gloo_us, samples_us, strict=True)]
    algbw = case.size_bytes / (time_us * 1e-6) / 1e9
    return Row(
        **asdict(case),
        variant=variant,
        iterations=iterations,
        samples_us=samples_us,
        time_us=time_us,
        time_us_min=min(samples_us),
        time_us_max=max(samples_us),
        time_us_quartiles=[low, high],
        time_us_iqr=high - low,
        algbw_GBps=algbw,
        busbw_GBps=algbw * bus_factor(case.op, case.world_size),
        ratio_to_gloo=float(np.median(ratios)),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        ratio_quartiles=quartiles(ratios),
        flag_latency_ns=flag_latency_ns,
        placement=[placement(latency) for latency in flag_latency_ns],
    )


# --------------------------------------------------------------------------------------------- bars


@dataclass(frozen=True)
class Bar:
    """A speed that pycomm has to reach: its median ratio to gloo in the same run."""

    size_bytes: int
    variant: str
    ratio: float


BARS = (  # for all_reduce, float32, 2 ranks
    Bar(8, PYCOMM, 20.0),
    Bar(8, COMMUNICATOR, 60.0),
    Bar(1 << 20, PYCOMM, 7.0),
    Bar(64 << 20, PYCOMM, 4.0),
)


def bars_apply(op: str, dtype: str, world_size: int) -> bool:
    return (op, dtype, world_size) == ("all_reduce", "float32", 2)


def bars_table(run: Run) -> tuple[Table, bool]:
    """The table bar / measured / pass, and whether every bar holds. What was not measured fails."""
    table = Table("size", "variant", title="bars: all_reduce, float32, 2 ranks", box=SIMPLE_HEAD)
    for heading in ("bar", "measured", "quartiles", "verdict"):
        table.add_column(heading, justify="right")
    passed = True
    for bar in BARS:
        row = run.find("all_reduce", bar.size_bytes, bar.variant)
        valid = row is not None and bars_apply(row.op, row.dtype, row.world_size)
        holds = row is not None and valid and row.ratio_to_gloo >= bar.ratio
        passed = passed and holds
        measured = format_ratio(row.ratio_to_gloo) if row and valid else "not measured"
        spread = format_span(row.ratio_quartiles, format_ratio) if row and valid else ""
        verdict = "[green]pass[/]" if holds else "[bold red]FAIL[/]"
        size, wanted = format_bytes(bar.size_bytes), f"≥ {bar.ratio:g}{TIMES}"
        table.add_row(size, bar.variant, wanted, measured, spread, verdict)
    return table, passed


# --------------------------------------------------------------------------------------------- text


def format_bytes(size_bytes: int) -> str:
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


def three_digits(value: float) -> str:
    """Three significant digits, without exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def format_time(time_us: float) -> str:
    return f"{three_digits(time_us)} µs" if time_us < 1000 else f"{three_digits(time_us / 1000)} ms"


def format_ratio(ratio: float) -> str:
    return f"{three_digits(ratio)}{TIMES}"


def format_span(pair: Sequence[float], form: Callable[[float], str]) -> str:
    """Low and high with a dash between, and the unit once if both have the same one."""
    low, high = (form(value) for value in pair)
    unit = high.lstrip("0123456789.")
    return f"{low.removesuffix(unit)}{DASH}{high}"


def format_flags(row: Row) -> str:
    """Flag latency before and after, in words and nanoseconds: 'near 34→36 ns'."""
    word = "→".join(dict.fromkeys(row.placement))
    return f"{word} {'→'.join(f'{latency:.0f}' for latency in row.flag_latency_ns)} ns"


def title(run: Run, op: str) -> str:
    world_size = run.settings["world_size"]
    return f"{op}, {run.settings['dtype']}, {world_size} rank{'s' * (world_size > 1)}"


def rich_table(run: Run, op: str) -> Table:
    """Every row of an operation, with what was derived from it."""
    table = Table(title=title(run, op), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    headings = ["count", "time", f"min{DASH}max", "IQR", "algbw\nGB/s", "busbw\nGB/s"]
    for heading in [*headings, f"{TIMES} gloo", "quartiles", "flag latency"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for size_bytes in run.sizes(op):
        rows = [run.find(op, size_bytes, variant) for variant in run.variants(op)]
        for row in filter(None, rows):
            table.add_row(*rich_cells(row), style="bold" if row.variant == PYCOMM else None)
        table.add_section()
    return table


def rich_cells(row: Row) -> list[str]:
    first = row.variant == GLOO  # the first of its case: what they share is shown there
    return [
        format_bytes(row.size_bytes) if first else "",
        row.variant,
        str(row.count) if first else "",
        format_time(row.time_us),
        format_span((row.time_us_min, row.time_us_max), format_time),
        format_time(row.time_us_iqr),
        f"{row.algbw_GBps:.3g}",
        f"{row.busbw_GBps:.3g}",
        "" if first else format_ratio(row.ratio_to_gloo),
        "" if first else format_span(row.ratio_quartiles, format_ratio),
        format_flags(row) if first else "",
    ]


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
        f"{machine['torch']}, pycomm {machine['pycomm']}, one thread a rank. Median [quartiles] of "
        f"{settings['repeats']} interleaved repeats of at least {settings['min_time_ms']:g} ms; "
        "the slowest rank's time per call; ordinary tensors, all_reduce and broadcast in place. "
        f"{TIMES} gloo: how many times faster than gloo, the median of the ratios within each "
        "repeat. GB = 1e9 bytes. Flags: one-way flag latency between the ranks' cores before and "
        f"after, near below {NEAR_NS:.0f} ns. Other processes had "
        f"{machine['cpu_share_of_others']:.0%} of the CPU time meanwhile.",
        *([f"Of the times through torch.distributed, {floor}{', '.join(floors)}."] * bool(floors)),
        f"`{machine['command']}`",
    ]


def markdown_table(run: Run, op: str) -> str:
    names = {GLOO: "gloo", PYCOMM: f"pycomm, `dist.{op}`", COMMUNICATOR: f"`Communicator.{op}`"}
    headings = ["size"]
    for variant, name in names.items():
        headings += [name] if variant == GLOO else [name, f"{TIMES} gloo"]
    headings += ["pycomm busbw", "flags"]
    lines = [headings, ["---:"] * len(headings)]
    lines += [markdown_cells(run, op, size_bytes, list(names)) for size_bytes in run.sizes(op)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_cells(run: Run, op: str, size_bytes: int, columns: Sequence[str]) -> list[str]:
    cells = [format_bytes(size_bytes)]
    rows = [row for variant in columns if (row := run.find(op, size_bytes, variant))]
    for row in rows:
        cells.append(
            f"{format_time(row.time_us)} [{format_span(row.time_us_quartiles, format_time)}]"
        )
        if row.variant != GLOO:
            spread = format_span(row.ratio_quartiles, format_ratio)
            cells.append(f"**{format_ratio(row.ratio_to_gloo)}** [{spread}]")
    busbw = next(row.busbw_GBps for row in rows if row.variant == PYCOMM)
    return [*cells, f"{three_digits(busbw)} GB/s", format_flags(rows[0])]


# --------------------------------------------------------------------------------------------- plot


def plot(run: Run, path: Path) -> None:
    """Time over size above, ratio to gloo below; a column per operation."""
    ops, machine = run.ops(), run.machine
    width = 7.0 if len(ops) == 1 else 4.6 * len(ops)
    figure, axes = plt.subplots(
        2, len(ops), figsize=(width, 8.0), sharex="col", sharey="row", squeeze=False
    )
    figure.set_layout_engine("constrained")
    for column, op in enumerate(ops):
        plot_times(run, op, axes[0][column])
        plot_ratios(run, op, axes[1][column])
    axes[0][0].set_ylabel("time per call, slowest rank")
    axes[1][0].set_ylabel("times faster than gloo")
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"{run.settings['world_size']} ranks, {run.settings['dtype']}; {machine['cpu']}, "
        f"torch {machine['torch']}, pycomm {machine['pycomm']}\n"
        "line: median; band: quartiles; light band: min to max; hollow: cores far apart",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_times(run: Run, op: str, axis: Axes) -> None:
    for variant in run.variants(op):
        rows = run.line(op, variant)
        if variant == FLOOR:
            axis.axhline(rows[0].time_us, color=COLORS[FLOOR], ls=":", lw=1.5, label=FLOOR)
            continue
        bands = [[r.time_us_min, *r.time_us_quartiles, r.time_us_max] for r in rows]
        plot_line(axis, rows, [row.time_us for row in rows], bands)
    axis.set_title(op)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(
        lambda value, _: f"{value:g} µs" if value < 1000 else f"{value / 1000:g} ms"
    )
    axis.grid(alpha=0.25)


def plot_ratios(run: Run, op: str, axis: Axes) -> None:
    for variant in (PYCOMM, COMMUNICATOR):
        rows = run.line(op, variant)
        bands = [[r.ratio_min, *r.ratio_quartiles, r.ratio_max] for r in rows]
        plot_line(axis, rows, [row.ratio_to_gloo for row in rows], bands)
    axis.axhline(1.0, color=COLORS[GLOO], lw=1.5)
    sizes = run.sizes(op)
    if bars_apply(op, run.settings["dtype"], run.settings["world_size"]):
        mark_bars(axis, sizes)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}{TIMES}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks(sizes, [format_bytes(size) for size in sizes], rotation=45, ha="right")
    axis.tick_params(axis="x", which="minor", bottom=False)
    axis.grid(alpha=0.25)


def plot_line(
    axis: Axes, rows: Sequence[Row], values: Sequence[float], bands: Sequence[Sequence[float]]
) -> None:
    """A variant's medians, and bands from (min, quartile, quartile, max); hollow where far."""
    sizes = [row.size_bytes for row in rows]
    color = COLORS[rows[0].variant]
    axis.plot(sizes, values, color=color, lw=1.8, label=rows[0].variant)
    for size_bytes, value, row in zip(sizes, values, rows, strict=True):
        fill = "white" if "far" in row.placement else color
        axis.plot(size_bytes, value, marker="o", ms=5, mfc=fill, mec=color, zorder=3)
    low, first, third, high = zip(*bands, strict=True)
    axis.fill_between(sizes, low, high, color=color, alpha=0.12, lw=0)
    axis.fill_between(sizes, first, third, color=color, alpha=0.3, lw=0)


def mark_bars(axis: Axes, sizes: Sequence[int]) -> None:
    """A short line at each bar's size and height, in the colour of the variant it is for."""
    for bar in BARS:
        if bar.size_bytes not in sizes:
            continue
        color = COLORS[bar.variant]
        ends = (bar.size_bytes / 1.8, bar.size_bytes * 1.8)
        axis.plot(ends, (bar.ratio, bar.ratio), color=color, lw=3, solid_capstyle="butt")
        axis.annotate(
            f"bar {bar.ratio:g}{TIMES}",
            (bar.size_bytes, bar.ratio),
            xytext=(0, -4),
            textcoords="offset points",
            ha="center",
            va="top",
            color=color,
            fontsize=8,
        )


# ---------------------------------------------------------------------------------------- all of it


def open_console() -> Console:
    """Wide enough for the tables where the output is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 140)


def publish(run: Run, folder: Path, console: Console) -> None:
    """Show the tables and write collectives.md and collectives.png beside the run's JSON."""
    for op in run.ops():
        console.print(rich_table(run, op))
    (folder / "collectives.md").write_text(markdown(run))
    plot(run, folder / "collectives.png")
    names = ", ".join(str(folder / f"collectives.{suffix}") for suffix in ("json", "md", "png"))
    console.print(f"written: {names}", soft_wrap=True)
    others = run.machine["cpu_share_of_others"]
    if others > BUSY_SHARE:
        console.print(
            f"[yellow]Other processes had {others:.0%} of the CPU time meanwhile: repeat on a "
            "quiet machine before trusting these figures.[/]"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Show a finished run again, and redraw its table and plot."
    )
    parser.add_argument("run", type=Path, help="the collectives.json of a run")
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
