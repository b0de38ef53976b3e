"""What stages hand on: tuples, lists and dicts of tensors, None and other values, as a list of tensors and a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Meta:
    """Of a tensor, all that its receiver has to know."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    #: Whether it has a gradient, which its receiver sends back.
    has_gradient: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Constant:
    """A value that is no tensor."""

    value: Any

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Layout:
    """How a value is made of tensors: equal for values whose tensors can take each other's place."""

    spec: pytree.TreeSpec
    leaves: tuple[Meta | Constant, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.leaves))

    @property
    def tensors(self) -> list[Meta]:
        """Of its tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Meta)]

    @property
    def gradients(self) -> list[Meta]:
        """Of those that have a gradient."""
        return [meta for meta in self.tensors if meta.has_gradient]

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The value, of these tensors."""
        rest = iter(tensors)
        leaves = [leaf.value if isinstance(leaf, Constant) else next(rest) for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def take_apart(value: Any) -> tuple[list[Tensor], Layout]:
    """A value's tensors, and how they make it."""
    leaves, spec = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    metas = tuple(
        Meta(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else Constant(leaf)
        for leaf in leaves
    )
    return tensors, Layout(spec, metas)


def tensors_of(value: Any) -> list[Tensor]:
    """Those in it, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same value with its tensors changed."""
    return pytree.tree_map_only(Tensor, change, value)
