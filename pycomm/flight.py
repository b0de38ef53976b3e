"""The flight recorder's and the counters' front: dumps when something fails or on a signal, and ``pycomm.stats()``.

The records themselves lie in shared memory (``csrc/recorder.h``); ``pycomm.trace`` writes and reads dumps of them.
"""

from __future__ import annotations

import logging
import signal
import threading
from functools import cache
from typing import Any

import torch.distributed as dist

from pycomm.config import Config, config
from pycomm.extension import core

log = logging.getLogger("pycomm")

_reported: set[str] = set()  # failures that have been dumped


def stats(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """What a group (the default one if None) has done on this rank so far.

    ``operations`` and messages that are done, ``bytes`` of user tensors, ``seconds`` from start to end and, of these,
    ``seconds_wait`` until all ranks had entered: how long this rank waited for others. In all, and by ``kinds``
    ("all_reduce", "send", ...). Operations of at most 16 KiB that had not to wait count as taking no time. Raises
    InvalidArgument if the group's CPU backend is not pycomm.
    """
    from pycomm.backend import get_communicator

    return get_communicator(group).stats()


def report_failure(reason: str) -> None:
    """Called when an operation fails on this rank: logs and, if ``PYCOMM_TRACE_DIR`` is set, dumps; once a failure."""
    if reason in _reported:
        return
    _reported.add(reason)
    log.info("%s", reason)
    if not config().trace_dir:
        return
    from pycomm.trace import dump

    try:
        dump(core.living_communicators(), config().trace_dir, reason)
    except Exception as error:  # what failed is worse, and must be heard
        log.warning("no dump: %s", error)


def report_all_failures() -> None:
    """The same for groups that failed where nobody could tell: in a thread of the core, or in a message."""
    for communicator in core.living_communicators():
        if reason := communicator.failure_report():
            report_failure(reason)


@cache
def install() -> None:
    """Arranges for what concerns the whole process, once, before its first group is made."""
    core.set_call_sites(config().call_sites)
    if fault := Config.test_fault():
        core.set_test_fault(**fault)
    core.set_failure_hook(report_failure)
    if config().trace_dir and threading.current_thread() is threading.main_thread():
        from pycomm.trace import install_signal_dump

        number = getattr(signal, config().trace_signal)
        if signal.getsignal(number) is signal.SIG_DFL:
            install_signal_dump(number, config().trace_dir, core.living_communicators)
