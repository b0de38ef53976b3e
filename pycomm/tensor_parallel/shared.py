"""Modules that stay whole and see a part of the data on each rank: norms in sequence parallel, of own heads, dropout.

Their parameters' gradients are summed over the group; random numbers are the ranks' own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel import regions
from pycomm.tensor_parallel.group import Group
from pycomm.tensor_parallel.random import own_random_numbers


class _Shared(nn.Module):
    """Before a module's class: its parameters enter its forward through ``copy``."""

    _shared_by: Group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = {k: p for k, p in self._parameters.items() if p is not None and p.requires_grad}
        dtypes = {p.dtype for p in given.values()}
        # Attributes of the instance are found before its parameters.
        try:
            for dtype in sorted(dtypes, key=str):
                of_dtype = {k: p for k, p in given.items() if p.dtype == dtype}
                copies = regions.copy_together(list(of_dtype.values()), self._shared_by)
                self.__dict__.update(zip(of_dtype, copies, strict=True))
            if not self.training or not is_leaf(self):
                return super().forward(*args, **kwargs)
            with own_random_numbers(self._shared_by):
                return super().forward(*args, **kwargs)
        finally:
            for name in given:
                self.__dict__.pop(name, None)


@functools.cache
def _shared_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Shared{kind.__name__}", (_Shared, kind), {"__module__": kind.__module__})


def is_leaf(module: nn.Module) -> bool:
    """Whether no part of it has parameters, so that all of it is computed on this rank's part."""
    return all(next(child.parameters(), None) is None for child in module.children())


def check_shareable(module: nn.Module) -> None:
    """Raises InvalidArgument of a module that has parameters only in its parts."""
    if not is_leaf(module) and next(module.parameters(recurse=False), None) is None:
        raise InvalidArgument("it has no parameters of its own; plan the parts that have")


def share(module: nn.Module, group: Group) -> None:
    """From now on each rank's forward is of its part of the data."""
    if group.world_size > 1:
        kind: Any = type(module)
        module.__class__ = _shared_class(kind)
        module._shared_by = group  # type: ignore[assignment]


def mark(module: nn.Module) -> None:
    """From now on column layers know a shared module's output, and refuse it if they take the whole sequence."""
    if is_leaf(module):
        module.register_forward_hook(_mark)


def _mark(module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, torch.Tensor):
        output.is_own_part = True  # type: ignore[attr-defined]
