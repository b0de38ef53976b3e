"""Makes a schedule by its name."""

from __future__ import annotations

from collections.abc import Sequence

from pycomm.errors import InvalidArgument
from pycomm.pipeline.schedules.action import Schedule, check_count
from pycomm.pipeline.schedules.auto import auto
from pycomm.pipeline.schedules.costs import Costs
from pycomm.pipeline.schedules.named import BUILDERS, named

#: The names that build() knows.
NAMES = (*BUILDERS, "auto")


def build(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
) -> Schedule:
    """A schedule of any number of ranks and microbatches, without messages: see lower().

    chunks: stages per rank. None: 2 for interleaved, looped_bfs, zbv and dualpipev; as many as costs are given for,
    or 1 or 2, for auto; 1 for others. costs, memory: for auto only, which makes the shortest schedule that it finds
    for these costs among those whose activations weigh at most `memory` on each rank (a number, or one per rank;
    None: no limit).
    """
    if name not in NAMES:
        raise InvalidArgument(f"there is no schedule {name!r}, but: {', '.join(NAMES)}")
    check_count("ranks", ranks)
    check_count("microbatches", microbatches)
    if chunks is not None:
        check_count("chunks", chunks)
    if name == "auto":
        return auto(ranks, microbatches, chunks, costs or Costs(), memory)
    if costs is not None or memory is not None:
        raise InvalidArgument(f"{name} is the same for all costs and memory: only auto takes them")
    return named(name, ranks, microbatches, chunks or BUILDERS[name].default)
