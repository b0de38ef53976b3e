"""Schedules that split backward, so that gradients of weights fill what would be bubbles (Qi et al. 2024)."""

from __future__ import annotations

from pycomm.pipeline.schedules.action import Action, Kind, Limits
from pycomm.pipeline.schedules.classic import backwards, forwards, groups_of, in_turn


def zb_h1(ranks: int, microbatches: int, chunks: int) -> tuple[list[list[Action]], Limits]:
    """The memory of 1F1B's first rank on all ranks, a third of its bubble; with chunks: interleaved zero bubble.

    Rank r starts like 1F1B, and runs each W r actions I after its own.
    """
    groups = groups_of(microbatches, ranks)
    ahead = [(chunks - 1) * groups[0] + ranks - 1 - rank for rank in range(ranks)]
    return _delayed(ranks, groups, chunks, ahead, list(range(ranks)))


def zb_h2(ranks: int, microbatches: int, chunks: int) -> tuple[list[list[Action]], Limits]:
    """No bubble while microbatches flow, for nearly twice the memory: forwards twice as far ahead, W twice as late."""
    ahead = [2 * (ranks - 1 - rank) for rank in range(ranks)]
    return _delayed(ranks, [microbatches], chunks, ahead, [2 * rank for rank in range(ranks)])


def _delayed(
    ranks: int, groups: list[int], chunks: int, ahead: list[int], delays: list[int]
) -> tuple[list[list[Action]], Limits]:
    """ahead: forwards before the first pair of F and I, of each rank. delays: how many I a W comes after its own."""
    programs, activations, weights = [], [], []
    count = sum(groups) * chunks
    for rank, delay in enumerate(delays):
        gradients = backwards(rank, ranks, groups, chunks, Kind.I)
        due = backwards(rank, ranks, groups, chunks, Kind.W)
        warm_up = min(ahead[rank], count)
        program, passed = [], 0
        for action in in_turn(forwards(rank, ranks, groups, chunks), gradients, warm_up):
            program.append(action)
            if action.kind == Kind.I:
                passed += 1
                if passed > delay:
                    program.append(due[passed - 1 - delay])
        programs.append(program + due[max(count - delay, 0) :])
        activations.append(min(warm_up + 1 + delay, count))
        weights.append(min(delay + 1, count))
    return programs, Limits(tuple(activations), tuple(weights))
