"""Rank 0's socket: strangers can neither join nor stall a job, and ranks that do not fit are told why, on both sides.

Ranks are threads of one process here, where that is enough.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from containers import can_unshare
from harness import Refused, attempt, run, td
from strangers import (
    GREETING,
    REFUSED,
    UNKNOWN,
    Address,
    InThread,
    answer,
    call,
    callers,
    is_closed,
    offered,
    rank_in_thread,
    true_greeting,
    until,
)

import pycomm
from pycomm import rendezvous
from pycomm.extension import core
from pycomm.rendezvous import LEFT_KEY, OFFER_KEY

SLACK = 1.0


@pytest.fixture
def store() -> dist.Store:
    made: dist.Store = dist.HashStore()
    return made


def works(*ranks: InThread) -> bool:
    """Whether these ranks, rank 0 first, have joined and can reduce."""
    communicators = [rank.end() for rank in ranks]
    tensors = [torch.full((3,), float(c.rank + 1)) for c in communicators]
    work = [c.all_reduce(t, async_op=True) for c, t in zip(communicators, tensors, strict=True)]
    for pending in work:
        pending.wait()
    n = len(ranks)
    return all(t.tolist() == [n * (n + 1) / 2] * 3 for t in tensors)


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def greeting(address: Address, rank: int, world_size: int, newer: int = 0) -> bytes:
    """What a rank of this build, or of a newer one, says first."""
    protocol, layout = true_greeting()
    return GREETING.pack(address.secret.encode(), protocol + newer, layout, rank, world_size)


# ---- strangers


def test_silent_strangers_hold_up_nobody(store: dist.Store) -> None:
    """Two hundred who say nothing neither delay a rank nor keep their connections."""
    leader = rank_in_thread(store, 0, 2)
    name = offered(store).name
    strangers = [call(name) for _ in range(200)]
    follower = rank_in_thread(store, 1, 2)
    assert works(leader, follower)
    assert follower.took < SLACK
    assert until(lambda: all(map(is_closed, strangers)))
    for stranger in strangers:
        stranger.close()


def test_so_many_silent_strangers_and_no_more(store: dist.Store) -> None:
    """The oldest silent connections make room for new ones, so that descriptors last."""
    leader = rank_in_thread(store, 0, 2)
    name = offered(store).name
    gc.collect()  # what earlier tests left is not closed below
    before = descriptors()
    most = [0]
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            most[0] = max(most[0], descriptors())

    counter = threading.Thread(target=count)
    counter.start()
    strangers = [call(name) for _ in range(300)]
    assert until(lambda: is_closed(strangers[0]))
    assert works(leader, rank_in_thread(store, 1, 2))
    done.set()
    counter.join()
    for stranger in strangers:
        stranger.close()
    assert most[0] >= 300  # it was counted while all strangers' ends were open
    assert most[0] - before <= 300 + 64 + 20  # both ends are ours; and a few of the ranks


def test_a_silent_stranger_is_shown_the_door(store: dist.Store) -> None:
    """After the greeting's time, while rank 0 goes on waiting."""
    leader = rank_in_thread(store, 0, 2)
    with call(offered(store).name) as stranger:
        assert answer(stranger, 5) == b""
    assert leader.is_running()
    assert works(leader, rank_in_thread(store, 1, 2))


@pytest.mark.parametrize("said", [b"x", b"GET / HTTP/1.0\r\n\r\n", b"0" * 48, b"0" * 100_000])
def test_a_stranger_without_the_secret(store: dist.Store, said: bytes) -> None:
    """It gets no descriptor and a word, and rank 0 goes on waiting."""
    leader = rank_in_thread(store, 0, 2)
    with call(offered(store).name) as stranger:
        stranger.send(said)
        heard = answer(stranger)
        assert heard is not None
        assert heard[0] == UNKNOWN
        assert answer(stranger) == b""
    assert works(leader, rank_in_thread(store, 1, 2))


@pytest.mark.parametrize("rank", [-1, 0, 3, 2**31 - 1, -(2**31)])
def test_a_rank_that_cannot_be(store: dist.Store, rank: int) -> None:
    """With the secret, but no rank of this world: told so; rank 0 goes on waiting."""
    leader = rank_in_thread(store, 0, 3)
    address = offered(store)
    with call(address.name) as caller:
        caller.send(greeting(address, rank, 3))
        heard = answer(caller)
    assert heard is not None
    assert heard[0] == REFUSED
    assert f"rank {rank} is not one of the ranks 1 to 2" in heard.decode(errors="replace")
    assert works(leader, rank_in_thread(store, 1, 3), rank_in_thread(store, 2, 3))


# ---- ranks that do not fit


def test_a_rank_started_twice(store: dist.Store) -> None:
    """The second is refused in words and gets nothing; the job goes on."""
    leader, first = rank_in_thread(store, 0, 3), rank_in_thread(store, 1, 3)
    address = offered(store)

    def is_taken() -> bool:  # another rank 1 is refused once the first one is in
        with call(address.name) as probe:
            probe.send(greeting(address, 1, 3))
            return (answer(probe) or b"\0")[0] == REFUSED

    assert until(is_taken)
    with pytest.raises(pycomm.Error, match=r"rank 1 was refused: .*another process is rank 1"):
        rank_in_thread(store, 1, 3).end()
    assert works(leader, first, rank_in_thread(store, 2, 3))


def test_another_world_size(store: dist.Store) -> None:
    """Every rank that is there gets an error with both sizes, and those that differ MismatchError."""
    ranks = [rank_in_thread(store, 0, 4), rank_in_thread(store, 1, 4)]
    name = offered(store).name
    assert until(lambda: callers(name) == 1)
    ranks.append(rank_in_thread(store, 2, 3))
    for rank in ranks:
        with pytest.raises(
            pycomm.Error, match=r"rank 2 was started with .* of 3, .* rank 0 with 4"
        ):
            rank.end()
        assert rank.took < 5
    assert type(ranks[0].error) is pycomm.MismatchError
    assert type(ranks[2].error) is pycomm.MismatchError


def test_another_version(store: dist.Store) -> None:
    """Both sides hear of it, in words."""
    leader = rank_in_thread(store, 0, 2)
    address = offered(store)
    protocol, _ = true_greeting()
    with call(address.name) as caller:
        caller.send(greeting(address, 1, 2, newer=1) + b"what newer versions append")
        heard = answer(caller)
    assert heard is not None
    assert heard[0] == REFUSED
    with pytest.raises(pycomm.Error, match="rank 1 runs another version") as caught:
        leader.end()
    for text in (heard.decode(errors="replace"), str(caught.value)):
        assert f"protocol {protocol + 1}" in text
        assert f"protocol {protocol}," in text


def test_a_rank_that_cannot_map_the_segment(tmp_path: Path) -> None:
    """Its error is that of all ranks: at once, but for one that comes after it."""

    def worker(rank: int, n: int) -> tuple[Any, float]:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
        rendezvous.COME_AGAIN = 0.5
        files = dist.FileStore(str(tmp_path / "store"), n)
        began = time.monotonic()
        found = attempt(lambda: pycomm.create_communicator(files, rank, n, td(20)))
        return found, time.monotonic() - began

    for rank, (found, took) in enumerate(run(3, worker, init=False)):
        assert isinstance(found, Refused), found
        assert "rank 1" in found.message or rank == 1
        assert "cannot map a shared segment" in found.message
        assert took < 0.5 + SLACK


def test_a_rank_that_is_stopped_is_named(store: dist.Store) -> None:
    """It has greeted, but never maps the segment; another one never comes."""
    leader = rank_in_thread(store, 0, 3, seconds=0.5)
    address = offered(store)
    with call(address.name) as stopped:
        stopped.send(greeting(address, 2, 3))
        with pytest.raises(pycomm.TimeoutError) as caught:
            leader.end()
        assert "never came: 1" in str(caught.value)
        assert "did not map the segment: 2" in str(caught.value)


def test_a_rank_that_dies_may_come_again(store: dist.Store) -> None:
    """A place whose connection has ended is free; if nobody comes for it, the message says so."""
    leader = rank_in_thread(store, 0, 3, seconds=1.5)
    address = offered(store)
    for rank in (1, 2):
        with call(address.name) as short_lived:
            short_lived.send(greeting(address, rank, 3))
            assert (answer(short_lived) or b"\0")[0] != REFUSED
    follower = rank_in_thread(store, 1, 3)
    with pytest.raises(pycomm.TimeoutError, match="came and left again: 2") as caught:
        leader.end()
    assert "never came" not in str(caught.value)
    with pytest.raises(pycomm.TimeoutError, match="rank 1 was refused: rank 0: rendezvous of 3"):
        follower.end()


# ---- another user, another host


def as_nobody() -> None:
    """Become another user than the tests'."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@needs_root
def test_another_user_is_refused_even_with_the_secret(store: dist.Store) -> None:
    """It hears why; so does rank 0, should it wait in vain."""
    leader = rank_in_thread(store, 0, 2, seconds=1.5)
    address = offered(store)
    said = greeting(address, 1, 2)

    def worker(_: int, __: int) -> tuple[bytes | None, bytes | None]:
        as_nobody()
        with call(address.name) as caller:
            with contextlib.suppress(BrokenPipeError):  # refused before it has said anything
                caller.send(said)
            return answer(caller), answer(caller)

    [(heard, end)] = run(1, worker, init=False)
    assert heard is not None
    assert heard[0] == REFUSED
    assert end == b""
    assert "does not let user 65534 join" in heard.decode(errors="replace")
    with pytest.raises(pycomm.TimeoutError, match="user 65534"):
        leader.end()


@needs_root
def test_a_rank_tells_its_secret_to_its_own_user_only() -> None:
    """Another user who has taken over the name of a socket hears nothing; the rank waits on for rank 0."""

    def worker(_: int, __: int) -> tuple[bytes, Any]:
        store = dist.HashStore()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("\0pycomm-taken-over")
        here, there = socket.socketpair()
        impostor = os.fork()
        if impostor == 0:
            as_nobody()
            listener.listen()  # this decides whose the socket is
            there.send(b"listening")
            listener.settimeout(10)
            caller, _ = listener.accept()
            caller.settimeout(10)
            os._exit(len(caller.recv(4096)))
        listener.close()
        here.recv(10)
        store.set(OFFER_KEY, f"offer 1 pycomm-taken-over {'a' * 32} 1 - host")
        found = attempt(lambda: pycomm.create_communicator(store, 1, 2, td(1)))
        return bytes([os.waitstatus_to_exitcode(os.waitpid(impostor, 0)[1])]), found

    [(heard, found)] = run(1, worker, init=False)
    assert heard == b"\0"
    assert isinstance(found, Refused)
    assert "TimeoutError" in found.kinds
    assert "nobody of this user" in found.message


ELSEWHERE = """
import sys, torch.distributed as dist, pycomm
from datetime import timedelta
try:
    pycomm.create_communicator(dist.FileStore(sys.argv[1], 3), 1, 3, timedelta(seconds=20))
except pycomm.Error as error:
    print(error)
"""


def test_another_network_namespace(tmp_path: Path) -> None:
    """From where the socket cannot be reached: an error at once, on all ranks."""
    if not can_unshare("-n"):
        pytest.skip("this machine does not let us have another network namespace")
    files = dist.FileStore(str(tmp_path / "store"), 3)
    here = [rank_in_thread(files, 0, 3)]
    offered(files)
    here.append(rank_in_thread(files, 2, 3))
    command = ["unshare", "-n", sys.executable, "-c", ELSEWHERE, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "cannot reach the shared memory of rank 0" in done.stdout, done.stderr
    assert "one network namespace" in done.stdout
    for rank in here:
        with pytest.raises(pycomm.AbortedError, match=r"rank 1 gave up .* cannot reach"):
            rank.end()


def test_another_boot(store: dist.Store) -> None:
    """An offer that another host, or this one before it was started anew, has left: an error at once."""
    leader = rank_in_thread(store, 0, 2, seconds=0.2)
    address = offered(store)
    with pytest.raises(pycomm.TimeoutError):
        leader.end()
    moved = Address(address.name, address.secret, address.nonce, "another-boot:1", "otherhost")
    store.set(OFFER_KEY, f"offer 1 {moved}")
    follower = rank_in_thread(store, 1, 2)
    with pytest.raises(pycomm.Error, match="rank 0 on host otherhost"):
        follower.end()
    assert follower.took < SLACK
    assert store.get(LEFT_KEY).startswith(b"1 ")


# ---- the core's own interface


def make_offer(n: int) -> Any:
    """Rank 0's offer to n ranks."""
    return core.ShmOffer(
        n,
        slot_bytes=4096,
        slots=4,
        streaming="auto",
        spin_polls=-1,
        heap_bytes=0,
        channel_bytes=4096,
        single_copy="auto",
        records=8,
        liveness="auto",
    )


def joining(offer: Any, rank: int) -> InThread:
    """A rank that joins as the core lets it."""
    address = offer.address
    return InThread(lambda: core.join_shm(address, rank, td(10)))


def test_accept_alone_serves_too() -> None:
    """The short way: accept on rank 0, join_shm on the others."""
    offer = make_offer(2)
    assert works(InThread(lambda: offer.accept(td(10))), joining(offer, 1))


def test_an_offer_ends_once() -> None:
    """After a failure rank 0 cannot accept, and a rank that comes later hears that it is over."""
    offer = make_offer(2)
    with pytest.raises(pycomm.TimeoutError, match="never came: 1"):
        offer.serve(td(0.1))
    for again in (offer.serve, offer.accept):
        with pytest.raises(pycomm.Error, match="is over"):
            again(td(0.1))
    with pytest.raises(pycomm.Error, match="rank 1: rank 0's offer of a shared segment is over"):
        joining(offer, 1).end()
    assert core.try_join_shm(offer.address, 1, 2, td(5), td(5)) is None


def test_ranks_stay_until_they_are_let_go() -> None:
    """serve() lets nobody go, accept() does."""
    offer = make_offer(2)
    follower = joining(offer, 1)
    offer.serve(td(10))
    offer.serve(td(10))  # nothing is left to do
    assert follower.is_running()
    assert works(InThread(lambda: offer.accept(td(10))), follower)


def test_a_dropped_offer_is_told() -> None:
    """Rank 0 ends between serving and accepting: AbortedError for those who wait to be let go."""
    offer = make_offer(2)
    follower = joining(offer, 1)
    offer.serve(td(10))
    del offer
    with pytest.raises(pycomm.AbortedError, match="rank 0 gave up the rendezvous"):
        follower.end()


def test_rank_0_looks_while_it_waits() -> None:
    """serve() tells which ranks are there, and ends with what the look returns."""
    seen: list[list[int]] = []

    def look(present: list[int]) -> str:
        seen.append(present)
        return "enough" if present else ""

    offer = make_offer(3)
    follower = joining(offer, 2)
    with pytest.raises(pycomm.AbortedError, match=r"^enough$"):
        offer.serve(td(10), look)
    assert seen[-1] == [2]
    with pytest.raises(pycomm.AbortedError, match="rank 2 was refused: enough"):
        follower.end()
