"""The codec on whatever bits, sizes, cuts and options there are: one result, nothing lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from harness import INSTRUCTION_SETS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codec import CODECS, Encoded

from pycomm.extension import core

pytestmark = pytest.mark.usefixtures("instruction_set_restored")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Bits of float32: zeros, subnormals, ties of the narrow formats, their limits, infinities, NaNs.
ODD = (
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F801000, 0x3F803000, 0x3F808000, 0x33000000,
    0x33000001, 0x477FE000, 0x477FF000, 0x477FEFFF, 0x43E00000, 0x43E80000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
    0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call of transcode."""

    codec: tuple[str, int]
    dtype: torch.dtype
    values: tuple[int, ...]  # bits of float32, put somewhere among random ones
    seed: int
    count: int
    cuts: tuple[float, ...]
    spread: int  # of exponents
    factor: float
    feedback: bool
    infinite: bool
    stochastic: bool
    first: int

    def input(self) -> torch.Tensor:
        """Values of all magnitudes within the spread, and the odd ones."""
        chance = np.random.default_rng(self.seed)
        exponents = chance.integers(-self.spread, self.spread + 1, self.count)
        values = np.ldexp(chance.standard_normal(self.count), exponents).astype(np.float32)
        if self.count:
            places = chance.integers(0, self.count, len(self.values))
            values.view(np.uint32)[places] = np.array(self.values, dtype=np.uint32)
        return torch.from_numpy(values).to(self.dtype)

    def residual(self) -> torch.Tensor:
        """Small, of all values."""
        chance = np.random.default_rng(self.seed + 1)
        values = (chance.standard_normal(self.count) * 2.0**-self.spread).astype(np.float32)
        return torch.from_numpy(values)

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The same values in several tensors, of which some may be empty, each in memory of its own."""
        places = sorted(int(cut * self.count) for cut in self.cuts)
        return [part.clone() for part in tensor.tensor_split(places)]


@st.composite
def cases(draw: Any) -> Case:
    """Any of them."""
    return Case(
        draw(st.sampled_from(CODECS)),
        draw(st.sampled_from(DTYPES)),
        tuple(draw(st.lists(st.sampled_from(ODD) | st.integers(0, 2**32 - 1), max_size=6))),
        draw(st.integers(0, 2**31)),
        draw(st.sampled_from((0, 1, 15, 16, 17, 63, 64, 65)) | st.integers(0, 9000)),
        tuple(draw(st.lists(st.floats(0, 1), max_size=4))),
        draw(st.sampled_from((0, 2, 12, 40, 120))),
        draw(st.sampled_from((1.0, 0.5, 1 / 3, 0.0, -2.0, 2.0**20))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from((0, 1, 1000))),
    )


@dataclass
class Outcome:
    """What a call wrote."""

    encoded: Encoded
    residual: torch.Tensor | None
    output: torch.Tensor
    counts: Any

    def bits(self) -> list[torch.Tensor]:
        """Of all of it, to be compared."""
        found = [self.encoded.values, self.encoded.scales, self.output]
        found += [] if self.residual is None else [self.residual]
        return [tensor.view(torch.uint8) for tensor in found if tensor.numel()]


def call(case: Case, tensors: list[torch.Tensor]) -> Outcome:
    """Encodes the tensors, and writes what will be decoded over them."""
    codec = core.Codec(*case.codec)
    before = [torch.zeros(case.first, dtype=case.dtype)] if case.first else []
    encoded = Encoded(codec, case.count)
    residual = case.residual() if case.feedback else None
    every = [*before, *tensors]
    counts = core.transcode(
        codec, case.count, inputs=every, first=case.first, factor=case.factor, residual=residual,
        encoded=encoded.pair, outputs=every, infinite=case.infinite, stochastic=case.stochastic, seed=case.seed,
    )  # fmt: skip
    assert encoded.is_within_bounds()
    return Outcome(encoded, residual, torch.cat(tensors), counts)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases())
def test_one_result(case: Case) -> None:
    """By every instruction set, and however the values are cut into tensors."""
    wanted: list[torch.Tensor] | None = None
    for name in INSTRUCTION_SETS:
        if not core.set_instruction_set(name):
            continue
        for tensors in ([case.input()], case.parts(case.input())):
            got = call(case, tensors).bits()
            wanted = wanted or got
            for a, b in zip(got, wanted, strict=True):
                assert torch.equal(a, b), (name, len(tensors))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases())
def test_nothing_is_lost(case: Case) -> None:
    """What is decoded and what is kept make up what came in; with scales, all that is finite stays so."""
    values = case.input().float() * case.factor
    if case.feedback:
        values = values + case.residual()
    got = call(case, [case.input()])
    decoded = got.encoded.decoded()
    finite = values.isfinite()
    block = case.codec[1]
    if block:  # whole blocks are marked
        padded = torch.ones(-(-case.count // block) * block, dtype=torch.bool)
        padded[: case.count] = finite
        finite = padded.view(-1, block).all(1).repeat_interleave(block)[: case.count]
        assert decoded[finite].isfinite().all()
        assert decoded[~finite].isnan().all()
    if case.feedback:
        assert got.residual is not None
        stays = ~finite | ~decoded.isfinite()
        assert torch.equal(got.residual[stays], case.residual()[stays])
        kept, came = got.residual[~stays].double(), values[~stays].double()
        lost = (came - decoded[~stays].double() - kept).abs()
        bound = 2.0**-23 * (came.abs() + decoded[~stays].double().abs()) + 2.0**-149
        assert (lost <= bound).all()
    assert got.counts.non_finite == int((~values.isfinite()).sum())
