"""Which part of a tensor a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel.group import Group

_ATTRIBUTE: Final = "tensor_parallel_layout"


def split_counts(count: int, parts: int, unit: int = 1) -> list[int]:
    """How many of ``count`` elements each part gets: whole units, and the first parts one unit more than the last."""
    units, rest = divmod(count, unit)
    if rest:
        raise InvalidArgument(f"{count} elements are not a whole number of units of {unit}")
    each, more = divmod(units, parts)
    return [(each + (part < more)) * unit for part in range(parts)]


@dataclass(frozen=True)
class Piece:
    """``count`` elements along the split dimension, from ``begin`` of the whole tensor on."""

    begin: int
    count: int

    @property
    def end(self) -> int:
        """One past the last."""
        return self.begin + self.count


@dataclass(frozen=True)
class Layout:
    """How a tensor is split along one dimension: each rank has some pieces of it, one after the other.

    Several pieces are what a fused weight needs: of queries, keys and values each rank has its own heads. ``padding``
    elements at the end of a rank's part stand for nothing, and stay zero.
    """

    group: Group
    shape: tuple[int, ...]  # of the whole tensor
    dim: int
    pieces: tuple[tuple[Piece, ...], ...]  # of every rank
    padding: int = 0  # on this rank

    @staticmethod
    def of_counts(
        group: Group, shape: Sequence[int], dim: int, counts: Sequence[int], padding: int = 0
    ) -> Layout:
        """One piece for each rank, in rank order."""
        pieces, begin = [], 0
        for count in counts:
            pieces.append((Piece(begin, count),))
            begin += count
        return Layout(group, tuple(shape), dim, tuple(pieces), padding)

    @staticmethod
    def fused(
        group: Group, shape: Sequence[int], dim: int, parts: Sequence[Sequence[int]]
    ) -> Layout:
        """A weight made of several, each split on its own: ``parts[i][rank]`` elements of the i-th."""
        pieces: list[list[Piece]] = [[] for _ in range(group.world_size)]
        begin = 0
        for counts in parts:
            for rank, count in enumerate(counts):
                pieces[rank].append(Piece(begin, count))
                begin += count
        return Layout(group, tuple(shape), dim, tuple(map(tuple, pieces)))

    @property
    def own(self) -> tuple[Piece, ...]:
        """This rank's pieces."""
        return self.pieces[self.group.rank]

    def count(self, rank: int | None = None) -> int:
        """Elements of a rank along the split dimension, without padding; of this rank if None."""
        return sum(piece.count for piece in self.pieces[self.group.rank if rank is None else rank])

    def local_shape(self, rank: int | None = None) -> tuple[int, ...]:
        """A rank's part without padding."""
        shape = list(self.shape)
        shape[self.dim] = self.count(rank)
        return tuple(shape)

    def is_like(self, other: Layout | None) -> bool:
        """Whether another tensor is split in the same way, whatever the groups are called."""
        return other is not None and (self.shape, self.dim, self.pieces, self.padding) == (
            *(other.shape, other.dim, other.pieces, other.padding),
        )

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor, a copy, with padding."""
        parts = [whole.narrow(self.dim, piece.begin, piece.count) for piece in self.own]
        if self.padding:
            shape = list(self.shape)
            shape[self.dim] = self.padding
            parts.append(whole.new_zeros(shape))
        return torch.cat(parts, self.dim)

    def without_padding(self, local: torch.Tensor) -> torch.Tensor:
        """A view of what stands for something."""
        return local.narrow(self.dim, 0, self.count()) if self.padding else local

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Collective: the whole tensor from all ranks' parts."""
        local = self.without_padding(local.detach()).contiguous()
        parts = [local.new_empty(self.local_shape(rank)) for rank in range(self.group.world_size)]
        self.group.all_gather(parts, local).wait()
        whole = local.new_empty(self.shape)
        for part, pieces in zip(parts, self.pieces, strict=True):
            begin = 0
            for piece in pieces:
                source = part.narrow(self.dim, begin, piece.count)
                whole.narrow(self.dim, piece.begin, piece.count).copy_(source)
                begin += piece.count
        return whole


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """How a parameter is split; None of one that all ranks hold whole."""
    layout: Layout | None = getattr(tensor, _ATTRIBUTE, None)
    return layout


def set_layout(parameter: nn.Parameter, layout: Layout) -> None:
    """Notes how a parameter is split."""
    setattr(parameter, _ATTRIBUTE, layout)
