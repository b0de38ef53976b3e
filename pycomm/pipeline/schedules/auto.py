"""Looks for the shortest schedule for given costs and memory: among those with a name, and those of a greedy clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

from pycomm.errors import InvalidArgument
from pycomm.pipeline.schedules.action import Action, Kind, Limits, Schedule, looped, v_shaped
from pycomm.pipeline.schedules.costs import Costs, StageCosts
from pycomm.pipeline.schedules.greedy import Greedy, Policy
from pycomm.pipeline.schedules.named import BUILDERS, named
from pycomm.pipeline.schedules.simulate import Simulation, simulate

#: Actions that all greedy schedules of one search may have together: a few seconds.
_EFFORT = 300_000
#: How many of the best get a second look.
_FINALISTS = 4
_SLACK = 1 + 1e-9


def auto(
    ranks: int,
    microbatches: int,
    chunks: int | None,
    costs: Costs,
    memory: float | Sequence[float] | None,
) -> Schedule:
    """The shortest found; of equally short ones that with the least memory, then with fewer stages.

    The same for the same arguments, on every machine: ranks that agree on costs agree on the schedule.
    """
    counts = _chunk_counts(ranks, chunks, costs)
    limits = _memory_of_ranks(ranks, memory)
    found: list[Simulation] = []
    for count in counts:
        placements = _placements(ranks, count, costs, limits)
        found += _of_names(ranks, microbatches, count, costs, limits)
        found += _of_greed(placements, microbatches, costs, limits, _EFFORT // len(counts))
    found.sort(key=_rank_of)
    best = min((_merged(one, costs) for one in found[:_FINALISTS]), key=_rank_of)
    held = Limits(best.peak_activations, best.peak_weights)
    return replace(best.schedule, name=f"auto ({best.schedule.name})", limits=held)


def _rank_of(played: Simulation) -> tuple[float, float, int]:
    """Without the last digits, in which sums of the same numbers differ."""
    return (
        float(f"{played.makespan:.9g}"),
        float(f"{max(played.peak_memory):.9g}"),
        played.schedule.stages,
    )


def _chunk_counts(ranks: int, chunks: int | None, costs: Costs) -> list[int]:
    if costs.stages is None:
        return [1, 2] if chunks is None else [chunks]
    if costs.stages % ranks or chunks not in (None, costs.stages // ranks):
        wanted = "a multiple" if chunks is None else f"{chunks} times as many"
        raise InvalidArgument(
            f"costs are for {costs.stages} stages, but {ranks} ranks need {wanted} of that number: "
            "cut the model into as many, or give costs as one number of a whole rank"
        )
    return [costs.stages // ranks]


def _memory_of_ranks(ranks: int, memory: float | Sequence[float] | None) -> list[float]:
    if memory is None:
        return [float("inf")] * ranks
    if not isinstance(memory, Sequence):
        return [float(memory)] * ranks
    if len(memory) != ranks:
        raise InvalidArgument(f"memory is given for {len(memory)} ranks, not for {ranks}")
    return [float(one) for one in memory]


def _placements(
    ranks: int, chunks: int, costs: Costs, limits: list[float]
) -> list[tuple[int, ...]]:
    """Those with which each rank can hold one microbatch in all its stages, else nothing would ever come back."""
    all_of_them = [looped(ranks, chunks)]
    if chunks == 2 and ranks > 1:
        all_of_them.append(v_shaped(ranks))
    weights = costs.of_stages(ranks * chunks, chunks).activation
    needed = [_needed(placement, weights) for placement in all_of_them]
    short = [
        [rank for rank in range(ranks) if need[rank] > limits[rank] * _SLACK] for need in needed
    ]
    found = [placement for placement, of in zip(all_of_them, short, strict=True) if not of]
    if not found:
        rank = short[0][0]
        raise InvalidArgument(
            f"rank {rank} may hold {limits[rank]:g}, but one microbatch's activations weigh "
            f"{needed[0][rank]:g} in its stages: give it more memory, smaller microbatches, or activation checkpointing"
        )
    return found


def _needed(placement: tuple[int, ...], weights: list[float]) -> list[float]:
    """What one microbatch weighs on each rank."""
    needed = [0.0] * (max(placement) + 1)
    for rank, weight in zip(placement, weights, strict=True):
        needed[rank] += weight
    return needed


def _fits(played: Simulation, limits: list[float]) -> bool:
    return all(p <= limit * _SLACK for p, limit in zip(played.peak_memory, limits, strict=True))


def _of_names(
    ranks: int, microbatches: int, chunks: int, costs: Costs, limits: list[float]
) -> Iterator[Simulation]:
    for name, builder in BUILDERS.items():
        if builder.chunks in (None, chunks):
            played = simulate(named(name, ranks, microbatches, chunks), costs)
            if _fits(played, limits):
                yield played


def _of_greed(
    placements: list[tuple[int, ...]],
    microbatches: int,
    costs: Costs,
    limits: list[float],
    effort: int,
) -> Iterator[Simulation]:
    """By several policies, each with all the memory and with less: ranks that run too far ahead disturb others."""
    ranks, stages = len(limits), len(placements[0])
    of_stages = costs.of_stages(stages, stages // ranks)
    each = [_needed(placement, of_stages.activation) for placement in placements]
    ahead = sorted({min(count, microbatches) for count in (ranks, 2 * ranks - 1, microbatches)})
    spent = 0
    for policy, count, (placement, needed) in product(
        _policies(of_stages), ahead, list(zip(placements, each, strict=True))
    ):
        if spent > effort:
            return
        memory = [min(limit, count * max(needed)) for limit in limits]
        programs = Greedy(placement, microbatches, of_stages, memory, policy).programs()
        spent += sum(map(len, programs))
        schedule = Schedule("greedy", microbatches, placement, tuple(map(tuple, programs)))
        yield simulate(schedule, costs)


def _policies(costs: StageCosts) -> list[Policy]:
    """Those that most often win, which is what a search that must be short begins with."""
    pays = any(b < i + w for b, i, w in zip(costs.full, costs.input, costs.weight, strict=True))
    found = []
    for patience, due, first in product((0.0, 0.5), (None, 2), (False, True)):
        found.append(Policy(first, due=due, patience=patience))
        if pays and due is None and not patience:
            found.append(Policy(first, split=False))
    return found


def _merged(played: Simulation, costs: Costs) -> Simulation:
    """With an I and its W that follow one another as one B, where that takes no longer.

    Everywhere, or else in the first stage, for whose I nobody waits.
    """
    schedule = played.schedule
    for last in (schedule.stages - 1, 0):
        programs = [_merge(schedule.compute(rank), last) for rank in range(schedule.ranks)]
        again = simulate(replace(schedule, programs=tuple(map(tuple, programs))), costs)
        if _rank_of(again) <= _rank_of(played):
            return again
    return played


def _merge(program: list[Action], last: int) -> list[Action]:
    """In stages up to the last one."""
    found: list[Action] = []
    skip = False
    for action, following in pairwise([*program, Action(-1, Kind.W, -1)]):
        if skip:
            skip = False
            continue
        stage, kind, microbatch = action
        skip = kind == Kind.I and stage <= last and following == Action(stage, Kind.W, microbatch)
        found.append(Action(stage, Kind.B, microbatch) if skip else action)
    return found
