"""How fast the kernels are on a device: as shares of a plain copy that moves as many bytes.

Bytes are those that a call has to read and write once. Each kernel is timed right behind its copy, by events, all
kernels taking turns within every repeat; the share is the copy's time by the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import Any, Final

import torch
from gpu_device import StandIn

TARGET: Final = 0.9
#: As pycomm.compression has them.
CODECS: Final = {"fp16": 1024, "bf16": 0, "fp8_e4m3": 256, "fp8_e5m2": 256, "int8": 256}
OPERATIONS: Final = (
    "encode",
    "encode of 100",
    "encode+residual",
    "reduce of 2",
    "reduce of 8",
    "decode",
)
ELEMENTWISE: Final = (("float32", 2), ("float32", 8), ("bfloat16", 2), ("bfloat16", 8))
LAUNCHES: Final = 3  # of a kernel, between two events


def wire_bytes(codec: Any, count: int) -> int:
    """Values and scales, without the padding between them."""
    return count * int(codec.value_bytes) + 4 * int(codec.scales(count))


def codec_bytes(codec: Any, count: int, operation: str, item: int = 4) -> int:
    """Read and written by an operation on tensors of `item` bytes an element."""
    wire, tensor, residual = wire_bytes(codec, count), count * item, 2 * 4 * count
    if operation in ("encode", "encode of 100"):  # tensors
        return tensor + wire
    if operation == "encode+residual":
        return tensor + residual + wire
    if operation == "decode":
        return wire + tensor
    ranks = int(operation.removeprefix("reduce of "))
    return (ranks - 1) * wire + tensor + residual + wire


def elementwise_bytes(count: int, sources: int, item: int) -> int:
    """Of a reduction."""
    return (sources + 1) * count * item


@dataclass
class Row:
    """A kernel and what was measured."""

    name: str
    bytes: int
    seconds: list[float] = field(default_factory=list)
    copy_seconds: list[float] = field(default_factory=list)

    def shares(self) -> tuple[float, float, float]:
        """Quartiles of the share; the second is the median."""
        found = [copy / own for copy, own in zip(self.copy_seconds, self.seconds, strict=True)]
        low, _, high = quantiles(found, n=4, method="inclusive")
        return low, median(found), high

    def words(self) -> str:
        """A line of the table."""
        low, middle, high = self.shares()
        rate, copy = (self.bytes / median(s) / 1e9 for s in (self.seconds, self.copy_seconds))
        verdict = "" if middle >= TARGET else f"  < {TARGET:.0%}"
        return (
            f"{self.name:32} {self.bytes / 1e6:9.1f} {rate:9.1f} {copy:9.1f}"
            f" {middle:6.1%} [{low:.1%}, {high:.1%}]{verdict}"
        )

    def record(self) -> dict[str, Any]:
        """For the JSON file."""
        return {**asdict(self), "shares": self.shares()}


HEADER: Final = (
    f"{'kernel':32} {'MB':>9} {'GB/s':>9} {'copy GB/s':>9} share of the copy [quartiles]"
)


class Bench:
    """Memory for all the kernels, `count` elements each."""

    def __init__(self, core: Any, device: StandIn, count: int) -> None:
        self.core, self.device, self.count = core, device, count
        self.gradient = torch.randn(count, device=self.device.torch_device) * 1e-3
        self.residual = torch.zeros(count, device=self.device.torch_device)
        self.output = torch.empty(count, device=self.device.torch_device)
        most = max(r.bytes for r in self.rows())
        self.source = torch.randint(
            0, 256, (most // 2,), dtype=torch.uint8, device=self.device.torch_device
        )
        self.target = torch.empty_like(self.source)

    def rows(self) -> list[Row]:
        """All kernels, not measured yet."""
        rows = []
        for name, block in CODECS.items():
            codec = self.core.Codec(name, block)
            rows += [
                Row(label(name, block, operation), codec_bytes(codec, self.count, operation))
                for operation in OPERATIONS
            ]
        for dtype, sources in ELEMENTWISE:
            item: int = getattr(torch, dtype).itemsize
            rows.append(
                Row(f"{dtype} sum of {sources}", elementwise_bytes(self.count, sources, item))
            )
        return rows

    def calls(self) -> Iterator[Callable[[], object]]:
        """What the rows measure, in their order."""
        for name, block in CODECS.items():
            codec = self.core.Codec(name, block)
            wires = [self.encoded(codec) for _ in range(7)]
            result = self.encoded(codec)
            own = {"inputs": [self.gradient], "factor": 0.5}
            pieces = self.gradient.tensor_split(100)
            kept = {**own, "residual": self.residual, "encoded": result}
            for arguments in (
                {**own, "encoded": result},
                {**own, "inputs": pieces, "encoded": result},
                kept,
                {**kept, "wires": wires[:1]},
                {**kept, "wires": wires},
                {"wires": wires[:1], "outputs": [self.output]},
            ):
                yield partial(self.device.start_transcode, codec, self.count, **arguments)
        for dtype, sources in ELEMENTWISE:
            kind: torch.dtype = getattr(torch, dtype)
            parts = [self.gradient.to(kind) for _ in range(sources)]
            output = torch.empty_like(parts[0])
            yield partial(self.device.reduce, output, parts, "sum")

    def encoded(self, codec: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient's."""
        values = torch.empty(
            self.count * codec.value_bytes, dtype=torch.uint8, device=self.device.torch_device
        )
        scales = torch.empty(codec.scales(self.count), device=self.device.torch_device)
        self.device.start_transcode(
            codec, self.count, inputs=[self.gradient], encoded=(values, scales)
        )
        return values, scales

    def copy(self, bytes_moved: int) -> None:
        """Reads half of them and writes the other half."""
        half = bytes_moved // 2
        self.target[:half].copy_(self.source[:half])

    def measure(self, repeats: int) -> list[Row]:
        """The rows, filled; the first repeat warms up."""
        rows, calls = self.rows(), list(self.calls())
        for repeat in range(repeats + 1):
            for row, call in zip(rows, calls, strict=True):
                copies, kernels = self.device.seconds(
                    [several(partial(self.copy, row.bytes)), several(call)]
                )
                if repeat > 0:
                    row.copy_seconds.append(copies / LAUNCHES)
                    row.seconds.append(kernels / LAUNCHES)
        return rows


def label(name: str, block: int, operation: str) -> str:
    """Of a row."""
    return f"{name}:{block} {operation}"


def several(call: Callable[[], object]) -> Callable[[], None]:
    """LAUNCHES of it."""

    def run() -> None:
        for _ in range(LAUNCHES):
            call()

    return run
