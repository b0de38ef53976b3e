"""Raw callers at rank 0's socket of a rendezvous: what a stranger, or a rank of another build, would send."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from harness import td

import pycomm
from pycomm.extension import core
from pycomm.rendezvous import OFFER_KEY

#: Words of csrc/shm/greeting.h.
SEGMENT, READY, GO, REFUSED, UNKNOWN, GAVE_UP = range(1, 7)

GREETING: Final = struct.Struct("=32sIIii")  # secret, protocol, layout, rank, world size
PATIENCE: Final = 10.0


def until(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """What the condition gives once it is true, or at the end of patience."""
    deadline = time.monotonic() + patience
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


@dataclass(frozen=True)
class Address:
    """The text with which rank 0 offers its segment."""

    name: str
    secret: str
    nonce: str
    place: str
    host: str

    def __str__(self) -> str:
        return " ".join((self.name, self.secret, self.nonce, self.place, self.host))


def parse(offer: bytes) -> Address:
    """What the Store holds."""
    kind, _, *fields = offer.decode().split(" ")
    assert kind == "offer"
    return Address(*fields)


def offered(store: Any) -> Address:
    """The address, once rank 0 has offered it."""
    assert until(lambda: store.check([OFFER_KEY]))
    return parse(store.get(OFFER_KEY))


def callers(name: str) -> int:
    """How many are connected to that abstract socket, or wait to be."""
    return Path("/proc/net/unix").read_text().count(f"@{name}\n") - 1


def call(name: str) -> socket.socket:
    """A connection to that abstract socket, which does not block."""
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.setblocking(False)

    def connect() -> bool:
        with contextlib.suppress(BlockingIOError):  # too many others wait to be accepted
            caller.connect("\0" + name)
            return True
        return False

    assert until(connect)
    return caller


def answer(caller: socket.socket, patience: float = PATIENCE) -> bytes | None:
    """The next packet; b"" when the other end has closed; None if nothing comes."""
    caller.settimeout(patience)
    for _ in range(2):
        with contextlib.suppress(
            TimeoutError, ConnectionResetError
        ):  # the latter comes first, once
            return caller.recv(4096)
    return None


def is_closed(caller: socket.socket) -> bool:
    """Whether the other end has closed, as far as one can see at once."""
    try:
        caller.setblocking(False)
        return caller.recv(4096) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def true_greeting() -> tuple[int, int]:
    """(protocol, layout) of this build, as one of its ranks says them to a rank 0 that we play."""
    name = f"pycomm-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + name)
        listener.listen()
        listener.settimeout(PATIENCE)
        address = str(Address(name, "a" * 32, "1", "-", "host"))

        def join() -> None:
            with contextlib.suppress(pycomm.Error):
                core.join_shm(address, 1, td(PATIENCE))

        rank = threading.Thread(target=join)
        rank.start()
        caller, _ = listener.accept()
        with caller:
            caller.settimeout(PATIENCE)
            secret, protocol, layout, number, _ = GREETING.unpack(caller.recv(4096))
            caller.send(bytes([UNKNOWN]))
            rank.join()
    assert (secret, number) == (b"a" * 32, 1)
    return protocol, layout


class InThread:
    """A rank in a thread of this process: what it returned or raised, in time."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.began = time.monotonic()
        self.took = 0.0

        def work() -> None:
            try:
                self.result = step()
            except BaseException as error:
                self.error = error
            self.took = time.monotonic() - self.began

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> Any:
        """What it returned; raises what it raised."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def rank_in_thread(store: dist.Store, rank: int, n: int, seconds: float = 20) -> InThread:
    """A rank that joins, as a thread."""
    return InThread(lambda: pycomm.create_communicator(store, rank, n, td(seconds)))
