"""What pycomm raises. Every message names rank, operation, sizes and what to do."""

from __future__ import annotations

import builtins


class Error(RuntimeError):
    """Base of all pycomm errors; raised itself for failures of the system (memory, sockets, descriptors).

    What to do: give the system what the message says it lacks. ``except pycomm.Error`` catches every kind.
    """


class InvalidArgument(Error, ValueError):
    """The call itself is wrong: an argument, a tensor, a setting. Raised on the calling rank before anything is sent.

    What to do: correct the call that the message names. The group lives on, and no other rank heard of it.
    """


class MismatchError(Error):
    """Ranks made different calls. Raised on every rank that takes part; the message names each side's call.

    A call is compared by operation, shape, dtype, op and root; models by parameters and buffers. The group has ended.
    What to do: look at the lines that the message names, as a rule a branch that only some ranks take.
    """


class TimeoutError(Error, builtins.TimeoutError):
    """A rank did not arrive in time. The message says who had arrived, who not, and what those did last.

    The group has ended. What to do: look at what the late ranks did; ``python -m pycomm.trace`` says it in a paragraph
    if PYCOMM_TRACE_DIR was set. If they only needed longer: ``init_process_group(timeout=)``.
    """


class PeerDiedError(Error):
    """A peer's process ended, or it left the group, while this rank waited for it. The message says which and how.

    The group has ended. What to do: read that rank's own output; go on without it by pycomm.shrink, or start again
    from a checkpoint.
    """


class AbortedError(Error):
    """The communicator was aborted, or had ended before this call; the message says why, where that is known.

    What to do: look for the first error, on this rank or another one. ``destroy_process_group`` and a new
    ``init_process_group`` work in the same process.
    """


class NcclError(Error):
    """NCCL or CUDA reports an error of its own. The message has its code and NCCL's last words.

    What to do: as the message says for this code; ``NCCL_DEBUG=INFO`` makes NCCL tell more.
    """


class GradientError(Error):
    """Gradients of a DistributedDataParallel module cannot be averaged, and would differ between ranks.

    Raised where this is noticed, and names the parameters. Ranks that wait for this one get AbortedError with the same
    words.

    What to do: ``find_unused_parameters=True`` if parameters are unused in some iterations; wrap the module anew if
    its parameters were replaced, moved or unfrozen; one backward for each forward.
    """
