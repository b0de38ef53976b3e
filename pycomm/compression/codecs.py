"""Compressors: which gradients they leave alone; and those that encode every value."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from pycomm.errors import InvalidArgument
from pycomm.extension import core

if TYPE_CHECKING:
    from pycomm._core import Codec

#: (format, block, feedback, infinite, stochastic), as csrc/c10d/direct_reducer.h has them.
Wiring = tuple[str, int, bool, bool, bool]
PLAIN: Wiring = ("fp32", 0, False, False, False)

#: A parameter's name and itself; True if it shall not be compressed.
Exclusion = Callable[[str, torch.Tensor], bool]


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """What all compressors have in common: when, and for which gradients.

    error_feedback: what is left out of a gradient is added to the next one (Seide et al. 2014; Karimireddy et al.
    2019), so nothing is lost in the long run. Costs a float per parameter.
    warmup_steps: so many first steps are not compressed.
    never_compress: patterns that are searched in parameter names (regular expressions), or a function of name and
    parameter. Beside those, parameters of less than two dimensions (norms, biases) or `least_count` elements travel in
    float32, unless `small` is True.
    always: also where it gains nothing (see `gains`).
    seed: of what is chosen by chance.
    """

    format: ClassVar[str]
    error_feedback: bool = False
    warmup_steps: int = 0
    never_compress: Sequence[str] | Exclusion = ()
    least_count: int = 1024
    small: bool = False
    always: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise InvalidArgument(f"warmup_steps must not be negative: {self.warmup_steps}")

    def compresses(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether a parameter's gradient is compressed, after the warm-up."""
        if not self.small and (parameter.dim() < 2 or parameter.numel() < self.least_count):
            return False
        if callable(self.never_compress):
            return not self.never_compress(name, parameter)
        return not any(re.search(pattern, name) for pattern in self.never_compress)

    @abstractmethod
    def gains(self, parameter: torch.Tensor, world_size: int) -> bool:
        """Whether fewer bytes travel by it. Where not, as fp16 for float16 parameters, it is left out by itself."""

    def choose(
        self, named: Iterable[tuple[str, torch.Tensor]], step: int, world_size: int
    ) -> list[bool]:
        """Of which parameters the gradients are compressed in a step."""
        warms_up = step < self.warmup_steps
        return [
            not warms_up
            and self.compresses(name, parameter)
            and (self.always or self.gains(parameter, world_size))
            for name, parameter in named
        ]


@dataclass(frozen=True, kw_only=True)
class Encoding(Compressor):
    """A wire format for gradients, and how it is used.

    block: how many values share a scale, a multiple of 64 up to 4096; 0: none do. With scales nothing finite
    overflows, and nothing vanishes but what is far smaller than its block's largest. A block that holds an infinity or
    NaN arrives as NaN; without scales single values do.
    stochastic: values are rounded up or down by chance, so that their mean is right; `seed` and the rank choose.
    infinite: without scales, what overflows becomes infinite, for a GradScaler to see, in place of the largest value.
    """

    block: int = 0
    stochastic: bool = False
    infinite: bool = False
    _codec: Codec = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_codec", core.Codec(self.format, self.block))
        super().__post_init__()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_codec"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _codec=core.Codec(self.format, int(str(state["block"]))))

    @property
    def codec(self) -> Codec:
        """The kernels' name for it."""
        return self._codec

    @property
    def wiring(self) -> Wiring:
        """The reducer's name for it."""
        return self.format, self.block, self.error_feedback, self.infinite, self.stochastic

    @property
    def ratio(self) -> float:
        """Bytes of float32 by bytes on the wire."""
        many = 4096 * 64
        return 4 * many / self.codec.wire_bytes(many)

    def gains(self, parameter: torch.Tensor, world_size: int) -> bool:
        """See Compressor."""
        return 4 / self.ratio < parameter.element_size()

    def wirings(
        self, named: Iterable[tuple[str, torch.Tensor]], step: int, world_size: int
    ) -> tuple[list[Wiring], list[int]]:
        """How gradients travel in a step: the kinds, and each parameter's."""
        chosen = self.choose(named, step, world_size)
        return [PLAIN, self.wiring], [int(is_chosen) for is_chosen in chosen]


@dataclass(frozen=True, kw_only=True)
class FP16(Encoding):
    """float16 with a power of two per block: 11 bits of every value at half the bytes."""

    format: ClassVar[str] = "fp16"
    block: int = 1024


@dataclass(frozen=True, kw_only=True)
class BF16(Encoding):
    """bfloat16: 8 bits of every value, float32's range."""

    format: ClassVar[str] = "bf16"


@dataclass(frozen=True, kw_only=True)
class FP8(Encoding):
    """float8 e4m3 with a power of two per block: 4 bits of every value at a quarter of the bytes."""

    format: ClassVar[str] = "fp8_e4m3"
    block: int = 256
    error_feedback: bool = True


@dataclass(frozen=True, kw_only=True)
class FP8Wide(Encoding):
    """float8 e5m2 with a power of two per block: 3 bits, and a wider range within a block."""

    format: ClassVar[str] = "fp8_e5m2"
    block: int = 256
    error_feedback: bool = True


@dataclass(frozen=True, kw_only=True)
class Int8(Encoding):
    """int8 with a scale per block: 255 even steps up to the block's largest value."""

    format: ClassVar[str] = "int8"
    block: int = 256
    error_feedback: bool = True


NAMED: dict[str, type[Encoding]] = {
    "fp16": FP16,
    "bf16": BF16,
    "fp8": FP8,
    "fp8_e4m3": FP8,
    "fp8_e5m2": FP8Wide,
    "int8": Int8,
}


def compressor_of(compression: str | Compressor, **options: object) -> Compressor:
    """A compressor by its name, with these options; or itself. Raises InvalidArgument for an unknown name."""
    if isinstance(compression, Compressor):
        if options:
            raise InvalidArgument(
                f"{', '.join(options)}: give these to {type(compression).__name__}"
            )
        return compression
    if compression not in NAMED:
        raise InvalidArgument(
            f"unknown compression {compression!r}; known are {', '.join(NAMED)}, or an instance of a class of "
            "pycomm.compression"
        )
    return NAMED[compression](**options)  # type: ignore[arg-type]


def encoding_of(compression: str | Compressor, **options: object) -> Encoding:
    """The same where every value must be encoded; refuses compressors that leave some out."""
    compressor = compressor_of(compression, **options)
    if not isinstance(compressor, Encoding):
        raise InvalidArgument(
            f"{type(compressor).__name__} does not encode every value; use it in DistributedDataParallel, "
            "register_comm_hook or sync_gradients"
        )
    return compressor
