"""The codec kernels by themselves: every format, block, instruction set and odd value, against numpy and torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pytest
import torch
from harness import INSTRUCTION_SETS, G

from pycomm.errors import InvalidArgument
from pycomm.extension import core

pytestmark = pytest.mark.usefixtures("instruction_set_restored")

FORMATS: Final[dict[str, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
LARGEST: Final = {
    "fp32": torch.finfo(torch.float32).max,
    "fp16": 65504.0,
    "bf16": 2.0**128 - 2.0**120,
    "fp8_e4m3": 448.0,
    "fp8_e5m2": 57344.0,
    "int8": 127.0,
}
MANTISSA_BITS: Final = {"fp32": 23, "fp16": 10, "bf16": 7, "fp8_e4m3": 3, "fp8_e5m2": 2}
LEAST_EXPONENT: Final = {"fp32": -126, "fp16": -14, "bf16": -126, "fp8_e4m3": -6, "fp8_e5m2": -14}
SCALED_EXPONENT: Final = {"fp16": 14, "bf16": 100, "fp8_e4m3": 7, "fp8_e5m2": 14}
CODECS: Final = [
    *((name, 0) for name in FORMATS if name != "int8"),
    *((name, block) for name in FORMATS if name != "fp32" for block in (64, 256, 4096)),
]
COUNTS: Final = (0, 1, 15, 16, 17, 63, 64, 65, 255, 1023, 1025, 5000)


# ---- the reference --------------------------------------------------------------------------------------------------


@dataclass
class Encoded:
    """Values and their scales, as they travel."""

    codec: Any
    count: int
    values: torch.Tensor = field(init=False)
    scales: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.values = torch.full((self.count * self.codec.value_bytes + 64,), 0xAA).byte()
        self.scales = torch.full((self.codec.scales(self.count) + 1,), -7.0)

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What core.transcode takes."""
        return self.values, self.scales

    def decoded(self) -> torch.Tensor:
        """By torch's conversions."""
        elements = self.values[: self.count * self.codec.value_bytes]
        floats = elements.view(FORMATS[self.codec.format]).float()
        return floats * self.scale_of_each()

    def scale_of_each(self) -> torch.Tensor:
        """Of every value, 1 without scales."""
        if self.codec.block == 0:
            return torch.ones(self.count)
        return self.scales[:-1].repeat_interleave(self.codec.block)[: self.count]

    def is_within_bounds(self) -> bool:
        """Whether nothing was written behind the values and scales."""
        behind = self.values[self.count * self.codec.value_bytes :]
        return bool((behind == 0xAA).all()) and float(self.scales[-1]) == -7.0


def float32_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In order, every step rounded."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def reference_scales(codec: Any, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What every value is multiplied by before it is narrowed, and after it was widened."""
    count = value.numel()
    if codec.block == 0:
        return torch.ones(count), torch.ones(count)
    blocks = torch.zeros(codec.scales(count) * codec.block)
    blocks[:count] = value.abs()
    largest = blocks.view(-1, codec.block).amax(1) if count else torch.zeros(0)
    if codec.format == "int8":
        tiny = largest < 2.0**-100
        down = torch.where(tiny, 0.0, torch.tensor(127.0) / largest)
        up = torch.where(tiny, 0.0, largest / torch.tensor(127.0))
    else:
        exponent = ((largest.view(torch.int32) >> 23) - 127).clamp(min=-127)
        shift = (SCALED_EXPONENT[codec.format] - exponent).clamp(max=126)
        down, up = (
            torch.ldexp(torch.ones(len(shift)), shift),
            torch.ldexp(torch.ones(len(shift)), -shift),
        )
        up[largest.isnan() | largest.isinf()] = torch.nan
    each = [scale.repeat_interleave(codec.block)[:count] for scale in (down, up)]
    return each[0], each[1]


def narrowed(codec: Any, down: torch.Tensor) -> torch.Tensor:
    """The wire's elements of scaled finite values, saturated."""
    largest = LARGEST[codec.format]
    if codec.format == "int8":
        return torch.from_numpy(np.rint(down.numpy())).to(torch.int8)
    return down.clamp(-largest, largest).to(FORMATS[codec.format])


def numbers(count: int, seed: int) -> torch.Tensor:
    """Floats of many magnitudes, ties and zeros of both signs among them."""
    values = torch.randn(count, generator=G(seed)) * 2.0 ** torch.randint(
        -30, 12, (count,), generator=G(seed + 1)
    )
    short = values.view(torch.int32) & ~0xFFF  # ties of fp16, and exact values
    values = torch.where(
        torch.rand(count, generator=G(seed + 2)) < 0.5, short.view(torch.float32), values
    )
    values[::7] = 0.0
    values[3::11] = -0.0
    return values


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, NaN payloads aside."""
    nan = a.isnan() & b.isnan()
    return torch.equal(
        a.masked_fill(nan, 0).view(torch.int32), b.masked_fill(nan, 0).view(torch.int32)
    )


# ---- single formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_every_pattern_decodes(isa: str, name: str) -> None:
    """All bit patterns of a format, as torch widens them."""
    bits = 8 * FORMATS[name].itemsize
    patterns = torch.arange(2**bits).to(torch.uint8 if bits == 8 else torch.uint16)
    values = patterns.view(torch.uint8)
    output = torch.empty(2**bits)
    core.transcode(core.Codec(name), 2**bits, wires=[(values, torch.zeros(0))], outputs=[output])
    assert same(output, patterns.view(FORMATS[name]).float())


def test_every_int8_decodes(isa: str) -> None:
    """By its block's scale, rounded once."""
    values = torch.arange(256).to(torch.uint8)
    scales = torch.tensor([0.1, 3e-5, 1.0, 7e8])
    output = torch.empty(256)
    core.transcode(core.Codec("int8", 64), 256, wires=[(values, scales)], outputs=[output])
    assert torch.equal(output, values.view(torch.int8).float() * scales.repeat_interleave(64))


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_every_kind_of_float_encodes(isa: str, name: str) -> None:
    """A sweep through all sign, exponent and mantissa bits, around every tie; saturated, then rounded as torch does."""
    high = torch.arange(2**16, dtype=torch.int64) << 16
    patterns = torch.cat(
        [high + low for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    )
    values = patterns.to(torch.uint32).view(torch.float32)
    values = values[values.isfinite()]
    codec, count = core.Codec(name), values.numel()
    wire = Encoded(codec, count)
    counts = core.transcode(codec, count, inputs=[values], encoded=wire.pair)
    expected = narrowed(codec, values)
    assert torch.equal(wire.values[: count * codec.value_bytes], expected.view(torch.uint8))
    assert counts.overflows == int((values.abs() > LARGEST[name]).sum())
    assert counts.underflows == int(((expected.float() == 0) & (values != 0)).sum())
    assert counts.non_finite == 0
    assert wire.is_within_bounds()


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_infinity_and_nan_without_scales(isa: str, name: str, infinite: bool) -> None:
    """They arrive, only they do, and their residual stays; what overflows is saturated, or is marked if asked."""
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3.4e38, 1.0, -0.0, 0.37])
    values = torch.cat([special, numbers(57, 3).clamp(-400, 400)])
    residual = torch.full((65,), 0.25)
    codec = core.Codec(name)
    wire, output = Encoded(codec, 65), torch.empty(65)
    counts = core.transcode(codec, 65, inputs=[values], encoded=wire.pair, outputs=[output], residual=residual,
                            infinite=infinite)  # fmt: skip
    total = values + 0.25
    over = total.abs() > LARGEST[name]
    marked = over | total.isnan() if infinite else ~total.isfinite()
    assert same(output, wire.decoded())
    assert torch.equal(output.isfinite(), ~marked)
    if name != "fp8_e4m3":
        assert torch.equal(output[:2], special[:2])
    assert torch.equal(residual[marked], torch.full((int(marked.sum()),), 0.25))
    kept = ~marked
    assert torch.equal((output + residual)[kept & ~over], total[kept & ~over])
    assert torch.equal(output[kept & over], torch.sign(total[kept & over]) * LARGEST[name])
    assert (counts.non_finite, counts.overflows) == (3, int((over & total.isfinite()).sum()))


# ---- all codecs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "block"), CODECS)
def test_encode(isa: str, name: str, block: int, dtype: torch.dtype) -> None:
    """Values, scales, residual and what others will decode, for every length, against the definition."""
    codec = core.Codec(name, block)
    for count in COUNTS:
        source = numbers(count, count).to(dtype)
        residual = numbers(count, count + 9) * 2**-6
        value = source.float() * torch.tensor(0.3) + residual
        wire, output = Encoded(codec, count), torch.empty(count, dtype=dtype)
        counts = core.transcode(codec, count, inputs=[source], factor=0.3, residual=residual, encoded=wire.pair,
                                outputs=[output])  # fmt: skip
        down, up = reference_scales(codec, value)
        elements = narrowed(codec, value * down)
        assert torch.equal(wire.values[: count * codec.value_bytes], elements.view(torch.uint8)), (
            count
        )
        assert block == 0 or torch.equal(wire.scale_of_each(), up)
        decoded = elements.float() * up
        assert torch.equal(output, decoded.to(dtype))
        assert torch.equal(residual, value - decoded)
        assert wire.is_within_bounds()
        assert counts.values == count
        assert counts.squares == pytest.approx(float((value.double() ** 2).sum()), rel=1e-5)
        assert counts.error_squares == pytest.approx(
            float((residual.double() ** 2).sum()), rel=1e-5, abs=1e-30
        )
        if name != "int8":  # scales are powers of two: nothing is lost
            assert torch.equal(decoded.double() + residual.double(), value.double())


@pytest.mark.parametrize(("name", "block"), CODECS)
def test_reduce(isa: str, name: str, block: int) -> None:
    """Others' values and the own ones are summed in float32 by rank, then encoded once; the error is the residual's."""
    codec = core.Codec(name, block)
    for ranks, own, count in (
        (2, 0, 65),
        (2, 1, 1025),
        (3, 1, 5000),
        (4, 3, 255),
        (5, 2, 0),
        (1, 0, 17),
    ):
        parts = [numbers(count, 100 * rank) for rank in range(ranks)]
        wires = []
        for rank, part in enumerate(parts):
            if rank != own:
                wire = Encoded(codec, count)
                core.transcode(codec, count, inputs=[part], factor=1 / ranks, encoded=wire.pair)
                wires.append(wire)
        residual = numbers(count, 77) * 2**-4
        mine = parts[own] * torch.tensor(1 / ranks) + residual
        addends = [wire.decoded() for wire in wires]
        addends.insert(own, mine)
        value = float32_sum(addends) / 3
        result, output = Encoded(codec, count), torch.empty(count)
        core.transcode(codec, count, wires=[w.pair for w in wires], inputs=[parts[own]], own=own, factor=1 / ranks,
                       divisor=3, residual=residual, encoded=result.pair, outputs=[output])  # fmt: skip
        down, up = reference_scales(codec, value)
        expected = narrowed(codec, value * down)
        assert torch.equal(result.values[: count * codec.value_bytes], expected.view(torch.uint8))
        assert torch.equal(output, expected.float() * up)
        assert torch.equal(residual, value - output)
        plain = torch.empty(count)  # the sum itself
        core.transcode(
            codec,
            count,
            wires=[w.pair for w in wires],
            inputs=[mine],
            own=own,
            divisor=3,
            outputs=[plain],
        )
        assert torch.equal(plain, value)


@pytest.mark.parametrize(("name", "block"), [c for c in CODECS if c[1] > 0])
def test_infinity_and_nan_with_scales(isa: str, name: str, block: int) -> None:
    """Mark their block, whose residual stays; other blocks are untouched."""
    codec, count = core.Codec(name, block), 3 * block + 5
    for bad in (torch.inf, -torch.inf, torch.nan):
        values, residual = numbers(count, 5), torch.full((count,), 0.5)
        values[block + 3] = bad
        values[-1] = bad
        wire, output = Encoded(codec, count), torch.empty(count)
        counts = core.transcode(
            codec, count, inputs=[values], residual=residual, encoded=wire.pair, outputs=[output]
        )
        marked = torch.zeros(count, dtype=torch.bool)
        marked[block : 2 * block] = marked[3 * block :] = True
        assert torch.equal(output.isnan(), marked)
        assert torch.equal(residual[marked], torch.full((int(marked.sum()),), 0.5))
        assert residual.isfinite().all()
        assert counts.non_finite == 2
        total = torch.empty(count)  # and the mark survives the sum with others
        core.transcode(
            codec, count, wires=[wire.pair], inputs=[torch.ones(count)], own=0, outputs=[total]
        )
        assert torch.equal(total.isnan(), marked)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp32"])
def test_no_magnitude_overflows_or_vanishes_with_scales(isa: str, name: str) -> None:
    """From the smallest normal float to the largest: a block keeps its values' relative precision and stays finite."""
    precision = {
        "fp16": 2**-11,
        "bf16": 2**-8,
        "fp8_e4m3": 2**-4,
        "fp8_e5m2": 2**-3,
        "int8": 1 / 254,
    }[name]
    codec = core.Codec(name, 64)
    for exponent in range(-99 if name == "int8" else -110, 128):
        values = torch.linspace(1, 1.99999988, 64) * 2.0**exponent
        wire, output, residual = Encoded(codec, 64), torch.empty(64), torch.zeros(64)
        core.transcode(
            codec, 64, inputs=[values], encoded=wire.pair, outputs=[output], residual=residual
        )
        assert output.isfinite().all(), exponent
        assert residual.isfinite().all(), exponent
        bound = (2 if exponent == 127 else 1) * precision * 1.0001
        assert ((output.double() - values.double()).abs() <= bound * values.double().max()).all(), (
            exponent
        )


def test_gradients_that_break_a_plain_cast(isa: str) -> None:
    """7e4 and 0 on two ranks average to 35000 as near as halves are; 8e-8 on both, which a halved fp16 loses, stays."""
    codec = core.Codec("fp16", 256)
    wire, output = Encoded(codec, 1), torch.empty(1)
    core.transcode(codec, 1, inputs=[torch.tensor([7e4])], factor=0.5, encoded=wire.pair)
    core.transcode(
        codec, 1, wires=[wire.pair], inputs=[torch.zeros(1)], own=1, factor=0.5, outputs=[output]
    )
    assert float(output) == 35008  # the nearest half, of 32 apart
    core.transcode(codec, 1, inputs=[torch.tensor([8e-8])], factor=0.5, encoded=wire.pair)
    core.transcode(codec, 1, wires=[wire.pair] * 2, outputs=[output])
    assert float(output) == pytest.approx(8e-8, rel=2**-11)


# ---- lists of tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "block"), [("fp16", 0), ("fp16", 64), ("int8", 256), ("fp8_e4m3", 64)]
)
def test_lists_are_one_tensor(isa: str, name: str, block: int, dtype: torch.dtype) -> None:
    """Tensors of any length, empty ones too, at any address, from any element on: as if they were one."""
    codec = core.Codec(name, block)
    lengths = (0, 1, 3, 0, 700, 64, 5, 0, 1300, 2, 0)
    memory = numbers(sum(lengths) + len(lengths), 1).to(dtype)
    tensors, at = [], 0
    for length in lengths:
        tensors.append(memory[at + 1 : at + 1 + length])  # odd addresses
        at += length + 1
    whole = torch.cat(tensors)
    for first, count in (
        (0, len(whole)),
        (1, 100),
        (3, 701),
        (704, 300),
        (len(whole) - 1, 1),
        (5, 0),
    ):
        one, many = Encoded(codec, count), Encoded(codec, count)
        outputs = [torch.full_like(t, 7) for t in tensors]
        core.transcode(codec, count, inputs=[whole[first:]], encoded=one.pair, factor=0.7)
        core.transcode(
            codec,
            count,
            inputs=tensors,
            first=first,
            encoded=many.pair,
            factor=0.7,
            outputs=outputs,
        )
        assert torch.equal(one.values, many.values)
        assert torch.equal(one.scales, many.scales)
        written = torch.cat(outputs)
        assert torch.equal(written[first : first + count], one.decoded().to(dtype))
        assert (written[:first] == 7).all()
        assert (written[first + count :] == 7).all()


def test_in_place(isa: str) -> None:
    """Outputs may be the inputs."""
    codec, values = core.Codec("int8", 64), numbers(1000, 4)
    wire, expected = Encoded(codec, 1000), torch.empty(1000)
    core.transcode(codec, 1000, inputs=[values], encoded=wire.pair, outputs=[expected])
    core.transcode(codec, 1000, inputs=[values], encoded=wire.pair, outputs=[values])
    assert torch.equal(values, expected)


# ---- rounding by chance ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "block"), CODECS)
def test_rounding_by_chance(isa: str, name: str, block: int) -> None:
    """A neighbour in the format, exact values themselves; the mean over many seeds is the value."""
    codec, count, draws = core.Codec(name, block), 640, 200
    values = torch.randn(count, generator=G(8))
    values[:64] = (
        torch.arange(64).float()[torch.arange(64) % 64] / 64
    )  # exact in no block's int8 alone
    wire, output = Encoded(codec, count), torch.empty(count)
    total = torch.zeros(count, dtype=torch.float64)
    nearest = torch.empty(count)
    core.transcode(codec, count, inputs=[values], encoded=wire.pair, outputs=[nearest])
    down, up = reference_scales(codec, values)
    spacing = up
    if name != "int8":
        exponent = (torch.frexp(values * down).exponent - 1).clamp(min=LEAST_EXPONENT[name])
        spacing = up * torch.ldexp(torch.ones(count), exponent - MANTISSA_BITS[name])
    for seed in range(draws):
        core.transcode(
            codec,
            count,
            inputs=[values],
            encoded=wire.pair,
            outputs=[output],
            stochastic=True,
            seed=seed << 31,
        )
        assert ((output - values).abs() < spacing * 1.0001).all()
        total += output
    exact = nearest == values
    assert torch.equal((total / draws)[exact], values.double()[exact])
    # Of the mean's error in units of its own deviation, at most spacing / 2 / sqrt(draws).
    error = (total / draws - values.double()) / (spacing.double() / 2 / draws**0.5)
    assert error.abs().max() < 5
    assert abs(float(error.mean())) < 5 / count**0.5


def test_chance_depends_on_the_seed_and_the_place_alone(isa: str) -> None:
    """Parts of a tensor get the bits of the whole; another seed gives others."""
    codec, values = core.Codec("fp16"), torch.randn(4096, generator=G(2))
    whole, part, other = Encoded(codec, 4096), Encoded(codec, 1024), Encoded(codec, 4096)
    core.transcode(codec, 4096, inputs=[values], encoded=whole.pair, stochastic=True, seed=5)
    core.transcode(
        codec, 1024, inputs=[values], first=2048, encoded=part.pair, stochastic=True, seed=5
    )
    core.transcode(
        codec, 4096, inputs=[values], encoded=other.pair, stochastic=True, seed=5 + 2**40
    )
    assert torch.equal(whole.values[4096:6144], part.values[:2048])
    assert not torch.equal(whole.values, other.values)


def test_chance_goes_on_beyond_4_gi_elements(isa: str) -> None:
    """Numbers have 64 bits: across a multiple of 2^32 parts get the bits of the whole, behind it nothing repeats."""
    codec, count, over = core.Codec("fp16"), 200, 2**32
    # The list is 2^32 elements long, and more; of its memory, which all its tensors share, little is read.
    memory = torch.randn(2**20, generator=G(3)).repeat(4)
    long = [memory] * (over // len(memory) + 1)

    def encoded(first: int, count: int) -> torch.Tensor:
        wire = Encoded(codec, count)
        core.transcode(
            codec, count, inputs=long, first=first, encoded=wire.pair, stochastic=True, seed=9
        )
        return wire.values[: 2 * count]

    for start in (over - 100, over - 99, over - 1):
        left = over - start
        whole = encoded(start, count)
        assert torch.equal(whole[: 2 * left], encoded(start, left))
        assert torch.equal(whole[2 * left :], encoded(over, count - left))
    assert not torch.equal(encoded(0, count), encoded(over, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "block"), CODECS)
def test_infinite_factors_and_divisors(isa: str, name: str, block: int, dtype: torch.dtype) -> None:
    """What no element is (a vector's lanes behind the last one) is in no count, scale or output."""
    codec = core.Codec(name, block)
    for count in (1, 5, 65, 1023):
        values = torch.ones(count, dtype=dtype)
        tensors = list(values.split(3))  # each has such lanes behind it
        wire, output = Encoded(codec, count), torch.empty(count)
        counts = core.transcode(codec, count, inputs=tensors, factor=torch.inf, encoded=wire.pair)
        core.transcode(codec, count, wires=[wire.pair], outputs=[output])
        assert (counts.values, counts.non_finite) == (count, count)
        assert (counts.overflows, counts.underflows, counts.squares) == (0, 0, 0)
        assert not output.isfinite().any()
        assert output.isnan().all() == (block > 0 or name == "fp8_e4m3")
        # Infinities divided by another are NaN; what is finite, zero.
        counts = core.transcode(codec, count, inputs=tensors, divisor=torch.inf, encoded=wire.pair)
        core.transcode(codec, count, wires=[wire.pair], outputs=[output])
        assert (counts.values, counts.non_finite, counts.squares) == (count, 0, 0)
        assert torch.equal(output, torch.zeros(count))


def test_negative_divisor(isa: str) -> None:
    """Which does not change which magnitude is a block's largest, or what is beyond the format's range."""
    values = numbers(300, 5) * 1e6
    for name, block in CODECS:
        codec, wire, output = (
            core.Codec(name, block),
            Encoded(core.Codec(name, block), 300),
            torch.empty(300),
        )
        counts = core.transcode(
            codec, 300, inputs=[values], divisor=-3, encoded=wire.pair, outputs=[output]
        )
        mirrored, opposite = Encoded(codec, 300), torch.empty(300)
        other = core.transcode(
            codec, 300, inputs=[values], divisor=3, encoded=mirrored.pair, outputs=[opposite]
        )
        assert torch.equal(output, -opposite)
        assert torch.equal(wire.scales, mirrored.scales)
        assert (counts.overflows, counts.underflows) == (other.overflows, other.underflows)


# ---- instruction sets, arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(("name", "block"), CODECS)
def test_instruction_sets_agree(name: str, block: int, stochastic: bool) -> None:
    """To the bit, also for random bit patterns as floats."""
    codec, count = core.Codec(name, block), 4777
    patterns = torch.randint(0, 256, (4 * count,), dtype=torch.uint8, generator=G(6)).view(
        torch.float32
    )
    patterns = torch.where(
        torch.rand(count, generator=G(7)) < 0.999, patterns.nan_to_num(1, 2, 3), patterns
    )
    found = []
    for name_of_set in INSTRUCTION_SETS:
        if not core.set_instruction_set(name_of_set):
            continue
        wire, residual, output = Encoded(codec, count), torch.ones(count), torch.empty(count)
        other = Encoded(codec, count)
        core.transcode(codec, count, inputs=[patterns], factor=0.3, encoded=other.pair)
        counts = core.transcode(codec, count, wires=[other.pair], inputs=[patterns], own=1, residual=residual,
                                encoded=wire.pair, outputs=[output], stochastic=stochastic, seed=3)  # fmt: skip
        exact = {
            name: getattr(counts, name)
            for name in ("values", "overflows", "underflows", "non_finite")
        }
        found.append(
            (
                exact,
                wire.values,
                wire.scales.nan_to_num(5),
                residual.view(torch.int32),
                output.nan_to_num(5),
            )
        )
    assert len(found) > 1
    for one in found[1:]:
        assert one[0] == found[0][0]
        assert all(torch.equal(a, b) for a, b in zip(one[1:], found[0][1:], strict=True))


def test_streaming_changes_nothing(isa: str) -> None:
    """Values past the caches are the same values."""
    for name, block in CODECS:
        codec, values = core.Codec(name, block), numbers(8192, 4)
        memory = torch.zeros(2, 8192 * 4 + 64, dtype=torch.uint8)
        wires = []
        for row, stream in zip(memory, (False, True), strict=True):
            at = -row.data_ptr() % 64
            wire = (row[at : at + 8192 * codec.value_bytes], torch.zeros(codec.scales(8192)))
            core.transcode(codec, 8192, inputs=[values], encoded=wire, stream=stream)
            wires.append(wire)
        assert torch.equal(wires[0][0], wires[1][0])
        assert torch.equal(wires[0][1], wires[1][1])


@pytest.mark.parametrize(
    ("name", "block", "words"),
    [
        ("int8", 0, "int8 needs a block"),
        ("fp32", 64, "fp32 has no scales"),
        ("fp16", 63, "multiple of 64"),
        ("fp16", 8192, "up to 4096"),
        ("fp16", -64, "multiple of 64"),
        ("fp4", 64, "unknown wire format 'fp4'"),
    ],
)
def test_bad_codecs(name: str, block: int, words: str) -> None:
    """Are refused in words."""
    with pytest.raises(InvalidArgument, match=words):
        core.Codec(name, block)


def test_bad_arguments() -> None:
    """Too short, of another dtype, or nothing at all."""
    codec, x = core.Codec("fp16"), torch.ones(8)
    wire = Encoded(codec, 8)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("nothing to sum", {}),
        ("not 9", {"inputs": [x], "count": 9}),
        ("16 encoded bytes", {"inputs": [x], "encoded": (wire.values[:15], wire.scales)}),
        ("as uint8", {"inputs": [x], "encoded": (x, wire.scales)}),
        ("float16 together|float32 together", {"inputs": [x, x.half()]}),
        ("residual", {"inputs": [x], "residual": x[:7]}),
        ("only float32, float16 and bfloat16", {"inputs": [x.double()]}),
        ("own 2 among 0", {"inputs": [x], "own": 2}),
    ]
    for words, arguments in cases:
        count = arguments.pop("count", 8)
        with pytest.raises(InvalidArgument, match=words):
            core.transcode(codec, count, **arguments)
