"""Linear layers whose weight is split over ranks (Shoeybi et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel import regions
from pycomm.tensor_parallel.between import Between
from pycomm.tensor_parallel.group import Group, GroupLike, group_of
from pycomm.tensor_parallel.layout import Layout, split_counts
from pycomm.tensor_parallel.matmul import Way, column, row
from pycomm.tensor_parallel.module import ParallelModule, autocast


class ParallelLinear(ParallelModule):
    """What both have in common: where the weight comes from, and how they communicate."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: GroupLike | Group = None,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        uneven_sequence: bool = False,
        overlap: bool | None = None,
        overlap_chunks: int = 1,
        regather: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__(group_of(group))
        if overlap_chunks < 1:
            raise InvalidArgument(f"overlap_chunks must be positive: {overlap_chunks}")
        self.in_features = in_features
        self.out_features = out_features
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self.uneven_sequence = uneven_sequence
        self.overlap = self.group.overlaps if overlap is None else overlap
        self.overlap_chunks = overlap_chunks
        self.regather = regather
        self.transposed = transposed  # the weight is [in, out], as in Hugging Face's Conv1D
        self.shared_input: Between | None = None  # the block of which other layers take the input
        self._new: Callable[[], nn.Module] = nn.Module

    def reset_parameters(self) -> None:
        """As torch's: the values are those of the whole layer, drawn from the same random numbers on all ranks."""
        if self.transposed:
            raise InvalidArgument(
                "a layer with a transposed weight has no initial values of its own: initialise the whole model first"
            )
        self.refill(self._new())

    @property
    def shares_input(self) -> bool:
        """Whether the input enters once for all layers that take it, rather than in chunks for this one."""
        return self.shared_input is not None and self.overlap_chunks == 1 and not self.regather

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        """The input of the whole sequence, in the product's dtype; its gradients are summed."""
        x = autocast(x)[0]
        counts = self._gathered_counts(x)
        if counts is None:
            return regions.copy(x, self.group)
        return regions.all_gather(x, self.group, self.sequence_dim, counts)

    def _gathered_counts(self, x: torch.Tensor) -> list[int] | None:
        """Of the sequence on each rank; None: this rank has all of it."""
        if not self.sequence_parallel:
            return None
        count = x.shape[self.sequence_dim]
        if self.uneven_sequence:
            return [of_rank for (of_rank,) in self.group.gather_numbers([count])]
        return [count] * self.group.world_size

    def _take(self, source: nn.Module, dim: int, counts: Sequence[Sequence[int]]) -> None:
        """Adopts a whole layer, split along a dimension of its [out, in] weight; 0 splits the bias, too."""
        weight = source.weight
        assert isinstance(weight, torch.Tensor)
        stored = 1 - dim if self.transposed else dim
        layouts = {"weight": Layout.fused(self.group, weight.shape, stored, counts)}
        if isinstance(source.bias, torch.Tensor) and dim == 0:
            layouts["bias"] = Layout.fused(self.group, source.bias.shape, 0, counts)
        elif source.bias is None:
            self.register_parameter("bias", None)
        layouts = {name: self._padded(layout) for name, layout in layouts.items()}
        self.adopt(source, layouts)

    def _padded(self, layout: Layout) -> Layout:
        return layout

    def _operands(self, x: torch.Tensor) -> list[Any]:
        """Input, [out, in] weight and bias in the dtype of the product."""
        weight: torch.Tensor = self.weight
        return autocast(x, weight.t() if self.transposed else weight, self.bias)

    def _way(self, counts: Sequence[int] | None) -> Way:
        return Way(
            self.group,
            self.overlap,
            self.overlap_chunks,
            self.sequence_dim,
            None if counts is None else tuple(counts),
            self.regather,
        )

    def extra_repr(self) -> str:
        """As torch's, and which rank of how many."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.group}"
        )


class ColumnParallelLinear(ParallelLinear):
    """:class:`torch.nn.Linear` of which each rank computes a part of the outputs.

    Takes torch's arguments, and:

    - ``group``: the ranks that share the layer, a process group or a mesh of one dimension; None: the default group.
    - ``gather_output``: whether all ranks get all outputs, as of nn.Linear; else each its part.
    - ``sequence_parallel``: the input is this rank's part of the sequence, along ``sequence_dim``, the output is of the
      whole sequence. Parts are taken to be equally long unless ``uneven_sequence``, for which ranks tell each other
      their lengths, 8 bytes. ``regather`` keeps only the part for backward, and gathers the rest again.
    - ``overlap``: whether the sum of input gradients travels while the weight's gradient is computed; None: if there
      are two cores for each rank. ``overlap_chunks``: in so many parts a sequence is gathered and multiplied.
    - ``parts``: the sizes of several layers whose outputs this one computes (queries, keys, values), each of which is
      split on its own; ``unit``: outputs that stay together (a head's), of all or of each part. ``pad_to``: each rank's
      number of outputs is padded to a multiple, by zeros that never come out.

    Initial weights are those of nn.Linear for the same seed.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        group: GroupLike | Group = None,
        gather_output: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        uneven_sequence: bool = False,
        overlap: bool | None = None,
        overlap_chunks: int = 1,
        regather: bool = False,
        parts: Sequence[int] | None = None,
        unit: int | Sequence[int] = 1,
        pad_to: int = 1,
        transposed: bool = False,
        source: nn.Module | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            group=group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            uneven_sequence=uneven_sequence,
            overlap=overlap,
            overlap_chunks=overlap_chunks,
            regather=regather,
            transposed=transposed,
        )
        parts = list(parts or [out_features])
        if sum(parts) != out_features:
            raise InvalidArgument(f"parts {parts} are not the {out_features} outputs")
        if gather_output and len(parts) > 1 and self.group.world_size > 1:
            raise InvalidArgument("outputs of several parts stay split: pass gather_output=False")
        self.gather_output = gather_output
        self.pad_to = pad_to
        units = [unit] * len(parts) if isinstance(unit, int) else unit
        world = self.group.world_size
        counts = [split_counts(part, world, u) for part, u in zip(parts, units, strict=True)]
        self.output_counts = [sum(of_rank) for of_rank in zip(*counts, strict=True)]
        self._new = lambda: nn.Linear(in_features, out_features, bias, device, dtype)
        self._take(source if source is not None else self._new(), 0, counts)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> ColumnParallelLinear:
        """This rank's part of an ordinary layer, which is the same on all ranks."""
        sizes = linear.in_features, linear.out_features
        return cls(*sizes, linear.bias is not None, source=linear, **options)

    def _padded(self, layout: Layout) -> Layout:
        padding = -layout.count() % self.pad_to
        return Layout(layout.group, layout.shape, layout.dim, layout.pieces, padding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out] or, without gather_output, this rank's part of it."""
        self.check_width(x, self.in_features, "it takes the whole width, on all ranks")
        if getattr(x, "is_own_part", False) and not self.sequence_parallel:
            raise InvalidArgument(
                f"rank {self.group.rank}: the input comes from a module that sees a part of the data on each rank, but "
                f"ColumnParallelLinear({self.extra_repr()}) takes the whole; pass sequence_parallel=True and "
                "sequence_dim (to torch's style input_layouts=Shard(dim))"
            )
        shares = self.shares_input
        if shares and self.shared_input is not None:
            x = self.shared_input.take(x, self._enter)
        x, weight, bias = self._operands(x)
        if self.group.world_size == 1 or shares:
            y = functional.linear(x, weight, bias)
        else:
            y = column(x, weight, bias, self._way(self._gathered_counts(x)))
        own = self.output_counts[self.group.rank]
        y = y if y.shape[-1] == own else y.narrow(-1, 0, own)
        return regions.gather(y, self.group, -1, self.output_counts) if self.gather_output else y


class RowParallelLinear(ParallelLinear):
    """:class:`torch.nn.Linear` of which each rank has a part of the inputs; the sum is the output, the bias added once.

    Takes torch's arguments, and:

    - ``group``, ``overlap``, ``unit``, ``sequence_dim``: as in ColumnParallelLinear.
    - ``input_is_parallel``: whether the input is this rank's part, as a ColumnParallelLinear gives it; else it is all
      of it, the same on all ranks, as of nn.Linear.
    - ``sequence_parallel``: the output is this rank's part of the sequence. It must be divisible by the number of ranks
      unless ``uneven_sequence``: then the first ranks get an element more.
    - ``overlap_chunks``: in so many parts the output is multiplied and summed.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        group: GroupLike | Group = None,
        input_is_parallel: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        uneven_sequence: bool = False,
        overlap: bool | None = None,
        overlap_chunks: int = 1,
        unit: int = 1,
        transposed: bool = False,
        source: nn.Module | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            group=group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            uneven_sequence=uneven_sequence,
            overlap=overlap,
            overlap_chunks=overlap_chunks,
            transposed=transposed,
        )
        self.input_is_parallel = input_is_parallel
        self.input_counts = split_counts(in_features, self.group.world_size, unit)
        self._new = lambda: nn.Linear(in_features, out_features, bias, device, dtype)
        self._take(source if source is not None else self._new(), 1, [self.input_counts])

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> RowParallelLinear:
        """This rank's part of an ordinary layer, which is the same on all ranks."""
        sizes = linear.in_features, linear.out_features
        return cls(*sizes, linear.bias is not None, source=linear, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in], or this rank's part of it, to [..., out]; in sequence parallel to this rank's part of that."""
        if self.input_is_parallel:
            own = self.input_counts[self.group.rank]
            self.check_width(x, own, "it takes this rank's part, as of a column parallel layer")
        else:
            self.check_width(x, self.in_features, "it takes the whole width, on all ranks")
            x = regions.scatter(x, self.group, -1, self.input_counts)
        x, weight, bias = self._operands(x)
        if self.group.world_size == 1:
            return functional.linear(x, weight, bias)
        if bias is not None and self.sequence_parallel:
            bias = regions.copy(bias, self.group)  # of which each rank sees a part of the data
        return row(x, weight, bias, self._way(self._sequence_counts(x)))

    def _sequence_counts(self, x: torch.Tensor) -> list[int] | None:
        if not self.sequence_parallel:
            return None
        return sequence_counts(x.shape[self.sequence_dim], self.group, self.uneven_sequence)


def sequence_counts(count: int, group: Group, uneven: bool) -> list[int]:
    """Of each rank, for a sequence so long. Raises InvalidArgument if these are uneven and may not be."""
    if count % group.world_size and not uneven:
        raise InvalidArgument(
            f"rank {group.rank}: a sequence of {count} is not divisible by {group.world_size} ranks; pass "
            "uneven_sequence=True to all sequence parallel layers, or pad it"
        )
    return split_counts(count, group.world_size)
