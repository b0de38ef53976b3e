"""The parallel form of a module: which layer takes its place, by what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel.attention import ParallelMultiheadAttention
from pycomm.tensor_parallel.batch_norm import ParallelBatchNorm2d
from pycomm.tensor_parallel.conv import ParallelConv2d
from pycomm.tensor_parallel.embedding import VocabParallelEmbedding
from pycomm.tensor_parallel.group import Group
from pycomm.tensor_parallel.heads import Heads, HeadSplit, SharedKeyLinear
from pycomm.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pycomm.tensor_parallel.module import ParallelModule
from pycomm.tensor_parallel.norm import norm_from
from pycomm.tensor_parallel.shared import check_shareable
from pycomm.tensor_parallel.style import KINDS, Style


@dataclass
class Place:
    """A module that a plan names, and all that decides what takes its place."""

    name: str
    module: nn.Module
    style: Style
    group: Group
    defaults: dict[str, Any] = field(default_factory=dict)  # options of linear layers
    heads: Heads | None = None  # of the attention that it belongs to
    outputs: Sizes = None  # of a layer of heads: what its outputs are

    def options(self, **own: Any) -> dict[str, Any]:
        """Those of the plan before those of the kind before the defaults."""
        return {"group": self.group, **own, **self.style.options}


Sizes = tuple[int, ...] | None


def is_linear(module: nn.Module) -> bool:
    """Whether it computes what nn.Linear does."""
    return is_plain(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' layer of that name: linear, its weight [in, out]."""
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__ == "Conv1D"
        and isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and getattr(module, "nf", None) == weight.shape[1]
    )


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether it computes what torch's module does, also if it is of a class derived from that."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def widths(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    weight: Any = module.weight
    out, into = weight.shape[::-1] if is_conv1d(module) else weight.shape
    return into, out


def replacement(place: Place) -> nn.Module | None:
    """What takes the module's place, made of this rank's part of its values; None: itself. Changes nothing.

    Raises InvalidArgument where a module has no such form.
    """
    if place.style.kind in ("whole", "boundary"):
        return None
    if place.style.kind == "shared" and type(place.module) not in _NORMS:
        check_shareable(place.module)
        return None
    _check_convertible(place.module)
    if place.style.kind == "shared":
        return norm_from(place.module, place.group)
    for test, make in _FORMS[place.style.kind]:
        if test(place.module):
            return _made(place, make)
    raise InvalidArgument(
        f'{type(place.module).__name__} has no parallel form "{place.style.kind}" ({KINDS[place.style.kind]})'
    )


def _made(place: Place, make: Callable[[Place], nn.Module]) -> nn.Module:
    try:
        return make(place)
    except TypeError as error:
        raise InvalidArgument(
            f"{place.style!r} has options that its layer does not take: {error}"
        ) from error


def _check_convertible(module: nn.Module) -> None:
    """Raises InvalidArgument of one that has what its parallel form would lose."""
    if isinstance(module, ParallelModule):
        raise InvalidArgument("it is parallel already")
    if parametrize.is_parametrized(module):
        raise InvalidArgument(
            "it is parametrized; parallelize first, or remove the parametrizations"
        )
    hooks: list[dict[Any, Any]] = [
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module._backward_hooks, module._backward_pre_hooks),
    ]
    if any(hooks):
        raise InvalidArgument(
            "it has hooks, which its parallel form would lose; register them afterwards"
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise InvalidArgument(
                f"its {name} is split already, as a DTensor; parallelize before FSDP"
            )
        if parameter.grad is not None:
            raise InvalidArgument(
                f"its {name} has a gradient, which would be lost; zero_grad() first"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InvalidArgument(
                f"its {name} has hooks, which would be lost; register them afterwards"
            )


# ---- one for each kind of plan and of module ------------------------------------------------------------------------


def _column(place: Place) -> nn.Module:
    options = place.options(**place.defaults, gather_output=False)
    if place.heads is not None and place.outputs is not None:
        split = HeadSplit(place.heads, place.group)
        if split.shares_kv and place.outputs != (place.heads.width,):
            return _shared_keys(place, split, options)
        d = place.heads.dim
        units = [split.unit if part == place.heads.width else d for part in place.outputs]
        options = {"parts": place.outputs, "unit": units, **options}
    into, out = widths(place.module)
    transposed = is_conv1d(place.module)
    layer: Any = place.module
    made = ColumnParallelLinear(
        *(into, out, layer.bias is not None), source=layer, transposed=transposed, **options
    )
    return made.train(layer.training)


def _shared_keys(place: Place, split: HeadSplit, options: dict[str, Any]) -> nn.Module:
    if place.outputs != (split.heads.kv_width,) or is_conv1d(place.module):
        raise InvalidArgument(
            f"its {split.heads.kv} heads of keys are fewer than {place.group.world_size} ranks, which is possible only "
            "where keys and values have layers of their own"
        )
    options.pop("gather_output")
    layer: Any = place.module
    return SharedKeyLinear(layer, split, **options)


def _row(place: Place) -> nn.Module:
    options = place.options(**place.defaults, input_is_parallel=True)
    if place.heads is not None:
        options = {"unit": HeadSplit(place.heads, place.group).unit, **options}
    layer: Any = place.module
    transposed = is_conv1d(layer)
    return RowParallelLinear(
        *(*widths(layer), layer.bias is not None), source=layer, transposed=transposed, **options
    )


def _vocab_linear(place: Place) -> nn.Module:
    layer: Any = place.module
    options = place.options(**place.defaults)
    transposed = is_conv1d(layer)
    return ColumnParallelLinear(
        *(*widths(layer), layer.bias is not None), source=layer, transposed=transposed, **options
    )


def _vocab(place: Place) -> nn.Module:
    uneven = place.defaults.get("uneven_sequence", False)
    layer: Any = place.module
    return VocabParallelEmbedding.from_embedding(layer, **place.options(uneven_sequence=uneven))


def _conv(split: str, **own: bool) -> Callable[[Place], nn.Module]:
    def make(place: Place) -> nn.Module:
        layer: Any = place.module
        return ParallelConv2d.from_conv(layer, **place.options(split=split, **own))

    return make


def _batch_norm(place: Place) -> nn.Module:
    layer: Any = place.module
    made = ParallelBatchNorm2d.from_batch_norm(layer, **place.options())
    return made.train(layer.training)


def _attention(place: Place) -> nn.Module:
    layer: Any = place.module
    return ParallelMultiheadAttention.from_attention(layer, **place.options())


def _is(kind: type[nn.Module]) -> Callable[[nn.Module], bool]:
    return lambda module: is_plain(module, kind)


_NORMS = (nn.LayerNorm, nn.RMSNorm)
_FORMS: dict[str, list[tuple[Callable[[nn.Module], bool], Callable[[Place], nn.Module]]]] = {
    "column": [(is_linear, _column), (_is(nn.Conv2d), _conv("output", gather_output=False))],
    "row": [(is_linear, _row), (_is(nn.Conv2d), _conv("input", input_is_parallel=True))],
    "qkv": [(is_linear, _column)],
    "vocab": [(is_linear, _vocab_linear), (_is(nn.Embedding), _vocab)],
    "groups": [
        (_is(nn.Conv2d), _conv("groups", gather_output=False, input_is_parallel=True)),
        (_is(nn.BatchNorm2d), _batch_norm),
    ],
    "attention": [(_is(nn.MultiheadAttention), _attention)],
}
