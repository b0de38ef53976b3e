"""The ways that a run sets side by side: a backend and, for an all_reduce, an algorithm or an encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Half a unit in the last place, by what travels: of a value, of int8 its block's largest. (Bits of significands: 11,
#: 8, 4 and 3; int8 has 254 steps from end to end.)
ROUNDING: Final = {
    "": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3,
    "int8": 1 / 254,
}  # fmt: skip
COMPRESSIONS: Final = tuple(name for name in ROUNDING if name)


@dataclass(frozen=True)
class Way:
    """A side of the comparison."""

    backend: str
    algorithm: str = ""
    compression: str = ""

    def __str__(self) -> str:
        algorithm = self.algorithm and f":{self.algorithm}"
        return self.backend + algorithm + (self.compression and f"+{self.compression}")

    @property
    def rounding(self) -> float:
        """Of one encoding, relative to the largest value."""
        return ROUNDING[self.compression]


#: Nothing but the backend's own call.
PLAIN: Final = Way("")
