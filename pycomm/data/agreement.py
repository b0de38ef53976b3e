"""What ranks must have in common before they share samples: looked at, not hoped for."""

from __future__ import annotations

import secrets
from typing import Any

import torch.distributed as dist

from pycomm.errors import InvalidArgument, MismatchError


def place(
    num_replicas: int | None, rank: int | None, group: dist.ProcessGroup | None
) -> tuple[int, int, bool]:
    """The number of ranks, this rank, and whether both are a process group's, whose ranks can compare notes."""
    if (num_replicas is None) != (rank is None):
        raise InvalidArgument(
            "give both num_replicas and rank, or neither: then they are the group's"
        )
    if num_replicas is None or rank is None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument(
                "there is no process group: call torch.distributed.init_process_group first, or give "
                "num_replicas and rank"
            )
        if dist.get_rank(group) < 0:
            raise InvalidArgument("this rank is not in the group that shares the samples")
        return dist.get_world_size(group), dist.get_rank(group), True
    if not 0 <= rank < num_replicas:
        raise InvalidArgument(f"rank must lie between 0 and {num_replicas - 1}: {rank}")
    return num_replicas, rank, False


def agree_on_seed(seed: int | None, is_grouped: bool, group: dist.ProcessGroup | None) -> int:
    """The seed; if None one that the group's first rank draws. Collective then."""
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise InvalidArgument(f"seed must be a whole number of 0 or more, or None: {seed!r}")
        return seed
    if not is_grouped:
        raise InvalidArgument("without a process group ranks cannot agree on a seed: give one")
    drawn = [secrets.randbits(48)]
    dist.broadcast_object_list(drawn, group=group, group_src=0)
    return drawn[0]


def check_same(what: str, notes: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Collective: raises MismatchError on all ranks if they differ, and names the first difference."""
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, notes, group=group)
    for rank, theirs in enumerate(everybody):
        for name, value in everybody[0].items():
            if theirs[name] != value:
                raise MismatchError(
                    f"ranks would share samples in different ways: {what} of rank {rank} has {name} "
                    f"{theirs[name]!r}, that of rank 0 {value!r}; give all ranks the same"
                )


def speeds_of_ranks(
    samples: float, seconds: float, group: dist.ProcessGroup | None = None
) -> tuple[float, ...]:
    """Collective: how many samples each rank does in a second, for samplers' `speeds`.

    samples, seconds: what this rank has measured of its own computation, without waiting for others.
    """
    if not (samples > 0 and seconds > 0):
        raise InvalidArgument(f"samples and seconds must be positive: {samples} in {seconds} s")
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, samples / seconds, group=group)
    return tuple(everybody)
