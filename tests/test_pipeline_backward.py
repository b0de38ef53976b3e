"""The backward of a stage in two parts gives what autograd gives in one, and W is not done with I."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from harness import G
from torch import Tensor, nn
from torch.nn import functional

from pycomm.pipeline.backward import full, input_part, weight_part


class Own(nn.Module):
    """Parameters behind views, products and sums; one that is not used, one that is used at two places."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.scale, self.idle = nn.Parameter(torch.randn(1)), nn.Parameter(torch.ones(2))
        self.shares = shares

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.t().exp() * self.scale + self.bias
        return y + self.bias.sum() if self.shares else y


class Aside(nn.Module):
    """An output to which no input leads, and one that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), self.table * 2, x


def twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4)),
        (3, 4),
        True,
    ),
    "one layer twice": (twice, (3, 4), False),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (2, 5, 8),
        True,
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        (4, 3, 5, 5),
        True,
    ),
    "own": (lambda: Own(shares=False), (3, 4), True),
    "a bias twice": (lambda: Own(shares=True), (3, 4), False),
    "aside": (Aside, (3, 4), True),
    "no parameters": (nn.Tanh, (3, 4), False),
}


@pytest.mark.parametrize("name", MODULES)
def test_both_parts_are_the_whole(name: str) -> None:
    make, shape, can_split = MODULES[name]
    torch.manual_seed(0)
    module = make().double()
    dense = copy.deepcopy(module)
    x = torch.randn(shape, generator=G(1), dtype=torch.float64)

    def run(model: nn.Module) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        leaf = x.clone().requires_grad_()
        found = model(leaf)
        outputs = list(found) if isinstance(found, tuple) else [found]
        chance = G(2)
        return (
            leaf,
            outputs,
            [torch.randn(out.shape, generator=chance, dtype=out.dtype) for out in outputs],
        )

    leaf, outputs, gradients = run(dense)
    (expected,) = full(outputs, gradients, [leaf])
    leaf, outputs, gradients = run(module)
    (found,), left = input_part(outputs, gradients, [leaf])
    assert expected is not None
    assert found is not None
    assert torch.equal(found, expected)
    untouched = all(p.grad is None for p in module.parameters())
    assert untouched == (can_split or not list(module.parameters()))
    weight_part(left)
    for (key, p), q in zip(module.named_parameters(), dense.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), key
        if p.grad is not None and q.grad is not None:
            assert torch.allclose(p.grad, q.grad, rtol=1e-13, atol=1e-13), key


class Counted(torch.autograd.Function):
    """A product that notes which of its gradients are computed."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, name: str) -> Tensor:
        ctx.name = name  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> tuple[Tensor, None]:
        Counted.seen.append(ctx.name)  # type: ignore[attr-defined]
        return g, None


def test_each_part_computes_its_own() -> None:
    """On the way to the weight and on the way to the input, each once, in its part."""
    Counted.seen = []
    weight, leaf = nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4, requires_grad=True)
    y = functional.linear(Counted.apply(leaf, "input"), Counted.apply(weight, "weight"))
    z = functional.linear(y, Counted.apply(weight.detach().requires_grad_(), "second"))
    _, left = input_part([z], [torch.ones_like(z)], [leaf])
    assert Counted.seen == ["input"]
    assert weight.grad is None
    weight_part(left)
    assert sorted(Counted.seen[1:]) == ["second", "weight"]
    assert weight.grad is not None


def test_without_inputs_that_need_a_gradient_all_is_done_at_once() -> None:
    layer = nn.Linear(4, 2)
    output = layer(torch.ones(3, 4))
    found, left = input_part([output], [torch.ones(3, 2)], [])
    assert (found, left.branches, left.roots) == ([], [], [])
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [3, 3]
