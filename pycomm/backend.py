"""The torch.distributed backend ``"pycomm"``: registration, and the communicators under process groups."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pycomm.errors import InvalidArgument
from pycomm.extension import c10d, core
from pycomm.farewell import note_interrupt
from pycomm.rendezvous import Store, create_communicator
from pycomm.tcp_store import make_interruptible

if TYPE_CHECKING:
    from pycomm._core import Communicator

log = logging.getLogger("pycomm")

NAME = "pycomm"


def create_backend(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    name: str = "",
    global_ranks: list[int] | None = None,
) -> Any:
    """Collective: the torch.distributed backend of a new group; see create_communicator."""
    note_interrupt(None)
    communicator = create_communicator(store, rank, world_size, timeout)
    communicator._set_group(name, global_ranks or list(range(world_size)))
    log.info(
        "rank %d of %d is in group %s, by %s; timeout %s",
        *(rank, world_size, name or "WORLD", communicator.transport, timeout),
    )
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
        make_interruptible(NAME)
