"""DDP's direct way: gradients averaged where they lie are those of torch's buckets, bit by bit, wherever they lie."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from harness import G, run
from torch import nn

import pycomm
from pycomm.config import config

STEPS: Final = 3


class Mixed(nn.Module):
    """Parameters of several layouts, whose gradients come in several ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(12, 30)
        self.transposed = nn.Parameter(torch.randn(30, 8).t())  # its memory is another matrix
        self.convolution = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.ones(()))
        self.shared = nn.Parameter(torch.randn(30))
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 12] to [batch, 8]."""
        hidden = torch.tanh(self.first(x)) + self.shared + self.shared.reshape(5, 6).reshape(30)
        image = hidden.reshape(-1, 1, 5, 6).to(memory_format=torch.channels_last)
        hidden = hidden + self.convolution(image).mean(1).reshape(-1, 30)
        return self.scale * (hidden @ self.transposed.t()) + self.none.sum()


class Alias(nn.Module):
    """The gradient of `weight` is a view of a tensor that backward has still to read, for `other`."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.ones(4, 6))
        self.weight = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[4, 6] to [4, 6]."""
        return self.other * x + self.weight.view(4, 6)


def gradients_of(
    buckets: str, build: Any, dtype: torch.dtype, rank: int, **arguments: Any
) -> list[torch.Tensor]:
    """Of some steps, all of them."""
    object.__setattr__(config(), "ddp_buckets", buckets)
    model = pycomm.DistributedDataParallel(build().to(dtype), **arguments)
    found = []
    for step in range(STEPS):
        model.zero_grad(set_to_none=step != 1)
        with model.no_sync():
            model(batch_of(build, rank, 10 + step).to(dtype)).float().square().sum().backward()
        model(batch_of(build, rank, step).to(dtype)).float().square().sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert (model._direct is not None) == (buckets == "direct")
    return found


def batch_of(build: Any, rank: int, step: int) -> torch.Tensor:
    """Another one on each rank and in each step."""
    shape = (4, 6) if build is Alias else (2, 12)
    return torch.randn(shape, generator=G(100 * step + rank))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_bits_of_torchs_buckets(n: int, dtype: torch.dtype, overlap: bool) -> None:
    """Any layout, in one bucket and in many, with accumulation, overlapped or not."""

    def worker(rank: int, n: int) -> None:
        for cap in (25, 0.0005):
            ways = [
                gradients_of(way, Mixed, dtype, rank, overlap=overlap, bucket_cap_mb=cap)
                for way in ("direct", "torch")
            ]
            assert len(ways[0]) == len(ways[1]) == STEPS * 8
            for direct, in_buckets in zip(*ways, strict=True):
                assert torch.equal(direct, in_buckets)
                assert direct.stride() == in_buckets.stride()

    run(n, worker, wall=60)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_that_backward_still_reads(overlap: bool) -> None:
    """It is not overwritten before backward is over."""

    def worker(rank: int, n: int) -> None:
        for cap in (25, 0):
            ways = [
                gradients_of(way, Alias, torch.float32, rank, overlap=overlap, bucket_cap_mb=cap)
                for way in ("direct", "torch")
            ]
            for direct, in_buckets in zip(*ways, strict=True):
                assert torch.equal(direct, in_buckets)

    run(2, worker)


def test_buckets_follow_the_order_of_arrival() -> None:
    """That of rank 0, from the second iteration on; in the first one there is one bucket per dtype."""

    def worker(rank: int, n: int) -> None:
        layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
        model = pycomm.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
        seen = []
        for _ in range(2):
            model(torch.ones(1, 64)).sum().backward()
            seen.append(model._direct.buckets())
        assert seen == [[[3], [2], [1], [0]]] * 2
        assert model._get_ddp_logging_data()["rebuilt_bucket_sizes"] == ", ".join(["16384"] * 4)

    run(2, worker)
