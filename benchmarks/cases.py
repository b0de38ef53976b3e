"""What is measured: operations, sizes, dtypes, their inputs and exact results; without torch.

Every engine's ranks use this file, whatever library they measure, so that all of them move the
same bytes between buffers that were allocated in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

OPS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
    "barrier",
)
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
STORAGE: dict[str, np.dtype[Any]] = {  # numpy has no bfloat16: its bits are kept
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
DTYPES = tuple(STORAGE)
ROOT = 0
ALIGNMENT = 64  # bytes, as torch aligns its tensors

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Case:
    """What is timed: size_bytes and count are those of the whole buffer, S."""

    op: str
    size_bytes: int
    count: int
    dtype: str
    world_size: int

    @property
    def shard(self) -> int:
        """Elements of one rank's part of the whole buffer."""
        return self.count // self.world_size


@dataclass(frozen=True)
class Buffers:
    """What a call reads and writes; one array for the operations in place."""

    input: Array
    output: Array

    def clear(self) -> None:
        """Zeros: repeated sums stay finite, whatever the number of calls."""
        self.input.fill(0)
        self.output.fill(0)


def make_case(op: str, size_bytes: int, dtype: str, world_size: int) -> Case:
    """The size rounded up to a whole number of elements for each rank; a barrier has no bytes."""
    if op == "barrier":
        return Case(op, 0, 0, dtype, world_size)
    item_bytes = STORAGE[dtype].itemsize
    count = math.ceil(size_bytes / (item_bytes * world_size)) * world_size
    return Case(op, count * item_bytes, count, dtype, world_size)


# ------------------------------------------------------------------------------- derived quantities


def bus_factor(op: str, world_size: int) -> float:
    """What busbw multiplies algbw with: the share of S that crosses each rank's link."""
    match op:
        case "all_reduce":
            return 2 * (world_size - 1) / world_size
        case "all_gather" | "reduce_scatter" | "gather" | "scatter" | "all_to_all":
            return (world_size - 1) / world_size
        case "broadcast" | "reduce" | "send_recv" | "barrier":
            return 1.0
    raise ValueError(f"no bus factor for {op!r}")


def memory_bytes(op: str, size_bytes: int, world_size: int) -> int:
    """Bytes that all ranks together move to or from memory at least, S being size_bytes.

    Every input is read once and every output written once. Neither copies through shared memory
    nor the reads that a written cache line may cost are counted.
    """
    match op:
        case "all_reduce" | "all_to_all":  # each rank reads S and writes S
            copies = 2 * world_size
        case "broadcast":  # one reads S, the others write it
            copies = world_size
        case (
            "all_gather" | "reduce_scatter" | "reduce"
        ):  # S on the one side, S per rank on the other
            copies = world_size + 1
        case "gather" | "scatter" | "send_recv":  # S read, S written
            copies = 2
        case "barrier":
            copies = 0
        case _:
            raise ValueError(f"no memory traffic known of {op!r}")
    return copies * size_bytes


def calls_per_round(op: str) -> int:
    """What the time of one round is divided by: send_recv's is there and back, a time one way."""
    return 2 if op == "send_recv" else 1


# ------------------------------------------------------------------------------------------ buffers


def allocate(count: int, dtype: str) -> Array:
    """Ordinary private memory, aligned, each page touched; ones."""
    storage = STORAGE[dtype]
    raw = np.empty(count * storage.itemsize + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    array = raw[start : start + count * storage.itemsize].view(storage)
    array.fill(1)
    return array


def make_buffers(case: Case) -> Buffers:
    """all_reduce, broadcast and reduce work in place; gather and scatter use a part of one side."""
    whole = allocate(case.count, case.dtype)
    match case.op:
        case "all_gather" | "gather":
            return Buffers(allocate(case.shard, case.dtype), whole)
        case "reduce_scatter" | "scatter":
            return Buffers(whole, allocate(case.shard, case.dtype))
        case "all_to_all" | "send_recv":
            return Buffers(whole, allocate(case.count, case.dtype))
    return Buffers(whole, whole)


# ---------------------------------------------------------------------------------- inputs, results


def encode(values: NDArray[np.int32], dtype: str) -> Array:
    """Small integers as the dtype's storage; they are exact in every one of them."""
    if dtype != "bfloat16":
        return values.astype(STORAGE[dtype])
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def decode(array: Array, dtype: str) -> Array:
    """Numbers to show, from the dtype's storage."""
    if dtype != "bfloat16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def pattern(count: int, rank: int) -> NDArray[np.int32]:
    """Integers below 11 that differ by rank and place; sums over 25 ranks are exact anywhere."""
    return (np.arange(count, dtype=np.int32) * 3 + rank * 7) % 11


def expected(case: Case, rank: int) -> Array | None:
    """What the call must leave in this rank's output; None where it may leave anything."""
    values = expected_values(case, rank)
    return None if values is None else encode(values, case.dtype)


def expected_values(case: Case, rank: int) -> NDArray[np.int32] | None:
    own, peers = slice(rank * case.shard, (rank + 1) * case.shard), range(case.world_size)
    match case.op:
        case "broadcast":
            return pattern(case.count, ROOT)
        case "scatter":
            return pattern(case.count, ROOT)[own]
        case "all_gather":
            return np.concatenate([pattern(case.shard, peer) for peer in peers])
        case "gather":
            whole = [pattern(case.shard, peer) for peer in peers]
            return np.concatenate(whole) if rank == ROOT else None
        case "all_to_all":
            return np.concatenate([pattern(case.count, peer)[own] for peer in peers])
        case "send_recv":
            return pattern(case.count, 1 - rank) if rank < 2 else None
        case "barrier":
            return None
    total = np.zeros(case.count, dtype=np.int32)
    for peer in peers:
        total += pattern(case.count, peer)
    if case.op == "reduce":
        return total if rank == ROOT else None
    return total[own] if case.op == "reduce_scatter" else total


@dataclass(frozen=True)
class Mismatch:
    """The first wrong element of a rank's output."""

    offset: int
    expected: float
    got: float


def compare(got: Array, want: Array | None, dtype: str) -> Mismatch | None:
    """Exact equality, bit for bit."""
    if want is None or np.array_equal(got, want):
        return None
    offset = int(np.flatnonzero(got != want)[0])
    shown = [float(decode(array[offset : offset + 1], dtype)[0]) for array in (want, got)]
    return Mismatch(offset, *shown)
