"""Rates of stages follow their own signals, leave the others alone, and go on after a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import run
from torch import nn
from torch.optim.lr_scheduler import StepLR

import pycomm
from pycomm.optim import GradientNorm, OwnLoss, Schedule, StageLR, UpdateRatio

SGD = torch.optim.SGD


def three() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))


def rates(optimizer: torch.optim.Optimizer, model: nn.ModuleList) -> list[float]:
    """Of each layer."""
    found = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    return [found[id(layer.weight)] for layer in model]


def give_gradients(model: nn.ModuleList, factors: list[float]) -> None:
    """Such a multiple of each layer's weights."""
    for layer, factor in zip(model, factors, strict=True):
        weight = layer.get_parameter("weight")
        weight.grad = factor * weight.detach()


def test_a_schedule_for_one_stage() -> None:
    """The others keep their rate; a scheduler of torch's multiplies all of them."""
    model = three()
    optimizer = SGD(model.parameters(), 0.5, momentum=0.9)
    adapt = StageLR(optimizer, {"middle": (model[1], Schedule(lambda step: 1 / (1 + step)))})
    halves = StepLR(optimizer, 2, 0.5)
    found = []
    for _ in range(4):
        found.append(rates(optimizer, model))
        give_gradients(model, [1, 1, 1])
        optimizer.step()
        halves.step()
        adapt.step()
    assert found == [
        [0.5, 0.5, 0.5], [0.5, 0.25, 0.5], [0.25, pytest.approx(0.25 / 3), 0.25], [0.25, pytest.approx(0.25 / 4), 0.25],
    ]  # fmt: skip
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.9]


def test_updates_come_towards_their_target() -> None:
    """One layer's gradients are 100 times the others': its updates end at the target, theirs do not."""
    model = three()
    optimizer = SGD(model.parameters(), 0.01)
    adapt = StageLR(optimizer, {"last": (model[2], UpdateRatio(1e-3, limits=(1e-4, 1e4)))})
    for _ in range(200):
        give_gradients(model, [1, 1, 100])
        before = [layer.get_parameter("weight").detach().clone() for layer in model]
        optimizer.step()
        adapt.step()
    ratios = [
        float((layer.get_parameter("weight").detach() - old).norm() / old.norm())
        for layer, old in zip(model, before, strict=True)
    ]
    assert ratios == pytest.approx([1e-2, 1e-2, 1e-3], rel=0.02)
    assert rates(optimizer, model)[:2] == [0.01, 0.01]


def test_growing_gradients_slow_their_stage() -> None:
    model = three()
    optimizer = SGD(model.parameters(), 1e-9)
    signal = GradientNorm(1.0, strength=1.0, smoothing=0.5)
    adapt = StageLR(optimizer, {"first": (model[0].parameters(), signal)})
    for factor in (1, 1, 1):
        give_gradients(model, [factor, 7, 7])
        optimizer.step()
        adapt.step()
    assert adapt.factors["first"] == pytest.approx(1.0)
    for _ in range(30):
        give_gradients(model, [4, 7, 7])
        optimizer.step()
        adapt.step()
    assert adapt.factors["first"] == pytest.approx(0.25, rel=1e-3)
    give_gradients(model, [math.inf, 7, 7])
    optimizer.step()
    adapt.step()
    assert adapt.factors["first"] == pytest.approx(0.25, rel=1e-3)  # an overflow says nothing


def test_a_loss_of_its_own() -> None:
    model = three()
    optimizer = SGD(model.parameters(), 1.0)
    adapt = StageLR(optimizer, {"head": (model[2], OwnLoss(patience=2, shrink=0.5))})
    found = []
    for loss in (3.0, 2.0, 2.5, 2.0, 1.0, math.nan, 1.5, torch.tensor(1.5)):
        optimizer.step()
        adapt.step({"head": loss})
        found.append(rates(optimizer, model)[2])
    adapt.step()
    assert found == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]
    assert rates(optimizer, model) == [1, 1, 0.25]
    with pytest.raises(pycomm.InvalidArgument, match=r"no stages \['tail'\]"):
        adapt.step({"tail": 1.0})


def make(model: nn.ModuleList) -> tuple[torch.optim.Optimizer, StageLR]:
    optimizer = SGD(model.parameters(), 0.1)
    signals: dict[str, Any] = {
        "a": (model[0], UpdateRatio(1e-3)),
        "b": (model[1], OwnLoss(2)),
        "c": (model[2], GradientNorm(1.0)),
    }
    return optimizer, StageLR(optimizer, signals)


def test_it_goes_on_after_a_checkpoint() -> None:
    def train(
        model: nn.ModuleList, optimizer: torch.optim.Optimizer, adapt: StageLR, steps: range
    ) -> None:
        for step in steps:
            give_gradients(model, [1, 1, 1 + step])
            optimizer.step()
            adapt.step({"b": 5.0})

    model = three()
    optimizer, adapt = make(model)
    train(model, optimizer, adapt, range(6))
    saved = [x.state_dict() for x in (model, optimizer, adapt)]
    again = three()
    other, goes_on = make(again)
    for thing, state in zip((again, other, goes_on), saved, strict=True):
        thing.load_state_dict({**state})  # type: ignore[attr-defined]
    for one in ((model, optimizer, adapt), (again, other, goes_on)):
        train(*one, range(6, 10))
    assert rates(other, again) == rates(optimizer, model)
    assert adapt.factors == goes_on.factors
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    with pytest.raises(pycomm.InvalidArgument, match="the state is of stages"):
        goes_on.load_state_dict({**saved[2], "signals": {}})


def test_shards_decide_together() -> None:
    """Ranks with parts of a stage get the factor of the whole."""

    def worker(rank: int, n: int) -> float:
        layer = nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            layer.weight.fill_(1.0 + rank)
        optimizer = SGD(layer.parameters(), 0.1)
        group = torch.distributed.group.WORLD
        adapt = StageLR(optimizer, {"part": (layer, UpdateRatio(1e-3))}, group)
        layer.weight.grad = torch.full((2, 3), 3.0 * rank)
        optimizer.step()
        adapt.step()
        return adapt.factors["part"]

    first, second = run(2, worker)
    ratio = math.sqrt(6 * 0.3**2 / (6 * 1 + 6 * 4))
    assert first == second == pytest.approx((1e-3 / ratio) ** 0.1, rel=1e-5)


def test_what_cannot_be() -> None:
    model, other = three(), three()
    optimizer = SGD(model.parameters(), 0.1)
    for stages, why in (
        ({"a": (other, OwnLoss())}, "does not have all of 'a'"),
        ({"a": (model, OwnLoss()), "b": (model[0], OwnLoss())}, "'a' and 'b' share"),
        ({"a": (nn.Tanh(), OwnLoss())}, "without parameters"),
        ({"a": (model[0], Schedule(lambda step: -1.0))}, "not a positive factor"),
    ):
        with pytest.raises(pycomm.InvalidArgument, match=why):
            StageLR(optimizer, stages)
    for bad in (
        lambda: UpdateRatio(0.0),
        lambda: UpdateRatio(1.0, strength=2.0),
        lambda: UpdateRatio(1.0, limits=(2.0, 1.0)),
        lambda: OwnLoss(0),
        lambda: OwnLoss(shrink=1.0),
    ):
        with pytest.raises(pycomm.InvalidArgument):
            bad()
