"""Which modules a plan names, and what it says of each."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel.style import ParallelStyle

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel.blocks import Problem, ancestors
from pycomm.tensor_parallel.forms import Place
from pycomm.tensor_parallel.group import Group
from pycomm.tensor_parallel.plans import plan_named
from pycomm.tensor_parallel.style import Style
from pycomm.tensor_parallel.torch_plan import style_of

Plan = Mapping[str, str | Style | ParallelStyle] | str | Style | ParallelStyle


def match(
    names: dict[str, nn.Module],
    plan: Plan,
    group: Group,
    defaults: dict[str, Any],
    problems: list[Problem],
) -> dict[str, Place]:
    """By name, what will be done to which modules; adds to ``problems`` what does not fit."""
    if isinstance(plan, str):
        plan = plan_named(plan)
    elif not isinstance(plan, Mapping):
        plan = {"": plan}
    places: dict[str, Place] = {}
    by_module: dict[int, tuple[str, Style]] = {}
    for pattern, said in plan.items():
        levels = isinstance(said, ParallelStyle)
        matched = [name for name in names if _matches(name, pattern, levels)]
        if not matched and not (isinstance(said, Style) and said.optional):
            problems.append(Problem(pattern, f"matches no module{_near(pattern, names)}"))
        for name in matched:
            module = names[name]
            try:
                style = _style(said, module)
            except InvalidArgument as error:
                problems.append(Problem(name or pattern, str(error)))
                continue
            before, its_style = by_module.setdefault(id(module), (pattern, style))
            if its_style != style:
                words = f'is {its_style!r} by "{before}", but {style!r} by "{pattern}"'
                problems.append(Problem(name, words))
            elif not any(place.module is module for place in places.values()):
                places[name] = Place(name, module, style, group, defaults)
    return places


def _style(said: str | Style | ParallelStyle, module: nn.Module) -> Style:
    if isinstance(said, ParallelStyle):
        return style_of(said, module)
    return said if isinstance(said, Style) else Style(said)


def _matches(name: str, pattern: str, levels: bool) -> bool:
    if not levels:
        return any(fnmatch.fnmatchcase(name, one.strip()) for one in pattern.split("|"))
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _near(pattern: str, names: Mapping[str, nn.Module]) -> str:
    """Names that may have been meant."""
    last = pattern.rpartition(".")[2]
    by_last: dict[str, str] = {}
    for name in names:
        if name:
            by_last.setdefault(name.rpartition(".")[2], name)
    near = [by_last[found] for found in difflib.get_close_matches(last, by_last, 3, 0.5)]
    near += difflib.get_close_matches(pattern, [n for n in names if n and n not in near], 1)
    return f"; near: {', '.join(near)}" if near else ""


def nested(names: Mapping[str, nn.Module], places: Mapping[str, Place]) -> list[Problem]:
    """Modules within one that will be replaced, or that reads their weights itself."""
    stays = ("boundary", "whole", "shared")
    problems = []
    for name, place in places.items():
        for ancestor in ancestors(name):
            above = places.get(ancestor) if name else None
            if above is not None and above.style.kind not in stays:
                problems.append(Problem(name, f'is within "{ancestor}", which is {above.style!r}'))
            elif above is None and isinstance(names.get(ancestor), nn.MultiheadAttention):
                words = 'is read by nn.MultiheadAttention itself; plan "attention" for that'
                if place.style.kind not in stays:
                    problems.append(Problem(name, f'of "{ancestor}" {words}'))
    return problems
