"""Makes a schedule by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pycomm.errors import InvalidArgument
from pycomm.pipeline.schedules.action import (
    Action,
    Limits,
    Schedule,
    check_count,
    looped,
    v_shaped,
)
from pycomm.pipeline.schedules.classic import gpipe, interleaved, looped_bfs, one_f_one_b
from pycomm.pipeline.schedules.v_shaped import dualpipev, zbv
from pycomm.pipeline.schedules.zero_bubble import zb_h1, zb_h2


@dataclass(frozen=True)
class _Builder:
    """chunks: that it takes, or None for any number; alternative: for other numbers."""

    programs: Callable[[int, int, int], tuple[list[list[Action]], Limits]]
    chunks: int | None
    default: int
    placement: Callable[[int, int], tuple[int, ...]] = looped
    alternative: str = ""


def _v(ranks: int, _chunks: int) -> tuple[int, ...]:
    return v_shaped(ranks)


_BUILDERS = {
    "gpipe": _Builder(gpipe, 1, 1, alternative="looped_bfs takes any number"),
    "1f1b": _Builder(one_f_one_b, 1, 1, alternative="interleaved takes any number"),
    "interleaved": _Builder(interleaved, None, 2),
    "looped_bfs": _Builder(looped_bfs, None, 2),
    "zb_h1": _Builder(zb_h1, None, 1),
    "zb_h2": _Builder(zb_h2, 1, 1, alternative="zb_h1 takes any number, zbv 2"),
    "zbv": _Builder(zbv, 2, 2, _v, "zb_h1 takes any number"),
    "dualpipev": _Builder(dualpipev, 2, 2, _v, "interleaved and zb_h1 take any number"),
}

#: The names that build() knows.
NAMES = (*_BUILDERS,)


def build(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A schedule of any number of ranks and microbatches, without messages: see lower().

    chunks: stages per rank; 2 if None for interleaved, looped_bfs, zbv and dualpipev, else 1.
    """
    builder = _BUILDERS.get(name)
    if builder is None:
        raise InvalidArgument(f"there is no schedule {name!r}, but: {', '.join(NAMES)}")
    chunks = builder.default if chunks is None else chunks
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        check_count(what, value)
    if builder.chunks not in (None, chunks):
        raise InvalidArgument(
            f"{name} has {builder.chunks} chunk(s) on each rank, not {chunks}: {builder.alternative}"
        )
    programs, limits = builder.programs(ranks, microbatches, chunks)
    placement = builder.placement(ranks, chunks)
    return Schedule(name, microbatches, placement, tuple(map(tuple, programs)), limits)
