"""The speeds that pycomm has to reach beside gloo, and whether a run reached them."""

from __future__ import annotations

from dataclasses import dataclass

from names import COMMUNICATOR, PYCOMM
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rows import Run
from words import TIMES, format_bytes, format_ratio, format_span


@dataclass(frozen=True)
class Bar:
    """A median ratio to gloo in the same run."""

    size_bytes: int
    variant: str
    ratio: float


BARS = (  # for all_reduce, float32, 2 ranks
    Bar(8, PYCOMM, 20.0),
    Bar(8, COMMUNICATOR, 60.0),
    Bar(1 << 20, PYCOMM, 7.0),
    Bar(64 << 20, PYCOMM, 4.0),
)


def bars_apply(op: str, dtype: str, world_size: int) -> bool:
    return (op, dtype, world_size) == ("all_reduce", "float32", 2)


def bars_table(run: Run) -> tuple[Table, bool]:
    """The table bar / measured / pass, and whether every bar holds. What was not measured fails."""
    table = Table("size", "variant", title="bars: all_reduce, float32, 2 ranks", box=SIMPLE_HEAD)
    for heading in ("bar", "measured", "quartiles", "verdict"):
        table.add_column(heading, justify="right")
    passed = True
    for bar in BARS:
        row = run.find("all_reduce", bar.size_bytes, bar.variant)
        valid = row is not None and bars_apply(row.op, row.dtype, row.world_size)
        found = row.ratio_to_gloo if row and valid else None
        holds = found is not None and found.median >= bar.ratio
        passed = passed and holds
        measured = format_ratio(found.median) if found else "not measured"
        spread = format_span((found.low, found.high), format_ratio) if found else ""
        verdict = "[green]pass[/]" if holds else "[bold red]FAIL[/]"
        size, wanted = format_bytes(bar.size_bytes), f"≥ {bar.ratio:g}{TIMES}"
        table.add_row(size, bar.variant, wanted, measured, spread, verdict)
    return table, passed
