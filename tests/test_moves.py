"""Collectives that move data without changing it: even parts and uneven ones, any memory layout, in place.

Everything that arrives is compared byte by byte with what was sent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import attempt, run
from reference import (
    DTYPES,
    TINY_SLOTS,
    WORLDS,
    all_gather_single,
    edges,
    expected,
    finished,
    noise,
    past_a_slot,
    pattern,
    payload,
    reduce_scatter_single,
    same,
    spread,
)

import pycomm

#: One of each width, and the widest as a pair of floats.
WIDTHS: Final = (torch.float8_e5m2, torch.bfloat16, torch.float32, torch.complex128)


def cells(n: int, share: int = 1) -> Iterator[tuple[torch.dtype, int, int]]:
    """(dtype, count, root): all dtypes at few counts, few dtypes at all counts; a thin slice of 8 ranks."""
    if n == 8:
        for dtype in (torch.bfloat16, torch.complex128):
            for count in (7, edges(dtype, share)[2], past_a_slot(dtype) // 2):
                yield from ((dtype, count, root) for root in (0, 5))
        return
    for turn, dtype in enumerate(DTYPES):
        for count in (7, past_a_slot(dtype)):
            yield dtype, count, turn % n
    for dtype in WIDTHS:
        for count in (0, 1, 1023, *edges(dtype, share), past_a_slot(dtype) - 5):
            yield from ((dtype, count, root) for root in range(n))


def run_all(works: Sequence[Any], later: bool) -> None:
    """Wait for asynchronous calls, last first; what synchronous ones returned is nothing."""
    for work in reversed(works) if later else ():
        finished(work)
    assert later or not any(works)


# Even parts


@pytest.mark.parametrize("n", WORLDS)
def test_gather_to_every_root(n: int) -> None:
    """The root gets everybody's bits in rank order; by both interfaces, into lists and single tensors."""

    def worker(rank: int, n: int) -> list[str]:
        comm, bank = pycomm.get_communicator(), noise(n)
        wrong = []
        for turn, (dtype, count, root) in enumerate(cells(n)):
            later, is_root = turn % 2 == 0, rank == root
            mine = payload(bank[rank], count, dtype)
            right = torch.cat([payload(bank[r], count, dtype).view(torch.uint8) for r in range(n)])
            outs = [torch.zeros(n * count, dtype=dtype) for _ in range(4)] if is_root else []
            lists = [list(out.view(n, count).unbind()) for out in outs] or [None] * 4  # type: ignore[list-item]
            whole = outs or [None] * 4  # type: ignore[list-item]
            works = [
                comm.gather(lists[0], mine, root, async_op=later),
                dist.gather(mine, lists[1], root, async_op=later),
                comm.gather_single(whole[2], mine, root, async_op=later),
            ]
            if hasattr(dist, "gather_single"):  # since torch 2.14
                works.append(dist.gather_single(mine, whole[3], root, async_op=later))
            run_all(works, later)
            bad = [
                i
                for i, out in enumerate(outs[: len(works)])
                if not same(out.view(torch.uint8), right)
            ]
            if bad or not same(mine, payload(bank[rank], count, dtype)):
                wrong.append(f"{dtype} {count} root {root} forms {bad}")
        return wrong

    assert run(n, worker, wall=60) == [[]] * n


@pytest.mark.parametrize("n", WORLDS)
def test_scatter_from_every_root(n: int) -> None:
    """Every rank gets its part of the root's bits; by both interfaces, from lists and single tensors."""

    def worker(rank: int, n: int) -> list[str]:
        comm, bank = pycomm.get_communicator(), noise(n)
        wrong = []
        for turn, (dtype, count, root) in enumerate(cells(n, n - 1 or 1)):
            later, is_root = turn % 2 == 0, rank == root
            parts = [payload(bank[root], count, dtype, to=r) for r in range(n)]
            whole = torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
            outs = [torch.zeros(count, dtype=dtype) for _ in range(3)]
            run_all(
                [
                    comm.scatter(outs[0], parts if is_root else None, root, async_op=later),
                    dist.scatter(outs[1], parts if is_root else None, root, async_op=later),
                    comm.scatter_single(outs[2], whole if is_root else None, root, async_op=later),
                ],
                later,
            )
            bad = [i for i, out in enumerate(outs) if not same(out, parts[rank])]
            if bad:
                wrong.append(f"{dtype} {count} root {root} forms {bad}")
        return wrong

    assert run(n, worker, wall=60) == [[]] * n


@pytest.mark.parametrize("n", WORLDS)
def test_all_to_all_in_equal_parts(n: int) -> None:
    """Rank r's part for rank k arrives there, and in r's place; by both interfaces and in both forms."""

    def worker(rank: int, n: int) -> list[str]:
        comm, bank = pycomm.get_communicator(), noise(n)
        wrong = []
        for turn, (dtype, count, root) in enumerate(cells(n, n - 1 or 1)):
            if root > 1:  # there is none
                continue
            later = turn % 2 == 0
            sent = [payload(bank[rank], count, dtype, to=r) for r in range(n)]
            whole = torch.cat([part.view(torch.uint8) for part in sent]).view(dtype)
            right = torch.cat(
                [payload(bank[r], count, dtype, to=rank).view(torch.uint8) for r in range(n)]
            )
            outs = [torch.zeros(n * count, dtype=dtype) for _ in range(4)]
            lists = [list(out.view(n, count).unbind()) for out in outs]
            run_all(
                [
                    comm.all_to_all(lists[0], sent, async_op=later),
                    dist.all_to_all(lists[1], sent, async_op=later),
                    comm.all_to_all_single(outs[2], whole, async_op=later),
                    dist.all_to_all_single(outs[3], whole, async_op=later),
                ],
                later,
            )
            bad = [i for i, out in enumerate(outs) if not same(out.view(torch.uint8), right)]
            if bad:
                wrong.append(f"{dtype} {count} forms {bad}")
        return wrong

    assert run(n, worker, wall=60) == [[]] * n


# Uneven parts


def matrices(n: int, dtype: torch.dtype) -> Iterator[list[list[int]]]:
    """What each rank has for each other: triangles, one busy rank, single pairs, and all sorts of sizes at random."""
    eager, slot = edges(dtype)[1], past_a_slot(dtype)
    yield [[r + k for k in range(n)] for r in range(n)]
    yield [[slot if r == n - 1 else 1 for _ in range(n)] for r in range(n)]  # one in chunks only
    yield [[slot if k == 0 else 0 for k in range(n)] for r in range(n)]
    yield [[eager + 1 if (r, k) == (0, n - 1) else 0 for k in range(n)] for r in range(n)]
    yield [[0] * n for _ in range(n)]
    choice = random.Random(n)
    sizes = (0, 0, 1, 7, 1000, eager // 2, eager, eager + 1, 2 * eager, slot)
    for _ in range(8):
        yield [[choice.choice(sizes) for _ in range(n)] for _ in range(n)]


@pytest.mark.parametrize("slot_bytes", [None, "4096"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_to_all_in_uneven_parts(n: int, slot_bytes: str | None) -> None:
    """Any counts, also none, beside others in chunks; lists, counts, and splits of rows."""

    def worker(rank: int, n: int) -> list[str]:
        comm, bank = pycomm.get_communicator(), noise(n)
        wrong = []
        for dtype in WIDTHS:
            for turn, counts in enumerate(matrices(n, dtype)):
                later = turn % 2 == 0
                sends, gets = counts[rank], [counts[r][rank] for r in range(n)]
                sent = [payload(bank[rank], c, dtype, to=r) for r, c in enumerate(sends)]
                parts = [payload(bank[r], c, dtype, to=rank) for r, c in enumerate(gets)]
                whole = torch.cat([part.view(torch.uint8) for part in sent]).view(dtype)
                right = torch.cat([part.view(torch.uint8) for part in parts])
                outs = [torch.zeros(sum(gets), dtype=dtype) for _ in range(4)]
                run_all(
                    [
                        comm.all_to_all(list(outs[0].split(gets)), sent, async_op=later),
                        dist.all_to_all(list(outs[1].split(gets)), sent, async_op=later),
                        comm.all_to_all_single(outs[2], whole, gets, sends, async_op=later),
                        dist.all_to_all_single(outs[3], whole, gets, sends, async_op=later),
                    ],
                    later,
                )
                bad = [i for i, out in enumerate(outs) if not same(out.view(torch.uint8), right)]
                if bad:
                    wrong.append(f"{dtype} {counts} forms {bad}")
        return wrong

    env = TINY_SLOTS if slot_bytes else None
    assert run(n, worker, wall=60, env=env) == [[]] * n


@pytest.mark.parametrize("slot_bytes", [None, "4096"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_gathers_and_scatters_of_uneven_parts(n: int, slot_bytes: str | None) -> None:
    """Each rank has as many as it likes, the others know how many: all_gather, gather and scatter."""

    def worker(rank: int, n: int) -> list[str]:
        comm, bank = pycomm.get_communicator(), noise(n)
        wrong = []
        for dtype in WIDTHS:
            for turn, matrix in enumerate(matrices(n, dtype)):
                counts, root, later = matrix[turn % n], turn % n, turn % 2 == 0
                is_root = rank == root
                mine = payload(bank[rank], counts[rank], dtype)
                parts = [payload(bank[r], counts[r], dtype) for r in range(n)]
                cut = [payload(bank[root], counts[r], dtype, to=r) for r in range(n)]
                got = [[torch.zeros(c, dtype=dtype) for c in counts] for _ in range(4)]
                lots = [torch.zeros(counts[rank], dtype=dtype) for _ in range(2)]
                run_all(
                    [
                        comm.all_gather(got[0], mine, async_op=later),
                        dist.all_gather(got[1], mine, async_op=later),
                        comm.gather(got[2] if is_root else None, mine, root, async_op=later),
                        dist.gather(mine, got[3] if is_root else None, root, async_op=later),
                        comm.scatter(lots[0], cut if is_root else None, root, async_op=later),
                        dist.scatter(lots[1], cut if is_root else None, root, async_op=later),
                    ],
                    later,
                )
                gathered = got if is_root else got[:2]
                bad = [i for i, g in enumerate(gathered) if not all(map(same, g, parts))]
                bad += [4 + i for i, lot in enumerate(lots) if not same(lot, cut[rank])]
                if bad:
                    wrong.append(f"{dtype} {counts} root {root} forms {bad}")
        return wrong

    env = TINY_SLOTS if slot_bytes else None
    assert run(n, worker, wall=60, env=env) == [[]] * n


@pytest.mark.parametrize("slot_bytes", [None, "4096"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_reduce_scatter_of_uneven_parts(n: int, slot_bytes: str | None) -> None:
    """Parts of any counts are reduced, each for its rank; a rank may want none."""

    def worker(rank: int, n: int) -> list[str]:
        comm = pycomm.get_communicator()
        wrong = []
        for dtype in (*WIDTHS, torch.int16):
            mine, right = pattern(rank, "sum", dtype).to(dtype), expected(n, "sum", dtype)
            for turn, matrix in enumerate(matrices(n, dtype)):
                counts, later = matrix[turn % n], turn % 2 == 0
                parts = list(spread(mine, sum(counts)).split(counts))
                wanted = spread(right, sum(counts)).split(counts)[rank]
                outs = [torch.zeros(counts[rank], dtype=dtype) for _ in range(2)]
                run_all(
                    [
                        comm.reduce_scatter(outs[0], parts, async_op=later),
                        dist.reduce_scatter(outs[1], parts, async_op=later),
                    ],
                    later,
                )
                bad = [i for i, out in enumerate(outs) if not same(out, wanted)]
                if bad:
                    wrong.append(f"{dtype} {counts} forms {bad}")
        return wrong

    env = TINY_SLOTS if slot_bytes else None
    assert run(n, worker, wall=60, env=env) == [[]] * n


# Memory layouts

#: Strides of a tensor in units of elements, from its shape.
LAYOUTS: Final[dict[str, Callable[[Sequence[int]], list[int]]]] = {
    "contiguous": lambda shape: strides_of(shape, range(len(shape)), 1),
    "every second": lambda shape: strides_of(shape, range(len(shape)), 2),
    "transposed": lambda shape: strides_of(shape, range(len(shape))[::-1], 1),
    "channels last": lambda shape: strides_of(
        shape, [0, *range(2, len(shape)), 1][: len(shape)], 1
    ),
}
SENTINEL: Final = 99


def strides_of(shape: Sequence[int], order: Sequence[int], step: int) -> list[int]:
    """The strides of a tensor whose dimensions lie in memory in this order, widest first."""
    strides = [0] * len(shape)
    for dim in reversed(order if len(shape) > 1 else range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return strides


@dataclass
class Laid:
    """Values in some layout, amid memory that must not be touched."""

    base: torch.Tensor
    view: torch.Tensor

    def intact(self) -> bool:
        """Whether all memory outside the view is as it was."""
        outside = torch.ones(self.base.numel(), dtype=torch.bool)
        v = self.view
        outside.as_strided(v.shape, v.stride(), v.storage_offset()).fill_(False)
        return same(self.base[outside], torch.full_like(self.base[outside], SENTINEL))


def laid(values: torch.Tensor, layout: str, offset: int = 5) -> Laid:
    """The values in that layout, at an odd place."""
    strides = LAYOUTS[layout](values.shape)
    base = torch.full((offset + 2 * values.numel() + 4,), SENTINEL).to(values.dtype)
    view = base.as_strided(values.shape, strides, offset)
    view.copy_(values)
    return Laid(base, view)


def ramp(shape: Sequence[int], start: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, other ones for each start."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 5 + 3 * start) % 23).reshape(shape).to(dtype)


#: 0 dimensions, no elements, a matrix, an image; one that takes chunks.
SHAPES: Final = ((), (3, 0, 2), (4, 6), (2, 3, 4, 5), (4, 3, 40, 61))


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_layouts_may_differ_between_ranks_and_tensors(n: int, async_op: bool) -> None:
    """Every operation of torch's moves elements, not memory: nothing beside a strided view is touched."""

    def worker(rank: int, n: int) -> list[str]:
        wrong, turn = [], 0
        names = list(LAYOUTS)

        def layout() -> str:
            nonlocal turn
            turn += 1
            return names[(turn * (rank + 1) + turn // 4) % 4]

        def full(values: torch.Tensor) -> Laid:
            return laid(values, layout())

        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            for shape in SHAPES:
                sources = [ramp(shape, r, dtype) for r in range(n)]
                nothing = torch.zeros(shape).to(dtype)
                root = turn % n
                x = {
                    name: full(sources[rank])
                    for name in ("all_reduce", "reduce", "broadcast", "all_gather", "gather")
                }
                gathered = [full(nothing) for _ in range(n)]
                on_root = [full(nothing) for _ in range(n)] if rank == root else []
                lot = full(nothing)
                given = [full(ramp(shape, n + r, dtype)) for r in range(n)] if rank == root else []
                part = full(nothing)
                inputs = [full(ramp(shape, rank + r, dtype)) for r in range(n)]
                out = [full(nothing) for _ in range(n)]
                works = [
                    dist.all_reduce(x["all_reduce"].view, async_op=async_op),
                    dist.reduce(x["reduce"].view, root, async_op=async_op),
                    dist.broadcast(x["broadcast"].view, root, async_op=async_op),
                    dist.all_gather(
                        [g.view for g in gathered], x["all_gather"].view, async_op=async_op
                    ),
                    dist.gather(
                        x["gather"].view, [g.view for g in on_root] or None, root, async_op=async_op
                    ),
                    dist.scatter(
                        lot.view, [g.view for g in given] or None, root, async_op=async_op
                    ),
                    dist.reduce_scatter(part.view, [i.view for i in inputs], async_op=async_op),
                    dist.all_to_all(
                        [o.view for o in out], [i.view for i in inputs], async_op=async_op
                    ),
                ]
                run_all(works, async_op)

                total = sum(s.float() for s in sources)
                assert isinstance(total, torch.Tensor)
                mine = sum(ramp(shape, r + rank, dtype).float() for r in range(n))
                right: dict[str, list[tuple[Laid, Any]]] = {
                    "all_reduce": [(x["all_reduce"], total)],
                    "reduce": [(x["reduce"], total if rank == root else sources[rank])],
                    "broadcast": [(x["broadcast"], sources[root])],
                    "all_gather": list(zip(gathered, sources, strict=True)),
                    "gather": list(zip(on_root, sources[: len(on_root)], strict=True)),
                    "scatter": [(lot, ramp(shape, n + rank, dtype))],
                    "reduce_scatter": [(part, mine)],
                    "all_to_all": [(o, ramp(shape, r + rank, dtype)) for r, o in enumerate(out)],
                    "inputs": [(i, ramp(shape, rank + r, dtype)) for r, i in enumerate(inputs)],
                }
                for name, pairs in right.items():
                    for found, values in pairs:
                        if not torch.equal(found.view, values.to(dtype)):
                            wrong.append(f"{name} {dtype} {shape}")
                        if not found.intact():
                            wrong.append(f"{name} {dtype} {shape} beside the view")
        return wrong

    assert run(n, worker) == [[]] * n


@pytest.mark.parametrize("async_op", [False, True])
def test_layouts_of_single_tensors(async_op: bool) -> None:
    """The forms with one tensor for all ranks take and fill any layout, and cut along the first dimension."""

    def worker(rank: int, n: int) -> list[str]:
        wrong = []
        for turn, layout in enumerate(LAYOUTS):
            other = list(LAYOUTS)[(turn + rank) % 4]
            for rows in (1, 700):
                shape = (rows, 3, 5)
                sources = [ramp(shape, r, torch.float32) for r in range(n)]
                wholes = [ramp((n * rows, 3, 5), 7 + r, torch.float32) for r in range(n)]
                nothing = torch.zeros(n * rows, 3, 5)
                x, whole = laid(sources[rank], layout), laid(wholes[rank], other)
                gathered, exchanged, cut = (
                    laid(nothing, other),
                    laid(nothing, layout),
                    laid(nothing[:rows], other),
                )
                # Row r of three goes to rank 0, 0, 1 or 0, 1, 1.
                splits = [[2, 1], [1, 2]]
                sent = laid(wholes[rank][:3], layout)
                got = [splits[r][rank] for r in range(n)]
                uneven = laid(torch.zeros(sum(got), 3, 5), other)
                works = [
                    all_gather_single(gathered.view, x.view, async_op=async_op),
                    reduce_scatter_single(cut.view, whole.view, async_op=async_op),
                    dist.all_to_all_single(exchanged.view, whole.view, async_op=async_op),
                ]
                if rows > 1:
                    works.append(
                        dist.all_to_all_single(
                            uneven.view, sent.view, got, splits[rank], async_op=async_op
                        )
                    )
                run_all(works, async_op)
                mine = slice(rank * rows, (rank + 1) * rows)
                right = {
                    "all_gather": (gathered, torch.cat(sources)),
                    "reduce_scatter": (cut, (wholes[0] + wholes[1])[mine]),
                    "all_to_all": (exchanged, torch.cat([w[mine] for w in wholes])),
                }
                if rows > 1:
                    begin = [[0, 2], [0, 1]]
                    pieces = [
                        wholes[r][begin[r][rank] : begin[r][rank] + splits[r][rank]]
                        for r in range(n)
                    ]
                    right["splits"] = uneven, torch.cat(pieces)
                for name, (found, values) in right.items():
                    if not torch.equal(found.view, values) or not found.intact():
                        wrong.append(f"{name} {layout} {rows}")
        return wrong

    assert run(2, worker) == [[]] * 2


def test_odd_offsets_through_the_communicator() -> None:
    """Parts at any address, also of elements that are not aligned to a line: no byte beside them is written."""

    def worker(rank: int, n: int) -> list[str]:
        comm = pycomm.get_communicator()
        wrong = []
        for dtype in WIDTHS:
            for count in (33, edges(dtype)[2], past_a_slot(dtype)):
                for offset in (1, 3, 7):

                    def at(start: int, count: int = count, offset: int = offset) -> Laid:
                        values = ramp((count,), start, dtype)  # noqa: B023  (called at once)
                        return laid(values, "contiguous", offset)

                    outs, ins = [at(50) for _ in range(n)], [at(rank + r) for r in range(n)]
                    comm.all_to_all([o.view for o in outs], [i.view for i in ins])
                    lot = at(50)
                    given = [i.view for i in ins] if rank == 1 else None
                    comm.scatter(lot.view, given, 1)
                    got = [at(50) for _ in range(n)]
                    comm.all_gather([g.view for g in got], ins[0].view)
                    right = [same(o.view, at(r + rank).view) for r, o in enumerate(outs)]
                    right += [same(lot.view, at(1 + rank).view)]
                    right += [same(g.view, at(r).view) for r, g in enumerate(got)]
                    right += [part.intact() for part in (*outs, *ins, lot, *got)]
                    if not all(right):
                        wrong.append(f"{dtype} {count} {offset}")
        return wrong

    assert run(3, worker) == [[]] * 3


# In place


def test_a_rank_may_leave_its_own_part_where_it_is() -> None:
    """The own part of input and output may be one memory in every form with a list."""

    def worker(rank: int, n: int) -> list[str]:
        comm = pycomm.get_communicator()
        wrong = []
        for count in (5, 5000, 100_003):
            for later in (False, True):
                parts = [torch.full((count,), 10.0 * rank + r) for r in range(n)]
                outs = [torch.zeros(count) for _ in range(n)]
                outs[rank] = parts[rank]
                for call in (comm.all_to_all, dist.all_to_all):
                    work = call(outs, parts, async_op=later)
                    run_all([work], later)
                    if [o.unique().tolist() for o in outs] != [[10.0 * r + rank] for r in range(n)]:
                        wrong.append(f"all_to_all {count} {later}")

                outs = [torch.zeros(count) for _ in range(n)]
                outs[rank].fill_(rank + 1)
                run_all([comm.all_gather(outs, outs[rank], async_op=later)], later)
                if [o.unique().tolist() for o in outs] != [[r + 1.0] for r in range(n)]:
                    wrong.append(f"all_gather {count} {later}")

                whole = torch.zeros(n * count)
                part = whole[rank * count :][:count].fill_(rank + 1)
                whole_or_none = whole if rank == 1 else None
                run_all([comm.gather_single(whole_or_none, part, 1, async_op=later)], later)
                right = torch.arange(1.0, n + 1).repeat_interleave(count)
                if rank == 1 and not torch.equal(whole, right):
                    wrong.append(f"gather {count} {later}")
                run_all([comm.scatter_single(part, whole_or_none, 1, async_op=later)], later)
                if not (part == rank + 1).all():
                    wrong.append(f"scatter {count} {later}")

                parts = [torch.full((count,), rank + 1.0) for r in range(n)]
                run_all([comm.reduce_scatter(parts[rank], parts, async_op=later)], later)
                if not (parts[rank] == n * (n + 1) / 2).all():
                    wrong.append(f"reduce_scatter {count} {later}")
        return wrong

    assert run(3, worker) == [[]] * 3


# torch's own forms


def test_objects_of_any_size() -> None:
    """gather_object and scatter_object_list, whose pickles differ in length between ranks."""

    def worker(rank: int, n: int) -> list[Any]:
        results: list[Any] = []
        for root in range(n):
            gathered: list[Any] = [None] * n
            mine = {"rank": rank, "text": "x" * (50_000 * rank)}
            dist.gather_object(mine, gathered if rank == root else None, root)
            sizes = [len(o["text"]) for o in gathered] if rank == root else None
            out: list[Any] = [None]
            dist.scatter_object_list(
                out, [("to", r) for r in range(n)] if rank == root else [], root
            )
            results.append((sizes, out))
        return results

    sizes = [0, 50_000, 100_000]
    assert run(3, worker) == [
        [(sizes if rank == root else None, [("to", rank)]) for root in range(3)]
        for rank in range(3)
    ]


def test_coalesced_forms() -> None:
    """Several calls as one: torch's coalescing manager, and the lists of its older interface."""

    def worker(rank: int, n: int) -> list[bool]:
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        results = []
        for count in (5, 60_001):
            tensors = [torch.full((count,), rank + 1.0 + i) for i in range(4)]
            manager: Any = dist.distributed_c10d._coalescing_manager
            with manager(async_ops=True) as pending:
                for t in tensors:
                    dist.all_reduce(t)
            pending.wait()
            results += [bool((t == 3 + 2 * i).all()) for i, t in enumerate(tensors)]

            outs = [torch.zeros(n * count) for _ in range(3)]
            with manager() as pending:
                for i, out in enumerate(outs):
                    all_gather_single(out, torch.full((count,), 10.0 * i + rank))
            right = torch.arange(float(n)).repeat_interleave(count)
            results += [torch.equal(out, right + 10 * i) for i, out in enumerate(outs)]

            parts = [torch.zeros(count) for _ in range(3)]
            with manager():
                for i, part in enumerate(parts):
                    reduce_scatter_single(part, torch.full((n * count,), float(rank + i)))
            results += [bool((part == 1 + 2 * i).all()) for i, part in enumerate(parts)]

            lists = [[torch.zeros(count), torch.zeros(2, 2)] for _ in range(n)]
            dist.all_gather_coalesced(
                lists, [torch.full((count,), float(rank)), torch.full((2, 2), float(rank))]
            )
            results += [bool((t == r).all()) for r, ts in enumerate(lists) for t in ts]

            # Different operations between start and end.
            a, b = torch.full((count,), rank + 1.0), torch.full((count,), float(rank))
            backend._start_coalescing()
            backend.allreduce([a])
            backend.broadcast([b], dist.BroadcastOptions())
            work = backend._end_coalescing()
            work.wait()
            results += [work.is_completed(), bool((a == 3).all()), bool((b == 0).all())]
            values = work.get_future().wait()
            results.append([v.shape for v in values] == [a.shape, b.shape])
        return results

    assert all(all(of_rank) for of_rank in run(2, worker))


def sparse(rank: int, dtype: torch.dtype, dense: int) -> torch.Tensor:
    """A sparse tensor whose entries are other ones on each rank, some of them twice."""
    indices = torch.tensor([[rank, 2, 4, 2], [0, 1, rank, 1]])
    values = torch.arange(4 * max(dense, 1)).reshape((4, dense) if dense else (4,)) + rank
    shape = (5, 3, dense) if dense else (5, 3)
    return torch.sparse_coo_tensor(indices, values.to(dtype), shape)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sparse_all_reduce(n: int) -> None:
    """The sum of sparse tensors is that of the dense ones, sync and async, with and without dense dimensions."""

    def worker(rank: int, n: int) -> list[str]:
        wrong = []
        for dtype in (torch.float32, torch.float64, torch.float16, torch.int64):
            for dense in (0, 4):
                for later in (False, True):
                    t = sparse(rank, dtype, dense)
                    run_all([dist.all_reduce(t, async_op=later)], later)
                    right = sum(sparse(r, dtype, dense).to_dense().double() for r in range(n))
                    if not t.is_sparse or not torch.equal(t.to_dense().double(), right):  # type: ignore[arg-type]
                        wrong.append(f"{dtype} {dense} {later}")
        t = sparse(rank, torch.int64, 0)
        dist.all_reduce(t, dist.ReduceOp.AVG)
        total = torch.zeros(5, 3, dtype=torch.int64)
        for r in range(n):
            total += sparse(r, torch.int64, 0).to_dense()
        if not torch.equal(t.to_dense(), total.div(n, rounding_mode="trunc")):
            wrong.append("average")
        empty = torch.sparse_coo_tensor(torch.zeros(2, 0), torch.zeros(0), (5, 3))
        t = empty if rank else sparse(0, torch.float32, 0)
        dist.all_reduce(t)
        if not torch.equal(t.to_dense(), sparse(0, torch.float32, 0).to_dense()):
            wrong.append("nothing to add")
        return wrong

    assert run(n, worker) == [[]] * n


def test_sparse_tensors_that_do_not_fit() -> None:
    """Another shape on one rank is a mismatch on every rank; an op that sparse tensors do not have is refused."""

    def worker(rank: int, n: int) -> list[Any]:
        refused = attempt(
            lambda: dist.all_reduce(sparse(rank, torch.float32, 0), dist.ReduceOp.MAX)
        )
        shape = (5, 3) if rank == 0 else (5, 4)
        t = torch.sparse_coo_tensor(torch.tensor([[0], [0]]), torch.ones(1), shape)
        return [refused, attempt(lambda: dist.all_reduce(t))]

    for refused, mismatch in run(2, worker):
        assert refused.kinds[0] == "InvalidArgument"
        assert "sparse tensors support sum and avg, not max" in refused.message
        assert mismatch.kinds[0] == "MismatchError"
        assert "shape" in mismatch.message
