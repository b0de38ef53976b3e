"""PowerSGD: a gradient as the product of two thin matrices; what they miss waits in the residual."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from pycomm.compression.reduced import Memory, Opened, Reduced
from pycomm.errors import InvalidArgument

if TYPE_CHECKING:
    from pycomm.compression.carrier import Ranks

log = logging.getLogger("pycomm")

_WEAK = 1e-6  # a column so much shorter than the longest holds nothing but rounding


@dataclass(frozen=True)
class PowerSGD(Reduced):
    """Gradients of two and more dimensions travel as matrices of low rank.

    Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization",
    2019. A gradient plus residual is a matrix M of n = shape[0] rows and m columns: P = M Q is averaged and made
    orthonormal, Q = M^T P is averaged, and P Q^T arrives: (n + m) * rank values in place of n * m, one step of subspace
    iteration. The next step begins with this one's Q (`compression_state_dict` has it), made orthonormal so that the
    scale of gradients does not matter; the first with one that `seed` and the parameter's name choose. What arrives is
    made from averages alone, by the same operations on all ranks, so its bits are the same.

    Parameters of less than two dimensions, and those with (n + m) * rank >= n * m, travel in float32. A parameter with
    an infinity or NaN arrives as NaN, all of it.
    """

    format: ClassVar[str] = "low rank"
    apart: ClassVar[bool] = True
    rank: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise InvalidArgument(f"rank must be positive: {self.rank}")

    def compresses(self, name: str, parameter: torch.Tensor) -> bool:
        """As all compressors, of matrices that get smaller by it."""
        if parameter.dim() < 2 or not super().compresses(name, parameter):
            return False
        n, m = _shape(parameter)
        return (n + m) * self.rank < n * m

    def gains(self, parameter: torch.Tensor, world_size: int) -> bool:
        """See Compressor."""
        n, m = _shape(parameter)
        return 4 * (n + m) * self.rank < parameter.nbytes

    def _exchange(self, ranks: Ranks, opened: Sequence[Opened], memory: Memory) -> None:
        """See Reduced. Two all_reduces."""
        matrices = [one.flat.view(_shape(one.gradient)) for one in opened]
        left, ps = self._pack([len(matrix) for matrix in matrices], len(opened))
        used = left[-len(opened) :]
        used.copy_(torch.tensor([not one.is_zero for one in opened]))
        for one, matrix, p in zip(opened, matrices, ps, strict=True):
            p.copy_(matrix @ self._basis(one.name, matrix.shape[1], memory))
        ranks.all_reduce(left)
        columns = [_orthonormal(p) if bool(p.isfinite().all()) else p for p in ps]
        right, qs = self._pack([matrix.shape[1] for matrix in matrices])
        for matrix, p, q in zip(matrices, columns, qs, strict=True):
            q.copy_(matrix.t() @ p)
        ranks.all_reduce(right)
        for i, one in enumerate(opened):
            if used[i]:
                factors = columns[i], qs[i].clone()
                self._finish(one, matrices[i], factors, ranks.world_size, memory)
            else:
                one.flat.zero_()

    def approximate(
        self, name: str, values: torch.Tensor, memory: Memory
    ) -> tuple[torch.Tensor, int]:
        """See Reduced."""
        matrix = values.reshape(_shape(values))
        wire_bytes = 4 * self.rank * sum(matrix.shape)
        if not bool(matrix.isfinite().all()):
            return torch.full_like(values, torch.nan), wire_bytes
        p = _orthonormal(matrix @ self._basis(name, matrix.shape[1], memory))
        return (p @ (p.t() @ matrix)).view(values.shape), wire_bytes

    def _pack(
        self, heights: Sequence[int], more: int = 0
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One tensor that travels, with views for matrices of `rank` columns, and for some values more at its end.

        Products are made elsewhere and copied: their last bits can depend on how operands are aligned, and so on the
        bucket that a parameter is in.
        """
        sizes = [height * self.rank for height in heights]
        packed = torch.empty(sum(sizes) + more)
        parts = packed[: sum(sizes)].split(sizes)
        return packed, [part.view(-1, self.rank) for part in parts]

    def _basis(self, name: str, height: int, memory: Memory) -> torch.Tensor:
        """What the last step left, or the first."""
        basis = memory.bases.get(name)
        if basis is None:
            return self._first_basis(name, height)
        if basis.shape != (height, self.rank):
            log.warning(
                "PowerSGD of rank %d: the basis of %s has shape %s, not (%d, %d); it begins anew",
                *(self.rank, name, tuple(basis.shape), height, self.rank),
            )
            return self._first_basis(name, height)
        return basis

    def _first_basis(self, name: str, height: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((self.seed + zlib.crc32(name.encode())) % 2**63)
        return _orthonormal(torch.randn(height, self.rank, generator=generator))

    def _next_basis(self, name: str, q: torch.Tensor) -> torch.Tensor:
        """Columns that hold nothing, in which this step found no direction, begin anew: they would never find any."""
        basis, triangle = torch.linalg.qr(q)
        lengths = triangle.diagonal().abs()
        weak = lengths <= _WEAK * lengths.max()
        if not bool(weak.any()):
            return basis.contiguous()
        scale = float(lengths.max()) or 1.0
        fresh = self._first_basis(name, len(q)) * scale
        return _orthonormal(torch.where(weak, fresh, q))

    def _finish(
        self,
        one: Opened,
        matrix: torch.Tensor,
        factors: tuple[torch.Tensor, torch.Tensor],
        world_size: int,
        memory: Memory,
    ) -> None:
        """Of a parameter that travelled: what arrives, what is left, and where the next step begins.

        What arrives is a sum over the ranks, so every residual gives its share of it.
        """
        p, q = factors
        reach = self.rank * q.abs().max()  # no less than what any value of P Q^T comes to
        if not bool(p.isfinite().all() & reach.isfinite()):
            one.flat.fill_(torch.nan)
            one.keep_residual()
            return
        if one.residual is not None:
            left = one.residual.view(matrix.shape)
            torch.addmm(matrix, p, q.t(), alpha=-1 / world_size, out=left)
        torch.mm(p, q.t(), out=matrix)
        memory.bases[one.name] = self._next_basis(one.name, q)


def _shape(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[0], tensor.numel() // tensor.shape[0]


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Its columns, made so by Householder reflections, which fail for no matrix of finite values."""
    return torch.linalg.qr(matrix).Q.contiguous()
