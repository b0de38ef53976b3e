"""A parallel model's state as the plain model has it, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from pycomm.tensor_parallel.module import ParallelModule, whole_states


def gather_state_dict(model: nn.Module, rank: int | None = None) -> dict[str, Any]:
    """Collective: what ``state_dict()`` of the plain model would be, bit for bit, on all ranks.

    ``rank``: the only one of the default group that keeps it; others get an empty dictionary. A model in
    DistributedDataParallel or torch.compile gives that of the model within; sharded by FSDP2 it is gathered, too.
    """
    with whole_states():
        state = _within(model).state_dict()
    keeps = (
        rank is None
        or not torch.distributed.is_initialized()
        or torch.distributed.get_rank() == rank
    )
    whole = {}
    for name, value in state.items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        if keeps:
            whole[name] = tensor
    return whole


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """As ``load_state_dict``, from a plain model's dictionary, of which each rank takes its part.

    ``load_state_dict`` takes such a dictionary, too, but also this rank's part, which may have the same shape.
    """
    inner = _within(model)
    given: dict[str, Any] = dict(state)
    for name, own in _sharded(inner):
        if name in given and not isinstance(given[name], DTensor):
            whole = given[name].to(own.device)
            given[name] = distribute_tensor(
                whole, own.device_mesh, own.placements, src_data_rank=None
            )
    with whole_states():
        return inner.load_state_dict(given, strict)


def _within(model: nn.Module) -> nn.Module:
    """The model that DistributedDataParallel and torch.compile are around."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _sharded(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """What FSDP2 has sharded of what tensor parallel has not."""
    for prefix, module in model.named_modules():
        split = module.layouts if isinstance(module, ParallelModule) else {}
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) and name not in split:
                yield f"{prefix}.{name}" if prefix else name, parameter
