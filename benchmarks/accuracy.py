"""What compression does to training: the final loss with each compressor, against that of the same seed without.

    python benchmarks/accuracy.py
    python benchmarks/accuracy.py --tasks gpt --compressors fp16,int8 --seeds 5 --plot docs/accuracy.png

Two ranks, one thread each. digits: model and data of examples/train_digits.py, by SGD with momentum; the loss on the
test set. gpt: a small decoder that learns the text of Python's own help (pydoc_data.topics) letter by letter, by AdamW;
the loss on the part of the text that it has not seen.

Training is chaotic: weights that start one part in 1e6 off end in another loss. The digits are trained from several
such starts for every seed, and their mean counts. The row of that name has no compression and other such starts; from
it and the first row comes the noise, two standard errors of a difference. Differences are to the loss without
compression of the same seed, in %.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import queue
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean, variance
from typing import Any

import torch
import torch.distributed as dist
from ddp import Gpt
from machine import cpu_model
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import pycomm
from pycomm.compression import BF16, FP8, FP16, FP8Wide, Int8, PowerSGD, TopK

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_digits

RANKS = 2
PLAIN, NUDGED = "none", "none, weights 1e-6 off"

#: What pycomm.DistributedDataParallel gets as `compression`, a new one for every run.
COMPRESSORS: dict[str, Callable[[], Any]] = {
    PLAIN: lambda: None,
    NUDGED: lambda: None,
    "fp16": FP16,
    "bf16": BF16,
    "fp8": FP8,
    "fp8_e5m2": FP8Wide,
    "int8": Int8,
    "fp8, no feedback": lambda: FP8(error_feedback=False),
    "int8, no feedback": lambda: Int8(error_feedback=False),
    "low rank": PowerSGD,
    "top-k 1 %": lambda: TopK(0.01),
    "top-k 1 %, no feedback": lambda: TopK(0.01, error_feedback=False),
}
#: The most that these may change the loss, in %; or the noise, if that is more.
BARS = {"fp16": 0.1, "bf16": 0.1, "fp8": 1.0, "fp8_e5m2": 1.0, "int8": 1.0}

PLAIN_LINE = {"color": "0.7", "lw": 5}  # below the others

Loss = Callable[[nn.Module, Any], torch.Tensor]


# ---- tasks ----------------------------------------------------------------------------------------------------------


@dataclass
class Task:
    """What one rank trains; the same weights on all of them, batches of its own."""

    module: nn.Module
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    steps: int
    batches: Iterator[Any]
    loss: Loss
    tested: Callable[[nn.Module], tuple[float, int]]  # sum of this rank's losses, and of how many


def digits(seed: int, quick: bool) -> Task:
    """The CNN of the example: 91 thousand parameters, 64 samples a step."""
    train_set, test_set = train_digits.load_data(seed)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=seed)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    epochs = 2 if quick else 20

    def batches() -> Iterator[list[torch.Tensor]]:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            yield from loader

    def tested(module: nn.Module) -> tuple[float, int]:
        total, _, count = train_digits.evaluate(module, test_set).tolist()
        return total, int(count)

    return Task(
        train_digits.make_model(),
        lambda module: torch.optim.SGD(module.parameters(), 0.02, momentum=0.9, foreach=True),
        epochs * len(loader),
        batches(),
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        tested,
    )


@cache
def letters() -> tuple[torch.Tensor, int]:
    """Python's help as numbers, and how many different ones there are."""
    text = "".join(topics[name] for name in sorted(topics))
    known = {letter: number for number, letter in enumerate(sorted(set(text)))}
    return torch.tensor([known[letter] for letter in text]), len(known)


class Places(nn.Module):
    """Embeds letters and where they stand."""

    def __init__(self, words: int, positions: int, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(positions, width)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """[batch, positions] to [batch, positions, width]."""
        return self.words(words) + self.positions.weight[: words.shape[1]]


def gpt(seed: int, quick: bool) -> Task:
    """Two layers of width 128, 0.43 M parameters; 32 windows of 64 letters a step, nine tenths of the text."""
    (text, words), positions = letters(), 64
    seen, steps = len(text) * 9 // 10, 12 if quick else 300
    chance = random.Random(f"{seed} {dist.get_rank()}")

    def windows(starts: list[int]) -> torch.Tensor:
        return torch.stack([text[start : start + positions + 1] for start in starts])

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(steps):
            yield windows([chance.randrange(seen - positions) for _ in range(16)])

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])

    def tested(module: nn.Module) -> tuple[float, int]:
        starts = list(range(seen, len(text) - positions, 6 * positions))[dist.get_rank() :: RANKS]
        return loss(module, windows(starts)).item() * len(starts), len(starts)

    module = Gpt(width=128, layers=2, words=words)
    module.embedding = Places(words, positions, 128)  # type: ignore[assignment]
    return Task(
        module,
        lambda module: torch.optim.AdamW(module.parameters(), 1e-2, foreach=True),
        steps,
        batches(),
        loss,
        tested,
    )


@dataclass(frozen=True)
class Plan:
    """A task and from how many starts it is trained for every seed."""

    make: Callable[[int, bool], Task]
    starts: int


TASKS = {"digits": Plan(digits, 4), "gpt": Plan(gpt, 1)}


# ---- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training, as rank 0 tells it."""

    task: str
    compressor: str
    seed: int
    start: int
    loss: float  # in the end, on what was not trained
    curve: list[float]  # mean losses of 20 parts of the training, one after the other
    seconds: float


def nudge(module: nn.Module, seed: int) -> None:
    """Moves the weights by one part in 1e6."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 1e-6 * torch.randn(parameter.shape, generator=chance))


def train(which: Run, quick: bool) -> Run:
    """Fills in what the training gave; on all ranks."""
    began = time.perf_counter()
    torch.manual_seed(which.seed)
    task = TASKS[which.task].make(which.seed, quick)
    if start := which.start + 100 * (which.compressor == NUDGED):
        nudge(task.module, start)
    model = pycomm.DistributedDataParallel(task.module, compression=COMPRESSORS[which.compressor]())
    optimizer = task.optimizer(task.module)
    peak = optimizer.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=task.steps)
    losses = torch.zeros(task.steps)
    for step, batch in enumerate(task.batches):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
    with torch.no_grad():
        ending = torch.tensor(task.tested(task.module), dtype=torch.float64)
    dist.all_reduce(losses)
    dist.all_reduce(ending)
    parts = (losses / RANKS).tensor_split(min(20, task.steps))
    curve = [float(part.mean()) for part in parts]
    seconds = time.perf_counter() - began
    return replace(which, loss=float(ending[0] / ending[1]), curve=curve, seconds=seconds)


def run_rank(rank: int, path: str, arguments: argparse.Namespace, answers: Any) -> None:
    """One rank: all runs, by seed."""
    torch.set_num_threads(1)
    dist.init_process_group("pycomm", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    for task in arguments.tasks:
        for seed in range(arguments.seeds):
            for start in range(1 if arguments.quick else TASKS[task].starts):
                for compressor in arguments.compressors:
                    run = Run(task, compressor, seed, start, math.nan, [], 0.0)
                    run = train(run, arguments.quick)
                    if rank == 0:
                        answers.put(run)
    if rank == 0:
        answers.put(None)
    dist.destroy_process_group()


def collect(arguments: argparse.Namespace) -> list[Run]:
    """Starts the ranks and waits for them."""
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        ranks = [
            context.Process(target=run_rank, args=(rank, path, arguments, answers))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        while True:
            try:
                answer = answers.get(timeout=5)
            except queue.Empty:
                if any(process.exitcode for process in ranks):
                    raise SystemExit("a rank failed; what it said stands above") from None
                continue
            if answer is None:
                break
            runs.append(answer)
        for process in ranks:
            process.join()
    return runs


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Of one task and compressor."""

    loss: float  # mean over seeds and starts
    low: float  # of the seeds' means
    high: float
    differences: list[float]  # to the uncompressed, by seed, in %
    curve: list[float]

    @property
    def difference(self) -> float:
        return mean(self.differences)


def results_of(runs: list[Run]) -> dict[str, Result]:
    """Those of one task, by compressor."""
    seeds = sorted({run.seed for run in runs})
    found = {}
    for compressor in dict.fromkeys(run.compressor for run in runs):
        mine = [run for run in runs if run.compressor == compressor]
        means = [mean(run.loss for run in mine if run.seed == seed) for seed in seeds]
        plain = [
            mean(run.loss for run in runs if run.compressor == PLAIN and run.seed == seed)
            for seed in seeds
        ]
        found[compressor] = Result(
            mean(means),
            min(means),
            max(means),
            [(a / b - 1) * 100 for a, b in zip(means, plain, strict=True)],
            [mean(points) for points in zip(*(run.curve for run in mine), strict=True)],
        )
    return found


def noise_of(runs: list[Run]) -> float:
    """Two standard errors of a difference of means, in %, by the runs without compression of one seed."""
    plain = [run for run in runs if run.compressor in (PLAIN, NUDGED)]
    variances, count = [], sum(run.compressor == PLAIN for run in runs)
    for seed in {run.seed for run in plain}:
        losses = [run.loss for run in plain if run.seed == seed]
        variances.append(variance(losses) / mean(losses) ** 2)
    return 200 * math.sqrt(mean(variances) * 2 / count)


def markdown(task: str, results: dict[str, Result], noise: float) -> str:
    """The table of one task."""
    lines = [
        f"| {task} | final loss | of the seeds | difference, % | of the seeds, % |",
        "|---|---:|---:|---:|---:|",
    ]
    for compressor, result in results.items():
        cells = [f"{result.loss:.4f}", f"{result.low:.4f} to {result.high:.4f}"]
        if compressor == PLAIN:
            cells += ["0", ""]
        else:
            low, high = min(result.differences), max(result.differences)
            cells += [f"{result.difference:+.2f}", f"{low:+.2f} to {high:+.2f}"]
        lines.append(f"| {compressor} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Noise of a difference: {noise:.2g} %."])


def verdicts(task: str, results: dict[str, Result], noise: float) -> list[str]:
    """A line for each bar."""
    lines = []
    for compressor, most in BARS.items():
        if compressor in results:
            difference, allowed = results[compressor].difference, max(most, noise)
            holds = "holds" if abs(difference) <= allowed else "DOES NOT HOLD"
            lines.append(
                f"{task}, {compressor}: {difference:+.2f} %, at most {allowed:.2g} %: {holds}"
            )
    return lines


def plot(found: dict[str, tuple[dict[str, Result], float]], path: Path) -> None:
    """A row per task: losses over the training, and differences with their noise."""
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(
        len(found),
        2,
        figsize=(11, 3.6 * len(found)),
        squeeze=False,
        layout="constrained",
        width_ratios=(1, 1.6),
    )
    for (left, right), (task, (results, noise)) in zip(rows, found.items(), strict=True):
        names = [name for name in results if name != PLAIN]
        palette = plt.rcParams["axes.prop_cycle"].by_key()["color"] * 2
        colors = dict(zip(names, palette, strict=False))
        far = [name for name in names if abs(results[name].difference) > 5]
        for name, result in results.items():
            done = [(part + 1) * 100 / len(result.curve) for part in range(len(result.curve))]
            style: Any = {"color": colors[name], "lw": 1.2} if name != PLAIN else PLAIN_LINE
            left.plot(done, result.curve, label=name if name in [PLAIN, *far] else None, **style)
        left.set(title=f"{task}: training loss, all of them", xlabel="steps done, %")
        left.legend(frameon=False, fontsize=8)
        right.axvspan(-noise, noise, color="0.85", label="noise")
        right.axvline(-1, color="k", lw=0.8, ls="--", label="1 %")
        right.axvline(1, color="k", lw=0.8, ls="--")
        for row, name in enumerate(names):
            each = results[name].differences
            right.plot(each, [row] * len(each), "o", ms=4, color=colors[name], alpha=0.4)
            right.plot(mean(each), row, "d", ms=9, color=colors[name])
        right.set_yticks(range(len(names)), names)
        right.invert_yaxis()
        right.axvline(0, color="k", lw=0.8)
        right.set(title=f"{task}: final test loss, of each seed and the mean")
        right.set(xlabel="difference to no compression, %")
        if far:
            right.set_xscale("symlog", linthresh=1)
        right.legend(frameon=False, fontsize=8, loc="upper right" if far else "lower right")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(TASKS))
    names = "names after a comma without a space; the two uncompressed come by themselves"
    parser.add_argument("--compressors", help=names)
    parser.add_argument("--seeds", type=int, default=3, help="0 to this, without it (3)")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, one seed")
    parser.add_argument("--plot", type=Path, help="write a picture")
    parser.add_argument("--json", type=Path, help="write every run")
    arguments = parser.parse_args()
    chosen = list(COMPRESSORS)
    if arguments.compressors:
        words = arguments.compressors.replace(", ", ";").split(",")
        chosen = [PLAIN, NUDGED, *(word.replace(";", ", ") for word in words)]
    arguments.compressors = list(dict.fromkeys(chosen))
    for kind, known in (("tasks", list(TASKS)), ("compressors", list(COMPRESSORS))):
        if unknown := set(getattr(arguments, kind)) - set(known):
            parser.error(f"unknown {kind} {', '.join(unknown)}; known are: {'; '.join(known)}")
    if arguments.seeds < 1:
        parser.error("at least 1 seed")
    if arguments.quick:
        arguments.seeds = 1
    return arguments


def main() -> int:
    """Prints a table per task, and whether the bars hold."""
    arguments = parse_arguments()
    began = time.perf_counter()
    runs = collect(arguments)
    found = {}
    for task in arguments.tasks:
        of_task = [run for run in runs if run.task == task]
        found[task] = results_of(of_task), noise_of(of_task)
    print(
        f"{RANKS} ranks, {cpu_model()}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {arguments.seeds} seeds, {time.perf_counter() - began:.0f} s\n"
    )
    for task, (results, noise) in found.items():
        print(markdown(task, results, noise) + "\n")
    for task, (results, noise) in found.items():
        print("\n".join(verdicts(task, results, noise)))
    if arguments.plot:
        plot(found, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(run) for run in runs]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
