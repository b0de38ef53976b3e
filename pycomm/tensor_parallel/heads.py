"""Which heads of an attention a rank computes, and how a block written for one process learns of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel import regions
from pycomm.tensor_parallel.group import Group
from pycomm.tensor_parallel.layout import split_counts
from pycomm.tensor_parallel.linear import ParallelLinear
from pycomm.tensor_parallel.module import autocast

# What blocks call these numbers; transformers, and those written after its or GPT's example.
_QUERIES: Final = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead")
_KEYS: Final = (
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads"),
    *("num_key_value_head", "n_key_value_heads"),
)
_EACH: Final = ("num_key_value_groups", "n_rep", "num_queries_per_kv")
_DIMS: Final = ("head_dim", "attention_head_size", "head_size", "d_head")
_WIDTHS: Final = ("split_size", "all_head_size", "embed_dim", "hidden_size", "n_embd", "d_model")


@dataclass(frozen=True)
class Heads:
    """Of queries, and of keys and values, and the width of each."""

    queries: int
    kv: int
    dim: int

    def __post_init__(self) -> None:
        if self.queries % self.kv:
            raise InvalidArgument(
                f"{self.queries} heads of queries are not a multiple of {self.kv} heads of keys and values"
            )

    @property
    def each(self) -> int:
        """Heads of queries for one of keys."""
        return self.queries // self.kv

    @property
    def width(self) -> int:
        """Of the queries together."""
        return self.queries * self.dim

    @property
    def kv_width(self) -> int:
        """Of the keys together."""
        return self.kv * self.dim


class HeadSplit:
    """A rank's heads: with the heads of keys that they need or, where these are fewer than ranks, one by one.

    Then all ranks hold all of the keys' and values' projections (``shares_kv``).
    """

    def __init__(self, heads: Heads, group: Group) -> None:
        self.heads = heads
        self.shares_kv = heads.kv < group.world_size and heads.each > 1
        self.counts = split_counts(
            heads.queries, group.world_size, 1 if self.shares_kv else heads.each
        )
        self.own = self.counts[group.rank]
        self.begin = sum(self.counts[: group.rank])
        needed = [_needed(heads, self.counts, rank) for rank in range(group.world_size)]
        own = needed[group.rank]
        self.first_kv = own[0] if own else 0
        self.own_kv = own[-1] + 1 - self.first_kv if own else 0
        # Which of the own heads of keys each own head of queries needs.
        self.kv_of_query = [head - self.first_kv for head in own]
        # How many need one; None if that is not the same for all, here or on another rank: what ranks compute differs
        # in size alone, or backward would not communicate in one order.
        uses = {of_rank.count(head) for of_rank in needed for head in of_rank}
        self.own_each = uses.pop() if len(uses) == 1 else None

    @property
    def unit(self) -> int:
        """Of a query's width, what stays together."""
        return self.heads.dim * (1 if self.shares_kv else self.heads.each)


def _needed(heads: Heads, counts: list[int], rank: int) -> list[int]:
    """The heads of keys that a rank's heads of queries need, one for each."""
    begin = sum(counts[:rank])
    return [head // heads.each for head in range(begin, begin + counts[rank])]


class SharedKeyLinear(ParallelLinear):
    """A projection to heads of keys or values of which there are fewer than ranks.

    All ranks hold all of it, compute the heads that their queries need, and sum its gradient. Where these do not need
    them alike, the output has one for each head of queries.
    """

    def __init__(self, linear: nn.Linear, split: HeadSplit, **options: Any) -> None:
        super().__init__(linear.in_features, linear.out_features, **options)
        self.split = split
        if linear.bias is None:
            self.register_parameter("bias", None)
        self.adopt(linear, {})

    def reset_parameters(self) -> None:
        """As torch's, which draws the same values on all ranks."""
        sizes = self.in_features, self.out_features
        self.refill(nn.Linear(*sizes, self.bias is not None, self.weight.device, self.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., own heads of keys * head_dim]."""
        self.check_width(x, self.in_features, "it takes the whole width, on all ranks")
        if self.shares_input and self.shared_input is not None:
            x = self.shared_input.take(x, self._enter)
        else:
            x = self._enter(x)
        given = [self.weight] if self.bias is None else [self.weight, self.bias]
        weight, bias = [*regions.copy_together(given, self.group), None][:2]
        assert weight is not None
        split, dim = self.split, self.split.heads.dim
        begin, count = split.first_kv * dim, split.own_kv * dim
        weight = weight.narrow(0, begin, count)
        bias = None if bias is None else bias.narrow(0, begin, count)
        y = functional.linear(*autocast(x, weight, bias))
        if split.own_each is not None:
            return y
        return y.unflatten(-1, (-1, dim))[..., split.kv_of_query, :].flatten(-2)

    def extra_repr(self) -> str:
        """As torch's, and how many heads."""
        return f"{super().extra_repr()}, {self.split.heads.kv} heads on all ranks"


def _number(module: object, names: Iterable[str]) -> int | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def heads_of(block: nn.Module, width: int | None) -> Heads | None:
    """What a block's attributes say of its heads, or else its ``config``; None of a block that is no attention.

    ``width``: of all queries, where it is known from the layer behind them.
    """
    queries, dim = _number(block, _QUERIES), _number(block, _DIMS)
    if queries is None and dim is None:
        return None
    config = getattr(block, "config", None)
    if queries is None:
        queries = _number(config, _QUERIES) or (width // dim if width and dim else None)
    if queries is None:
        return None
    if dim is None:
        dim = width // queries if width else None
    if dim is None:
        return None
    each = _number(block, _EACH)
    kv = _number(block, _KEYS) or (queries // each if each else None) or _number(config, _KEYS)
    return Heads(queries, kv or queries, dim)


def own_numbers(block: nn.Module, split: HeadSplit) -> dict[str, int]:
    """The attributes of a block that count heads or their width, as they are for this rank's."""
    heads, expands = split.heads, split.shares_kv and split.own_each is None
    kv = split.own if expands else split.own_kv
    each = split.own_each or 1
    changes = {
        _QUERIES: (heads.queries, split.own),
        _KEYS: (heads.kv, kv),
        _EACH: (heads.each, each),
        _WIDTHS: (heads.width, split.own * heads.dim),
    }
    return {
        name: own
        for names, (whole, own) in changes.items()
        for name in names
        if vars(block).get(name) == whole and own != whole
    }
