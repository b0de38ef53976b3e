"""pycomm: the communication layer under PyTorch training.

``import pycomm`` registers the torch.distributed backend ``"pycomm"``;
``pycomm.DistributedDataParallel`` takes the place of torch's class. See README.md.
"""

import importlib
from types import ModuleType

from pycomm import compression, data
from pycomm.backend import get_communicator, register
from pycomm.compression import all_reduce, sync_gradients
from pycomm.ddp import DistributedDataParallel
from pycomm.errors import (
    AbortedError,
    Error,
    GradientError,
    InvalidArgument,
    MismatchError,
    NcclError,
    PeerDiedError,
    TimeoutError,
)
from pycomm.extension import core as _core_module
from pycomm.flight import stats
from pycomm.gpu_memory import gpu_pool, register_pool
from pycomm.memory import empty
from pycomm.mesh import init_mesh
from pycomm.recovery import shrink
from pycomm.rendezvous import create_communicator

Communicator = _core_module.Communicator
__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "Communicator",
    "DistributedDataParallel",
    "Error",
    "GradientError",
    "InvalidArgument",
    "MismatchError",
    "NcclError",
    "PeerDiedError",
    "TimeoutError",
    "__version__",
    "all_reduce",
    "compression",
    "create_communicator",
    "data",
    "empty",
    "get_communicator",
    "gpu_pool",
    "init_mesh",
    "pipeline",
    "register_pool",
    "shrink",
    "stats",
    "sync_gradients",
    "tensor_parallel",
]


def __getattr__(name: str) -> ModuleType:
    """These are imported when first asked for: what they need of torch takes a second."""
    if name in ("pipeline", "tensor_parallel"):
        return importlib.import_module(f"pycomm.{name}")
    raise AttributeError(f"module 'pycomm' has no attribute {name!r}")


register()
