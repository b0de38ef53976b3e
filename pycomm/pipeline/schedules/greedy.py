"""Makes a schedule action by action on a clock, by given costs and within a rank's memory: list scheduling."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from pycomm.pipeline.schedules.action import Action, Kind
from pycomm.pipeline.schedules.costs import StageCosts


@dataclass(frozen=True)
class Policy:
    """What a rank prefers when it is free. W come last: they fill the time in which nothing else is there.

    forward_first: F before backward; of several stages the one later in the model. split: I and W, else B. due: as
    many W at most, then one comes first. patience: for which part of a W's time a rank rather idles if it knows that
    something else arrives by then.
    """

    forward_first: bool = False
    split: bool = True
    due: int | None = None
    patience: float = 0.0


class Greedy:
    """One run: programs() has the result.

    Microbatches pass each stage in order. A stage's F runs only if its rank keeps room for one microbatch in all its
    later stages: then the oldest microbatch can always go on, whatever else waits for memory.
    """

    def __init__(
        self,
        placement: tuple[int, ...],
        microbatches: int,
        costs: StageCosts,
        memory: list[float],
        policy: Policy,
    ) -> None:
        """memory: what the activations of each rank may weigh."""
        self._placement, self._microbatches = placement, microbatches
        self._costs, self._memory, self._policy = costs, memory, policy
        self._ranks = max(placement) + 1
        self._stages_of: list[list[int]] = [[] for _ in range(self._ranks)]
        for stage, rank in enumerate(placement):
            self._stages_of[rank].append(stage)
        self._reserve = [
            sum(costs.activation[s] for s in self._stages_of[rank] if s >= stage)
            for stage, rank in enumerate(placement)
        ]
        stages = len(placement)
        self._next = {kind: [0] * stages for kind in (Kind.F, Kind.I, Kind.W)}
        self._ready: dict[tuple[Kind, int, int], float] = {
            (Kind.F, 0, microbatch): 0.0 for microbatch in range(microbatches)
        }
        self._free = [0.0] * self._ranks
        self._held = [0.0] * self._ranks
        self._due = [0] * self._ranks
        self._programs: list[list[Action]] = [[] for _ in range(self._ranks)]
        self._wake: list[tuple[float, int]] = [(0.0, rank) for rank in range(self._ranks)]

    def programs(self) -> list[list[Action]]:
        """Runs the clock to the end."""
        while self._wake:
            now, rank = heapq.heappop(self._wake)
            if self._free[rank] <= now:
                action = self._choose(rank, now)
                if action is not None:
                    self._run(rank, action, now)
        return self._programs

    def _choose(self, rank: int, now: float) -> Action | None:
        """What runs now, or None to wait."""
        policy = self._policy
        if policy.due is not None and self._due[rank] >= policy.due:
            return self._oldest_due(rank)
        kinds = (Kind.F, Kind.I) if policy.forward_first else (Kind.I, Kind.F)
        for kind in kinds:
            for stage in reversed(self._stages_of[rank]):
                if self._arrival(rank, kind, stage) <= now:
                    return self._action(kind, stage)
        if not self._due[rank]:
            return None
        due = self._oldest_due(rank)
        until = now + policy.patience * self._costs.weight[due.stage]
        waits = any(
            self._arrival(rank, kind, stage) < until
            for kind in kinds
            for stage in self._stages_of[rank]
        )
        return None if waits else due

    def _oldest_due(self, rank: int) -> Action:
        done, given = self._next[Kind.W], self._next[Kind.I]
        microbatch, stage = min((done[s], -s) for s in self._stages_of[rank] if done[s] < given[s])
        return Action(-stage, Kind.W, microbatch)

    def _arrival(self, rank: int, kind: Kind, stage: int) -> float:
        """When the stage's next F or I can run, as far as is known: infinity if not, or if there is no room."""
        found = self._ready.get((kind, stage, self._next[kind][stage]), float("inf"))
        if kind == Kind.F:
            room = self._memory[rank] * (1 + 1e-9) - self._held[rank]
            if room < self._reserve[stage]:
                return float("inf")
        return found

    def _action(self, kind: Kind, stage: int) -> Action:
        is_full = kind == Kind.I and not self._policy.split
        return Action(stage, Kind.B if is_full else kind, self._next[kind][stage])

    def _run(self, rank: int, action: Action, now: float) -> None:
        stage, kind, microbatch = action
        end = now + self._costs.of(action)
        self._programs[rank].append(action)
        self._free[rank] = end
        for counted in (Kind.I, Kind.W) if kind == Kind.B else (kind,):
            self._next[counted][stage] += 1
        self._due[rank] += {Kind.I: 1, Kind.W: -1}.get(kind, 0)
        weight = self._costs.activation[stage]
        self._held[rank] += {Kind.F: weight, Kind.I: 0.0}.get(kind, -weight)
        last = len(self._placement) - 1
        if kind == Kind.F:
            target, of = (stage + 1, Kind.F) if stage < last else (stage, Kind.I)
        else:
            target, of = stage - 1, Kind.I
        if kind != Kind.W and target >= 0:
            peer = self._placement[target]
            arrival = end + (self._costs.transfer if peer != rank else 0.0)
            self._ready[of, target, microbatch] = arrival
            heapq.heappush(self._wake, (arrival, peer))
        heapq.heappush(self._wake, (end, rank))
