"""Keeps generated parts of README and docs/ equal to the code: ``readme_tables.py`` rewrites, ``--check`` compares.

A part stands between ``<!-- name -->`` and ``<!-- end -->``. Exit status 1: a page was not up to date; it is named.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

from pycomm import compression, config, errors
from pycomm.bench.settings import parser
from pycomm.extension import core
from pycomm.pipeline.schedules import NAMES, Costs, Schedule, build, simulate

ROOT = Path(__file__).parents[1]


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


def operations() -> str:
    """What a communicator does, and which of the two does it: every method of a call that has a deadline."""
    rows = []
    for name in sorted(vars(core.Communicator)):
        text = getattr(core.Communicator, name).__doc__ or ""
        signature, _, about = text.partition("\n")
        if name.startswith("_") or "timeout: datetime.timedelta" not in signature:
            continue
        has = [hasattr(kind, name) for kind in (core.Communicator, core.NcclCommunicator)]
        cells = [f"`{name}`", *("yes" if h else "-" for h in has), " ".join(about.split())]
        rows.append(f"| {' | '.join(cells)} |")
    heads = "| operation | CPU tensors, shared memory | CUDA tensors, NCCL | what it does |"
    return "\n".join([heads, "|---|---|---|---|", *rows])


def compressors() -> str:
    """The compressors that have a name, and what they cost."""
    rows = []
    for name, kind in compression.NAMED.items():
        one = kind()
        about = " ".join((kind.__doc__ or "").split())
        cells = [f'`"{name}"`', f"`{kind.__name__}`", f"{one.ratio:.3g}", str(one.block or "-")]
        cells += ["yes" if one.error_feedback else "no", about]
        rows.append(f"| {' | '.join(cells)} |")
    heads = ["name", "class", "float32's bytes by its own", "values that share a scale"]
    heads += ["error feedback by default", "what it keeps"]
    return "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows])


def kinds_of_error() -> str:
    """Every class of pycomm.errors: what it is, when it is raised and what to do."""
    parts = []
    for name, kind in vars(errors).items():
        if not (inspect.isclass(kind) and issubclass(kind, errors.Error)):
            continue
        bases = ", ".join(
            f"`{base.__name__}`" if base.__module__ == "builtins" else f"`pycomm.{base.__name__}`"
            for base in kind.__bases__
        ).replace("`TimeoutError`", "Python's `TimeoutError`")
        about = inspect.cleandoc(kind.__doc__ or "")
        about = re.sub(r"\s*What to do:", "\n\n**What to do:**", about)
        parts.append(f"## {name}\n\nA {bases}. {about}\n")
    return "\n".join(parts)


def bench_flags() -> str:
    """The arguments of python -m pycomm.bench, and what they mean, as its --help has them."""
    command = parser()
    rows = []
    for action in command._actions:
        names = action.option_strings or [str(action.metavar or action.dest)]
        words = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {words} | {' '.join((action.help or '').split())} |")
    about = inspect.cleandoc(command.epilog or "")
    return "\n".join(
        ["| argument | meaning (default) |", "|---|---|", *rows, "", "```", about, "```"]
    )


PARTS: dict[str, Callable[[], str]] = {
    "variables": config.table,
    "reductions": reductions,
    "schedules": schedules,
    "operations": operations,
    "compressors": compressors,
    "errors": kinds_of_error,
    "bench": bench_flags,
}
PAGES = {
    "README.md": ("variables", "reductions", "schedules"),
    "docs/environment.md": ("variables",),
    "docs/support.md": ("operations", "reductions", "compressors"),
    "docs/compression.md": ("compressors",),
    "docs/errors.md": ("errors",),
    "docs/bench.md": ("bench",),
}


def updated(page: str, text: str) -> str:
    """The text of a page with every generated part made anew."""
    for name in PAGES[page]:
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, found = pattern.subn(lambda m, n=name: f"{m[1]}{PARTS[n]()}\n{m[2]}", text)
        if found != 1:
            raise SystemExit(f"{page} must have one <!-- {name} --> ... <!-- end -->, not {found}")
    return text


def main(arguments: list[str]) -> int:
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text()
        new = updated(page, text)
        if new != text:
            stale.append(page)
            if "--check" not in arguments:
                path.write_text(new)
    if stale:
        print("not up to date:", ", ".join(stale))
    return int(bool(stale))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
