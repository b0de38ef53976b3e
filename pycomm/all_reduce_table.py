"""Which algorithm an all_reduce takes up to which size, as text and in a file, in place of what the core has.

    64K:one_shot,8M:two_shot,ring        # up to 64 KiB, up to 8 MiB, and above

A file has such a table in each line, behind the number of ranks that it was measured with; # begins a comment:

    2 64K:one_shot,two_shot
    8 16K:one_shot,two_shot
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ALGORITHMS: Final = ("one_shot", "two_shot", "ring")
MOST_LINES: Final = 8
NO_LIMIT: Final = 2**63 - 1
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

#: Sizes in bytes that grow, the last one NO_LIMIT, and what is taken up to each.
Table = list[tuple[int, str]]


def of_text(text: str, world_size: int) -> Table:
    """The table that a setting means for so many ranks: itself, or after @ a file's; empty for an empty one.

    Raises ValueError, in words, for what is no table, and for a file that cannot be read or has none.
    """
    if not text.startswith("@"):
        return _parse(text) if text else []
    path = Path(text[1:])
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    tables = by_ranks(lines)
    if not tables:
        raise ValueError(f"{path} has no table; `python -m pycomm.bench --tune {path}` writes one")
    return tables[nearest(tables, world_size)]


def by_ranks(lines: Iterable[str]) -> dict[int, Table]:
    """A file's tables by number of ranks. Raises ValueError with a line's number."""
    tables: dict[int, Table] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not words[0].isdecimal():
            raise ValueError(f"line {number} is not a number of ranks and a table: {line!r}")
        tables[int(words[0])] = _parse(words[1])
    return tables


def nearest(known: Iterable[int], ranks: int) -> int:
    """Of these numbers of ranks, the smallest that is not below, else the largest."""
    ordered = sorted(known)
    return next((one for one in ordered if one >= ranks), ordered[-1])


def to_text(table: Table) -> str:
    """The inverse of what of_text() reads."""
    return ",".join(a if limit == NO_LIMIT else f"{_words(limit)}:{a}" for limit, a in table)


def _parse(text: str) -> Table:
    parts = text.split(",")
    table: Table = []
    for index, part in enumerate(parts):
        size, colon, algorithm = part.strip().rpartition(":")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"{part!r} names none of {', '.join(ALGORITHMS)}")
        if bool(colon) == (index == len(parts) - 1):
            raise ValueError(
                f"{text!r}: all but the last algorithm have the size in bytes up to which they are taken"
            )
        table.append((_bytes(size) if colon else NO_LIMIT, algorithm))
    sizes = [size for size, _ in table]
    if sizes != sorted(set(sizes)) or len(table) > MOST_LINES:
        raise ValueError(f"{text!r}: sizes must grow, in {MOST_LINES} parts at most")
    return table


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,12})([KMG]?)", text)
    if not found:
        raise ValueError(f"{text!r} is no size like 4096, 64K or 8M, powers of 1024")
    return int(found[1]) * _UNITS[found[2]]


def _words(size: int) -> str:
    for unit in "GMK":
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)
