"""Pipelines beside the clock that simulates them, and beside torch.distributed.pipelining.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --ranks 4 --repeats 5 --json pipeline.json --plot docs/pipeline_speed.png

First, stages that sleep: F, I and W of a rank take --unit milliseconds each per microbatch, so cores do not matter, and
a step's time is set against the simulated makespan. (Stage 0 has no input gradient, so its I is its W, in both.)

Then perceptrons: the same layers, microbatches and schedule with pycomm's Pipeline on pycomm's backend, with torch's
schedules on Gloo, and with torch's on pycomm's backend; in one job, taking turns in a random order. Figures are medians
[quartiles] of the ratio within each repeat; above 1, pycomm is faster.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from machine import cpu_model, others_share, read_clock
from ranks import answers_of, quartiles
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torchs
from torch.nn import functional
from words import format_bytes

from pycomm.pipeline import Pipeline, PipelineStage
from pycomm.pipeline.schedules import NAMES, Costs, build, simulate

#: Pipelines of torch with the same order of computation.
TORCH = {
    "gpipe": torchs.ScheduleGPipe,
    "1f1b": torchs.Schedule1F1B,
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "zb_h1": torchs.ScheduleInterleavedZeroBubble,
    "zbv": torchs.ScheduleZBVZeroBubble,
}
MULTIPLE = (torchs.ScheduleInterleaved1F1B, torchs.ScheduleInterleavedZeroBubble,
            torchs.ScheduleZBVZeroBubble)  # fmt: skip
#: Bytes of a message: rows of a microbatch x width, layers of a stage.
MODELS = {K: (rows, width, layers) for K, rows, width, layers in (
    (1 << 10, 4, 64, 1), (64 << 10, 64, 256, 2), (1 << 20, 256, 1024, 2))}  # fmt: skip
OURS, ON_GLOO, ON_PYCOMM = "pycomm", "torch on Gloo", "torch on pycomm"


def rest(seconds: float) -> None:
    """Exactly: sleeps may take half a millisecond more."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - 1e-3))
    while time.perf_counter() < end:
        pass


class Sleep(torch.autograd.Function):
    """The identity, which takes its time forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: float, back: float) -> Tensor:
        ctx.back = back
        rest(there)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rest(ctx.back)
        return gradient, None, None


class Sleeper(nn.Module):
    """F, I and W take so many seconds each."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Sleep.apply(x, self.seconds, self.seconds)
        weight: Tensor = Sleep.apply(self.weight, 0.0, self.seconds)
        return y + weight


def clock_of(name: str, unit: float, rank: int, ranks: int, microbatches: int, repeats: int) -> Any:
    """Steps of one schedule: seconds of each, by the slowest rank, and what the simulation says."""
    schedule = build(name, ranks, microbatches)
    seconds = unit / schedule.chunks
    stages = [
        PipelineStage(Sleeper(seconds), index, schedule.stages)
        for index in schedule.stages_of(rank)
    ]
    pipeline = Pipeline(schedule, stages, loss_fn=lambda y: y.mean())
    x = torch.ones(microbatches, 1)
    found = []
    for repeat in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        pipeline.step(x)
        took = slowest(time.perf_counter() - began)
        if repeat:
            found.append(took)
    each = [seconds] * schedule.stages
    others = each[1:]
    costs = Costs(each, [seconds, *others], [0.0, *others])
    return found, simulate(schedule, costs).makespan, len(schedule.compute(rank))


def slowest(seconds: float) -> float:
    """Of all ranks."""
    box = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return box.item()


def perceptron(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    )


def steps_of(
    name: str, size: int, rank: int, ranks: int, microbatches: int, gloo: Any
) -> dict[str, Callable[[], object]]:
    """By engine, one step of the same model, whose gradients are thrown away before it."""
    rows, width, layers = MODELS[size]
    schedule = build(name, ranks, microbatches)
    own = schedule.stages_of(rank)
    x = torch.randn(rows * microbatches, width)
    mse = functional.mse_loss
    parts = {index: perceptron(width, layers) for index in own}
    parameters = [p for part in parts.values() for p in part.parameters()]
    stages = [PipelineStage(parts[index], index, schedule.stages) for index in own]
    ours = Pipeline(schedule, stages, loss_fn=mse)
    device = torch.device("cpu")

    def torch_steps(group: Any) -> Callable[[], object]:
        theirs = [
            pipelining.PipelineStage(parts[index], index, schedule.stages, device, group=group)
            for index in own
        ]
        kind = TORCH[name]
        made: Any = kind(theirs if kind in MULTIPLE else theirs[0], microbatches, loss_fn=mse)
        arguments = (x,) if rank == schedule.placement[0] else ()
        target = {"target": x} if rank == schedule.placement[-1] else {}
        return lambda: made.step(*arguments, **target)

    def clean(step: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            for parameter in parameters:
                parameter.grad = None
            step()

        return run

    return {
        OURS: clean(lambda: ours.step(x, target=x)),
        ON_GLOO: clean(torch_steps(gloo)),
        ON_PYCOMM: clean(torch_steps(dist.group.WORLD)),
    }


def race(
    steps: dict[str, Callable[[], object]], calls: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of a step, of every repeat; all take turns."""
    chance, order = random.Random(1), list(steps)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        chance.shuffle(order)
        for name in order:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                steps[name]()
            took = slowest((time.perf_counter() - began) / calls)
            if repeat:
                found[name].append(took)
    return found


def run_rank(rank: int, path: str, arguments: argparse.Namespace, answers: Any) -> None:
    """One rank; rank 0 tells what all found."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    ranks = arguments.ranks
    dist.init_process_group(
        "pycomm", init_method=f"file://{path}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )  # fmt: skip
    gloo = dist.new_group(backend="gloo")

    def tell(row: dict[str, Any] | None) -> None:
        if rank == 0:
            answers.put(row)

    for name in [name for name in NAMES if name != "auto"] if "clock" in arguments.parts else []:
        found = clock_of(
            name, arguments.unit / 1e3, rank, ranks, arguments.microbatches, arguments.repeats
        )
        tell({"schedule": name, "seconds": found[0], "simulated": found[1], "actions": found[2]})
    for name in TORCH if "race" in arguments.parts else ():
        for size in MODELS:
            steps = steps_of(name, size, rank, ranks, arguments.microbatches, gloo)
            calls = max(1, (256 << 10) // size // 8) if size < 64 << 10 else 2
            times = race(steps, calls, arguments.repeats)
            tell({"schedule": name, "bytes": size, "times": times})
    dist.destroy_process_group()
    tell(None)


def words_of(values: list[float]) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:.2f} [{low:.2f}-{high:.2f}]"


def clock_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| schedule | simulated, ms | measured | ratio | more for each action, ms |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        ratios = [seconds / row["simulated"] for seconds in row["seconds"]]
        more = median(row["seconds"]) - row["simulated"]
        lines.append(
            f"| {row['schedule']} | {row['simulated'] * 1e3:.1f} | {median(row['seconds']) * 1e3:.1f} | "
            f"{words_of(ratios)} | {more / row['actions'] * 1e3:.2f} |"
        )
    return "\n".join(lines)


def ratios_of(row: dict[str, Any], other: str) -> list[float]:
    return [b / a for a, b in zip(row["times"][OURS], row["times"][other], strict=True)]


def race_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"| schedule | message | step, ms | {ON_GLOO} | {ON_PYCOMM} |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        took = median(row["times"][OURS]) * 1e3
        ratios = [words_of(ratios_of(row, other)) for other in (ON_GLOO, ON_PYCOMM)]
        size = format_bytes(row["bytes"])
        lines.append(f"| {row['schedule']} | {size} | {took:.2f} | {ratios[0]} | {ratios[1]} |")
    return "\n".join(lines)


def draw(clock: list[dict[str, Any]], raced: list[dict[str, Any]], path: Path) -> None:
    """Both tables, as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.6])
    names = [row["schedule"] for row in clock]
    ratios = [quartiles([s / row["simulated"] for s in row["seconds"]]) for row in clock]
    middle = [m for _, m, _ in ratios]
    spread = [[m - low for low, m, _ in ratios], [high - m for _, m, high in ratios]]
    left.barh(
        names[::-1], middle[::-1], xerr=[side[::-1] for side in spread], color="tab:blue", capsize=2
    )
    left.axvline(1.05, color="tab:red", lw=1, label="5 % more")
    left.set(xlabel="step / simulated makespan", xlim=(0.95, max(1.1, *middle) + 0.03))
    left.legend(frameon=False)
    labels = [f"{row['schedule']}\n{format_bytes(row['bytes'])}" for row in raced]
    for number, (other, color) in enumerate(((ON_GLOO, "tab:orange"), (ON_PYCOMM, "tab:green"))):
        found = [quartiles(ratios_of(row, other)) for row in raced]
        places = [index + 0.4 * number - 0.2 for index in range(len(raced))]
        error = [[m - low for low, m, _ in found], [high - m for _, m, high in found]]
        right.bar(
            places, [m for _, m, _ in found], 0.4, yerr=error, color=color, label=other, capsize=2
        )
    right.axhline(1, color="black", lw=0.8)
    right.set_xticks(range(len(raced)), labels, fontsize=7, rotation=60)
    right.set(ylabel="their step / pycomm's", yscale="log")
    right.legend(frameon=False)
    figure.savefig(path, dpi=130)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ranks", type=int, default=2, help="stages or pairs of them (2)")
    made.add_argument("--microbatches", type=int, default=8, help="of a step (8)")
    made.add_argument(
        "--unit", type=float, default=40.0, help="ms of a rank's F, of its I, of its W (40)"
    )
    made.add_argument("--repeats", type=int, default=7, help="at least 2 (7)")
    made.add_argument("--parts", default="clock,race", help="which of the two (clock,race)")
    made.add_argument("--json", type=Path, help="write what was measured")
    made.add_argument("--plot", type=Path, help="write a picture, as PNG")
    return made


def main() -> int:
    """Prints both tables."""
    made = parser()
    arguments = made.parse_args()
    if set(arguments.parts.split(",")) - {"clock", "race"}:
        made.error("--parts are clock, race, or both with a comma")
    if arguments.plot and arguments.parts != "clock,race":
        made.error("--plot draws both parts")
    if arguments.ranks < 2 or arguments.repeats < 2 or arguments.microbatches < 2 * arguments.ranks:
        made.error("at least 2 ranks, 2 repeats, and twice as many microbatches as ranks")
    began = read_clock(0)
    print(
        f"{cpu_model()}, torch {torch.__version__}, {arguments.ranks} ranks, {arguments.microbatches} microbatches, "
        f"{arguments.repeats} repeats\n",
        flush=True,
    )
    rows = list(answers_of(run_rank, arguments.ranks, arguments))
    clock = [row for row in rows if "simulated" in row]
    raced = [row for row in rows if "times" in row]
    if clock:
        print(clock_table(clock), end="\n\n")
    if raced:
        print(race_table(raced), end="\n\n")
    print(f"others used {others_share(began, read_clock(0)) * 100:.0f} % of the machine or more")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))
    if arguments.plot:
        draw(clock, raced, arguments.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
