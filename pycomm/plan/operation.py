"""One collective on a group of ranks, plain or compressed: by every algorithm, and the best one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pycomm.compression.codecs import Encoding, encoding_of
from pycomm.compression.cost import Rates, share
from pycomm.errors import InvalidArgument
from pycomm.plan import algorithms
from pycomm.plan.algorithms import Cost
from pycomm.plan.cluster import Group

#: How compressed values may travel. pycomm has the first two; ring encodes anew at every hop.
COMPRESSED = ("one_shot", "two_shot", "ring", "hierarchical")

#: Bytes that a sum reads and writes for each that it adds.
_TOUCHED = 3

_BUSBW = {
    "all_reduce": 2.0,
    "reduce_scatter": 1.0,
    "all_gather": 1.0,
}


@dataclass(frozen=True)
class Prediction:
    """Of one collective by one algorithm."""

    operation: str
    algorithm: str
    compression: str
    bytes: float  # of the tensors, as nccl-tests counts them
    wire_bytes: float  # the same, encoded
    world_size: int
    cost: Cost

    @property
    def seconds(self) -> float:
        """From the call to the end on the last rank."""
        return self.cost.seconds

    @property
    def busbw(self) -> float:
        """Bytes per second, as nccl-tests defines it; 0 of nothing."""
        if not self.seconds:
            return 0.0
        factor = _BUSBW.get(self.operation, 1.0)
        if self.operation in _BUSBW:
            factor *= share(self.world_size)
        return factor * self.bytes / self.seconds


def predict(
    group: Group,
    bytes: float,
    *,
    operation: str = "all_reduce",
    algorithm: str = "auto",
    compression: str = "none",
    memory: float = math.inf,
) -> Prediction:
    """One collective of float32. Raises InvalidArgument for unknown names and sizes below zero.

    bytes: of the tensor; of an all_gather all outputs', of a reduce_scatter all inputs'. algorithm: "auto" is the
    fastest. compression: of an all_reduce, "fp16", "bf16", "fp8" or "int8". memory: bytes per second at which a rank's
    kernels read and write.
    """
    found = predictions(group, bytes, operation, compression, memory)
    if algorithm == "auto":
        return min(found, key=lambda one: one.seconds)
    for one in found:
        if one.algorithm == algorithm:
            return one
    raise InvalidArgument(
        f"unknown algorithm {algorithm!r}; for this {operation} known are "
        f"{', '.join(one.algorithm for one in found)}"
    )


def predictions(
    group: Group,
    bytes: float,
    operation: str = "all_reduce",
    compression: str = "none",
    memory: float = math.inf,
) -> list[Prediction]:
    """By every algorithm, in no order; see predict()."""
    if not memory > 0:
        raise InvalidArgument(f"memory must be positive, in bytes/s: {memory}")
    if not 0 <= bytes < math.inf:
        raise InvalidArgument(f"bytes must be 0 or more: {bytes}")
    if compression == "none":
        costs = algorithms.every(operation, group, bytes, summed=_TOUCHED / memory)
        wire = bytes
    elif operation != "all_reduce":
        raise InvalidArgument(f"only an all_reduce is compressed, not {operation}")
    else:
        encoding = encoding_of(compression)
        wire = wire_bytes(bytes, compression)
        costs = _compressed(encoding, group, bytes, wire, memory)
    return [
        Prediction(operation, name, compression, bytes, wire, group.world_size, cost)
        for name, cost in costs.items()
    ]


def wire_bytes(bytes: float, compression: str) -> float:
    """Of float32 values that take so many bytes."""
    if compression == "none":
        return bytes
    return float(encoding_of(compression).codec.wire_bytes(math.ceil(bytes / 4)))


def _compressed(
    encoding: Encoding, group: Group, bytes: float, wire: float, memory: float
) -> dict[str, Cost]:
    rates = Rates.of_memory(memory, encoding.codec.value_bytes, encoding.error_feedback)
    count, p = bytes / 4, group.world_size
    kernels = {
        "one_shot": count * (rates.encode + rates.reduce + max(p - 2, 0) * rates.more),
        "two_shot": rates.seconds(count, p),
        "ring": count * share(p) * (rates.encode + rates.reduce + rates.decode),
        "hierarchical": rates.seconds(count, group.local)
        + rates.seconds(count / group.local, group.hosts),
    }
    moved = algorithms.every("all_reduce", group, wire)
    return {
        name: moved[name] + Cost(kernels=kernels[name] if p > 1 else 0.0)
        for name in COMPRESSED
        if name in moved
    }
