"""An ordinary module made parallel by names: what matches a pattern is split as the plan says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel.agreement import agree
from pycomm.tensor_parallel.between import Between, watch
from pycomm.tensor_parallel.blocks import (
    Block,
    Problem,
    ancestors,
    blocks_of,
    find_heads,
    own_parameters,
)
from pycomm.tensor_parallel.boundary import Boundary
from pycomm.tensor_parallel.forms import Place, replacement
from pycomm.tensor_parallel.group import Group, GroupLike, group_of
from pycomm.tensor_parallel.heads import HeadSplit, own_numbers
from pycomm.tensor_parallel.layout import layout_of
from pycomm.tensor_parallel.linear import ParallelLinear
from pycomm.tensor_parallel.loss import CausalLmLoss
from pycomm.tensor_parallel.matching import Plan, match, nested
from pycomm.tensor_parallel.shared import mark, share


def parallelize(
    module: nn.Module,
    plan: Plan,
    group: GroupLike | Group = None,
    *,
    overlap: bool | None = None,
    overlap_chunks: int = 1,
    uneven_sequence: bool = False,
    check: bool = True,
) -> nn.Module:
    """Collective: splits the layers that a plan names over the ranks of a group, and returns the module.

        model = parallelize(model, {"*.q_proj": "column", "*.o_proj": "row", "lm_head": "vocab"}, mesh["tp"])

    The module is the same on all ranks, and on the CPU or the device that it will be used on; its optimizer is made
    afterwards. It is changed in place (returned is another one only for a plan of the module itself). Layers keep
    their names, and their values: each rank takes its part. Tied weights stay tied.

    ``plan``: from patterns of names (``*`` stands for anything, also for dots; ``|`` between patterns, one of which
    must match) to one of ``style.KINDS`` ("column", "row", "qkv", "vocab", "attention", "shared", ...), to a
    :class:`Style` with options, or to a style of torch.distributed.tensor.parallel (in whose patterns ``*`` ends at
    dots); or the name of a ready plan ("gpt2", "llama", :mod:`plans`).

    Layers of an attention are split by heads, as its attributes ``num_heads``, ``head_dim`` and the like say, which
    then count this rank's; heads of keys that are fewer than ranks stay on all of them. Between a column and a row
    layer random numbers are the ranks' own; an input of several column layers has its gradients summed once. What a
    model computes there must treat each head, or each element, on its own, and find its sizes by -1 or by what it has
    for heads. Layers use their weights alone: ``linear(x, embedding.weight)`` would see this rank's part.

    ``group``: a process group, a mesh of one dimension, or None, the default group. ``overlap``, ``overlap_chunks``: of
    linear layers. ``uneven_sequence``: in sequence parallel, for lengths that the number of ranks does not divide.
    ``check``: whether ranks compare the module's values first.

    If a pattern matches nothing, patterns contradict each other, a module has no such form or it is unclear how to
    split it, InvalidArgument lists all of that, and the module is as it was; if ranks have other plans or other values,
    MismatchError is raised on all of them.
    """
    ranks = group_of(group)
    defaults = {
        "overlap": overlap,
        "overlap_chunks": overlap_chunks,
        "uneven_sequence": uneven_sequence,
    }
    change: _Change | None = None
    error: Exception | None = None
    try:
        change = _prepare(module, plan, ranks, defaults)
    except Exception as e:
        error = e
    agree(module, "" if change is None else change.describe(), error, ranks, check)
    assert change is not None
    return change.commit()


@dataclass
class _Change:
    """All that will be done to a module."""

    module: nn.Module
    group: Group
    uneven: bool
    names: dict[str, nn.Module]
    places: dict[str, Place]
    made: dict[int, nn.Module] = field(default_factory=dict)  # by the id of what it replaces
    blocks: list[Block] = field(default_factory=list)
    numbers: list[tuple[nn.Module, dict[str, int]]] = field(default_factory=list)

    def describe(self) -> str:
        """What all ranks must agree on."""
        return repr([(name, place.style) for name, place in self.places.items()])

    def commit(self) -> nn.Module:
        """Does it."""
        betweens = {id(block.module): self._watch(block) for block in self.blocks}
        for attention, numbers in self.numbers:
            for name, number in numbers.items():
                setattr(attention, name, number)
        for place in self.places.values():
            if place.style.kind == "boundary":
                between = betweens.get(id(place.module))
                boundary = Boundary(self.group, self.uneven, between, **place.style.options)
                boundary.watch(place.module)
            elif place.style.kind == "shared" and self.group.world_size > 1:
                now = self.made.get(id(place.module), place.module)
                if now is place.module:
                    share(place.module, self.group)
                mark(now)
        for module in list(self.module.modules()):
            _leave_fast_path(module, self.made)
            for name, child in list(module._modules.items()):
                if id(child) in self.made:
                    module._modules[name] = self.made[id(child)]
        self._keep_loss()
        return self.made.get(id(self.module), self.module)

    def _keep_loss(self) -> None:
        """A transformers model whose logits stay split computes its loss of these."""
        split = [
            place
            for place in self.places.values()
            if place.style.kind == "vocab" and place.style.options.get("gather_output") is False
        ]
        loss = getattr(self.module, "loss_function", None) if split else None
        if getattr(loss, "__name__", "") == "ForCausalLMLoss":
            self.module.loss_function = CausalLmLoss(self.group)  # type: ignore[assignment]

    def _watch(self, block: Block) -> Between | None:
        """What it returns knows the inputs of all column layers, if they share them."""
        between = Between(self.group)
        columns = [self.made[id(place.module)] for place in block.columns]
        rows = [self.made[id(place.module)] for place in block.rows]
        linear = [layer for layer in columns if isinstance(layer, ParallelLinear)]
        if len(linear) > 1:
            for layer in linear:
                layer.shared_input = between
        known = {id(place.module) for place in self.places.values()}
        inner = [other.name for other in self.blocks if other is not block]
        others = {
            name: module
            for name, module in self.names.items()
            if (name.startswith(f"{block.name}.") if block.name else name)
            and id(module) not in known
            and not any(n in inner for n in [name, *_up_to(name, block.name)])
            and next(module.parameters(recurse=False), None) is not None
        }
        watch(block.module, between, columns, rows, others)
        share = all(isinstance(layer, ParallelLinear) and layer.shares_input for layer in columns)
        return between if share else None


def _up_to(name: str, top: str) -> list[str]:
    """The modules that contain one and are contained in another."""
    found = []
    for ancestor in ancestors(name):
        if ancestor == top:
            break
        found.append(ancestor)
    return found


def _leave_fast_path(module: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """torch's encoder computes with its layers' weights itself where it can, which would see this rank's part."""
    if not any(id(child) in made for child in module.modules()):
        return
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False


# ---- what will be done ----------------------------------------------------------------------------------------------


def _prepare(module: nn.Module, plan: Plan, group: Group, defaults: dict[str, Any]) -> _Change:
    """Raises InvalidArgument with all that is wrong; changes nothing."""
    if isinstance(module, (DistributedDataParallel, FSDPModule)):
        raise InvalidArgument(
            f"rank {group.rank}: {type(module).__name__} is around what it averages already; parallelize the module "
            "first, then wrap it"
        )
    names = dict(module.named_modules(remove_duplicate=False))
    problems: list[Problem] = []
    places = match(names, plan, group, defaults, problems)
    problems += nested(names, places)
    change = _Change(module, group, bool(defaults["uneven_sequence"]), names, places)
    if problems:
        _make(places, problems)
    else:
        change.blocks, problems = blocks_of(places, names)
        attentions, unclear = find_heads(places, change.blocks)
        change.numbers = [(a, own_numbers(a, HeadSplit(heads, group))) for a, heads in attentions]
        problems += unclear + own_parameters(change.blocks, places, names)
        change.made = _make(places, problems)
        problems += _tied(module, change.made)
    if problems:
        raise InvalidArgument(
            f"{group}: the plan does not fit {type(module).__name__}, which is as it was:{_listed(problems)}"
        )
    return change


def _listed(problems: list[Problem]) -> str:
    """One line for those that differ in the module's name alone, as of a model's many layers."""
    names: dict[str, list[str]] = {}
    for problem in problems:
        names.setdefault(problem.words, []).append(problem.name)
    return "".join(
        f'\n- "{first}"{f" and {len(others)} more" if others else ""}: {words}'
        for words, (first, *others) in names.items()
    )


def _make(places: Mapping[str, Place], problems: list[Problem]) -> dict[int, nn.Module]:
    made: dict[int, nn.Module] = {}
    for name, place in places.items():
        try:
            new = replacement(place)
        except InvalidArgument as error:
            problems.append(Problem(name or type(place.module).__name__, str(error)))
            continue
        if new is not None:
            made[id(place.module)] = new
    return made


# ---- tied weights ---------------------------------------------------------------------------------------------------


def _tied(module: nn.Module, made: Mapping[int, nn.Module]) -> list[Problem]:
    """Ties the new layers' parameters as the old ones' are; returns those that would come apart."""
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for prefix, holder in module.named_modules():
        for name, parameter in holder.named_parameters(recurse=False, remove_duplicate=False):
            path = f"{prefix}.{name}" if prefix else name
            holders.setdefault(id(parameter), []).append((path, holder, name))
    problems = []
    for tied in holders.values():
        if len(tied) == 1 or not any(id(holder) in made for _, holder, _ in tied):
            continue
        first_path, first, first_name = tied[0]
        kept = getattr(made.get(id(first), first), first_name)
        for path, holder, name in tied[1:]:
            new = made.get(id(holder), holder)
            if _alike(kept, getattr(new, name)):
                new.register_parameter(name, kept)
            else:
                words = (
                    f'is tied to "{first_path}", but would be split in another way; plan both alike'
                )
                problems.append(Problem(path, words))
    return problems


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    layout = layout_of(a)
    if layout is None:
        return layout_of(b) is None and a.shape == b.shape
    return layout.is_like(layout_of(b))
