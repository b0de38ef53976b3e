"""What a compressor does to each layer's gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from pycomm.compression.codecs import Compressor, Encoding
from pycomm.compression.reduced import Memory, Reduced
from pycomm.extension import core


@dataclass(frozen=True)
class Layer:
    """One parameter's gradient, as it would be encoded now, together with its residual."""

    name: str
    count: int
    format: str  # fp32: not compressed
    ratio: float  # bytes of float32 by those on the wire
    relative_error: float  # the norm of what is left out by that of the gradient
    overflows: int
    underflows: int
    non_finite: int
    residual_norm: float


def report(
    compressor: Compressor,
    named: Iterable[tuple[str, torch.Tensor]],
    residuals: Mapping[str, torch.Tensor],
    world_size: int,
    memory: Memory | None = None,
) -> list[Layer]:
    """Of every parameter that has a gradient. Compresses each once more, as after the warm-up; changes nothing.

    `memory`: of compressors that do not encode every value.
    """
    layers = []
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is None:
            continue
        residual = residuals.get(name)
        if not compressor.choose([(name, parameter)], compressor.warmup_steps, world_size)[0]:
            layers.append(Layer(name, gradient.numel(), "fp32", 1.0, 0.0, 0, 0, 0, 0.0))
        elif isinstance(compressor, Encoding):
            layers.append(_encoded(compressor, name, gradient.detach(), residual))
        elif isinstance(compressor, Reduced):
            layers.append(
                _reduced(compressor, name, gradient.detach(), residual, memory or Memory())
            )
    return layers


def _encoded(
    encoding: Encoding, name: str, gradient: torch.Tensor, residual: torch.Tensor | None
) -> Layer:
    codec, count = encoding.codec, gradient.numel()
    wire = torch.empty(count * codec.value_bytes, dtype=torch.uint8)
    counts = core.transcode(
        codec,
        count,
        inputs=[gradient.contiguous().flatten()],
        residual=None if residual is None else residual.clone(),
        encoded=(wire, torch.empty(codec.scales(count))),
    )
    return Layer(
        name,
        count,
        encoding.format,
        4 * count / codec.wire_bytes(count),
        (counts.error_squares / counts.squares) ** 0.5 if counts.squares else 0.0,
        counts.overflows,
        counts.underflows,
        counts.non_finite,
        0.0 if residual is None else float(residual.norm()),
    )


def _reduced(
    compressor: Reduced,
    name: str,
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    memory: Memory,
) -> Layer:
    values, count = gradient.float().clone(), gradient.numel()
    if residual is not None:
        values += residual.view(values.shape)
    sent, wire_bytes = compressor.approximate(name, values, memory)
    norm = float(values.norm())
    return Layer(
        name,
        count,
        compressor.format,
        4 * count / wire_bytes,
        float((values - sent).norm()) / norm if norm else 0.0,
        0,
        0,
        int((~values.isfinite()).sum()),
        0.0 if residual is None else float(residual.norm()),
    )


def markdown(layers: Iterable[Layer]) -> str:
    """A table of it."""
    lines = [
        "| layer | values | wire | ratio | relative error | overflows | underflows | non-finite | residual |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.name} | {one.count} | {one.format} | {one.ratio:.2f} | {one.relative_error:.2e} | {one.overflows} | "
        f"{one.underflows} | {one.non_finite} | {one.residual_norm:.2e} |"
        for one in layers
    ]
    return "\n".join(lines)
