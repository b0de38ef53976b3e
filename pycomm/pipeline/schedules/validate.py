"""Checks that a schedule is complete, in order, within its limits, with messages that match and cannot deadlock."""

from __future__ import annotations

from collections import Counter

from pycomm.errors import InvalidArgument
from pycomm.pipeline.schedules.action import COMPUTE, Action, Kind, Schedule, actions_of, needs
from pycomm.pipeline.schedules.rendezvous import check_messages, check_rendezvous
from pycomm.pipeline.schedules.simulate import simulate


def validate(schedule: Schedule) -> None:
    """Raises InvalidArgument, which names rank and action, unless a schedule would do every microbatch's work once.

    That every rank finishes is checked without messages if there are none, else with sends that wait for their
    receives.
    """
    check_placement(schedule)
    check_complete(schedule)
    check_order(schedule)
    simulate(schedule)
    if any(a.kind not in COMPUTE for program in schedule.programs for a in actions_of(program)):
        check_messages(schedule)
        check_rendezvous(schedule)
    check_limits(schedule)


def check_placement(schedule: Schedule) -> None:
    """Every stage has a rank, every rank as many stages, and actions are of a stage of their rank."""
    counts = Counter(schedule.placement)
    if set(counts) != set(range(schedule.ranks)) or len(set(counts.values())) != 1:
        raise InvalidArgument(
            f"{schedule.name}: stages are placed on ranks {schedule.placement}, which must be the same "
            f"number on each of the {schedule.ranks} ranks"
        )
    for rank, program in enumerate(schedule.programs):
        for action in actions_of(program):
            if not 0 <= action.stage < schedule.stages:
                raise _wrong(schedule, rank, f"{action} is of none of the {schedule.stages} stages")
            if schedule.placement[action.stage] != rank:
                home = schedule.placement[action.stage]
                raise _wrong(schedule, rank, f"{action} belongs to rank {home}")
            if not 0 <= action.microbatch < schedule.microbatches:
                count = schedule.microbatches
                raise _wrong(schedule, rank, f"{action} is of none of the {count} microbatches")


def check_complete(schedule: Schedule) -> None:
    """Every stage runs one F of every microbatch, and either one B or one I and one W."""
    for rank in range(schedule.ranks):
        counts = Counter(schedule.compute(rank))
        for action, count in counts.items():
            if count > 1:
                raise _wrong(schedule, rank, f"{action} is there {count} times")
        for stage in schedule.stages_of(rank):
            for microbatch in range(schedule.microbatches):
                kinds = {k for k in COMPUTE if Action(stage, k, microbatch) in counts}
                if kinds not in ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}):
                    has = " ".join(sorted(kinds)) or "nothing"
                    raise _wrong(
                        schedule,
                        rank,
                        f"stage {stage} has {has} of microbatch {microbatch}, not F B or F I W",
                    )


def check_order(schedule: Schedule) -> None:
    """On every rank an action comes after those of the same rank that it needs."""
    for rank in range(schedule.ranks):
        done: set[Action] = set()
        for action in schedule.compute(rank):
            for group in needs(action, schedule.stages):
                is_here = schedule.placement[group[0].stage] == rank
                if is_here and not done.intersection(group):
                    names = " or ".join(map(str, group))
                    raise _wrong(schedule, rank, f"{action} comes before {names}, which it needs")
            done.add(action)


def check_limits(schedule: Schedule) -> None:
    """No rank holds more activations, or has more W due, than the schedule's limits; nothing if it has none."""
    if schedule.limits is None:
        return
    played = simulate(schedule)
    for what, found, allowed in (
        ("activations", played.peak_activations, schedule.limits.activations),
        ("W that are due", played.peak_weights, schedule.limits.weights),
    ):
        if len(allowed) != schedule.ranks:
            raise InvalidArgument(
                f"{schedule.name}: limits of {what} are of {len(allowed)} ranks, not {schedule.ranks}"
            )
        for rank, (peak, limit) in enumerate(zip(found, allowed, strict=True)):
            if peak > limit:
                raise _wrong(schedule, rank, f"{peak} {what} at once, but the limit is {limit}")


def _wrong(schedule: Schedule, rank: int, what: str) -> InvalidArgument:
    return InvalidArgument(f"{schedule.name}: rank {rank}: {what}")
