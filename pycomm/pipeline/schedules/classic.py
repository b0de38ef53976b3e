"""Schedules with full backward passes: GPipe, 1F1B, interleaved 1F1B and looped breadth-first."""

from __future__ import annotations

from pycomm.pipeline.schedules.action import Action, Kind, Limits


def gpipe(ranks: int, microbatches: int, chunks: int) -> tuple[list[list[Action]], Limits]:
    """All forwards, then all backwards (Huang et al. 2019); looped breadth-first with one chunk."""
    return looped_bfs(ranks, microbatches, chunks)


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> tuple[list[list[Action]], Limits]:
    """All microbatches through a chunk before the next chunk (Lamy-Poirier 2023)."""
    groups = [microbatches]
    programs = [
        forwards(rank, ranks, groups, chunks) + backwards(rank, ranks, groups, chunks, Kind.B)
        for rank in range(ranks)
    ]
    return programs, Limits((microbatches * chunks,) * ranks, (0,) * ranks)


def one_f_one_b(ranks: int, microbatches: int, chunks: int) -> tuple[list[list[Action]], Limits]:
    """A backward as soon as there is one, then a forward and a backward in turn (Narayanan et al. 2019)."""
    programs, peaks = [], []
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank, microbatches)
        programs.append(
            in_turn(
                forwards(rank, ranks, [microbatches], chunks),
                backwards(rank, ranks, [microbatches], chunks, Kind.B),
                warm_up,
            )
        )
        peaks.append(min(warm_up + 1, microbatches))
    return programs, Limits(tuple(peaks), (0,) * ranks)


def interleaved(ranks: int, microbatches: int, chunks: int) -> tuple[list[list[Action]], Limits]:
    """1F1B whose ranks have several chunks, through which microbatches go in groups (Narayanan et al. 2021).

    Groups of as many as there are ranks if that divides the microbatches, else a bit larger ones.
    """
    groups = groups_of(microbatches, ranks)
    programs, peaks = [], []
    for rank in range(ranks):
        warm_up = min((chunks - 1) * groups[0] + 2 * (ranks - 1 - rank), microbatches * chunks)
        programs.append(
            in_turn(
                forwards(rank, ranks, groups, chunks),
                backwards(rank, ranks, groups, chunks, Kind.B),
                warm_up,
            )
        )
        peaks.append(min(warm_up + 1, microbatches * chunks))
    return programs, Limits(tuple(peaks), (0,) * ranks)


def groups_of(microbatches: int, ranks: int) -> list[int]:
    """The sizes of the groups that go through all chunks one after another: at least `ranks` each, larger ones first.

    No group is smaller than the number of ranks, because a microbatch takes as long to come back for its next chunk;
    all microbatches are one group if there are fewer.
    """
    count = max(1, microbatches // ranks)
    return [microbatches // count + (index < microbatches % count) for index in range(count)]


def forwards(rank: int, ranks: int, groups: list[int], chunks: int) -> list[Action]:
    """A rank's forwards: group by group, chunk by chunk, microbatch by microbatch."""
    return _by_groups(rank, ranks, groups, list(range(chunks)), Kind.F)


def backwards(rank: int, ranks: int, groups: list[int], chunks: int, kind: Kind) -> list[Action]:
    """A rank's B, I or W: group by group, the last chunk first."""
    return _by_groups(rank, ranks, groups, list(reversed(range(chunks))), kind)


def _by_groups(
    rank: int, ranks: int, groups: list[int], chunks: list[int], kind: Kind
) -> list[Action]:
    found: list[Action] = []
    first = 0
    for size in groups:
        for chunk in chunks:
            stage = rank + chunk * ranks
            found += [Action(stage, kind, first + index) for index in range(size)]
        first += size
    return found


def in_turn(forward: list[Action], backward: list[Action], warm_up: int) -> list[Action]:
    """So many forwards, then a forward and a backward in turn, then the backwards that are left."""
    program = forward[:warm_up]
    ahead = forward[warm_up:]
    for first, second in zip(ahead, backward, strict=False):
        program += [first, second]
    return program + backward[len(ahead) :]
