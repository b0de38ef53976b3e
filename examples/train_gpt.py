"""Train a small GPT on the text of Python's own help, its layers split over ranks, on the CPUs of this machine.

    python examples/train_gpt.py                           # --tp 2: each rank has half of every layer
    python examples/train_gpt.py --tp 1 --out runs/gpt-1   # the whole model on one rank
    python examples/train_gpt.py --tp 2 --compare runs/gpt-1   # ... and both step by step
    python examples/train_gpt.py --dp 2 --tp 2 --sequence-parallel --compare runs/gpt-1
    python examples/train_gpt.py --pp 2 --tp 1 --schedule zb_h1 --compare runs/gpt-1   # each has half of them
    torchrun --nproc-per-node 2 examples/train_gpt.py      # torchrun has started the ranks

What it shows: the layers of `pycomm.tensor_parallel` in a model, which are ordinary layers where there is one rank,
and what else training with them needs: groups from a device mesh, the loss of logits that stay split, a clipped norm
of the whole model's gradients, data parallelism across, and `pycomm.pipeline` where ranks have some of the layers. The
result does not depend on how it is split: the same seed gives the same weights, every step the same samples, and
`--compare` holds the losses against another run's, to `--tolerance`. At the end parameters that several ranks hold must
be bit-identical on all of them.

The text is that of `pydoc_data.topics`, which every Python brings along (its length differs between versions), letter
by letter; the last tenth is for testing. `--out` receives `loss.png` and `metrics.json`, in which

losses             is the mean cross-entropy of every step's batch, in nats per letter, before it is learned from,
test_loss          is that of the text that was not trained on, at the end,
letters_per_second is the letters trained on per second of steps, by all ranks together,
seconds            is the wall time of all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from starting import count, ranks_that_differ, start_ranks, threads_per_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

import pycomm
from pycomm import tensor_parallel as tp
from pycomm.optim import clip_grad_norm_
from pycomm.pipeline import Pipeline, PipelineStage, split
from pycomm.pipeline.schedules import NAMES, build

EPILOG = """\
exit codes:
  0  trained; all ranks agree and, with --compare, both runs' losses do
  1  a check at the end failed, or a rank did
  2  wrong arguments

examples:
  %(prog)s --tp 1 --out runs/gpt-1                      one rank
  %(prog)s --compare runs/gpt-1                         two ranks share every layer: the same losses
  %(prog)s --sequence-parallel --compare runs/gpt-1     the norms' activations are split, too
  %(prog)s --dp 2 --tp 2 --compare runs/gpt-1           two such pairs, each with half of a batch
  %(prog)s --pp 4 --tp 1 --compare runs/gpt-1           four ranks, each with some of the layers
  %(prog)s --pp 2 --tp 2 --compare runs/gpt-1           two stages, whose layers two ranks share each
"""


# The model: pycomm's layers in place of torch's


@dataclass(frozen=True)
class Split:
    """How layers are split: over which ranks, and whether the sequence is, too, between them."""

    group: DeviceMesh
    sequence_parallel: bool
    overlap_chunks: int

    def column(self, inputs: int, outputs: int, **options: Any) -> tp.ColumnParallelLinear:
        """A layer of whose outputs each rank computes some, which stay there."""
        options |= {"sequence_parallel": self.sequence_parallel}
        options |= {"overlap_chunks": self.overlap_chunks, "group": self.group}
        return tp.ColumnParallelLinear(inputs, outputs, gather_output=False, **options)

    def row(self, inputs: int, outputs: int, **options: Any) -> tp.RowParallelLinear:
        """A layer of whose inputs each rank has some: those that `column` left there."""
        options |= {"sequence_parallel": self.sequence_parallel}
        options |= {"overlap_chunks": self.overlap_chunks, "group": self.group}
        return tp.RowParallelLinear(inputs, outputs, input_is_parallel=True, **options)

    def norm(self, width: int) -> nn.Module:
        """A norm of the whole sequence, or of this rank's part."""
        if self.sequence_parallel:
            return tp.LayerNorm(width, group=self.group)
        return nn.LayerNorm(width)


class Embedding(nn.Module):
    """Letters and where they stand: [batch, positions] to [batch, positions, width]."""

    def __init__(self, letters: int, positions: int, width: int, split: Split) -> None:
        super().__init__()
        self.split = split
        self.letters = tp.VocabParallelEmbedding(
            letters, width, group=split.group, sequence_parallel=split.sequence_parallel
        )
        self.positions = nn.Embedding(positions, width)

    def forward(self, letters: Tensor) -> Tensor:
        """Of this rank's part of the sequence, if it is split."""
        places = self.positions.weight[: letters.shape[1]]
        if self.split.sequence_parallel:
            places = tp.scatter(places, self.split.group, dim=0)
        embedded: Tensor = self.letters(letters) + places
        return embedded


class Attention(nn.Module):
    """Each rank has some heads."""

    def __init__(self, width: int, heads: int, split: Split) -> None:
        super().__init__()
        self.head = width // heads
        self.qkv = split.column(width, 3 * width, parts=[width] * 3, unit=self.head)
        self.out = split.row(width, width, unit=self.head)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, positions, width] to the same."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, own heads, positions, head]
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and around a shortcut."""

    def __init__(self, width: int, heads: int, split: Split) -> None:
        super().__init__()
        self.norm1, self.norm2 = split.norm(width), split.norm(width)
        self.attention = Attention(width, heads, split)
        self.up, self.down = split.column(width, 4 * width), split.row(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, positions, width] to the same."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


def make_model(args: argparse.Namespace, letters: int, split: Split) -> nn.Sequential:
    """Build the GPT, a list of layers: letters in, this rank's part of the logits out."""
    return nn.Sequential(
        Embedding(letters, args.positions, args.width, split),
        *(Block(args.width, args.heads, split) for _ in range(args.layers)),
        split.norm(args.width),
        split.column(args.width, letters),
    )


# Data: the same for every number of ranks


class Text:
    """Python's help, letter by letter."""

    def __init__(self, args: argparse.Namespace) -> None:
        text = "".join(topics[name] for name in sorted(topics))
        known = {letter: number for number, letter in enumerate(sorted(set(text)))}
        self.letters = len(known)
        self.text = torch.tensor([known[letter] for letter in text])
        self.seen = len(text) * 9 // 10
        self.positions, self.batch_size, self.seed = args.positions, args.batch_size, args.seed

    def windows(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The letters from there on, and those that follow each."""
        places = starts.unsqueeze(1) + torch.arange(self.positions + 1)
        return self.text[places[:, :-1]], self.text[places[:, 1:]]

    def batch(self, step: int, replica: int, replicas: int) -> tuple[Tensor, Tensor]:
        """A data parallel rank's share of a step's windows."""
        chance = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(self.seen - self.positions, (self.batch_size,), generator=chance)
        return self.windows(starts[replica::replicas])

    def tests(self, replica: int, replicas: int) -> list[tuple[Tensor, Tensor]]:
        """A data parallel rank's share of batches of the last tenth."""
        starts = torch.arange(self.seen, len(self.text) - self.positions, 8 * self.positions)
        own = starts[replica::replicas]
        batches = -(-len(own) // self.batch_size)  # of about the same size
        return [self.windows(some) for some in own.tensor_split(batches)]


# Training


class Training:
    """One rank's part of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.text = args, Text(args)
        mesh = pycomm.init_mesh(dp=args.dp, pp=args.pp, tp=args.tp)
        self.data, self.stages, self.tensor = mesh["dp"], mesh["pp"], mesh["tp"]
        how = Split(self.tensor, args.sequence_parallel, args.overlap_chunks)
        torch.manual_seed(
            args.seed
        )  # the same on all ranks, which take their parts of the same weights
        whole = make_model(args, self.text.letters, how)
        self.pipeline: Pipeline | None = None
        self.module: nn.Module = whole
        self.model: nn.Module = whole
        if args.pp > 1:
            self.pipeline = self.make_pipeline(whole)
            self.module = nn.ModuleList(s.module for s in self.pipeline.stages.values())
        elif args.dp > 1:
            group = self.data.get_group()
            self.model = pycomm.DistributedDataParallel(self.module, process_group=group)
        self.optimizer = AdamW(self.module.parameters(), args.lr, betas=(0.9, 0.95), eps=1e-6)
        self.schedule = OneCycleLR(self.optimizer, args.lr, total_steps=args.steps)

    def make_pipeline(self, whole: nn.Sequential) -> Pipeline:
        """This rank's stages; the other layers are forgotten."""
        schedule = build(self.args.schedule, self.args.pp, self.args.microbatches)
        parts = split(whole, schedule.stages)
        own = schedule.stages_of(self.stages.get_local_rank())
        stages = [PipelineStage(parts[i], i, len(parts), self.stages) for i in own]
        return Pipeline(schedule, stages, loss_fn=self.loss, data_group=self.data)

    @cached_property
    def share(self) -> tuple[int, int]:
        """Which data parallel replica this is, and of how many."""
        return self.data.get_local_rank(), self.data.size()

    def loss(self, logits: Tensor, following: Tensor) -> Tensor:
        """Mean cross-entropy; no rank ever has all logits."""
        return tp.vocab_parallel_cross_entropy(logits, following, group=self.tensor)

    def learn(self, letters: Tensor, following: Tensor) -> Tensor:
        """Return a batch's mean loss, with gradients that are averaged over the replicas."""
        if self.pipeline:
            loss = self.pipeline.step(letters, target=following, everywhere=True)
            assert loss is not None
            return loss
        loss = self.loss(self.model(letters), following)
        loss.backward()  # DDP averages in here
        return loss.detach().clone()

    def step(self, step: int) -> float:
        """Learn from a batch; return its mean loss, over all replicas."""
        self.optimizer.zero_grad()
        mean = self.learn(*self.text.batch(step, *self.share))
        clip_grad_norm_(
            self.module.parameters(),
            self.args.clip,
            data_group=self.data,
            pipeline_group=self.stages,
        )
        self.optimizer.step()
        self.schedule.step()
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=self.data.get_group())
        return mean.item()

    @torch.no_grad()
    def test(self) -> float:
        """Return the mean loss of the text that was not trained on."""
        total = torch.zeros(2)
        for letters, following in self.text.tests(*self.share):
            if self.pipeline:
                loss = self.pipeline.evaluate(letters, target=following, everywhere=True).loss
                assert loss is not None
            else:
                loss = self.loss(self.module(letters), following)
            total += torch.tensor([loss.item() * len(letters), len(letters)])
        dist.all_reduce(total, group=self.data.get_group())
        return float(total[0] / total[1])

    def failures(self) -> list[str]:
        """Say in words which ranks hold something else than they should."""
        parameters = list(self.module.parameters())
        replicated = [p for p in parameters if tp.layout.layout_of(p) is None]
        found = []
        for what, tensors, mesh in (
            ("parameters", parameters, self.data),
            ("parameters that are not split", replicated, self.tensor),
        ):
            if different := ranks_that_differ(tensors, mesh.get_group()):
                found.append(f"{what} of ranks {different} of a {mesh} are not those of rank 0")
        return found


def fit(training: Training) -> tuple[list[float], float]:
    """Train for `--steps`; return the losses and the seconds."""
    losses: list[float] = []
    steps = training.args.steps
    with Reporter(steps) as reporter:
        start = time.perf_counter()
        for step in range(steps):
            losses.append(training.step(step))
            reporter.show(losses)
        return losses, time.perf_counter() - start


# What people see: only rank 0 speaks and writes


class Reporter:
    """Progress of the training: a bar in a terminal, elsewhere ten lines."""

    def __init__(self, steps: int) -> None:
        in_terminal = sys.stdout.isatty()
        self.steps = steps
        self.prints_lines = dist.get_rank() == 0 and not in_terminal
        self.bar = Progress(
            TextColumn("steps"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            disable=not (dist.get_rank() == 0 and in_terminal),
        )
        self.task = self.bar.add_task("steps", total=steps, numbers="")

    def __enter__(self) -> Reporter:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, losses: list[float]) -> None:
        """Move the bar, or now and then print a line."""
        numbers = f"loss {losses[-1]:.4f}"
        self.bar.update(self.task, advance=1, numbers=numbers)
        done = len(losses)
        if self.prints_lines and done * 10 // self.steps > (done - 1) * 10 // self.steps:
            print(f"step {done:5}  {numbers}", flush=True)


def describe_run(metrics: dict[str, Any]) -> str:
    """Name what was split how, for a title."""
    words = [f"tensor parallel {metrics['tp']}", f"data parallel {metrics['dp']}"]
    if metrics["pp"] > 1:
        words.append(f"pipeline {metrics['pp']} ({metrics['schedule']})")
    return ", ".join(words + ["sequence parallel"] * metrics["sequence_parallel"])


def print_table(metrics: dict[str, Any]) -> None:
    """Print what matters of the metrics."""
    table = Table(title=f"GPT, {describe_run(metrics)}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("training loss, last step", f"{metrics['losses'][-1]:.4f}")
    table.add_row("test loss", f"{metrics['test_loss']:.4f} nats per letter")
    table.add_row(
        "parameters, of them on rank 0", "{parameters:,}, {parameters_here:,}".format(**metrics)
    )
    table.add_row("letters/s", f"{metrics['letters_per_second']:,.0f}")
    table.add_row("training time", f"{metrics['seconds']:.1f} s")
    if "largest_difference" in metrics:
        difference = f"{metrics['largest_difference']:.1e}"
        table.add_row(f"largest difference to {metrics['compared_with']}", difference)
    Console().print(table)


def draw_losses(metrics: dict[str, Any], other: dict[str, Any] | None, path: Path) -> None:
    """Draw the loss over the steps and, beside another run's, the difference."""
    from matplotlib.figure import Figure  # here, since it takes a second that the other ranks save

    figure = Figure(figsize=(10 if other else 6, 4), layout="constrained")
    figure.suptitle(f"A GPT on Python's help, {describe_run(metrics)}")
    panels = figure.subplots(1, 2 if other else 1, squeeze=False)[0]
    steps = range(1, len(metrics["losses"]) + 1)
    if other:
        panels[0].plot(steps, other["losses"], label=describe_run(other), color="0.7", lw=4)
        differences = differences_of(metrics["losses"], other["losses"])
        panels[1].semilogy(steps, [max(d, 1e-9) for d in differences], ".", ms=3)
        panels[1].axhline(metrics["tolerance"], color="tab:red", lw=1, label="tolerance")
        panels[1].set(xlabel="step", ylabel="difference of the losses (1e-9: none)")
        panels[1].legend(frameon=False, loc="center right")
    panels[0].plot(steps, metrics["losses"], label=describe_run(metrics), lw=1.2)
    panels[0].axhline(
        metrics["test_loss"], color="tab:green", lw=1, ls="--", label="test, at the end"
    )
    panels[0].set(xlabel="step", ylabel="cross-entropy, nats per letter", ylim=(0, None))
    panels[0].legend(frameon=False)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


# Comparing with another run


def differences_of(ours: list[float], theirs: list[float]) -> list[float]:
    """Of every step."""
    return [abs(a - b) for a, b in zip(ours, theirs, strict=True)]


SAME = ("steps", "layers", "width", "heads", "positions", "batch_size", "lr", "clip", "seed")


def load_run(args: argparse.Namespace) -> dict[str, Any]:
    """Read the other run's metrics; ValueError if it trained something else."""
    metrics: dict[str, Any] = json.loads((args.compare / "metrics.json").read_text())
    settings = vars(args)
    if other := [f"--{name} {metrics[name]}" for name in SAME if metrics[name] != settings[name]]:
        raise ValueError(f"{args.compare} was trained with {', '.join(other)}")
    return metrics


# One rank, and the start of all of them


def run_rank(args: argparse.Namespace) -> int:
    """Be one rank: train, check and, on rank 0, report. Return the exit code."""
    torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(args.backend)
    training = Training(args)
    losses, seconds = fit(training)
    test_loss = training.test()
    failures = training.failures()
    metrics = metrics_of(training, losses, seconds, test_loss)
    if dist.get_rank() == 0:
        other = load_run(args) if args.compare else None
        if other:
            metrics["compared_with"] = str(args.compare)
            metrics["largest_difference"] = max(differences_of(losses, other["losses"]))
            if not metrics["largest_difference"] <= args.tolerance:
                failures.append(f"losses differ by more than --tolerance {args.tolerance:g}")
        report(metrics, other, args.out)
        for failure in failures:
            print(f"FAILED: {failure}", file=sys.stderr, flush=True)
    dist.barrier()  # torchrun ends all ranks when one fails: let rank 0 report first
    dist.destroy_process_group()
    return 1 if failures else 0


def metrics_of(
    training: Training, losses: list[float], seconds: float, test_loss: float
) -> dict[str, Any]:
    """Collective: what `metrics.json` gets."""
    args, parameters = training.args, list(training.module.parameters())
    layouts = [tp.layout.layout_of(parameter) for parameter in parameters]
    whole = [
        parameter.shape if layout is None else torch.Size(layout.shape)
        for parameter, layout in zip(parameters, layouts, strict=True)
    ]
    counts = torch.tensor([sum(shape.numel() for shape in whole)])
    dist.all_reduce(counts, group=training.stages.get_group())
    letters = args.steps * args.batch_size * args.positions
    return {
        **{name: value for name, value in vars(args).items() if name not in ("out", "compare")},
        "test_loss": test_loss,
        "letters_per_second": letters / seconds,
        "seconds": seconds,
        "parameters": int(counts),
        "parameters_here": sum(parameter.numel() for parameter in parameters),
        "torch": torch.__version__,
        "losses": losses,
    }


def report(metrics: dict[str, Any], other: dict[str, Any] | None, out: Path) -> None:
    """Print the table; write `loss.png` and `metrics.json`."""
    print_table(metrics)
    out.mkdir(parents=True, exist_ok=True)
    draw_losses(metrics, other, out / "loss.png")
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(f"wrote {out}/loss.png and {out}/metrics.json")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT on Python's help, its layers split over ranks, on CPUs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tp", type=count, default=2, help="ranks that share every layer (2)")
    add(
        "--dp",
        type=count,
        default=1,
        help="copies of the model, each with its share of a batch (1)",
    )
    add("--pp", type=count, default=1, help="stages, each with some of the layers (1)")
    add(
        "--schedule",
        choices=[name for name in NAMES if name != "auto"],
        default="1f1b",
        help="of the stages (1f1b)",
    )
    add("--microbatches", type=count, default=4, help="parts of a batch with --pp (4)")
    add(
        "--sequence-parallel",
        action="store_true",
        help="split the sequence, too, between the layers",
    )
    add("--overlap-chunks", type=count, default=1, help="parts in which products communicate (1)")
    add("--backend", choices=["pycomm", "gloo"], default="pycomm", help="(pycomm)")
    add("--steps", type=count, default=300, help="of the optimizer (300)")
    add("--layers", type=count, default=2, help="blocks (2)")
    add("--width", type=count, default=128, help="features of a letter (128)")
    add("--heads", type=count, default=4, help="of attention (4)")
    add("--positions", type=count, default=64, help="letters of a window (64)")
    add("--batch-size", type=count, default=16, help="windows a step, over all ranks (16)")
    add("--lr", type=float, default=3e-3, help="peak learning rate of AdamW (0.003)")
    add("--clip", type=float, default=1.0, help="largest norm of the whole model's gradients (1.0)")
    add("--seed", type=int, default=0, help="of the weights and the windows (0)")
    add("--compare", type=Path, metavar="FOLDER", help="--out of another run: losses must be equal")
    add("--tolerance", type=float, default=1e-5, help="of --compare, nats per letter (1e-5)")
    add("--out", type=Path, default=Path("runs/gpt"), help="folder to write to (runs/gpt)")
    args = parser.parse_args()
    for name, by in (("heads", "width"), ("dp", "batch_size")):
        whole, parts = getattr(args, by), getattr(args, name)
        if whole % parts:
            parser.error(f"--{by.replace('_', '-')} {whole} is not divisible by --{name} {parts}")
    if args.sequence_parallel and args.positions % args.tp:
        parser.error(f"--positions {args.positions} is not divisible by --tp {args.tp}")
    if args.pp > 1 and args.batch_size // args.dp < args.microbatches:
        parser.error(f"--microbatches {args.microbatches} are more than a replica's rows")
    if args.pp > 1 and args.layers + 3 < build(args.schedule, args.pp, 1).stages:
        parser.error(f"--layers {args.layers} are too few for the stages of --pp {args.pp}")
    ranks = args.dp * args.pp * args.tp
    if os.environ.get("WORLD_SIZE", str(ranks)) != str(ranks):
        words = f"--dp {args.dp} x --pp {args.pp} x --tp {args.tp}"
        parser.error(f"{words} needs {ranks} ranks of torchrun")
    if args.compare:
        try:
            load_run(args)
        except (OSError, KeyError, ValueError) as error:
            parser.error(f"--compare: {error}")
    return args


def main() -> int:
    """Start the ranks, or be one of them if torchrun started this process."""
    args = parse_arguments()
    if "RANK" in os.environ:
        return run_rank(args)
    return start_ranks(__file__, args.dp * args.pp * args.tp)


if __name__ == "__main__":
    sys.exit(main())
