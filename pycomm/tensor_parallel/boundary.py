"""Splits a module's inputs or outputs over ranks, or gathers them, around a module that knows nothing of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel import regions
from pycomm.tensor_parallel.between import Between
from pycomm.tensor_parallel.group import Group


@dataclass(frozen=True)
class Move:
    """What happens to one tensor: each rank gets its part along ``dim``, or all parts are gathered there.

    Gathered, it is the same on all ranks, and so is its gradient. ``only_columns``: what is gathered is for column
    layers alone, whose gradients are then summed and split in one.
    """

    split: bool
    dim: int
    only_columns: bool = False

    def __call__(
        self, tensor: torch.Tensor, ranks: Group, uneven: bool, between: Between | None = None
    ) -> torch.Tensor:
        """Collective; ``between``: of a block all of whose column layers take what it knows."""
        count = tensor.shape[self.dim]
        if not self.split:
            counts = None if uneven else [count] * ranks.world_size
            if not self.only_columns or between is None:
                return regions.gather(tensor, ranks, self.dim, counts)
            entered = regions.all_gather(tensor, ranks, self.dim, counts)
            between.give(entered)
            return entered
        if count % ranks.world_size and not uneven:
            raise InvalidArgument(
                f"rank {ranks.rank}: dimension {self.dim} of a tensor of shape {tuple(tensor.shape)} is not divisible "
                f"by {ranks.world_size} ranks; pass uneven_sequence=True to parallelize(), or pad it"
            )
        return regions.scatter(tensor, ranks, self.dim)


class Boundary:
    """Moves of positional and keyword inputs, and of outputs; hooks, bound by ``watch``."""

    def __init__(
        self,
        ranks: Group,
        uneven: bool,
        between: Between | None = None,
        inputs: Sequence[Move | None] = (),
        keywords: Mapping[str, Move] | None = None,
        outputs: Sequence[Move | None] = (),
    ) -> None:
        self.ranks, self.uneven, self.between = ranks, uneven, between
        self.inputs, self.keywords, self.outputs = inputs, keywords or {}, outputs

    def watch(self, module: nn.Module) -> None:
        """From now on, at each forward."""
        if self.inputs or self.keywords:
            module.register_forward_pre_hook(self.enter, with_kwargs=True)
        if self.outputs:
            module.register_forward_hook(self.leave)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a forward."""
        args = self._moved(args, self.inputs)
        moved = {
            name: self._move(kwargs[name], move)
            for name, move in self.keywords.items()
            if name in kwargs
        }
        return args, {**kwargs, **moved}

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After a forward."""
        if isinstance(output, torch.Tensor):
            return self._move(output, self.outputs[0])
        return type(output)(self._moved(output, self.outputs))

    def _moved(self, tensors: Sequence[Any], moves: Sequence[Move | None]) -> tuple[Any, ...]:
        padded = [*moves, *[None] * (len(tensors) - len(moves))]
        return tuple(self._move(t, m) for t, m in zip(tensors, padded, strict=False))

    def _move(self, tensor: Any, move: Move | None) -> Any:
        if move is None or not isinstance(tensor, torch.Tensor) or self.ranks.world_size == 1:
            return tensor
        return move(tensor, self.ranks, self.uneven, self.between)
