"""What the jobs share: joining the group, the data, a small model, and the report that clients.py compares."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FEATURES = 16
CLASSES = 4


def start() -> str:
    """Joins the default group of the backend named on the command line, and returns its name.

    With pycomm its DistributedDataParallel also takes the place of torch's, for libraries that wrap models themselves.
    """
    backend = sys.argv[1]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if backend == "pycomm":
        import pycomm

        parallel: Any = nn.parallel
        parallel.DistributedDataParallel = pycomm.DistributedDataParallel
    dist.init_process_group(backend)
    return backend


def samples(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """So many inputs and the classes they belong to; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return inputs, inputs[:, :CLASSES].argmax(1)


def model() -> nn.Sequential:
    """A classifier of the samples; the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def digest(state: Mapping[str, Any]) -> str:
    """A hash of all tensors of a state dict, of sharded ones as a whole (then collective)."""
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def report(losses: Sequence[float], state: Mapping[str, Any], wrapped: object = None) -> None:
    """Collective: rank 0 prints all ranks' losses and digests of weights as JSON; then all leave the group."""
    mine = ([float(loss).hex() for loss in losses], digest(state))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        kind = f"{type(wrapped).__module__}.{type(wrapped).__name__}" if wrapped else ""
        facts = {"backend": dist.get_backend(), "wrapped": kind, "ranks": ranks}
        print("RESULT " + json.dumps(facts), flush=True)
    dist.destroy_process_group()
