"""Memory of the GPUs of one host that every rank maps: how the ranks of a group agree on it, or on doing without."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pycomm.errors import Error, TimeoutError
from pycomm.extension import core
from pycomm.rendezvous import Store, looks

if TYPE_CHECKING:
    from pycomm._core import PeerMemory

#: What a rank writes begins with one of them.
HANDLE, GOOD, NOT = "handle ", "good", "not "


class _Exchange:
    """What every rank wrote under a name, each under a key of its own."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.world_size, self.timeout = store, rank, world_size, timeout

    def __call__(self, name: str, mine: str) -> list[str]:
        """Writes this rank's and returns all ranks', once they are there."""
        self.store.set(f"pycomm/peer/{name}/{self.rank}", mine)
        keys = [f"pycomm/peer/{name}/{rank}" for rank in range(self.world_size)]
        for _ in looks(time.monotonic() + self.timeout.total_seconds()):
            if self.store.check(keys):
                return [self.store.get(key).decode(errors="replace") for key in keys]
        late = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        raise TimeoutError(
            f"rank {self.rank}: peer memory: waited {self.timeout.total_seconds():g} s for ranks {late} of "
            f"{self.world_size}. Do they all open it, with the same Store?"
        )


def open_peer_memory(
    store: Store,
    rank: int,
    world_size: int,
    device: int,
    timeout: timedelta = timedelta(minutes=30),
    make: Any = None,
    **layout: int,
) -> PeerMemory | str:
    """Collective: the ranks' connected peer memory or, on all ranks alike, why there is none, in words.

    Where there is none the caller uses NCCL. ``layout``: ``blocks``, ``slots`` and ``slot_bytes``, the same on all
    ranks. A store serves this once; put ``PrefixStore`` before it for several. ``make`` stands in for
    ``core.PeerMemory`` in tests.

    Raises TimeoutError naming the ranks that do not come.
    """
    exchange = _Exchange(store, rank, world_size, timeout)
    memory: PeerMemory | None = None
    try:
        if make is None and core.cuda is None:
            raise Error("pycomm was built without CUDA")
        memory = (make or core.PeerMemory)(device, rank, world_size, timeout, **layout)
        said = HANDLE + memory.handle
    except Error as error:
        said = NOT + str(error)
    connected = False
    try:
        handles = exchange("handle", said)
        if why := _refusal(handles):
            return why
        assert memory is not None
        try:
            memory.connect([handle.removeprefix(HANDLE) for handle in handles])
            said = GOOD
        except Error as error:
            said = NOT + str(error)
        # Nobody closes what others may still be mapping.
        if why := _refusal(exchange("connected", said)):
            return why
        connected = True
        return memory
    finally:
        if memory is not None and not connected:
            memory.close()


def _refusal(said: list[str]) -> str:
    """The first rank's that says no; the same on all ranks."""
    for rank, words in enumerate(said):
        if words.startswith(NOT):
            return f"rank {rank} has no peer memory: {words.removeprefix(NOT)}"
    return ""
