"""What a compressor does to each layer's gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from pycomm.compression.codecs import Encoding
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
    encoding: Encoding,
    named: Iterable[tuple[str, torch.Tensor]],
    residuals: Mapping[str, torch.Tensor],
) -> list[Layer]:
    """Of every parameter that has a gradient. Encodes each once more; changes nothing."""
    layers = []
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is None:
            continue
        if not encoding.compresses(name, parameter):
            layers.append(Layer(name, gradient.numel(), "fp32", 1.0, 0.0, 0, 0, 0, 0.0))
            continue
        codec, count = encoding.codec, gradient.numel()
        residual = residuals.get(name)
        wire = torch.empty(count * codec.value_bytes, dtype=torch.uint8)
        counts = core.transcode(
            codec,
            count,
            inputs=[gradient.detach().contiguous().flatten()],
            residual=None if residual is None else residual.clone(),
            encoded=(wire, torch.empty(codec.scales(count))),
        )
        layers.append(
            Layer(
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
        )
    return layers


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
