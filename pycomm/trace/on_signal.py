"""A dump on demand: what a process does when it is sent a signal."""

from __future__ import annotations

import logging
import os
import signal as signals
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from pycomm.errors import InvalidArgument
from pycomm.trace.format import Recorded
from pycomm.trace.write import dump

logger = logging.getLogger("pycomm.trace")

#: Signals that a process is sent in order to be told something, not in order to end it.
_GO_ON = {
    *(signals.SIGUSR1, signals.SIGUSR2, signals.SIGCONT),
    *(signals.SIGURG, signals.SIGWINCH, signals.SIGCHLD),
}


def install_signal_dump(
    signal: int,
    directory: str | os.PathLike[str],
    get_communicators: Callable[[], Iterable[Recorded]],
) -> bool:
    """Makes this process dump whenever it is sent a signal; whether that could be arranged.

    What the signal did before still happens afterwards: a handler of Python's is called, and a default that ends the
    process (SIGTERM) ends it; SIGUSR1 and SIGUSR2 only dump. A rank that is blocked in an operation dumps too, since
    the wait looks for signals. Nothing is installed, and a warning is logged, outside the main thread and where a
    handler was set from C, which could not be called.
    """
    number = signals.Signals(signal)
    before = signals.getsignal(number)

    def handler(received: int, frame: FrameType | None) -> None:
        try:
            dump(get_communicators(), directory, f"signal {number.name}")
        except InvalidArgument:
            logger.warning("%s: there is no group to dump", number.name)
        except Exception as error:  # must not end what the signal has interrupted
            logger.warning("%s: no dump: %s", number.name, error)
        if callable(before):
            before(received, frame)
        elif before == signals.SIG_DFL and number not in _GO_ON:
            signals.signal(number, signals.SIG_DFL)
            os.kill(os.getpid(), number)

    try:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("handlers can only be set in the main thread")
        if before is None:
            raise ValueError("it has a handler that was not set from Python")
        signals.signal(number, handler)
    except (OSError, ValueError) as error:
        logger.warning("%s will not dump: %s", number.name, error)
        return False
    return True
