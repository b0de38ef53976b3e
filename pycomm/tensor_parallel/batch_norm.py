"""Batch normalisation of channels that are split over ranks, between convolutions: each is normalised on its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pycomm.tensor_parallel.group import Group, GroupLike, group_of
from pycomm.tensor_parallel.layout import Layout, split_counts
from pycomm.tensor_parallel.module import ParallelModule


class ParallelBatchNorm2d(ParallelModule, nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` of which each rank has some channels, as a ParallelConv2d leaves them.

    Takes torch's arguments, and ``group``. Nothing travels.
    """

    def __init__(
        self,
        num_features: int,
        *args: Any,
        group: GroupLike | Group = None,
        source: nn.BatchNorm2d | None = None,
        **kwargs: Any,
    ) -> None:
        ranks = group_of(group)
        counts = split_counts(num_features, ranks.world_size)
        nn.BatchNorm2d.__init__(self, counts[ranks.rank], *args, **kwargs)
        self.group = ranks
        self.layouts: dict[str, Layout] = {}
        source = source if source is not None else nn.BatchNorm2d(num_features, *args, **kwargs)
        layout = Layout.of_counts(ranks, (num_features,), 0, counts)
        split = ("weight", "bias", "running_mean", "running_var")
        self.adopt(source, {name: layout for name in split if getattr(source, name) is not None})
        for name, buffer in source.named_buffers(recurse=False):
            of_rank = layout.take(buffer) if name in self.layouts else buffer.clone()
            setattr(self, name, of_rank)

    @classmethod
    def from_batch_norm(cls, source: nn.BatchNorm2d, **options: Any) -> ParallelBatchNorm2d:
        """This rank's channels of an ordinary one, which is the same on all ranks."""
        arguments = (source.eps, source.momentum, source.affine, source.track_running_stats)
        return cls(source.num_features, *arguments, source=source, **options)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Of this rank's channels, as torch's."""
        self.check_width(input, self.num_features, "it takes this rank's part of the channels", -3)
        return super().forward(input)

    def extra_repr(self) -> str:
        """As torch's, and which rank of how many."""
        return f"{super().extra_repr()}, {self.group}"
