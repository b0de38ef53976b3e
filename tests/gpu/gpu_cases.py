"""The kernels' results on a device, against the CPU's kernels bit by bit and against sums in float64.

A case is a codec, a dtype, a length and a way; what else there is (lists of tensors at odd addresses, residual,
rounding by chance, ...) is drawn by the case's number, so that a case is the same wherever it runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from gpu_device import StandIn

FORMATS: Final[dict[str, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
#: Mantissa bits, least normal exponent.
PRECISION: Final = {
    "fp32": (23, -126),
    "fp16": (10, -14),
    "bf16": (7, -126),
    "fp8_e4m3": (3, -6),
    "fp8_e5m2": (2, -14),
}
CODECS: Final = [
    *((name, 0) for name in FORMATS if name != "int8"),
    *((name, block) for name in FORMATS if name != "fp32" for block in (64, 192, 1024, 4096)),
]
NAMES: Final = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
DTYPES: Final = tuple(NAMES)
COUNTS: Final = (0, 1, 7, 15, 63, 64, 65, 255, 1025, 5000, 70001)
WAYS: Final = ("encode", "reduce", "decode", "sum")
KINDS: Final = ("tame", "tame", "ties", "huge", "tiny", "any bits", "one infinity")
RANKS: Final = (2, 3, 8, 2, 5, 64)


@dataclass(frozen=True)
class Case:
    """One call of transcode."""

    number: int
    format: str
    block: int
    dtype: torch.dtype
    count: int
    way: str
    ranks: int
    kind: str
    split: bool
    in_place: bool
    residual: bool
    residual_offset: int
    outputs: bool
    first: int
    factor: float
    divisor: float
    infinite: bool
    stochastic: bool

    @property
    def owns(self) -> bool:
        """Whether tensors are read."""
        return self.way != "decode"

    @property
    def encodes(self) -> bool:
        """Whether a wire is written."""
        return self.way in ("encode", "reduce")


def cases(counts: Sequence[int] = COUNTS, draws: int = 1) -> Iterator[Case]:
    """All of them, in order."""
    number = 0
    for name, block in CODECS:
        for dtype in DTYPES:
            for count in counts:
                for way in WAYS:
                    for _ in range(draws):
                        yield draw(number, name, block, dtype, count, way)
                        number += 1


def draw(number: int, name: str, block: int, dtype: torch.dtype, count: int, way: str) -> Case:
    """A case; its number decides what is left open."""
    chance = random.Random(number)
    encodes = way in ("encode", "reduce")
    return Case(
        number, name, block, dtype, count, way,
        ranks=1 if way == "encode" else chance.choice(RANKS if count <= 5000 else RANKS[:3]),
        kind=chance.choice(KINDS),
        split=chance.random() < 0.6,
        in_place=chance.random() < 0.5,
        residual=way != "decode" and chance.random() < 0.7,
        residual_offset=chance.choice((0, 0, 3)),
        outputs=not encodes or chance.random() < 0.6,
        first=chance.choice((0, 37, 64)),
        factor=chance.choice((1.0, 1.0, 1 / 3, 1 / 3, float("inf"))),
        divisor=chance.choice((1.0, 1.0, 3.0, 3.0, -3.0)),
        infinite=chance.random() < 0.5,
        stochastic=chance.random() < 0.5,
    )  # fmt: skip


# ---- data ---------------------------------------------------------------------------------------


def numbers(count: int, kind: str, seed: int) -> torch.Tensor:
    """Floats of a kind."""
    chance = torch.Generator().manual_seed(seed)
    tame = torch.randn(count, generator=chance)
    if kind == "ties":
        return torch.ldexp((tame * 100).round(), torch.randint(-10, 1, (count,), generator=chance))
    if kind in ("huge", "tiny"):
        return tame * (1e37 if kind == "huge" else 1e-38)
    if kind == "any bits":
        bits = torch.randint(-(2**31), 2**31, (count,), generator=chance).to(torch.int32)
        return torch.where(tame > -1, tame, bits.view(torch.float32))
    if kind == "one infinity" and count > 0:
        tame[seed % count] = float("-inf") if seed % 2 else float("nan")
    return tame


@dataclass
class Encoded:
    """Values and scales as they travel, each with guards behind them, in the memory of a device."""

    codec: Any
    count: int
    values: torch.Tensor = field(init=False)
    scales: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.values = torch.full((self.count * self.codec.value_bytes + 32,), 0xAA).byte()
        self.scales = torch.full((self.codec.scales(self.count) + 1,), -7.0)

    def pair(self, device: StandIn | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """These, or copies on a device."""
        if device is None:
            return self.values, self.scales
        return device.put(self.values), device.put(self.scales)

    def elements(self, values: torch.Tensor) -> torch.Tensor:
        """In the format's dtype, without the guard."""
        return values[: self.count * self.codec.value_bytes].view(FORMATS[self.codec.format])

    def scale_of_each(self, scales: torch.Tensor) -> torch.Tensor:
        """Of every value, 1 without scales."""
        if self.codec.block == 0:
            return torch.ones(self.count)
        return scales[:-1].repeat_interleave(self.codec.block)[: self.count]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, but that any NaN stands for any other."""
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.dtype.is_floating_point:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    if a.dtype != torch.float64:  # widening is exact
        a, b = a.float(), b.float()
    nan = a.isnan() & b.isnan()
    word = torch.int64 if a.dtype == torch.float64 else torch.int32
    return torch.equal(a.masked_fill(nan, 0).view(word), b.masked_fill(nan, 0).view(word))


# ---- one call, twice ----------------------------------------------------------------------------


class Comparison:
    """A case's data, the CPU's call and the device's."""

    def __init__(self, core: Any, device: StandIn, case: Case) -> None:
        self.core, self.device, self.case = core, device, case
        self.codec = core.Codec(case.format, case.block)
        self.wires: list[Encoded] = []
        others = case.ranks - (1 if case.owns else 0)
        for rank in range(others):
            wire = Encoded(self.codec, case.count)
            # Of wires, only one in four is of the odd kind.
            part = numbers(
                case.count, case.kind if rank % 4 == 3 else "tame", case.number * 100 + rank
            )
            core.transcode(self.codec, case.count, inputs=[part], encoded=wire.pair())
            self.wires.append(wire)
        self.total = case.first + case.count + 5
        self.input = numbers(self.total, case.kind, case.number * 100 + 99).to(case.dtype)
        self.residual = numbers(case.count, "tame", case.number * 100 + 98) * 2**-4
        self.own = case.number % (others + 1) if case.owns else 0
        chance = random.Random(case.number + 1)
        self.parts: list[tuple[int, int]] = []  # (offset, length) of each tensor
        left = self.total
        while left > 0:
            length = min(left, chance.randrange(1, 900)) if case.split else left
            self.parts.append((chance.choice((0, 0, 1, 3)), length))
            left -= length
        if case.split:
            self.parts.insert(len(self.parts) // 2, (0, 0))

    def tensors(self, device: StandIn | None) -> list[torch.Tensor]:
        """The list, on a device or on the CPU."""
        pieces = self.input.split([length for _, length in self.parts])
        if device is None:
            return [piece.clone() for piece in pieces]
        return [
            device.put(piece, offset) for piece, (offset, _) in zip(pieces, self.parts, strict=True)
        ]

    def call(self, device: StandIn | None) -> dict[str, Any]:
        """Runs it on a device, or on the CPU; returns all there is afterwards, on the CPU."""
        case = self.case
        result = Encoded(self.codec, case.count).pair(device) if case.encodes else None
        inputs = self.tensors(device) if case.owns else None
        outputs = (
            None if not case.outputs
            else inputs if inputs is not None and case.in_place
            else self.tensors(device)
        )  # fmt: skip
        residual = (
            self.residual.clone() if device is None
            else device.put(self.residual, case.residual_offset)
        )  # fmt: skip
        run = self.core.transcode if device is None else device.transcode
        counts = run(
            self.codec, case.count,
            wires=[wire.pair(device) for wire in self.wires],
            inputs=inputs, own=self.own, first=case.first, factor=case.factor,
            divisor=case.divisor, residual=residual if case.residual else None, encoded=result,
            outputs=outputs, infinite=case.infinite, stochastic=case.stochastic,
            seed=case.number * 2**31 + 5,
        )  # fmt: skip
        written = outputs if outputs is not None else [torch.zeros(0, dtype=case.dtype)]
        return {
            "values": None if result is None else result[0].cpu(),
            "scales": None if result is None else result[1].cpu(),
            "residual": residual.cpu(),
            "outputs": torch.cat([tensor.cpu() for tensor in written]),
            "counts": counts,
        }

    def differences(self) -> list[str]:
        """What is not as it has to be, in words."""
        expected, got = self.call(None), self.call(self.device)
        wrong = [
            f"{name} differs"
            for name in ("residual", "outputs")
            if not same(expected[name], got[name])
        ]
        if self.case.encodes:
            shape = Encoded(self.codec, self.case.count)
            if not same(shape.elements(expected["values"]), shape.elements(got["values"])):
                wrong.append("wire differs")
            if not same(expected["scales"], got["scales"]):
                wrong.append("scales differ")
            if not bool((got["values"][-32:] == 0xAA).all()):
                wrong.append("written behind the wire")
        wrong += self.different_counts(expected["counts"], got["counts"])
        if self.case.kind == "tame" and self.case.factor < 2 and self.case.count > 0:
            wrong += self.against_float64(got)
        return [f"{self.case}: {words}" for words in wrong]

    def different_counts(self, expected: Any, got: Any) -> list[str]:
        """Numbers exactly; sums of squares, which the CPU adds up in float, nearly."""
        wrong = []
        if self.case.encodes:
            for name in ("values", "overflows", "underflows", "non_finite"):
                if getattr(expected, name) != getattr(got, name):
                    wrong.append(f"{name}: {getattr(got, name)}, not {getattr(expected, name)}")
            for name in ("squares", "error_squares"):
                host, there = getattr(expected, name), getattr(got, name)
                near = abs(host - there) <= 1e-3 * there + 1e-36
                if not (near if host < 1e37 else there > 1e35):
                    wrong.append(f"{name}: {there}, not {host}")
        return wrong

    # ---- float64

    def exact_sum(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and the sum of magnitudes, divided, in float64; of the wires as torch decodes them."""
        case = self.case
        terms = [
            wire.elements(wire.values).to(torch.float32).double() * wire.scale_of_each(wire.scales).double()
            for wire in self.wires
        ]  # fmt: skip
        if case.owns:
            own = self.input[case.first : case.first + case.count].double() * float(
                torch.tensor(case.factor)
            )
            terms.append(own)
            if case.residual:
                terms.append(self.residual.double())
        stacked = torch.stack(terms)
        return stacked.sum(0) / case.divisor, stacked.abs().sum(0) / abs(case.divisor)

    def against_float64(self, got: dict[str, Any]) -> list[str]:
        """Whether what came out is the exact sum, within the roundings that there are."""
        case = self.case
        exact, magnitude = self.exact_sum()
        bound = magnitude * (case.ranks + 4) * 2**-24
        decoded, kept = None, torch.ones(case.count, dtype=torch.bool)
        wrong = []
        if case.encodes:
            shape = Encoded(self.codec, case.count)
            each = shape.scale_of_each(got["scales"]).double()
            decoded = shape.elements(got["values"]).to(torch.float32).double() * each
            if case.block == 0:
                kept = exact.abs() < 0.9 * largest(case.format)
            error = (decoded - exact).abs()
            encoding = rounding(case.format, exact.abs() + bound, each, case.stochastic)
            if not bool((error <= bound + encoding)[kept].all()):
                wrong.append("wire is not the float64 sum, rounded")
            if case.residual and not bool(
                ((decoded + got["residual"].double() - exact).abs() <= bound * 2)[kept].all()
            ):
                wrong.append("decoded + residual is not the float64 sum")
        if case.outputs:
            output = got["outputs"][case.first : case.first + case.count].double()
            target = exact if decoded is None else decoded
            mantissa, least = PRECISION[NAMES[case.dtype]]
            slack = target.abs() * 2.0 ** -(mantissa + 1) * 1.001 + 2.0 ** (least - mantissa)
            if not bool(((output - target).abs() <= slack + bound)[kept].all()):
                wrong.append("outputs are not the float64 sum, rounded")
        return wrong


def largest(name: str) -> float:
    """A format's largest value."""
    return 127.0 if name == "int8" else float(torch.finfo(FORMATS[name]).max)


def rounding(
    name: str, magnitude: torch.Tensor, scale: torch.Tensor, stochastic: bool
) -> torch.Tensor:
    """The most that encoding moves a value: half of its neighbours' distance, or all of it by chance."""
    if name == "int8":
        distance = scale * (1 + 2**-16) + magnitude * 2**-22
    else:
        mantissa, least = PRECISION[name]
        distance = magnitude * 2.0**-mantissa * 1.001 + scale * 2.0 ** (least - mantissa)
    return distance if stochastic else distance / 2


# ---- elementwise reduction ----------------------------------------------------------------------

SOURCES: Final = (1, 2, 3, 8, 16)
REDUCE_COUNTS: Final = (0, 1, 15, 17, 4099)


def reduce_differences(
    core: Any, device: StandIn, dtype: str, op: str, sources: int, count: int
) -> list[str]:
    """A reduction of random bits on the device and on the CPU, and, of tame floats, in float64."""
    kind: torch.dtype = getattr(torch, dtype)
    chance = torch.Generator().manual_seed(sources * 10000 + count)
    parts = []
    for _ in range(sources):
        bits = torch.randint(0, 256, (count * kind.itemsize,), dtype=torch.uint8, generator=chance)
        parts.append(bits % 2 == 1 if dtype == "bool" else bits.view(kind))
    scales = [0.1 * (s + 1) for s in range(sources)] if op == "premul_sum" else None
    expected = torch.zeros(count, dtype=kind)
    core.reduce(expected, parts, op, scales)
    there = [device.put(part) for part in parts]
    got = there[sources // 2] if count % 2 else device.put(torch.zeros(count, dtype=kind))
    device.reduce(got, there, op, scales)
    wrong = [] if same(expected, got.cpu()) else ["differs"]
    if dtype in ("float32", "float16", "bfloat16") and op in ("sum", "avg"):
        tame = [torch.randn(count, generator=chance).to(kind) for _ in range(sources)]
        output = device.put(torch.zeros(count, dtype=kind))
        device.reduce(output, [device.put(part) for part in tame], op)
        stacked = torch.stack([part.double() for part in tame]) / (sources if op == "avg" else 1)
        bound = stacked.abs().sum(0) * (sources + 1) * 2**-24
        bound += stacked.sum(0).abs() * torch.finfo(kind).eps / 2 * 1.01
        error = (output.cpu().double() - stacked.sum(0)).abs()
        if not bool((error <= bound + 2.0**-24 * torch.finfo(kind).eps).all()):
            wrong.append("is not the float64 sum")
    return [f"reduce {op} of {sources} x {count} {dtype}: {words}" for words in wrong]


# ---- beyond 32 bits -----------------------------------------------------------------------------


def large_differences(core: Any, device: StandIn, count: int) -> list[str]:
    """A tensor of more elements than 32 bits count, looked at through windows.

    It repeats a pattern whose length is no multiple of anything, so the CPU can have any part of it as a list.
    """
    codec, block, window = core.Codec("int8", 256), 256, 4096
    pattern = torch.randn(2**16 + 7, generator=torch.Generator().manual_seed(1)).half()
    turns = count // len(pattern) + 1
    tensor = device.put(pattern).repeat(turns)[:count]
    values = torch.empty(count, dtype=torch.uint8, device=device.torch_device)
    scales = torch.empty(codec.scales(count), device=device.torch_device)
    counts = device.transcode(
        codec, count, inputs=[tensor], encoded=(values, scales), stochastic=True, seed=3
    )
    wrong = [] if counts.values == count and counts.non_finite == 0 else ["counts are wrong"]
    output = torch.zeros_like(tensor)
    device.start_transcode(codec, count, wires=[(values, scales)], outputs=[output])
    device.reduce(tensor, [tensor, output], "sum")
    middles = [middle for middle in (2**31, 2**32) if window < middle < count - window]
    last = (count - window) // block * block
    for begin in (0, *(middle - window // 2 for middle in middles), last):
        wire = Encoded(codec, window)
        long = [pattern] * turns
        core.transcode(
            codec, window, inputs=long, first=begin, encoded=wire.pair(), stochastic=True, seed=3
        )
        decoded = torch.empty(window, dtype=torch.float16)
        core.transcode(codec, window, wires=[wire.pair()], outputs=[decoded])
        part = slice(begin, begin + window)
        if not torch.equal(wire.values[:window], values[part].cpu()):
            wrong.append(f"wire from {begin} on differs")
        if not torch.equal(decoded, output[part].cpu()):
            wrong.append(f"outputs from {begin} on differ")
        original = pattern[(begin + torch.arange(window)) % len(pattern)]
        if not torch.equal((original.float() + decoded.float()).half(), tensor[part].cpu()):
            wrong.append(f"sums from {begin} on differ")
    return [f"{count} elements: {words}" for words in wrong]
