"""Shows schedules: as text, a row per rank, and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycomm.errors import InvalidArgument
from pycomm.pipeline.schedules.action import Action, Kind, Schedule
from pycomm.pipeline.schedules.costs import Costs
from pycomm.pipeline.schedules.simulate import Simulation, simulate

#: Columns of a text, at most: actions that are too short for a column are left out.
_COLUMNS = 240

_COLORS = {Kind.F: "#4c8ed9", Kind.B: "#e58a2c", Kind.I: "#f2b84b", Kind.W: "#4fae7b"}
_MEANINGS = {
    Kind.F: "F forward",
    Kind.B: "B backward",
    Kind.I: "I input gradient",
    Kind.W: "W weight gradient",
}


def draw(schedule: Schedule, costs: Costs | None = None) -> str:
    """Text with a row per rank and a column per unit of time, that of the shortest action.

    ``F3`` is the forward of microbatch 3, with several stages per rank ``5F3`` that of stage 5; ``--`` goes on, ``.``
    idles.
    """
    played = simulate(schedule, costs)
    lengths = [one.end - one.start for rank in played.intervals for one in rank]
    unit = max(min((length for length in lengths if length > 0), default=1.0), 1e-300)
    unit = max(unit, played.makespan / _COLUMNS)
    columns = round(played.makespan / unit)
    width = 1 + max(len(_label(one.action, schedule)) for rank in played.intervals for one in rank)
    head = len(f"rank {schedule.ranks - 1}")
    lines = []
    for rank, intervals in enumerate(played.intervals):
        cells = [".".ljust(width)] * columns
        for action, start, end in intervals:
            first, last = round(start / unit), round(end / unit)
            label = _label(action, schedule).ljust(width * (last - first) - 1, "-") + " "
            cells[first:last] = [label[at * width : (at + 1) * width] for at in range(last - first)]
        lines.append(f"{f'rank {rank}':{head}}  {''.join(cells)}".rstrip())
    return "\n".join(lines)


def _label(action: Action, schedule: Schedule) -> str:
    return str(action) if schedule.chunks > 1 else f"{action.kind}{action.microbatch}"


def plot(simulations: Sequence[Simulation], path: Path) -> None:
    """A picture of timelines, one below the other, on one scale; its kind by the path's suffix. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    heights = [0.34 * len(one.intervals) + 0.62 for one in simulations]
    figure, axes = plt.subplots(
        len(simulations),
        1,
        figsize=(12, sum(heights) + 0.6),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        plt.close(figure)
        raise InvalidArgument(f"{path.suffix[1:]} is no kind of picture: {' '.join(kinds)}")
    end = max(one.makespan for one in simulations)
    for axis, one in zip(axes[:, 0], simulations, strict=True):
        _draw_timeline(axis, one, end)
    axes[-1, 0].set_xlabel("time")
    _draw_legend(figure, simulations)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_timeline(axis: Any, played: Simulation, end: float) -> None:
    schedule = played.schedule
    digits = len(str(schedule.microbatches - 1))
    per_time = 165 / end if end else 0.0  # digits that fit beside one another
    for rank, intervals in enumerate(played.intervals):
        for (stage, kind, microbatch), start, stop in intervals:
            room = (stop - start) * per_time
            chunk = schedule.stages_of(rank).index(stage)
            light = 1.0 - 0.45 * chunk / max(schedule.chunks - 1, 1)
            axis.barh(
                rank,
                stop - start,
                left=start,
                height=0.86,
                color=(_COLORS[kind], light),
                edgecolor="white",
                linewidth=min(0.6, 0.3 * room),
            )
            if room >= digits:
                middle = (start + stop) / 2
                axis.text(middle, rank, str(microbatch), ha="center", va="center", fontsize=6.5)
    held = " ".join(map(str, played.peak_activations))
    axis.set_title(
        f"{schedule.name}: makespan {played.makespan:.4g}, bubble {played.bubble:.3g} (span "
        f"{played.span_bubble:.3g}), activations {held}",
        fontsize=9,
        loc="left",
    )
    axis.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axis.tick_params(axis="y", length=0, labelsize=8)
    axis.set_xlim(0, end or 1)
    axis.set_ylim(schedule.ranks - 0.5, -0.5)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _draw_legend(figure: Any, simulations: Sequence[Simulation]) -> None:
    from matplotlib.patches import Patch

    used = {one.action.kind for played in simulations for rank in played.intervals for one in rank}
    patches = [
        Patch(color=_COLORS[kind], label=_MEANINGS[kind]) for kind in _MEANINGS if kind in used
    ]
    if any(played.schedule.chunks > 1 for played in simulations):
        patches.append(Patch(color="#d0d0d0", label="lighter: a rank's later stages"))
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False
    )
