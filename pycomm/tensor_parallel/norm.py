"""Norms for sequence parallel: each rank normalises its part of the sequence (Korthikanti et al., 2022)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pycomm.tensor_parallel import regions
from pycomm.tensor_parallel.group import Group, GroupLike, group_of


class LayerNorm(nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` of a part of the sequence; its parameters' gradients are summed over the group."""

    def __init__(self, *args: Any, group: GroupLike | Group = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group_of(group)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As torch's."""
        given = [p for p in (self.weight, self.bias) if p is not None]
        weight, bias = [*regions.copy_together(given, self.group), None, None][:2]
        return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` of a part of the sequence; its weight's gradient is summed over the group."""

    def __init__(self, *args: Any, group: GroupLike | Group = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group_of(group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As torch's."""
        weight = None if self.weight is None else regions.copy(self.weight, self.group)
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)


def norm_from(module: nn.Module, group: GroupLike | Group) -> nn.Module | None:
    """The sequence parallel form of torch's norms, with the same parameter objects; None of other modules."""
    made: nn.Module
    if isinstance(module, nn.LayerNorm):
        made = LayerNorm(module.normalized_shape, module.eps, group=group, device="meta")
        made.register_parameter("bias", module.bias)
    elif isinstance(module, nn.RMSNorm):
        made = RMSNorm(module.normalized_shape, module.eps, group=group, device="meta")
    else:
        return None
    made.register_parameter("weight", module.weight)
    return made.train(module.training)
