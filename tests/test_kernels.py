"""The CPU kernels by themselves: every dtype and op, every instruction set, every odd bit pattern."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import pytest
import torch
from harness import INSTRUCTION_SETS, G

from pycomm.errors import InvalidArgument
from pycomm.extension import core

pytestmark = pytest.mark.usefixtures("instruction_set_restored")

#: The real dtypes and their ops, as the extension declares them.
TABLE: Final[dict[str, list[str]]] = {
    dtype: ops for dtype, ops in core.support_table().items() if not dtype.startswith("complex")
}
PAIRS: Final = [(dtype, op) for dtype, ops in TABLE.items() for op in ops]
COUNTS: Final = (0, 1, 15, 16, 17, 63, 64, 65, 1000)
OPS: Final = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor", "premul_sum")
NUMBER_OPS: Final = OPS[:5]
BITWISE_OPS: Final = OPS[5:8]
HALVES: Final = (torch.float16, torch.bfloat16)
FLOAT8S: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
SMALL_FLOATS: Final = (*HALVES, *FLOAT8S)
FLOATS: Final = (*HALVES, torch.float32, torch.float64)
#: Of premul_sum, one per source: no product with them is exact.
SCALES: Final = (0.1, -1.7, 3.3, 1e-3, 0.7, -0.3, 2.1, 1 / 3)


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def random_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bit patterns, read as elements: NaN, infinity and subnormals among them."""
    size = count * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=G(seed)).view(dtype)


def numbers(count: int, dtype: torch.dtype, op: str, seed: int) -> torch.Tensor:
    """Integers of any sign that the dtype has: any at all if op is exact for it, else small ones."""
    if dtype.is_floating_point or (op == "avg" and dtype.itemsize == 8):
        low = -3 if dtype.is_signed else 0
        return torch.randint(low, 4, (count,), generator=G(seed)).to(dtype)
    return random_bits(count, dtype, seed)


STEPS: Final[dict[str, np.ufunc]] = {
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def reference(sources: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction in source order by numpy: wrapping integers, small floats in float32."""
    dtype = sources[0].dtype
    arrays = [(s.float() if dtype in SMALL_FLOATS else s).numpy() for s in sources]
    if dtype is torch.bool:  # any byte but 0 is true
        arrays = [array.view(np.uint8) != 0 for array in arrays]
    if op == "avg" and not dtype.is_floating_point:
        arrays = [a.astype(np.int64 if dtype.is_signed else np.uint64) for a in arrays]
    if op == "premul_sum":
        pairs = zip(arrays, SCALES, strict=False)
        arrays = [array * array.dtype.type(scale) for array, scale in pairs]
    step = STEPS.get(op, np.add)
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = step(total, array)
    if op == "avg" and dtype.is_floating_point:
        total = total / total.dtype.type(len(sources))
    elif op == "avg":  # truncated
        magnitude = np.abs(total) // total.dtype.type(len(sources))
        total = np.where(total < 0, -magnitude, magnitude)
    return torch.from_numpy(total).to(dtype)


def reduced(sources: list[torch.Tensor], op: str) -> torch.Tensor:
    """What the kernels make of the sources."""
    output = torch.empty_like(sources[0])
    core.reduce(output, sources, op, scales_of(sources, op))
    return output


def scales_of(sources: list[torch.Tensor], op: str) -> tuple[float, ...] | None:
    """The scales that go with an op."""
    return SCALES[: len(sources)] if op == "premul_sum" else None


def bits(t: torch.Tensor, any_nan: bool = True) -> torch.Tensor:
    """The bits of a tensor; every NaN, whatever its payload, as the same ones if `any_nan`."""
    if any_nan and t.is_floating_point():
        t = torch.where(t.isnan(), torch.full_like(t, torch.nan), t)
    return t.contiguous().view(torch.uint8)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, NaN payloads aside."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def refused(dtype: torch.dtype) -> set[str]:
    """The ops that a dtype does not have."""
    if dtype.is_complex:
        return {"min", "max", "product", *BITWISE_OPS}
    if dtype.is_floating_point:
        return set(BITWISE_OPS)
    return {"avg", "premul_sum"} if dtype is torch.bool else {"premul_sum"}


def test_the_table_covers_every_pair() -> None:
    """Every pair of dtype and op is either in the table or refused."""
    table = core.support_table()
    assert len(table) == 17
    for name, ops in table.items():
        dtype = dtype_of(name)
        assert set(OPS) - refused(dtype) == set(ops)
        x = torch.ones(3).to(dtype)
        for op in refused(dtype):
            before = x.clone()
            with pytest.raises(InvalidArgument, match=f"{name} has no op {op}"):
                core.reduce(x, [x, x], op, [1, 1])
            assert torch.equal(x.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("sources", [1, 2, 3, 8])
def test_every_pair_at_every_length(isa: str, sources: int) -> None:
    """All dtypes and ops, lengths around a vector's and cache line's, equal numpy's bit for bit."""
    wrong = []
    for name, op in PAIRS:
        dtype = dtype_of(name)
        inputs = [numbers(max(COUNTS), dtype, op, seed) for seed in range(sources)]
        right = reference(inputs, op)
        for count in COUNTS:
            if not equal(reduced([x[:count] for x in inputs], op), right[:count]):
                wrong.append(f"{name} {op} {count}")
    assert wrong == []


def test_every_pair_at_length(isa: str) -> None:
    """Many vectors and an odd rest."""
    wrong = []
    for name, op in PAIRS:
        inputs = [numbers(100_003, dtype_of(name), op, seed) for seed in range(3)]
        for sources in (2, 3):
            if not equal(reduced(inputs[:sources], op), reference(inputs[:sources], op)):
                wrong.append(f"{name} {op} {sources}")
    assert wrong == []


def test_unaligned_memory(isa: str) -> None:
    """Any offset of sources and output, and nothing beyond the output's ends is written."""
    wrong = []
    for name, op in PAIRS:
        dtype = dtype_of(name)
        inputs = [numbers(300, dtype, op, seed) for seed in range(3)]
        for offset, count in ((1, 17), (3, 64), (5, 200), (7, 65)):
            sources = [x[offset + k : offset + k + count] for k, x in enumerate(inputs)]
            frame = numbers(300, dtype, op, 9)
            before = frame.view(torch.uint8).clone().view(dtype)  # a bool's clone is 0s and 1s
            core.reduce(frame[offset : offset + count], sources, op, scales_of(sources, op))
            good = equal(frame[offset : offset + count], reference(sources, op))
            good &= equal(frame[:offset], before[:offset])
            good &= equal(frame[offset + count :], before[offset + count :])
            if not good:
                wrong.append(f"{name} {op} {offset} {count}")
    assert wrong == []


def test_the_output_may_be_a_source(isa: str) -> None:
    """Reducing in place is right, whichever source the output is."""
    wrong = []
    for name, op in PAIRS:
        inputs = [numbers(77, dtype_of(name), op, seed) for seed in range(3)]
        right = reference(inputs, op)
        for place in range(3):
            copies = [x.clone() for x in inputs]
            core.reduce(copies[place], copies, op, scales_of(copies, op))
            if not equal(copies[place], right):
                wrong.append(f"{name} {op} {place}")
    assert wrong == []


def test_instruction_sets_give_the_same_bits() -> None:
    """Random bit patterns, and so NaN, infinities and subnormals, reduce alike on all sets.

    Min and max choose one of their operands, so there even a NaN's payload must be the same; for
    16-bit floats it goes through a conversion, which hardware does in its own way.
    """
    usable = [name for name in INSTRUCTION_SETS if core.set_instruction_set(name)]
    if len(usable) < 2:
        pytest.skip("this CPU has one instruction set only")
    wrong = []
    for name, op in PAIRS:
        dtype = dtype_of(name)
        for sources in (1, 2, 5):
            inputs = [random_bits(4099, dtype, seed) for seed in range(sources)]
            results = []
            for isa in usable:
                core.set_instruction_set(isa)
                results.append(reduced(inputs, op))
            any_nan = op not in ("min", "max") or dtype in HALVES
            for (one, a), (other, b) in pairwise(zip(usable, results, strict=True)):
                if not torch.equal(bits(a, any_nan), bits(b, any_nan)):
                    wrong.append(f"{name} {op} {sources}: {one} and {other}")
    assert wrong == []


# 16-bit and 8-bit floats


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 patterns."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def all_bytes(dtype: torch.dtype) -> torch.Tensor:
    """All 256 patterns."""
    return torch.arange(256).to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
@pytest.mark.parametrize("op", NUMBER_OPS)
def test_one_source_is_returned_as_it_is(isa: str, dtype: torch.dtype, op: str) -> None:
    """Every pattern survives the way to float32 and back; a NaN stays some NaN."""
    x = all_bytes(dtype) if dtype.itemsize == 1 else all_halves(dtype)
    assert equal(reduced([x], op), x)


@pytest.mark.parametrize("dtype", FLOAT8S)
def test_every_two_float8s_against_torch(isa: str, dtype: torch.dtype) -> None:
    """Every pattern with every other: float32 arithmetic and one rounding, like torch's.

    Averages of neighbours are all the ties; sums and products overflow and underflow.
    """
    x, y = (
        t.contiguous() for t in torch.meshgrid(all_bytes(dtype), all_bytes(dtype), indexing="ij")
    )
    a, b = x.float(), y.float()
    assert equal(reduced([x, y], "sum"), (a + b).to(dtype))
    assert equal(reduced([x, y], "product"), (a * b).to(dtype))
    assert equal(reduced([x, y], "avg"), ((a + b) / 2).to(dtype))
    scales = [torch.tensor(s) for s in SCALES[:2]]
    assert equal(reduced([x, y], "premul_sum"), (a * scales[0] + b * scales[1]).to(dtype))
    for op, want in (("min", torch.minimum(a, b)), ("max", torch.maximum(a, b))):
        result = reduced([x, y], op)
        assert torch.equal(result.isnan(), want.isnan())
        assert torch.equal(result.float()[~want.isnan()], want[~want.isnan()])


@pytest.mark.parametrize("dtype", FLOAT8S)
def test_rounding_to_float8_is_that_of_torch(isa: str, dtype: torch.dtype) -> None:
    """Any float32 at all, grid points, all ties and their neighbours among them, rounds as torch's.

    A float32 is put together from its octal digits, which are exact in both dtypes, by premul_sum.
    """
    coarse = torch.arange(16, 32) << 19  # 24-bit mantissas: grid points, ties and half ties
    edges = torch.cat([coarse - 1, coarse, coarse + 1]).clamp(max=2**24 - 1)
    dense = torch.randint(2**23, 2**24, (1000,), generator=G(1))
    mantissas = torch.cat([edges, dense])
    digits = [((mantissas >> 3 * k) & 7).float().to(dtype) for k in reversed(range(8))]
    output = torch.empty(len(mantissas), dtype=dtype)
    for exponent in (*range(-45, 0), -149, -126, -100, 0, 50, 104):
        for sign in (1.0, -1.0):
            unit = sign * 2.0**exponent
            core.reduce(output, digits, "premul_sum", [8**k * unit for k in reversed(range(8))])
            want = (mantissas.double() * unit).float().to(dtype)
            assert torch.equal(output.view(torch.uint8), want.view(torch.uint8)), exponent
    one = torch.ones(67).to(dtype)
    for value in (0.0, -0.0, torch.inf, -torch.inf, 1e300, -1e300, torch.nan, -torch.nan):
        output = torch.empty_like(one)
        core.reduce(output, [one], "premul_sum", [value])
        assert equal(output, torch.full((67,), value, dtype=torch.float64).float().to(dtype)), value


@pytest.mark.parametrize("dtype", FLOAT8S)
def test_sums_of_float8s_are_rounded_once(isa: str, dtype: torch.dtype) -> None:
    """The float32 sum in source order, then one rounding."""
    for sources in (2, 3, 8):
        inputs = [torch.randn(5003, generator=G(seed)).to(dtype) for seed in range(sources)]
        total = inputs[0].float()
        for x in inputs[1:]:
            total += x.float()
        assert equal(reduced(inputs, "sum"), total.to(dtype))
        assert equal(reduced(inputs, "avg"), (total / sources).to(dtype))
    one, small = torch.ones(40), torch.full((40,), torch.finfo(dtype).eps / 4)
    ten = reduced([one.to(dtype)] + [small.to(dtype)] * 8, "sum")  # each alone would be lost
    assert equal(ten, (one + 2 * torch.finfo(dtype).eps).to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_against_torch(isa: str, dtype: torch.dtype) -> None:
    """Every pattern with each of a few partners: float32 arithmetic and one rounding, like torch's."""
    x = all_halves(dtype)
    finfo = torch.finfo(dtype)
    partners = [0.0, -0.0, 1.0, -1.5, 3.0, finfo.max, finfo.tiny, finfo.smallest_normal / 8]
    partners += [torch.inf, -torch.inf, finfo.eps]
    for value in partners:
        y = torch.full_like(x, value)
        a, b = x.float(), y.float()
        assert equal(reduced([x, y], "sum"), (a + b).to(dtype)), value
        assert equal(reduced([x, y], "product"), (a * b).to(dtype)), value
        assert equal(reduced([x, y], "avg"), ((a + b) / 2).to(dtype)), value
        ordered = x[~x.isnan() & (x != 0)], y[~x.isnan() & (x != 0)]
        for op, want in (("min", torch.minimum(*ordered)), ("max", torch.maximum(*ordered))):
            assert equal(reduced(list(ordered), op), want), (op, value)


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_of_halves_are_rounded_once(isa: str, dtype: torch.dtype) -> None:
    """Random values over several sources: the float32 sum in source order, then one rounding."""
    for sources in (2, 3, 8):
        inputs = [torch.randn(5003, generator=G(seed)).to(dtype) for seed in range(sources)]
        total = inputs[0].float()
        for x in inputs[1:]:
            total += x.float()
        assert equal(reduced(inputs, "sum"), total.to(dtype))
        assert equal(reduced(inputs, "avg"), (total / sources).to(dtype))
    one, small = torch.ones(40, dtype=dtype), torch.full((40,), torch.finfo(dtype).eps / 4)
    ten = reduced([one] + [small.to(dtype)] * 8, "sum")  # each alone would be rounded away
    assert equal(ten, one + 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", HALVES)
def test_ties_round_to_even(isa: str, dtype: torch.dtype) -> None:
    """Half way between two 16-bit values, up and down, normal and subnormal, at the overflow."""
    finfo = torch.finfo(dtype)
    grid = all_halves(dtype)
    grid = grid[grid.isfinite() & (grid.abs() < finfo.max)]
    steps = (grid.view(torch.int16) + 1).view(dtype)  # the next one away from zero
    assert equal(reduced([grid, steps], "avg"), ((grid.float() + steps.float()) / 2).to(dtype))
    top = torch.full((33,), finfo.max, dtype=dtype)
    ulp = top.float() - (top.view(torch.int16) - 1).view(dtype).float()
    below, at = ulp / 2 * (1 - finfo.eps), ulp / 2
    assert equal(reduced([top, below.to(dtype)], "sum"), top)
    assert reduced([top, at.to(dtype)], "sum").isinf().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_and_subnormals(isa: str, dtype: torch.dtype) -> None:
    """inf - inf is NaN, infinities win, and subnormals are not flushed to zero."""
    inf, one = torch.full((37,), torch.inf, dtype=dtype), torch.ones(37, dtype=dtype)
    assert reduced([inf, -inf], "sum").isnan().all()
    assert equal(reduced([one, inf], "sum"), inf)
    assert equal(reduced([one, inf, -inf], "min"), -inf)
    assert equal(reduced([one, inf, -inf], "max"), inf)
    least = torch.zeros(37, dtype=dtype)
    raw = least.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    raw.fill_(1)
    assert (least != 0).all()
    assert equal(reduced([least, least], "sum"), least + least)
    assert equal(reduced([least, least, least], "avg"), least)
    assert equal(reduced([least, one], "product"), least)
    assert equal(reduced([least, one], "min"), least)


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S])
def test_nan_wins_min_and_max_from_any_place(isa: str, dtype: torch.dtype) -> None:
    """A NaN in any source, of any sign and payload, makes the result NaN."""
    for op in ("min", "max"):
        for place in range(4):
            for value in (torch.nan, -torch.nan):
                values = [torch.full((43,), float(k)) for k in range(4)]
                values[place][::2] = value
                sources = [x.to(dtype) for x in values]
                result = reduced(sources, op)
                assert result[::2].isnan().all()
                assert (result[1::2].float() == (0 if op == "min" else 3)).all()


def test_averages_of_integers_do_not_overflow(isa: str) -> None:
    """The mean of int8 values is right although their sum does not fit, and is truncated."""
    top, low = torch.full((70,), 127, dtype=torch.int8), torch.full((70,), -128, dtype=torch.int8)
    assert equal(reduced([top] * 3, "avg"), top)
    assert equal(reduced([low] * 64, "avg"), low)
    assert (reduced([low, top, top * 0], "avg") == 0).all()  # -1 / 3
    assert (reduced([low, top - 1], "avg") == -1).all()
    assert (reduced([low, top - 2], "avg") == -1).all()  # -3 / 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_of_both_signs(isa: str, dtype: torch.dtype) -> None:
    """Zeros compare equal, so min and max give the last one's sign."""
    plus, minus = torch.zeros(41, dtype=dtype), -torch.zeros(41, dtype=dtype)
    for op in ("min", "max"):
        assert equal(reduced([plus, minus], op), minus)
        assert equal(reduced([minus, plus], op), plus)


@pytest.mark.parametrize(
    "name", [n for n, ops in core.support_table().items() if "premul_sum" in ops]
)
def test_premul_sum_against_torch(isa: str, name: str) -> None:
    """Products are rounded before they are added: plain torch arithmetic gives the same bits."""
    dtype = dtype_of(name)
    for sources in (1, 2, 3, 8):
        for count in (0, 1, 65, 5003):
            inputs = [
                torch.randn(count, 2, generator=G(s), dtype=torch.float64) for s in range(sources)
            ]
            if dtype.is_complex:
                inputs = [torch.view_as_complex(x).to(dtype) for x in inputs]
                parts = [torch.view_as_real(x) for x in inputs]
            else:
                parts = inputs = [x.flatten().to(dtype) for x in inputs]
            wide = torch.float64 if name in ("float64", "complex128") else torch.float32
            total = torch.zeros(())
            for k, x in enumerate(parts):
                product = x.to(wide) * torch.tensor(SCALES[k], dtype=wide)
                total = total + product if k else product
            want = total.to(parts[0].dtype)
            got = reduced(inputs, "premul_sum")
            assert equal(torch.view_as_real(got) if dtype.is_complex else got, want)


def test_premul_sum_needs_its_scales() -> None:
    """One for each source, no more and no less."""
    x = torch.ones(4)
    for scales in (None, [], [1.0], [1.0] * 3):
        with pytest.raises(InvalidArgument, match="scale"):
            core.reduce(x, [x, x], "premul_sum", scales)


def test_complex_sums(isa: str) -> None:
    """Complex numbers are added and averaged by components."""
    for dtype in (torch.complex64, torch.complex128):
        x, y = (torch.randn(1001, generator=G(seed), dtype=dtype) for seed in range(2))
        assert torch.equal(reduced([x, y], "sum"), x + y)
        assert torch.equal(reduced([x, y], "avg"), (x + y) / 2)


def test_every_two_bytes_as_bools(isa: str) -> None:
    """Any byte but 0 is true; the result is 0 or 1, also of one source."""
    x, y = (t.contiguous() for t in torch.meshgrid(*[all_bytes(torch.uint8)] * 2, indexing="ij"))
    a, b = x != 0, y != 0
    wants = {
        "sum": a | b,
        "max": a | b,
        "bor": a | b,
        "product": a & b,
        "min": a & b,
        "band": a & b,
    }
    for op, want in {**wants, "bxor": a ^ b}.items():
        result = reduced([x.view(torch.bool), y.view(torch.bool)], op)
        assert torch.equal(result.view(torch.uint8), want.view(torch.uint8)), op
        alone = reduced([x.view(torch.bool)], op)
        assert torch.equal(alone.view(torch.uint8), a.view(torch.uint8)), op


def test_sources_must_fit() -> None:
    """No sources, sources of another size or dtype and unknown instruction sets are refused."""
    out = torch.zeros(4)
    for sources in ([], [torch.ones(5)], [torch.ones(4, dtype=torch.float64)], [out] * 65):
        with pytest.raises(ValueError, match=r"sources|elements|dtypes"):
            core.reduce(out, sources, "sum")
    assert not core.set_instruction_set("avx1024")
