"""What stages hand on: tuples, lists and dicts of tensors, None and other values, as a list of tensors and a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_LEAF: Final = pytree.tree_flatten(0)[1]


@dataclass(frozen=True)
class Meta:
    """Of a tensor, all that its receiver has to know."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    #: Whether it has a gradient, which its receiver sends back.
    has_gradient: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def with_rows(self, rows: int) -> Meta:
        """The same with another first dimension."""
        return replace(self, shape=(rows, *self.shape[1:]))

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

    @cached_property
    def tensors(self) -> list[Meta]:
        """Of its tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Meta)]

    @cached_property
    def gradients(self) -> list[Meta]:
        """Of those that have a gradient."""
        return [meta for meta in self.tensors if meta.has_gradient]

    def with_rows(self, rows: int) -> Layout:
        """The same of another part of a batch."""
        leaves = [leaf.with_rows(rows) if isinstance(leaf, Meta) else leaf for leaf in self.leaves]
        return Layout(self.spec, tuple(leaves))

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The value, of these tensors."""
        if self.spec == _LEAF and len(tensors) == 1:
            return tensors[0]
        rest = iter(tensors)
        leaves = [leaf.value if isinstance(leaf, Constant) else next(rest) for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def take_apart(value: Any) -> tuple[list[Tensor], Layout]:
    """A value's tensors, and how they make it."""
    if isinstance(value, Tensor):  # the usual case, a few times faster
        return [value], _layout_of_one(value.shape, value.dtype, value.requires_grad)
    leaves, spec = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    metas = tuple(
        Meta(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else Constant(leaf)
        for leaf in leaves
    )
    return tensors, Layout(spec, metas)


@lru_cache(maxsize=64)
def _layout_of_one(shape: torch.Size, dtype: torch.dtype, has_gradient: bool) -> Layout:
    return Layout(_LEAF, (Meta(tuple(shape), dtype, has_gradient),))


def tensors_of(value: Any) -> list[Tensor]:
    """Those in it, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same value with its tensors changed."""
    return pytree.tree_map_only(Tensor, change, value)


def split_rows(value: Any, rows: Sequence[tuple[int, int]]) -> list[Any]:
    """A value for each range of rows, in all its tensors."""
    if not tensors_of(value):
        return [value] * len(rows)
    leaves, spec = pytree.tree_flatten(value)
    parts = [
        [leaf[begin:end] for begin, end in rows] if isinstance(leaf, Tensor) else [leaf] * len(rows)
        for leaf in leaves
    ]
    return [pytree.tree_unflatten(list(one), spec) for one in zip(*parts, strict=True)]
