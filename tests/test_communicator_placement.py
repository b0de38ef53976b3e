"""Ranks that are bound to different cores make the same decisions."""

from __future__ import annotations

import os

import pytest
import torch
from harness import run

import pycomm

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("bound", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_ranks_bound_to_single_cores(bound: tuple[int, ...]) -> None:
    """Some ranks may run on one core only, others on all; the latency probe is still collective."""

    def worker(rank: int, n: int) -> list[float]:
        if rank in bound:
            os.sched_setaffinity(0, {CORES[rank % 2]})
        store = torch.distributed.distributed_c10d._get_default_store()
        inner = torch.distributed.PrefixStore("bound", store)
        communicator = pycomm.create_communicator(inner, rank, n)
        tensor = torch.full((200_000,), rank + 1.0)
        communicator.all_reduce(tensor)
        return tensor.unique().tolist()

    for world_size in (2, 3):
        total = float(sum(range(1, world_size + 1)))
        assert run(world_size, worker) == [[total]] * world_size
