"""Every failure of a group has a cause and a culprit, which the core names where it is thrown."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run

import pycomm
from pycomm.extension import core
from pycomm.trace.format import CORE_CAUSES

LIMIT = timedelta(seconds=0.5)


def ones(count: int = 2) -> torch.Tensor:
    """A tensor."""
    return torch.ones(count)


def wait_until(what: str) -> None:
    """Until rank 0 is "done", or rank 1 has "failed"."""
    dist.distributed_c10d._get_default_store().wait([what], timedelta(seconds=10))


def interrupt_soon() -> None:
    """As Ctrl-C does, when this rank is blocked."""

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)


# ---- what rank 0 and rank 1 do


def interrupted(rank: int) -> None:
    if rank == 1:
        interrupt_soon()
        dist.barrier()
    wait_until("failed")


def interrupted_receiving(rank: int) -> None:
    if rank == 1:
        interrupt_soon()
        pycomm.get_communicator().recv(ones(), 0)
    wait_until("failed")


def aborted(rank: int) -> None:
    if rank == 1:
        pycomm.get_communicator().abort("I want to")
    dist.barrier()


def crossing(rank: int) -> None:
    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(ones(), group=group)


def left(rank: int) -> None:
    if rank == 1:
        dist.destroy_process_group()
    else:
        dist.barrier()


def left_a_receiver(rank: int) -> None:
    if rank == 1:
        dist.destroy_process_group()
    else:
        dist.recv(ones(), 1)


def exited(rank: int) -> None:
    if rank == 1:
        try:
            raise ValueError("bad batch")
        except ValueError:
            dist.destroy_process_group()
    else:
        dist.barrier()


def mismatch(rank: int) -> None:
    dist.all_reduce(ones(2 + rank))


def parts_mismatch(rank: int) -> None:
    sizes = [1, 1] if rank == 0 else [2, 1]
    dist.all_to_all([ones(n) for n in sizes], [ones(n) for n in sizes])


def message_mismatch(rank: int) -> None:
    if rank == 1:
        dist.send(ones(3), 0)
        dist.barrier()
    else:
        dist.recv(ones(4), 1)


def stopped(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    pycomm.get_communicator().barrier(timeout=LIMIT)


def stopped_sender(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    pycomm.get_communicator().recv(ones(), 1, timeout=LIMIT)


def died(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sender_died(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(ones(), 1)


def late(rank: int) -> None:
    if rank == 1:
        wait_until("done")
    else:
        pycomm.get_communicator().barrier(timeout=LIMIT)


def late_sender(rank: int) -> None:
    if rank == 1:
        wait_until("done")
    else:
        pycomm.get_communicator().recv(ones(), 1, timeout=LIMIT)


def nobody_sends(rank: int) -> None:
    if rank == 1:
        wait_until("done")
    else:
        pycomm.get_communicator().recv(ones(), timeout=LIMIT)


def late_for_monitored_barrier(rank: int) -> None:
    if rank == 1:
        wait_until("done")
    else:
        dist.monitored_barrier(timeout=LIMIT)


def other(rank: int) -> None:
    if rank == 1:
        core.set_test_fault("raise", 1, pycomm.get_communicator().sequence + 1, -1)
    dist.barrier()


CASES: list[tuple[Callable[[int], None], str, set[int]]] = [
    (interrupted, "interrupted", {1}),
    (interrupted_receiving, "interrupted", {1}),
    (aborted, "aborted", {1}),
    (crossing, "crossing", {0, 1}),  # whichever sees it first
    (left, "left", {1}),
    (left_a_receiver, "left", {1}),
    (exited, "exited", {1}),
    (mismatch, "mismatch", {-1}),
    (parts_mismatch, "parts_mismatch", {-1}),
    (message_mismatch, "message_mismatch", {1}),
    (stopped, "stopped", {1}),
    (stopped_sender, "stopped", {1}),
    (died, "died", {1}),
    (sender_died, "died", {1}),
    (late, "timeout", {1}),
    (late_sender, "timeout", {1}),
    (nobody_sends, "timeout", {-1}),
    (late_for_monitored_barrier, "timeout", {1}),
    (other, "other", {-1}),
]


@pytest.mark.parametrize(
    ("step", "cause", "culprits"), CASES, ids=lambda x: getattr(x, "__name__", "")
)
def test_cause_and_culprit(step: Callable[[int], None], cause: str, culprits: set[int]) -> None:
    """Rank 1 does something wrong; both ranks then hand out the same cause and culprit, in whichever group failed."""

    def worker(rank: int, _: int) -> list[dict[str, Any]]:
        store = dist.distributed_c10d._get_default_store()
        assert pycomm.get_communicator().failure_cause() is None
        groups = core.living_communicators()
        dist.barrier()
        with suppress(pycomm.Error, KeyboardInterrupt):
            step(rank)
        store.set("done" if rank == 0 else "failed", "yes")
        groups = [*groups, *(g for g in core.living_communicators() if g not in groups)]
        return [found for group in groups if (found := group.failure_cause())]

    gone = step in (died, sender_died)
    still = step in (stopped, stopped_sender)
    results = run(2, worker, may_die=[1] if gone or still else [], stopped=[1] if still else [])
    failures = results[0] + (results[1] if isinstance(results[1], list) else [])
    assert results[0]
    for failure in failures:
        assert failure["cause"] == cause, failure
        assert failure["culprit"] in culprits, failure
        assert failure["text"]


def test_every_cause_of_the_core_is_tested() -> None:
    """And has its name in pycomm.trace."""
    assert {cause for _, cause, _ in CASES} == set(CORE_CAUSES)
