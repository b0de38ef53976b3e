"""The torch.distributed backend ``"pycomm"``: registration, and the communicators under process groups."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from pycomm.errors import InvalidArgument
from pycomm.extension import c10d, core
from pycomm.farewell import note_interrupt
from pycomm.nccl import create_nccl_communicator
from pycomm.rendezvous import Store, create_communicator
from pycomm.tcp_store import make_interruptible

if TYPE_CHECKING:
    from pycomm._core import Communicator, NcclCommunicator

log = logging.getLogger("pycomm")

NAME = "pycomm"
CPU: Final = torch.device("cpu")


def create_backend(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    name: str = "",
    global_ranks: list[int] | None = None,
) -> Any:
    """Collective: the torch.distributed backend of a new group, for CPU and CUDA tensors; see create_communicator.

    CUDA tensors go through NCCL, whose communicator is made with the first of them: a group that has none needs no GPU.
    """
    note_interrupt(None)
    communicator = create_communicator(store, rank, world_size, timeout)
    ranks = global_ranks or list(range(world_size))
    communicator._set_group(name, ranks)
    log.info(
        "rank %d of %d is in group %s, by %s; timeout %s",
        *(rank, world_size, name or "WORLD", communicator.transport, timeout),
    )

    def make_gpu() -> object:
        return _gpu_communicator(store, rank, world_size, timeout, name, ranks)._address()

    return c10d.C10dBackend(communicator._address(), make_gpu)


def create_gpu_backend(
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    name: str = "",
    global_ranks: list[int] | None = None,
) -> Any:
    """The backend of a group for CUDA tensors alone, whose ranks may be on several hosts. Nobody waits here."""
    ranks = global_ranks or list(range(world_size))
    communicator = _gpu_communicator(store, rank, world_size, timeout, name, ranks)
    return c10d.C10dBackend(communicator._address())


def _gpu_communicator(
    store: Store, rank: int, world_size: int, timeout: timedelta, name: str, ranks: list[int]
) -> NcclCommunicator:
    """Of a group's CUDA tensors."""
    communicator = create_nccl_communicator(store, rank, world_size, timeout)
    communicator._set_group(name, ranks)
    log.info("rank %d of %d uses NCCL in group %s", rank, world_size, name or "WORLD")
    return communicator


def _is_for_cuda_alone(store: dist.Store) -> bool:
    """Whether torch makes the ``"cuda:pycomm"`` part of a group: it puts the device's name before the Store's keys."""
    key = "pycomm/device"
    store.set(key, "here")
    inner = getattr(store, "underlying_store", None)
    return inner is not None and bool(inner.check([f"cuda/{key}"]))


def _create_backend(options: Any, backend_options: Any) -> Any:
    """What torch calls for ``init_process_group("pycomm")`` and ``new_group``."""
    is_default = dist.group.WORLD is None
    create = create_gpu_backend if _is_for_cuda_alone(options.store) else create_backend
    return create(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        "" if is_default else options.group_id,
        options.global_ranks_in_group,
    )


def get_communicator(
    group: dist.ProcessGroup | None = None, device: torch.device | str = CPU
) -> Communicator:
    """The communicator under a process group of backend pycomm (the default group if None), of tensors on the device.

    Raises InvalidArgument if the group's backend for such tensors is another one.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise InvalidArgument(
            "there is no default process group; call init_process_group('pycomm')"
        )
    device = torch.device(device)
    communicator = find_communicator(group, device)
    if communicator is None:
        raise InvalidArgument(
            f"the group's {device.type.upper()} backend is not pycomm but {dist.get_backend(group)}"
        )
    return communicator


def find_backend(group: dist.ProcessGroup, device: torch.device = CPU) -> Any | None:
    """pycomm's backend under a group, or None if tensors on the device take another way."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # no backend for such tensors
        return None
    return backend if isinstance(backend, c10d.C10dBackend) else None


def living_communicators(group: dist.ProcessGroup) -> list[Communicator]:
    """Those under a group that have been made, of CPU and of CUDA tensors."""
    found = (find_backend(group, device) for device in (CPU, torch.device("cuda")))
    backends = {id(backend): backend for backend in found if backend is not None}
    addresses = [a for backend in backends.values() for a in backend._communicator_addresses()]
    return [core.communicator_from_address(address) for address in addresses]


def has_cpu(group: dist.ProcessGroup) -> bool:
    """Whether CPU tensors have a way in a group."""
    try:
        group._get_backend(CPU)
    except RuntimeError:
        return False
    return True


def find_communicator(group: dist.ProcessGroup, device: torch.device = CPU) -> Communicator | None:
    """The communicator under a group, or None if tensors on the device take another way.

    That of CUDA tensors is made if there is none yet; raises Error in words where NCCL cannot be used.
    """
    backend = find_backend(group, device)
    if backend is None:
        return None
    if device.type == "cuda":
        return core.communicator_from_address(backend._gpu_communicator_address())
    return core.communicator_from_address(backend._communicator_address())


def register() -> None:
    """Makes ``"pycomm"`` a name for init_process_group, for CPU and CUDA tensors."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME, _create_backend, extended_api=True, devices=["cpu", "cuda"]
        )
        make_interruptible(NAME)
