"""The functional collectives, also under autograd, and torch.distributed.nn's."""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as dnn

common.start()
group = dist.group.WORLD
assert group is not None
rank, ranks = dist.get_rank(), dist.get_world_size()
seeded = torch.Generator().manual_seed(rank)
x = torch.randn(ranks * 6, 4, generator=seeded, requires_grad=True)
results = {
    "all_reduce": fc.all_reduce(x.detach(), "sum", group),
    "all_reduce_max": fc.all_reduce(x.detach(), "max", group),
    "all_gather": fc.all_gather_tensor(x.detach(), 1, group),
    "reduce_scatter": fc.reduce_scatter_tensor(x.detach(), "sum", 0, group),
    "all_to_all": fc.all_to_all_single(x.detach(), None, None, group),
    "broadcast": fc.broadcast(x.detach(), ranks - 1, group),
}
gathered = fc.all_gather_tensor_autograd(x, 0, group)
scattered = fc.reduce_scatter_tensor_autograd(torch.tanh(gathered), "sum", 0, group)
swapped = fc.all_to_all_single_autograd(scattered * x, None, None, group)
reduced = dnn.all_reduce(swapped.square())
loss = reduced.sum()
loss.backward()
assert x.grad is not None
results = {name: value + 0 for name, value in results.items()}  # waits
common.report([loss.item()], {**results, "gradient": x.grad})
