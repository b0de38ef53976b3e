"""Schedules for two stages per rank in a V: half of the model goes down the ranks, the other half comes back.

A rank's program is a few phases: how often, and which actions. F0 is the forward of the stage on the way down, F1 of
the one on the way back, and so on; each takes its next microbatch. W0 and W1 are the W longest due of that stage, W
of both.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from pycomm.pipeline.schedules.action import Action, Kind, Limits

Phase: TypeAlias = tuple[int, str]


def zbv(ranks: int, microbatches: int, _chunks: int) -> tuple[list[list[Action]], Limits]:
    """No bubble while microbatches flow if F, I and W take the same time, with 1F1B's memory (Qi et al. 2024).

    Fewer microbatches than 2 ranks - 1 run like the first ones of that many.
    """
    count, full = max(microbatches, 2 * ranks - 1), 2 * microbatches
    programs = []
    for rank in range(ranks):
        behind = ranks - rank
        phases = [
            (2 * behind - 1, "F0"),
            (rank, "F1 F0"),
            (behind, "F1 I1 W1"),
            (count - 2 * ranks + 1 + rank, "F0 I0 W0 F1 I1 W1"),
            (behind - 1, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (behind, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ]
        programs.append(_play(rank, ranks, phases, microbatches))
    activations = (min(2 * ranks, full),) * ranks
    return programs, Limits(activations, tuple(min(2 * rank + 1, full) for rank in range(ranks)))


def dualpipev(ranks: int, microbatches: int, _chunks: int) -> tuple[list[list[Action]], Limits]:
    """Forwards paired with backwards of the other direction, for messages of one to hide behind the other (DeepSeek).

    Only the last backwards are split. Fewer microbatches than 2 ranks run like the first ones of that many.
    """
    count, full = max(microbatches, 2 * ranks), 2 * microbatches
    programs = []
    for rank in range(ranks):
        behind = ranks - 1 - rank
        last = [f"{'BI'[index > rank]}{1 - index % 2}" for index in range(2 * (rank + 1))]
        phases = [
            (2 * behind, "F0"),
            (rank + 1, "F0 F1"),
            (behind, "I1 W1 F1"),
            (count - 2 * ranks + 1 + rank, "F0 B1 F1 B0"),
            (behind, "B1 F1 B0"),
            (1, " ".join(last)),
            (behind, "W I0"),
            (rank + 1, "W"),
        ]
        programs.append(_play(rank, ranks, phases, microbatches))
    activations = (min(2 * ranks + 1, full),) * ranks
    return programs, Limits(activations, tuple(min(rank + 1, full) for rank in range(ranks)))


def _play(rank: int, ranks: int, phases: list[Phase], microbatches: int) -> list[Action]:
    """Without the actions of microbatches that do not exist: what is left of a schedule for more of them is one."""
    stages = (rank, 2 * ranks - 1 - rank)
    passed: Counter[tuple[int, str]] = Counter()
    due: list[Action] = []
    program: list[Action] = []
    for count, actions in phases:
        for token in actions.split() * count:
            kind = token[0]
            if kind == "W":
                which = stages[int(token[1])] if token[1:] else None
                action = next(one for one in due if which in (None, one.stage))
                due.remove(action)
            else:
                stage = stages[int(token[1])]
                order = (stage, "F" if kind == "F" else "B")
                action = Action(stage, Kind(kind), passed[order])
                passed[order] += 1
                if kind == "I":
                    due.append(Action(stage, Kind.W, action.microbatch))
            program.append(action)
    return [action for action in program if action.microbatch < microbatches]
