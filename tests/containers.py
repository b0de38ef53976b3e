"""Ranks that live in containers: namespaces of their own for pids, mounts, IPC and the host's name; one network.

boxes = [CONTAINER, CONTAINER]
run(2, lambda rank, n: contained(boxes[rank], lambda: step(rank, n)), init=False)
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import cloudpickle

T = TypeVar("T")

_PR_SET_PDEATHSIG: Final = 1
_MS_REC_PRIVATE: Final = 0x4000 | (1 << 18)
_FLAGS: Final = {"mount": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "pid": 0x20000000}


def can_unshare(*what: str) -> bool:
    """Whether this machine lets us have namespaces of our own."""
    command = ["unshare", *what, "true"]
    return shutil.which("unshare") is not None and subprocess.run(command).returncode == 0


@dataclass(frozen=True)
class Box:
    """What a container has of its own."""

    namespaces: tuple[str, ...] = ("pid", "mount", "ipc", "uts")
    fresh: tuple[str, ...] = ("/dev/shm",)  # folders in whose place there is an empty one
    has_proc: bool = True
    host: str = ""
    is_init: bool = False  # the rank is its first process, which no signal from within can end


#: As container engines make them.
CONTAINER: Final = Box()
#: With pids of its own, and all else the host's.
PIDS_ONLY: Final = Box(("pid", "mount"), ())


def contained(box: Box | None, step: Callable[[], T]) -> T:
    """What `step` returns, or raises, in a new container; without a box, here.

    The calling process lives until the container ends and, if that gives no answer, ends by itself
    as the container's process did.
    """
    if box is None:
        return step()
    _unshare(box)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_first_process(box, step, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not answer:
        os._exit(abs(status) or 1)
    succeeded, value = cloudpickle.loads(answer)
    if not succeeded:
        raise AssertionError(f"in its container this rank raised\n{value}")
    return value


def _system(name: str, *args: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{args}: {os.strerror(number)}")


def _unshare(box: Box) -> None:
    _system("unshare", sum(_FLAGS[name] for name in box.namespaces))


def _be_first_process(box: Box, step: Callable[[], Any], writer: int) -> None:
    """Furnish the container, and run the step in this process or, as with an init, in a child."""
    status = 1
    try:
        _system("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
        _furnish(box)
        child = 0 if box.is_init else os.fork()
        if child == 0:
            _answer(step, writer)
            status = 0
        else:
            os.close(writer)
            status = abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _furnish(box: Box) -> None:
    _system("mount", b"none", b"/", None, _MS_REC_PRIVATE, None)
    if box.has_proc:
        _system("mount", b"proc", b"/proc", b"proc", 0, None)
    for folder in box.fresh if box.has_proc else (*box.fresh, "/proc"):
        _system("mount", b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=64m")
    if box.host:
        socket.sethostname(box.host)


def _answer(step: Callable[[], Any], writer: int) -> None:
    try:
        answer = True, step()
    except BaseException:
        answer = False, traceback.format_exc()
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(cloudpickle.dumps(answer))
