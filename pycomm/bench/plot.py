"""Latency and bandwidth over the size, one curve for each backend, with the machine's own copy as a line."""

from __future__ import annotations

from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

from pycomm.bench.settings import Settings


def curves(made: dict[str, Any], in_place: bool) -> dict[str, list[tuple[int, float, float]]]:
    """By backend: bytes, microseconds and busbw."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for row in made["rows"]:
        for side in row["sides"]:
            if side["in_place"] == in_place and "median_us" in side and row["bytes"] > 0:
                point = (row["bytes"], side["median_us"], side["busbw"])
                found.setdefault(side["backend"], []).append(point)
    return found


def crossings(
    first: list[tuple[int, float, float]], second: list[tuple[int, float, float]]
) -> list[tuple[float, float]]:
    """Where two curves of times cross: bytes and microseconds, on straight lines between logarithms."""
    theirs = {size: time for size, time, _ in second}
    both = [(size, time, theirs[size]) for size, time, _ in first if size in theirs]
    found = []
    for (a, ours, other), (b, ours_b, other_b) in pairwise(both):
        before, after = log(ours / other), log(ours_b / other_b)
        if before * after < 0:
            part = before / (before - after)
            found.append((a * (b / a) ** part, ours * (ours_b / ours) ** part))
    return found


def draw(made: dict[str, Any], settings: Settings, path: Path) -> None:
    """Both, side by side."""
    from matplotlib.figure import Figure

    facts = made["facts"]
    in_place = bool(curves(made, True))
    lines = curves(made, in_place)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(
        f"{settings.operation}, {facts['ranks']} ranks, {settings.dtype}, {facts['cpu']}, load {facts['load']:.1f}"
    )
    left, right = figure.subplots(1, 2)
    for name, points in lines.items():
        sizes = [size for size, _, _ in points]
        left.loglog(sizes, [time for _, time, _ in points], "o-", ms=3, label=name)
        right.semilogx(sizes, [bus for _, _, bus in points], "o-", ms=3, label=name)
    first, *others = lines.values()
    for other in others:
        for size, time in crossings(first, other):
            left.plot([size], [time], "kx", ms=9, label=f"crossing at {size:,.0f} B")
    right.axhline(facts["copy_gbps"], color="0.4", ls="--", lw=1, label="copy by one thread")
    left.set(xlabel="bytes", ylabel="median, us")
    right.set(xlabel="bytes", ylabel="busbw, GB/s", ylim=(0, None))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
