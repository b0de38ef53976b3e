"""What data parallelism adds to a training step: pycomm's DDP and torch's, on the same models, in one interleaved run.

    python benchmarks/ddp.py
    python benchmarks/ddp.py --models mlp --repeats 15 --plot docs/ddp.png

Overhead is a step's time (forward, backward, optimizer) less that of the plain module in the same repeat, in ms; ratios
are to torch's DDP on Gloo, of the same repeat, medians [quartiles]. Two ranks, one thread each.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from machine import cpu_model
from ranks import answers_of, quartiles
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDdp

import pycomm

GLOO, GLOO_FP16 = "torch on Gloo", "torch on Gloo, fp16 hook"
PLAIN = "plain module"


# ---- models ---------------------------------------------------------------------------------------------------------


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """25.1 M parameters in 8 tensors."""
    widths = (1024, 3072, 3072, 3072, 1000)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), torch.randn(32, 1024)


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, inputs, height, width] to [batch, outputs, height / stride, width / stride]."""
        return torch.relu(self.body(x) + self.shortcut(x))


def cnn() -> tuple[nn.Module, torch.Tensor]:
    """A residual network of 25 M parameters in 62 tensors."""
    widths = (96, 192, 384, 768)
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1)]
    before = widths[0]
    for width in widths:
        layers += [Residual(before, width, 1 if width == before else 2), Residual(width, width, 1)]
        before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 100)]
    return nn.Sequential(*layers), torch.randn(2, 3, 32, 32)


class Gpt(nn.Module):
    """A small decoder: 6 layers of width 320, 4096 words, 64 positions."""

    def __init__(self, width: int = 320, layers: int = 6, words: int = 4096) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        block = nn.TransformerEncoderLayer(
            width, 8, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """[batch, positions] of int64 to [batch, positions, words]."""
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        return self.head(self.blocks(self.embedding(words), mask, is_causal=True))


def gpt() -> tuple[nn.Module, torch.Tensor]:
    """10 M parameters in 75 tensors."""
    return Gpt(), torch.randint(0, 4096, (2, 64))


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt": gpt,
}


# ---- variants -------------------------------------------------------------------------------------------------------


def gloo_fp16(module: nn.Module, gloo: dist.ProcessGroup) -> nn.Module:
    """torch's DDP with torch's compression."""
    model = TorchDdp(module, process_group=gloo)
    model.register_comm_hook(gloo, default_hooks.fp16_compress_hook)
    return model


def variants(gloo: dist.ProcessGroup) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """How each of them wraps a module."""
    return {
        PLAIN: lambda module: module,
        GLOO: lambda module: TorchDdp(module, process_group=gloo),
        GLOO_FP16: lambda module: gloo_fp16(module, gloo),
        "torch on pycomm": TorchDdp,
        "pycomm": pycomm.DistributedDataParallel,
        "pycomm, fp16": lambda module: pycomm.DistributedDataParallel(module, compression="fp16"),
        "pycomm, bf16": lambda module: pycomm.DistributedDataParallel(module, compression="bf16"),
        "pycomm, int8": lambda module: pycomm.DistributedDataParallel(module, compression="int8"),
    }


# ---- measuring ------------------------------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """One step on the batch."""
    optimizer.zero_grad()
    output: torch.Tensor = model(batch)
    output.square().mean().backward()
    optimizer.step()


def measure(rank: int, path: str, arguments: argparse.Namespace, answers: Any) -> None:
    """One rank: seconds a step, by model, repeat and variant."""
    torch.set_num_threads(1)
    dist.init_process_group("pycomm", init_method=f"file://{path}", rank=rank, world_size=2)
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    for name in arguments.models:
        torch.manual_seed(0)
        module, batch = MODELS[name]()
        wrap = variants(gloo)
        models = {variant: wrap[variant](copy.deepcopy(module)) for variant in wrap}
        optimizers = {
            variant: torch.optim.SGD(model.parameters(), 1e-4, foreach=True)
            for variant, model in models.items()
        }
        order, chance = list(models), random.Random(1)
        for repeat in range(arguments.repeats + 1):
            chance.shuffle(order)
            row = {}
            for variant in order:
                step(models[variant], optimizers[variant], batch)
                dist.barrier()
                began = time.perf_counter()
                for _ in range(arguments.steps):
                    step(models[variant], optimizers[variant], batch)
                row[variant] = (time.perf_counter() - began) / arguments.steps
            if rank == 0 and repeat > 0:  # the first one warms up
                answers.put((name, {variant: row[variant] for variant in models}))
        del models, optimizers
    if rank == 0:
        answers.put(None)
    dist.destroy_process_group()


@dataclass
class Result:
    """Of one model and variant."""

    step_ms: float
    overhead_ms: tuple[float, float, float]  # quartiles
    ratio: tuple[float, float, float]  # to torch's DDP on Gloo
    fp16_ratio: tuple[float, float, float]  # to the same with torch's fp16 hook


def results_of(rows: list[dict[str, float]]) -> dict[str, Result]:
    """Ratios are taken within a repeat."""

    found = {}
    for variant in rows[0]:
        over = [row[variant] - row[PLAIN] for row in rows]
        to_gloo = [o / (row[GLOO] - row[PLAIN]) for o, row in zip(over, rows, strict=True)]
        to_fp16 = [o / (row[GLOO_FP16] - row[PLAIN]) for o, row in zip(over, rows, strict=True)]
        found[variant] = Result(
            median(row[variant] for row in rows) * 1e3,
            quartiles([o * 1e3 for o in over]),
            quartiles(to_gloo),
            quartiles(to_fp16),
        )
    return found


def markdown(model: str, results: dict[str, Result]) -> str:
    """The table of one model."""
    lines = [
        f"| {model} | step, ms | overhead, ms | of Gloo's | of Gloo's with fp16 hook |",
        "|---|---:|---:|---:|---:|",
    ]
    for variant, result in results.items():
        spread = "{:.2f} [{:.2f}-{:.2f}]"
        low, middle, high = result.overhead_ms
        cells = [f"{middle:.1f} [{low:.1f}-{high:.1f}]"]
        cells += [spread.format(r[1], r[0], r[2]) for r in (result.ratio, result.fp16_ratio)]
        lines.append(f"| {variant} | {result.step_ms:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(found: dict[str, dict[str, Result]], path: Path) -> None:
    """Bars of overhead, a group per model."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(4.5 * len(found), 4), squeeze=False)
    for axis, (model, results) in zip(axes[0], found.items(), strict=True):
        names = [name for name in results if name != PLAIN]
        middle = [results[name].overhead_ms[1] for name in names]
        low = [results[name].overhead_ms[1] - results[name].overhead_ms[0] for name in names]
        high = [results[name].overhead_ms[2] - results[name].overhead_ms[1] for name in names]
        colors = ["tab:orange" if "Gloo" in name else "tab:blue" for name in names]
        axis.barh(names, middle, xerr=[low, high], color=colors)
        axis.invert_yaxis()
        axis.set_title(f"{model}: plain step {results[PLAIN].step_ms:.0f} ms")
        axis.set_xlabel("added by data parallelism, ms")
        if axis is not axes[0][0]:
            axis.set_yticklabels([])
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Prints a table per model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        type=lambda text: text.split(","),
        default=list(MODELS),
        help=f"some of {', '.join(MODELS)}, with commas (all)",
    )
    parser.add_argument("--repeats", type=int, default=9, help="repeats, at least 2 (9)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps a repeat (2)")
    parser.add_argument("--plot", type=Path, help="write a picture")
    parser.add_argument("--json", type=Path, help="write every step's seconds")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"unknown models {', '.join(unknown)}; known are {', '.join(MODELS)}")
    if arguments.repeats < 2 or arguments.steps < 1:
        parser.error("at least 2 repeats of 1 step")
    rows: dict[str, list[dict[str, float]]] = {}
    for name, row in answers_of(measure, 2, arguments):
        rows.setdefault(name, []).append(row)
    found = {model: results_of(of_model) for model, of_model in rows.items()}
    print(f"2 ranks, {cpu_model()}, torch {torch.__version__}, {arguments.repeats} repeats\n")
    for model, results in found.items():
        print(markdown(model, results) + "\n")
    if arguments.plot:
        plot(found, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
