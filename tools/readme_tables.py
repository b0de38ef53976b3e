"""Keeps README's generated tables equal to the code: ``readme_tables.py`` rewrites them, ``--check`` only compares.

A table stands between ``<!-- name -->`` and ``<!-- end -->``. Exit status 1: README was not up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from pycomm import config
from pycomm.extension import core

README = Path(__file__).parents[1] / "README.md"


def reductions() -> str:
    """Which dtypes each op reduces, from the core's own table."""
    table = core.support_table()
    ops = list(dict.fromkeys(op for known in table.values() for op in known))
    rows = [
        f"| `{dtype}` | {' | '.join('yes' if op in known else '-' for op in ops)} |"
        for dtype, known in table.items()
    ]
    return "\n".join([f"| dtype | {' | '.join(ops)} |", f"|---|{'---|' * len(ops)}", *rows])


TABLES: dict[str, Callable[[], str]] = {"variables": config.table, "reductions": reductions}


def updated(text: str) -> str:
    """The text with every marked table made anew."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, found = pattern.subn(lambda m, t=table: f"{m[1]}{t()}\n{m[2]}", text)
        if found != 1:
            raise SystemExit(
                f"README.md must have one <!-- {name} --> ... <!-- end -->, not {found}"
            )
    return text


def main(arguments: list[str]) -> int:
    text = README.read_text()
    new = updated(text)
    if "--check" not in arguments:
        README.write_text(new)
    return int(new != text)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
