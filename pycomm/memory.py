"""Tensors in memory that all ranks share: collectives on them copy less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm.backend import find_backend
from pycomm.errors import InvalidArgument


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    shared: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """An uninitialised CPU tensor, with ``shared=True`` in memory that all ranks of a group can reach.

    ``all_reduce``, ``reduce``, ``broadcast``, ``all_gather`` and ``reduce_scatter`` of more than 16 KiB work in
    place on such tensors if every rank passes one (of a broadcast, if the root does): nothing is staged, so large
    ones run at the memory's speed. Not collective; views share the memory too; it is freed with the last tensor in
    it, which may outlive the group. Other groups take the tensor as an ordinary one.

    ``size`` and ``dtype`` as in ``torch.empty``; ``group`` None is the default group. Raises InvalidArgument if the
    group's CPU backend is not pycomm, Error when this rank's heap (PYCOMM_HEAP_BYTES) is full.
    """
    shape: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    if not shared:
        return torch.empty(shape, dtype=dtype)
    group = group or dist.group.WORLD
    backend = find_backend(group) if group is not None else None
    if backend is None:
        raise InvalidArgument(
            "shared memory needs a process group of backend pycomm; call init_process_group('pycomm') first"
        )
    dtype = dtype or torch.get_default_dtype()
    flat = backend.allocate_tensor(math.prod(shape), dtype=dtype, device=torch.device("cpu"))
    tensor: torch.Tensor = flat.view(shape)
    return tensor
