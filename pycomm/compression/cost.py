"""What compression costs and saves, for advise() and pycomm.plan: seconds of kernels, bytes of wires."""

from __future__ import annotations

from dataclasses import dataclass


def share(world_size: int) -> float:
    """The part of a message that each half of an all-reduce (two_shot, ring) makes a rank send."""
    return (world_size - 1) / world_size


@dataclass(frozen=True)
class Rates:
    """Seconds per value that a rank spends on an all-reduce of encoded values; without codec, of float32."""

    encode: float
    reduce: float  # the sum of the own values and another rank's
    more: float  # what every further rank costs it
    decode: float

    @classmethod
    def of_memory(cls, bandwidth: float, wire_bytes: float = 4, feedback: bool = False) -> Rates:
        """Of kernels that nothing but memory holds up: `bandwidth` counts bytes per second, read and written.

        wire_bytes: of an encoded value. feedback: whether residuals, which are float32, are read and written, too.
        """
        value, residual = 4, 8 if feedback else 0
        return cls(
            (value + residual + wire_bytes) / bandwidth,
            (2 * value + residual + 2 * wire_bytes) / bandwidth,
            wire_bytes / bandwidth,
            (wire_bytes + value) / bandwidth,
        )

    def seconds(self, count: float, world_size: int) -> float:
        """Of a rank, for an all-reduce of so many values: encode for the others, sum the own shard, decode theirs."""
        if world_size < 2:
            return 0.0
        own = count / world_size
        summed = own * (self.reduce + (world_size - 2) * self.more)
        return count * share(world_size) * (self.encode + self.decode) + summed
