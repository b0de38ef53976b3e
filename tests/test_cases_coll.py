"""Cases of the field's issue trackers about tensors that are not plain memory, or are nothing.

Each test is named after its case; the docstring names the report it comes from.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import attempt, refused, run

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

        matrix, x = column([10.0 * (rank + 1), 1.0, 2.0])
        finish(dist.reduce(x, 1, async_op=async_op))
        assert x.tolist() == [[10.0, 1.0, 2.0], [30.0, 2.0, 4.0]][rank]
        assert matrix[:, 1].tolist() == [9.0] * 3

        matrix, x = column([0.0] * 3)
        source = [column([1.0, 2.0, 3.0])[1], column([4.0, 5.0, 6.0])[1]] if rank == 0 else None
        finish(dist.scatter(x, source, 0, async_op=async_op))
        assert x.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]][rank]
        assert matrix[:, 1].tolist() == [9.0] * 3

        _, x = column([float(rank)] * 3)
        outs = [column([7.0] * 3) for _ in range(n)]
        finish(
            dist.gather(x, [out for _, out in outs] if rank == 1 else None, 1, async_op=async_op)
        )
        found = [out.tolist() for _, out in outs]
        assert found == ([[0.0] * 3, [1.0] * 3] if rank == 1 else [[7.0] * 3] * 2)
        assert all(m[:, 1].tolist() == [9.0] * 3 for m, _ in outs)

        sent = [column([10.0 * rank + r] * 3)[1] for r in range(n)]
        outs = [column([7.0] * 3) for _ in range(n)]
        finish(dist.all_to_all([out for _, out in outs], sent, async_op=async_op))
        assert [out.tolist() for _, out in outs] == [[float(rank)] * 3, [10.0 + rank] * 3]
        assert all(m[:, 1].tolist() == [9.0] * 3 for m, _ in outs)

        whole, y = column([0.0] * 4)
        _, x = column([4.0 * rank + i for i in range(4)])
        finish(dist.all_to_all_single(y, x, async_op=async_op))
        assert y.tolist() == [2.0 * rank, 2.0 * rank + 1, 4 + 2.0 * rank, 5 + 2.0 * rank]
        assert whole[:, 1].tolist() == [9.0] * 4

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
        parts = [empty() for _ in range(n)]
        comm.reduce(empty(), 0)
        comm.gather(parts if rank == 0 else None, empty(), 0)
        comm.gather_single(torch.zeros(3 * n, 0) if rank == 0 else None, empty(), 0)
        comm.scatter(empty(), parts if rank == 0 else None, 0)
        comm.scatter_single(empty(), torch.zeros(3 * n, 0) if rank == 0 else None, 0)
        comm.all_to_all(parts, [empty() for _ in range(n)])
        comm.all_to_all_single(torch.zeros(3 * n, 0), torch.zeros(3 * n, 0))
        dist.all_reduce(empty())
        dist.broadcast(empty(), 0)
        dist.reduce(empty(), n - 1)
        dist.gather(empty(), parts if rank == 0 else None, 0)
        dist.scatter(empty(), parts if rank == 0 else None, 0)
        dist.all_to_all(parts, [empty() for _ in range(n)])
        dist.all_to_all_single(torch.zeros(3 * n, 0), torch.zeros(3 * n, 0))
        dist.all_to_all_single(torch.zeros(0), torch.zeros(0), [0] * n, [0] * n)
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


def test_coll_03_all_to_all_in_which_a_rank_sends_nothing() -> None:
    """gloo#179, pytorch#101380: splits may be 0, up to a rank's whole part; uneven ones must be given."""

    def worker(rank: int, n: int) -> Any:
        for rows, width in ((1, 2), (70_001, 3)):
            splits = [rows, rows] if rank == 0 else [0, 0]
            y = torch.zeros(rows, width)
            x = torch.full((sum(splits), width), 7.0)
            dist.all_to_all_single(y, x, [rows, 0], splits)
            assert (y == 7).all()
        return attempt(lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3)))

    found = run(2, worker, wall=15)
    assert refused(found, "all_to_all", "3", "2 ranks", "split")
    assert all("InvalidArgument" in each.kinds for each in found)


def test_coll_05_averages() -> None:
    """pytorch#162338: AVG divides by the world size, truncates integers and does not overflow in fp16."""

    def worker(rank: int, n: int) -> None:
        average = dist.ReduceOp.AVG
        for count in (5, 30_005):
            right = torch.arange(float(count)) + 0.5
            x = torch.arange(float(count)) + rank
            dist.all_reduce(x, average)
            assert torch.equal(x, right)
            x = torch.arange(float(count)) + rank
            dist.reduce(x, 0, average)
            assert torch.equal(x, right if rank == 0 else torch.arange(float(count)) + 1)
            y = torch.zeros(count)
            into_one("reduce_scatter")(y, torch.arange(2.0 * count) + rank, average)
            assert torch.equal(y, right + rank * count)
            dist.reduce_scatter(y, [torch.arange(float(count)) + rank] * n, average)
            assert torch.equal(y, right)

            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                h = torch.full((count,), 40_000.0, dtype=dtype)
                same = h.clone()
                dist.all_reduce(h, average)
                assert torch.equal(h, same)
                h = torch.zeros(count, dtype=dtype)
                dist.reduce_scatter(h, [same] * n, average)
                assert torch.equal(h, same)
            for dtype in (torch.int8, torch.int32, torch.int64):
                i = torch.tensor([rank, -3 - rank], dtype=dtype).repeat(count)
                dist.all_reduce(i, average)
                assert i.tolist() == [0, -3] * count
        functional: Any = importlib.import_module("torch.distributed._functional_collectives")
        mean = functional.all_reduce(torch.tensor([1.0 + rank]), "avg", dist.group.WORLD)
        assert mean.tolist() == [1.5]

    assert run(2, worker) == [None] * 2


def test_coll_07_roots_in_a_group_without_rank_0() -> None:
    """pytorch#74602, #130515, #149200: roots are global ranks, or group ranks where they say so."""

    def worker(rank: int, n: int) -> None:
        group: Any = dist.new_group([3, 1], backend="pycomm")
        to: tuple[dict[str, Any], ...] = ({"dst": 3}, {"group_dst": 1})
        of: tuple[dict[str, Any], ...] = ({"src": 1}, {"group_src": 0})
        if rank in (1, 3):
            place = {1: 0, 3: 1}[rank]
            assert dist.get_rank(group) == place
            parts = [torch.zeros(1) for _ in range(2)]
            dist.all_gather(parts, torch.tensor([float(rank)]), group=group)
            assert [t.item() for t in parts] == [1.0, 3.0]
            objects: list[Any] = [None]
            sent = ["a", "b"] if rank == 3 else []
            dist.scatter_object_list(objects, sent, src=3, group=group)
            assert objects == [{1: "a", 3: "b"}[rank]]
            objects = [{"x": rank}]
            dist.broadcast_object_list(objects, src=3, group=group)
            assert objects == [{"x": 3}]
            gathered: Any = [None, None] if rank == 3 else None
            dist.gather_object(rank, gathered, dst=3, group=group)
            assert gathered == ([1, 3] if rank == 3 else None)

            for root in to:
                x = torch.full((3,), rank + 1.0)
                dist.reduce(x, group=group, **root)
                assert x.tolist() == [6.0 if rank == 3 else 2.0] * 3
                found = [torch.zeros(3) for _ in range(2)] if rank == 3 else None
                dist.gather(torch.full((3,), float(rank)), found, group=group, **root)
                assert found is None or [t[0].item() for t in found] == [1.0, 3.0]
            for root in of:
                x = torch.full((3,), rank + 1.0)
                dist.broadcast(x, group=group, **root)
                assert x.tolist() == [2.0] * 3
                given = [torch.full((3,), 10.0 + r) for r in range(2)] if rank == 1 else None
                dist.scatter(x, given, group=group, **root)
                assert x.tolist() == [10.0 + place] * 3

            functional: Any = importlib.import_module("torch.distributed.nn.functional")
            y = torch.ones(1, requires_grad=True)
            functional.broadcast(rank * y, 3, group=group).sum().backward()
            assert y.grad is not None
            assert y.grad.item() == (6.0 if rank == 3 else 0.0)
        dist.barrier()

    assert run(4, worker) == [None] * 4


@pytest.mark.parametrize("scale", [1, 20_003])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_coll_09_uneven_lists(n: int, scale: int) -> None:
    """pytorch#156627, #84593: rank k contributes k + 1 (times a scale) elements, in every list form."""

    def worker(rank: int, n: int) -> None:
        def full(k: int, value: float) -> torch.Tensor:
            return torch.full(((k + 1) * scale,), float(value))

        def check(parts: list[torch.Tensor], values: list[float], counts: list[int]) -> None:
            assert [p.numel() for p in parts] == [(k + 1) * scale for k in counts]
            assert [p.unique().tolist() for p in parts] == [[v] for v in values]

        everybody = list(range(n))
        outs = [full(k, 0) for k in everybody]
        dist.all_gather(outs, full(rank, float(rank)))
        check(outs, [float(k) for k in everybody], everybody)
        y = full(rank, 0)
        dist.reduce_scatter(y, [full(k, rank + 1.0) for k in everybody])
        check([y], [n * (n + 1) / 2], [rank])
        outs = [full(k, 0) for k in everybody]
        dist.all_to_all(outs, [full(rank, 10.0 * rank + k) for k in everybody])
        check(outs, [10.0 * k + rank for k in everybody], everybody)
        outs = [full(k, 0) for k in everybody]
        dist.gather(full(rank, float(rank)), outs if rank == n - 1 else None, n - 1)
        if rank == n - 1:
            check(outs, [float(k) for k in everybody], everybody)
        y = full(rank, 0)
        dist.scatter(y, [full(k, float(k)) for k in everybody] if rank == 0 else None, 0)
        check([y], [float(rank)], [rank])

    assert run(n, worker, wall=15) == [None] * n


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
