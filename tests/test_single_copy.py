"""Private tensors that are copied straight from rank to rank give what slots give."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import DIED, run

import pycomm
from pycomm.config import Config

#: Around both limits, 16 KiB and 4 MiB (of float32, in what one rank reads of another), and within.
COUNTS: Final = (4096, 4097, 8191, 8195, 65_537, 1 << 20, (1 << 20) + 1, (2 << 20) + 3)
Results = list[torch.Tensor]


def communicators(r: int, n: int) -> list[pycomm.Communicator]:
    """One that copies once, and one that never does."""
    store = dist.distributed_c10d._get_default_store()
    return [
        pycomm.create_communicator(
            dist.PrefixStore(f"copy/{choice}", store),
            r,
            n,
            timedelta(seconds=8),
            Config(single_copy=choice),
        )
        for choice in ("always", "never")
    ]


def noise(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator)


def every_operation(comm: pycomm.Communicator, count: int) -> Results:
    """The outputs of all collectives on `count` elements per part."""
    r, n = comm.rank, comm.world_size
    mine = noise(count, r)
    whole = noise(n * count, 100 + r)
    results = [mine.clone(), mine.clone(), mine.clone()]
    comm.all_reduce(results[0])
    comm.reduce(results[1], n - 1, "max")
    comm.broadcast(results[2], n - 1)
    results += [torch.zeros(count) for _ in range(2)] + [torch.zeros(n * count) for _ in range(3)]
    comm.reduce_scatter_single(results[3], whole, "avg")
    comm.scatter_single(results[4], whole if r == 0 else None, 0)
    comm.all_gather_single(results[5], mine)
    comm.gather_single(results[6] if r == 0 else None, mine, 0)
    comm.all_to_all_single(results[7], whole)
    in_place = whole.clone()
    own = in_place[r * count : (r + 1) * count]
    comm.all_gather_single(in_place, own)
    results.append(in_place)
    in_place = whole.clone()
    comm.reduce_scatter_single(in_place[r * count : (r + 1) * count], in_place)
    results.append(in_place)
    return results


def uneven(comm: pycomm.Communicator) -> Results:
    """Short, middling and long senders in one call: eager, by a single copy, and through slots."""
    r, n = comm.rank, comm.world_size
    lengths = [100, 50_000, 1_500_000, 7][:n]
    outputs = [torch.zeros(length) for length in lengths]
    comm.all_gather(outputs, noise(lengths[r], r))
    gathered = [torch.zeros(length) for length in lengths]
    comm.gather(gathered if r == n - 1 else None, noise(lengths[r], 10 + r), n - 1)
    parts = [torch.zeros((1 + (p + r) % 3) * lengths[p]) for p in range(n)]
    comm.all_to_all(parts, [noise((1 + (r + p) % 3) * lengths[r], 20 + p) for p in range(n)])
    return [*outputs, *gathered, *parts]


def equal_to_slots(r: int, n: int) -> None:
    once, never = communicators(r, n)
    for count in COUNTS:
        pairs = zip(every_operation(once, count), every_operation(never, count), strict=True)
        assert [torch.equal(a, b) for a, b in pairs] == [True] * 10, count
    assert all(torch.equal(a, b) for a, b in zip(uneven(once), uneven(never), strict=True))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_single_copies_equal_slots_bit_by_bit(n: int) -> None:
    run(n, equal_to_slots, wall=90)


def reused_at_once(r: int, n: int) -> None:
    """A tensor may be overwritten as soon as the call returns, also if others are slower."""
    once = communicators(r, n)[0]
    mine, got = torch.zeros(50_000), torch.zeros(n * 50_000)
    for turn in range(200):
        mine.fill_(turn * n + r)
        once.all_gather_single(got, mine)
        mine.fill_(-1)
        assert got.view(n, -1)[:, ::49_999].tolist() == [[turn * n + k] * 2 for k in range(n)]


def test_inputs_may_be_reused_at_once() -> None:
    run(3, reused_at_once)


def killed(r: int, n: int, operation: str) -> str:
    """A rank dies while others want its memory."""
    dist.barrier()
    if r == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": dist.all_reduce,
        "broadcast": lambda t: dist.broadcast(t, 1),
    }
    try:
        for _ in range(1000):
            calls[operation](torch.ones(100_000))
    except pycomm.PeerDiedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_a_rank_that_dies(operation: str) -> None:
    results = run(3, killed, operation, may_die=[1], env={"PYCOMM_SINGLE_COPY": "always"})
    assert results[1] is DIED
    assert all("rank 1" in text for text in (results[0], results[2]))


def strided_on_one_rank(r: int, n: int) -> None:
    """Only tensors in place can be read by peers while they are reduced; all ranks must agree on it."""
    for turn in range(2 * n):
        tensor = torch.zeros(60_000, 2)[:, 0] if r == turn % n else torch.zeros(60_000)
        tensor += r + 1
        dist.all_reduce(tensor)
        assert tensor.eq(n * (n + 1) / 2).all()


def test_tensors_of_different_strides() -> None:
    run(3, strided_on_one_rank, env={"PYCOMM_SINGLE_COPY": "always"})
