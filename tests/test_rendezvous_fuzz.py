"""Random bytes at rank 0's socket and in the Store: true ranks are served, others get an Error in words."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from typing import Any, Final

import pytest
import torch.distributed as dist
from harness import td
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strangers import (
    GAVE_UP,
    GREETING,
    READY,
    REFUSED,
    SEGMENT,
    UNKNOWN,
    Address,
    answer,
    call,
    offered,
    rank_in_thread,
    true_greeting,
)

import pycomm
from pycomm.extension import core
from pycomm.rendezvous import LEFT_KEY, OFFER_KEY

N: Final = 3
INT: Final = st.integers(-(2**31), 2**31 - 1)
COUNT: Final = st.integers(0, 2**32 - 1)
QUICK: Final = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), max_examples=300
)

#: What a caller without the secret may say: packets of any bytes and length.
PACKETS: Final = st.lists(
    st.binary(max_size=200) | st.builds(lambda n: secrets.token_bytes(n), st.integers(0, 150_000)),
    max_size=5,
)
#: What a rank may say after its greeting, but for the two words that end the rendezvous for all.
LATER: Final = st.lists(
    st.binary(min_size=1, max_size=3000).filter(lambda b: b[0] not in (READY, GAVE_UP)), max_size=5
)


def say(caller: Any, packets: list[bytes]) -> None:
    """Send them, as far as the other end lets us."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
        for packet in packets:
            caller.send(packet)


def test_any_greeting() -> None:
    """Rank 0 answers each with one word or none, and serves the true ranks at the end."""
    store = dist.HashStore()
    leader = rank_in_thread(store, 0, N, seconds=60)
    address = offered(store)
    secret = address.secret.encode()
    protocol, layout = true_greeting()
    absurd = INT.filter(lambda rank: not 0 < rank < N)
    member = st.builds(GREETING.pack, *map(st.just, (secret, protocol, layout)), absurd, st.just(N))
    outsider = st.builds(GREETING.pack, st.binary(min_size=32, max_size=32), COUNT, COUNT, INT, INT)
    short = st.builds(lambda g, n: g[:n], member, st.integers(1, GREETING.size - 1))

    @QUICK
    @given(first=member | outsider | short | st.binary(min_size=1), others=PACKETS)
    def greet(first: bytes, others: list[bytes]) -> None:
        caller = call(address.name)
        with caller:
            say(caller, [first, *others])
            heard = answer(caller)
            assert heard is not None
            is_member = len(first) >= GREETING.size and first.startswith(secret)
            assert heard[0] == (REFUSED if is_member else UNKNOWN)
            assert answer(caller) == b""
        assert leader.is_running()

    greet()
    followers = [rank_in_thread(store, rank, N) for rank in range(1, N)]
    assert [rank.end().rank for rank in (leader, *followers)] == list(range(N))


def test_any_word_of_a_rank() -> None:
    """A rank that greets well and then talks nonsense loses nothing but its own place."""
    store = dist.HashStore()
    leader = rank_in_thread(store, 0, N, seconds=60)
    address = offered(store)
    protocol, layout = true_greeting()

    @QUICK
    @given(rank=st.integers(1, N - 1), newer=st.binary(max_size=100), later=LATER)
    def talk(rank: int, newer: bytes, later: list[bytes]) -> None:
        with call(address.name) as caller:
            greeting = GREETING.pack(address.secret.encode(), protocol, layout, rank, N)
            caller.send(greeting + newer)
            heard = answer(caller)
            assert heard is not None
            assert heard[0] == SEGMENT
            say(caller, later)
        assert leader.is_running()

    talk()
    followers = [rank_in_thread(store, rank, N) for rank in range(1, N)]
    assert [rank.end().rank for rank in (leader, *followers)] == list(range(N))


@pytest.fixture
def nobody() -> Address:
    """A good address where nobody listens."""
    return Address(f"pycomm-{secrets.token_hex(8)}", "a" * 32, "1", "-", "host")


def test_any_offer(nobody: Address) -> None:
    """A rank that reads nonsense from the Store gets an Error, at once or when its time is over."""
    field = st.text(max_size=120)
    fields = st.builds(lambda *f: "offer 1 " + " ".join(f), *[field] * 5)
    kind = st.sampled_from(["offer", "error", "over", "", "offer offer"])
    long = st.integers(0, 3_000_000).map(lambda n: "offer 1 " + "x" * n + f" {nobody}")
    changed = st.builds(
        lambda text, at, byte: text[:at] + byte + text[at + 1 :],
        st.just(f"offer 1 {nobody}".encode()),
        st.integers(0, 100),
        st.binary(max_size=2),
    )
    texts = st.builds(lambda k, t: f"{k} {t}", kind, st.text()) | fields | long
    offers = st.binary() | texts.map(lambda t: t.encode(errors="replace")) | changed

    @settings(QUICK, max_examples=200)
    @given(offer=offers, left=st.none() | st.binary())
    def join(offer: bytes, left: bytes | None) -> None:
        store: Any = dist.HashStore()
        store.set(OFFER_KEY, offer)
        if left is not None:
            store.set(LEFT_KEY, left)
        with pytest.raises(pycomm.Error, match="rank 1") as caught:
            pycomm.create_communicator(store, 1, 2, td(0.01))
        assert len(str(caught.value)) < 1000 or offer.startswith(b"error")

    join()


def test_any_answer_to_a_rank() -> None:
    """A rank whose rank 0 talks nonsense ends with an Error, or waits until its time is over."""
    name = f"pycomm-{secrets.token_hex(8)}"
    address = str(Address(name, "a" * 32, "1", "-", "host"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + name)
    listener.listen()
    answers: list[list[bytes]] = []
    segments: list[bytes] = []

    served = []

    def serve() -> None:
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:  # it has been shut down
                return
            served.append(caller)
            with caller, contextlib.suppress(ConnectionError):
                memory = os.memfd_create("fuzz")
                os.write(memory, segments[-1])
                say(caller, answers[-1])
                with contextlib.suppress(ConnectionError):
                    socket.send_fds(caller, [bytes([SEGMENT])], [memory])
                os.close(memory)
                caller.settimeout(5)
                while caller.recv(4096):  # until the rank leaves
                    pass

    server = threading.Thread(target=serve)
    server.start()
    words = st.builds(lambda w, rest: bytes([w]) + rest, st.integers(0, 8), st.binary())
    packets = st.lists(words | st.binary(min_size=1, max_size=5000), max_size=4)
    nonce = (1).to_bytes(8, "little")
    segment = st.builds(lambda head, n: head + bytes(n), st.binary(), st.integers(0, 10_000))

    @settings(QUICK, max_examples=100)
    @given(said=packets, memory=segment | segment.map(lambda rest: nonce + rest))
    def join(said: list[bytes], memory: bytes) -> None:
        answers.append(said)
        segments.append(memory)
        with contextlib.suppress(pycomm.Error):
            assert core.try_join_shm(address, 1, 2, td(0.01), td(0.01)) is None

    join()
    listener.shutdown(socket.SHUT_RDWR)
    server.join(10)
    listener.close()
    assert len(served) >= 100
    assert not server.is_alive()
