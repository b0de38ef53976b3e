"""Compressors that leave most of a gradient for later: what they share. They are Python, over torch's operations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from pycomm.compression.codecs import Compressor

if TYPE_CHECKING:
    from pycomm.compression.carrier import Ranks


@dataclass
class Memory:
    """What is kept from step to step, by parameter name."""

    residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    bases: dict[str, torch.Tensor] = field(default_factory=dict)  # of PowerSGD

    def residual(self, name: str, count: int) -> torch.Tensor:
        """A parameter's; zeros if there is none of this size."""
        found = self.residuals.get(name)
        if found is None or found.numel() != count:
            found = self.residuals[name] = torch.zeros(count)
        return found


@dataclass(frozen=True, kw_only=True)
class Reduced(Compressor):
    """A compressor that does not send every value.

    A parameter whose gradient is zero on all ranks, as that of one that was not used, sends nothing and keeps its
    residuals. Where a gradient holds an infinity or NaN on some rank, what arrives does so on every rank, and that
    step leaves no trace in residuals or bases: of this parameter nothing counts as sent.
    """

    error_feedback: bool = True

    #: Whether a gradient plus residual is made apart from the gradient, which stays as it was meanwhile.
    apart: ClassVar[bool] = False

    def average(
        self,
        ranks: Ranks,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        share: float | None,
        memory: Memory,
    ) -> None:
        """Collective: averages gradients that travel together, in place. `share`: this rank's weight; None: as all."""
        if not names:
            return
        named = zip(names, gradients, strict=True)
        opened = self._open(named, share, ranks.world_size, memory)
        self._exchange(ranks, opened, memory)
        for one in opened:
            one.close()

    @abstractmethod
    def _exchange(self, ranks: Ranks, opened: Sequence[Opened], memory: Memory) -> None:
        """Collective: of every parameter, `flat` becomes the sum over the ranks of what they send of it."""

    @abstractmethod
    def approximate(
        self, name: str, values: torch.Tensor, memory: Memory
    ) -> tuple[torch.Tensor, int]:
        """What one rank alone would send of these, and in how many bytes; `values` has the parameter's shape."""

    def compresses(self, name: str, parameter: torch.Tensor) -> bool:
        """As all compressors; what is empty, never."""
        return parameter.numel() > 0 and super().compresses(name, parameter)

    def _open(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        share: float | None,
        world_size: int,
        memory: Memory,
    ) -> list[Opened]:
        """Gradients plus residuals: where the gradients lie, or apart from them."""
        opened = []
        for name, gradient in named:
            flat = gradient.detach().reshape(-1).float()  # the gradient itself, if it is float32
            low, high = flat.aminmax()
            out = None if self.apart else flat
            by, scale = (torch.div, world_size) if share is None else (torch.mul, share)
            flat = by(flat, scale, out=out)
            residual = memory.residual(name, flat.numel()) if self.error_feedback else None
            if residual is not None:
                flat.add_(residual)
            is_zero = float(low) == 0 == float(high)
            opened.append(Opened(name, gradient, flat, residual, is_zero))
        return opened


@dataclass(frozen=True, eq=False)
class Opened:
    """A gradient at work: `flat` is this rank's part of the mean, and its residual."""

    name: str
    gradient: torch.Tensor
    flat: torch.Tensor
    residual: torch.Tensor | None
    is_zero: bool  # the gradient, without the residual

    def keep_residual(self) -> None:
        """Where something is not finite the residual stays as it was, unless it is the reason."""
        if self.residual is not None and not bool(self.residual.isfinite().all()):
            self.residual.zero_()

    def close(self) -> None:
        """Puts what is now in `flat` into the gradient."""
        if self.flat.data_ptr() != self.gradient.data_ptr():
            self.gradient.copy_(self.flat.view(self.gradient.shape))
