"""GPU communicators: which NCCL library is used, and how a group gets its NcclCommunicator from the settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pycomm.config import Config, config
from pycomm.extension import c10d, core

if TYPE_CHECKING:
    from pycomm._core import NcclApi, NcclCommunicator


def _wheels(folders: Iterable[str], pattern: str) -> list[str]:
    """Files of NVIDIA's wheels, which lie beside torch's."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    return [
        str(path)
        for root in roots
        for folder in folders
        for path in sorted(Path(root, folder).glob(pattern))
    ]


@cache
def load_api(nccl: str | None = None, cudart: str | None = None) -> NcclApi:
    """NCCL and the CUDA runtime: those of PYCOMM_NCCL_LIB and PYCOMM_CUDART_LIB, those loaded, or torch's.

    Raises Error in words if there is none, if several are loaded, or if it is older than NCCL 2.21.
    """
    return core.NcclApi(
        config().nccl_lib if nccl is None else nccl,
        config().cudart_lib if cudart is None else cudart,
        nccl_candidates=_wheels(["nccl/lib"], "libnccl.so*"),
        cudart_candidates=_wheels(["cu13/lib", "cuda_runtime/lib"], "libcudart.so*"),
    )


def current_stream(device: int) -> int:
    """The handle of torch's current CUDA stream; the default stream where torch has not started CUDA."""
    if not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_stream(device if device >= 0 else None).cuda_stream)


def create_nccl_communicator(
    store: Any,
    rank: int,
    world_size: int,
    timeout: timedelta = timedelta(minutes=10),
    settings: Config | None = None,
    **options: Any,
) -> NcclCommunicator:
    """The NcclCommunicator of a group whose ranks share ``store``; ``options`` are those of NcclSettings.

    Nobody waits here: NCCL's own communicator is made with the first operation on a device, or by ``connect()``.
    Raises Error in words where NCCL or the CUDA runtime cannot be used.
    """
    settings = settings or config()
    core.set_stream_source(current_stream)
    chosen = {
        "check": settings.check,
        "heartbeat": timedelta(milliseconds=settings.heartbeat_ms),
        "records": settings.records,
        **options,
    }
    return core.NcclCommunicator(
        load_api(settings.nccl_lib, settings.cudart_lib),
        c10d.make_board(store) if isinstance(store, dist.Store) else store,
        rank,
        world_size,
        timeout,
        core.NcclSettings(**chosen),
    )
