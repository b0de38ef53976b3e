"""The ranks that share a layer, and their collectives on plain tensors.

By pycomm's communicator where the group's CPU tensors take it, else by torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycomm.backend import find_communicator
from pycomm.errors import InvalidArgument

if TYPE_CHECKING:
    from pycomm._core import Communicator

GroupLike = dist.ProcessGroup | DeviceMesh | None
_HALVES = {torch.float16, torch.bfloat16}


class Waitable(Protocol):
    """Something that has been started."""

    def wait(self) -> Any:
        """Returns when it is done, or raises what went wrong."""


class _Done:
    def wait(self) -> None:
        """Nothing is left to do."""


DONE = _Done()


@dataclass(frozen=True)
class Group:
    """Those that share a layer: a process group, or a process on its own.

    Sums of 16-bit floats accumulate in float32, in one order on all ranks, and are rounded once. With ``async_op`` a
    call returns at once; its tensors are left alone until ``wait()`` has returned.
    """

    process_group: dist.ProcessGroup | None
    communicator: Communicator | None
    rank: int
    world_size: int

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a tensor parallel module cannot be pickled, since its process group cannot; save its state_dict(), with "
            "torch.distributed.checkpoint"
        )

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"

    @property
    def overlaps(self) -> bool:
        """Whether there are cores for communication beside computing, at least two for each rank."""
        return self.world_size > 1 and len(os.sched_getaffinity(0)) >= 2 * self.world_size

    def _direct(self, tensor: torch.Tensor) -> Communicator | None:
        return self.communicator if tensor.device.type == "cpu" else None

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", async_op: bool = False) -> Waitable:
        """Collective, in place; the tensor is contiguous."""
        if self.world_size == 1:
            return DONE
        communicator = self._direct(tensor)
        if communicator is not None:
            return communicator.all_reduce(tensor, op, async_op=async_op) or DONE
        torch_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        if tensor.dtype in _HALVES:
            wide = tensor.float()
            dist.all_reduce(wide, torch_op, group=self.process_group)
            tensor.copy_(wide)
            return DONE
        work = dist.all_reduce(tensor, torch_op, group=self.process_group, async_op=async_op)
        return work or DONE

    def all_gather(
        self, parts: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool = False
    ) -> Waitable:
        """Collective: each rank's tensor arrives in its part on all ranks; all are contiguous, counts may differ."""
        if self.world_size == 1:
            parts[0].copy_(tensor)
            return DONE
        communicator = self._direct(tensor)
        if communicator is not None:
            return communicator.all_gather(list(parts), tensor, async_op=async_op) or DONE
        count = max(part.numel() for part in parts)
        padded = [tensor.new_zeros(count) for _ in parts]
        own = tensor.new_zeros(count)
        own[: tensor.numel()] = tensor.reshape(-1)
        dist.all_gather(padded, own, group=self.process_group)
        for part, arrived in zip(parts, padded, strict=True):
            part.copy_(arrived[: part.numel()].view(part.shape))
        return DONE

    def reduce_scatter(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], async_op: bool = False
    ) -> Waitable:
        """Collective: ``output`` is the sum of the ranks' parts for this rank; contiguous, counts may differ."""
        if self.world_size == 1:
            output.copy_(parts[0])
            return DONE
        communicator = self._direct(output)
        if communicator is not None:
            return communicator.reduce_scatter(output, list(parts), async_op=async_op) or DONE
        whole = torch.cat([part.reshape(-1) for part in parts])
        self.all_reduce(whole).wait()
        arrived = whole.split([part.numel() for part in parts])[self.rank]
        output.copy_(arrived.view(output.shape))
        return DONE

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Collective: what each rank passed, some integers."""
        own = torch.tensor(numbers, dtype=torch.int64)
        everyone = torch.empty(self.world_size, len(numbers), dtype=torch.int64)
        on = self.communicator is not None or self.process_group is None
        device = torch.device("cpu") if on else _device_of(self.process_group)
        own, everyone = own.to(device), everyone.to(device)
        self.all_gather(list(everyone), own).wait()
        return [[int(number) for number in row] for row in everyone.tolist()]


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's small tensors lie."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def group_of(group: GroupLike | Group = None) -> Group:
    """What a ``group=`` argument means: a process group, a mesh of one dimension, or None.

    None is the default group or, where there is none, this process alone.
    """
    if isinstance(group, Group):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidArgument(
                f"the mesh has {group.ndim} dimensions {group.mesh_dim_names}; give the one that the layers are split "
                'over, as mesh["tp"]'
            )
        group = group.get_group()
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return Group(None, None, 0, 1)
        group = dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidArgument(
            f"rank {dist.get_rank()} is not a member of the group that the layer is split over"
        )
    assert group is not None
    return Group(group, find_communicator(group), rank, dist.get_world_size(group))
