"""More than 2**31 elements, and more than 2**31 bytes: counts and offsets have 64 bits everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
import torch
import torch.distributed as dist
from harness import run
from reference import all_gather_single

import pycomm

GIB: Final = 2**30


def available() -> int:
    """The bytes that this machine can still give."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 0


pytestmark = pytest.mark.skipif(available() < 8 * GIB, reason="needs 8 GiB of free memory")


def positions(count: int) -> list[int]:
    """Both ends, around 2**31 and 2**30 (a count of bytes or of elements that wrapped would end there), and between."""
    around = (
        [2**31 + d for d in range(-2, 5)] + [2**30 + d for d in range(-1, 2)] + [2**29, 2**28 + 1]
    )
    return sorted({p for p in [0, 1, count // 3, count - 2, count - 1, *around] if p < count})


@pytest.mark.long
def test_more_than_2_31_elements() -> None:
    """int8 tensors of 2**31 + 5 elements: all_reduce through the Communicator, broadcast through dist."""
    count = 2**31 + 5

    def worker(rank: int, n: int) -> list[str]:
        comm = pycomm.get_communicator()
        at = positions(count)
        wrong = []
        t = torch.full((count,), rank + 1, dtype=torch.int8)
        t[at] = torch.arange(len(at), dtype=torch.int8) + rank
        comm.all_reduce(t)
        if t[at].tolist() != [2 * i + 1 for i in range(len(at))]:
            wrong.append("all_reduce")
        rest = [p + 7 for p in at if p + 7 < count and p + 7 not in at]
        if t[rest].tolist() != [3] * len(rest):
            wrong.append("all_reduce, the rest")
        if rank == 1:
            t[at] = torch.arange(len(at), dtype=torch.int8) + 50
        dist.broadcast(t, 1)
        if t[at].tolist() != [50 + i for i in range(len(at))]:
            wrong.append("broadcast")
        return wrong

    assert run(2, worker, wall=120, group_timeout=60) == [[]] * 2


@pytest.mark.long
def test_more_than_2_31_bytes() -> None:
    """A float32 all_gather in place into more than 2**31 bytes, and parts that long or that far away."""
    count = 2**28 + 3  # of float32: 1 GiB and a little

    def worker(rank: int, n: int) -> list[str]:
        comm = pycomm.get_communicator()
        at = positions(count)  # below 2**28: the second part carries them past 2**31 bytes
        wrong = []
        whole = torch.zeros(n * count)
        mine = whole[rank * count :][:count]
        mine.fill_(7 + rank)
        mine[at] = torch.arange(float(len(at))) + 100 * rank
        all_gather_single(whole, mine)
        for r in range(n):
            part = whole[r * count :][:count]
            if part[at].tolist() != [i + 100 * r for i in range(len(at))]:
                wrong.append(f"all_gather, part {r}")
            rest = [p + 7 for p in at if p + 7 < count and p + 7 not in at]
            if part[rest].tolist() != [7.0 + r] * len(rest):
                wrong.append(f"all_gather, the rest of part {r}")
        # Short parts, one at either end of a long buffer.
        ends = [whole[:5], whole[-5:]]
        sent = [torch.full((5,), 10.0 * rank + r) for r in range(n)]
        comm.all_to_all(ends, sent)
        if [end.tolist() for end in ends] != [[10.0 * r + rank] * 5 for r in range(n)]:
            wrong.append("all_to_all")
        # One rank alone has much, all for the other, behind one element for itself.
        if rank == 0:
            whole[1:][at] = torch.arange(float(len(at)))
            comm.all_to_all_single(torch.zeros(1), whole, [1, 0], [1, n * count - 1])
        else:
            comm.all_to_all_single(whole[:-1], torch.zeros(0), [n * count - 1, 0], [0, 0])
            if whole[at].tolist() != [float(i) for i in range(len(at))]:
                wrong.append("all_to_all_single")
        return wrong

    assert run(2, worker, wall=120, group_timeout=60) == [[]] * 2
