"""Cases of the field's issue trackers about tensors that are not plain memory, or are nothing.

Each test is named after its case; the docstring names the report it comes from.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run

import pycomm


def column(values: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix of nines whose first column holds the values, and that column, of stride 2."""
    matrix = torch.full((len(values), 2), 9.0)
    matrix[:, 0] = torch.tensor(values)
    return matrix, matrix[:, 0]


def into_one(name: str) -> Any:
    """torch's all-gather or reduce-scatter with a single tensor, by its old or new name."""
    return getattr(dist, f"{name}_single", None) or getattr(
        dist, {"all_gather": "all_gather_into_tensor"}.get(name, "reduce_scatter_tensor")
    )


@pytest.mark.parametrize("async_op", [False, True])
def test_coll_01_columns_are_communicated_by_value(async_op: bool) -> None:
    """pytorch#192920: a column of a matrix is reduced, sent, gathered; its neighbours stay."""

    def finish(work: Any) -> None:
        if async_op:
            work.wait()

    def worker(rank: int, n: int) -> None:
        matrix, x = column([1.0, 2.0, 3.0] if rank == 0 else [2.0, 3.0, 4.0])
        finish(dist.all_reduce(x, async_op=async_op))
        assert x.tolist() == [3.0, 5.0, 7.0]
        assert matrix[:, 1].tolist() == [9.0] * 3

        matrix, x = column([10.0 * (rank + 1), 1.0, 2.0])
        finish(dist.broadcast(x, 0, async_op=async_op))
        assert x.tolist() == [10.0, 1.0, 2.0]
        assert matrix[:, 1].tolist() == [9.0] * 3

        matrix, x = column([float(rank)] * 3)
        outs = [column([0.0] * 3) for _ in range(n)]
        finish(dist.all_gather([out for _, out in outs], x, async_op=async_op))
        assert [out.tolist() for _, out in outs] == [[0.0] * 3, [1.0] * 3]
        assert all(m[:, 1].tolist() == [9.0] * 3 for m, _ in outs)

        whole, y = column([0.0] * 6)
        finish(into_one("all_gather")(y, x, async_op=async_op))
        assert y.tolist() == [0.0] * 3 + [1.0] * 3
        assert whole[:, 1].tolist() == [9.0] * 6

        matrix, x = column([0.0] * 3)
        parts = [column([1.0, 2.0, 3.0])[1], column([4.0, 5.0, 6.0])[1]]
        finish(dist.reduce_scatter(x, parts, async_op=async_op))
        assert x.tolist() == [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]][rank]
        assert matrix[:, 1].tolist() == [9.0] * 3

        matrix, x = column([0.0] * 3)
        _, y = column([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        finish(into_one("reduce_scatter")(x, y, async_op=async_op))
        assert x.tolist() == [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]][rank]
        assert matrix[:, 1].tolist() == [9.0] * 3

    assert run(2, worker) == [None] * 2


def test_coll_01_long_columns() -> None:
    """pytorch#192920: the same for columns that take many chunks."""

    def worker(rank: int, n: int) -> tuple[bool, bool]:
        matrix = torch.full((200_003, 2), 9.0)
        matrix[:, 0] = torch.arange(200_003.0)
        dist.all_reduce(matrix[:, 0])
        right = torch.arange(200_003.0) * n
        return torch.equal(matrix[:, 0], right), bool((matrix[:, 1] == 9).all())

    assert run(2, worker) == [(True, True)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.complex128])
def test_coll_01_odd_offsets(dtype: torch.dtype) -> None:
    """pytorch#192920: a view at an odd offset is reduced, and not a byte around it is touched."""

    def worker(rank: int, n: int) -> list[bool]:
        comm = pycomm.get_communicator()
        results = []
        for begin, end, total in ((3, 36, 41), (1, 30_002, 30_009)):
            for call in (dist.all_reduce, comm.all_reduce):
                b = torch.zeros(total, dtype=dtype)
                v = b[begin:end]
                v.fill_(1)
                call(v)
                inside, outside = v == n, torch.cat([b[:begin], b[end:]]) == 0
                results.append(bool(inside.all() and outside.all()))
        return results

    assert run(2, worker) == [[True] * 4] * 2


@pytest.mark.parametrize("n", [1, 2, 3])
def test_coll_03_tensors_of_no_elements(n: int) -> None:
    """pytorch#85234, gloo#179: collectives accept numel() == 0, keep shapes and stay in step."""

    def empty() -> torch.Tensor:
        return torch.zeros(3, 0)

    def worker(rank: int, n: int) -> float:
        comm = pycomm.get_communicator()
        for algorithm in ("auto", "one_shot", "two_shot", "ring"):
            comm.all_reduce(empty(), algorithm=algorithm)
        comm.broadcast(empty(), n - 1)
        comm.all_gather_single(torch.zeros(3 * n, 0), empty())
        comm.reduce_scatter_single(empty(), torch.zeros(3 * n, 0))
        dist.all_reduce(empty())
        dist.broadcast(empty(), 0)
        gathered = [empty() for _ in range(n)]
        dist.all_gather(gathered, empty())
        assert all(t.shape == (3, 0) for t in gathered)
        y = torch.zeros(3 * n, 0)
        into_one("all_gather")(y, empty())
        x = empty()
        into_one("reduce_scatter")(x, y)
        dist.reduce_scatter(x, [empty() for _ in range(n)])
        assert x.shape == (3, 0)
        assert y.shape == (3 * n, 0)
        t = torch.full((9001,), rank + 1.0)  # and the next call is not confused
        dist.all_reduce(t)
        return t[-1].item()

    assert run(n, worker, wall=15) == [n * (n + 1) / 2] * n


def test_a_failing_copy_back_is_an_error_not_an_abort() -> None:
    """An inference tensor may not be written outside inference mode; the worker thread must survive that."""

    def worker(rank: int, _: int) -> tuple[bool, list[float]]:
        with torch.inference_mode():
            column = torch.ones(3, 2)[:, 0]
        work = dist.all_reduce(column, async_op=True)
        assert work is not None
        try:
            work.wait()
            refused = column.tolist() == [2.0] * 3
        except RuntimeError as error:
            refused = "nference" in str(error)
        after = torch.full((2,), rank + 1.0)
        dist.all_reduce(after)
        return refused, after.tolist()

    assert run(2, worker) == [(True, [3.0, 3.0])] * 2


def test_a_column_that_overlaps_a_contiguous_output_is_refused() -> None:
    """One output goes through a temporary, the other does not; both would write the same element."""

    def worker(rank: int, _: int) -> str:
        matrix = torch.zeros(3, 3)
        with pytest.raises(pycomm.InvalidArgument) as raised:
            dist.all_gather([matrix[0], matrix[:, 0]], torch.ones(3))
        dist.all_gather([matrix[:, 1], matrix[:, 2]], torch.full((3,), rank + 1.0))
        assert matrix.tolist() == [[0.0, 1.0, 2.0]] * 3
        return str(raised.value)

    assert all("overlaps another output" in message for message in run(2, worker))
