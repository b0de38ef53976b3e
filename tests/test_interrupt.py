"""Ctrl-C ends a blocked call at once on the rank that got it, and the others hear of it."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run

import pycomm

SOON = 0.3  # seconds until the signal, by when the rank is blocked


def interrupt_soon() -> None:
    """Raises KeyboardInterrupt, as Ctrl-C does, in whatever the main thread does then."""

    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, SOON)


@pytest.mark.parametrize("count", [2, 1_000_000])
def test_interrupted_operation(count: int) -> None:
    """Rank 0 is interrupted in an all-reduce that rank 1 has not entered; rank 1 then gets AbortedError."""

    def worker(rank: int, _: int) -> tuple[str, bool]:
        store = dist.distributed_c10d._get_default_store()
        began = time.monotonic()
        try:
            if rank == 0:
                interrupt_soon()
            else:
                store.wait(["interrupted"], timedelta(seconds=10))
            dist.all_reduce(torch.ones(count))
        except KeyboardInterrupt:
            store.set("interrupted", "yes")
            return "interrupted", time.monotonic() - began < SOON + 1
        except pycomm.AbortedError as error:
            return "aborted", "rank 0" in str(error) and "interrupted" in str(error)
        return "finished", False

    assert run(2, worker) == [("interrupted", True), ("aborted", True)]


def test_interrupted_rendezvous() -> None:
    """Rank 0 waits for a rank that never comes."""

    def worker(rank: int, _: int) -> bool:
        began = time.monotonic()
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            pycomm.create_communicator(dist.HashStore(), rank, 2, timedelta(seconds=20))
        return time.monotonic() - began < SOON + 1

    assert run(1, worker, init=False) == [True]


@pytest.mark.parametrize("through", ["c10d", "communicator"])
def test_interrupted_wait_for_an_asynchronous_operation(through: str) -> None:
    """wait() hears Ctrl-C although the operation itself blocks another thread."""

    def worker(rank: int, _: int) -> bool:
        store = dist.distributed_c10d._get_default_store()
        tensor = torch.ones(2)
        if rank == 1:
            store.wait(["interrupted"], timedelta(seconds=10))
            dist.all_reduce(tensor)
            return tensor.tolist() == [2.0, 2.0]
        communicator = pycomm.get_communicator()
        work = (
            dist.all_reduce(tensor, async_op=True)
            if through == "c10d"
            else communicator.all_reduce(tensor, async_op=True)
        )
        assert work is not None
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        store.set("interrupted", "yes")
        work.wait()  # only the wait was ended, not the operation
        return tensor.tolist() == [2.0, 2.0]

    assert run(2, worker) == [True, True]
