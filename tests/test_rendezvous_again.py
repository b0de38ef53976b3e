"""One Store, many rendezvous: what an earlier one left is never taken for the new one. And who is interrupted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import DIED, Refused, attempt, run, td
from strangers import InThread, callers, offered, rank_in_thread, until

import pycomm
from pycomm import rendezvous
from pycomm.config import Config
from pycomm.rendezvous import LEFT_KEY, OFFER_KEY

SLACK = 1.0
ROUNDS: Final = 10

#: Makes the store of a rank, of a name that its ranks share.
Stores = Callable[[int, int, str, int], Any]


def file_store(rank: int, n: int, folder: str, port: int) -> Any:
    return dist.FileStore(f"{folder}/store", n)


def tcp_store(rank: int, n: int, folder: str, port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, n, rank == 0, td(20))


def prefix_store(rank: int, n: int, folder: str, port: int) -> Any:
    return dist.PrefixStore("of", dist.PrefixStore("this/job", file_store(rank, n, folder, port)))


@pytest.fixture
def port() -> int:
    """One that is free."""
    return int(dist.TCPStore("127.0.0.1", 0, 1, True, td(1), False).port)


def sums(communicator: Any) -> list[float]:
    """What the ranks get together."""
    t = torch.tensor([communicator.rank + 1.0])
    communicator.all_reduce(t)
    result: list[float] = t.tolist()
    return result


def part(store: Any, rank: int, n: int) -> None:
    """Rank 0, with which a TCPStore ends, goes last."""
    if rank == 0:
        store.wait([f"done{r}" for r in range(1, n)], td(10))
    else:
        store.set(f"done{rank}", "")


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("make", [file_store, tcp_store, prefix_store])
def test_again_and_again(make: Stores, n: int, tmp_path: Path, port: int) -> None:
    """Ten communicators one after the other, of all ranks in turn the last; the Store is as before."""

    def worker(rank: int, n: int) -> bool:
        store = make(rank, n, str(tmp_path), port)
        right = True
        for number in range(ROUNDS):
            if number % n == rank:
                time.sleep(0.03)
            c = pycomm.create_communicator(store, rank, n, td(10))
            right = right and sums(c) == [n * (n + 1) / 2]
            right = right and not store.check([OFFER_KEY])
            c.barrier()
            del c
        part(store, rank, n)
        return right

    assert run(n, worker, init=False) == [True] * n


@pytest.mark.parametrize("n", [2, 3])
def test_again_and_again_in_threads(n: int) -> None:
    """The same with ranks as threads that share a HashStore."""
    store = dist.HashStore()
    for _ in range(ROUNDS):
        made = [rank_in_thread(store, rank, n) for rank in reversed(range(n))]
        ranks = [rank.end() for rank in made]
        results = [InThread(partial(sums, c)) for c in ranks]
        assert [r.end() for r in results] == [[n * (n + 1) / 2]] * n
        assert not store.check([OFFER_KEY])


@pytest.mark.parametrize("make", [file_store, tcp_store])
def test_after_rank_0_has_waited_in_vain(make: Stores, tmp_path: Path, port: int) -> None:
    """Rank 0 comes alone, times out, and then all come; three times over."""

    def worker(rank: int, n: int) -> bool:
        store = make(rank, n, str(tmp_path), port)
        right = True
        for number in range(3):
            if rank == 0:
                found = attempt(lambda: pycomm.create_communicator(store, 0, n, td(0.2)))
                right = right and isinstance(found, Refused) and "TimeoutError" in found.kinds
                store.set(f"waited{number}", "")
            else:
                store.wait([f"waited{number}"], td(10))
            c = pycomm.create_communicator(store, rank, n, td(10))
            right = right and sums(c) == [n * (n + 1) / 2]
            c.barrier()
        part(store, rank, n)
        return right

    assert run(3, worker, init=False) == [True] * 3


def test_after_another_has_waited_in_vain() -> None:
    """Rank 1 comes alone and times out; rank 0, which then comes, waits for it to come again."""
    store = dist.HashStore()
    with pytest.raises(pycomm.TimeoutError, match=r"rank 0 of 2 did not come .* 0:00:00.1"):
        rank_in_thread(store, 1, 2, seconds=0.1).end()
    ranks = [rank_in_thread(store, rank, 2) for rank in (0, 1)]
    assert [rank.end().world_size for rank in ranks] == [2, 2]


@pytest.mark.parametrize("connected", [False, True])
def test_rank_0_is_killed_and_started_again(connected: bool, tmp_path: Path) -> None:
    """Its first offer is dead, whether the others read it before or after; they take the second."""

    def worker(rank: int, n: int) -> Any:
        store = dist.FileStore(str(tmp_path / "store"), 9)
        if rank == 0:
            pycomm.create_communicator(store, 0, 3, td(20))  # rank 2 is not there, until it dies
        if rank == 1 and not connected:
            store.wait(["killed"], td(10))
        if rank == 2:
            address = offered(store)
            if connected:
                assert until(lambda: callers(address.name) == 1)
            pid = int(store.get("pid"))
            os.kill(pid, signal.SIGKILL)
            store.set("killed", "")
        if rank == 3:
            store.wait(["killed"], td(10))
        c = pycomm.create_communicator(store, rank % 3, 3, td(20))
        return sums(c)

    def ranks(rank: int, n: int) -> Any:
        if rank == 0:
            dist.FileStore(str(tmp_path / "store"), 9).set("pid", str(os.getpid()))
        return worker(rank, n)

    assert run(4, ranks, init=False, may_die=[0]) == [DIED, [6.0], [6.0], [6.0]]


def test_a_second_while_the_first_lives(tmp_path: Path) -> None:
    """Communicators of one Store do not disturb each other."""

    def worker(rank: int, n: int) -> list[list[float]]:
        store = dist.FileStore(str(tmp_path / "store"), n)
        all_of_them = [pycomm.create_communicator(store, rank, n, td(10)) for _ in range(4)]
        return [sums(c) for c in all_of_them]

    assert run(2, worker, init=False) == [[[3.0]] * 4] * 2


def test_an_error_of_rank_0_is_believed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait hear it at once; one that comes later gives rank 0 some time to come again."""
    monkeypatch.setattr(rendezvous, "COME_AGAIN", 0.3)
    store = dist.HashStore()
    early = rank_in_thread(store, 1, 3)
    with pytest.raises(pycomm.InvalidArgument, match="slots must be"):
        pycomm.create_communicator(store, 0, 3, td(10), Config(slots=3))
    late = rank_in_thread(store, 2, 3)
    for follower in (early, late):
        with pytest.raises(pycomm.Error, match="slots must be"):
            follower.end()
    assert early.took < 0.3 + SLACK  # at once if it came before rank 0
    assert 0.3 <= late.took < 0.3 + SLACK
    monkeypatch.setattr(rendezvous, "COME_AGAIN", 5)
    ranks = [rank_in_thread(store, rank, 3) for rank in (1, 2)]  # the old error is still there
    ranks.append(rank_in_thread(store, 0, 3))
    assert [rank.end().world_size for rank in ranks] == [3, 3, 3]


class DumbStore(dist.Store):
    """A Store of somebody's own that has only what it must, and cannot delete."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_a_store_that_cannot_delete() -> None:
    """The offer is overwritten then, and may be replaced."""
    store = DumbStore()
    for _ in range(3):
        ranks = [rank_in_thread(store, rank, 2) for rank in (1, 0)]
        assert sorted(rank.end().rank for rank in ranks) == [0, 1]
        assert store.get(OFFER_KEY) == b"over"


def test_the_store_dies(port: int) -> None:
    """A rank whose Store is gone says so, long before its timeout."""

    def worker(rank: int, n: int) -> Any:
        store = tcp_store(rank, n, "", port)
        if rank == 1:
            began = time.monotonic()
            found = attempt(lambda: pycomm.create_communicator(store, 1, n, td(20)))
            return found, time.monotonic() - began
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    died, (found, took) = run(2, worker, init=False, may_die=[0])
    assert died is DIED
    assert isinstance(found, Refused)
    assert "rank 1: the Store failed" in found.message
    assert took < 5


# ---- the default process group


@pytest.mark.parametrize("n", [2, 3])
def test_default_group_of_one_store_object(n: int, tmp_path: Path) -> None:
    """init_process_group(store=...) and destroy_process_group, again and again."""

    def worker(rank: int, n: int) -> list[float]:
        store = dist.FileStore(str(tmp_path / "store"), n)
        got = []
        for _ in range(ROUNDS):
            dist.init_process_group("pycomm", store=store, rank=rank, world_size=n, timeout=td(10))
            t = torch.tensor([rank + 1.0])
            dist.all_reduce(t)
            got += t.tolist()
            dist.destroy_process_group()
        return got

    assert run(n, worker, init=False) == [[n * (n + 1) / 2] * ROUNDS] * n


# ---- interrupts


def interrupt_in(seconds: float) -> None:
    """Raises KeyboardInterrupt, as Ctrl-C does, in whatever the main thread does then."""

    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def outcome(step: Callable[[], Any]) -> tuple[str, str, float]:
    """(class of what was raised, its text, seconds since the first rank was interrupted)."""
    try:
        step()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic()
    return "none", "", time.monotonic()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("make", [file_store, tcp_store])
def test_one_rank_is_interrupted(make: Stores, who: int, tmp_path: Path, port: int) -> None:
    """It gets KeyboardInterrupt, the others AbortedError that names it; then all can come again."""

    def worker(rank: int, n: int) -> tuple[str, str, float, list[float]]:
        store = make(rank, 3, str(tmp_path), port)
        if rank == who:
            interrupt_in(0.5)
        found = outcome(lambda: pycomm.create_communicator(store, rank, 4, timedelta(seconds=20)))
        c = pycomm.create_communicator(store, rank, 3, td(10))
        total = sums(c)
        part(store, rank, 3)
        return (*found, total)

    results = run(3, worker, init=False)
    interrupted = results[who]
    assert interrupted[0] == "KeyboardInterrupt"
    for rank, (kind, text, when, total) in enumerate(results):
        assert total == [6.0]
        assert abs(when - interrupted[2]) < SLACK
        if rank != who:
            assert kind == "AbortedError"
            assert f"rank {who}" in text
            assert "interrupted" in text


def test_a_rank_is_interrupted_before_rank_0_is_there(tmp_path: Path) -> None:
    """The others that wait hear it; so does rank 0, if that rank does not come again in time."""

    def worker(rank: int, n: int) -> tuple[str, str, float]:
        rendezvous.COME_AGAIN = 0.5
        store = dist.FileStore(str(tmp_path / "store"), n)
        if rank == 1:
            interrupt_in(0.5)
        if rank == 0:
            store.wait([LEFT_KEY], td(10))
        return outcome(lambda: pycomm.create_communicator(store, rank, n, timedelta(seconds=20)))

    results = run(3, worker, init=False)
    assert [kind for kind, _, _ in results] == ["AbortedError", "KeyboardInterrupt", "AbortedError"]
    for rank in (0, 2):
        assert "rank 1 gave up the rendezvous: it was interrupted" in results[rank][1]
    when = results[1][2]
    assert results[2][2] - when < SLACK
    assert 0.4 < results[0][2] - when < 0.5 + SLACK


def test_an_interrupted_rank_comes_again(tmp_path: Path) -> None:
    """Its old farewell is no obstacle, if rank 0 was not there to hear it."""

    def worker(rank: int, n: int) -> tuple[str, list[float]]:
        rendezvous.COME_AGAIN = 0.5
        store = dist.FileStore(str(tmp_path / "store"), n)
        kind = ""
        if rank == 1:
            interrupt_in(0.2)
            kind, _, _ = outcome(lambda: pycomm.create_communicator(store, 1, n, td(20)))
        if rank == 0:
            store.wait([LEFT_KEY], td(10))
        if rank == 2:
            store.wait([OFFER_KEY], td(10))
            time.sleep(0.8)  # longer than rank 0 waits for rank 1 to come again
        return kind, sums(pycomm.create_communicator(store, rank, n, timedelta(seconds=20)))

    results = run(3, worker, init=False)
    assert results == [("", [6.0]), ("KeyboardInterrupt", [6.0]), ("", [6.0])]
