"""Wrong calls of the operations that gather, scatter and exchange: refused in words, before anything is sent.

What one rank alone can see is InvalidArgument there; where ranks disagree, every rank gets MismatchError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import Refused, attempt, run, td

import pycomm

F32: Final = torch.float32
BIG: Final = 100_000


def ones(count: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """So many ones."""
    return torch.ones(count).to(dtype)


def backend() -> Any:
    """The c10d backend under the default group."""
    group: Any = dist.group.WORLD
    return group._get_backend(torch.device("cpu"))


def options(kind: str, root: int) -> Any:
    """Options of a c10d call with that root."""
    made = (
        getattr(dist, kind)()
        if hasattr(dist, kind)
        else getattr(torch._C._distributed_c10d, kind)()
    )
    made.rootRank = root
    return made


def slices(*bounds: tuple[int, int]) -> list[torch.Tensor]:
    """Parts of one tensor."""
    whole = ones(20)
    return [whole[begin:end] for begin, end in bounds]


def in_one(call: Callable[[torch.Tensor, torch.Tensor], Any], a: slice, b: slice) -> Any:
    """A call with two parts of one tensor."""
    whole = ones(20)
    return call(whole[a], whole[b])


Call = Callable[[Any, int], Any]

#: name: (call of (communicator, rank), words of its message besides the rank). What only the root can do wrong,
#: each rank does, as root to its own mind: what is refused never meets the others.
WRONG: Final[dict[str, tuple[Call, tuple[str, ...]]]] = {
    # reduce
    "root too large, reduce": (
        lambda c, r: c.reduce(ones(5), 2),
        ("reduce(count=5, dtype=float32, op=sum, root=2)", "world size 2"),
    ),
    "negative root, reduce": (lambda c, r: c.reduce(ones(5), -1), ("root=-1", "world size 2")),
    "root too large, reduce, c10d": (
        lambda c, r: backend().reduce([ones(5)], options("ReduceOptions", 2)),
        ("reduce(count=5, dtype=float32, op=sum, root=2)", "world size 2"),
    ),
    "average of bool, reduce": (
        lambda c, r: c.reduce(ones(5, torch.bool), 0, "avg"),
        ("reduce(count=5", "'avg' is not defined for bool"),
    ),
    "xor of float16, reduce, dist": (
        lambda c, r: dist.reduce(ones(5, torch.float16), 0, dist.ReduceOp.BXOR),
        ("reduce(count=5", "'bxor' is not defined for float16"),
    ),
    "expanded, reduce, dist": (
        lambda c, r: dist.reduce(ones(1).expand(5), r),  # each rank is root, to its mind
        ("reduce", "[5]", "share memory"),
    ),
    # factors
    "factor of a sum": (
        lambda c, r: c.all_reduce(ones(5), factor=2.0),
        ("all_reduce", "factor", "premul_sum", "'sum'"),
    ),
    "factor of an average, reduce": (
        lambda c, r: c.reduce(ones(5), 0, "avg", factor=0.5),
        ("reduce", "factor", "premul_sum", "'avg'"),
    ),
    "factor of a sum, reduce_scatter": (
        lambda c, r: c.reduce_scatter(ones(5), [ones(5)] * 2, factor=0.5),
        ("reduce_scatter", "factor", "premul_sum"),
    ),
    "premul_sum of integers": (
        lambda c, r: c.all_reduce(ones(5, torch.int32), "premul_sum", factor=2.0),
        ("'premul_sum' is not defined for int32",),
    ),
    # gather
    "no outputs on the root, gather": (
        lambda c, r: c.gather(None, ones(5), r),
        ("gather(count=5", "2 outputs", "one per rank, not 0"),
    ),
    "outputs elsewhere, gather": (
        lambda c, r: c.gather([ones(5)] * 2, ones(5), 1 - r),
        ("gather(count=5", "0 outputs", "not the root", "not 2"),
    ),
    "outputs elsewhere, gather, c10d": (
        lambda c, r: backend().gather(
            [[ones(5), ones(5)]], [ones(5)], options("GatherOptions", 1 - r)
        ),
        ("gather", "only the root, rank"),
    ),
    "short list, gather": (
        lambda c, r: c.gather([ones(5)], ones(5), r),
        ("gather(count=5", "2 outputs", "one per rank, not 1"),
    ),
    "empty list, gather": (lambda c, r: c.gather([], ones(5), r), ("gather", "empty")),
    "short list, gather, c10d": (
        lambda c, r: backend().gather([[ones(5)]], [ones(5)], options("GatherOptions", r)),
        ("gather", "2 ranks", "not 1"),
    ),
    "no list, gather, c10d": (
        lambda c, r: backend().gather([], [ones(5)], options("GatherOptions", r)),
        ("gather", "2 ranks", "not 0"),
    ),
    "own part of another size, gather": (
        lambda c, r: c.gather([ones(4), ones(4)], ones(5), r),
        ("gather(count=5", "own part has 5", "4 as output"),
    ),
    "dtypes differ, gather": (
        lambda c, r: c.gather([ones(5), ones(5, torch.int32)], ones(5), r),
        ("gather", "float32 and int32"),
    ),
    "dtypes differ, gather, c10d": (
        lambda c, r: backend().gather(
            [[ones(5), ones(5, torch.int32)]], [ones(5)], options("GatherOptions", r)
        ),
        ("gather", "[5]", "Int", "dtype Float"),
    ),
    "outputs overlap, gather": (
        lambda c, r: c.gather(slices((0, 5), (4, 9)), ones(5), r),
        ("gather(count=5", "outputs of ranks 0 and 1 overlap"),
    ),
    "input in another's part, gather": (
        lambda c, r: in_one(
            lambda a, b: c.gather_single(a, b, r), slice(0, 10), slice(5 - 5 * r, 10 - 5 * r)
        ),
        ("gather(count=5", "input and output overlap"),
    ),
    "root too large, gather": (
        lambda c, r: c.gather(None, ones(5), 2),
        ("gather(count=5, dtype=float32, root=2)", "world size 2"),
    ),
    "too small, gather_single": (
        lambda c, r: c.gather_single(ones(9), ones(5), r),
        ("gather", "9 elements", "need 10"),
    ),
    "nothing on the root, gather_single": (
        lambda c, r: c.gather_single(None, ones(5), r),
        ("gather(count=5", "2 outputs"),
    ),
    "expanded output, gather, c10d": (
        lambda c, r: backend().gather(
            [[ones(1).expand(5), ones(5)]], [ones(5)], options("GatherOptions", r)
        ),
        ("gather", "share memory"),
    ),
    # scatter
    "no inputs on the root, scatter": (
        lambda c, r: c.scatter(ones(5), None, r),
        ("scatter(count=5", "2 inputs", "one per rank, not 0"),
    ),
    "inputs elsewhere, scatter": (
        lambda c, r: c.scatter(ones(5), [ones(5)] * 2, 1 - r),
        ("scatter(count=5", "0 inputs", "not the root", "not 2"),
    ),
    "inputs elsewhere, scatter, c10d": (
        lambda c, r: backend().scatter(
            [ones(5)], [[ones(5), ones(5)]], options("ScatterOptions", 1 - r)
        ),
        ("scatter", "only the root, rank"),
    ),
    "long list, scatter": (
        lambda c, r: c.scatter(ones(5), [ones(5)] * 3, r),
        ("scatter(count=5", "2 inputs", "one per rank, not 3"),
    ),
    "no list, scatter, c10d": (
        lambda c, r: backend().scatter([ones(5)], [], options("ScatterOptions", r)),
        ("scatter", "2 ranks", "not 0"),
    ),
    "own part of another size, scatter": (
        lambda c, r: c.scatter(ones(5), [ones(6)] * 2, r),
        ("scatter(count=5", "own part has 6", "5 as output"),
    ),
    "dtypes differ, scatter": (
        lambda c, r: c.scatter(ones(5), [ones(5), ones(5, torch.float64)], r),
        ("scatter", "float32 and float64"),
    ),
    "output across an input, scatter": (
        lambda c, r: in_one(lambda a, b: c.scatter_single(b, a, r), slice(0, 10), slice(3, 8)),
        ("scatter(count=5", "input and output overlap"),
    ),
    "root too small, scatter": (
        lambda c, r: c.scatter(ones(5), None, -1),
        ("scatter(count=5, dtype=float32, root=-1)", "world size 2"),
    ),
    "too large, scatter_single": (
        lambda c, r: c.scatter_single(ones(5), ones(11), r),
        ("scatter", "11 elements", "need 10"),
    ),
    # all_to_all
    "short lists, all_to_all": (
        lambda c, r: c.all_to_all([ones(5)], [ones(5)]),
        ("all_to_all(count=5", "2 inputs", "not 1"),
    ),
    "short inputs, all_to_all": (
        lambda c, r: c.all_to_all([ones(5)] * 2, [ones(5)]),
        ("all_to_all", "2 inputs", "not 1"),
    ),
    "long outputs, all_to_all": (
        lambda c, r: c.all_to_all([ones(5) for _ in range(3)], [ones(5)] * 2),
        ("all_to_all(count=10", "2 outputs", "not 3"),
    ),
    "empty lists, all_to_all": (lambda c, r: c.all_to_all([], []), ("all_to_all", "empty")),
    "short lists, all_to_all, c10d": (
        lambda c, r: backend().alltoall([ones(5)], [ones(5)], dist.AllToAllOptions()),
        ("all_to_all", "2 ranks", "not 1 and 1"),
    ),
    "own part of another size, all_to_all": (
        lambda c, r: c.all_to_all([ones(4), ones(4)], [ones(5), ones(5)]),
        ("all_to_all(count=10", "own part has 5", "4 as output"),
    ),
    "own part of another size, all_to_all, dist": (
        lambda c, r: dist.all_to_all([ones(4), ones(4)], [ones(5), ones(5)]),
        ("all_to_all(count=10", "own part has 5", "4 as output"),
    ),
    "dtypes differ, all_to_all": (
        lambda c, r: c.all_to_all([ones(5), ones(5)], [ones(5), ones(5, torch.int8)]),
        ("all_to_all", "float32 and int8"),
    ),
    "dtypes differ, all_to_all, c10d": (
        lambda c, r: backend().alltoall(
            [ones(5), ones(5)], [ones(5), ones(5, torch.int8)], dist.AllToAllOptions()
        ),
        ("all_to_all", "[5]", "Char"),
    ),
    "outputs overlap, all_to_all": (
        lambda c, r: c.all_to_all(slices((0, 5), (3, 8)), [ones(5), ones(5)]),
        ("all_to_all(count=10", "outputs of ranks 0 and 1 overlap"),
    ),
    "the same lists, all_to_all": (
        lambda c, r: c.all_to_all(*[slices((0, 5), (5, 10))] * 2),
        ("all_to_all(count=10", "input and output overlap"),
    ),
    "the same tensor, all_to_all_single": (
        lambda c, r: in_one(c.all_to_all_single, slice(0, 10), slice(0, 10)),
        ("all_to_all(count=10", "input and output overlap"),
    ),
    "not divisible, all_to_all_single": (
        lambda c, r: c.all_to_all_single(ones(6), ones(5)),
        ("all_to_all", "5 elements", "2 ranks", "give the counts"),
    ),
    "not divisible, all_to_all_single, dist": (
        lambda c, r: dist.all_to_all_single(ones(6), ones(5)),
        ("all_to_all", "5", "2 ranks", "split sizes"),
    ),
    "first dimension not divisible, all_to_all_single, dist": (
        lambda c, r: dist.all_to_all_single(torch.ones(3, 2), torch.ones(3, 2)),
        ("all_to_all", "first dimension, 3", "2 ranks"),
    ),
    "counts do not add up, input": (
        lambda c, r: c.all_to_all_single(ones(5), ones(5), [2, 3], [2, 2]),
        ("all_to_all", "add up to 4", "holds 5"),
    ),
    "counts do not add up, output": (
        lambda c, r: c.all_to_all_single(ones(5), ones(5), [2, 4], [2, 3]),
        ("all_to_all", "add up to 6", "holds 5"),
    ),
    "splits do not add up, dist": (
        lambda c, r: dist.all_to_all_single(torch.ones(4, 3), torch.ones(4, 3), [2, 2], [2, 1]),
        ("all_to_all", "add up to 3", "first dimension is 4"),
    ),
    "negative count": (
        lambda c, r: c.all_to_all_single(ones(5), ones(5), [6, -1], [2, 3]),
        ("all_to_all", "negative: -1"),
    ),
    "negative split, dist": (
        lambda c, r: dist.all_to_all_single(ones(5), ones(5), [2, 3], [-1, 6]),
        ("all_to_all", "negative: -1"),
    ),
    "too many counts": (
        lambda c, r: c.all_to_all_single(ones(5), ones(5), [2, 2, 1], [2, 3]),
        ("all_to_all", "one count for each of 2 ranks, not 3"),
    ),
    "too few splits, dist": (
        lambda c, r: dist.all_to_all_single(ones(5), ones(5), [5], [2, 3]),
        ("all_to_all", "2 split sizes", "not 1"),
    ),
    "dtypes differ, all_to_all_single": (
        lambda c, r: c.all_to_all_single(ones(6), ones(6, torch.int32)),
        ("all_to_all", "float32 and int32"),
    ),
    "column, all_to_all_single": (
        lambda c, r: c.all_to_all_single(ones(6), torch.ones(6, 2)[:, 0]),
        ("all_to_all", "6 float32 elements", "not contiguous"),
    ),
    # lists of reduce_scatter and all_gather
    "own part of another size, reduce_scatter": (
        lambda c, r: c.reduce_scatter(ones(5), [ones(4), ones(4)]),
        ("reduce_scatter(count=5", "own part has 4", "5 as output"),
    ),
    "output is another's part, reduce_scatter": (
        lambda c, r: (lambda parts: c.reduce_scatter(parts[1 - r], parts))(slices((0, 5), (5, 10))),
        ("reduce_scatter(count=5", "input and output overlap"),
    ),
    "dtypes differ, reduce_scatter, c10d": (
        lambda c, r: backend().reduce_scatter([ones(5)], [[ones(5), ones(5, torch.int32)]]),
        ("reduce_scatter", "[5]", "Int"),
    ),
    "zero timeout, gather": (
        lambda c, r: c.gather(None, ones(5), 1 - r, timeout=td(0)),
        ("timeout of 0",),
    ),
    "negative timeout, monitored_barrier": (
        lambda c, r: c.monitored_barrier(timeout=td(-1)),
        ("monitored_barrier()", "timeout is negative"),
    ),
}


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, Any]]:
    """What became of each wrong call, and of a right one right after it, per rank."""

    def worker(rank: int, n: int) -> dict[str, tuple[Any, float]]:
        comm = pycomm.get_communicator()
        found = {}
        for name, (call, _) in WRONG.items():
            outcome = attempt(lambda call=call: call(comm, rank), Exception)  # type: ignore[misc]
            t = torch.full((5,), rank + 1.0)
            comm.all_reduce(t)
            found[name] = outcome if isinstance(outcome, Refused) else "accepted", t.sum().item()
        return found

    return run(2, worker)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused_before_anything_is_sent(
    refusals: list[dict[str, Any]], name: str
) -> None:
    """InvalidArgument names rank, operation, sizes and what is wrong; the next call works."""
    for rank, found in enumerate(refusals):
        refusal, total = found[name]
        assert isinstance(refusal, Refused), refusal
        assert refusal.kinds[:1] == ("InvalidArgument",), refusal
        missing = [w for w in (f"rank {rank}", *WRONG[name][1]) if w not in refusal.message]
        assert not missing, refusal.message
        assert total == 15


# Ranks that disagree

#: name: (call of (communicator, rank) on three ranks, of which rank 2's does not fit; what every message says).
DISAGREE: Final[dict[str, tuple[Call, str]]] = {
    "gather, longer than expected": (
        lambda c, r: c.gather(
            [ones(5) for _ in range(3)] if r == 0 else None, ones(6 if r == 2 else 5), 0
        ),
        "rank 2 has 6 elements for rank 0, which expects 5",
    ),
    "gather, large and small": (
        lambda c, r: c.gather(
            [ones(BIG) for _ in range(3)] if r == 0 else None, ones(5 if r == 2 else BIG), 0
        ),
        f"rank 2 has 5 elements for rank 0, which expects {BIG}",
    ),
    "gather, root expects another": (
        lambda c, r: c.gather([ones(4 + i) for i in (1, 1, 0)] if r == 0 else None, ones(5), 0),
        "rank 2 has 5 elements for rank 0, which expects 4",
    ),
    "scatter, shorter than expected": (
        lambda c, r: c.scatter(ones(6 if r == 2 else 5), [ones(5)] * 3 if r == 0 else None, 0),
        "rank 0 has 5 elements for rank 2, which expects 6",
    ),
    "scatter, nothing for one that expects much": (
        lambda c, r: c.scatter(ones(BIG), [ones(BIG), ones(BIG), ones(0)] if r == 0 else None, 0),
        f"rank 0 has 0 elements for rank 2, which expects {BIG}",
    ),
    "all_to_all, one pair": (
        lambda c, r: c.all_to_all(
            [ones(7) for _ in range(3)], [ones(8 if (r, k) == (2, 1) else 7) for k in range(3)]
        ),
        "rank 2 has 8 elements for rank 1, which expects 7",
    ),
    "all_to_all, large": (
        lambda c, r: c.all_to_all(
            [ones(BIG - (r == 1 and k == 2)) for k in range(3)], [ones(BIG) for _ in range(3)]
        ),
        f"rank 2 has {BIG} elements for rank 1, which expects {BIG - 1}",
    ),
    "all_to_all_single, splits": (
        lambda c, r: c.all_to_all_single(ones(6), ones(6), None, [3, 1, 2] if r == 2 else None),
        "rank 2 has 3 elements for rank 0, which expects 2",
    ),
    "all_gather, uneven": (
        lambda c, r: c.all_gather([ones(1), ones(2), ones(3 if r == 2 else 4)], ones(r + 1)),
        "rank 2 has 3 elements for rank 0, which expects 4",
    ),
    "reduce_scatter, uneven": (
        lambda c, r: c.reduce_scatter(ones(r + 1), [ones(1 if r < 2 else 9), ones(2), ones(3)]),
        "rank 2 has 9 elements for rank 0, which expects 1",
    ),
}

#: The same where the headers differ: what both ranks called.
DIFFERENT: Final[dict[str, tuple[Call, tuple[str, ...]]]] = {
    "reduce, counts": (
        lambda c, r: c.reduce(ones(6 if r == 2 else 5), 0),
        (
            "called reduce(count=5, dtype=float32, op=sum, root=0)",
            "rank 2 called reduce(count=6, dtype=float32, op=sum, root=0)",
        ),
    ),
    "reduce, roots": (
        lambda c, r: c.reduce(ones(BIG), int(r == 2)),
        (
            f"called reduce(count={BIG}, dtype=float32, op=sum, root=0)",
            f"rank 2 called reduce(count={BIG}, dtype=float32, op=sum, root=1)",
        ),
    ),
    "reduce, ops": (
        lambda c, r: c.reduce(ones(5), 0, "max" if r == 2 else "sum"),
        ("op=sum, root=0)", "rank 2 called reduce(count=5, dtype=float32, op=max, root=0)"),
    ),
    "gather, roots": (
        lambda c, r: c.gather(
            [ones(5) for _ in range(3)] if r in (0, 2) else None, ones(5), r // 2 * 2
        ),
        (
            "called gather(count=5, dtype=float32, root=0)",
            "rank 2 called gather(count=5, dtype=float32, root=2)",
        ),
    ),
    "scatter, dtypes": (
        lambda c, r: c.scatter(
            ones(5, torch.int32 if r == 2 else F32), [ones(5)] * 3 if r == 0 else None, 0
        ),
        ("dtype=float32, root=0)", "rank 2 called scatter(count=5, dtype=int32, root=0)"),
    ),
    "gather and all_gather": (
        lambda c, r: (
            c.all_gather([ones(5) for _ in range(3)], ones(5))
            if r == 2
            else c.gather([ones(5) for _ in range(3)] if r == 0 else None, ones(5), 0)
        ),
        (
            "called gather(count=5, dtype=float32, root=0)",
            "rank 2 called all_gather(count=5, dtype=float32)",
        ),
    ),
    "all_to_all and scatter": (
        lambda c, r: (
            c.scatter(ones(5), None, 0)
            if r == 2
            else c.all_to_all_single(ones(BIG * 3), ones(BIG * 3))
        ),
        (
            f"called all_to_all(count={BIG * 3}, dtype=float32)",
            "rank 2 called scatter(count=5, dtype=float32, root=0)",
        ),
    ),
    "even and uneven all_gather": (
        lambda c, r: c.all_gather([ones(5), ones(5), ones(5 - (r == 2))], ones(5 - (r == 2))),
        (
            "called all_gather(count=5, dtype=float32)",
            "rank 2 called all_gather(count=4, dtype=float32)",
        ),
    ),
    "even and uneven all_gather, large": (
        lambda c, r: c.all_gather(
            [ones(BIG), ones(BIG), ones(BIG - (r == 2))], ones(BIG - (r == 2))
        ),
        (
            f"called all_gather(count={BIG}, dtype=float32)",
            f"rank 2 called all_gather(count={BIG - 1}, dtype=float32)",
        ),
    ),
    "even and uneven reduce_scatter, large": (
        lambda c, r: c.reduce_scatter(ones(BIG), [ones(BIG), ones(BIG - (r == 2)), ones(BIG)]),
        ("called reduce_scatter(", "rank 2 called reduce_scatter(", "with counts of its own"),
    ),
    "reduce and broadcast, large": (
        lambda c, r: c.broadcast(ones(BIG), 0) if r == 2 else c.reduce(ones(BIG), 0),
        (
            f"called reduce(count={BIG}, dtype=float32, op=sum, root=0)",
            f"rank 2 called broadcast(count={BIG}, dtype=float32, root=0)",
        ),
    ),
    "all_to_all and all_gather, large": (
        lambda c, r: (
            c.all_gather_single(ones(BIG * 3), ones(BIG))
            if r == 2
            else c.all_to_all_single(ones(BIG * 3), ones(BIG * 3))
        ),
        (
            f"called all_to_all(count={BIG * 3}, dtype=float32)",
            f"rank 2 called all_gather(count={BIG}, dtype=float32)",
        ),
    ),
    "barriers": (
        lambda c, r: c.all_reduce(ones(5)) if r == 2 else c.barrier(),
        ("called barrier()", "rank 2 called all_reduce(count=5, dtype=float32, op=sum)"),
    ),
    "premul_sum and sum": (
        lambda c, r: (
            c.all_reduce(ones(BIG)) if r == 2 else c.all_reduce(ones(BIG), "premul_sum", factor=2.0)
        ),
        ("op=premul_sum)", f"rank 2 called all_reduce(count={BIG}, dtype=float32, op=sum)"),
    ),
}


def test_disagreements_are_noticed_on_every_rank() -> None:
    """MismatchError on all ranks names both ranks and counts, or both calls, whoever needs the data."""

    def worker(rank: int, n: int) -> dict[str, tuple[Any, Any]]:
        found = {}
        for table in (DISAGREE, DIFFERENT):
            for name, (call, _) in table.items():
                store = dist.distributed_c10d._get_default_store()
                comm = pycomm.create_communicator(dist.PrefixStore(name, store), rank, n, td(8))
                comm.barrier()
                first = attempt(lambda call=call, comm=comm: call(comm, rank))  # type: ignore[misc]
                found[name] = first, attempt(comm.barrier)
        return found

    for rank, found in enumerate(run(3, worker, wall=60)):
        for name, (first, later) in found.items():
            assert isinstance(first, Refused), (rank, name, first)
            assert first.kinds[0] == "MismatchError", (rank, name, first)
            words = (DISAGREE[name][1],) if name in DISAGREE else DIFFERENT[name][1]
            missing = [w for w in words if w not in first.message]
            assert not missing, (rank, name, first.message)
            assert isinstance(later, Refused), (rank, name, later)
            assert later.kinds[0] == "AbortedError", (rank, name, later)


def test_disagreement_through_dist() -> None:
    """torch's lists: a rank that sends another count than its peer expects is named on every rank."""

    def worker(rank: int, n: int) -> list[Any]:
        outs = [ones(k + 1) for k in range(n)]
        return [
            attempt(lambda: dist.all_gather(outs, ones(rank + 1) if rank else ones(1))),
            attempt(
                lambda: dist.all_to_all(
                    [ones(3), ones(3)], [ones(3), ones(3 + rank)][:: 1 - 2 * rank]
                )
            ),
        ]

    for fine, found in run(2, worker):
        assert not isinstance(fine, Refused), fine
        assert isinstance(found, Refused)
        assert found.kinds[0] == "MismatchError"
        assert "rank 1 has 4 elements for rank 0, which expects 3" in found.message


# Monitored barriers


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_a_monitored_barrier_names_who_is_late(wait_all_ranks: bool) -> None:
    """Rank 0's TimeoutError names the first missing rank, or all; the ranks that came hear of it from rank 0."""

    def worker(rank: int, n: int) -> tuple[Any, Any]:
        store = dist.distributed_c10d._get_default_store()
        comm = pycomm.create_communicator(dist.PrefixStore("monitored", store), rank, n, td(8))
        comm.monitored_barrier(timeout=td(5))  # all come
        comm.barrier()
        if rank in (1, 3):
            store.wait(["over"], td(10))
            return attempt(comm.monitored_barrier), attempt(comm.barrier)
        found = attempt(lambda: comm.monitored_barrier(wait_all_ranks, timeout=td(0.4)))
        store.add("ended", 1)
        if rank == 0:
            while store.add("ended", 0) < 2:
                pass
            store.set("over", "")
        return found, attempt(comm.barrier)

    results = run(4, worker)
    late = (
        "Ranks 1, 3 failed to pass monitoredBarrier" if wait_all_ranks else "Rank 1 failed to pass"
    )
    assert "TimeoutError" in results[0][0].kinds
    assert late in results[0][0].message
    assert "Rank 2 successfully reached monitoredBarrier" in results[2][0].message
    assert late in results[2][0].message
    for found, later in results:
        assert isinstance(found, Refused)
        assert later.kinds[0] == "AbortedError"


def test_a_monitored_barrier_through_dist() -> None:
    """dist.monitored_barrier passes when all come, in Gloo's words fails where one does not."""

    def worker(rank: int, n: int) -> Any:
        dist.monitored_barrier(timeout=td(5))
        dist.monitored_barrier(timeout=td(5), wait_all_ranks=True)
        t = ones(3)
        dist.all_reduce(t)
        assert t.tolist() == [3.0] * 3
        if rank == 1:
            dist.distributed_c10d._get_default_store().wait(["over"], td(10))
            return None
        found = attempt(lambda: dist.monitored_barrier(timeout=td(0.3)))
        if rank == 0:
            dist.distributed_c10d._get_default_store().set("over", "")
        return found

    results = run(3, worker)
    assert "Rank 1 failed to pass monitoredBarrier in 300 ms" in results[0].message
    assert "TimeoutError" in results[0].kinds
