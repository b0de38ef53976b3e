"""What happens between a column and a row layer of one block, where each rank computes its own part.

A block is the smallest module that has both. Within it random numbers are the ranks' own, from the first column layer's
output to the row layer's input; the input that several column layers take enters once, so that its gradients are summed
once; and a module with parameters of its own is refused there, since each rank would find a part of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel import random, regions
from pycomm.tensor_parallel.group import Group


class Between:
    """A block's state while its forward runs."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._running = False  # the block's forward
        self._entered = False
        self._random: list[torch.Tensor] | None = None
        self._inputs: list[tuple[Any, torch.Tensor]] = []

    @property
    def entered(self) -> bool:
        """Whether what is computed now is this rank's own part."""
        return self._entered

    def begin(self) -> None:
        """The block's forward begins."""
        self.end()  # of one that was given up
        self._running = True

    def enter(self, training: bool) -> None:
        """A column layer has its output."""
        if not self._running or self._entered:
            return
        self._entered = True
        if training and self.group.world_size > 1:
            self._random = random.enter(self.group)

    def leave(self) -> None:
        """A row layer takes its input."""
        own, self._random, self._entered = self._random, None, False
        self._inputs.clear()
        if own is not None:
            random.leave(own)

    def end(self) -> None:
        """The block's forward ends, also by an exception."""
        self._running = False
        self.leave()

    @torch.compiler.disable(reason=regions.REASON)
    def take(self, x: torch.Tensor, enter: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """``enter(x)``; for several layers that take the same x, once."""
        if not self._running:
            return enter(x)
        mark = (x, x._version, torch.is_grad_enabled())
        for (seen, *rest), entered in self._inputs:
            if seen is x and tuple(rest) == mark[1:]:
                return entered
        entered = enter(x)
        self._inputs.append((mark, entered))
        return entered

    def give(self, entered: torch.Tensor) -> None:
        """This input of the block has entered already: column layers that take it need not sum its gradients."""
        if self._running:
            mark = (entered, entered._version, torch.is_grad_enabled())
            self._inputs.append((mark, entered))


class _Hook:
    """A module's hook that knows its block; an object, so that deepcopy binds the copy's to the copy."""

    def __init__(self, between: Between) -> None:
        self.between = between


class _Begin(_Hook):
    @torch.compiler.disable(reason=regions.REASON)
    def __call__(self, module: nn.Module, args: Any) -> None:
        self.between.begin()


class _End(_Hook):
    @torch.compiler.disable(reason=regions.REASON)
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.between.end()


class _Enter(_Hook):
    @torch.compiler.disable(reason=regions.REASON)
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.between.enter(module.training)


class _Leave(_Hook):
    @torch.compiler.disable(reason=regions.REASON)
    def __call__(self, module: nn.Module, args: Any) -> None:
        self.between.leave()


class _Refuse(_Hook):
    def __init__(self, between: Between, name: str) -> None:
        super().__init__(between)
        self.name = name

    def __call__(self, module: nn.Module, args: Any) -> None:
        trains = any(p.requires_grad for p in module.parameters(recurse=False))
        if self.between.entered and trains:
            raise InvalidArgument(
                f"rank {self.between.group.rank}: {self.name} ({type(module).__name__}) has parameters and is computed "
                "between a column and a row layer, so that each rank would find a part of their gradients: plan "
                f'"{self.name}": "shared" if it computes this rank\'s part, "whole" if the same on all ranks'
            )


def watch(
    block: nn.Module,
    between: Between,
    columns: list[nn.Module],
    rows: list[nn.Module],
    others: dict[str, nn.Module],
) -> None:
    """Binds a block, the layers within it, and by name those that may not be computed between them."""
    block.register_forward_pre_hook(_Begin(between), prepend=True)
    block.register_forward_hook(_End(between), always_call=True)
    for column in columns:
        column.register_forward_hook(_Enter(between))
    for row in rows:
        row.register_forward_pre_hook(_Leave(between))
    for name, module in others.items():
        module.register_forward_pre_hook(_Refuse(between, name))
