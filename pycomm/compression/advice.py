"""Whether compression would pay: predicted from a link's bandwidth and the speed of this machine's kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from pycomm.compression.codecs import Compressor, Encoding, compressor_of
from pycomm.compression.cost import Rates, share
from pycomm.compression.low_rank import PowerSGD
from pycomm.compression.reduced import Memory
from pycomm.compression.top_k import TopK
from pycomm.errors import InvalidArgument
from pycomm.extension import core

_PROBE = 1 << 23  # values on which kernels are timed: more than caches hold
_SIDE = 2048  # of the matrix on which compressors are timed that are Python
_PLAIN = ("fp32", 0)


@dataclass(frozen=True)
class Advice:
    """One step's averaging of all gradients, as predicted; without any overlap with the backward."""

    compression: str
    wire_bytes: int  # that every rank sends, and receives
    seconds_wire: float
    seconds_kernels: float
    gain: float  # the time without compression by this; above 1 it pays
    crossover: float  # bytes/s: on slower links it pays; 0: never, infinity: always

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.seconds_wire + self.seconds_kernels


def advise(
    model: nn.Module | Sequence[torch.Tensor],
    bandwidth: float | None,
    *,
    world_size: int = 2,
    compressions: Iterable[str | Compressor] = ("fp16", "bf16", "fp8", "int8"),
) -> list[Advice]:
    """What compressions would gain or lose; the first is none.

    model: a module, or its parameters. bandwidth: bytes per second that a rank can send while it receives as many, such
    as 1.25e8 for a network of 1 Gbit/s; None: shared memory, where nothing but the kernels counts. Every rank sends
    2 * (world_size - 1) / world_size of the encoded bytes, and encodes, sums and decodes with the rates that are
    measured here, once per process, in about a second: so call it on the machine that it is about, when that is idle.
    Latencies, and what overlaps with backward, are left out. Raises InvalidArgument for sizes below zero.
    """
    if world_size < 1 or (bandwidth is not None and not bandwidth > 0):
        raise InvalidArgument(f"world_size {world_size} and bandwidth {bandwidth} must be positive")
    named: list[tuple[str, torch.Tensor]]
    if isinstance(model, nn.Module):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    else:
        named = [(str(i), parameter) for i, parameter in enumerate(model)]
    plain = _cost_of(named, None, world_size)
    found = [_advice("none", plain, plain, bandwidth)]
    for compression in compressions:
        compressor = compressor_of(compression)
        name = compression if isinstance(compression, str) else compressor.format
        found.append(_advice(name, _cost_of(named, compressor, world_size), plain, bandwidth))
    return found


def markdown(advices: Iterable[Advice]) -> str:
    """A table of it."""
    lines = [
        "| compression | sends, MB | wire, ms | kernels, ms | gain | pays below, MB/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.compression} | {one.wire_bytes / 1e6:.1f} | {one.seconds_wire * 1e3:.1f} | "
        f"{one.seconds_kernels * 1e3:.1f} | {one.gain:.2f} | {one.crossover / 1e6:.0f} |"
        for one in advices
    ]
    return "\n".join(lines)


@dataclass
class _Cost:
    wire_bytes: float = 0
    kernels: float = 0  # seconds


def _advice(name: str, cost: _Cost, plain: _Cost, bandwidth: float | None) -> Advice:
    wire, plain_wire = ((one.wire_bytes / bandwidth if bandwidth else 0.0) for one in (cost, plain))
    saved, slower = plain.wire_bytes - cost.wire_bytes, cost.kernels - plain.kernels
    total = wire + cost.kernels
    return Advice(
        name,
        round(cost.wire_bytes),
        wire,
        cost.kernels,
        (plain_wire + plain.kernels) / total if total else 1.0,
        (saved / slower if slower > 0 else float("inf")) if saved > 0 else 0.0,
    )


def _cost_of(
    named: Sequence[tuple[str, torch.Tensor]], compressor: Compressor | None, world_size: int
) -> _Cost:
    cost = _Cost()
    both_halves = 2 * share(world_size)
    chosen = [False] * len(named)
    if compressor is not None:
        chosen = compressor.choose(named, compressor.warmup_steps, world_size)
    for (_, parameter), is_chosen in zip(named, chosen, strict=True):
        count = parameter.numel()
        if is_chosen and isinstance(compressor, TopK):
            sent = 8 * compressor.count_of(count)
            cost.wire_bytes += (world_size - 1) * sent
            cost.kernels += count * _seconds_of_python(TopK, compressor.ratio)
            continue
        if is_chosen and isinstance(compressor, PowerSGD):
            rows = parameter.shape[0]
            cost.wire_bytes += both_halves * 4 * compressor.rank * (rows + count // rows)
            cost.kernels += count * _seconds_of_python(PowerSGD, compressor.rank)
            continue
        how = _PLAIN, False
        if is_chosen and isinstance(compressor, Encoding):
            how = (compressor.format, compressor.block), compressor.error_feedback
        codec = core.Codec(*how[0])
        cost.wire_bytes += both_halves * codec.wire_bytes(count)
        cost.kernels += measured_rates(*how).seconds(count, world_size)
    return cost


# ---- this machine ---------------------------------------------------------------------------------------------------


def _best(call: Callable[[], object], count: int = _PROBE) -> float:
    """Seconds per value of the fastest of some calls, the first of which does not count."""
    times = []
    for _ in range(6):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times[1:]) / count


@cache
def measured_rates(codec: tuple[str, int], feedback: bool) -> Rates:
    """Of this machine's kernels, for a codec by format and block, with a residual or without."""
    made = core.Codec(*codec)
    values = torch.randn(_PROBE, generator=torch.Generator().manual_seed(0))
    residual = torch.zeros(_PROBE) if feedback else None

    def wire() -> tuple[torch.Tensor, torch.Tensor]:
        size = _PROBE * made.value_bytes
        return torch.zeros(size, dtype=torch.uint8), torch.ones(made.scales(_PROBE))

    wires = [wire() for _ in range(3)]
    result = wire()

    def encode(to: tuple[torch.Tensor, torch.Tensor]) -> None:
        core.transcode(made, _PROBE, inputs=[values], residual=residual, encoded=to)

    def reduce(others: int) -> None:
        core.transcode(
            made, _PROBE, wires=wires[:others], inputs=[values], residual=residual,
            encoded=result, outputs=[values],
        )  # fmt: skip

    for other in wires:
        encode(other)
    of_one, of_three = _best(lambda: reduce(1)), _best(lambda: reduce(3))
    return Rates(
        _best(lambda: encode(result)),
        of_one,
        max(of_three - of_one, 0.0) / 2,
        _best(lambda: core.transcode(made, _PROBE, wires=wires[:1], outputs=[values])),
    )


class _Echo:
    """Two ranks that do the same, without a wire."""

    rank, world_size = 0, 2

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", **_: object) -> None:
        tensor.mul_(2 if op == "sum" else 1)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.view(2, -1).copy_(input.view(-1))


@cache
def _seconds_of_python(kind: type[TopK] | type[PowerSGD], size: float) -> float:
    """Per value, of what a compressor that is Python computes of a matrix."""
    compressor = TopK(size) if kind is TopK else PowerSGD(int(size))
    values = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0))
    gradient, memory = torch.empty_like(values), Memory()

    def average() -> None:
        gradient.copy_(values)
        compressor.average(_Echo(), [""], [gradient], None, memory)

    return _best(average, values.numel())
