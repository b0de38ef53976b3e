"""Plays a schedule on a clock: when each action runs, how long ranks idle, what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pycomm.errors import InvalidArgument
from pycomm.pipeline.schedules.action import Action, Kind, Schedule, needs
from pycomm.pipeline.schedules.costs import Costs, StageCosts


class Interval(NamedTuple):
    """An action and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule's times, rank by rank, and what follows from them. Bubbles are in the costs' unit of time.

    Messages travel in the background, each as soon as it is computed, and take `transfer`; they do not hinder each
    other.
    """

    schedule: Schedule
    intervals: tuple[tuple[Interval, ...], ...]
    costs: StageCosts

    @property
    def makespan(self) -> float:
        """From the first action's start to the last one's end."""
        return max(program[-1].end for program in self.intervals)

    @property
    def work(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(one.end - one.start for one in rank) for rank in self.intervals)

    @property
    def bubble(self) -> float:
        """The makespan without the work of the busiest rank: what a step takes longer than at best."""
        return self.makespan - max(self.work)

    @property
    def span_bubble(self) -> float:
        """From a rank's first start to its last end without its work; of the rank that idles longest.

        It is the papers' on zero bubbles: waiting for the first microbatch does not count, nor after the last one.
        """
        spans = [rank[-1].end - rank[0].start for rank in self.intervals]
        return max(span - work for span, work in zip(spans, self.work, strict=True))

    @property
    def efficiency(self) -> float:
        """The part of all ranks' time that they compute."""
        return sum(self.work) / (self.makespan * len(self.work)) if self.makespan else 1.0

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """The most activations that each rank holds at once: microbatches in stages, from F to the end of B or W."""
        return tuple(int(max(levels)) for levels in self._levels(_IN_FLIGHT, None))

    @property
    def peak_weights(self) -> tuple[int, ...]:
        """The most W that each rank has due at once."""
        return tuple(int(max(levels)) for levels in self._levels(_DUE, None))

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each rank's activations weigh at once, by the costs' `activation`."""
        return tuple(max(levels) for levels in self._levels(_IN_FLIGHT, self.costs.activation))

    def _levels(self, steps: dict[Kind, int], weights: list[float] | None) -> list[list[float]]:
        found = []
        for rank in self.intervals:
            level, levels = 0.0, [0.0]
            for action, _, _ in rank:
                weight = weights[action.stage] if weights else 1
                level += steps.get(action.kind, 0) * weight
                levels.append(level)
            found.append(levels)
        return found


_IN_FLIGHT = {Kind.F: 1, Kind.B: -1, Kind.W: -1}
_DUE = {Kind.I: 1, Kind.W: -1}


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Plays a schedule, with or without its messages; costs: F, I and W take 1 per rank each, messages no time.

    Raises InvalidArgument for one whose ranks wait for each other: see validate().
    """
    stage_costs = (costs or Costs()).of_stages(schedule.stages, schedule.chunks)
    programs = [schedule.compute(rank) for rank in range(schedule.ranks)]
    if not all(programs):
        raise InvalidArgument(f"{schedule.name}: rank {programs.index([])} computes nothing")
    done: dict[Action, float] = {}
    intervals: list[list[Interval]] = [[] for _ in programs]
    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(programs):
            ran = intervals[rank]
            while len(ran) < len(program):
                action = program[len(ran)]
                arrival = _arrival(action, schedule, done, stage_costs.transfer)
                if arrival is None:
                    break
                start = max(arrival, ran[-1].end if ran else 0.0)
                done[action] = end = start + stage_costs.of(action)
                ran.append(Interval(action, start, end))
                moving = True
    stuck = [rank for rank, program in enumerate(programs) if len(intervals[rank]) < len(program)]
    if stuck:
        words = [f"rank {rank} at {programs[rank][len(intervals[rank])]}" for rank in stuck]
        raise InvalidArgument(f"{schedule.name}: ranks wait for each other: {', '.join(words)}")
    return Simulation(schedule, tuple(map(tuple, intervals)), stage_costs)


def _arrival(
    action: Action, schedule: Schedule, done: dict[Action, float], transfer: float
) -> float | None:
    """When all is there that the action needs; None if something was not computed yet."""
    latest = 0.0
    for group in needs(action, schedule.stages):
        ends = [(one, done[one]) for one in group if one in done]
        if not ends:
            return None
        source, end = ends[0]
        is_local = schedule.placement[source.stage] == schedule.placement[action.stage]
        latest = max(latest, end if is_local else end + transfer)
    return latest
