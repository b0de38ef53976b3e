"""An embedding whose rows, the vocabulary, are split over ranks (Shoeybi et al., 2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel import regions
from pycomm.tensor_parallel.group import Group, GroupLike, group_of
from pycomm.tensor_parallel.layout import Layout, split_counts
from pycomm.tensor_parallel.linear import sequence_counts
from pycomm.tensor_parallel.module import ParallelModule


class VocabParallelEmbedding(ParallelModule):
    """:class:`torch.nn.Embedding` of which each rank has a part of the rows.

    Takes torch's arguments, and ``group``, ``sequence_parallel``, ``sequence_dim`` and ``uneven_sequence`` as the
    linear layers do: then each rank gets its part of the sequence. ``pad_to``: each rank's number of rows is padded to
    a multiple, by zeros that are in no whole state. Only a rank's own rows are looked up, so that ``max_norm``,
    ``padding_idx``, ``scale_grad_by_freq`` and ``sparse`` do what they do in torch. Initial weights are those of
    nn.Embedding for the same seed.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        group: GroupLike | Group = None,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        uneven_sequence: bool = False,
        pad_to: int = 1,
        source: nn.Embedding | None = None,
    ) -> None:
        super().__init__(group_of(group))
        self._new = lambda: nn.Embedding(
            *(num_embeddings, embedding_dim, padding_idx, max_norm, norm_type),
            *(scale_grad_by_freq, sparse),
            device=device,
            dtype=dtype,
        )
        source = source if source is not None else self._new()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = source.padding_idx
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self.uneven_sequence = uneven_sequence
        counts = split_counts(num_embeddings, self.group.world_size)
        own = counts[self.group.rank]
        self.begin = sum(counts[: self.group.rank])
        self.end = self.begin + own
        layout = Layout.of_counts(self.group, source.weight.shape, 0, counts, -own % pad_to)
        self.adopt(source, {"weight": layout})

    @classmethod
    def from_embedding(cls, source: nn.Embedding, **options: Any) -> VocabParallelEmbedding:
        """This rank's part of an ordinary one, which is the same on all ranks."""
        return cls(
            *(source.num_embeddings, source.embedding_dim, source.padding_idx, source.max_norm),
            *(source.norm_type, source.scale_grad_by_freq, source.sparse),
            source=source,
            **options,
        )

    def reset_parameters(self) -> None:
        """As torch's: the values are those of the whole layer, drawn from the same random numbers on all ranks."""
        self.refill(self._new())

    @torch.compiler.disable(reason=regions.REASON)
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] of the same numbers on all ranks to [..., embedding_dim]."""
        self._check(ids)
        flat = ids.reshape(-1)
        own = (flat >= self.begin) & (flat < self.end)
        looked_up = functional.embedding(
            flat[own] - self.begin,
            self.weight,
            self._own_padding_idx(),
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
        if self.group.world_size == 1:
            return looked_up.view(*ids.shape, self.embedding_dim)
        part = looked_up.new_zeros(len(flat), self.embedding_dim).index_put((own,), looked_up)
        part = part.view(*ids.shape, self.embedding_dim)
        if not self.sequence_parallel:
            return regions.reduce(part, self.group)
        count = part.shape[self.sequence_dim]
        counts = sequence_counts(count, self.group, self.uneven_sequence)
        return regions.reduce_scatter(part, self.group, self.sequence_dim, counts)

    def _own_padding_idx(self) -> int | None:
        """Of this rank's rows."""
        index = self.padding_idx
        return index - self.begin if index is not None and self.begin <= index < self.end else None

    def _check(self, ids: torch.Tensor) -> None:
        if ids.numel() == 0:
            return
        low, high = ids.aminmax()
        if low < 0 or high >= self.num_embeddings:
            raise InvalidArgument(
                f"rank {self.group.rank}: embedding ids from {int(low)} to {int(high)}, but the vocabulary is 0 to "
                f"{self.num_embeddings - 1}"
            )

    def extra_repr(self) -> str:
        """As torch's, and which rank of how many."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.group}"
