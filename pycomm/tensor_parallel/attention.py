"""Attention whose heads are split over ranks (Shoeybi et al., 2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel import regions
from pycomm.tensor_parallel.group import Group, GroupLike, group_of
from pycomm.tensor_parallel.heads import Heads, HeadSplit
from pycomm.tensor_parallel.layout import Layout
from pycomm.tensor_parallel.linear import RowParallelLinear
from pycomm.tensor_parallel.module import ParallelModule, autocast
from pycomm.tensor_parallel.random import own_random_numbers


class ParallelMultiheadAttention(ParallelModule):
    """:class:`torch.nn.MultiheadAttention` of which each rank computes some heads.

    Takes torch's arguments, and has its parameters' names and initial values; ``group`` as the linear layers.
    ``num_kv_heads``: so many heads of keys and values, each for num_heads / num_kv_heads of queries (Ainslie et al.,
    "GQA", 2023); in_proj_weight then has fewer rows. Where there are fewer of them than ranks, all ranks hold all of
    the projection, compute the heads that their queries need, and sum its gradient.

    Heads may be uneven. Dropout of attention differs between ranks. ``add_bias_kv``, ``add_zero_attn``, ``kdim`` and
    ``vdim`` are refused.
    """

    in_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None
    # What nn.TransformerEncoderLayer asks for; False keeps it from its fast path, which knows only torch's attention.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        group: GroupLike | Group = None,
        source: nn.MultiheadAttention | None = None,
    ) -> None:
        super().__init__(group_of(group))
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if add_bias_kv or add_zero_attn or {kdim, vdim} - {None, embed_dim}:
            raise InvalidArgument(
                "a parallel attention has no add_bias_kv, add_zero_attn, and no other kdim and vdim than embed_dim"
            )
        if embed_dim % num_heads or num_heads % kv_heads:
            raise InvalidArgument(
                f"embed_dim {embed_dim} must be divisible by num_heads {num_heads}, and that by num_kv_heads {kv_heads}"
            )
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self._new = lambda: _whole(
            embed_dim, num_heads, kv_heads, bias, {"device": device, "dtype": dtype}
        )
        self.split = HeadSplit(Heads(num_heads, kv_heads, self.head_dim), self.group)
        source = source if source is not None else self._new()
        assert source.in_proj_weight is not None
        self._take(source)
        self.out_proj = RowParallelLinear.from_linear(
            source.out_proj,
            group=self.group,
            input_is_parallel=True,
            unit=self.split.unit,
        )

    def _take(self, source: nn.MultiheadAttention) -> None:
        d, each = self.head_dim, self.num_heads // self.num_kv_heads
        queries = [count * d for count in self.split.counts]
        keys = [count * d // each for count in self.split.counts]
        names = (
            ["in_proj_weight"]
            if source.in_proj_bias is None
            else ["in_proj_weight", "in_proj_bias"]
        )
        if source.in_proj_bias is None:
            self.register_parameter("in_proj_bias", None)
        layouts = {}
        if not self.split.shares_kv:
            for name in names:
                shape = getattr(source, name).shape
                layouts[name] = Layout.fused(self.group, shape, 0, [queries, keys, keys])
        self.adopt(source, layouts)

    @classmethod
    def from_attention(
        cls, source: nn.MultiheadAttention, **options: Any
    ) -> ParallelMultiheadAttention:
        """This rank's heads of an ordinary one, which is the same on all ranks."""
        if source.bias_k is not None or source.add_zero_attn or not source._qkv_same_embed_dim:
            raise InvalidArgument(
                "a parallel attention has no add_bias_kv, add_zero_attn, and no other kdim and vdim than embed_dim"
            )
        return cls(
            *(source.embed_dim, source.num_heads, source.dropout, source.in_proj_bias is not None),
            batch_first=source.batch_first,
            source=source,
            **options,
        )

    def reset_parameters(self) -> None:
        """As torch's: the values are those of the whole layer, drawn from the same random numbers on all ranks."""
        source = self._new()
        self.refill(source)
        self.out_proj.refill(source.out_proj)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As torch's; inputs, masks and outputs are whole and the same on all ranks."""
        if is_causal and attn_mask is None:
            raise InvalidArgument(
                "is_causal is a hint: pass attn_mask, too, as to torch's attention"
            )
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value, batched)  # [batch, heads, positions, head_dim]
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        heads, weights = self._attend(q, k, v, mask, need_weights)
        y = self.out_proj(heads.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = self._whole_weights(weights, average_attn_weights)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _project(self, *inputs: Any) -> list[torch.Tensor]:
        *given, batched = inputs
        distinct: dict[int, torch.Tensor] = {id(x): x for x in given}
        entered = {i: regions.copy(x, self.group) for i, x in distinct.items()}
        projected = []
        for x, (weight, bias) in zip(given, self._projections(), strict=True):
            self.check_width(x, self.embed_dim, "it takes the whole width, on all ranks")
            here = entered[id(x)]
            if not batched:
                here = here.unsqueeze(0)
            elif not self.batch_first:
                here = here.transpose(0, 1)
            here, weight, bias = autocast(here, weight, bias)
            heads = functional.linear(here, weight, bias).unflatten(-1, (-1, self.head_dim))
            projected.append(heads.transpose(1, 2))
        return projected

    def _projections(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Weight and bias of this rank's queries, keys and values."""
        d, weight, bias = self.head_dim, self.in_proj_weight, self.in_proj_bias
        counts = [self.split.own * d, self.split.own_kv * d, self.split.own_kv * d]
        begins = [0, counts[0], counts[0] + counts[1]]
        if self.split.shares_kv:
            given = [weight] if bias is None else [weight, bias]
            weight, bias = [*regions.copy_together(given, self.group), None][:2]
            queries, kv = self.num_heads * d, self.num_kv_heads * d
            first = self.split.first_kv * d
            begins = [
                self.split.begin * d,
                queries + first,
                queries + kv + first,
            ]
        return [
            (weight.narrow(0, begin, count), None if bias is None else bias.narrow(0, begin, count))
            for begin, count in zip(begins, counts, strict=True)
        ]

    def _mask(
        self,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
    ) -> torch.Tensor | None:
        """Added to scores; in torch's masks of bools True is left out."""

        def added(mask: torch.Tensor) -> torch.Tensor:
            if mask.dtype != torch.bool:
                return mask.to(q.dtype)
            return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))

        total: torch.Tensor | None = None
        if attn_mask is not None:
            if attn_mask.dim() == 3:  # [batch * heads, ...] of all heads
                begin = self.split.begin
                of_heads = attn_mask.unflatten(0, (-1, self.num_heads))
                attn_mask = of_heads.narrow(1, begin, self.split.own)
            total = added(attn_mask)
        if key_padding_mask is not None:
            padding = added(key_padding_mask).view(-1, 1, 1, k.shape[2])
            total = padding if total is None else total + padding
        return total

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        need_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.num_kv_heads < self.num_heads:
            k, v = k[:, self.split.kv_of_query], v[:, self.split.kv_of_query]
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            if not dropout:
                return functional.scaled_dot_product_attention(q, k, v, mask), None
            with own_random_numbers(self.group):
                return functional.scaled_dot_product_attention(q, k, v, mask, dropout), None
        scores = (q * self.head_dim**-0.5) @ k.transpose(-1, -2)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        if dropout:
            with own_random_numbers(self.group):
                weights = functional.dropout(weights, dropout)
        return weights @ v, weights

    def _whole_weights(self, weights: torch.Tensor, average: bool) -> torch.Tensor:
        """Of all ranks' heads."""
        if average:
            return regions.reduce(weights.sum(1) / self.num_heads, self.group)
        return regions.gather(weights, self.group, 1, self.split.counts)

    def extra_repr(self) -> str:
        """Sizes, and which rank of how many."""
        return (
            f"{self.embed_dim}, {self.num_heads} heads, {self.num_kv_heads} of keys, {self.group}"
        )


def _whole(
    embed_dim: int, num_heads: int, kv_heads: int, bias: bool, where: dict[str, Any]
) -> nn.MultiheadAttention:
    """torch's attention, its projection as large as so many heads of keys and values need."""
    whole = nn.MultiheadAttention(embed_dim, num_heads, bias=bias, **where)
    if kv_heads != num_heads:
        rows = embed_dim + 2 * kv_heads * (embed_dim // num_heads)
        whole.in_proj_weight = nn.Parameter(torch.empty(rows, embed_dim, **where))
        nn.init.xavier_uniform_(whole.in_proj_weight)
        if bias:
            whole.in_proj_bias = nn.Parameter(torch.zeros(rows, **where))
    return whole
