"""GPU memory that NCCL uses in place: torch's memory pools over ncclMemAlloc, and their registration with a group."""

from __future__ import annotations

from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from pycomm.backend import get_communicator
from pycomm.errors import InvalidArgument
from pycomm.extension import core
from pycomm.nccl import load_api

if TYPE_CHECKING:
    from pycomm._core import NcclCommunicator, NcclRegistration


@cache
def _allocator() -> Any:
    """Kept for the process's life: pools do not own it in every version of torch."""
    return torch.cuda.memory.CUDAPluggableAllocator(str(core.__file__), *core.nccl_pool_functions)


def gpu_pool() -> torch.cuda.MemPool:
    """A pool whose memory comes from ncclMemAlloc, for tensors that are communicated.

    ::

        pool = pycomm.gpu_pool()
        with torch.cuda.use_mem_pool(pool):
            buffer = torch.empty(1 << 24, device="cuda")
        registered = pycomm.register_pool(pool)

    ``torch.cuda.OutOfMemoryError`` from such a pool may have another reason: ``failure()`` has NCCL's words.
    Raises Error in words where there is no NCCL, no driver or no GPU.
    """
    api = load_api()
    api.devices()
    core.serve_nccl_pools(api)
    return torch.cuda.MemPool(_allocator().allocator())


def failure() -> str:
    """Why ncclMemAlloc last gave a pool no memory; empty if it always did."""
    return core.nccl_pool_failure()


class RegisteredPool:
    """A pool's segments, registered with a group until it is closed, or their memory or the group goes."""

    def __init__(self, registrations: list[NcclRegistration]) -> None:
        self._registrations = registrations

    def __len__(self) -> int:
        """How many segments there are."""
        return len(self._registrations)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """NCCL forgets them; the memory stays."""
        while self._registrations:
            self._registrations.pop().close()


def register_pool(
    pool: torch.cuda.MemPool, group: dist.ProcessGroup | None = None, *, windows: bool = False
) -> RegisteredPool:
    """Registers what ``pool`` of ``gpu_pool()`` has allocated so far with the group's NCCL, which then copies less.

    With ``windows`` as symmetric windows, by which NCCL 2.27 and later choose faster kernels: collective, and every
    rank must have allocated segments of the same sizes in the same order.

    Operations on the memory must have ended before it is closed. Raises InvalidArgument if some of the pool's memory is
    not NCCL's; with ``windows`` MismatchError where ranks disagree and TimeoutError naming the ranks that do not come.
    """
    communicator: Any = get_communicator(group, "cuda")
    return register_segments(communicator, segments_of(pool), windows)


def segments_of(pool: torch.cuda.MemPool) -> list[tuple[int, int, int]]:
    """(address, bytes, device) of a pool's segments, the oldest first: an order that ranks have in common."""
    in_pool = {int(one["address"]) for one in pool.snapshot()}
    segments = [one for one in core.nccl_segments() if one[0] in in_pool]
    if len(segments) < len(in_pool):
        raise InvalidArgument(
            f"{len(in_pool) - len(segments)} of the pool's {len(in_pool)} segments are not from ncclMemAlloc; "
            "make the pool by pycomm.gpu_pool()"
        )
    return segments


def register_segments(
    communicator: NcclCommunicator, segments: list[tuple[int, int, int]], windows: bool
) -> RegisteredPool:
    """All of them, or none if one cannot be registered."""
    register = communicator.register_window if windows else communicator.register_buffer
    registered = RegisteredPool([])
    try:
        for address, count, device in segments:
            registered._registrations.append(register(address, count, device))
    except BaseException:
        registered.close()
        raise
    return registered
