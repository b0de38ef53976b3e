"""Public reports about pipelines, as checks: cases PIPE-01, PIPE-03 and PIPE-05."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from harness import G, run, seeded
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pycomm.pipeline import Pipeline, PipelineStage
from pycomm.pipeline.schedules import NAMES, build


def mlp(layers: int) -> nn.Sequential:
    make: list[Callable[[], nn.Module]] = [lambda: nn.Linear(6, 6), nn.Tanh] * layers
    return seeded(lambda: nn.Sequential(*(one() for one in make[:layers]))).double()


def data(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    chance = G(seed)
    x, y = (torch.randn(rows, 6, generator=chance, dtype=torch.float64) for _ in range(2))
    return x, y


def same_gradients(own: nn.Module, other: nn.Module) -> bool:
    pairs = zip(own.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(p.grad, q.grad, rtol=1e-12, atol=1e-15) for p, q in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [2, 3])
def test_pipe_01_fewer_microbatches_than_stages(n: int) -> None:
    """1F1B hung with one microbatch; here every schedule gives the unsplit model's gradients."""

    def worker(rank: int, n: int) -> list[str]:
        wrong = []
        x, y = data(60)
        for name in NAMES:
            for microbatches in range(1, 6):
                schedule = build(name, n, microbatches)
                full = mlp(2 * schedule.stages)
                whole = deepcopy(full)
                mse_loss(whole(x), y).backward()
                own = {i: full[2 * i : 2 * i + 2] for i in schedule.stages_of(rank)}
                stages = [PipelineStage(part, i, schedule.stages) for i, part in own.items()]
                inputs = x if rank == schedule.placement[0] else None
                target = y if rank == schedule.placement[-1] else None
                Pipeline(schedule, stages, loss_fn=mse_loss).step(inputs, target=target)
                if not all(same_gradients(p, whole[2 * i : 2 * i + 2]) for i, p in own.items()):
                    wrong.append(f"{name}, {microbatches} microbatches")
        return wrong

    assert run(n, worker) == [[]] * n


@pytest.mark.parametrize("sizes", [(4, 4), (4, 4, 4), (4, 2), (4, 8)])
def test_pipe_03_steps_add_up(sizes: tuple[int, ...]) -> None:
    """Each step used to divide what earlier ones had left; another batch size crashed."""

    def worker(rank: int, n: int) -> bool:
        full = mlp(4)
        whole = deepcopy(full)
        part = full[2 * rank : 2 * rank + 2]
        pipeline = Pipeline("1f1b", PipelineStage(part, rank, n), 2, loss_fn=mse_loss)
        for seed, rows in enumerate(sizes):
            x, y = data(rows, seed)
            pipeline.step(x if rank == 0 else None, target=y if rank == n - 1 else None)
            mse_loss(whole(x), y).backward()
        return same_gradients(part, whole[2 * rank : 2 * rank + 2])

    assert run(2, worker) == [True, True]


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), x > 0, torch.arange(x.shape[0])


class Masked(nn.Module):
    """Whose output depends on its input in one microbatch only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        assert (mask.dtype, ids.dtype) == (torch.bool, torch.long)
        y: Tensor = self.linear(h if len(h) == 2 else torch.ones_like(h)) * mask
        return y


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_pipe_05_outputs_without_gradient(name: str) -> None:
    """Masks and ids go on as they are; where a microbatch has no gradient, nobody waits for one."""

    def worker(rank: int, n: int) -> bool:
        parts = seeded(lambda: [Masks().double(), Masked().double()])
        whole = deepcopy(parts)
        x, y = data(3)
        for begin, end in ((0, 2), (2, 3)):
            loss = mse_loss(whole[1](*whole[0](x[begin:end])), y[begin:end])
            (loss * (end - begin) / 3).backward()
        pipeline = Pipeline(name, PipelineStage(parts[rank], rank, n), 2, loss_fn=mse_loss)
        pipeline.step(x if rank == 0 else None, target=y if rank else None)
        return same_gradients(parts[rank], whole[rank])

    assert run(2, worker) == [True, True]
