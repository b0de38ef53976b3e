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
from pycomm.pipeline.schedules import NAMES, Costs, Schedule, build, simulate

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


def schedules() -> str:
    """Pipeline schedules of 4 ranks and 8 microbatches, played with several costs."""
    even = Costs()
    others = [Costs(1, 1.2, 0.8), Costs(1, 2, 0.5), Costs(transfer=0.1)]

    def row(name: str, of: Callable[[Costs], Schedule]) -> str:
        played = simulate(of(even))
        cells = [name, str(played.schedule.chunks), " ".join(map(str, played.peak_activations))]
        cells += [f"{max(played.peak_memory):.3g}", f"{max(played.peak_weights)}"]
        cells += [f"{played.makespan:.4g}", f"{played.bubble:.3g}", f"{played.span_bubble:.3g}"]
        cells += [f"{simulate(of(costs), costs).makespan:.4g}" for costs in others]
        return f"| {' | '.join(cells)} |"

    kinds = [(name, None) for name in NAMES if name != "auto"]
    kinds[3:3] = [("interleaved", 4)]
    kinds[6:6] = [("zb_h1", 2)]
    rows = [
        row(name, lambda _, name=name, chunks=chunks: build(name, 4, 8, chunks))
        for name, chunks in kinds
    ]
    for words, memory in (("auto", None), ("auto, memory 4", 4.0), ("auto, memory 2", 2.0)):
        rows.append(row(words, lambda costs, m=memory: build("auto", 4, 8, costs=costs, memory=m)))
    heads = ["schedule", "stages per rank", "activations, of stages", "memory", "W due"]
    heads += ["makespan", "bubble", "by span", "F, I, W = 1, 1.2, 0.8", "1, 2, 0.5"]
    heads += ["messages take 0.1"]
    return "\n".join([f"| {' | '.join(heads)} |", f"|---{'|---:' * (len(heads) - 1)}|", *rows])


TABLES: dict[str, Callable[[], str]] = {
    "variables": config.table,
    "reductions": reductions,
    "schedules": schedules,
}


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
