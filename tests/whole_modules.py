"""What the tests of tensor parallelism share: a parallel module beside the whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import G, near
from torch import nn

from pycomm.tensor_parallel.layout import layout_of


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Collective: a parameter as the unsharded module has it."""
    layout = layout_of(parameter)
    return parameter.detach() if layout is None else layout.gather(parameter)


def whole_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Collective: a parameter's gradient as the unsharded module has it."""
    layout = layout_of(parameter)
    if parameter.grad is None or layout is None:
        return parameter.grad
    grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return layout.gather(grad)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The same on all ranks."""
    return torch.randn(shape, generator=G(seed), dtype=torch.float64).to(dtype)


def check_same_parameters(parallel: nn.Module, plain: nn.Module) -> None:
    """Bit for bit, and by name."""
    theirs = dict(plain.named_parameters())
    ours = dict(parallel.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(whole(parameter), theirs[name]), name


def check_same_gradients(parallel: nn.Module, plain: nn.Module, tol: float) -> None:
    """By name."""
    theirs = dict(plain.named_parameters())
    for name, parameter in parallel.named_parameters():
        ours, grad = whole_grad(parameter), theirs[name].grad
        assert (ours is None) == (grad is None), name
        if ours is not None and grad is not None:
            grad = grad.to_dense() if grad.is_sparse else grad
            assert near(ours, grad, tol), (name, ours, grad)


def check_equal(
    parallel: nn.Module,
    plain: nn.Module,
    *inputs: torch.Tensor,
    tol: float = 1e-9,
    enter: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    leave: Callable[[Any], Any] = lambda y: y,
) -> None:
    """Outputs, input gradients and parameter gradients; ``enter`` and ``leave`` split and gather around the module."""
    ours = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    theirs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    parallel.zero_grad()
    plain.zero_grad()
    y, z = leave(parallel(*map(enter, ours))), plain(*theirs)
    assert near(y, z, tol), (y, z)
    weight = randn(77, *z.shape, dtype=z.dtype)
    (y * weight).sum().backward()
    (z * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            assert near(a.grad, b.grad, tol)
    check_same_gradients(parallel, plain, tol)
