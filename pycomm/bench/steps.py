"""The operation ddp: steps of a small model, data parallel, beside the same step without communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import isqrt
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycomm.bench.operations import Call, Case
from pycomm.bench.ways import Way
from pycomm.ddp import DistributedDataParallel

LAYERS: Final = 4
ROWS: Final = 8
ALONE: Final = "alone"
_FLOAT32: Final = 1e-5  # relative: sums of other orders


def count_of(bytes: int) -> int:
    """Parameters of the largest square layers whose gradients are not more bytes."""
    return LAYERS * isqrt(bytes // (4 * LAYERS)) ** 2


def sides(
    case: Case, groups: dict[str, dist.ProcessGroup], ways: tuple[Way, ...]
) -> Iterator[tuple[str, Callable[[], Call]]]:
    """First the step of one rank by itself, to which the others' times are compared."""
    yield ALONE, lambda: _call(case, None, Way(""))
    for way in ways:
        yield str(way), partial(_call, case, groups[way.backend], way)


def _model(case: Case) -> nn.Sequential:
    """Alike on all ranks."""
    width = isqrt(case.count // LAYERS)
    chance = torch.Generator().manual_seed(1)
    layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    for layer in layers:
        with torch.no_grad():
            layer.weight.copy_(torch.randn(width, width, generator=chance) / max(width, 1) ** 0.5)
    return nn.Sequential(*layers)


def _batch(case: Case, rank: int) -> Tensor:
    width = isqrt(case.count // LAYERS)
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(100 + rank))


def _flat(model: nn.Module) -> Tensor:
    """The gradients, which the parameters' `.grad` then are parts of."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, part in zip(
        parameters, flat.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter)
    return flat


def _call(case: Case, group: dist.ProcessGroup | None, way: Way) -> Call:
    model = _model(case)
    parallel: nn.Module = model
    if group is not None and (way.backend == "pycomm" or way.compression):
        parallel = DistributedDataParallel(
            model, process_group=group, compression=way.compression or None
        )
    elif group is not None:
        parallel = nn.parallel.DistributedDataParallel(model, process_group=group)
    flat, x = _flat(model), _batch(case, case.rank)

    def step() -> None:
        flat.zero_()
        parallel(x).square().mean().backward()

    of = [case.rank] if group is None else range(case.ranks)
    alone = [_gradients(case, rank) for rank in of]
    call = Call(lambda: None, step, flat, lambda: torch.stack(alone).mean(0))
    # Rounded twice, each time with what an earlier step's rounding has left out.
    largest = max(float(gradient.abs().max()) for gradient in alone)
    call.tolerance = largest * (_FLOAT32 + 4 * way.rounding)
    return call


def _gradients(case: Case, rank: int) -> Tensor:
    """What a rank has by itself."""
    model = _model(case)
    flat = _flat(model)
    model(_batch(case, rank)).square().mean().backward()
    return flat
