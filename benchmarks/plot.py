"""A finished run as pictures: for each operation time over size, and pycomm beside the best other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from names import BOUND, COLORS, FLOOR, GLOO, OWN
from rows import Row, Run
from words import TIMES, format_bytes, format_time


def plot(run: Run, op: str, path: Path) -> None:
    """One operation; a barrier, which has no sizes, as bars."""
    if len(run.sizes(op)) == 1:
        figure, axis = plt.subplots(figsize=(8.0, 3.6))
        plot_one_size(run, op, axis)
    else:
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(8.0, 9.0), sharex=True, height_ratios=(3, 2)
        )
        plot_times(run, op, above)
        plot_ratios(run, op, below)
    figure.set_layout_engine("constrained")
    machine, settings = run.machine, run.settings
    figure.suptitle(
        f"{op}, {settings['world_size']} ranks, {settings['dtype']}; {machine['cpu']}, "
        f"torch {machine['torch']}, pycomm {machine['pycomm']}\n"
        "median; band: quartiles of the repeats; hollow: cores far apart in some repeat",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def style_of(variant: str) -> dict[str, Any]:
    if variant == BOUND:
        return {"color": COLORS[variant], "ls": "--", "lw": 1.2}
    return {"color": COLORS[variant], "lw": 2.4 if variant in OWN else 1.4}


def plot_times(run: Run, op: str, axis: Axes) -> None:
    for variant in run.variants(op):
        rows = run.line(op, variant)
        if variant == FLOOR:
            axis.axhline(rows[0].time_us, color=COLORS[FLOOR], ls=":", lw=1.5, label=FLOOR)
            continue
        bands = [row.time_us_quartiles for row in rows]
        plot_line(axis, rows, [row.time_us for row in rows], bands)
    axis.set_ylabel("time per call, slowest rank")
    axis.set_xscale("log", base=2)
    set_time_scale(axis)
    axis.legend(loc="upper left", fontsize=8, frameon=False)


def plot_ratios(run: Run, op: str, axis: Axes) -> None:
    for variant in OWN:
        rows = [row for row in run.line(op, variant) if row.ratio_to_best]
        ratios = [row.ratio_to_best for row in rows if row.ratio_to_best]
        if rows:
            bands = [[ratio.low, ratio.high] for ratio in ratios]
            plot_line(axis, rows, [ratio.median for ratio in ratios], bands)
    others = [it for it in run.variants(op) if it not in (*OWN, FLOOR, BOUND)]
    best = GLOO if others == [GLOO] else "the best other"
    axis.axhline(1.0, color="black", lw=1.0)
    axis.set_ylabel(f"times faster than {best}")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{TIMES}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    sizes = run.sizes(op)
    axis.set_xticks(sizes, [format_bytes(size) for size in sizes], rotation=45, ha="right")
    axis.tick_params(axis="x", which="minor", bottom=False)
    axis.grid(alpha=0.25)


def plot_line(
    axis: Axes, rows: Sequence[Row], values: Sequence[float], bands: Sequence[Sequence[float]]
) -> None:
    """A variant's medians, and a band from quartile to quartile; hollow where far."""
    sizes, variant = [row.size_bytes for row in rows], rows[0].variant
    axis.plot(sizes, values, label=variant, **style_of(variant))
    if variant == BOUND:
        axis.plot(sizes, values, marker="_", ms=14, mew=2, color=COLORS[BOUND], lw=0, zorder=4)
    else:
        for size_bytes, value, row in zip(sizes, values, rows, strict=True):
            color = COLORS[variant]
            fill = "white" if "far" in row.placement else color
            axis.plot(size_bytes, value, marker="o", ms=4.5, mfc=fill, mec=color, zorder=3)
    low, high = zip(*bands, strict=True)
    axis.fill_between(sizes, low, high, color=COLORS[variant], alpha=0.2, lw=0)


def plot_one_size(run: Run, op: str, axis: Axes) -> None:
    """A bar per variant, quartiles as whiskers."""
    rows = [row for variant in run.variants(op) for row in run.line(op, variant)][::-1]
    names, times = [row.variant for row in rows], [row.time_us for row in rows]
    spans = zip(*[row.time_us_quartiles for row in rows], strict=True)
    low, high = (
        [abs(end - time_us) for end, time_us in zip(ends, times, strict=True)] for ends in spans
    )
    colors = [COLORS[name] for name in names]
    axis.barh(names, times, xerr=[low, high], color=colors, error_kw={"lw": 1.0})
    for place, row in enumerate(rows):
        axis.annotate(
            f" {format_time(row.time_us)}",
            (max(row.time_us, row.time_us_quartiles[1]), place),
            va="center",
            fontsize=8,
        )
    axis.set_xscale("log")
    axis.set_xlim(min(times) / 2, max(times) * 4)
    axis.xaxis.set_major_formatter(FuncFormatter(time_label))
    axis.set_xlabel("time per call, slowest rank")


def time_label(time_us: float, _position: int) -> str:
    return f"{time_us:g} µs" if time_us < 1000 else f"{time_us / 1000:g} ms"


def set_time_scale(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(time_label))
    axis.grid(alpha=0.25)
