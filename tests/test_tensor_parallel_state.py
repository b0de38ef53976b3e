"""State of parallel layers: saved by some ranks, loaded by others, bit for bit; from whole and from plain tensors."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import attempt, refused, run, seeded
from tensor_parallel_models import Gpt, Llama
from torch import nn
from whole_modules import check_same_parameters

from pycomm import checkpoint
from pycomm import tensor_parallel as tp
from pycomm.tensor_parallel import plans
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


# ---- of models that parallelize() has split -------------------------------------------------------------------------


PLANS: dict[str, Any] = {"gpt2": plans.gpt2(pad_to=4), "llama": plans.llama()}
MAKES: dict[str, Any] = {"gpt2": lambda: Gpt(width=10, heads=5), "llama": Llama}


def bits(state: dict[str, Any]) -> dict[str, bytes]:
    """So that -0.0 and NaN are what they are."""
    return {name: value.numpy().tobytes() for name, value in state.items()}


def odd_values(model: nn.Module) -> nn.Module:
    """With what arithmetic would change."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            flat[0], flat[1], flat[-1] = float("nan"), -0.0, 1e-42
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_resharding_of_models(tmp_path: Path, name: str) -> None:
    """2 ranks to 1 to 4, by torch.distributed.checkpoint; the optimizer's moments, too; tied weights stay one."""

    def worker(rank: int, n: int, source: str | None, target: str | None) -> Any:
        model: Any = seeded(MAKES[name])
        if source is not None:
            cleared(model)
        model = tp.parallelize(model, PLANS[name])
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        ids = torch.arange(12).view(2, 6)
        if source is None:
            model(ids).square().sum().backward()
            optimizer.step()
        else:
            checkpoint.load({"model": model}, source)
        if name == "gpt2":
            assert model.lm_head.weight is model.wte.weight
        if target is not None:
            checkpoint.save({"model": model}, target, 1)
        return bits(tp.gather_state_dict(model))

    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    saved = run(2, worker, None, two)
    assert run(1, worker, two, one) == saved[:1]
    assert run(4, worker, one, None) == saved[:1] * 4
    assert run(3, worker, two, None) == saved[:1] * 3


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_whole_states(name: str, n: int) -> None:
    """gather_state_dict() is the plain model's, bit for bit, and load_full_state_dict() takes it, at any degree."""

    def worker(rank: int, n: int) -> None:
        plain = odd_values(seeded(MAKES[name]))
        wanted = bits(plain.state_dict())
        model = tp.parallelize(copy.deepcopy(plain), PLANS[name])
        gathered = tp.gather_state_dict(model)
        assert bits(gathered) == wanted
        assert all(type(value) is torch.Tensor for value in gathered.values())
        other = tp.parallelize(cleared(seeded(MAKES[name])), PLANS[name])
        tp.load_full_state_dict(other, gathered)
        assert bits(tp.gather_state_dict(other)) == wanted
        again = cleared(seeded(MAKES[name]))
        again.load_state_dict(gathered)
        assert bits(again.state_dict()) == wanted
        kept = tp.gather_state_dict(model, rank=n - 1)
        assert bits(kept) == (wanted if rank == n - 1 else {})
        if n > 1:
            del gathered["norm.weight" if name == "llama" else "ln_f.weight"]
            assert refused(
                [attempt(lambda: tp.load_full_state_dict(other, gathered))], "Missing key"
            )
            tp.load_full_state_dict(other, gathered, strict=False)
            short = {name: value[:1] for name, value in gathered.items()}
            bad = attempt(lambda: tp.load_full_state_dict(other, short, strict=False))
            assert refused([bad], "size mismatch")

    run(n, worker)


def test_a_padded_part_as_large_as_the_whole() -> None:
    """Could be either, so load_state_dict() asks for the other way, which knows."""

    def worker(rank: int, n: int) -> None:
        plain = seeded(lambda: nn.Embedding(4, 3))
        model = tp.VocabParallelEmbedding.from_embedding(plain, pad_to=4)
        assert model.weight.shape == plain.weight.shape
        bad = attempt(lambda: model.load_state_dict(plain.state_dict()))
        assert refused([bad], "load_full_state_dict", "(4, 3)")
        model.load_state_dict(model.state_dict())  # this knows what it is
        cleared(model)
        tp.load_full_state_dict(model, plain.state_dict())
        assert torch.equal(tp.gather_state_dict(model)["weight"], plain.weight)
        assert not model.weight[2:].any()

    run(2, worker)
