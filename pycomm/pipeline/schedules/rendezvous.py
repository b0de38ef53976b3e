"""Checks a schedule's messages: each send has its receive, in the same order, and none waits for ever."""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest

from pycomm.errors import InvalidArgument
from pycomm.pipeline.schedules.action import (
    COMPUTE,
    SENDS,
    Action,
    Batch,
    Kind,
    Schedule,
    Step,
    actions_of,
    needs,
)
from pycomm.pipeline.schedules.lower import messages_of, peer_of

_TARGET = {Kind.SEND_F: (1, Kind.RECV_F), Kind.SEND_B: (-1, Kind.RECV_B)}


def check_messages(schedule: Schedule) -> None:
    """Messages are those that the computation needs, after what computes them and before what needs them.

    Between two ranks they are received in the order in which they are sent.
    """
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, program in enumerate(schedule.programs):
        for step in program:
            if isinstance(step, Batch) and not COMPUTE.isdisjoint(one.kind for one in step.actions):
                raise InvalidArgument(
                    f"{schedule.name}: rank {rank}: {step} is not of messages only"
                )
        actions = list(actions_of(program))
        _check_ends(schedule, rank, actions)
        for action in actions:
            if action.kind in SENDS:
                sent[rank, peer_of(action, schedule)].append(action)
            elif action.kind not in COMPUTE:
                received[peer_of(action, schedule), rank].append(action)
    for source, target in sorted(sent.keys() | received.keys()):
        pair = zip_longest(sent[source, target], received[source, target])
        for number, (send, receive) in enumerate(pair):
            if send is None or matching(send) != receive:
                raise InvalidArgument(
                    f"{schedule.name}: message {number} from rank {source} to rank {target} is sent as "
                    f"{send or 'nothing'} and received as {receive or 'nothing'}"
                )


def matching(send: Action) -> Action:
    """The receive of a send."""
    step, kind = _TARGET[send.kind]
    return Action(send.stage + step, kind, send.microbatch)


def _check_ends(schedule: Schedule, rank: int, actions: list[Action]) -> None:
    """Of one rank: every result is sent once and after it was computed, every need received once and before it."""
    position: dict[Action, int] = {}
    for index, action in enumerate(actions):
        if action in position:
            raise InvalidArgument(f"{schedule.name}: rank {rank}: {action} is there twice")
        position[action] = index
    expected: set[Action] = set()
    for action in actions:
        if action.kind not in COMPUTE:
            continue
        messages = messages_of(action, schedule)
        pairs = [(action, messages[0])] if messages else []
        for source in (one for group in needs(action, schedule.stages) for one in group[-1:]):
            incoming = messages_of(source, schedule)
            if incoming and source.stage != action.stage:
                pairs.append((incoming[1], action))
        for first, second in pairs:
            expected.update(one for one in (first, second) if one.kind not in COMPUTE)
            if first not in position or second not in position:
                missing = first if first not in position else second
                raise InvalidArgument(f"{schedule.name}: rank {rank}: {missing} is missing")
            if position[first] > position[second]:
                raise InvalidArgument(
                    f"{schedule.name}: rank {rank}: {second} comes before {first}, which it needs"
                )
    for action in actions:
        if action.kind not in COMPUTE and action not in expected:
            raise InvalidArgument(f"{schedule.name}: rank {rank}: nothing needs {action}")


def check_rendezvous(schedule: Schedule) -> None:
    """Plays the programs with sends that end only when their receive has started: every rank must finish."""
    at = [0] * schedule.ranks
    open_: list[list[Action]] = [_opened(program[0]) for program in schedule.programs]
    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(schedule.programs):
            for action in list(open_[rank]):
                peer = peer_of(action, schedule)
                if action.kind in SENDS and matching(action) in open_[peer]:
                    open_[rank].remove(action)
                    open_[peer].remove(matching(action))
                    moving = True
            while at[rank] < len(program) and not open_[rank]:
                at[rank] += 1
                moving = True
                if at[rank] < len(program):
                    open_[rank] = _opened(program[at[rank]])
    stuck = [rank for rank, program in enumerate(schedule.programs) if at[rank] < len(program)]
    if stuck:
        words = [f"rank {rank} in {schedule.programs[rank][at[rank]]}" for rank in stuck]
        raise InvalidArgument(
            f"{schedule.name}: a deadlock if sends wait for their receives: {', '.join(words)}"
        )


def _opened(step: Step) -> list[Action]:
    """The messages that a step starts and waits for."""
    actions = step.actions if isinstance(step, Batch) else (step,)
    return [action for action in actions if action.kind not in COMPUTE]
