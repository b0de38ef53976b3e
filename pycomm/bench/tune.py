"""A table of algorithms by size from what was measured, in the file that PYCOMM_ALL_REDUCE=@FILE reads."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pycomm.all_reduce_table import ALGORITHMS, MOST_LINES, NO_LIMIT, Table, by_ranks, to_text

#: An algorithm takes over where it is faster than the one before by more than this.
GAIN: Final = 1.05


def table_of(times: Mapping[int, Mapping[str, float]]) -> Table:
    """From times by bytes and algorithm: each is taken up to the last size at which it was still the best.

    Sizes in between count for the one before. What another one gains by less than 5 % is taken for noise. Of more than
    MOST_LINES lines, those that span the smallest ratio of sizes are left to their neighbours.
    """
    sizes = sorted(times)
    current = min(times[sizes[0]], key=lambda name: times[sizes[0]][name])
    table: Table = []
    for before, size in zip([sizes[0], *sizes], sizes, strict=False):
        best = min(times[size], key=lambda name: times[size][name])
        if times[size][current] > GAIN * times[size][best]:
            table.append((before, current))
            current = best
    table.append((NO_LIMIT, current))
    while len(table) > MOST_LINES:
        spans = [after[0] / before[0] for before, after in pairwise(table[:-1])]
        at = 1 + spans.index(min(spans))
        del table[at]
        if table[at - 1][1] == table[at][1]:
            del table[at - 1]
    return table


def times_of(record: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """From a run's record: medians of pycomm's algorithms, in microseconds."""
    found: dict[int, dict[str, float]] = {}
    for row in record["rows"]:
        for side in row["sides"]:
            backend, _, algorithm = side["backend"].partition(":")
            if backend == "pycomm" and algorithm in ALGORITHMS and "median_us" in side:
                found.setdefault(row["bytes"], {})[algorithm] = side["median_us"]
    return found


def write(path: Path, ranks: int, table: Table, about: str) -> None:
    """Into the file, in place of an earlier line for as many ranks; others stay. ValueError if it is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    by_ranks(lines)
    kept = [line for line in lines if line.split("#")[0].split()[:1] != [str(ranks)]]
    path.write_text("\n".join([*kept, f"{ranks} {to_text(table)}  # {about}"]) + "\n")
