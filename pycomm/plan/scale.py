"""From a few ranks to thousands: what happens to an all-reduce, and to a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pycomm.errors import InvalidArgument
from pycomm.plan.cluster import Cluster
from pycomm.plan.operation import Prediction, predict, predictions
from pycomm.plan.step import Job, Step, predict_step


@dataclass(frozen=True)
class Point:
    """A number of ranks: all ways of one all-reduce, plain and compressed, and a step of each job."""

    ranks: int
    hosts: int
    ways: dict[str, Prediction]
    steps: dict[str, Step]

    @property
    def best(self) -> Prediction:
        """The fastest plain all-reduce."""
        plain = [one for one in self.ways.values() if one.compression == "none"]
        return min(plain, key=lambda one: one.seconds)


def hosts_up_to(most: int, ranks_per_host: int) -> list[int]:
    """1, 2, 4, ... hosts, and those of `most` ranks at the end."""
    if most < ranks_per_host:
        raise InvalidArgument(f"{most} ranks are fewer than one host's {ranks_per_host}")
    last = most // ranks_per_host
    return [*(2**i for i in range((last - 1).bit_length())), last]


def curve(
    cluster: Cluster,
    most: int,
    bytes: float,
    compression: str,
    jobs: dict[str, Job],
) -> list[Point]:
    """All of it, for clusters of more and more of the same hosts; jobs where their degrees divide the ranks."""
    found = []
    for hosts in hosts_up_to(most, cluster.ranks_per_host):
        of_size = replace(cluster, hosts=hosts)
        group, memory = of_size.everybody, cluster.memory
        ways = {one.algorithm: one for one in predictions(group, bytes, memory=memory)}
        if compression != "none":
            ways[compression] = predict(group, bytes, compression=compression, memory=memory)
        steps = {}
        for name, job in jobs.items():
            if of_size.world_size % (job.tensor * job.pipeline) == 0:
                steps[name] = predict_step(job, of_size)
        found.append(Point(of_size.world_size, hosts, ways, steps))
    return found


def table(points: Sequence[Point]) -> str:
    """As text, in Markdown."""
    names = list(points[-1].steps)
    heads = ["ranks", "hosts", "best", "ms", "busbw, GB/s"]
    heads += [f"{name}: step, ms (efficiency)" for name in names]
    lines = [f"| {' | '.join(heads)} |", f"|---:|---:|---|{'---:|' * (2 + len(names))}"]
    for point in points:
        best = point.best
        cells = [str(point.ranks), str(point.hosts), best.algorithm]
        cells += [f"{best.seconds * 1e3:.3g}", f"{best.busbw / 1e9:.3g}"]
        for name in names:
            step = point.steps.get(name)
            cells.append(
                f"{step.seconds * 1e3:.4g} ({step.efficiency * 100:.1f} %)" if step else "-"
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_COLORS = {
    "one_shot": "#d55e00",
    "two_shot": "#cc79a7",
    "ring": "#0072b2",
    "recursive_doubling": "#b8860b",
    "halving_doubling": "#56b4e9",
    "tree": "#009e73",
    "hierarchical": "#111827",
}


def plot(points: Sequence[Point], title: str, path: Path) -> None:
    """Left the all-reduce by every algorithm, right the steps' efficiency. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        plt.close(figure)
        raise InvalidArgument(f"{path.suffix[1:]} is no kind of picture: {' '.join(kinds)}")
    _draw_ways(left, points, title)
    for name in points[-1].steps:
        of_name = [(p.ranks, p.steps[name].efficiency * 100) for p in points if name in p.steps]
        right.plot(*zip(*of_name, strict=True), marker="o", ms=3, lw=1.6, label=name)
    right.set(xscale="log", xlabel="ranks", ylabel="% of the time computing", ylim=(0, 105))
    right.set(title="training step, by gradients' compression")
    right.legend(frameon=False, fontsize=8, loc="lower left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, lw=0.5)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_ways(axes: Any, points: Sequence[Point], title: str) -> None:
    times = {
        name: [(p.ranks, p.ways[name].seconds * 1e3) for p in points if name in p.ways]
        for name in points[-1].ways
    }
    for name, line in times.items():
        known = name in _COLORS
        axes.plot(
            *zip(*line, strict=True),
            color=_COLORS.get(name, "#7c3aed"),
            lw=1.6,
            ls="-" if known else "--",
            marker="o",
            ms=3,
            label=name if known else f"{name}, {points[-1].ways[name].algorithm}",
        )
    # What is 50 times slower than the best would only squeeze the others.
    best = [time for time in (min(w.seconds for w in p.ways.values()) for p in points) if time > 0]
    if best:
        axes.set_ylim(min(best) * 1e3 / 2, max(best) * 1e3 * 50)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="milliseconds", title=title)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.13))
