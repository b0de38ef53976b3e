"""DTensor's tensor parallelism, with sequence parallel input, and redistributions of a plain DTensor."""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

common.start()
ranks = dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
network = common.model()
plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel()}
parallelize_module(network, mesh, plan)
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, foreach=False)
losses = []
for step in range(6):
    inputs, targets = common.samples(32, step)
    mine = inputs.chunk(ranks)[dist.get_rank()]
    loss = nn.functional.cross_entropy(network(mine), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
whole = torch.arange(ranks * ranks * 6.0).reshape(ranks * 2, ranks * 3)
tensor = distribute_tensor(whole, mesh, [Shard(0)])
for placement in (Shard(1), Replicate(), Shard(0)):
    tensor = tensor.redistribute(placements=[placement])
    assert torch.equal(tensor.full_tensor(), whole)
common.report(losses, network.state_dict())
