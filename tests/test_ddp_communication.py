"""DistributedDataParallel.communication(): which steps count, and that waiting for others is seen where it happens."""

from __future__ import annotations

import time
from typing import Final

import pytest
import torch
import torch.distributed as dist
from harness import run

import pycomm

DELAY: Final = 0.3


class _Slow(torch.autograd.Function):
    """Identity whose gradient takes its time."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        """The input."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient, late."""
        time.sleep(DELAY)
        return gradient


class _Between(torch.nn.Module):
    """Identity, slow in backward if asked."""

    def __init__(self, is_slow: bool) -> None:
        super().__init__()
        self._is_slow = is_slow

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """The input."""
        return _Slow.apply(tensor) if self._is_slow else tensor


def _model(overlap: bool, is_slow: bool = False) -> pycomm.DistributedDataParallel:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), _Between(is_slow), torch.nn.Linear(4, 4))
    return pycomm.DistributedDataParallel(module, overlap=overlap)


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("overlap", [True, False])
def test_which_steps_count(overlap: bool, backend: str) -> None:
    """Those with a synchronised forward and a whole backward; times are parts of each other."""

    def worker(rank: int, n: int) -> dict[str, float]:
        model = _model(overlap)
        assert model.communication() == {
            "steps": 0, "seconds": 0.0, "seconds_backward": 0.0, "seconds_exposed": 0.0, "share": 0.0
        }  # fmt: skip
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 4))
        model(torch.ones(2, 4))  # no backward
        return model.communication()

    for found in run(2, worker, backend=backend):
        assert found["steps"] == 3
        assert 0 < found["seconds_exposed"] <= found["seconds_backward"] < found["seconds"]
        assert found["share"] == found["seconds_exposed"] / found["seconds"]


@pytest.mark.parametrize("overlap", [True, False])
def test_who_waits_for_a_slow_rank_has_it_exposed(overlap: bool) -> None:
    """The rank that is slow computes meanwhile: it waits for nobody."""

    def worker(rank: int, n: int) -> dict[str, float]:
        model = _model(overlap, is_slow=rank == 1)
        output = model(torch.ones(2, 4))
        dist.barrier()
        output.sum().backward()
        return model.communication()

    quick, slow = run(2, worker)
    assert quick["seconds_exposed"] > DELAY / 2
    assert slow["seconds_backward"] > DELAY
    assert slow["seconds_exposed"] < DELAY / 2
    assert quick["share"] > slow["share"]
