"""What pycomm raises. Every message names rank, operation, sizes and what to do."""

from __future__ import annotations

import builtins


class Error(RuntimeError):
    """Base of all pycomm errors; raised itself for failures of the system (memory, sockets)."""


class InvalidArgument(Error, ValueError):
    """The call itself is wrong. Raised on the calling rank before anything is sent."""


class MismatchError(Error):
    """Ranks made different calls. Raised on every rank; the message names both calls."""


class TimeoutError(Error, builtins.TimeoutError):
    """A rank did not arrive in time. The message says which ranks had arrived and which not."""


class PeerDiedError(Error):
    """A peer's process ended, or it left the group, while this rank waited for it."""


class AbortedError(Error):
    """The communicator was aborted, or had ended before this call."""


class NcclError(Error):
    """NCCL or CUDA reports an error of its own. The message has its code, NCCL's last words and what to do."""


class GradientError(Error):
    """Gradients of a DistributedDataParallel module cannot be averaged, and would differ between ranks.

    Raised where this is noticed, and names the parameters. Ranks that wait for this one get AbortedError with the same
    words.
    """
