"""Train a small CNN on real handwritten digits, data parallel, on the CPUs or the GPUs of this machine.

    python examples/train_digits.py                            # 2 ranks, pycomm
    python examples/train_digits.py --backend gloo             # the same with torch's DDP on Gloo
    python examples/train_digits.py --ranks 4 --epochs 30 --out runs/four
    python examples/train_digits.py --device cuda              # a GPU for each rank
    torchrun --nproc-per-node 2 examples/train_digits.py       # torchrun has started the ranks

What it shows: a training script changes two lines to use pycomm, side by side in `setup_backend`
below, and the result is checked. At the end all ranks must hold bit-identical parameters and the
test accuracy must reach `--min-accuracy`; if not, the script says so and exits with 1.

The data are the 1797 scans of 8x8 pixels that scikit-learn brings along: nothing is downloaded.
Four fifths train and one fifth tests, each with the same mix of digits; every rank trains on its
own shard and tests on its own. `--out` receives `curves.png` and `metrics.json`, in which

samples_per_second   is the training samples of all ranks per second of training steps alone,
seconds              is the wall time of all epochs with their tests, without starting and ending,
train_*              are means over an epoch, each sample judged just before it is learned from,
communication_share  is the part of a step that synchronising the gradients adds, on rank 0:

                         max(0, 1 - median(steps without it) / median(steps with it))

                     measured after training on a copy of the model, in pairs of a step with and a
                     step without (`no_sync`), in alternating order, each after a barrier.
                     It holds the copies into and out of DDP's buckets and the wait for slower
                     ranks; it does not hold what overlaps with computing.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from starting import count, ranks_that_differ, start_ranks, threads_per_rank
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPILOG = """\
exit codes:
  0  trained; all ranks hold identical parameters and the accuracy is reached
  1  a check at the end failed, or a rank did
  2  wrong arguments

examples:
  %(prog)s                                 2 ranks, pycomm
  %(prog)s --backend gloo --out runs/gloo  the same with torch's DDP on Gloo
  %(prog)s --ranks 4 --batch-size 16       64 samples per step in all
  %(prog)s --device cuda                   one GPU for each rank
"""


# Where pycomm comes in


def setup_backend(backend: str, device: torch.device) -> type[DistributedDataParallel]:
    """Join the process group; return the class that wraps a model. All else is the same."""
    if backend == "pycomm":
        import pycomm

        dist.init_process_group("pycomm")
        return pycomm.DistributedDataParallel

    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    return DistributedDataParallel


# Data and model


def load_data(seed: int, device: torch.device | str = "cpu") -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set, the same on every rank, in the device's memory."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # pixels are 0..16
    images, labels = images.to(device), torch.tensor(digits.target).to(device)
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=digits.target, random_state=seed
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    """Build the CNN: 1x8x8 pixels in, 10 logits out."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 2 * 2, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


# Training and testing


@dataclass(frozen=True)
class Epoch:
    """Means over one epoch and all ranks."""

    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float


def tally(logits: Tensor, labels: Tensor, loss: Tensor) -> Tensor:
    """Return [sum of losses, correct answers, samples] of one batch: tallies can be added up."""
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.tensor([loss.item() * len(labels), correct.item(), len(labels)])


def train_step(model: nn.Module, optimizer: Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """Learn from one batch; return its tally."""
    optimizer.zero_grad()
    logits = model(images)
    loss = functional.cross_entropy(logits, labels)
    loss.backward()  # DDP averages the gradients over the ranks in here
    optimizer.step()
    return tally(logits, labels, loss)


@torch.inference_mode()
def evaluate(module: nn.Module, test_set: TensorDataset) -> Tensor:
    """Return the tally of this rank's shard of the test set: every Nth sample for N ranks."""
    images, labels = (t[dist.get_rank() :: dist.get_world_size()] for t in test_set.tensors)
    logits = module(images)
    return tally(logits, labels, functional.cross_entropy(logits, labels))


def fit(
    model: DistributedDataParallel,
    train_set: TensorDataset,
    test_set: TensorDataset,
    args: argparse.Namespace,
) -> tuple[list[Epoch], float]:
    """Train for `args.epochs`; return the history and the samples per second of all ranks."""
    sampler: DistributedSampler[tuple[Tensor, ...]]
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    optimizer = AdamW(model.parameters(), lr=args.lr)
    schedule = OneCycleLR(optimizer, args.lr, epochs=args.epochs, steps_per_epoch=len(loader))
    history: list[Epoch] = []
    samples, seconds = 0.0, 0.0

    with Reporter(args.epochs, len(loader)) as reporter:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # shuffles anew
            train_tally = torch.zeros(3)
            start = time.perf_counter()
            for images, labels in loader:
                train_tally += train_step(model, optimizer, images, labels)
                schedule.step()
                reporter.show_step(train_tally)
            seconds += time.perf_counter() - start

            tallies = torch.stack([train_tally, evaluate(model.module, test_set)])
            dist.all_reduce(tallies)  # the sum over all ranks: each test sample counts once
            samples += tallies[0, 2].item()
            means = tallies[:, :2] / tallies[:, 2:]
            history.append(Epoch(*means.flatten().tolist()))
            reporter.show_epoch(history)
    return history, samples / seconds


# What is checked and measured after the training


def communication_share(
    model: DistributedDataParallel,
    batch: tuple[Tensor, Tensor],
    pairs: int = 50,
    warm_up: int = 10,
) -> float:
    """Return the part of a step's time that synchronising adds, as defined at the top of this file.

    The steps without synchronisation drive the ranks apart: pass a copy of the model.
    """
    optimizer = AdamW(model.parameters(), lr=1e-4)

    def timed_step(synchronise: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        with nullcontext() if synchronise else model.no_sync():
            train_step(model, optimizer, *batch)
        return time.perf_counter() - start

    times: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(warm_up + pairs):
        for synchronise in (True, False) if pair % 2 else (False, True):
            seconds = timed_step(synchronise)
            if pair >= warm_up:
                times[synchronise].append(seconds)
    return max(0.0, 1 - median(times[False]) / median(times[True]))


# What people see: only rank 0 speaks and writes


class Reporter:
    """Progress of the training: bars in a terminal, elsewhere one line per epoch."""

    def __init__(self, epochs: int, steps: int) -> None:
        in_terminal = sys.stdout.isatty()
        self.prints_lines = dist.get_rank() == 0 and not in_terminal
        self.bars = Progress(
            TextColumn("{task.description:>6}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            disable=not (dist.get_rank() == 0 and in_terminal),
        )
        self.epochs = self.bars.add_task("epochs", total=epochs, numbers="")
        self.steps = self.bars.add_task("steps", total=steps, numbers="")

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def show_step(self, so_far: Tensor) -> None:
        """Move the bar of steps; `so_far` is this rank's tally of the epoch."""
        loss, correct, samples = so_far.tolist()
        numbers = f"loss {loss / samples:.4f}  accuracy {correct / samples:7.2%}"
        self.bars.update(self.steps, advance=1, numbers=numbers)

    def show_epoch(self, history: list[Epoch]) -> None:
        """Move the bar of epochs, or print a line, with the latest epoch's numbers."""
        now = history[-1]
        numbers = (
            f"loss {now.train_loss:.4f}  accuracy {now.train_accuracy:7.2%}"
            f"  test accuracy {now.test_accuracy:7.2%}"
        )
        self.bars.update(self.epochs, advance=1, numbers=numbers)
        if self.prints_lines:
            print(f"epoch {len(history):3}  {numbers}", flush=True)
        if not self.bars.finished:
            self.bars.reset(self.steps, numbers="")


def print_table(metrics: dict[str, Any]) -> None:
    """Print what matters of the metrics."""
    table = Table(title=f"digits, {describe_run(metrics)}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("test accuracy", f"{metrics['test_accuracy']:.2%}")
    table.add_row("ranks bit-identical", "yes" if metrics["ranks_identical"] else "NO")
    table.add_row("training samples/s", f"{metrics['samples_per_second']:,.0f}")
    table.add_row("communication share of a step", f"{metrics['communication_share']:.1%}")
    table.add_row("training time", f"{metrics['seconds']:.1f} s")
    Console().print(table)


def draw_curves(metrics: dict[str, Any], path: Path) -> None:
    """Draw loss and accuracy over the epochs."""
    from matplotlib.figure import Figure  # here, since it takes a second that the other ranks save
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"Handwritten digits, {describe_run(metrics)}")
    epochs = range(1, metrics["epochs"] + 1)
    for axes, measure in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for data in ("train", "test"):
            values = [epoch[f"{data}_{measure}"] for epoch in metrics["history"]]
            axes.plot(epochs, values, label=data, marker="o", markersize=3)
        axes.set(title=measure.capitalize(), xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.axes[0].set(ylabel="cross-entropy", ylim=(0, None))
    figure.axes[1].set(ylabel="correct answers")
    figure.axes[1].yaxis.set_major_formatter(PercentFormatter(xmax=1))
    figure.savefig(path, dpi=150)


def describe_run(metrics: dict[str, Any]) -> str:
    """Name ranks and backend for a title."""
    ranks = metrics["ranks"]
    device = "" if metrics["device"] == "cpu" else f", {metrics['device']}"
    return f"{ranks} rank{'s' if ranks > 1 else ''}, backend {metrics['backend']}{device}"


def report(metrics: dict[str, Any], out: Path) -> None:
    """Print the table; write `curves.png` and `metrics.json`."""
    print_table(metrics)
    out.mkdir(parents=True, exist_ok=True)
    draw_curves(metrics, out / "curves.png")
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(f"wrote {out}/curves.png and {out}/metrics.json")


# One rank, and the start of all of them


def run_rank(args: argparse.Namespace) -> int:
    """Be one rank: train, check, measure and, on rank 0, report. Return the exit code."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks))
    torch.set_num_threads(threads_per_rank(ranks_here))
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    device = device_of_rank(args.device)
    train_set, test_set = load_data(args.seed, device)

    ddp_class = setup_backend(args.backend, device)
    model = ddp_class(make_model().to(device))
    start = time.perf_counter()
    history, samples_per_second = fit(model, train_set, test_set, args)
    seconds = time.perf_counter() - start
    different = ranks_that_differ(model.module.parameters())
    share = communication_share(
        ddp_class(copy.deepcopy(model.module)), train_set[: args.batch_size]
    )

    metrics = {
        "test_accuracy": history[-1].test_accuracy,
        "ranks_identical": not different,
        "samples_per_second": samples_per_second,
        "communication_share": share,
        "ranks": dist.get_world_size(),
        "backend": args.backend,
        "device": args.device,
        "epochs": args.epochs,
        "batch_size_per_rank": args.batch_size,
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "seconds": seconds,
        "torch": torch.__version__,
        "history": [asdict(epoch) for epoch in history],
    }
    failures = find_failures(different, history[-1].test_accuracy, args.min_accuracy)
    if dist.get_rank() == 0:
        report(metrics, args.out)
        for failure in failures:
            print(f"FAILED: {failure}", file=sys.stderr, flush=True)
    dist.barrier()  # torchrun ends all ranks when one fails: let rank 0 report first
    dist.destroy_process_group()
    return 1 if failures else 0


def device_of_rank(kind: str) -> torch.device:
    """This rank's, which becomes the current one."""
    if kind == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def find_failures(different: list[int], accuracy: float, min_accuracy: float) -> list[str]:
    """Say in words what is wrong with the result, if anything."""
    failures = []
    if different:
        failures.append(f"the parameters of ranks {different} are not those of rank 0")
    if accuracy < min_accuracy:
        failures.append(f"test accuracy {accuracy:.2%} is below --min-accuracy {min_accuracy:.2%}")
    return failures


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small CNN on handwritten digits, data parallel, on CPUs or GPUs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=count, default=2, help="processes (2); under torchrun, its number counts")
    add("--backend", choices=["pycomm", "gloo"], default="pycomm", help="(pycomm)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="(cpu); gloo goes with nccl there")
    add("--epochs", type=count, default=20, help="passes over the training set (20)")
    add("--batch-size", type=count, default=32, help="samples per rank and step (32)")
    add("--lr", type=float, default=4e-3, help="peak learning rate of AdamW (0.004)")
    add("--seed", type=int, default=0, help="of the split, the shuffling and the weights (0)")
    add("--min-accuracy", type=float, default=0.96, help="fraction of the test set (0.96)")
    add("--out", type=Path, default=Path("runs/digits"), help="folder to write to (runs/digits)")
    args = parser.parse_args()
    if args.backend == "pycomm" and find_spec("pycomm") is None:
        parser.error("pycomm is not installed here: install it, or take --backend gloo")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; take --device cpu")
    return args


def main() -> int:
    """Start the ranks, or be one of them if torchrun started this process."""
    args = parse_arguments()
    return run_rank(args) if "RANK" in os.environ else start_ranks(__file__, args.ranks)


if __name__ == "__main__":
    sys.exit(main())
