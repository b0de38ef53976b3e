"""A GPT block split over two ranks: pycomm's layers beside torch's parallelize_module, on Gloo and on pycomm.

    python benchmarks/tensor_parallel.py
    python benchmarks/tensor_parallel.py --widths 256 --repeats 21 --plot docs/tensor_parallel.png

A step is forward, backward (to the input, too) and SGD. Ratios are another's step time / this one's within a repeat,
medians [quartiles]: 2 is twice as fast. All variants run in one interleaved run, in another order in each repeat, one
thread a rank. Each gives the whole block's output and input gradient, which is checked before it is timed.

Queries, keys and values are three layers in torch's blocks, whose input is prepared once, and after
pycomm.tensor_parallel.parallelize; in the other blocks of pycomm's layers they are one layer of three parts. Memory is
what one rank holds, counted from tensors: parameters with their gradients, and what forward keeps for backward.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import cpu_model
from ranks import answers_of, quartiles
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from words import TIMES

from pycomm import tensor_parallel as tp

RANKS, HEAD = 2, 32
WHOLE = "whole block, one rank"
GLOO, TORCH, OWN = "torch on Gloo", "torch on pycomm", "pycomm"
SEQUENCE, PLAN = ", sequence parallel", ", parallelize"
BARS = {GLOO: 1.5, TORCH: 1.0}  # at least so many times as fast

# ---- the block ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal; as many heads as the projections give."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = width // HEAD, HEAD
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values."""
        return self.query(x), self.key(x), self.value(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, positions, width] to the same."""
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in self.project(x))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, positions, width] to the same."""
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


# ---- variants -------------------------------------------------------------------------------------------------------


def torch_parallel(block: Block, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """As torch's tutorial has it."""
    outside: Any = Shard(1) if sequence else Replicate()
    entry = PrepareModuleInput(
        input_layouts=(outside,), desired_input_layouts=(Replicate(),), use_local_output=False
    )
    plan: dict[str, Any] = {
        "attention": entry,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=outside),
        "up": ColwiseParallel(input_layouts=outside),
        "down": RowwiseParallel(output_layouts=outside),
    }
    if sequence:
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
    return parallelize_module(block, mesh, plan)


class FusedAttention(Attention):
    """Queries, keys and values by one layer."""

    def __init__(self, source: Attention, sequence: bool) -> None:
        nn.Module.__init__(self)
        layers = source.query, source.key, source.value
        width = source.out.in_features
        whole = nn.Linear(width, 3 * width)
        with torch.no_grad():
            whole.weight.copy_(torch.cat([layer.weight for layer in layers]))
            whole.bias.copy_(torch.cat([layer.bias for layer in layers]))
        self.layer = tp.ColumnParallelLinear.from_linear(
            *(whole,),
            parts=[width] * 3,
            unit=HEAD,
            gather_output=False,
            sequence_parallel=sequence,
        )
        self.out = tp.RowParallelLinear.from_linear(  # type: ignore[assignment]
            source.out, input_is_parallel=True, unit=HEAD, sequence_parallel=sequence
        )

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of this rank's heads."""
        return self.layer(x).chunk(3, -1)


def pycomm_parallel(block: Block, sequence: bool) -> nn.Module:
    """Every layer in its parallel form."""
    made: Any = block
    options = {"sequence_parallel": sequence}
    made.attention = FusedAttention(block.attention, sequence)
    made.up = tp.ColumnParallelLinear.from_linear(block.up, gather_output=False, **options)
    made.down = tp.RowParallelLinear.from_linear(block.down, input_is_parallel=True, **options)
    if sequence:
        made.norm1, made.norm2 = (tp.norm.norm_from(n, None) for n in (made.norm1, made.norm2))
    return made


def pycomm_planned(block: Block) -> nn.Module:
    """By a plan, as a user's own block."""
    columns = dict.fromkeys(["*.query", "*.key", "*.value", "up"], "column")
    return tp.parallelize(block, {**columns, "*.out": "row", "down": "row"})


def variants() -> dict[str, Callable[[Block], nn.Module]]:
    """How each makes its block of the whole one. Collective."""
    gloo, default = dist.new_group(backend="gloo"), dist.group.WORLD
    assert isinstance(gloo, dist.ProcessGroup)
    assert default is not None
    meshes = {
        GLOO: DeviceMesh.from_group(gloo, "cpu"),
        TORCH: DeviceMesh.from_group(default, "cpu"),
    }
    found: dict[str, Callable[[Block], nn.Module]] = {WHOLE: lambda block: block}
    for sequence in (False, True):
        for name, mesh in meshes.items():
            found[name + SEQUENCE * sequence] = partial(
                torch_parallel, mesh=mesh, sequence=sequence
            )
        found[OWN + SEQUENCE * sequence] = partial(pycomm_parallel, sequence=sequence)
        if not sequence:
            found[OWN + PLAN] = pycomm_planned
    return found


# ---- one rank -------------------------------------------------------------------------------------------------------


@dataclass
class Subject:
    """A block that is measured, and what it learns from."""

    block: nn.Module
    x: torch.Tensor  # of the sequence, all or this rank's part
    optimizer: torch.optim.Optimizer

    def step(self) -> torch.Tensor:
        """The output; the gradients are there."""
        self.optimizer.zero_grad()
        self.x.grad = None
        y: torch.Tensor = self.block(self.x)
        y.square().sum().backward()
        self.optimizer.step()
        return y


def subject(name: str, block: nn.Module, x: torch.Tensor) -> Subject:
    """With a step so small that it does not change the measured block."""
    if name.endswith(SEQUENCE):
        x = tp.scatter(x, dim=1)
    kinds: dict[bool, list[nn.Parameter]] = {}  # which foreach does not mix
    for parameter in block.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    optimizer = torch.optim.SGD([{"params": some} for some in kinds.values()], 1e-12, foreach=True)
    return Subject(block, x.clone().requires_grad_(), optimizer)


def check(name: str, found: Subject, whole: Subject) -> None:
    """Raises AssertionError if output or input gradient are not the whole block's."""
    for what, own, wanted in (
        ("output", found.step().detach(), whole.step().detach()),
        ("input gradient", found.x.grad, whole.x.grad),
    ):
        assert own is not None
        assert wanted is not None
        if name.endswith(SEQUENCE):
            own = tp.gather(own, dim=1)
        error = (own - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-5, f"{name}: {what} is off by {error:.1e} of the largest"


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def memory_mb(found: Subject) -> tuple[float, float]:
    """This rank's parameters and gradients, and what a forward keeps besides."""
    parameters = [local(parameter.detach()) for parameter in found.block.parameters()]
    own = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor.detach()).untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        found.block(found.x)
    return 2 * sum(p.numel() * p.element_size() for p in parameters) / 1e6, sum(kept.values()) / 1e6


def measure(rank: int, path: str, arguments: argparse.Namespace, answers: Any) -> None:
    """One rank: memory by variant, and seconds a step by repeat and variant, of each width."""
    torch.set_num_threads(1)
    dist.init_process_group("pycomm", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    made = variants()
    for width in arguments.widths:
        torch.manual_seed(0)
        source, x = Block(width), torch.randn(arguments.batch, arguments.positions, width)
        subjects = {name: subject(name, made[name](copy.deepcopy(source)), x) for name in made}
        for name, one in subjects.items():
            check(name, one, subjects[WHOLE])
        memory = {name: memory_mb(one) for name, one in subjects.items()}
        order, chance = list(subjects), random.Random(1)
        for repeat in range(arguments.repeats + 1):
            chance.shuffle(order)
            row = {}
            for name in order:
                subjects[name].step()
                dist.barrier()
                began = time.perf_counter()
                for _ in range(arguments.steps):
                    subjects[name].step()
                dist.barrier()
                row[name] = (time.perf_counter() - began) / arguments.steps
            if rank == 0 and repeat > 0:  # the first one warms up
                answers.put((width, {name: row[name] for name in subjects}, memory))
    if rank == 0:
        answers.put(None)
    dist.destroy_process_group()


# ---- what it amounts to ---------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Of one width and variant."""

    step_ms: tuple[float, float, float]  # quartiles
    ratios: dict[str, tuple[float, float, float]]  # to those of BARS: their times / this one's
    memory_mb: tuple[float, float]


def results_of(
    rows: list[dict[str, float]], memory: dict[str, tuple[float, float]]
) -> dict[str, Result]:
    """Ratios are taken within a repeat, between variants that have the same parts of the sequence."""
    found = {}
    for name in rows[0]:
        suffix = SEQUENCE * name.endswith(SEQUENCE)
        ratios = {
            other: quartiles([row[other + suffix] / row[name] for row in rows]) for other in BARS
        }
        found[name] = Result(quartiles([row[name] * 1e3 for row in rows]), ratios, memory[name])
    return found


def markdown(width: int, results: dict[str, Result]) -> str:
    """The table of one width."""
    titles = [f"width {width}", "step, ms", *(f"{TIMES} {name}" for name in BARS)]
    titles += ["parameters and gradients, MB", "kept for backward, MB"]
    lines = [f"| {' | '.join(titles)} |", f"|---|{'---:|' * (len(titles) - 1)}"]
    for name, result in results.items():
        low, middle, high = result.step_ms
        cells = [f"{middle:.2f} [{low:.2f}-{high:.2f}]"]
        cells += [f"{r[1]:.2f} [{r[0]:.2f}-{r[2]:.2f}]" for r in result.ratios.values()]
        cells += [f"{mb:.2f}" for mb in result.memory_mb]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(width: int, results: dict[str, Result]) -> list[str]:
    """A line for each bar."""
    lines = []
    for name in (OWN, OWN + SEQUENCE):
        for other, least in BARS.items():
            ratio = results[name].ratios[other][1]
            holds = "holds" if ratio >= least else "DOES NOT HOLD"
            lines.append(
                f"width {width}, {name}: {ratio:.2f} times as fast as {other}, at least {least:g}: {holds}"
            )
    return lines


def plot(found: dict[int, dict[str, Result]], path: Path) -> None:
    """Bars of step times, a group per width."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(found), figsize=(4 * len(found) + 1.5, 3.6), squeeze=False, layout="constrained"
    )
    for axis, (width, results) in zip(axes[0], found.items(), strict=True):
        names = list(results)
        times = [results[name].step_ms for name in names]
        middle = [time_ms[1] for time_ms in times]
        spread = [[t[1] - t[0] for t in times], [t[2] - t[1] for t in times]]
        colors = [
            "0.6" if name == WHOLE else "tab:blue" if name.startswith(OWN) else "tab:orange"
            for name in names
        ]
        axis.barh(names, middle, xerr=spread, color=colors)
        for place, name in enumerate(names):
            ratio = results[name].ratios[GLOO][1]
            text = "" if name == WHOLE else f" {ratio:.1f}{TIMES}"
            axis.annotate(text, (times[place][2], place), va="center", fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, max(t[2] for t in times) * 1.15)
        axis.set_title(f"width {width}")
        axis.set_xlabel("step, ms")
        axis.spines[["top", "right"]].set_visible(False)
        if axis is not axes[0][0]:
            axis.set_yticklabels([])
    figure.suptitle(
        f"A GPT block on 2 ranks; {TIMES}: times as fast as torch on Gloo, which splits the same",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def main() -> int:
    """Prints a table per width."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    widths: Any = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    add("--widths", type=widths, default=[128, 256, 512], help="with commas (128,256,512)")
    add("--batch", type=int, default=2, help="sequences (2)")
    add("--positions", type=int, default=64, help="of a sequence, even (64)")
    add("--repeats", type=int, default=15, help="repeats, at least 2 (15)")
    add("--steps", type=int, default=10, help="timed steps a repeat (10)")
    add("--plot", type=Path, help="write a picture")
    add("--json", type=Path, help="write every repeat's seconds")
    arguments = parser.parse_args()
    if arguments.repeats < 2 or arguments.steps < 1:
        parser.error("at least 2 repeats of 1 step")
    if bad := [width for width in arguments.widths if width < 1 or width % (RANKS * HEAD)]:
        parser.error(f"widths {bad} are not multiples of {RANKS * HEAD}")
    if arguments.positions % RANKS or arguments.positions < RANKS:
        parser.error(f"positions must be a multiple of {RANKS}")
    rows: dict[int, list[dict[str, float]]] = {}
    memory: dict[int, dict[str, tuple[float, float]]] = {}
    for width, row, of_variant in answers_of(measure, RANKS, arguments):
        rows.setdefault(width, []).append(row)
        memory[width] = of_variant
    found = {width: results_of(of_width, memory[width]) for width, of_width in rows.items()}
    tokens = f"{arguments.batch} x {arguments.positions} tokens"
    print(
        f"2 ranks, {cpu_model()}, torch {torch.__version__}, {tokens}, "
        f"{arguments.repeats} repeats of {arguments.steps} steps\n"
    )
    for width, results in found.items():
        print(markdown(width, results) + "\n")
    print("\n".join(line for width, results in found.items() for line in verdicts(width, results)))
    if arguments.plot:
        plot(found, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
