"""TopK: the largest values of a gradient and where they were; the others wait in the residual."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from pycomm.compression.reduced import Memory, Opened, Reduced
from pycomm.errors import InvalidArgument

if TYPE_CHECKING:
    from pycomm.compression.carrier import Ranks

_INDEX_LIMIT = 2**31  # int32 indexes parameters of fewer elements
_SAMPLES = 1 << 14  # values from which the threshold of a large parameter is guessed


@dataclass(frozen=True)
class TopK(Reduced):
    """Of every parameter, the ceil(ratio * count) values of largest magnitude travel, with their indices.

    Aji and Heafield, "Sparse communication for distributed gradient descent", 2017; Stich, Cordonnier and Jaggi,
    "Sparsified SGD with memory", 2018. Every rank selects from its own gradient plus residual: exactly so many, at
    least one, of equals those with lower indices. Ranks gather all selections and add them in rank order, so that all
    have the same bits; what was sent is exactly what leaves the residual. Values travel in float32, indices in 4
    bytes. As every rank receives those of all, fewer bytes travel while ratio * world size is below 1; beyond that, it
    leaves gradients alone. Without error feedback training does not converge in general.
    """

    format: ClassVar[str] = "top-k"
    ratio: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise InvalidArgument(f"ratio must be above 0 and at most 1: {self.ratio}")

    def count_of(self, count: int) -> int:
        """How many of so many values travel."""
        return min(count, max(1, math.ceil(self.ratio * count)))

    def gains(self, parameter: torch.Tensor, world_size: int) -> bool:
        """See Compressor. (world_size - 1) * count * 8 bytes, in place of 2 * (world_size - 1) / world_size * size."""
        sent = self.count_of(parameter.numel()) * (4 + _index_dtype(parameter.numel()).itemsize)
        return world_size * sent < 2 * parameter.nbytes

    def _exchange(self, ranks: Ranks, opened: Sequence[Opened], memory: Memory) -> None:
        """See Reduced. One all_gather."""
        chosen = [largest(one.flat, self.count_of(one.flat.numel())) for one in opened]
        own = _Selection.of(opened, chosen)
        everyone = own.gather(ranks)
        used = torch.stack([of_rank.used for of_rank in everyone]).any(0).tolist()
        begin = 0
        for one, indices, is_used in zip(opened, chosen, used, strict=True):
            part = slice(begin, begin + len(indices))
            begin = part.stop
            if is_used:
                _add_up(one, [(o.indices[part], o.values[part]) for o in everyone], indices)
            else:
                one.flat.zero_()

    def approximate(
        self, name: str, values: torch.Tensor, memory: Memory
    ) -> tuple[torch.Tensor, int]:
        """See Reduced."""
        flat = values.reshape(-1)
        chosen = largest(flat, self.count_of(flat.numel()))
        sent = torch.zeros_like(flat)
        sent[chosen] = flat[chosen]
        return sent.view(values.shape), len(chosen) * (4 + _index_dtype(flat.numel()).itemsize)


def _index_dtype(count: int) -> torch.dtype:
    return torch.int32 if count <= _INDEX_LIMIT else torch.int64


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of so many values of largest magnitude; of equals the lower ones. NaN is as large as infinity."""
    if count == values.numel():
        return torch.arange(count)
    magnitudes = values.abs()
    if not bool(magnitudes.aminmax().max.isfinite()):
        magnitudes.nan_to_num_(nan=math.inf, posinf=math.inf)
    candidates = _candidates(magnitudes, count)
    if candidates is not None:
        magnitudes = magnitudes[candidates]
    limit = magnitudes.topk(count, sorted=False).values.min()
    above = (magnitudes > limit).nonzero().squeeze(1)
    equal = (magnitudes == limit).nonzero().squeeze(1)
    chosen = torch.cat([above, equal[: count - len(above)]])
    return chosen if candidates is None else candidates[chosen]


def _candidates(magnitudes: torch.Tensor, count: int) -> torch.Tensor | None:
    """Indices among which the largest are, all others being smaller; None: search everywhere.

    All values above a threshold that a sample suggests, if these are enough: several times faster than a selection.
    """
    total = magnitudes.numel()
    if total < 4 * _SAMPLES:
        return None
    sample = magnitudes[:: total // _SAMPLES]
    expected = len(sample) * count / total
    rank = math.ceil(expected + 5 * math.sqrt(expected) + 5)
    if rank >= len(sample) // 2:
        return None
    found = (magnitudes >= sample.topk(rank).values[-1]).nonzero().squeeze(1)
    return found if len(found) >= count else None


@dataclass(frozen=True, eq=False)
class _Selection:
    """What one rank sends of all parameters of a bucket; views of `wire`."""

    wire: torch.Tensor
    indices: torch.Tensor  # each within its parameter
    values: torch.Tensor
    used: torch.Tensor  # whether the parameters' gradients were not zero

    @staticmethod
    def over(wire: torch.Tensor, count: int, parameters: int, dtype: torch.dtype) -> _Selection:
        """The parts of what travels: so many values of so many parameters."""
        first, second = count * dtype.itemsize, count * (dtype.itemsize + 4)
        return _Selection(
            wire,
            wire[:first].view(dtype),
            wire[first:second].view(torch.float32),
            wire[second : second + parameters],
        )

    @staticmethod
    def of(opened: Sequence[Opened], chosen: Sequence[torch.Tensor]) -> _Selection:
        """This rank's."""
        dtype = _index_dtype(max(one.flat.numel() for one in opened))
        count, parameters = sum(map(len, chosen)), len(opened)
        length = count * (dtype.itemsize + 4) + parameters
        wire = torch.zeros(
            -(-length // 8) * 8, dtype=torch.uint8
        )  # the next rank's is aligned, too
        own = _Selection.over(wire, count, parameters, dtype)
        own.indices.copy_(torch.cat(list(chosen)))
        picked = [one.flat[indices] for one, indices in zip(opened, chosen, strict=True)]
        torch.cat(picked, out=own.values)
        own.used.copy_(torch.tensor([not one.is_zero for one in opened]))
        return own

    def gather(self, ranks: Ranks) -> list[_Selection]:
        """Collective: every rank's."""
        wires = torch.empty(ranks.world_size, len(self.wire), dtype=torch.uint8)
        ranks.all_gather_single(wires, self.wire)
        count, parameters = len(self.values), len(self.used)
        return [_Selection.over(wire, count, parameters, self.indices.dtype) for wire in wires]


def _add_up(
    one: Opened, selections: Sequence[tuple[torch.Tensor, torch.Tensor]], own: torch.Tensor
) -> None:
    """The sum of all ranks' selections, in rank order; the residual is what was not selected here."""
    if not all(bool(values.isfinite().all()) for _, values in selections):
        one.keep_residual()
    elif one.residual is not None:
        one.residual.copy_(one.flat)
        one.residual[own] = 0
    one.flat.zero_()
    for indices, values in selections:
        one.flat.index_add_(0, indices, values)
