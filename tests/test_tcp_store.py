"""init_process_group("pycomm") at a tcp:// or env:// address: Ctrl-C is heard, and a port can be used again."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import Refused, attempt, run, td

import pycomm
from pycomm import tcp_store

SLACK: Final = 1.0
SOON: Final = 0.5


@pytest.fixture
def port() -> int:
    """One that is free."""
    return int(dist.TCPStore("127.0.0.1", 0, 1, True, td(1), False).port)


def environment(port: int) -> dict[str, str]:
    """What env:// reads, but for the rank and the world size."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def init(
    method: str, port: int, rank: int, n: int, seconds: float, backend: str = "pycomm"
) -> None:
    """Begin the default group."""
    os.environ.update(environment(port))
    url = f"tcp://127.0.0.1:{port}" if method == "tcp" else "env://"
    dist.init_process_group(
        backend, init_method=url, rank=rank, world_size=n, timeout=timedelta(seconds=seconds)
    )


def total(rank: int) -> float:
    """The sum over ranks of rank + 1."""
    t = torch.tensor([rank + 1.0])
    dist.all_reduce(t)
    result: float = t.item()
    return result


@pytest.mark.parametrize("method", ["tcp", "env"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("backend", ["pycomm", "cpu:pycomm"])
def test_ctrl_c_in_init(method: str, rank: int, backend: str, port: int) -> None:
    """ROB-09: the other rank never comes; rank 0 serves the store, rank 1 finds none. Then init works."""

    def worker(_: int, __: int) -> tuple[bool, float]:
        timer = threading.Timer(SOON, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            init(method, port, rank, 2, 60, backend)
        soon = time.monotonic() - began < SOON + SLACK
        init(method, port, 0, 1, 10)
        return soon, total(0)

    assert run(1, worker, init=False) == [(True, 1.0)]


def test_others_hear_of_ctrl_c_in_init(port: int) -> None:
    """Rank 2 never comes. The interrupted rank 1 gets KeyboardInterrupt, rank 0 AbortedError."""

    def worker(rank: int, _: int) -> tuple[str, str, float]:
        if rank == 1:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            init("tcp", port, rank, 3, 60)
        except (KeyboardInterrupt, pycomm.Error) as error:
            return type(error).__name__, str(error), time.monotonic()
        return "", "", 0

    zero, one = run(2, worker, init=False)
    assert one[0] == "KeyboardInterrupt"
    assert zero[0] == "AbortedError"
    assert "rank 1 gave up the rendezvous: it was interrupted" in zero[1]
    assert abs(zero[2] - one[2]) < SLACK


@pytest.mark.parametrize("method", ["tcp", "env"])
@pytest.mark.parametrize("n", [2, 3])
def test_a_port_again_and_again(method: str, n: int, port: int) -> None:
    """init, destroy, init at the same port in the same processes, in any order of arrival."""

    def worker(rank: int, n: int) -> list[float]:
        got = []
        for number in range(8):
            if number % (n + 1) == rank:
                time.sleep(0.02)
            init(method, port, rank, n, 10)
            got.append(total(rank))
            dist.destroy_process_group()
        return got

    assert run(n, worker, init=False) == [[n * (n + 1) / 2] * 8] * n


def test_a_server_of_the_users_own(port: int) -> None:
    """Rank 0's process keeps a TCPStore at the port, which then serves one group after another."""

    def worker(rank: int, n: int) -> list[float]:
        options: Any = {"wait_for_workers": False, "multi_tenant": True}
        mine = dist.TCPStore("127.0.0.1", port, n, True, td(10), **options) if rank == 0 else None
        got = []
        for _ in range(5):
            init("tcp", port, rank, n, 10)
            got.append(total(rank))
            dist.destroy_process_group()
        assert mine is None or mine.num_keys() > 0
        return got

    assert run(2, worker, init=False) == [[3.0] * 5] * 2


def test_a_store_that_pycomm_has_not_made(port: int) -> None:
    """A rank that is given the address meets one that serves the store itself."""

    def worker(rank: int, n: int) -> float:
        if rank == 0:
            tcp = dist.TCPStore("127.0.0.1", port, n, True, td(10))
            store = dist.PrefixStore("default_pg", tcp)  # as torch does with an address
            dist.init_process_group("pycomm", store=store, rank=0, world_size=n, timeout=td(10))
        else:
            init("tcp", port, rank, n, 10)
        return total(rank)

    assert run(2, worker, init=False) == [3.0] * 2


def test_nobody_serves(port: int) -> None:
    """TimeoutError in words, in time."""

    def worker(_: int, __: int) -> tuple[Any, float]:
        began = time.monotonic()
        found = attempt(lambda: init("tcp", port, 1, 2, 1))
        return found, time.monotonic() - began

    [(found, took)] = run(1, worker, init=False)
    assert isinstance(found, Refused)
    assert "TimeoutError" in found.kinds
    assert f"rank 1: rank 0 did not serve its Store at 127.0.0.1:{port}" in found.message
    assert "nobody listens there" in found.message
    assert 1 <= took < 1 + SLACK


def test_only_an_earlier_store(port: int) -> None:
    """Rank 0 does not come to the second group, although its store of the first one is still there."""

    def worker(rank: int, n: int) -> Any:
        init("tcp", port, rank, n, 5)
        if rank == 0:
            dist.distributed_c10d._get_default_store().wait(["seen"], td(10))
            return None
        kept = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        found = attempt(lambda: init("tcp", port, rank, n, 1))
        kept.set("seen", "")
        return found

    _, found = run(2, worker, init=False)
    assert isinstance(found, Refused)
    assert "TimeoutError" in found.kinds
    assert "only the store of an earlier group is there" in found.message


def test_other_backends_get_what_torch_makes(port: int) -> None:
    """pycomm's way is taken for groups of pycomm, and only for those."""

    def worker(_: int, __: int) -> list[str]:
        def taken(*_: Any, **__: Any) -> Any:
            raise LookupError

        tcp_store._make_store = taken
        found = []
        for backend in ("gloo", "pycomm", "cpu:gloo", "cpu:pycomm,cuda:gloo", "fake"):
            try:
                init("tcp", port, 0, 1, 5, backend)
                found.append("torch's")
                dist.destroy_process_group()
            except LookupError:
                found.append("pycomm's")
        dist.TCPStore("127.0.0.1", 0, 1, True, td(5))
        return found

    right = ["torch's", "pycomm's", "torch's", "pycomm's", "torch's"]
    assert run(1, worker, init=False) == [right]
