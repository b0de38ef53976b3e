"""torch's TCPStore as ``init_process_group("pycomm")`` wants it: Ctrl-C is heard, and a port can be used again.

With a ``tcp://`` or ``env://`` address torch makes a TCPStore before it asks the backend for anything. Its constructor
waits in C++, deaf to signals: in rank 0 until all ranks have connected, in the others until rank 0 is there. For
groups of backend pycomm neither is needed: pycomm's own rendezvous waits for all ranks, and the others can try the
port from Python until somebody listens.

A rank that leaves a group and begins another at the same port may be faster than rank 0, and reach the server of the
old one just before it ends. So rank 0 marks its store anew for each group, and the others wait for a mark that they
have not seen yet.

Other backends get what torch makes, by torch's own function; so do all under torchrun, whose agent serves the store.
"""

from __future__ import annotations

import importlib
import inspect
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, Final

import torch.distributed as dist

from pycomm.errors import TimeoutError
from pycomm.rendezvous import looks

# The module; the attribute of that name of torch.distributed is a function in it.
_torch_rendezvous: Final = importlib.import_module("torch.distributed.rendezvous")
_MAKER: Final = "_create_c10d_store"
_MARK_KEY: Final = "pycomm/mark"
_TRY: Final = 1.0  # seconds that a try may take
#: How long torch may be left alone with a connection: it looks addresses up, and a resolver may take 5 s to give up.
_CONNECT: Final = timedelta(seconds=6)
_UNMARKED: Final = 0.2  # seconds after which a store counts as one that no pycomm has made

#: The mark of the last group's store, by address.
_last_marks: dict[tuple[str, int], bytes] = {}


def make_interruptible(backend: str) -> None:
    """From now on TCPStores made for that backend's groups hear signals; idempotent.

    Where torch lacks the private function that makes them, nothing changes.
    """
    torchs = getattr(_torch_rendezvous, _MAKER, None)
    if torchs is None or hasattr(torchs, "__wrapped__"):
        return

    def make_store(*args: Any, **kwargs: Any) -> dist.Store:
        if not _is_asked_for(backend):
            store: dist.Store = torchs(*args, **kwargs)
            return store
        return _make_store(torchs, *args, **kwargs)

    make_store.__wrapped__ = torchs  # type: ignore[attr-defined]
    setattr(_torch_rendezvous, _MAKER, make_store)


def _is_asked_for(backend: str) -> bool:
    """Whether the init_process_group that wants a store is one for that backend, which torch does not hand down."""
    code = inspect.unwrap(dist.init_process_group).__code__
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return False
    wanted = str(frame.f_locals.get("backend")).lower()  # "pycomm", or "cpu:pycomm,cuda:nccl"
    return backend in wanted.replace(":", ",").split(",")


def _make_store(
    torchs: Callable[..., dist.Store],
    hostname: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    use_libuv: bool = True,
) -> dist.Store:
    """What torch's function makes, without its waiting for other ranks."""
    if not 0 < port < 2**16 or _torch_rendezvous._torchelastic_use_agent_store():
        return torchs(hostname, port, rank, world_size, timeout, use_libuv)
    if rank == 0:
        store: dist.Store = dist.TCPStore(
            hostname,
            port,
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=use_libuv,
        )
        store.set(_MARK_KEY, secrets.token_hex(8))
        return store

    def connect(limit: timedelta) -> dist.Store:
        return torchs(hostname, port, rank, world_size, min(limit, _CONNECT), use_libuv)

    return _Client(connect, hostname, port, rank, timeout).store()


class _Client:
    """A rank that is not rank 0, and wants to reach the store of a new group."""

    def __init__(
        self,
        connect: Callable[[timedelta], dist.Store],
        hostname: str,
        port: int,
        rank: int,
        timeout: timedelta,
    ) -> None:
        self.connect = connect
        self.address = (hostname, port)
        self.rank = rank
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout.total_seconds()

    def store(self) -> dist.Store:
        """Connects, again if the store ends before it is marked for the new group."""
        while True:
            self._wait_for_listener()
            try:
                store = self.connect(self.timeout)
                self._wait_for_mark(store)
            except TimeoutError:
                raise
            except RuntimeError:
                if time.monotonic() > self.deadline:
                    raise
                continue
            store.set_timeout(self.timeout)
            return store

    def _wait_for_listener(self) -> None:
        for _ in looks(self.deadline):
            try:
                socket.create_connection(self.address, _TRY).close()
                return
            except OSError as error:
                reason = error
        raise TimeoutError(self._in_vain("nobody listens there")) from reason

    def _wait_for_mark(self, store: dist.Store) -> None:
        came = time.monotonic()
        for _ in looks(self.deadline):
            mark = store.get(_MARK_KEY) if store.check([_MARK_KEY]) else None
            if mark is not None and mark != _last_marks.get(self.address):
                _last_marks[self.address] = mark
                return
            if mark is None and time.monotonic() - came > _UNMARKED:
                return
        raise TimeoutError(self._in_vain("only the store of an earlier group is there"))

    def _in_vain(self, what: str) -> str:
        hostname, port = self.address
        return f"rank {self.rank}: rank 0 did not serve its Store at {hostname}:{port} within {self.timeout}; {what}"
