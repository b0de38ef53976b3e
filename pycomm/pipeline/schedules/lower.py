"""Inserts the messages between ranks into a schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from pycomm.pipeline.schedules.action import (
    COMPUTE,
    SENDS,
    Action,
    Batch,
    Kind,
    Program,
    Schedule,
    actions_of,
)
from pycomm.pipeline.schedules.costs import Costs
from pycomm.pipeline.schedules.simulate import simulate


class _Event(NamedTuple):
    """Where an action stands in the one order of all of them: messages before what starts at the same time."""

    time: float
    is_compute: bool
    pair: tuple[int, int]
    order: int
    rank: int
    action: Action


def peer_of(action: Action, schedule: Schedule) -> int:
    """The rank at a message's other end."""
    is_up = action.kind in (Kind.SEND_F, Kind.RECV_B)
    return schedule.placement[action.stage + (1 if is_up else -1)]


def messages_of(action: Action, schedule: Schedule) -> tuple[Action, Action] | None:
    """What brings an action's result to the next rank: the send and the receive; None if it stays on this rank."""
    stage, kind, microbatch = action
    is_forward = kind == Kind.F
    target = stage + 1 if is_forward else stage - 1
    if kind == Kind.W or not 0 <= target < schedule.stages:
        return None
    if schedule.placement[target] == schedule.placement[stage]:
        return None
    send, receive = (Kind.SEND_F, Kind.RECV_F) if is_forward else (Kind.SEND_B, Kind.RECV_B)
    return Action(stage, send, microbatch), Action(target, receive, microbatch)


def lower(schedule: Schedule) -> Schedule:
    """The same schedule with its messages, that cannot deadlock even if a send waits for its receive.

    All ranks run their parts of one order, which is that of a clock on which F, I and W of a stage take the same
    time: of what is not done yet, the first one never waits for anything later. Messages that cross between two ranks
    are a batch. A send stands right behind what computes it, so that a runtime may start messages there and wait only
    where it must.
    """
    plain = replace(
        schedule,
        programs=tuple(
            tuple(a for a in actions_of(program) if a.kind in COMPUTE)
            for program in schedule.programs
        ),
    )
    even = [1.0] * plain.stages
    played = simulate(plain, Costs(even, even, even))
    events: list[_Event] = []
    for rank, intervals in enumerate(played.intervals):
        for index, (action, start, end) in enumerate(intervals):
            events.append(_Event(start, True, (rank, rank), index, rank, action))
            messages = messages_of(action, plain)
            if messages:
                ends = (rank, plain.placement[messages[1].stage])
                pair = (min(ends), max(ends))
                events += [
                    _Event(end, False, pair, 2 * index + (rank > min(ends)), where, message)
                    for where, message in zip(ends, messages, strict=True)
                ]
    programs: list[list[Action]] = [[] for _ in plain.programs]
    for event in sorted(events):
        programs[event.rank].append(event.action)
    return replace(plain, programs=tuple(_batched(program, plain) for program in programs))


def _batched(program: list[Action], schedule: Schedule) -> Program:
    """With messages that follow one another and cross between this rank and another one put together."""

    def peer(action: Action) -> int:
        return -1 if action.kind in COMPUTE else peer_of(action, schedule)

    found: list[Action | Batch] = []
    for other, group in groupby(program, peer):
        actions = tuple(group)
        crosses = other >= 0 and len({action.kind in SENDS for action in actions}) == 2
        found += [Batch(actions)] if crosses else actions
    return tuple(found)
