"""Cuts a model into stages of a balance that was counted or measured; the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pycomm.errors import InvalidArgument
from pycomm.pipeline.layers import layers_of
from pycomm.pipeline.values import map_tensors, tensors_of
from pycomm.tensor_parallel.group import GroupLike, group_of

Balance = Literal["params", "time", "memory"]
_REPEATS = 3


class Part(nn.Module):
    """Some layers of a model, one behind the other, by their names in it."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        names: Mapping[int, str],
        tied: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        #: Parameters that other parts have, too, by the whole model's name.
        self.tied = dict(tied)
        self._whole = {key: names[id(tensor)] for key, tensor in self._tensors().items()}

    def forward(self, *arguments: Any) -> Any:
        """The first layer gets the arguments, each other one what the one before returns, a tuple as one argument."""
        first, *others = self.layers.values()
        value = first(*arguments)
        for layer in others:
            value = layer(value)
        return value

    def whole_state_dict(self) -> dict[str, Tensor]:
        """This part's parameters and buffers, by the whole model's names; those of all parts make its state_dict()."""
        return {self._whole[key]: tensor.detach() for key, tensor in self._tensors().items()}

    def load_whole_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes its own out of the whole model's; raises InvalidArgument if one is missing."""
        own = self._tensors()
        if missing := sorted({self._whole[key] for key in own} - set(state)):
            raise InvalidArgument(f"the state has no {', '.join(missing)}")
        with torch.no_grad():
            for key, tensor in own.items():
                tensor.copy_(state[self._whole[key]])

    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.named_parameters()) | dict(self.named_buffers())


def split(
    model: nn.Module,
    stages: int | Sequence[str],
    *,
    balance: Balance = "params",
    sample_input: Any = None,
    group: GroupLike = None,
) -> list[Part]:
    """The model's parts, one for each stage: make a PipelineStage of those that are this rank's, and forget the rest.

    model: an nn.Sequential, one with ``pipeline_layers()`` (its layers by name, each of which takes what the one before
    returns), or GPT-2 or Llama of transformers. Its layers and parameters are used as they are, not copied.
    stages: how many, or the names of the layers with which stages begin, but for the first.
    balance: what the largest stage has least of: parameters' bytes; seconds of forward and backward; or bytes of
    parameters and what backward keeps. The latter two are measured on ``sample_input`` (a tensor, or a tuple for the
    first layer), on rank 0 of ``group``, and told to the others: a collective call.

    Parameters that several parts have are noted as ``tied``. Raises InvalidArgument for models that it cannot cut.
    """
    layers = layers_of(model)
    if isinstance(stages, int):
        if not 1 <= stages <= len(layers):
            raise InvalidArgument(f"{len(layers)} layers do not make {stages} stages")
        starts = _balanced(_weights(layers, balance, sample_input, group), stages)
    else:
        order = list(layers)
        if strangers := [name for name in stages if name not in order]:
            raise InvalidArgument(
                f"there are no layers {', '.join(strangers)}; the model has {', '.join(order)}"
            )
        starts = [0, *(order.index(name) for name in stages)]
        if sorted(set(starts)) != starts:
            raise InvalidArgument(
                f"stages begin in the layers' order, and not with the first: {stages}"
            )
    names = {
        id(tensor): name
        for tensors in (model.named_parameters(), model.named_buffers())
        for name, tensor in tensors
    }
    items = list(layers.items())
    cuts = [dict(items[a:b]) for a, b in zip(starts, [*starts[1:], len(items)], strict=True)]
    owners: dict[int, set[int]] = {}
    for index, cut in enumerate(cuts):
        for layer in cut.values():
            for parameter in layer.parameters():
                owners.setdefault(id(parameter), set()).add(index)
    return [Part(cut, names, _shared(cut, names, owners)) for cut in cuts]


def _shared(
    cut: Mapping[str, nn.Module], names: Mapping[int, str], owners: Mapping[int, set[int]]
) -> dict[str, nn.Parameter]:
    parameters = [p for layer in cut.values() for p in layer.parameters()]
    return {names[id(p)]: p for p in parameters if len(owners[id(p)]) > 1}


def _weights(
    layers: Mapping[str, nn.Module], balance: Balance, sample: Any, group: GroupLike
) -> list[float]:
    """Of each layer."""
    if balance == "params":
        return [float(sum(p.nbytes for p in layer.parameters())) for layer in layers.values()]
    measures = {"time": _seconds, "memory": _bytes}
    if balance not in measures:
        raise InvalidArgument(f"balance is params, time or memory, not {balance!r}")
    if sample is None:
        raise InvalidArgument(f"balance={balance!r} is measured: give a sample_input")
    ranks = group_of(group)
    told: list[Any] = [None]
    if ranks.rank == 0:
        told = [_measured(layers, sample, measures[balance])]
    if ranks.process_group is not None:
        source = dist.get_global_rank(ranks.process_group, 0)
        dist.broadcast_object_list(told, source, group=ranks.process_group)
    if isinstance(told[0], str):
        raise InvalidArgument(f"rank 0 could not measure the layers: {told[0]}")
    weights: list[float] = told[0]
    return weights


def _measured(
    layers: Mapping[str, nn.Module],
    sample: Any,
    measure: Callable[[nn.Module, tuple[Any, ...]], float],
) -> list[float] | str:
    """One after the other on what the one before returns; or what went wrong, for all ranks."""
    arguments = sample if isinstance(sample, tuple) else (sample,)
    found = []
    grads = [(p, p.grad) for layer in layers.values() for p in layer.parameters()]
    try:
        for name, layer in layers.items():
            where = name
            found.append(measure(layer, arguments))
            with torch.no_grad():
                arguments = (layer(*arguments),)
    except Exception as error:
        return f"layer {where}: {type(error).__name__}: {error}"
    finally:
        for parameter, gradient in grads:
            parameter.grad = gradient
    return found


def _forward(layer: nn.Module, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Outputs that have a gradient."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point())

    output = layer(*map_tensors(leaf, arguments))
    return [tensor for tensor in tensors_of(output) if tensor.requires_grad]


def _seconds(layer: nn.Module, arguments: tuple[Any, ...]) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        outputs = _forward(layer, arguments)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        times.append(time.perf_counter() - began)
    return median(times[1:])


def _bytes(layer: nn.Module, arguments: tuple[Any, ...]) -> float:
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        _forward(layer, arguments)
    own = {p.untyped_storage().data_ptr(): p.nbytes for p in layer.parameters()}
    return float(sum((kept | own).values()))


def _balanced(weights: Sequence[float], stages: int) -> list[int]:
    """Where each stage begins so that the heaviest is as light as can be; of equal cuts, the one with earlier ends."""
    before = [0.0, *accumulate(weights)]
    count = len(weights)
    # best[n]: of the first n layers in the stages so far, the heaviest one's weight, and the last one's begin.
    best: list[tuple[float, int]] = [(before[n], 0) for n in range(count + 1)]
    begins = []
    for stage in range(1, stages):
        found = [(float("inf"), 0)] * (count + 1)
        for n in range(stage + 1, count + 1):
            found[n] = min(
                (max(best[cut][0], before[n] - before[cut]), cut) for cut in range(stage, n)
            )
        best = found
        begins.append([begin for _, begin in found])
    starts, end = [], count
    for row in reversed(begins):
        end = row[end]
        starts.append(end)
    return [0, *reversed(starts)]
