"""The memory bound: the traffic of an in-place all-reduce on private memory, by every rank at once.

Measured as an engine of its own beside the others. Each rank reads and writes as many bytes as its
share of an in-place two-shot all-reduce of the same size; see bound_kernel.c. Bytes by its time are
the bandwidth against which every operation's least traffic is held.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cases import Array, Case, allocate
from native import compile_shared
from rank_loop import Call

SOURCE = Path(__file__).with_name("bound_kernel.c")
MIN_BYTES = 16 << 20  # below, buffers stay in caches and memory bounds nothing


def build() -> Path:
    """The compiled kernel; made if it is older than its source."""
    return compile_shared(SOURCE, ("-O3", "-march=native"))


class Pass:
    """A call of the kernel that keeps its memory."""

    def __init__(self, function: Callable[..., object], memory: Array, shards: int) -> None:
        self.memory = memory
        self.run = partial(function, memory.ctypes.data, memory.nbytes, shards)

    def __call__(self) -> None:
        self.run()


def make_call(case: Case) -> Call:
    """One pass over as much private memory as the case's buffer has."""
    memory = allocate(-(-case.size_bytes // 4), "float32")
    memory.fill(0)  # sums of zeros stay zeros
    function = ctypes.CDLL(str(build())).two_shot_traffic
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
    function.restype = None
    return Pass(function, memory, case.world_size)
