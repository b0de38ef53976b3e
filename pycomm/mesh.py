"""The ranks of a job in three dimensions: pipeline stages, replicas, and ranks that share layers."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pycomm.errors import InvalidArgument


def init_mesh(dp: int = 1, pp: int = 1, tp: int = 1, device_type: str = "cpu") -> DeviceMesh:
    """Collective: torch's DeviceMesh with the dimensions "pp", "dp" and "tp", of these sizes.

    Neighbours in "tp", which communicates most, have neighbouring ranks, and stages, which communicate least, are
    farthest apart: rank = (stage * dp + replica) * tp + shard. mesh["dp"] and so on are what data_group=, group= and
    parallelize() take; mesh["dp"].get_local_rank() tells where this rank is. Dimensions of size 1 are there, too.

    Raises InvalidArgument on all ranks if dp * pp * tp is not the number of ranks.
    """
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    if wrong := {name: size for name, size in sizes.items() if size < 1}:
        raise InvalidArgument(f"dimensions of a mesh are 1 or more: {wrong}")
    if not dist.is_initialized():
        raise InvalidArgument("init_process_group() comes before init_mesh()")
    ranks = dist.get_world_size()
    if dp * pp * tp != ranks:
        raise InvalidArgument(
            f"dp {dp} x pp {pp} x tp {tp} are {dp * pp * tp} ranks, but the job has {ranks}"
        )
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
