"""The backward of one microbatch in one stage: as a whole, or its inputs' gradients first and its weights' later.

Splitting follows the zero bubble paper (arXiv 2401.10241): I runs the autograd graph from the outputs to the inputs,
and keeps what arrived at nodes from which weights branch off; W runs those branches alone, so nothing is computed
twice. Functions written in Python are the exception: their backward computes what it computes, in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

#: Where a node's gradient goes on, and by which of the next one's inputs.
_Edge = tuple[Node, int]


@dataclass
class WeightPart:
    """What W has left to do."""

    #: Nodes from which weights branch off, with the branches and the gradients that arrived there.
    branches: list[tuple[Node, list[_Edge], tuple[Tensor | None, ...]]] = field(
        default_factory=list
    )
    #: Outputs that no input leads to, and their gradients.
    roots: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)


def full(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """B: adds to the weights' `.grad` and returns the inputs' gradients. No graph is left.

    outputs: those that need a gradient; theirs in the same order, None for a scalar's 1. inputs: leaves.
    """
    torch.autograd.backward(list(outputs), list(gradients))
    return [leaf.grad for leaf in inputs]


def input_part(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightPart]:
    """I: returns the inputs' gradients, and what weight_part() takes.

    Where it cannot be split, as all of it is weights' (no input needs a gradient) or a weight is used at several
    places, this is B, and nothing is left for W.
    """
    graph = _Graph([get_gradient_edge(output).node for output in outputs], inputs)
    if not inputs or graph.shares_weights():
        return full(outputs, gradients, inputs), WeightPart()
    left = WeightPart()
    through: list[tuple[Tensor, Tensor | None]] = []
    for output, gradient in zip(outputs, gradients, strict=True):
        leads_to_input = get_gradient_edge(output).node in graph.leading
        (through if leads_to_input else left.roots).append((output, gradient))
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    hooks = [_keep_arrivals(node, arrived) for node in graph.branches]
    try:
        found = torch.autograd.grad(
            [output for output, _ in through],
            list(inputs),
            [gradient for _, gradient in through],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    left.branches = [
        (node, edges, arrived[node]) for node, edges in graph.branches.items() if node in arrived
    ]
    return list(found), left


def weight_part(left: WeightPart) -> None:
    """W: adds to the weights' `.grad`; no graph is left."""
    edges: list[GradientEdge | Tensor] = [output for output, _ in left.roots]
    gradients: list[Tensor | None] = [gradient for _, gradient in left.roots]
    for node, branches, arrived in left.branches:
        there = [(GradientEdge(node, i), g) for i, g in enumerate(arrived) if g is not None]
        found = torch.autograd.grad(
            [edge for edge, _ in there],
            [GradientEdge(*branch) for branch in branches],
            [gradient for _, gradient in there],
            retain_graph=True,
            allow_unused=True,
        )
        for branch, gradient in zip(branches, found, strict=True):
            if gradient is not None:
                edges.append(GradientEdge(*branch))
                gradients.append(gradient)
    left.branches, left.roots = [], []
    if edges:
        torch.autograd.backward(edges, gradients)  # type: ignore[arg-type]


def _keep_arrivals(
    node: Node, arrived: dict[Node, tuple[Tensor | None, ...]]
) -> torch.utils.hooks.RemovableHandle:
    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        arrived[node] = gradients

    handle: torch.utils.hooks.RemovableHandle = node.register_prehook(keep)
    return handle


class _Graph:
    """An autograd graph: its nodes that lead to an input, and where others, which lead to weights, branch off."""

    def __init__(self, roots: Iterable[Node], inputs: Sequence[Tensor]) -> None:
        self.leading = {get_gradient_edge(leaf).node for leaf in inputs}
        order = _sources_first(roots)
        for node in order:
            if any(after in self.leading for after, _ in node.next_functions):
                self.leading.add(node)
        self.branches: dict[Node, list[_Edge]] = {}
        ends = {get_gradient_edge(leaf).node for leaf in inputs}
        for node in order:
            if node in self.leading and node not in ends:
                edges = [
                    (after, index)
                    for after, index in node.next_functions
                    if after is not None and after not in self.leading
                ]
                if edges:
                    self.branches[node] = list(dict.fromkeys(edges))

    def shares_weights(self) -> bool:
        """Whether two branches meet: a gradient asked for at one would count the other one's, too."""
        owners: dict[Node, Node] = {}
        for source, edges in self.branches.items():
            for node in _sources_first(node for node, _ in edges):
                if owners.setdefault(node, source) is not source:
                    return True
        return False


def _sources_first(roots: Iterable[Node]) -> list[Node]:
    """All nodes that are reached, each behind those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(after, False) for after, _ in node.next_functions if after is not None]
    return order
