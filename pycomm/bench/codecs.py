"""The operation compress: one process's encoding and decoding of float32, beside a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pycomm.bench.operations import Call, Case, contribution
from pycomm.bench.ways import ROUNDING
from pycomm.compression.codecs import encoding_of
from pycomm.extension import core


def sides(case: Case, formats: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], Call]]]:
    """The copy first; then of each format its encoding, the same with a residual, and its decoding."""
    yield "copy", lambda: _copy(case)
    for name in formats:
        for what in ("encode", "residual", "decode"):
            yield f"{name} {what}", partial(_call, case, name, what)


def _copy(case: Case) -> Call:
    data = contribution(case, case.rank, 1)
    source, target = torch.empty_like(data), torch.empty_like(data)

    def fill() -> None:
        source.copy_(data)
        target.zero_()

    return Call(fill, lambda: target.copy_(source), target, lambda: data)


def _call(case: Case, name: str, what: str) -> Call:
    """Whatever is timed, decoded values are compared with what was encoded."""
    codec = encoding_of(name).codec
    data = contribution(case, case.rank, 1)
    source, result, residual = (torch.empty_like(data) for _ in range(3))
    wire = (_bytes(codec.value_bytes * case.count), torch.empty(codec.scales(case.count)))

    def encode() -> None:
        kept = residual if what == "residual" else None
        core.transcode(codec, case.count, inputs=[source], encoded=wire, residual=kept)

    def decode() -> None:
        core.transcode(codec, case.count, wires=[wire], outputs=[result])

    def fill() -> None:
        source.copy_(data)
        residual.zero_()
        result.zero_()
        encode()

    largest = float(data.max()) if case.count else 0.0
    call = Call(fill, decode if what == "decode" else encode, result, lambda: data)
    call.tolerance = largest * ROUNDING[name]
    if what == "residual":  # the run behind fill() adds what that one has left out
        call.tolerance *= 2
    call.finish = decode
    return call


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)
