"""The torch.distributed backend ``"pycomm"``: registration, rendezvous, communicator construction."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from pycomm.config import Config, config
from pycomm.errors import Error, InvalidArgument, TimeoutError
from pycomm.extension import c10d, core

if TYPE_CHECKING:
    from pycomm._core import Communicator

NAME = "pycomm"
OFFER_KEY = "pycomm/offer"
#: Address space of all ranks' heaps; a process may hold hundreds of groups.
MOST_HEAP_BYTES = 256 << 30


class Store(Protocol):
    """What the rendezvous needs of a torch.distributed Store."""

    def set(self, key: str, value: str, /) -> None:
        """Publishes a value."""

    def get(self, key: str, /) -> bytes:
        """Returns a value, once it is there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Blocks until the keys are there; RuntimeError when the time is out."""


def create_communicator(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta = timedelta(minutes=30),
    settings: Config | None = None,
) -> Communicator:
    """Collective: the communicator of ``world_size`` ranks on this host that share ``store``.

    A store serves one communicator; put a ``PrefixStore`` before it for a second. Rank 0 offers a shared segment and
    publishes where; the others fetch it. ``timeout`` bounds the rendezvous and, later, every operation's waits.
    ``settings`` of rank 0 hold for all ranks; None takes those of the environment. Raises TimeoutError naming the
    ranks that did not come, Error if a rank is on another host.
    """
    if not 0 <= rank < world_size:
        raise InvalidArgument(f"rank {rank} is not in a world of {world_size}")
    if rank == 0:
        return _offer(store, world_size, timeout, settings or config())
    offer = _fetch_offer(store, rank, world_size, timeout)
    return core.join_shm(offer, rank, timeout)


def _offer(store: Store, world_size: int, timeout: timedelta, settings: Config) -> Communicator:
    """Rank 0's half; a failure is published too, so that nobody waits for an offer that cannot come."""
    try:
        offer = core.ShmOffer(
            world_size,
            slot_bytes=settings.slot_bytes,
            slots=settings.slots,
            streaming=settings.streaming,
            spin_polls=settings.spin_polls,
            heap_bytes=min(settings.heap_bytes, MOST_HEAP_BYTES // world_size // 4096 * 4096),
            channel_bytes=settings.channel_bytes,
            single_copy=settings.single_copy,
            records=settings.records,
            liveness=settings.liveness,
        )
    except Error as error:
        store.set(OFFER_KEY, f"error {error}")
        raise
    store.set(OFFER_KEY, f"offer {offer.address}")
    return offer.accept(timeout)


def _fetch_offer(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    try:
        store.wait([OFFER_KEY], timeout)
        kind, _, text = store.get(OFFER_KEY).decode().partition(" ")
    except RuntimeError as error:
        raise TimeoutError(
            f"rank {rank}: rank 0 of {world_size} did not come to the rendezvous within {timeout}: {error}"
        ) from error
    if kind == "error":
        raise Error(f"rank {rank}: rank 0 could not make the shared segment: {text}")
    return text


def create_backend(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    name: str = "",
    global_ranks: list[int] | None = None,
) -> Any:
    """Collective: the torch.distributed backend of a new group; see create_communicator."""
    communicator = create_communicator(store, rank, world_size, timeout)
    communicator._set_group(name, global_ranks or list(range(world_size)))
    return c10d.C10dBackend(communicator._address())


def _create_backend(options: Any, backend_options: Any) -> Any:
    """What torch calls for ``init_process_group("pycomm")`` and ``new_group``."""
    is_default = dist.group.WORLD is None
    return create_backend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        "" if is_default else options.group_id,
        options.global_ranks_in_group,
    )


def get_communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """The communicator under a process group of backend pycomm (the default group if None).

    Raises InvalidArgument if the group's CPU backend is another one.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise InvalidArgument(
            "there is no default process group; call init_process_group('pycomm')"
        )
    communicator = find_communicator(group)
    if communicator is None:
        raise InvalidArgument(
            f"the group's CPU backend is not pycomm but {dist.get_backend(group)}"
        )
    return communicator


def find_backend(group: dist.ProcessGroup) -> Any | None:
    """pycomm's backend under a group, or None if its CPU tensors take another way."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # no backend for CPU tensors
        return None
    return backend if isinstance(backend, c10d.C10dBackend) else None


def find_communicator(group: dist.ProcessGroup) -> Communicator | None:
    """The communicator under a group, or None if its CPU tensors take another way."""
    backend = find_backend(group)
    if backend is None:
        return None
    return core.communicator_from_address(backend._communicator_address())


def register() -> None:
    """Makes ``"pycomm"`` a name for init_process_group. CUDA tensors reach it only to be refused in words."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME, _create_backend, extended_api=True, devices=["cpu", "cuda"]
        )
