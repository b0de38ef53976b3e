"""Messages through torch.distributed: send, recv, isend, irecv, batches, coalescing, any source."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import run

import pycomm

#: Nothing, one, within a header's line, odd, more than a ring of 512 KiB.
COUNTS: Final = (0, 1, 12, 1001, 1 << 20)
DTYPES: Final = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def world() -> Any:
    """The default group."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def content(count: int, source: int, tag: int, dtype: torch.dtype) -> torch.Tensor:
    """What a message with this source and tag holds."""
    return ((torch.arange(count) + 3 * source + tag) % 7).to(dtype)


def ring(r: int, n: int) -> None:
    """Everybody sends right and receives from the left, in all the ways torch has."""
    right, left = (r + 1) % n, (r - 1) % n
    for count in COUNTS:
        for dtype in DTYPES:
            wanted = content(count, left, 5, dtype)
            sent = content(count, r, 5, dtype)
            got = torch.empty_like(sent)
            works: list[Any] = [dist.isend(sent, right, tag=5), dist.irecv(got, left, tag=5)]
            for work in works:
                work.wait()
                assert work.is_completed()
            assert torch.equal(got, wanted)

            got = torch.empty_like(sent)
            ops = [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, sent, right)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert torch.equal(got, wanted)

            got = torch.empty_like(sent)
            if r % 2 == 0:
                dist.send(sent, right)
            source = dist.recv(got, left)
            if r % 2 == 1:
                dist.send(sent, right)
            assert source == left
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("n", [2, 4])
def test_ring(n: int) -> None:
    run(n, ring, wall=60)


def tags_and_sources(r: int, n: int) -> None:
    """Tags in another order than sent; any source says which; layouts are logical."""
    if r == 0:
        messages = [torch.full((k * 100_000 + 1,), float(k)) for k in range(4)]
        works: list[Any] = [dist.isend(m, 1, tag=k) for k, m in enumerate(messages)]
        for work in works:
            work.wait()
    elif r == 1:
        for k in (3, 0, 2, 1):
            got = torch.empty(k * 100_000 + 1)
            dist.recv(got, 0, tag=k)
            assert (got == k).all()
    dist.barrier()

    if r == 0:
        seen = []
        for _ in range(2 * (n - 1)):
            got = torch.empty(3)
            source = dist.recv(got)
            assert got.tolist() == [float(source)] * 3
            seen.append(source)
        assert sorted(seen) == sorted(2 * list(range(1, n)))
    else:
        for _ in range(2):
            dist.send(torch.full((3,), float(r)), 0)
    dist.barrier()

    if r == 0:
        dist.send(torch.arange(12.0).view(3, 4).t(), 1)
    elif r == 1:
        matrix = torch.full((4, 6), -1.0)
        dist.recv(matrix[:, ::2], 0)
        assert torch.equal(matrix[:, ::2], torch.arange(12.0).view(3, 4).t())
        assert (matrix[:, 1::2] == -1).all()


def test_tags_sources_and_layouts() -> None:
    run(3, tags_and_sources)


def around(r: int, n: int) -> None:
    """Groups number their own ranks; futures; objects; collectives in between."""
    group: Any = dist.new_group([1, 2])
    if r in (1, 2):
        other = 3 - r
        got = torch.empty(5)
        works: list[Any] = [dist.isend(torch.full((5,), float(r)), other, group=group)]
        works.append(dist.irecv(got, other, group=group))
        values: Any = [w.get_future() for w in works]
        assert [float(v.wait()[0][0]) for v in values] == [float(r), float(other)]
        assert got.tolist() == [float(other)] * 5
    if r == 0:
        dist.send_object_list([{"a": 1}, "text"], 1)
    elif r == 1:
        objects: list[Any] = [None, None]
        dist.recv_object_list(objects, 0)
        assert objects == [{"a": 1}, "text"]

    big = torch.full((1 << 20,), float(r))
    got = torch.empty(1 << 20)
    works = [dist.isend(big, (r + 1) % n), dist.irecv(got, (r - 1) % n)]
    total = torch.ones(1000)
    dist.all_reduce(total)
    assert (total == n).all()
    for work in works:
        work.wait()
    assert (got == (r - 1) % n).all()


def test_groups_futures_objects_and_collectives() -> None:
    run(3, around)


def coalesced(r: int, n: int) -> None:
    """One work for a batch; what failed in it is raised; to oneself it works too."""
    backend = world()._get_backend(torch.device("cpu"))
    assert backend.supports_coalescing
    outputs = [torch.empty(100_000) for _ in range(n)]
    inputs = [torch.full((100_000,), 10.0 * r + peer) for peer in range(n)]
    ops = []
    for peer in range(n):
        ops.append(dist.P2POp(dist.isend, inputs[peer], peer if peer != r else (r + 1) % n))
        ops.append(dist.P2POp(dist.irecv, outputs[peer], peer if peer != r else (r - 1) % n))
    ops = [op for k, op in enumerate(ops) if k // 2 != r]
    works = dist.batch_isend_irecv(ops)
    assert len(works) == 1
    works[0].wait()
    assert works[0].is_completed()
    assert works[0].is_success()
    for peer in range(n):
        if peer != r:
            assert (outputs[peer] == 10.0 * peer + r).all()

    group = world()
    got = torch.empty(3)
    sent = group.send([torch.tensor([1.0, 2.0, 3.0])], r, 0)
    group.recv([got], r, 0).wait()
    sent.wait()
    assert got.tolist() == [1.0, 2.0, 3.0]


def test_coalesced_and_to_oneself() -> None:
    run(3, coalesced)


def refused(r: int, n: int) -> None:
    """Wrong arguments are refused before anything is sent; the group goes on."""
    group = world()
    with pytest.raises(pycomm.InvalidArgument, match="below the world size"):
        group.send([torch.ones(1)], n, 0)
    with pytest.raises(pycomm.InvalidArgument, match="one tensor"):
        group.send([torch.ones(1), torch.ones(1)], 0, 0)
    with pytest.raises(pycomm.InvalidArgument, match="share memory"):
        group.recv([torch.ones(1).expand(3)], 0, 0)
    ones = torch.ones(2)
    dist.all_reduce(ones)
    assert ones.tolist() == [n] * 2


def test_wrong_messages_are_refused() -> None:
    run(2, refused)


def mismatched(r: int, n: int) -> None:
    """A receive of another size is an error that names both calls, on the receiver; then all end."""
    if r == 0:
        dist.send(torch.ones(3), 1)
        with pytest.raises(pycomm.Error):
            dist.recv(torch.ones(1), 1)
    else:
        with pytest.raises(pycomm.MismatchError, match=r"count=4.*count=3|count=3.*count=4"):
            dist.recv(torch.ones(4), 0)


def test_sizes_that_differ() -> None:
    run(2, mismatched)
