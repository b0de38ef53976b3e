"""Models cut into stages: at measured balance, by names, with what parts share; their parts are the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import G, attempt, run, seeded
from torch import Tensor, nn
from torch.nn import functional

import pycomm
from pycomm.pipeline import Pipeline, PipelineStage, split
from pycomm.pipeline.cut import Part, _balanced
from pycomm.pipeline.layers import layers_of


def sizes(parts: list[Part]) -> list[int]:
    return [len(part.layers) for part in parts]


def best(weights: list[float], stages: int) -> float:
    """The lightest heaviest stage, by trying all cuts."""
    if stages == 1:
        return sum(weights)
    return min(
        max(sum(weights[:cut]), best(weights[cut:], stages - 1))
        for cut in range(1, len(weights) - stages + 2)
    )


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_no_cut_is_better_balanced(count: int) -> None:
    chance = G(count)
    for _ in range(20):
        weights = torch.randint(0, 9, (count,), generator=chance).double().tolist()
        for stages in range(1, count + 1):
            starts = _balanced(weights, stages)
            assert starts[0] == 0
            assert sorted(set(starts)) == starts
            assert len(starts) == stages
            ends = [*starts[1:], count]
            heaviest = max(sum(weights[a:b]) for a, b in zip(starts, ends, strict=True))
            assert heaviest == best(weights, stages)


def test_parts_are_the_whole() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)), nn.BatchNorm1d(4))
    x = torch.randn(3, 4)
    for cut in (split(model, 3), split(model, ["2", "4"]), split(model, 1), split(model, 6)):
        value = x
        model.eval()
        for part in cut:
            value = part(value)
        assert torch.equal(value, model(x))
        states = [part.whole_state_dict() for part in cut]
        joined = {key: tensor for state in states for key, tensor in state.items()}
        assert sum(map(len, states)) == len(joined)
        assert joined.keys() == model.state_dict().keys()
    other = copy.deepcopy(model)
    cut = split(model, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for part in cut:
        part.load_whole_state_dict(other.state_dict())
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    with pytest.raises(pycomm.InvalidArgument, match=r"the state has no 0\.bias"):
        cut[0].load_whole_state_dict({"0.weight": torch.ones(4, 4)})


def test_balance_by_what_is_measured() -> None:
    """Bytes that backward keeps are the same everywhere; times are not, but 100 products are the longest layer."""

    class Long(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(100):
                x = x @ torch.eye(64)
            return x

    wide, thin = nn.Linear(64, 64), nn.Identity()
    model = nn.Sequential(Long(), thin, thin, thin)
    x = torch.ones(64, 64)
    assert sizes(split(model, 2, balance="time", sample_input=x)) == [1, 3]
    # Of equal parameters, but the first sees many rows.
    assert sizes(split(nn.Sequential(wide, nn.Linear(64, 64), nn.Linear(64, 64)), 2)) == [1, 2]
    gelu = nn.Sequential(nn.GELU(), nn.GELU(), nn.GELU(), thin, thin, thin)
    assert sizes(split(gelu, 3, balance="memory", sample_input=x)) == [1, 1, 4]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_cut() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for stages, why in (
        (3, "2 layers do not make 3 stages"),
        (0, "do not make 0 stages"),
        (["1", "x"], "there are no layers x; the model has 0, 1"),
        (["0"], "begin in the layers' order"),
    ):
        with pytest.raises(pycomm.InvalidArgument, match=why):
            split(model, stages)
    with pytest.raises(pycomm.InvalidArgument, match=r"Linear is no nn\.Sequential"):
        split(nn.Linear(4, 4), 1)
    with pytest.raises(pycomm.InvalidArgument, match="give a sample_input"):
        split(model, 2, balance="time")
    with pytest.raises(pycomm.InvalidArgument, match="params, time or memory, not 'all'"):
        split(model, 2, balance="all")
    with pytest.raises(pycomm.InvalidArgument, match="could not measure the layers: layer 0"):
        split(model, 2, balance="time", sample_input=torch.ones(3, 5))


def test_all_ranks_cut_as_rank_0_measured() -> None:
    """Also where it could not measure."""

    def worker(rank: int, n: int) -> Any:
        slow = nn.Sequential(*(nn.Linear(2 + rank, 2 + rank) for _ in range(6)))
        parts = split(slow, 2, balance="time", sample_input=torch.ones(3, 2 + rank))
        wrong = torch.ones(3, 9 if rank == 0 else 3)
        return sizes(parts), attempt(lambda: split(slow, 2, balance="memory", sample_input=wrong))

    (first, error), (second, same) = run(2, worker)
    assert first == second
    assert error.message == same.message


def tiny(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return seeded(lambda: transformers.GPT2LMHeadModel(config))
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return seeded(lambda: transformers.LlamaForCausalLM(config))


def next_letter(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers(kind: str) -> None:
    """GPT-2's output layer is its embedding: both stages' gradients are its sum."""
    whole = tiny(kind).double()
    ids = torch.randint(0, 50, (6, 9), generator=G(3))
    next_letter(whole(ids).logits, ids).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}

    def worker(rank: int, n: int) -> dict[str, Tensor | None]:
        part = split(tiny(kind).double(), n)[rank]
        assert set(part.tied) == ({"transformer.wte.weight"} if kind == "gpt2" else set())
        pipeline = Pipeline("1f1b", PipelineStage(part, rank, n), 3, loss_fn=next_letter)
        pipeline.step(ids, target=ids)
        return {part._whole[key]: p.grad for key, p in part.named_parameters()}

    results = run(2, worker)
    assert {name for found in results for name in found} == expected.keys()
    for found in results:
        for name, gradient in found.items():
            assert gradient is not None, name
            assert torch.allclose(gradient, expected[name], rtol=1e-9, atol=1e-12), name


def test_other_attentions_are_refused() -> None:
    model = tiny("llama")
    model.config._attn_implementation = "eager"
    with pytest.raises(pycomm.InvalidArgument, match="'sdpa'"):
        layers_of(model)
