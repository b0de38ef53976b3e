"""Public bug reports about jobs that fail, as tests: cases ROB-01, 03, 05 and 09.

ROB-07, many groups, is in test_nothing_left.py, which counts what a process holds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import DIED, Refused, attempt, run, td
from strangers import until

import pycomm
from pycomm.extension import core

SLACK: Final = 1.0
MIB: Final = 1 << 20


def store() -> dist.Store:
    """The one by which the ranks met."""
    return dist.distributed_c10d._get_default_store()


def timed(step: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, errors too, and the seconds that it took."""
    began = time.monotonic()
    found = attempt(step)
    return found, time.monotonic() - began


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["before", "inside"])
def test_rob_01_a_peer_dies(moment: str) -> None:
    """gloo#520: every survivor hears of it within 2 s, in each group, also one that was never used; then it goes on.

    The only transport is shared memory.
    """

    def worker(rank: int, n: int) -> list[tuple[Any, float]]:
        x = torch.ones(MIB)
        dist.all_reduce(x)
        unused: Any = dist.new_group(timeout=td(10))
        if rank == 1 and moment == "before":
            kill_me()
        if rank == 1:
            core.set_test_fault("kill", 1, pycomm.get_communicator().sequence + 1, 1)
        found = [timed(partial(dist.all_reduce, x, group=group)) for group in (None, unused)]
        dist.destroy_process_group()
        return found

    first, died, last = run(3, worker, may_die=[1])
    assert died is DIED
    for refusal, seconds in (*first, *last):
        assert isinstance(refusal, Refused)
        assert "PeerDiedError" in refusal.kinds
        assert "rank 1" in refusal.message
        assert seconds < 2


@pytest.mark.parametrize("way", ["group", "wait"])
def test_rob_03_timeouts_of_a_group_and_of_a_wait(way: str) -> None:
    """pytorch PR #158128: both end after 1 s while the default group has 60, and it is as good as before."""

    def worker(rank: int, n: int) -> tuple[Any, float, float]:
        group: Any = dist.new_group(timeout=td(1 if way == "group" else 60))
        found: tuple[Any, float] = None, 0.0
        work: Any = None
        if rank == 1:
            store().wait(["over"], td(10))
        elif way == "group":
            found = timed(lambda: dist.all_reduce(torch.ones(1), group=group))
        else:
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            found = timed(lambda: work.wait(td(1)))
        if rank == 0:
            store().set("over", "yes")
        if way == "wait":  # the operation has not ended
            work = work or dist.all_reduce(torch.ones(1), group=group, async_op=True)
            work.wait()
        dist.barrier()
        x = torch.ones(1)
        dist.all_reduce(x)
        return *found, x.item()

    (refusal, seconds, total), (_, _, other) = run(2, worker, group_timeout=60)
    assert isinstance(refusal, Refused)
    assert "TimeoutError" in refusal.kinds
    assert 0.9 < seconds < 1 + SLACK
    for word in ("all_reduce" if way == "group" else "ALLREDUCE", " of group ", "1000 ms"):
        assert word in refusal.message, refusal
    assert total == other == 2.0


def test_rob_05_killed_jobs_leave_no_shared_memory() -> None:
    """llm-d#352: five jobs killed in a collective, and one that ends well, add nothing to /dev/shm and take nothing."""
    folder = Path("/dev/shm")
    foreign = folder / f"pycomm-test-foreign-{os.getpid()}"  # its name could be one of ours
    foreign.touch()

    def killed(rank: int, n: int) -> None:
        store().set(f"pid {rank}", str(os.getpid()))
        pids = [int(store().get(f"pid {r}")) for r in (1, 0)]

        def kill_all() -> None:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        if rank == 0:
            threading.Timer(0.3, kill_all).start()
        while True:
            dist.all_reduce(torch.ones(MIB))

    def well(rank: int, n: int) -> float:
        x = torch.ones(8)
        dist.all_reduce(x)
        return x[-1].item()

    try:
        before = set(folder.iterdir())
        for _ in range(5):
            assert run(2, killed, may_die=[0, 1]) == [DIED] * 2
        assert run(2, well) == [2.0] * 2
        assert until(lambda: set(folder.iterdir()) <= before)  # others' may come and go
        assert foreign.exists()
    finally:
        foreign.unlink()


@pytest.mark.parametrize("where", ["all_reduce", "large all_reduce", "wait", "barrier", "init"])
def test_rob_09_ctrl_c(where: str, tmp_path: Path) -> None:
    """pytorch#63802: KeyboardInterrupt within a second of SIGINT wherever a rank waits; the group can be left then."""

    def act(rank: int) -> None:
        match where:
            case "all_reduce":
                dist.all_reduce(torch.ones(1))
            case "large all_reduce":
                dist.all_reduce(torch.ones(MIB))
            case "wait":
                work: Any = dist.all_reduce(torch.ones(1), async_op=True)
                work.wait()
            case "barrier":
                dist.barrier()
            case "init":
                meet("first", rank, 2)

    def meet(name: str, rank: int, n: int) -> None:
        url = f"file://{tmp_path}/{name}"
        dist.init_process_group("pycomm", url, rank=rank, world_size=n, timeout=td(60))

    def worker(rank: int, n: int) -> tuple[float, list[str]]:
        files = dist.FileStore(f"{tmp_path}/flags", n)
        if where != "init":
            meet("first", rank, n)
        if rank == 1:
            files.wait(["interrupted"], td(20))
            seconds = 0.0
            if where == "init":  # too late; torch names groups by how often a rank has called it
                with pytest.raises(pycomm.AbortedError, match="interrupted"):
                    act(rank)
        else:
            sent: list[float] = []

            def interrupt() -> None:
                sent.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)

            threading.Timer(0.5, interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                act(rank)
            seconds = time.monotonic() - sent[0]
            files.set("interrupted", "yes")
        if dist.is_initialized() and where == "wait" and rank == 1:
            with pytest.raises(pycomm.MismatchError, match=r"rank 0 .* called another"):
                dist.destroy_process_group()  # of what rank 0 still waits for
        if dist.is_initialized():
            dist.destroy_process_group()
        meet("again", rank, n)
        dist.barrier()
        dist.destroy_process_group()
        return seconds, [f.name for f in Path("/dev/shm").glob("*pycomm*")]

    for seconds, left_over in run(2, worker, init=False):
        assert seconds < SLACK
        assert left_over == []
