"""Every collective against a reference that torch computes in the same process.

One launch per world size runs a whole grid of sizes, dtypes, ops and algorithms; `reference` says what goes in and must
come out. `test_moves` has what gathers, scatters and exchanges, `test_bits` what the last bit depends on.
"""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import run, td
from reference import (
    ALGORITHMS,
    COMPLEX,
    DTYPES,
    FLOAT8S,
    OPS_OF,
    REALS,
    TINY_SLOTS,
    WORLDS,
    all_gather_single,
    edges,
    expected,
    factor,
    finished,
    noise,
    past_a_slot,
    pattern,
    payload,
    reduce_op,
    reduce_scatter_single,
    same,
    spread,
)

import pycomm

# Nothing, one element, an odd few, nearly 1024, past the eager limit of 16 KiB for all dtypes of
# two bytes and more, and past a slot of 128 KiB for those of four.
COUNTS: Final = (0, 1, 7, 1023, 9001, 100_003)
FEW_COUNTS: Final = (7, 9001, 100_003)
CLASSIC: Final = ("sum", "avg", "min", "max", "product")


# all_reduce


def check_all_reduce(
    n: int, rank: int, dtypes: tuple[torch.dtype, ...], counts: tuple[int, ...]
) -> list[str]:
    """The cells of the grid that are wrong; of the less usual ops and 8-bit floats, fewer are tried."""
    comm = pycomm.get_communicator()
    wrong = []
    for dtype in dtypes:
        for op in OPS_OF[dtype]:
            usual = op in CLASSIC and dtype not in FLOAT8S
            mine = spread(pattern(rank, op, dtype).to(dtype), max(counts))
            right = spread(expected(n, op, dtype), max(counts))
            for count in counts:
                if not (usual or count in FEW_COUNTS or counts is not COUNTS):
                    continue
                for algorithm in ALGORITHMS:
                    t = mine[:count].clone()
                    comm.all_reduce(t, op, algorithm=algorithm, **factor(op, rank))
                    if not same(t, right[:count]):
                        wrong.append(f"{dtype} {op} {count} {algorithm}")
    return wrong


@pytest.mark.parametrize("n", WORLDS)
def test_all_reduce_grid(n: int) -> None:
    """Sizes x dtypes x ops x algorithms, through the Communicator, are right to the last bit."""

    def worker(rank: int, n: int) -> list[str]:
        return check_all_reduce(n, rank, DTYPES, COUNTS)

    assert run(n, worker, wall=60) == [[]] * n


@pytest.mark.parametrize("n", WORLDS)
def test_all_reduce_of_several_megabytes(n: int) -> None:
    """Many slots' worth, so that the slot queue wraps, with every algorithm and an odd count."""

    def worker(rank: int, n: int) -> list[str]:
        return check_all_reduce(n, rank, (torch.bfloat16,), (1_500_007,))

    assert run(n, worker, wall=60) == [[]] * n


@pytest.mark.parametrize("streaming", ["always", "never"])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_all_reduce_through_tiny_slots(n: int, streaming: str) -> None:
    """Four slots of a page: chunk and shard ends, and waiting for free slots, at every algorithm."""

    def worker(rank: int, n: int) -> list[str]:
        dtypes = (torch.int8, torch.float16, torch.float8_e5m2, torch.complex128)
        return check_all_reduce(n, rank, dtypes, (1023, 4097, 16_385, 33_333))

    env = TINY_SLOTS | {"PYCOMM_STREAMING": streaming}
    assert run(n, worker, env=env, wall=60) == [[]] * n


@pytest.mark.parametrize("n", WORLDS)
def test_all_reduce_through_dist(n: int) -> None:
    """dist.all_reduce agrees with the reference for every dtype and op."""

    def worker(rank: int, n: int) -> list[str]:
        wrong = []
        for dtype in DTYPES:
            for op in OPS_OF[dtype]:
                for count in (0, 7, 20_011):
                    t = spread(pattern(rank, op, dtype).to(dtype), count)
                    dist.all_reduce(t, reduce_op(op, rank))
                    if not same(t, spread(expected(n, op, dtype), count)):
                        wrong.append(f"{dtype} {op} {count}")
        return wrong

    assert run(n, worker) == [[]] * n


@pytest.mark.parametrize("n", [2, 3])
def test_reductions_at_the_limits(n: int) -> None:
    """Counts around what travels beside the header, and around a slot, for elements of every width."""

    def worker(rank: int, n: int) -> list[str]:
        comm = pycomm.get_communicator()
        wrong = []
        for dtype in (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, *COMPLEX):
            slot = past_a_slot(dtype) - 5
            mine, right = pattern(rank, "sum", dtype).to(dtype), expected(n, "sum", dtype)
            for count in (*edges(dtype), *edges(dtype, n), slot - 1, slot, slot + 1):
                t, u, p = spread(mine, count), spread(mine, count), torch.zeros(count).to(dtype)
                comm.all_reduce(t)
                comm.reduce(u, n - 1)
                comm.reduce_scatter_single(p, spread(mine, n * count))
                part = spread(right, n * count)[rank * count :][:count]
                reduced = spread(right if rank == n - 1 else mine, count)
                if not (same(t, spread(right, count)) and same(u, reduced) and same(p, part)):
                    wrong.append(f"{dtype} {count}")
        return wrong

    assert run(n, worker) == [[]] * n


@pytest.mark.parametrize("n", WORLDS)
def test_reduce_to_every_root(n: int) -> None:
    """The root gets the reduction, the others keep what they have; by both interfaces, sync and async."""

    def worker(rank: int, n: int) -> list[str]:
        comm = pycomm.get_communicator()
        wrong, turn = [], 0
        for dtype in DTYPES:
            for op in OPS_OF[dtype]:
                mine, right = pattern(rank, op, dtype).to(dtype), expected(n, op, dtype)
                for count in (0, 1, 7, 9001) if op in CLASSIC else (7, 20_011):
                    turn += 1
                    root, later = turn % n, turn % 3 == 0
                    before, after = spread(mine, count), spread(right, count)
                    a, b = before.clone(), before.clone()
                    works: list[Any] = [
                        comm.reduce(a, root, op, async_op=later, **factor(op, rank)),
                        dist.reduce(b, root, reduce_op(op, rank), async_op=later),
                    ]
                    for work in works if later else []:
                        finished(work)
                    wanted = after if rank == root else before
                    if not (same(a, wanted) and same(b, wanted)):
                        wrong.append(f"{dtype} {op} {count} root {root}")
        return wrong

    assert run(n, worker, wall=60) == [[]] * n


def test_reduce_of_many_chunks_to_every_root() -> None:
    """Many slots' worth to every root, through every way that a reduction to one rank can take."""

    def worker(rank: int, n: int) -> list[str]:
        comm = pycomm.get_communicator()
        wrong = []
        for dtype in (torch.float16, torch.int64, torch.complex64):
            mine, right = pattern(rank, "avg", dtype).to(dtype), expected(n, "avg", dtype)
            for count in (5000, 600_011):
                for root in range(n):
                    t = spread(mine, count)
                    comm.reduce(t, root, "avg")
                    if not same(t, spread(right if rank == root else mine, count)):
                        wrong.append(f"{dtype} {count} root {root}")
        return wrong

    assert run(3, worker) == [[]] * 3
    assert run(3, worker, env=TINY_SLOTS) == [[]] * 3


def test_shapes_survive_and_numpy_arrays_work() -> None:
    """Any shape, also none, is reduced in place; so is a numpy array, which speaks DLPack."""

    def worker(rank: int, n: int) -> tuple[float, list[list[float]], list[float]]:
        comm = pycomm.get_communicator()
        scalar, matrix = torch.tensor(rank + 1.0), torch.full((2, 3), rank + 1.0)
        array = torch.full((3,), rank + 1.0).numpy()
        dist.all_reduce(scalar)
        comm.all_reduce(matrix)
        comm.all_reduce(array)
        return scalar.item(), matrix.tolist(), array.tolist()

    assert run(2, worker) == [(3.0, [[3.0] * 3] * 2, [3.0] * 3)] * 2


# Moving data


def moved_counts(dtype: torch.dtype) -> tuple[int, ...]:
    """None, one, a few, past the eager limit, past a slot."""
    return 0, 1, 7, 16_384 // dtype.itemsize + 3, 262_144 // dtype.itemsize + 5


@pytest.mark.parametrize("n", WORLDS)
def test_broadcast_from_every_root(n: int) -> None:
    """Every dtype's bits arrive unchanged from every root, by both interfaces."""

    def worker(rank: int, n: int) -> list[str]:
        comm = pycomm.get_communicator()
        bank = noise(n)
        wrong = []
        for dtype in DTYPES:
            for count in moved_counts(dtype):
                for root in range(n):
                    right = payload(bank[root], count, dtype)
                    a, b = payload(bank[rank], count, dtype), payload(bank[rank], count, dtype)
                    comm.broadcast(a, root)
                    dist.broadcast(b, root)
                    if not (same(a, right) and same(b, right)):
                        wrong.append(f"{dtype} {count} {root}")
        return wrong

    assert run(n, worker) == [[]] * n


@pytest.mark.parametrize("n", WORLDS)
def test_all_gather_into_lists_and_single_tensors(n: int) -> None:
    """Every dtype's bits arrive unchanged, in rank order, by both interfaces and in both forms."""

    def worker(rank: int, n: int) -> list[str]:
        comm = pycomm.get_communicator()
        bank = noise(n)
        wrong = []
        for dtype in DTYPES:
            for count in moved_counts(dtype):
                mine = payload(bank[rank], count, dtype)
                right = torch.cat([payload(bank[r], count, dtype) for r in range(n)])
                outs = [torch.zeros(n * count, dtype=dtype) for _ in range(4)]
                lists = [list(out.split(count)) if count else [out] * n for out in outs]
                comm.all_gather(lists[0], mine)
                dist.all_gather(lists[1], mine)
                comm.all_gather_single(outs[2], mine)
                all_gather_single(outs[3], mine)
                bad = [i for i, out in enumerate(outs) if not same(out, right)]
                if bad:
                    wrong.append(f"{dtype} {count} forms {bad}")
        return wrong

    assert run(n, worker) == [[]] * n


def test_all_gather_in_place() -> None:
    """The input may lie in its own part of the output, at sizes that take either way."""

    def worker(rank: int, n: int) -> list[bool]:
        results = []
        for count in (5, 100_003):
            out = torch.zeros(n * count)
            part = out[rank * count : (rank + 1) * count]
            part.fill_(rank + 1)
            all_gather_single(out, part)
            results.append(same(out, torch.arange(1.0, n + 1).repeat_interleave(count)))
        return results

    assert run(3, worker) == [[True, True]] * 3


@pytest.mark.parametrize("n", WORLDS)
def test_reduce_scatter_of_lists_and_single_tensors(n: int) -> None:
    """Each rank gets its part of the reduction, by both interfaces and in both forms."""

    def worker(rank: int, n: int) -> list[str]:
        comm = pycomm.get_communicator()
        wrong = []
        for dtype in DTYPES:
            for op in OPS_OF[dtype]:
                mine, right = pattern(rank, op, dtype).to(dtype), expected(n, op, dtype)
                for count in (0, 1, 7, 1023, 30_011) if op in CLASSIC and n < 8 else (7, 9001):
                    whole = spread(mine, n * count)
                    part = spread(right, n * count)[rank * count : (rank + 1) * count]
                    parts = list(whole.split(count)) if count else [whole] * n
                    outs = [torch.zeros(count, dtype=dtype) for _ in range(4)]
                    torch_op, own = reduce_op(op, rank), factor(op, rank)
                    comm.reduce_scatter(outs[0], parts, op, **own)
                    dist.reduce_scatter(outs[1], parts, torch_op)
                    comm.reduce_scatter_single(outs[2], whole, op, **own)
                    reduce_scatter_single(outs[3], whole, torch_op)
                    bad = [i for i, out in enumerate(outs) if not same(out, part)]
                    if bad or not same(whole, spread(mine, n * count)):
                        wrong.append(f"{dtype} {op} {count} forms {bad}")
        return wrong

    assert run(n, worker, wall=60) == [[]] * n


def test_reduce_scatter_in_place() -> None:
    """The output may be its own part of the input, at sizes that take either way."""

    def worker(rank: int, n: int) -> list[bool]:
        results = []
        for count in (5, 100_003):
            whole = torch.arange(1.0, n + 1).repeat_interleave(count) * (rank + 1)
            part = whole[rank * count : (rank + 1) * count]
            reduce_scatter_single(part, whole)
            results.append(same(part, torch.full((count,), (rank + 1.0) * n * (n + 1) / 2)))
        return results

    assert run(3, worker) == [[True, True]] * 3


@pytest.mark.parametrize("n", WORLDS)
def test_barrier_lets_nobody_pass_before_all_have_come(n: int, tmp_path: Path) -> None:
    """After a barrier, every rank sees what each peer did before it; by both interfaces."""

    def worker(rank: int, n: int) -> bool:
        comm = pycomm.get_communicator()
        barriers: tuple[Callable[[], object], ...] = (
            comm.barrier,
            dist.barrier,
            lambda: finished(comm.barrier(async_op=True)),
        )
        complete = True
        for turn, barrier in enumerate(barriers):
            (tmp_path / f"{turn}.{rank}").touch()
            barrier()
            complete &= len(list(tmp_path.glob(f"{turn}.*"))) == n
        return complete

    assert run(n, worker) == [True] * n


# Order


def test_async_calls_may_be_waited_for_in_any_order() -> None:
    """Several operations in flight, by both interfaces, waited for last first, are all right."""

    def worker(rank: int, n: int) -> bool:
        comm = pycomm.get_communicator()
        tensors = [torch.full((count,), rank + 1.0) for count in (1, 70_001, 9001, 300_007) * 3]
        works: list[Any] = [
            comm.all_reduce(t, async_op=True) if i % 2 else dist.all_reduce(t, async_op=True)
            for i, t in enumerate(tensors)
        ]
        for work in reversed(works):
            work.wait()
        done = all(w.is_done() if i % 2 else w.is_completed() for i, w in enumerate(works))
        return done and all((t == n * (n + 1) / 2).all().item() for t in tensors)

    assert run(3, worker) == [True] * 3


def test_async_forms_of_every_collective() -> None:
    """async_op=True is honoured by each collective; temporaries may be dropped before they end."""

    def worker(rank: int, n: int) -> bool:
        comm = pycomm.get_communicator()
        big, small = 50_021, 3
        results = []
        for count in (big, small):
            x = torch.full((count,), rank + 1.0)
            b, g = x.clone(), torch.zeros(n * count)
            outs = [torch.zeros(count) for _ in range(n)]
            s, s2 = torch.zeros(count), torch.zeros(count)
            works: list[Any] = [
                comm.broadcast(b, n - 1, async_op=True),
                comm.all_gather_single(g, x.clone(), async_op=True),
                dist.all_gather(outs, x.clone(), async_op=True),
                comm.reduce_scatter_single(s, x.repeat(n), async_op=True),
                dist.reduce_scatter(s2, [x.clone() for _ in range(n)], async_op=True),
                dist.barrier(async_op=True),
            ]
            for work in works:
                work.wait()
            right = torch.arange(1.0, n + 1).repeat_interleave(count)
            total = n * (n + 1) / 2
            results += [(b == n).all(), same(g, right), same(torch.cat(outs), right)]
            results += [(s == total).all(), (s2 == total).all()]
        return all(bool(r) for r in results)

    assert run(3, worker) == [True] * 3


def test_futures_carry_the_result() -> None:
    """get_future().then runs after the operation and sees its result."""

    def worker(rank: int, n: int) -> float:
        t = torch.full((50_001,), rank + 1.0)
        work = dist.all_reduce(t, async_op=True)
        assert work is not None
        future = work.get_future().then(lambda f: f.value()[0][-1].item() * 2)
        result: float = future.wait()
        return result

    assert run(2, worker) == [6.0] * 2


def test_futures_asked_for_late() -> None:
    """get_future() after wait(), also at the very moment that the work ends, has the result."""

    def worker(rank: int, n: int) -> set[float]:
        sums = set()
        for turn in range(600):
            t = torch.full((2,), rank + 1.0)
            work: Any = dist.all_reduce(t, async_op=True)
            if turn % 2:
                work.wait()
            while not work.is_completed():
                pass
            sums.add(work.get_future().then(lambda f: f.value()[0].sum().item()).wait())
        return sums

    assert run(2, worker) == [{6.0}] * 2


@pytest.mark.parametrize("form", ["sync", "future"])
def test_a_callback_may_communicate(form: str) -> None:
    """A future's callback may wait for another collective, as torch's PowerSGD hook does."""

    def worker(rank: int, n: int) -> float:
        t, u = torch.full((200_003,), rank + 1.0), torch.full((5,), rank + 1.0)
        work: Any = dist.all_reduce(t, async_op=True)

        def more(future: Any) -> float:
            again: Any = dist.all_reduce(u, async_op=form == "future")
            if form == "future":
                again.get_future().wait()
            return u[0].item()

        result: float = work.get_future().then(more).wait()
        return result

    assert run(2, worker, wall=6) == [3.0] * 2


def test_torch_forms_that_are_built_on_these() -> None:
    """Objects, coalesced calls and the functional collectives of torch.compile and DTensor work."""

    def worker(rank: int, n: int) -> list[Any]:
        functional: Any = importlib.import_module("torch.distributed._functional_collectives")
        objects: list[Any] = [None] * n
        dist.all_gather_object(objects, {"rank": rank})
        sent = [f"from {rank}"]
        dist.broadcast_object_list(sent, n - 1)
        a, b = torch.ones(5), torch.full((20_011,), 2.0)
        dist.all_reduce_coalesced([a, b])
        total = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        mine = torch.full((1,), float(rank))
        gathered = functional.all_gather_tensor(mine, 0, dist.group.WORLD)
        part = functional.reduce_scatter_tensor(torch.arange(2.0), "sum", 0, dist.group.WORLD)
        numbers = [a[-1].item(), b[-1].item(), *total.tolist(), *gathered.tolist()]
        return [[o["rank"] for o in objects], sent, numbers, part.tolist()]

    common = [[0, 1], ["from 1"], [2.0, 4.0, 2.0, 2.0, 0.0, 1.0]]
    assert run(2, worker) == [[*common, [0.0]], [*common, [2.0]]]


def test_sync_calls_queue_behind_async_ones() -> None:
    """A synchronous call runs after the asynchronous ones before it, whose work is then done."""

    def worker(rank: int, n: int) -> tuple[float, float, bool]:
        comm = pycomm.get_communicator()
        t = torch.full((200_003,), rank + 1.0)
        works: list[Any] = [dist.all_reduce(t, async_op=True) for _ in range(3)]
        comm.all_reduce(t)  # of the same tensor: each adds up what the one before it left
        u = torch.full((5,), rank + 1.0)
        pending = comm.all_reduce(u, async_op=True)
        dist.all_reduce(u)
        finished(pending)
        return t[-1].item(), u[0].item(), all(w.is_completed() for w in works)

    assert run(2, worker) == [(3.0 * 8, 6.0, True)] * 2


def random_call(comm: Any, rank: int, choice: random.Random) -> tuple[Any, Callable[[], bool]]:
    """Start an operation that `choice`, alike on all ranks, picks; and how to check its result."""
    n, count = comm.world_size, choice.choice((0, 1, 33, 1000, 4096, 5555, 20_000, 77_777))
    dtype, op = choice.choice(REALS), choice.choice(CLASSIC)
    kinds = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "all_to_all")
    kind, root = choice.choice((*kinds, "reduce_scatter")), choice.randrange(n)
    algorithm, later = choice.choice(ALGORITHMS), choice.random() < 0.5
    mine, right = pattern(rank, op, dtype).to(dtype), expected(n, op, dtype)
    inputs = [pattern(r, op, dtype).to(dtype) for r in range(n)]
    if kind == "all_reduce":
        t = spread(mine, count)
        work = comm.all_reduce(t, op, algorithm=algorithm, async_op=later)
        return work, lambda: same(t, spread(right, count))
    if kind == "reduce":
        t = spread(mine, count)
        work = comm.reduce(t, root, op, async_op=later)
        return work, lambda: same(t, spread(right if rank == root else mine, count))
    if kind == "broadcast":
        t = spread(mine, count)
        work = comm.broadcast(t, root, async_op=later)
        return work, lambda: same(t, spread(inputs[root], count))
    if kind in ("all_gather", "gather"):
        to_all = kind == "all_gather"
        counts = [choice.choice((0, count)) for _ in range(n)]
        outs = [torch.zeros(c, dtype=dtype) for c in counts]
        part = spread(mine, counts[rank])
        if to_all:
            work = comm.all_gather(outs, part, async_op=later)
        else:
            work = comm.gather(outs if rank == root else None, part, root, async_op=later)
        parts = [spread(inputs[r], counts[r]) for r in range(n)]
        return work, lambda: not (to_all or rank == root) or all(map(same, outs, parts))
    if kind == "scatter":
        t = torch.zeros(count, dtype=dtype)
        whole = spread(mine, n * count) if rank == root else None
        work = comm.scatter_single(t, whole, root, async_op=later)
        return work, lambda: same(t, spread(inputs[root], n * count)[rank * count :][:count])
    if kind == "all_to_all":
        matrix = [[choice.choice((0, 1, count)) for _ in range(n)] for _ in range(n)]
        outs = [torch.zeros(matrix[r][rank], dtype=dtype) for r in range(n)]
        sent = [spread(mine, c) for c in matrix[rank]]
        work = comm.all_to_all(outs, sent, async_op=later)
        got = [spread(inputs[r], matrix[r][rank]) for r in range(n)]
        return work, lambda: all(map(same, outs, got))
    t = torch.zeros(count, dtype=dtype)
    work = comm.reduce_scatter_single(t, spread(mine, n * count), op, async_op=later)
    return work, lambda: same(t, spread(right, n * count)[rank * count :][:count])


@pytest.mark.parametrize("slots", ["4", "8"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_random_sequences(n: int, slots: str) -> None:
    """Operations of all kinds, sizes and dtypes, in random order, some in flight, through slots of
    a page: what one leaves behind in the slots is not taken for another's.
    """

    def worker(rank: int, n: int) -> list[int]:
        comm = pycomm.get_communicator()
        choice = random.Random(int(slots) * n)
        wrong, flight = [], []
        for turn in range(250):
            work, is_right = random_call(comm, rank, choice)
            flight.append((turn, work, is_right))
            if choice.random() < 0.3:
                for number, pending, check in reversed(flight):
                    if pending is not None:
                        pending.wait()
                    if not check():
                        wrong.append(number)
                flight.clear()
        comm.barrier()
        return wrong

    env = TINY_SLOTS | {"PYCOMM_SLOTS": slots}
    assert run(n, worker, env=env) == [[]] * n


def test_threads_with_a_communicator_each() -> None:
    """Two threads of each rank communicate at once, each through its own communicator."""

    def worker(rank: int, n: int) -> list[float]:
        store = dist.distributed_c10d._get_default_store()
        comms = [
            pycomm.create_communicator(dist.PrefixStore(str(i), store), rank, n, td(8))
            for i in range(2)
        ]
        totals = [torch.full((40_009,), rank + 1.0, dtype=torch.float64) for _ in comms]

        def work(i: int) -> None:
            for _ in range(50):
                comms[i].all_reduce(totals[i], "avg" if i else "max")
                comms[i].barrier()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [t[-1].item() for t in totals]

    assert run(2, worker) == [[2.0, 1.5]] * 2


def test_more_ranks_than_cores_and_slots() -> None:
    """16 ranks: the ring's pipeline is longer than the slot queue, and shards are very small."""

    def worker(rank: int, n: int) -> list[bool]:
        comm = pycomm.get_communicator()
        results = []
        for algorithm in ALGORITHMS:
            for count in (5, 50_021):
                t = torch.full((count,), rank + 1, dtype=torch.int32)
                comm.all_reduce(t, algorithm=algorithm)
                results.append(bool((t == n * (n + 1) // 2).all()))
        part, whole = torch.zeros(1001), torch.full((16_016,), rank + 1.0)
        comm.reduce_scatter_single(part, whole)
        gathered = torch.zeros(16_016)
        comm.all_gather_single(gathered, part)
        return [*results, bool((gathered == n * (n + 1) / 2).all())]

    env = TINY_SLOTS
    assert run(16, worker, env=env) == [[True] * 9] * 16


# Groups


def test_overlapping_groups_used_in_turn() -> None:
    """Sub-groups of 4 ranks, interleaved and partly in flight at once, do not disturb each other."""

    def worker(rank: int, n: int) -> list[str]:
        subsets = ([0, 1, 2, 3], [1, 3], [0, 1, 2], [2, 3], [3])
        groups: list[tuple[list[int], Any]] = [(s, dist.new_group(s)) for s in subsets]
        mine = [(ranks, group) for ranks, group in groups if rank in ranks]
        wrong = []
        for turn in range(10):
            count = (3, 40_009)[turn % 2]
            flight = []
            for ranks, group in mine:
                t = torch.full((count,), rank + 1.0)
                flight.append((ranks, t, dist.all_reduce(t, group=group, async_op=True)))
            for ranks, t, work in reversed(flight):
                finished(work)
                if not (t == sum(r + 1 for r in ranks)).all():
                    wrong.append(f"all_reduce {ranks}")
            for ranks, group in mine:
                t = torch.full((count,), float(rank))
                dist.broadcast(t, src=ranks[-1], group=group)
                gathered = [torch.zeros(count) for _ in ranks]
                dist.all_gather(gathered, torch.full((count,), float(rank)), group=group)
                if not (t == ranks[-1]).all():
                    wrong.append(f"broadcast {ranks}")
                if [g[-1].item() for g in gathered] != ranks:
                    wrong.append(f"all_gather {ranks}")
        return wrong

    assert run(4, worker) == [[]] * 4


def test_communicators_made_without_process_groups(tmp_path: Path) -> None:
    """create_communicator serves several communicators of one store, apart by a PrefixStore."""

    def worker(rank: int, n: int) -> tuple[list[float], bool]:
        store = dist.FileStore(str(tmp_path / "store"), n)
        whole = pycomm.create_communicator(dist.PrefixStore("a", store), rank, n, td(8))
        turned = pycomm.create_communicator(dist.PrefixStore("b", store), n - 1 - rank, n, td(8))
        s, t, u = (torch.tensor([float(rank)]) for _ in range(3))
        whole.all_reduce(s)
        turned.broadcast(t, 0)  # which is the last rank
        whole.broadcast(u, 0)
        facts = (turned.rank, whole.rank, whole.world_size) == (n - 1 - rank, rank, n)
        whole.shutdown()
        turned.barrier()
        turned.shutdown()
        return [s.item(), t.item(), u.item()], facts and not dist.is_initialized()

    assert run(3, worker, init=False) == [([3.0, 2.0, 0.0], True)] * 3


def test_a_new_default_group_in_the_same_process(tmp_path: Path) -> None:
    """destroy_process_group and init_process_group may follow each other any number of times."""

    def worker(rank: int, n: int) -> list[float]:
        results = []
        for turn in range(3):
            method = f"file://{tmp_path}/{turn}"
            dist.init_process_group("pycomm", init_method=method, rank=rank, world_size=n)
            t = torch.full((30_001,), rank + 1.0)
            dist.all_reduce(t)
            results.append(t[-1].item())
            dist.destroy_process_group()
        return results

    assert run(2, worker, init=False) == [[3.0] * 3] * 2


def test_sequence_and_stats_count_operations() -> None:
    """`sequence` is equal on all ranks and grows by one; stats() counts operations and bytes."""

    def worker(rank: int, n: int) -> tuple[int, int, int, int]:
        comm = pycomm.get_communicator()
        before, sequence = comm.stats(), comm.sequence
        comm.all_reduce(torch.ones(10))
        comm.barrier()
        after = comm.stats()
        moved = after["bytes"] - before["bytes"], after["operations"] - before["operations"]
        return sequence, comm.sequence - sequence, *moved

    results = run(2, worker)
    assert results[0] == results[1]
    assert results[0][1:] == (2, 40, 2)
