"""Where tensors enter and leave the computation that ranks share: collectives with the gradients that belong to them.

Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019, has
copy and reduce (its f and g); Korthikanti et al., "Reducing activation recomputation in large transformer models",
2022, all_gather and reduce_scatter along the sequence. Each is the other's gradient in its pair:

    copy            the same tensor on all ranks     | backward: the sum of the ranks' gradients
    reduce          the sum of the ranks' tensors    | backward: the gradient as it is
    scatter         this rank's part of a tensor     | backward: all ranks' parts, one after the other
    gather          all ranks' parts together        | backward: this rank's part of the gradient
    reduce_scatter  this rank's part of the sum      | backward: all ranks' parts, one after the other
    all_gather      all ranks' parts together        | backward: this rank's part of the sum of gradients

Use gather where what follows is the same on all ranks, all_gather where each rank goes on with its own share of the
work. Gradients can be differentiated again. Parts may be uneven. torch.compile leaves its graph for a region, and
refuses one with ``fullgraph=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel.group import Group, GroupLike, group_of
from pycomm.tensor_parallel.layout import split_counts

REASON = "pycomm communicates outside of compiled graphs"
_outside_graphs = torch.compiler.disable(reason=REASON)


@_outside_graphs
def copy(tensor: torch.Tensor, group: GroupLike | Group = None) -> torch.Tensor:
    """The tensor, which is the same on all ranks; its gradients are summed."""
    ranks = group_of(group)
    return tensor if ranks.world_size == 1 else _Copy.apply(tensor, ranks)


@_outside_graphs
def copy_together(
    tensors: Sequence[torch.Tensor], group: GroupLike | Group = None
) -> tuple[torch.Tensor, ...]:
    """As copy, of several tensors of one dtype whose gradients travel together: weights that see a part of the data."""
    ranks = group_of(group)
    return tuple(tensors) if ranks.world_size == 1 else _CopyTogether.apply(ranks, *tensors)


@_outside_graphs
def reduce(tensor: torch.Tensor, group: GroupLike | Group = None) -> torch.Tensor:
    """The sum of the ranks' tensors."""
    ranks = group_of(group)
    return tensor if ranks.world_size == 1 else _Reduce.apply(tensor, ranks)


@_outside_graphs
def scatter(
    tensor: torch.Tensor,
    group: GroupLike | Group = None,
    dim: int = -1,
    counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """This rank's part of a tensor that is the same on all ranks; ``counts`` None: as even as can be."""
    return _along(_Scatter, _whole_counts, tensor, group_of(group), dim, counts)


@_outside_graphs
def gather(
    tensor: torch.Tensor,
    group: GroupLike | Group = None,
    dim: int = -1,
    counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """All ranks' parts together, for what is the same on all ranks; ``counts`` None: ranks ask each other."""
    return _along(_Gather, _part_counts, tensor, group_of(group), dim, counts)


@_outside_graphs
def reduce_scatter(
    tensor: torch.Tensor,
    group: GroupLike | Group = None,
    dim: int = -2,
    counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """This rank's part of the sum of the ranks' tensors; ``counts`` None: as even as can be."""
    return _along(_ReduceScatter, _whole_counts, tensor, group_of(group), dim, counts)


@_outside_graphs
def all_gather(
    tensor: torch.Tensor,
    group: GroupLike | Group = None,
    dim: int = -2,
    counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """All ranks' parts together, for work that they share; ``counts`` None: ranks ask each other."""
    return _along(_AllGather, _part_counts, tensor, group_of(group), dim, counts)


def _along(
    function: type[torch.autograd.Function],
    find_counts: Callable[[torch.Tensor, Group, int, Sequence[int] | None], list[int]],
    tensor: torch.Tensor,
    ranks: Group,
    dim: int,
    counts: Sequence[int] | None,
) -> torch.Tensor:
    """What a function makes of a tensor whose dimension the ranks share."""
    if ranks.world_size == 1:
        return tensor
    return function.apply(tensor, ranks, dim, find_counts(tensor, ranks, dim, counts))


# ---- how many elements each rank has --------------------------------------------------------------------------------


def _whole_counts(
    tensor: torch.Tensor, ranks: Group, dim: int, counts: Sequence[int] | None
) -> list[int]:
    count = tensor.shape[dim]
    if counts is None:
        return split_counts(count, ranks.world_size)
    if len(counts) != ranks.world_size or sum(counts) != count:
        raise InvalidArgument(
            f"rank {ranks.rank}: counts {list(counts)} do not split dimension {dim} of a tensor of shape "
            f"{tuple(tensor.shape)} over {ranks.world_size} ranks"
        )
    return list(counts)


def _part_counts(
    tensor: torch.Tensor, ranks: Group, dim: int, counts: Sequence[int] | None
) -> list[int]:
    count = tensor.shape[dim]
    if counts is None:
        return [of_rank for (of_rank,) in ranks.gather_numbers([count])]
    if len(counts) != ranks.world_size or counts[ranks.rank] != count:
        raise InvalidArgument(
            f"rank {ranks.rank}: counts {list(counts)} do not agree with dimension {dim} of this rank's part, of shape "
            f"{tuple(tensor.shape)}"
        )
    return list(counts)


# ---- on plain tensors -----------------------------------------------------------------------------------------------


def own_part(tensor: torch.Tensor, ranks: Group, dim: int, counts: Sequence[int]) -> torch.Tensor:
    """A view of this rank's part."""
    return tensor.narrow(dim, sum(counts[: ranks.rank]), counts[ranks.rank])


def sum_of(tensor: torch.Tensor, ranks: Group) -> torch.Tensor:
    """Collective: a new tensor with the sum."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    ranks.all_reduce(total).wait()
    return total


def gathered(tensor: torch.Tensor, ranks: Group, dim: int, counts: Sequence[int]) -> torch.Tensor:
    """Collective: a new tensor of all parts, in which each rank's elements lie together in memory."""
    first = tensor.movedim(dim, 0).contiguous()
    whole = first.new_empty(sum(counts), *first.shape[1:])
    ranks.all_gather(whole.split(list(counts)), first).wait()
    return whole.movedim(0, dim)


def scattered_sum(
    tensor: torch.Tensor, ranks: Group, dim: int, counts: Sequence[int]
) -> torch.Tensor:
    """Collective: a new tensor with this rank's part of the sum."""
    first = tensor.movedim(dim, 0).contiguous()
    part = first.new_empty(counts[ranks.rank], *first.shape[1:])
    ranks.reduce_scatter(part, first.split(list(counts))).wait()
    return part.movedim(0, dim)


# ---- with gradients -------------------------------------------------------------------------------------------------


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Group) -> torch.Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Reduce.apply(grad, ctx.ranks), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Group) -> torch.Tensor:
        ctx.ranks = ranks
        return sum_of(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Copy.apply(grad, ctx.ranks), None


class _CopyTogether(Function):
    @staticmethod
    def forward(ctx: Any, ranks: Group, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.ranks = ranks
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = _Reduce.apply(torch.cat([grad.reshape(-1) for grad in grads]), ctx.ranks)
        parts = total.split([grad.numel() for grad in grads])
        return None, *(part.view(g.shape) for part, g in zip(parts, grads, strict=True))


class _OfParts(Function):
    """One that knows a dimension and how many elements of it each rank has."""

    @staticmethod
    def remember(ctx: FunctionCtx, *call: Any) -> None:
        ctx.call = call  # type: ignore[attr-defined]


class _Scatter(_OfParts):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *call: Any) -> torch.Tensor:
        _OfParts.remember(ctx, *call)
        return own_part(tensor, *call).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Gather.apply(grad, *ctx.call), None, None, None


class _Gather(_OfParts):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *call: Any) -> torch.Tensor:
        _OfParts.remember(ctx, *call)
        return gathered(tensor, *call)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Scatter.apply(grad, *ctx.call), None, None, None


class _ReduceScatter(_OfParts):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *call: Any) -> torch.Tensor:
        _OfParts.remember(ctx, *call)
        return scattered_sum(tensor, *call)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _AllGather.apply(grad, *ctx.call), None, None, None


class _AllGather(_OfParts):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *call: Any) -> torch.Tensor:
        _OfParts.remember(ctx, *call)
        return gathered(tensor, *call)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _ReduceScatter.apply(grad, *ctx.call), None, None, None
