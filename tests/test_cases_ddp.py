"""Public bug reports about DistributedDataParallel, as tests: cases DDP-01, 03, 05, 07, 09 and 11.

PYCOMM_TEST_DDP=torch runs them with torch's class on Gloo, which passes 01, 03 and 09; the others
are skipped where it fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from harness import (
    BACKEND,
    IMPLEMENTATION,
    G,
    P,
    Refused,
    attempt,
    ddp_class,
    lin,
    mean_grads,
    near,
    refused,
    run,
    seeded,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import pycomm

torch_fails = pytest.mark.skipif(IMPLEMENTATION == "torch", reason="torch's class fails here")


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


def training_step(model: nn.Module, rank: int) -> None:
    """A forward and a backward of the rank's first batch."""
    torch.autograd.backward(model(fake(rank)).pow(2).sum())


@torch_fails
@pytest.mark.parametrize("view", [False, True])
def test_ddp_05_evaluation_on_rank_0_only(view: bool) -> None:
    """pytorch#54059: forwards without grad on one rank need no peer, and training goes on."""

    def worker(rank: int, n: int) -> list[torch.Tensor]:
        base = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        model = ddp_class()(base, gradient_as_bucket_view=view)
        for _ in range(2):
            training_step(model, rank)
        if rank == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(real(rank))
            model.train()
        dist.barrier()
        model.zero_grad()
        training_step(model, rank)
        return [p.grad for p in base.parameters() if p.grad is not None]

    first, second = run(2, worker, backend=BACKEND, wall=15, group_timeout=60)
    assert len(first) == len(second) == 4
    assert all(map(torch.equal, first, second))


class Repeated(nn.Module):
    """A layer applied twice, each time under a checkpoint, and one applied once."""

    def __init__(self, reentrant: bool) -> None:
        """Make both layers."""
        super().__init__()
        self.layer, self.last = lin(2, 2), lin(2, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply them."""
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        output: torch.Tensor = self.last(x)
        return output


@torch_fails
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_ddp_07_shared_layer_under_checkpoints(reentrant: bool, unused: bool, static: bool) -> None:
    """pytorch#24005: the mean gradient on every rank, or an error that names the layer on every rank."""

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        output: torch.Tensor = model((torch.ones(1, 2) * (rank + 1)).requires_grad_())
        return output.sum()

    def train(base: nn.Module, rank: int) -> list[torch.Tensor]:
        model = ddp_class()(base, find_unused_parameters=unused, static_graph=static)
        for _ in range(2):  # the second time with rebuilt buckets, or the recorded graph
            model.zero_grad()
            torch.autograd.backward(loss(model, rank))
        return [p.grad for p in base.parameters() if p.grad is not None]

    def worker(rank: int, n: int) -> list[torch.Tensor] | Refused:
        base = seeded(lambda: Repeated(reentrant))
        losses = [functools.partial(loss, rank=k) for k in range(n)]
        want = mean_grads(deepcopy(base), losses)
        grads = attempt(lambda: train(base, rank))
        if not isinstance(grads, Refused):
            assert all(near(g, w) for g, w in zip(grads, want, strict=True))
        return grads

    results = run(2, worker, backend=BACKEND)
    if reentrant and not static:
        assert refused(results, "layer.weight")
    else:
        assert not any(isinstance(grads, Refused) for grads in results)


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


def other_shape(rank: int) -> nn.Module:
    """A layer that is wider on rank 1."""
    return nn.Linear(4, 4 + rank)


def other_count(rank: int) -> nn.Module:
    """A layer without a bias on rank 1."""
    return nn.Linear(4, 4, bias=rank == 0)


def other_dtype(rank: int) -> nn.Module:
    """A layer that is float64 on rank 1."""
    return nn.Linear(4, 4).to(torch.float64 if rank else torch.float32)


def other_frozen(rank: int) -> nn.Module:
    """A layer that is frozen on rank 1 but for its bias."""
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(rank == 0)
    return layer


@torch_fails
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (other_shape, ("weight", "rank 0: weight (shape [4, 4]", "rank 1: weight (shape [5, 4]")),
        (other_count, ("of 2, 1 parameters", "rank 0: bias (shape [4]", "rank 1: none")),
        (other_dtype, ("rank 0: weight (shape [4, 4]", "torch.float32", "torch.float64")),
        (other_frozen, ("weight (shape [4, 4]", "requires_grad=True", "requires_grad=False")),
    ],
)
def test_ddp_11_different_models(make: Callable[[int], nn.Module], words: tuple[str, ...]) -> None:
    """pytorch#76449: MismatchError on every rank, with the parameter and what it is on each rank.

    The group is as good as before: the right models can be wrapped with it.
    """

    def worker(rank: int, _: int) -> Refused:
        refusal = attempt(lambda: ddp_class()(make(rank)), pycomm.MismatchError)
        assert isinstance(refusal, Refused)
        training_step(ddp_class()(nn.Linear(4, 4)), rank)
        return refusal

    assert refused(run(2, worker, backend=BACKEND, wall=15, group_timeout=60), *words)


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
