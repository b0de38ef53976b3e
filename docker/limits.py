"""System calls that a container's engine may refuse, and how a process has them refused to itself: seccomp(2)."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable

#: x86-64 numbers; by the engines' default filters or for want of a capability, depending on kernel and engine.
NUMBERS = {
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "ptrace": 101,
    "kcmp": 312,
}
#: What docker/prove.py refuses: without CAP_SYS_PTRACE, engines do so on kernels before 4.8 or by older filters.
REFUSED = ("process_vm_readv", "process_vm_writev", "pidfd_getfd", "ptrace", "kcmp")

_SECCOMP, _SET_MODE_FILTER, _ALL_THREADS = 317, 1, 1
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # of classic BPF


def can_refuse() -> bool:
    """Whether the numbers are this machine's."""
    return platform.machine() == "x86_64"


def refuse_calls(names: Iterable[str], number: int = errno.EPERM) -> None:
    """From now on these calls fail with this errno, in all threads of this process and its children. For ever."""
    calls = [NUMBERS[name] for name in names]
    code = [struct.pack("HBBI", _LOAD, 0, 0, 0)]  # the call's number
    for index, call in enumerate(calls):
        code.append(struct.pack("HBBI", _EQUAL, len(calls) - index, 0, call))  # equal: to the last
    code += [struct.pack("HBBI", _RETURN, 0, 0, result) for result in (_ALLOW, _ERRNO | number)]
    program = ctypes.create_string_buffer(b"".join(code))
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) != 0:  # no new privileges, or the kernel would not let us
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    # 0, -1, or the id of a thread that does not follow
    if libc.syscall(_SECCOMP, _SET_MODE_FILTER, _ALL_THREADS, ctypes.create_string_buffer(header)):
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def is_refused(name: str, number: int = errno.EPERM) -> bool:
    """Whether a call fails so, with arguments of which it would otherwise complain."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(NUMBERS[name], -1, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == number
