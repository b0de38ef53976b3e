"""A stage of a pipeline: a part of the model, and what it keeps of each microbatch between forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pycomm.errors import InvalidArgument
from pycomm.pipeline.skip import carrying
from pycomm.pipeline.values import Layout, take_apart, tensors_of

if TYPE_CHECKING:
    from pycomm.tensor_parallel.group import GroupLike


class PipelineStage:
    """Part `index` of `num_stages` of a model, counted from the input.

    module: takes what the stage before returns, a tuple's values one by one, or the batch's inputs in stage 0. What it
    returns may be a tensor, or tuples, lists and dicts of tensors, None and plain values. Tensors without a gradient,
    such as masks and ids, go on as they are.
    group: the pipeline's ranks; the default group if None.
    autocast: a dtype in which the stage computes where torch.autocast says so; parameters keep theirs.
    checkpoint: keep only the input of a microbatch and compute the rest again in backward. Then I is all of it.
    tied: parameters that other stages have, too, by a name that is the same there, such as an embedding that also is
    the output layer. Their gradients are summed over all that have them. None: as split() has found them.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        group: GroupLike = None,
        *,
        autocast: torch.dtype | None = None,
        checkpoint: bool = False,
        tied: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        if num_stages < 1 or not 0 <= index < num_stages:
            raise InvalidArgument(f"stage {index} of {num_stages}: stages count from 0")
        self.module, self.index, self.num_stages, self.group = module, index, num_stages, group
        self.autocast, self.checkpoint = autocast, checkpoint
        self.tied = dict(getattr(module, "tied", {}) if tied is None else tied)
        own = {id(parameter) for parameter in module.parameters()}
        if strangers := [name for name, p in self.tied.items() if id(p) not in own]:
            raise InvalidArgument(f"stage {index} has no parameters {strangers}, which are tied")

    def __repr__(self) -> str:
        return f"stage {self.index} of {self.num_stages}"

    @property
    def is_first(self) -> bool:
        """Whether it takes the batch."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives the loss."""
        return self.index == self.num_stages - 1

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the module; in a part that split() made, the names of the whole model."""
        return self.module.named_parameters()

    def forward(
        self, arguments: tuple[Any, ...], skips: dict[str, Tensor]
    ) -> tuple[Any, dict[str, Tensor]]:
        """Runs the module on one microbatch: its output, and of what is put aside what then still is."""
        device = next((t.device.type for t in tensors_of(arguments)), "cpu")
        with self.precision(device):
            return self._run(arguments, skips)

    def precision(self, device: str) -> AbstractContextManager[Any]:
        """In which the stage computes, and the last one the loss."""
        return nullcontext() if self.autocast is None else torch.autocast(device, self.autocast)

    def _run(
        self, arguments: tuple[Any, ...], skips: dict[str, Tensor]
    ) -> tuple[Any, dict[str, Tensor]]:
        if self.checkpoint and torch.is_grad_enabled():
            found: tuple[Any, dict[str, Tensor]] = checkpoint(
                self._with_skips, skips, *arguments, use_reentrant=False
            )
            return found
        return self._with_skips(skips, *arguments)

    def _with_skips(
        self, skips: dict[str, Tensor], *arguments: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        aside = dict(skips)  # a copy, as checkpoint() calls this again
        with carrying(aside):
            return self.module(*arguments), aside


@dataclass
class Forwarded:
    """What a stage has of a microbatch from its forward to the end of its backward."""

    inputs: list[Tensor]  # leaves that need a gradient
    outputs: list[Tensor]  # that have one; or the loss


#: Marks an output that travels with what is put aside.
_SKIPS: Final = "pycomm: with skips"


@dataclass
class Handed:
    """A value between two stages: the output and what is put aside, cut off the graph that made it."""

    tensors: list[Tensor]
    layout: Layout

    @classmethod
    def of(cls, output: Any, skips: dict[str, Tensor]) -> tuple[Handed, list[Tensor]]:
        """What goes on, and the same tensors with their graph, of those that have one."""
        tensors, layout = take_apart((_SKIPS, output, skips) if skips else output)
        handed = cls([t.detach() for t in tensors], layout)
        return handed, [t for t in tensors if t.requires_grad]

    def as_leaves(self, training: bool) -> tuple[tuple[Any, ...], dict[str, Tensor], list[Tensor]]:
        """The next stage's arguments, what is put aside, and the leaves whose gradients go back."""
        leaves = []
        if training:
            for tensor, meta in zip(self.tensors, self.layout.tensors, strict=True):
                if meta.has_gradient:
                    leaves.append(tensor.requires_grad_())
        value: Any = self.layout.fill(self.tensors)
        skips: dict[str, Tensor] = {}
        if type(value) is tuple and len(value) == 3 and value[0] == _SKIPS:
            _, value, skips = value
        return value if isinstance(value, tuple) else (value,), skips, leaves
