"""The CPU kernels by themselves: every dtype and op, every instruction set, every odd bit pattern."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import pytest
import torch
from harness import G

from pycomm.extension import core

#: The real dtypes and their ops, as the extension declares them.
TABLE: Final[dict[str, list[str]]] = {
    dtype: ops for dtype, ops in core.support_table().items() if not dtype.startswith("complex")
}
PAIRS: Final = [(dtype, op) for dtype, ops in TABLE.items() for op in ops]
COUNTS: Final = (0, 1, 15, 16, 17, 63, 64, 65, 1000)
SETS: Final = ("avx512", "avx2", "generic")
OPS: Final = ("sum", "avg", "min", "max", "product")
HALVES: Final = (torch.float16, torch.bfloat16)
FLOATS: Final = (*HALVES, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """One thread for torch; the instruction set of before the test is in use again after it."""
    before, threads = core.instruction_set(), torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small
    yield
    torch.set_num_threads(threads)
    assert core.set_instruction_set(before)


@pytest.fixture(params=SETS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set, in use; skipped where the processor lacks it."""
    name: str = request.param
    if not core.set_instruction_set(name):
        pytest.skip(f"this CPU cannot run {name}")
    assert core.instruction_set() == name
    return name


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


def reference(sources: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction in source order by numpy: wrapping integers, 16-bit floats in float32."""
    dtype = sources[0].dtype
    arrays = [(s.float() if dtype in HALVES else s).numpy() for s in sources]
    if op == "avg" and not dtype.is_floating_point:
        arrays = [a.astype(np.int64 if dtype.is_signed else np.uint64) for a in arrays]
    step = {"min": np.minimum, "max": np.maximum, "product": np.multiply}.get(op, np.add)
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
    core.reduce(output, sources, op)
    return output


def bits(t: torch.Tensor, any_nan: bool = True) -> torch.Tensor:
    """The bits of a tensor; every NaN, whatever its payload, as the same ones if `any_nan`."""
    if any_nan and t.is_floating_point():
        t = torch.where(t.isnan(), torch.full_like(t, torch.nan), t)
    return t.contiguous().view(torch.uint8)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, NaN payloads aside."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def test_the_table_covers_every_pair() -> None:
    """Every number can be reduced with every op; bool and float8 with none; complex by sums."""
    reducible = {dtype for dtype, ops in TABLE.items() if tuple(ops) == OPS}
    moved = {dtype for dtype, ops in TABLE.items() if not ops}
    assert reducible | moved == set(TABLE)
    assert moved == {"bool", "float8_e4m3fn", "float8_e5m2"}
    assert len(reducible) == 12
    assert core.support_table()["complex64"] == ["sum", "avg"]
    assert core.support_table()["complex128"] == ["sum", "avg"]


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


def test_unaligned_memory(isa: str) -> None:
    """Any offset of sources and output, and nothing beyond the output's ends is written."""
    wrong = []
    for name, op in PAIRS:
        dtype = dtype_of(name)
        inputs = [numbers(300, dtype, op, seed) for seed in range(3)]
        for offset, count in ((1, 17), (3, 64), (5, 200), (7, 65)):
            sources = [x[offset + k : offset + k + count] for k, x in enumerate(inputs)]
            frame = numbers(300, dtype, op, 9)
            before = frame.clone()
            core.reduce(frame[offset : offset + count], sources, op)
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
            core.reduce(copies[place], copies, op)
            if not equal(copies[place], right):
                wrong.append(f"{name} {op} {place}")
    assert wrong == []


def test_instruction_sets_give_the_same_bits() -> None:
    """Random bit patterns, and so NaN, infinities and subnormals, reduce alike on all sets.

    Min and max choose one of their operands, so there even a NaN's payload must be the same; for
    16-bit floats it goes through a conversion, which hardware does in its own way.
    """
    usable = [name for name in SETS if core.set_instruction_set(name)]
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


# 16-bit floats


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 patterns."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", OPS)
def test_one_source_is_returned_as_it_is(isa: str, dtype: torch.dtype, op: str) -> None:
    """Every pattern survives the way to float32 and back; a NaN stays some NaN."""
    x = all_halves(dtype)
    assert equal(reduced([x], op), x)


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


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_wins_min_and_max_from_any_place(isa: str, dtype: torch.dtype) -> None:
    """A NaN in any source, of any sign and payload, makes the result NaN."""
    for op in ("min", "max"):
        for place in range(4):
            for value in (torch.nan, -torch.nan):
                sources = [torch.full((43,), float(k), dtype=dtype) for k in range(4)]
                sources[place][::2] = value
                result = reduced(sources, op)
                assert result[::2].isnan().all()
                assert (result[1::2] == (0 if op == "min" else 3)).all()


def test_averages_of_integers_do_not_overflow(isa: str) -> None:
    """The mean of int8 values is right although their sum does not fit, and is truncated."""
    top, low = torch.full((70,), 127, dtype=torch.int8), torch.full((70,), -128, dtype=torch.int8)
    assert equal(reduced([top] * 3, "avg"), top)
    assert equal(reduced([low] * 64, "avg"), low)
    assert (reduced([low, top, top * 0], "avg") == 0).all()  # -1 / 3
    assert (reduced([low, top - 1], "avg") == -1).all()
    assert (reduced([low, top - 2], "avg") == -1).all()  # -3 / 2


def test_sources_must_fit() -> None:
    """No sources, sources of another size or dtype and unknown instruction sets are refused."""
    out = torch.zeros(4)
    for sources in ([], [torch.ones(5)], [torch.ones(4, dtype=torch.float64)], [out] * 65):
        with pytest.raises(ValueError, match=r"sources|elements|dtypes"):
            core.reduce(out, sources, "sum")
    assert not core.set_instruction_set("avx1024")
