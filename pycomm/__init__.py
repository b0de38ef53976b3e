"""pycomm: the communication layer under PyTorch training.

``import pycomm`` registers the torch.distributed backend ``"pycomm"``;
``pycomm.DistributedDataParallel`` takes the place of torch's class. See README.md.
"""

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
from pycomm.memory import empty
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
    "shrink",
    "stats",
    "sync_gradients",
]

register()
