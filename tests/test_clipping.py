"""pycomm.optim.clip_grad_norm_ against torch's, of the whole model in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from harness import G, attempt, near, refused, run, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from whole_modules import randn, whole_grad

import pycomm
from pycomm import tensor_parallel as tp
from pycomm.errors import InvalidArgument
from pycomm.optim import clip_grad_norm_

ORDERS = (1.0, 2.0, 3.5, math.inf)


class Model(nn.Module):
    """Split, replicated and padded parameters, of sizes that no world size divides."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.words: nn.Module = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.attention: nn.Module = nn.MultiheadAttention(6, 3, batch_first=True)
        self.up: nn.Module = nn.Linear(6, 7)
        self.down: nn.Module = nn.Linear(7, 6)
        if parallel:
            self.words = tp.VocabParallelEmbedding(11, 6, pad_to=4)
            self.attention = tp.ParallelMultiheadAttention(6, 3, batch_first=True)
            self.up = tp.ColumnParallelLinear(6, 7, gather_output=False, pad_to=3)
            self.down = tp.RowParallelLinear(7, 6, input_is_parallel=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, positions] to [batch, positions, 6]."""
        x = self.norm(self.words(ids))
        x = x + self.attention(x, x, x)[0]
        y: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return y


def trained(model: nn.Module, ids: torch.Tensor) -> nn.Module:
    """With gradients."""
    model.zero_grad()
    model(ids).pow(3).sum().backward()
    return model


def ids_of(seed: int, batch: int = 4) -> torch.Tensor:
    return torch.randint(0, 11, (batch, 5), generator=G(seed))


def check_like(
    ours: Iterable[tuple[str, torch.Tensor]], theirs: nn.Module, tol: float = 1e-9
) -> None:
    """Collective: the same gradients."""
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours:
        grad, whole = whole_grad(parameter), wanted[name].grad
        assert (grad is None) == (whole is None), name
        assert grad is None or whole is None or near(grad, whole, tol), name


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_tensor_parallel(n: int, backend: str) -> None:
    """Every order, clipped and not: norm and gradients of the whole model, the norm the same bits on all ranks."""

    def worker(rank: int, n: int) -> list[float]:
        plain = seeded(lambda: Model(False)).double()
        parallel = Model(True).double()
        parallel.load_state_dict(plain.state_dict())
        found = []
        for order in ORDERS:
            for most in (0.1, 1e9):
                for foreach in (None, True, False):
                    trained(plain, ids_of(1))
                    trained(parallel, ids_of(1))
                    wanted = nn.utils.clip_grad_norm_(plain.parameters(), most, order)
                    norm = clip_grad_norm_(parallel.parameters(), most, order, foreach=foreach)
                    assert norm.dtype == torch.float64
                    assert near(norm, wanted, 1e-9), (order, most)
                    check_like(parallel.named_parameters(), plain)
                    found.append(float(norm))
        return found

    found = run(n, worker, backend=backend)
    assert all(of_rank == found[0] for of_rank in found)


def test_sequence_parallel() -> None:
    """A norm's gradient, which is summed over the parts of the sequence, counts once."""

    def worker(rank: int, n: int) -> None:
        plain: Any = seeded(
            lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6))
        )
        norm: Any = tp.norm.norm_from(copy.deepcopy(plain[0]), None)
        parallel: Any = nn.Sequential(
            norm,
            tp.ColumnParallelLinear.from_linear(plain[1], gather_output=False, sequence_parallel=True),
            tp.RowParallelLinear.from_linear(plain[2], input_is_parallel=True, sequence_parallel=True),
        )  # fmt: skip
        x = randn(1, 2, 6, 6, dtype=torch.float32)
        plain(x).square().sum().backward()
        parallel(tp.scatter(x, dim=-2)).square().sum().backward()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert near(clip_grad_norm_(parallel.parameters(), 1.0), wanted, 1e-5)
        check_like(parallel.named_parameters(), plain, 1e-5)

    run(3, worker)


def test_in_one_process() -> None:
    """No group at all: torch's values; sparse, 16-bit, missing and empty gradients; a tensor instead of a list."""

    def worker(rank: int, n: int) -> None:
        for order in ORDERS:
            plain: Any = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
            trained(plain, randn(1, 2, 3, dtype=torch.float32))
            plain.extra = nn.Parameter(torch.ones(3))
            ours = copy.deepcopy(plain)
            for own, parameter in zip(ours.parameters(), plain.parameters(), strict=True):
                own.grad = None if parameter.grad is None else parameter.grad.clone()
            wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, order)
            norm = clip_grad_norm_(ours.parameters(), 0.5, order)
            assert norm.dtype == torch.float32
            assert near(norm, wanted)
            check_like(ours.named_parameters(), plain, 1e-6)
        sparse = nn.Embedding(4, 2, sparse=True)
        sparse(torch.tensor([1, 1, 3])).sum().backward()
        assert near(clip_grad_norm_(sparse.parameters(), 1.0), 10**0.5)
        assert sparse.weight.grad is not None
        assert near(sparse.weight.grad.to_dense()[1, 0], 2 / 10**0.5)
        empty, unused = nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(2))
        empty.grad = torch.empty(0)
        assert clip_grad_norm_([empty, unused], 1.0, math.inf) == 0
        assert clip_grad_norm_([], 1.0) == 0
        half = nn.Parameter(torch.zeros(4096, dtype=torch.float16))
        half.grad = torch.full((4096,), 2000.0, dtype=torch.float16)
        norm = clip_grad_norm_(half, 1.0)  # which float16 cannot hold
        assert norm == 128000
        assert half.grad[0] == torch.tensor(2000 / 128000, dtype=torch.float16)
        large = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        large.grad = torch.full((2,), 1e60, dtype=torch.float64)
        assert near(clip_grad_norm_([large] * 8, 1e99, 16.0), 1e60 * 2, 1e-9)
        for order in (0.0, -math.inf, -2.0, math.nan):
            bad = attempt(lambda o=order: clip_grad_norm_(half, 1.0, o), InvalidArgument)  # type: ignore[misc]
            assert refused([bad], "norm_type")

    run(1, worker, init=False)


def test_data_and_pipeline_groups() -> None:
    """Two stages of two tensor parallel ranks, and two replicas of two; a tied weight counts on one stage."""

    def worker(rank: int, n: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "tp"))
        other = mesh["other"]
        stage = other.get_local_rank()

        def of_mesh(module: Any) -> Any:
            made: Any = nn.Sequential(
                tp.ColumnParallelLinear.from_linear(module[0], group=mesh["tp"], gather_output=False),
                tp.RowParallelLinear.from_linear(module[1], group=mesh["tp"], input_is_parallel=True),
                copy.deepcopy(module[2]),
            )  # fmt: skip
            return made

        def layers() -> nn.Sequential:
            return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5)).double()

        plain: Any = seeded(lambda: nn.ModuleList([layers(), layers()]))
        plain[1][2].weight = plain[0][2].weight  # tied
        x = randn(3, 4, 5)
        plain[1](plain[0](x)).pow(3).sum().backward()
        own = of_mesh(plain[stage])
        with torch.no_grad():
            for (_, parameter), theirs in zip(
                own.named_parameters(), plain[stage].parameters(), strict=True
            ):
                layout = tp.layout.layout_of(parameter)
                whole = theirs.grad
                parameter.grad = whole.clone() if layout is None else layout.take(whole)
        for order in ORDERS:
            wanted = nn.utils.clip_grad_norm_(copy_with_grads(plain).parameters(), 0.1, order)
            ours = copy_with_grads(own)
            tied = [ours[2].weight] if stage == 1 else []
            norm = clip_grad_norm_(
                ours.parameters(), 0.1, order, pipeline_group=other, counted_elsewhere=tied
            )
            assert near(norm, wanted, 1e-9)
            factor = 0.1 / (float(wanted) + 1e-6)
            for clipped, before in zip(ours.parameters(), own.parameters(), strict=True):
                assert near(clipped.grad, before.grad * factor, 1e-9)

        model = pycomm.DistributedDataParallel(of_mesh(plain[0]), process_group=other.get_group())
        alone = copy.deepcopy(plain[0])
        alone.zero_grad()
        alone(x).pow(3).sum().div(4).backward()
        with model.no_sync():
            model(x[2 * stage :][:2]).pow(3).sum().div(2).backward()
        bad = attempt(
            lambda: clip_grad_norm_(model.parameters(), 0.1, data_group=other), RuntimeError
        )
        assert refused([bad], "average the gradients", f"rank {stage}")
        model.zero_grad()
        model(x[2 * stage :][:2]).pow(3).sum().div(2).backward()
        wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        norm = clip_grad_norm_(model.parameters(), 0.1, data_group=other)
        assert near(norm, wanted, 1e-9)
        check_like(model.module.named_parameters(), alone)

    run(4, worker, wall=60)


def copy_with_grads(module: Any) -> Any:
    """deepcopy drops gradients of parameters."""
    made = copy.deepcopy(module)
    for own, parameter in zip(made.parameters(), module.parameters(), strict=True):
        own.grad = parameter.grad.clone()
    return made


def test_what_is_not_finite() -> None:
    """One rank's part has it: all ranks' norm is that, and all raise if asked."""

    def worker(rank: int, n: int) -> None:
        layer = tp.ColumnParallelLinear(4, 6)
        for value in (math.nan, math.inf):
            for order in ORDERS:
                for parameter in layer.parameters():
                    parameter.grad = torch.ones_like(parameter)
                if rank == 1:
                    assert layer.weight.grad is not None
                    layer.weight.grad[0, 0] = value
                call: Callable[..., Any] = lambda o=order, **k: clip_grad_norm_(  # noqa: E731
                    layer.parameters(), 1.0, o, **k
                )
                bad = attempt(lambda c=call: c(error_if_nonfinite=True), pycomm.Error)  # type: ignore[misc]
                assert refused([bad], "cannot be clipped", str(value))
                assert str(float(call())) == str(value)

    run(2, worker)
    run(2, worker, backend="gloo")


def test_fsdp() -> None:
    """DTensors: sharded by FSDP2, and over tensor parallel ranks besides; sums that are still to be made."""

    def worker(rank: int, n: int) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

        plain: Any = seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)))
        x = randn(3, 4, 5, dtype=torch.float32)
        plain(x).pow(3).sum().backward()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sharded = copy.deepcopy(plain)
        both: Any = nn.Sequential(
            tp.ColumnParallelLinear.from_linear(plain[0], group=mesh["tp"], gather_output=False),
            nn.Tanh(),
            tp.RowParallelLinear.from_linear(plain[2], group=mesh["tp"], input_is_parallel=True),
        )
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        for model in (fully_shard(sharded, mesh=mesh["dp"]), fully_shard(both, mesh=mesh["dp"])):
            model.zero_grad()
            model(x).pow(3).sum().backward()
            assert near(clip_grad_norm_(model.parameters(), 0.1), wanted, 1e-5)
            grad = model[2].bias.grad.full_tensor()
            assert near(grad, plain[2].bias.grad, 1e-5)

        weight = nn.Parameter(distribute_tensor(torch.ones(2), mesh["dp"], [Replicate()]))
        weight.grad = DTensor.from_local(torch.ones(2), mesh["dp"], [Partial()])
        assert near(clip_grad_norm_(weight, 1.0), 8**0.5)
        assert near(weight.grad.full_tensor(), torch.full((2,), 0.5**0.5))

    run(4, worker, wall=60)
