"""``python -m pycomm.bench``."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from pycomm.all_reduce_table import by_ranks, to_text
from pycomm.bench.measure import Row, measure
from pycomm.bench.plot import draw
from pycomm.bench.ranks import check_memory, check_plot, join, missing, start
from pycomm.bench.report import (
    cells_of,
    exposed,
    facts,
    failures,
    header,
    line_of,
    load,
    record,
    slower_than,
    write_files,
)
from pycomm.bench.settings import Settings, parser, settings_of
from pycomm.bench.tune import table_of, times_of, write
from pycomm.config import Launch
from pycomm.errors import Error, InvalidArgument


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    made = parser()
    try:
        settings = settings_of(made.parse_args(words))
        place = Launch.from_environment()
        _check(settings, place)
    except ValueError as error:
        made.error(str(error))
    if place is None:
        assert settings.ranks is not None
        return start(words, settings.ranks)
    try:
        return run_rank(settings, place)
    except (Error, RuntimeError) as error:
        print(f"pycomm.bench: rank {place.rank}: {error}", file=sys.stderr)
        return 1


def _check(settings: Settings, place: Launch | None) -> None:
    """Raises InvalidArgument for what cannot be done here, ahead of any rank's start."""
    for backend in settings.backends:
        if why := missing(backend):
            raise InvalidArgument(f"--backend {backend}: {why}")
    if place is None and settings.ranks is None:
        raise InvalidArgument(
            "--ranks N starts ranks here; without it, start this by torchrun, mpirun or srun"
        )
    ranks = place.world_size if place else settings.ranks
    assert ranks is not None
    if settings.root >= ranks:
        raise InvalidArgument(f"--root {settings.root}: ranks are 0 to {ranks - 1}")
    for path in (settings.json, settings.csv, settings.plot, settings.tune):
        if path and not path.absolute().parent.is_dir():
            raise InvalidArgument(f"{path} cannot be written: there is no such folder")
    if settings.plot:
        check_plot()
    if settings.compare:
        load(settings.compare, settings.operation)
    if settings.tune and settings.tune.exists():
        by_ranks(settings.tune.read_text().splitlines())
    check_memory(settings, settings.ranks or 1)


def run_rank(settings: Settings, place: Launch) -> int:
    """One rank's part; rank 0 speaks and writes."""
    rank = place.rank
    groups, control = join(settings, place)
    about = facts(place.world_size) if rank == 0 else {}
    rows = _show(measure(settings, groups, control), settings, about, rank)
    verdict: list[Any] = [0]
    if rank == 0:
        verdict = [_conclude(settings, about, rows)]
    dist.broadcast_object_list(verdict, 0, group=control)
    dist.destroy_process_group()
    return int(verdict[0])


def _show(found: Any, settings: Settings, about: dict[str, Any], rank: int) -> list[Row]:
    """Each line as soon as it is there; below them, on a terminal, how much is left."""
    rows: list[Row] = []
    if rank != 0:
        return list(found)
    console = Console(highlight=False, soft_wrap=True)
    console.print(header(about, settings))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("sizes", total=len(settings.sizes))
        for row in found:
            rows.append(row)
            for side in row.sides:
                console.print(line_of(cells_of(row, side)))
                if row.case.operation == "ddp" and side is not row.sides[0] and not side.refused:
                    console.print(
                        f"# {side.backend}: {exposed(row, side) * 100:.0f} % of a step is communication"
                    )
                if side.refused:
                    console.print(f"# {side.backend}: {side.refused}")
            progress.advance(task)
            sys.stdout.flush()
    return rows


def _conclude(settings: Settings, about: dict[str, Any], rows: list[Row]) -> int:
    made = record(about, settings, rows)
    write_files(settings, made, rows)
    if settings.plot:
        draw(made, settings, settings.plot)
        print(f"# wrote {settings.plot}")
    if settings.tune:
        table = table_of(times_of(made))
        write(settings.tune, about["ranks"], table, f"{about['cpu']}, load {about['load']:.1f}")
        print(f"# {to_text(table)}\n# use it: export PYCOMM_ALL_REDUCE=@{settings.tune.absolute()}")
    problems = failures(settings, rows)
    if settings.compare:
        problems += slower_than(load(settings.compare, settings.operation), made)
    for problem in problems:
        print(f"pycomm.bench: {problem}", file=sys.stderr)
    total = sum(side.wrong for row in rows for side in row.sides)
    print(f"# out of bounds values: {total} {'OK' if total == 0 else 'FAILED'}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
