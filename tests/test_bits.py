"""What the last bit of a result depends on: the inputs in rank order, and nothing else."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import G, run
from reference import (
    ALGORITHMS,
    FACTORS,
    FLOAT8S,
    FLOATS,
    digest,
    factor,
    reduce_op,
    reduce_scatter_single,
)

import pycomm

SMALL: Final = (torch.float16, torch.bfloat16, *FLOAT8S)
COUNT: Final = 70_001
#: Where the data is cut: not at all, and at odd places on both sides of every limit.
CUTS: Final = (COUNT, 4099, 33_333)
OPS: Final = ("sum", "avg", "premul_sum")


def rounded(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 values in another dtype; torch before 2.14 does not saturate, so that is done before."""
    return (t.clamp(-448, 448) if dtype is torch.float8_e4m3fn else t).to(dtype)


def random_input(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of many magnitudes, so that the order of additions shows in the result."""
    g = G(rank)
    scale = torch.randint(-6, 7, (count,), generator=g).float()
    return rounded(torch.randn(count, generator=g) * torch.exp2(scale), dtype)


def in_rank_order(n: int, op: str, dtype: torch.dtype) -> torch.Tensor:
    """The float32 reduction of all ranks' inputs, rank 0 first, rounded once."""
    terms = [random_input(rank, COUNT, dtype).float() for rank in range(n)]
    if op == "premul_sum":
        terms = [term * FACTORS[rank] for rank, term in enumerate(terms)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return rounded(total / n if op == "avg" else total, dtype)


@pytest.mark.parametrize(
    ("n", "slot_bytes"), [(2, None), (3, None), (3, "4096"), (4, "8192"), (8, None)]
)
def test_bits_depend_on_neither_rank_nor_algorithm_nor_split(
    n: int, slot_bytes: str | None
) -> None:
    """Sums are those in rank order, bit for bit, however the data is cut and by whatever way it goes."""
    dtypes = (torch.float32, *SMALL) if n < 8 else (torch.float32, torch.bfloat16, FLOAT8S[0])

    def worker(rank: int, n: int) -> dict[str, set[str]]:
        comm = pycomm.get_communicator()
        found: dict[str, set[str]] = {}
        for dtype in dtypes:
            for op in OPS:
                digests = found.setdefault(f"{dtype} {op}", set())
                own = factor(op, rank)
                mine = random_input(rank, COUNT, dtype)
                for algorithm in ALGORITHMS:
                    for cut in CUTS:
                        t = mine.clone()
                        for piece in t.split(cut):
                            comm.all_reduce(piece, op, algorithm=algorithm, **own)
                        digests.add(digest(t))
                for cut in CUTS[:2]:
                    t = mine.clone()
                    for piece in t.split(cut):
                        comm.reduce(piece, n - 1, op, **own)
                    comm.broadcast(t, n - 1)
                    digests.add(digest(t))
                part = torch.zeros(COUNT, dtype=dtype)
                comm.reduce_scatter(part, [mine] * n, op, **own)
                digests.add(digest(part))
                # Cut unevenly, and put together again.
                lengths = [COUNT // n + 500 * (-1) ** r for r in range(n - 1)]
                parts = list(mine.split([*lengths, COUNT - sum(lengths)]))
                out = torch.zeros_like(parts[rank])
                comm.reduce_scatter(out, parts, op, **own)
                whole = [torch.zeros_like(p) for p in parts]
                comm.all_gather(whole, out)
                digests.add(digest(torch.cat([p.view(torch.uint8) for p in whole])))
        return found

    right = {f"{t} {op}": {digest(in_rank_order(n, op, t))} for t in dtypes for op in OPS}
    env = {"PYCOMM_SLOT_BYTES": slot_bytes, "PYCOMM_SINGLE_COPY": slot_bytes and "never"}
    assert run(n, worker, wall=60, env=env) == [right] * n


def test_the_order_of_the_sum_shows_in_the_bits() -> None:
    """The data of the test above would betray another order of additions."""
    for dtype in (torch.float32, *SMALL):
        inputs = [random_input(rank, COUNT, dtype).float() for rank in range(3)]
        forwards = rounded(inputs[0] + inputs[1] + inputs[2], dtype)
        turned = rounded(inputs[1] + inputs[2] + inputs[0], dtype)
        assert dtype is not torch.float32 or digest(forwards) != digest(turned)
        # Rounding after each step would show too.
        twice = rounded(rounded(inputs[0] + inputs[1], dtype).float() + inputs[2], dtype)
        assert dtype is torch.float32 or digest(forwards) != digest(twice), dtype


def test_bits_through_dist_are_those_of_the_communicator() -> None:
    """torch's interface gives the same bits, also for tensors that go through a temporary."""

    def worker(rank: int, n: int) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for dtype in (torch.float32, *SMALL):
            for op in OPS:
                digests = found.setdefault(f"{dtype} {op}", set())
                mine = random_input(rank, COUNT, dtype)
                t = mine.clone()
                dist.all_reduce(t, reduce_op(op, rank))
                digests.add(digest(t))
                column = torch.zeros(COUNT, 2).to(dtype)[:, 1]
                column.copy_(mine)
                dist.all_reduce(column, reduce_op(op, rank))
                digests.add(digest(column.contiguous()))
                part = torch.zeros_like(mine)
                whole = torch.cat([mine.view(torch.uint8)] * n).view(dtype)
                reduce_scatter_single(part, whole, reduce_op(op, rank))
                digests.add(digest(part))
        return found

    dtypes = (torch.float32, *SMALL)
    right = {f"{t} {op}": {digest(in_rank_order(3, op, t))} for t in dtypes for op in OPS}
    assert run(3, worker) == [right] * 3


@pytest.mark.parametrize("n", [2, 3])
def test_nan_of_any_rank_wins_min_and_max_everywhere(n: int) -> None:
    """A NaN, of either sign and on any rank, is the result of min and max on every rank."""

    def worker(rank: int, n: int) -> list[str]:
        comm = pycomm.get_communicator()
        wrong = []

        def check(t: torch.Tensor, op: str, what: str) -> None:
            rest = 0 if op == "min" else n - 1
            values = t.float()
            if not (values[: 2 * n].isnan().all() and (values[2 * n :] == rest).all()):
                wrong.append(f"{t.dtype} {op} {what}")

        for dtype in (*FLOATS, *FLOAT8S):
            for op in ("min", "max"):
                for count in (2 * n + 1, 40_011):
                    t = torch.full((count,), float(rank))
                    t[rank], t[n + rank] = torch.nan, -torch.nan
                    mine = t.to(dtype)
                    for algorithm in ALGORITHMS:
                        t = mine.clone()
                        comm.all_reduce(t, op, algorithm=algorithm)
                        check(t, op, f"{algorithm} {count}")
                    t = mine.clone()
                    comm.reduce(t, 0, op)
                    comm.broadcast(t, 0)
                    check(t, op, f"reduce {count}")
                    t = torch.zeros_like(mine)
                    comm.reduce_scatter(t, [mine] * n, op)
                    check(t, op, f"reduce_scatter {count}")
        return wrong

    assert run(n, worker) == [[]] * n


def test_infinities_and_overflow() -> None:
    """An average of large halves does not overflow on the way; a sum overflows to infinity, as it must."""

    def worker(rank: int, n: int) -> set[str]:
        comm = pycomm.get_communicator()
        seen: set[str] = set()

        def reduced(name: str, value: float, dtype: torch.dtype, op: str = "sum") -> None:
            for count in (3, 40_001):
                for algorithm in ALGORITHMS:
                    t = torch.full((count,), value).to(dtype)
                    comm.all_reduce(t, op, algorithm=algorithm)
                    seen.update(f"{name} {x}" for x in map(str, set(t.float().tolist())))

        reduced("average", [40_000.0, 60_000.0][rank], torch.float16, "avg")
        reduced("half", 40_000.0, torch.float16)
        reduced("infinities", [torch.inf, -torch.inf][rank], torch.float32)
        reduced("e4m3", 288.0, torch.float8_e4m3fn)  # saturates, as torch 2.14 converts
        reduced("e4m3 average", 448.0, torch.float8_e4m3fn, "avg")
        reduced("e5m2", 49_152.0, torch.float8_e5m2)
        return seen

    assert (
        run(2, worker)
        == [
            {
                f"average {torch.tensor(50_000.0).half().item()}",
                "half inf",
                "infinities nan",
                "e4m3 448.0",
                "e4m3 average 448.0",
                "e5m2 inf",
            }
        ]
        * 2
    )


def test_integer_averages_are_truncated() -> None:
    """Towards zero, for every sign, without overflow of the sum; by all three reductions."""

    def worker(rank: int, n: int) -> list[list[int]]:
        comm = pycomm.get_communicator()
        results = []
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            top = torch.iinfo(torch.int32 if dtype is torch.int64 else dtype).max
            values = torch.tensor([-5, -1, 0, 1, 5, top, -top], dtype=dtype)
            for count in (1, 10_001):
                for way in ("all_reduce", "reduce", "reduce_scatter"):
                    t = values.repeat(count)
                    if way == "all_reduce":
                        comm.all_reduce(t, "avg")
                    elif way == "reduce":
                        comm.reduce(t, 0, "avg")
                        comm.broadcast(t, 0)
                    else:
                        comm.reduce_scatter(
                            t, [t.clone() if r != rank else t for r in range(n)], "avg"
                        )
                    wrong = (t.view(count, -1) != values).any().item()
                    results.append([int(wrong)])
            t = torch.tensor([[-3, 4, 1], [0, 3, 0], [-5, 0, 1]][rank], dtype=dtype)
            comm.all_reduce(t, "avg")  # -8/3, 7/3, 2/3
            results.append(t.tolist())
        return results

    found = run(3, worker)
    for of_rank in found:
        assert [r for r in of_rank if len(r) == 1] == [[0]] * 24
        assert [r for r in of_rank if len(r) == 3] == [[-2, 2, 0]] * 4


def test_factors_differ_from_rank_to_rank() -> None:
    """premul_sum is the sum in rank order of float32 products; torch's factor may also be a tensor."""

    def worker(rank: int, n: int) -> list[bool]:
        make: Any = dist._make_nccl_premul_sum
        comm = pycomm.get_communicator()
        results = []
        for count in (5, 70_001):
            inputs = [random_input(r, count, torch.float32) for r in range(n)]
            right = torch.zeros(count)
            for r in range(n):
                right = right + inputs[r] * FACTORS[r] if r else inputs[r] * FACTORS[r]
            for op in (make(FACTORS[rank]), make(torch.tensor([FACTORS[rank]]))):
                t = inputs[rank].clone()
                dist.all_reduce(t, op)
                results.append(torch.equal(t, right))
                u = inputs[rank].clone()
                dist.reduce(u, 1, op)
                results.append(torch.equal(u, right if rank == 1 else inputs[rank]))
                s = torch.zeros(count)
                reduce_scatter_single(s, inputs[rank].repeat(n), op)
                results.append(torch.equal(s, right))
            t = inputs[rank].clone()
            comm.all_reduce(t, "premul_sum", factor=0.0 if rank else 2.0, algorithm="ring")
            results.append(torch.equal(t, inputs[0] * 2))
        return results

    assert run(3, worker) == [[True] * 14] * 3
