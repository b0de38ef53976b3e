"""What ranks agree on before a module is split: the plan, and the module."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from pycomm.errors import MismatchError
from pycomm.tensor_parallel.group import Group


def agree(
    module: nn.Module,
    description: str,
    error: Exception | None,
    ranks: Group,
    check: bool,
) -> None:
    """Collective: raises on all ranks if one cannot, or if plans or values differ."""
    if ranks.world_size == 1:
        if error is not None:
            raise error
        return
    values = list(module.named_parameters()) + list(module.named_buffers())
    description += repr([(name, tuple(value.shape), value.dtype) for name, value in values])
    mine = [int(error is not None), zlib.crc32(description.encode()), int(check)]
    everyone = ranks.gather_numbers(mine)
    if error is not None:
        raise error
    for rank, (failed, digest, checks) in enumerate(everyone):
        if failed:
            raise MismatchError(
                f"rank {ranks.rank}: rank {rank} cannot parallelize its module, and raises why; here nothing is changed"
            )
        if [digest, checks] != everyone[0][1:]:
            raise MismatchError(
                f"rank {ranks.rank}: the plan or the module of rank {rank} is not that of rank 0; nothing is changed"
            )
    if check:
        _compare([(name, value) for name, value in values], ranks)


def _compare(values: list[tuple[str, torch.Tensor]], ranks: Group) -> None:
    digests = [_digest(value) for _, value in values]
    everyone = ranks.gather_numbers(digests) if digests else []
    for rank, of_rank in enumerate(everyone):
        for (name, _), here, first in zip(values, of_rank, everyone[0], strict=True):
            if here != first:
                raise MismatchError(
                    f"rank {ranks.rank}: {name} of rank {rank} has other values than on rank 0, and each rank would "
                    "take its part of another model; build it from one seed or file on all ranks. Nothing is changed"
                )


def _digest(value: torch.Tensor) -> int:
    if value.is_meta:
        return 0
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data)
