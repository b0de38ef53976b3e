"""FSDP2, saved by torch.distributed.checkpoint after half the steps and loaded into a fresh model for the others."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 6


def sharded() -> nn.Module:
    """The common model, each layer and the rest sharded over the ranks."""
    network = common.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in network:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


def train(network: nn.Module, steps: range) -> list[float]:
    """This rank's losses, a step each, on its half of every batch."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    losses = []
    for step in steps:
        inputs, targets = (half.chunk(dist.get_world_size()) for half in common.samples(32, step))
        rank = dist.get_rank()
        loss = nn.functional.cross_entropy(network(inputs[rank]), targets[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


common.start()
first = sharded()
losses = train(first, range(STEPS // 2))
folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
state: dict[str, Any] = {"network": first.state_dict()}
checkpoint.save(state, checkpoint_id=folder[0])
second = sharded()
state = {"network": second.state_dict()}
checkpoint.load(state, checkpoint_id=folder[0])
second.load_state_dict(state["network"])
assert common.digest(first.state_dict()) == common.digest(second.state_dict())
dist.barrier()
if dist.get_rank() == 0:
    for file in sorted(Path(folder[0]).iterdir()):
        file.unlink()
    Path(folder[0]).rmdir()
losses += train(second, range(STEPS // 2, STEPS))
common.report(losses, second.state_dict())
