"""The regions of tensor parallelism: values, gradients, second gradients, uneven parts, and what travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import G, attempt, refused, run
from torch.utils.checkpoint import checkpoint

import pycomm
from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel import all_gather, copy, gather, reduce, reduce_scatter, scatter
from pycomm.tensor_parallel.layout import Layout, Piece, split_counts
from pycomm.tensor_parallel.regions import copy_together

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def whole_numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sums and products of a few of them are exact in every dtype."""
    return torch.randint(-3, 4, shape, generator=G(seed)).to(dtype)


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Another tensor on each rank."""
    return whole_numbers(100 + rank, *shape, dtype=dtype)


def expected(name: str, n: int, rank: int, tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """What a region gives rank `rank`, from the inputs of all ranks."""
    if name == "copy":
        return tensors[rank]
    total = torch.stack(tensors).sum(0) if name.startswith("reduce") else tensors[rank]
    if name == "reduce":
        return total
    if name in ("gather", "all_gather"):
        return torch.cat(tensors, dim)
    return total.split(split_counts(total.shape[dim], n), dim)[rank]


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "copy": lambda x, dim: copy(x),
    "reduce": lambda x, dim: reduce(x),
    "gather": lambda x, dim: gather(x, dim=dim),
    "scatter": lambda x, dim: scatter(x, dim=dim),
    "reduce_scatter": lambda x, dim: reduce_scatter(x, dim=dim),
    "all_gather": lambda x, dim: all_gather(x, dim=dim),
}
BACKWARD = {
    "copy": "reduce",
    "reduce": "copy",
    "gather": "scatter",
    "scatter": "gather",
    "reduce_scatter": "all_gather",
    "all_gather": "reduce_scatter",
}


def inputs_of(name: str, n: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of all ranks; the parts of gathers are uneven. 7 is divided by none of the world sizes but 1."""
    shape = [5, 5, 5]
    counts = split_counts(7, n) if "gather" in name else [7] * n
    tensors = []
    for rank in range(n):
        shape[dim] = counts[rank]
        tensors.append(of_rank(0 if name in ("copy", "scatter") else rank, *shape, dtype=dtype))
    return tensors


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_values_and_gradients(n: int, backend: str) -> None:
    """Forward and backward are the two of a pair; also of tensors that are not contiguous."""

    def worker(rank: int, n: int) -> None:
        for name in CALLS:
            for dim in (0, 1, -1):
                for dtype in DTYPES:
                    inputs = inputs_of(name, n, dim, dtype)
                    x = inputs[rank].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
                    y = CALLS[name](x, dim)
                    assert torch.equal(y, expected(name, n, rank, inputs, dim)), (name, dim)
                    shapes = [expected(name, n, r, inputs, dim).shape for r in range(n)]
                    grads = [of_rank(50 + r, *shapes[r], dtype=dtype) for r in range(n)]
                    y.backward(grads[rank])
                    want = expected(BACKWARD[name], n, rank, grads, dim)
                    assert x.grad is not None
                    assert torch.equal(x.grad, want), (name, dim, dtype)

    run(n, worker, backend=backend)


@pytest.mark.parametrize("n", [2, 3])
def test_second_gradients(n: int) -> None:
    """The gradient of a gradient's square, against one process that computes all ranks' parts."""

    def cubed(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (weight * y**3).sum()

    def worker(rank: int, n: int) -> None:
        for name in CALLS:
            same_before = name in ("copy", "scatter")  # on all ranks, what enters
            same_after = name in ("reduce", "gather")  # and what follows
            inputs = inputs_of(name, n, 1, torch.float64)
            shapes = [expected(name, n, r, inputs, 1).shape for r in range(n)]
            weights = [of_rank(0 if same_after else r, *shapes[r]).double() for r in range(n)]
            x = inputs[rank].clone().requires_grad_()
            loss = cubed(CALLS[name](x, 1), weights[rank])
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            (second,) = torch.autograd.grad((first**2).sum(), x)

            leaves = [t.clone().requires_grad_() for t in inputs[: 1 if same_before else n]]
            every = leaves * n if same_before else leaves
            losses = [cubed(expected(name, n, r, every, 1), weights[r]) for r in range(n)]
            loss = torch.stack(losses[: 1 if same_after else n]).sum()
            firsts = torch.autograd.grad(loss, leaves, create_graph=True)
            squares = torch.stack([(f**2).sum() for f in firsts]).sum()
            seconds = torch.autograd.grad(squares, leaves)
            assert torch.equal(first, firsts[0 if same_before else rank]), name
            assert torch.equal(second, seconds[0 if same_before else rank]), name

    run(n, worker)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    """A forward that is run again in backward gives the same gradients."""

    def shared(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        part = torch.tanh(scatter(copy(x), dim=1) * w)
        return reduce(part @ part.t()) + gather(part, dim=1).sum()

    def worker(rank: int, n: int) -> None:
        x = whole_numbers(1, 4, 6).requires_grad_()
        w = of_rank(rank, 4, 3).requires_grad_()
        plain = torch.autograd.grad(shared(x, w).sum(), (x, w))
        again = checkpoint(shared, x, w, use_reentrant=reentrant)
        again.sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        assert torch.equal(x.grad, plain[0])
        assert torch.equal(w.grad, plain[1])

    run(2, worker)


def test_nothing_travels_without_need() -> None:
    """No gradient is summed for inputs that need none; weights' gradients travel together."""

    def worker(rank: int, n: int) -> None:
        x, w = torch.ones(3, 4), torch.ones(4, requires_grad=True)
        before = pycomm.stats()["operations"]
        (copy(x) * w).sum().backward()
        assert pycomm.stats()["operations"] == before
        a, b = torch.ones(4, requires_grad=True), torch.full((2, 2), 2.0, requires_grad=True)
        p, q = copy_together((a, b))
        ((p.sum() + q.sum()) * (rank + 1)).backward()
        assert pycomm.stats()["operations"] == before + 1
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, torch.full((4,), 3.0))
        assert torch.equal(b.grad, torch.full((2, 2), 3.0))

    run(2, worker)


def test_halves_are_summed_in_float32() -> None:
    """300 + 1 + 1 + 1 in bfloat16, whose steps are 2 there, is 304 when it is rounded once."""

    def worker(rank: int, n: int) -> float:
        x = torch.full((3,), 300.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        return float(reduce(x)[0])

    assert run(4, worker) == [304.0] * 4
    assert run(4, worker, backend="gloo") == [304.0] * 4


def test_groups() -> None:
    """Sub-groups, meshes, and what is not a group; counts that do not fit."""

    def worker(rank: int, n: int) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.full((2,), float(rank))
        assert reduce(x, mesh["tp"])[0] == (1.0 if rank < 2 else 5.0)
        assert reduce(x, mesh["dp"].get_group())[0] == (2.0 if rank % 2 == 0 else 4.0)
        assert refused([attempt(lambda: reduce(x, mesh), InvalidArgument)], "2 dimensions", "tp")
        bad = attempt(lambda: scatter(x, dim=0, counts=[1, 1]), InvalidArgument)
        assert refused([bad], f"rank {rank}", "[1, 1]", "(2,)")
        other = [0, 1] if rank > 1 else [2, 3]
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        outside = groups[other[0] // 2]
        return attempt(lambda: reduce(x, outside), (InvalidArgument, RuntimeError))

    assert refused(run(4, worker), "not a member")


def test_without_a_group() -> None:
    """A process on its own needs none."""

    def worker(rank: int, n: int) -> None:
        x = torch.ones(3)
        assert reduce(x) is x
        assert gather(x) is x

    run(1, worker, init=False)


def test_torch_compile() -> None:
    """A compiled function leaves its graph for a region; one that must not is refused."""

    def worker(rank: int, n: int) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            return reduce(copy(x * 2) + rank) * 3

        x = torch.ones(2, requires_grad=True)
        y = torch.compile(function, backend="eager")(x)
        y.sum().backward()
        assert torch.equal(y, torch.full((2,), 15.0))
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((2,), 12.0))
        torch.compiler.reset()
        whole = torch.compile(function, backend="eager", fullgraph=True)
        return attempt(lambda: whole(x), Exception)

    assert refused(run(2, worker, wall=60), "outside of compiled graphs")


def test_layouts() -> None:
    """Even and uneven, in units, of several pieces, and padded."""
    assert split_counts(10, 4) == [3, 3, 2, 2]
    assert split_counts(12, 4, unit=4) == [4, 4, 4, 0]
    assert refused([attempt(lambda: split_counts(10, 2, unit=4), InvalidArgument)], "units of 4")

    def worker(rank: int, n: int) -> None:
        group = pycomm.tensor_parallel.group.group_of()
        whole = torch.arange(60.0).view(15, 4)
        fused = Layout.fused(group, whole.shape, 0, [[3, 2], [3, 2], [3, 2]])
        begins, count = ((0, 5, 10), 3) if rank == 0 else ((3, 8, 13), 2)
        assert fused.own == tuple(Piece(begin, count) for begin in begins)
        local = fused.take(whole)
        assert local.shape == fused.local_shape() == ((9, 4), (6, 4))[rank]
        assert torch.equal(fused.gather(local), whole)
        padded = Layout.of_counts(group, whole.shape, 1, [3, 1], padding=2 * rank)
        local = padded.take(whole)
        assert local.shape == (15, 3)
        assert rank == 0 or not local[:, 1:].any()
        assert torch.equal(padded.gather(local), whole)

    run(2, worker)
