"""torch.distributed.pipelining: a stage per rank, and two per rank interleaved."""

from __future__ import annotations

from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

WIDTH = 8
MICROBATCHES = 4


def run(name: str, stages_per_rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of the last stage's rank, and the gradients of this rank's stages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = ranks * stages_per_rank
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    data, target = torch.randn(2, 4 * MICROBATCHES, WIDTH)
    mine = range(rank, count, ranks)
    stages = [PipelineStage(layers[i], i, count, torch.device("cpu")) for i in mine]
    make: Any = getattr(schedules, name)
    schedule = make(
        stages[0] if stages_per_rank == 1 else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    losses: list[torch.Tensor] = []
    last = {"target": target, "losses": losses} if rank == ranks - 1 else {}
    schedule.step(*([data] if rank == 0 else []), **last)
    gradients = {
        f"{name}.{i}.{key}": parameter.grad
        for i in mine
        for key, parameter in layers[i].named_parameters()
        if parameter.grad is not None
    }
    return [loss.item() for loss in losses], gradients


common.start()
losses: list[float] = []
gradients: dict[str, torch.Tensor] = {}
for name, stages_per_rank in (
    ("ScheduleGPipe", 1),
    ("Schedule1F1B", 1),
    ("ScheduleInterleaved1F1B", 2),
):
    its_losses, its_gradients = run(name, stages_per_rank)
    losses += its_losses
    gradients |= its_gradients
common.report(losses, gradients)
