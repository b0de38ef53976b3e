"""Where the kernels under test run: on the GPU, or, to test the checks themselves, as the CPU's kernels."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def load_core() -> Any:
    """pycomm._core without the rest of the package, which needs the adapter to torch."""
    if "pycomm" not in sys.modules:
        package = ModuleType("pycomm")
        package.__path__ = [str(ROOT / "pycomm")]
        sys.modules["pycomm"] = package
    return importlib.import_module("pycomm._core")


def why_not() -> str | None:
    """Why no GPU can be used, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no usable GPU or driver"
    return None


class StandIn:
    """The CPU's kernels in a device's place."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.name = f"CPU stand-in ({core.instruction_set()})"
        self.torch_device = torch.device("cpu")

    def put(self, tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """A copy in the device's memory, `offset` elements behind an aligned address."""
        memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=self.torch_device)
        memory[offset:].copy_(tensor)
        return memory[offset:]

    def transcode(self, codec: Any, count: int, **arguments: Any) -> Any:
        """As core.transcode; returns the counts."""
        return self.core.transcode(codec, count, **arguments)

    def start_transcode(self, codec: Any, count: int, **arguments: Any) -> None:
        """The same without counting or waiting."""
        self.core.transcode(codec, count, **arguments)

    def reduce(
        self,
        output: torch.Tensor,
        sources: Sequence[torch.Tensor],
        op: str,
        scales: Sequence[float] | None = None,
    ) -> None:
        """As core.reduce."""
        self.core.reduce(output, sources, op, scales)

    def seconds(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """What each of the calls takes on the device, one after the other."""
        taken = []
        for call in calls:
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
        return taken


class Gpu(StandIn):
    """The current CUDA device and stream."""

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.name = torch.cuda.get_device_name()
        self.torch_device = torch.device("cuda", torch.cuda.current_device())

    @property
    def stream(self) -> int:
        """Its handle."""
        return torch.cuda.current_stream().cuda_stream

    def transcode(self, codec: Any, count: int, **arguments: Any) -> Any:
        """As core.transcode; waits, for the counts."""
        counts = torch.zeros(6, dtype=torch.int64, device=self.torch_device)
        self.core.cuda_transcode(codec, count, stream=self.stream, counts=counts, **arguments)
        return self.core.codec_counts(counts.cpu())

    def start_transcode(self, codec: Any, count: int, **arguments: Any) -> None:
        """The same without counting or waiting."""
        self.core.cuda_transcode(codec, count, stream=self.stream, **arguments)

    def reduce(
        self,
        output: torch.Tensor,
        sources: Sequence[torch.Tensor],
        op: str,
        scales: Sequence[float] | None = None,
    ) -> None:
        """As core.reduce."""
        self.core.cuda_reduce(output, sources, op, stream=self.stream, scales=scales)

    def seconds(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """By events between the calls; the host runs ahead."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        events[0].record()
        for call, event in zip(calls, events[1:], strict=True):
            call()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
