"""State of parallel layers: saved by some ranks, loaded by others, bit for bit; from whole and from plain tensors."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import torch
from harness import run, seeded
from torch import nn
from whole_modules import check_same_parameters

from pycomm import checkpoint
from pycomm import tensor_parallel as tp
from pycomm.tensor_parallel.layout import layout_of


class Model(nn.Module):
    """One of each, of sizes that no world size divides; the parallel one has padding, too."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.words: nn.Module = nn.Embedding(11, 6)
        self.attention: nn.Module = nn.MultiheadAttention(6, 3)
        self.up: nn.Module = nn.Linear(6, 7)
        self.down: nn.Module = nn.Linear(7, 6)
        self.image: nn.Module = nn.Conv2d(5, 5, 2)
        self.norm = nn.LayerNorm(6)
        if parallel:
            self.words = tp.VocabParallelEmbedding(11, 6, pad_to=4)
            self.attention = tp.ParallelMultiheadAttention(6, 3)
            self.up = tp.ColumnParallelLinear(6, 7)
            self.down = tp.RowParallelLinear(7, 6)
            self.image = tp.ParallelConv2d(5, 5, 2, split="input")


def cleared(model: nn.Module) -> nn.Module:
    """The same with zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def test_resharding(tmp_path: Path) -> None:
    """Saved by 2 ranks, loaded by 1, and saved by that, loaded by 4 and 3: always the same bits."""

    def worker(rank: int, n: int, source: str | None, target: str | None) -> None:
        torch.manual_seed(rank + 10)  # nothing may come from here
        model = Model(parallel=True)
        if source is None:
            model.load_state_dict(seeded(lambda: Model(parallel=False)).state_dict())  # whole ones
            assert layout_of(model.up.weight) is not None  # type: ignore[arg-type]
        else:
            cleared(model)
            state = {"model": model, "random": tp.RandomState()}
            checkpoint.load(state, source)
            assert torch.rand(1) == seeded(lambda: torch.rand(2))[1]
        check_same_parameters(model, seeded(lambda: Model(parallel=False)))
        if target is not None:
            seeded(lambda: torch.rand(1))
            checkpoint.save({"model": model, "random": tp.RandomState()}, target, 1)

    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    run(2, worker, None, two)
    run(1, worker, two, one)
    run(4, worker, one, None)
    run(3, worker, one, None)


def test_a_plain_model_loads_a_parallel_ones_checkpoint(tmp_path: Path) -> None:
    """It has whole tensors under the plain model's names, without padding."""

    def save(rank: int, n: int) -> None:
        model = Model(parallel=True)
        model.load_state_dict(seeded(lambda: Model(parallel=False)).state_dict())
        checkpoint.save({"model": model}, tmp_path, 1)

    run(3, save)

    def load(rank: int, n: int) -> None:
        model = cleared(Model(parallel=False))
        checkpoint.load({"model": model}, tmp_path)
        wanted = seeded(lambda: Model(parallel=False)).state_dict()
        for name, value in model.state_dict().items():
            assert torch.equal(value, wanted[name]), name

    run(1, load)


def test_copies_of_the_state() -> None:
    """A copy of a state's part knows its place; a file per rank loads into the same split."""

    def worker(rank: int, n: int) -> None:
        model = Model(parallel=True)
        state = model.state_dict()
        for made in (copy.deepcopy(state), {k: v.detach().clone().cpu() for k, v in state.items()}):
            assert made["up.weight"].placement == layout_of(model.up.weight)  # type: ignore[arg-type]
            assert torch.equal(made["up.weight"].plain(), model.up.weight)  # type: ignore[arg-type]
        assert type(state["up.weight"] + 1) is torch.Tensor
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        other = cleared(Model(parallel=True))
        other.load_state_dict(torch.load(file))
        for name, parameter in other.named_parameters():
            assert torch.equal(parameter, dict(model.named_parameters())[name])

    run(2, worker)
