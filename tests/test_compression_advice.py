"""What advise() computes from the rates that it measures; benchmarks/advise.py compares it with reality."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from pycomm.compression import FP16, Int8, PowerSGD, TopK, advise
from pycomm.compression.advice import markdown
from pycomm.compression.codecs import NAMED
from pycomm.extension import core

EVERY: list[Any] = [*NAMED, TopK(0.01), PowerSGD(4)]


def model(frozen: bool = False) -> nn.Sequential:
    """A matrix of 2^20 values, and 1024 that are never compressed."""
    made = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 64, bias=False))
    made[1].requires_grad_(not frozen)
    return made


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_bytes(world_size: int) -> None:
    """Of the wire formats, for what is compressed and what is not."""
    share = 2 * (world_size - 1) / world_size
    none, fp16, int8, rank4 = advise(
        model(frozen=True),
        1e9,
        world_size=world_size,
        compressions=["fp16", Int8(block=64), PowerSGD(4)],
    )
    bias = 4096
    assert none.wire_bytes == round(share * (4 * 2**20 + bias))
    assert fp16.wire_bytes == round(share * (core.Codec("fp16", 1024).wire_bytes(2**20) + bias))
    assert int8.wire_bytes == round(share * (2**20 + 4 * 2**14 + bias))
    assert rank4.wire_bytes == round(share * (4 * 4 * 2048 + bias))
    assert [one.compression for one in (none, fp16, int8)] == ["none", "fp16", "int8"]


@pytest.mark.parametrize("world_size", [2, 5])
def test_crossover(world_size: int) -> None:
    """There the gain is 1, on slower links more, on faster ones less."""
    found = advise(model(), 1e9, world_size=world_size, compressions=EVERY)[1:]
    for name, one in zip(EVERY, found, strict=True):
        assert one.seconds == one.seconds_wire + one.seconds_kernels
        assert one.seconds_wire == pytest.approx(one.wire_bytes / 1e9, rel=1e-4)
        assert one.crossover > 0
        if one.crossover == math.inf:
            continue

        def gain(bandwidth: float, name: Any = name) -> float:
            return advise(model(), bandwidth, world_size=world_size, compressions=[name])[1].gain

        assert gain(one.crossover) == pytest.approx(1, rel=1e-3)
        assert gain(one.crossover / 10) > 1.001
        assert gain(one.crossover * 10) < 0.999


def test_slow_links_give_the_ratio_of_bytes() -> None:
    """In the limit."""
    none, fp8 = advise(model(frozen=True), 1e3, compressions=["fp8"])
    assert none.gain == 1
    assert fp8.gain == pytest.approx(none.wire_bytes / fp8.wire_bytes, rel=1e-3)


def test_what_is_left_alone_changes_nothing() -> None:
    """Small parameters, top-k among many ranks, 16 bits of 16 bits."""
    for parameters, compression, ranks in (
        ([torch.zeros(100)], "int8", 2),
        ([torch.zeros(100, 100)], TopK(0.2), 5),
        ([torch.zeros(100, 100, dtype=torch.bfloat16)], FP16(), 2),
        ([], "int8", 2),
        ([torch.zeros(0)], "int8", 2),
    ):
        none, other = advise(parameters, 1e9, world_size=ranks, compressions=[compression])
        assert (other.wire_bytes, other.seconds) == (none.wire_bytes, none.seconds)
        assert other.gain == 1
        assert other.crossover == 0


def test_shared_memory_has_no_wire() -> None:
    """Then kernels decide."""
    found = advise(model(), None, compressions=["fp16", "int8"])
    assert all(one.seconds_wire == 0 for one in found)
    assert found[1].gain == pytest.approx(found[0].seconds_kernels / found[1].seconds_kernels)
    table = markdown(found).splitlines()
    assert len(table) == 5
    assert "| fp16 |" in table[3]


def test_refusals() -> None:
    """In words."""
    for bandwidth, world_size in ((0, 2), (-1, 2), (math.nan, 2), (1e9, 0)):
        with pytest.raises(pycomm.InvalidArgument, match="must be positive"):
            advise(model(), bandwidth, world_size=world_size)
    with pytest.raises(pycomm.InvalidArgument, match="unknown compression"):
        advise(model(), 1e9, compressions=["zip"])
