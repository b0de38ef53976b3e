"""The schedules that have a name, and what each of them takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pycomm.errors import InvalidArgument
from pycomm.pipeline.schedules.action import (
    Action,
    Limits,
    Schedule,
    looped,
    v_shaped,
)
from pycomm.pipeline.schedules.classic import gpipe, interleaved, looped_bfs, one_f_one_b
from pycomm.pipeline.schedules.v_shaped import dualpipev, zbv
from pycomm.pipeline.schedules.zero_bubble import zb_h1, zb_h2


@dataclass(frozen=True)
class Builder:
    """chunks: how many it takes, or None for any number; default: if nobody says; alternative: for other numbers."""

    programs: Callable[[int, int, int], tuple[list[list[Action]], Limits]]
    chunks: int | None
    default: int
    placement: Callable[[int, int], tuple[int, ...]] = looped
    alternative: str = ""


def _v(ranks: int, _chunks: int) -> tuple[int, ...]:
    return v_shaped(ranks)


BUILDERS = {
    "gpipe": Builder(gpipe, 1, 1, alternative="looped_bfs takes any number"),
    "1f1b": Builder(one_f_one_b, 1, 1, alternative="interleaved takes any number"),
    "interleaved": Builder(interleaved, None, 2),
    "looped_bfs": Builder(looped_bfs, None, 2),
    "zb_h1": Builder(zb_h1, None, 1),
    "zb_h2": Builder(zb_h2, 1, 1, alternative="zb_h1 takes any number, zbv 2"),
    "zbv": Builder(zbv, 2, 2, _v, "zb_h1 takes any number"),
    "dualpipev": Builder(dualpipev, 2, 2, _v, "interleaved and zb_h1 take any number"),
}


def named(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """One of BUILDERS, for so many chunks on each rank."""
    builder = BUILDERS[name]
    if builder.chunks not in (None, chunks):
        raise InvalidArgument(
            f"{name} has {builder.chunks} chunk(s) on each rank, not {chunks}: {builder.alternative}"
        )
    programs, limits = builder.programs(ranks, microbatches, chunks)
    placement = builder.placement(ranks, chunks)
    return Schedule(name, microbatches, placement, tuple(map(tuple, programs)), limits)
