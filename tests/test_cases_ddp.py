"""Public bug reports about DistributedDataParallel, as tests: cases DDP-01, DDP-03 and DDP-09.

PYCOMM_TEST_DDP=torch runs them with torch's class on Gloo, which passes all three.
"""

from __future__ import annotations

import functools
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, G, P, ddp_class, lin, mean_grads, near, run, seeded
from torch import nn

import pycomm


class Branches(nn.Module):
    """Two layers of which each forward uses one."""

    def __init__(self) -> None:
        """Make both."""
        super().__init__()
        self.a, self.b = lin(1, 1), lin(1, 1)

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        """Apply branch k."""
        return (self.a if k == 0 else self.b)(x)


@pytest.mark.parametrize("view", [False, True])
def test_ddp_01_branch_used_in_an_unsynced_pass_only(view: bool) -> None:
    """pytorch#69031: a parameter used only within no_sync is averaged by the synced pass."""

    def worker(rank: int, n: int) -> list[float]:
        model = ddp_class()(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
        x = torch.full((1, 1), rank + 1.0)
        with model.no_sync():
            model(x, 0).sum().backward()
        model(x, 1).sum().backward()
        return [p.grad.item() for p in model.parameters()]

    assert run(2, worker, backend=BACKEND) == [[1.5, 1.5]] * 2


def fake(rank: int) -> torch.Tensor:
    """The first batch of a rank."""
    return torch.randn(8, 4, generator=G(rank))


def real(rank: int) -> torch.Tensor:
    """The second batch of a rank."""
    return torch.randn(8, 4, generator=G(100 + rank))


def adversarial_loss(model: nn.Module, rank: int) -> torch.Tensor:
    """A loss that needs two forwards, as a discriminator's does."""
    loss: torch.Tensor = model(fake(rank)).pow(2).sum() - model(real(rank)).pow(3).sum()
    return loss


def test_ddp_03_two_forwards_before_one_backward_with_buffers() -> None:
    """pytorch#175024: no in-place error; mean gradients; rank 0's statistics at the next forward.

    In train mode BatchNorm does not use its running statistics, so broadcasting them in between
    must change no gradient.
    """

    def worker(rank: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        base = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        reference = deepcopy(base)
        model = ddp_class()(base)
        adversarial_loss(model, rank).backward()
        losses = [functools.partial(adversarial_loss, rank=k) for k in range(n)]
        for parameter, want in zip(base.parameters(), mean_grads(reference, losses), strict=True):
            assert parameter.grad is not None
            assert near(parameter.grad, want, tol=1e-4)
        own = base.get_buffer("1.running_mean").clone()
        model.eval()(fake(rank))  # broadcasts, and changes no statistic itself
        return own, base.get_buffer("1.running_mean")

    results = run(2, worker, backend=BACKEND)
    of_rank_0 = results[0][0]
    assert not near(of_rank_0, results[1][0], tol=1e-3)
    assert all(torch.equal(synced, of_rank_0) for _, synced in results)


class Typed(nn.Module):
    """Parameters of three dtypes, one of them complex."""

    def __init__(self) -> None:
        """Make them, all ones."""
        super().__init__()
        self.c, self.f, self.h = P(3, torch.complex64), P(3), P(3, torch.bfloat16)

    def forward(self, k: float) -> torch.Tensor:
        """A sum whose derivatives are k + 3ki, k and k."""
        return (self.c.real * k + 3 * k * self.c.imag + self.f * k + self.h.float() * k).sum()


@pytest.mark.parametrize("view", [False, True])
def test_ddp_09_complex_parameters_among_others(view: bool) -> None:
    """pytorch#158753: complex64, float32 and bfloat16 gradients are all averaged in full."""

    def worker(rank: int, n: int) -> list[list[complex]]:
        model = ddp_class()(Typed(), gradient_as_bucket_view=view)
        model(rank + 1.0).backward()
        first = [p.grad.tolist() for p in model.parameters()]
        model.zero_grad()
        model(rank + 1.0).backward()  # with the rebuilt buckets
        assert [p.grad.tolist() for p in model.parameters()] == first
        return first

    right = [[complex(1.5, 4.5)] * 3, [1.5] * 3, [1.5] * 3]
    assert run(2, worker, backend=BACKEND) == [right] * 2


def new_group(backend: str | None = None) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group


def test_another_process_group() -> None:
    """After _update_process_group the hook uses the new group: the old one may be gone."""

    def worker(rank: int, n: int) -> tuple[float, float]:
        old, new = new_group(), new_group()
        model = pycomm.DistributedDataParallel(lin(1, 1), process_group=old)
        weight = model.module.weight
        grads = []
        for _ in range(2):
            weight.grad = None
            torch.autograd.backward(model(torch.full((1, 1), rank + 1.0)).sum())
            assert weight.grad is not None
            grads.append(weight.grad.item())
            model._update_process_group(new)
            pycomm.get_communicator(old).abort("the test is done with it")
        gloo = new_group(backend="gloo")
        with pytest.raises(pycomm.InvalidArgument, match="gloo"):
            model._update_process_group(gloo)
        dist.barrier()  # Gloo's ranks must not leave while others still connect
        return grads[0], grads[1]

    assert run(2, worker) == [(1.5, 1.5)] * 2


def test_functional_call_gives_its_own_tensors_gradients() -> None:
    """torch.func.functional_call puts plain tensors in the place of parameters for one forward."""

    def worker(rank: int, _: int) -> tuple[float, float]:
        model = ddp_class()(lin(1, 1))
        weight = torch.full((1, 1), 3.0, requires_grad=True)
        inputs = torch.full((1, 1), rank + 1.0)
        output = torch.func.functional_call(model, {"module.weight": weight}, inputs)
        torch.autograd.backward(output.sum())
        assert weight.grad is not None
        return output.item(), weight.grad.item()

    assert run(2, worker, backend=BACKEND) == [(3.0, 1.0), (6.0, 2.0)]
