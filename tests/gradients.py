"""What tests of compressed gradients train, compare and save."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from harness import G
from torch import nn

import pycomm


def net(seed: int = 0) -> nn.Sequential:
    """Layers of weights and biases, the first two large enough to be compressed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def batch(rank: int, step: int, count: int = 8) -> torch.Tensor:
    """Different on every rank and in every step."""
    return torch.randn(count, 40, generator=G(1000 * step + rank))


def everywhere(*tensors: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    return all(torch.equal(flat, other) for other in others)


def save(model: pycomm.DistributedDataParallel, optimizer: torch.optim.Optimizer) -> bytes:
    """Collective: everything."""
    return pickle.dumps(
        (model.state_dict(), model.compression_state_dict(), optimizer.state_dict())
    )


def load(
    model: pycomm.DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    blob: bytes,
    drop: str | None = None,
) -> None:
    """Collective: the same, without a part of the compressor's."""
    of_model, of_compression, of_optimizer = pickle.loads(blob)
    if drop is not None:
        of_compression[drop] = {}
    model.load_state_dict(of_model)
    model.load_compression_state_dict(of_compression)
    optimizer.load_state_dict(of_optimizer)


def new_group(backend: str | None = None) -> dist.ProcessGroup:
    """Collective: of all ranks."""
    group: Any = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group
