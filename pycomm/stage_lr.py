"""Learning rates of stages, each by a signal of its own: a schedule, its gradients, its updates, or its own loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycomm.errors import InvalidArgument

Stage = nn.Module | Iterable[nn.Parameter]


class Signal(Protocol):
    """By what a stage's rate is to be multiplied. It has a state of numbers, which state_dict() saves."""

    #: What is measured for it: "gradient", "update" (both are norms relative to the weights'), "loss" or nothing.
    wants: str
    state: dict[str, float]

    def factor(self, step: int, measured: float) -> float:
        """Of the base rate, for the next step. `step` counts from 1; `measured` is NaN if there is nothing."""


class Schedule:
    """A function of the number of steps so far: 0 before the first one."""

    wants = ""

    def __init__(self, function: Callable[[int], float]) -> None:
        self.function, self.state = function, dict[str, float]()

    def factor(self, step: int, measured: float) -> float:
        """See Signal."""
        return self.function(step)


class _Towards:
    """Moves the factor so that what is measured, smoothed, comes towards a target, by at most `most` a step."""

    wants = ""

    def __init__(
        self,
        target: float,
        *,
        strength: float = 0.1,
        smoothing: float = 0.9,
        limits: tuple[float, float] = (0.1, 10.0),
    ) -> None:
        if not target > 0 or not 0 < strength <= 1 or not 0 <= smoothing < 1:
            raise InvalidArgument(
                f"target {target} must be positive, strength {strength} in (0, 1], smoothing {smoothing} in [0, 1)"
            )
        if not 0 < limits[0] <= limits[1]:
            raise InvalidArgument(f"limits must be positive, the smaller one first: {limits}")
        self.target, self.strength, self.smoothing, self.limits = (
            target,
            strength,
            smoothing,
            limits,
        )
        self.state = {"factor": 1.0, "seen": 0.0, "mean": 0.0}

    def factor(self, step: int, measured: float) -> float:
        """See Signal. What is not finite, as after an overflow, changes nothing."""
        state = self.state
        if math.isfinite(measured) and measured > 0:
            state["seen"] += 1
            state["mean"] += (1 - self.smoothing) * (math.log(measured) - state["mean"])
            mean = state["mean"] / (1 - self.smoothing ** state["seen"])  # it began at 0
            wanted = self._wanted(mean)
            low, high = self.limits
            state["factor"] = min(max(state["factor"] * wanted**self.strength, low), high)
        return state["factor"]

    def _wanted(self, log_mean: float) -> float:
        return self.target / math.exp(log_mean)


class UpdateRatio(_Towards):
    """So that a step changes the stage by about `target` of its weights' norm; 1e-3 is usual."""

    wants = "update"


class GradientNorm(_Towards):
    """So that rate times gradient norm over weight norm keeps about `target` times its first mean.

    A stage whose gradients are growing gets slower in proportion, and faster where they vanish.
    """

    wants = "gradient"

    def _wanted(self, log_mean: float) -> float:
        state = self.state
        state.setdefault("first", log_mean)
        return self.target * math.exp(state["first"] - log_mean) / state["factor"]


class OwnLoss:
    """Falls to `shrink` of itself whenever the stage's own loss has not been lower for `patience` steps."""

    wants = "loss"

    def __init__(self, patience: int = 10, shrink: float = 0.5, least: float = 1e-3) -> None:
        if patience < 1 or not 0 < shrink < 1 or not least > 0:
            raise InvalidArgument(
                f"patience {patience} must be 1 or more, shrink {shrink} in (0, 1), least {least} positive"
            )
        self.patience, self.shrink, self.least = patience, shrink, least
        self.state = {"factor": 1.0, "best": math.inf, "waited": 0.0}

    def factor(self, step: int, measured: float) -> float:
        """See Signal."""
        state = self.state
        if math.isfinite(measured):
            state["waited"] = 0.0 if measured < state["best"] else state["waited"] + 1
            state["best"] = min(state["best"], measured)
            if state["waited"] >= self.patience:
                state["factor"] = max(state["factor"] * self.shrink, self.least)
                state["waited"] = 0.0
        return state["factor"]


class StageLR:
    """Multiplies the learning rates of some stages, each by its own signal; the others keep theirs.

        adapt = StageLR(optimizer, {"head": (model.head, UpdateRatio(1e-3))})
        ...
        optimizer.step()
        adapt.step()                      # or adapt.step({"head": loss_of_the_head})

    stages: by a name of your own, a module or its parameters, and a Signal. The stages' parameters get groups of their
    own in the optimizer, with the options of those that they came from; a torch scheduler made after this multiplies
    the rates too, if it comes before this in each step. group: ranks that hold parts of each stage (tensor parallel):
    norms are over all of them. Norms and decisions are the same on data parallel ranks, since their gradients are.

    Raises InvalidArgument for parameters that the optimizer does not have, or that two stages share.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stages: Mapping[str, tuple[Stage, Signal]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.optimizer, self.group = optimizer, group
        self.steps = 0
        self._signals = {name: signal for name, (_, signal) in stages.items()}
        self._parameters = {name: _parameters_of(stage) for name, (stage, _) in stages.items()}
        self._check()
        for parameters in self._parameters.values():
            _separate(optimizer, parameters)
        self._factors = dict.fromkeys(stages, 1.0)
        self._measured = dict.fromkeys(stages, math.nan)
        self._before: dict[str, list[Tensor]] = {}
        self._apply()
        optimizer.register_step_pre_hook(self._look_before)
        optimizer.register_step_post_hook(self._look_after)

    def _check(self) -> None:
        there = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        taken: dict[int, str] = {}
        for name, parameters in self._parameters.items():
            for parameter in parameters:
                if id(parameter) not in there:
                    raise InvalidArgument(
                        f"the optimizer does not have all of {name!r}'s parameters"
                    )
                if taken.setdefault(id(parameter), name) != name:
                    raise InvalidArgument(
                        f"{taken[id(parameter)]!r} and {name!r} share a parameter"
                    )

    @property
    def factors(self) -> dict[str, float]:
        """By what each stage's rates are multiplied now."""
        return dict(self._factors)

    def step(self, losses: Mapping[str, float | Tensor] | None = None) -> None:
        """Sets the rates of the next step, by what was seen in the optimizer's last one; after optimizer.step().

        losses: of stages whose signal is OwnLoss. With `group`, collective.
        """
        given = dict(losses or {})
        if strangers := sorted(set(given) - set(self._signals)):
            raise InvalidArgument(f"there are no stages {strangers}, but {sorted(self._signals)}")
        for name, signal in self._signals.items():
            if signal.wants == "loss" and name in given:
                self._measured[name] = float(given[name])
        self.steps += 1
        self._apply()
        self._measured = dict.fromkeys(self._measured, math.nan)

    def state_dict(self) -> dict[str, Any]:
        """Numbers only: the steps, and each stage's factor and signal. The optimizer's own holds the rates."""
        return {
            "steps": self.steps,
            "factors": dict(self._factors),
            "signals": {name: dict(signal.state) for name, signal in self._signals.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After the optimizer's. Raises InvalidArgument if the stages have other names."""
        if set(state["signals"]) != set(self._signals):
            raise InvalidArgument(
                f"the state is of stages {sorted(state['signals'])}, these are {sorted(self._signals)}"
            )
        self.steps, self._factors = state["steps"], dict(state["factors"])
        for name, signal in self._signals.items():
            signal.state.clear()
            signal.state.update(state["signals"][name])

    def _apply(self) -> None:
        """A group's rate is divided by the old factor, so that what others have made of it stays."""
        before, self._factors = self._factors, {}
        for name, signal in self._signals.items():
            factor = self._factors[name] = signal.factor(self.steps, self._measured[name])
            if not 0 < factor < math.inf:
                raise InvalidArgument(f"the signal of {name!r} is {factor}, not a positive factor")
            for group in _groups_of(self.optimizer, self._parameters[name]):
                group["lr"] = group["lr"] / before[name] * factor

    # ---- what is measured in the optimizer's step

    @torch.no_grad()
    def _look_before(self, *_: Any) -> None:
        for name, signal in self._signals.items():
            parameters = self._parameters[name]
            if signal.wants == "update":
                self._before[name] = [parameter.detach().clone() for parameter in parameters]
            elif signal.wants == "gradient":
                gradients = [p.grad for p in parameters if p.grad is not None]
                self._measured[name] = self._ratio(gradients, parameters)

    @torch.no_grad()
    def _look_after(self, *_: Any) -> None:
        for name, before in self._before.items():
            now = [parameter.detach() for parameter in self._parameters[name]]
            changes = torch._foreach_sub(now, before)
            self._measured[name] = self._ratio(list(changes), before)
        self._before = {}

    def _ratio(self, some: list[Tensor], weights: list[Tensor] | list[nn.Parameter]) -> float:
        """Of the norms, over all ranks of the group."""
        squares = torch.tensor([_square(some), _square(weights)], dtype=torch.float64)
        if self.group is not None:
            dist.all_reduce(squares, group=self.group)
        above, below = squares.tolist()
        return math.sqrt(above / below) if below > 0 else math.nan


def _square(tensors: list[Tensor] | list[nn.Parameter]) -> float:
    if not tensors:
        return 0.0
    norms = torch._foreach_norm(list(tensors))
    return sum(float(norm) ** 2 for norm in norms)


def _parameters_of(stage: Stage) -> list[nn.Parameter]:
    found = list(stage.parameters() if isinstance(stage, nn.Module) else stage)
    if not found:
        raise InvalidArgument("a stage without parameters has no learning rate")
    return found


def _groups_of(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
) -> list[dict[str, Any]]:
    """Those that have some of these; looked up each time, as loading a state makes new ones."""
    wanted = {id(parameter) for parameter in parameters}
    return [g for g in optimizer.param_groups if any(id(p) in wanted for p in g["params"])]


def _separate(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Takes groups apart that have these and others."""
    wanted = {id(parameter) for parameter in parameters}
    for group in _groups_of(optimizer, parameters):
        own = [p for p in group["params"] if id(p) in wanted]
        if len(own) < len(group["params"]):
            group["params"] = [p for p in group["params"] if id(p) not in wanted]
            optimizer.param_groups.append({**group, "params": own})
