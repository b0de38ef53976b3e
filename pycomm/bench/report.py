"""Tables, files and verdicts of a run."""

from __future__ import annotations

import csv
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import torch

from pycomm.bench.measure import Row, Side, clock_noise, copy_bandwidth
from pycomm.bench.settings import Settings
from pycomm.errors import InvalidArgument

VERSION: Final = 1
#: A ratio to an earlier run counts as slower from here on, if both runs' spreads are below it.
_SLOWER: Final = 1.1

HEADS: Final = (
    ("size", "B"), ("count", "elements"), ("type", ""), ("redop", ""), ("root", ""), ("backend", ""), ("place", ""),
    ("median", "us"), ("min", "us"), ("p99", "us"), ("cv", "%"), ("algbw", "GB/s"), ("busbw", "GB/s"), ("#wrong", ""),
    ("ratio", ""),
)  # fmt: skip
_WIDTHS: Final = (11, 11, 8, 5, 4, 15, 5, 10, 10, 10, 5, 7, 7, 6, 6)


def facts(ranks: int) -> dict[str, Any]:
    """Of this host and these versions, so that a number can be believed."""
    import pycomm

    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "numa_nodes": nodes,
        "kernel": platform.release(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pycomm": pycomm.__version__,
        "ranks": ranks,
        "load": os.getloadavg()[0],
        "copy_gbps": copy_bandwidth(),
        "clock_noise": clock_noise(),
    }


def header(found: dict[str, Any], settings: Settings) -> str:
    """Lines that begin with #, as the table's comments."""
    lines = [
        f"# {found['cpu']}, {found['cores']} cores, {found['numa_nodes']} NUMA nodes, GPU {found['gpu']}, "
        f"Linux {found['kernel']}",
        f"# torch {found['torch']}, pycomm {found['pycomm']}, Python {found['python']}; load {found['load']:.2f}, "
        f"a fixed piece of work takes up to {found['clock_noise']:.2f} times its shortest time",
        f"# {settings.operation}, {found['ranks']} ranks, {settings.rounds} rounds of {settings.iterations} calls, "
        f"backends in turn; one thread copies {found['copy_gbps']:.1f} GB/s",
        "#",
        "#" + line_of([head for head, _ in HEADS])[1:],
        "#" + line_of([unit for _, unit in HEADS])[1:],
    ]
    return "\n".join(lines)


def line_of(cells: list[str]) -> str:
    """In columns."""
    return " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))


def cells_of(row: Row, side: Side) -> list[str]:
    """Of one line. The ratio is to the first backend's median in the same round; above 1 this one is slower."""
    case = row.case
    op, root = case.op if case.reduces else "none", str(case.root) if case.rooted else "-1"
    first = [
        str(case.bytes),
        str(case.count),
        case.dtype,
        op,
        root,
        side.backend,
        "in" if side.in_place else "out",
    ]
    if side.refused:
        return [*first, "n/a", *[""] * 7]
    algorithm, bus = row.bandwidths(side)
    times = [f"{value:.2f}" for value in (side.median, side.least, side.p99)]
    rest = [
        f"{side.variation * 100:.0f}",
        f"{algorithm:.3f}",
        f"{bus:.3f}",
        str(side.wrong),
        f"{ratio_of(row, side):.2f}",
    ]
    return [*first, *times, *rest]


def ratio_of(row: Row, side: Side) -> float:
    """Median over the rounds of this side's time over the first backend's, in the same place."""
    base = next((o for o in row.sides if o.in_place == side.in_place and not o.refused), side)
    return median(a / b for a, b in zip(side.medians, base.medians, strict=True))


def exposed(row: Row, side: Side) -> float:
    """Of a step, the share that communication adds to it: what the first side, without any, does not take."""
    return 1 - 1 / ratio_of(row, side)


def record(found: dict[str, Any], settings: Settings, rows: list[Row]) -> dict[str, Any]:
    """All of it, as JSON takes it."""
    return {
        "version": VERSION,
        "facts": found,
        "operation": settings.operation,
        "command": sys.argv[1:],
        "rows": [
            {
                **{key: value for key, value in asdict(row.case).items() if key != "rank"},
                "bytes": row.case.bytes,
                "sides": [_side(row, side) for side in row.sides],
            }
            for row in rows
        ],
    }


def _side(row: Row, side: Side) -> dict[str, Any]:
    if side.refused:
        return {"backend": side.backend, "in_place": side.in_place, "refused": side.refused}
    algorithm, bus = row.bandwidths(side)
    return {
        "backend": side.backend,
        "in_place": side.in_place,
        "median_us": side.median,
        "min_us": side.least,
        "p99_us": side.p99,
        "variation": side.variation,
        "rounds_us": side.medians,
        "algbw": algorithm,
        "busbw": bus,
        "wrong": side.wrong,
        "ratio": ratio_of(row, side),
        **({"exposed": exposed(row, side)} if row.case.operation == "ddp" else {}),
    }


def write_files(settings: Settings, made: dict[str, Any], rows: list[Row]) -> None:
    """--json and --csv."""
    if settings.json:
        settings.json.write_text(json.dumps(made, indent=1) + "\n")
    if settings.csv:
        with settings.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([f"{head} ({unit})" if unit else head for head, unit in HEADS])
            writer.writerows(cells_of(row, side) for row in rows for side in row.sides)


# ---- verdicts


def load(path: Path, operation: str) -> dict[str, Any]:
    """An earlier record; raises InvalidArgument for what is none, or of another operation."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if found["version"] != VERSION or found["operation"] != operation:
            raise InvalidArgument(
                f"--compare {path}: a record of {found['operation']}, version {found['version']}"
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(
            f"--compare {path} is no --json of an earlier run: {error}"
        ) from error
    return found


def slower_than(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lines for what takes over 10 % longer than before, and more than the rounds of both runs explain."""

    def sides(record: dict[str, Any]) -> dict[tuple[Any, ...], list[float]]:
        return {
            (row["bytes"], row["dtype"], row["ranks"], side["backend"], side["in_place"]): side[
                "rounds_us"
            ]
            for row in record["rows"]
            for side in row["sides"]
            if "rounds_us" in side
        }

    before, found = sides(earlier), []
    for key, times in sides(now).items():
        old = before.get(key)
        if old and median(times) > _SLOWER * median(old) and _low(times) > _high(old):
            size, dtype, ranks, backend, in_place = key
            place = "in place" if in_place else "out of place"
            found.append(
                f"slower: {size} B of {dtype}, {ranks} ranks, {backend}, {place}: {median(times):.2f} us, "
                f"{median(old):.2f} before ({median(times) / median(old):.2f} times)"
            )
    return found


def _low(times: list[float]) -> float:
    return min(times) if len(times) < 4 else quantiles(times, n=4, method="inclusive")[0]


def _high(times: list[float]) -> float:
    return max(times) if len(times) < 4 else quantiles(times, n=4, method="inclusive")[2]


def failures(settings: Settings, rows: list[Row]) -> list[str]:
    """Wrong results, and a bandwidth that is too low."""
    found = [
        f"wrong: {row.case.bytes} B with {side.backend}: {side.wrong} elements; {side.first_wrong}"
        for row in rows
        for side in row.sides
        if side.wrong
    ]
    if rows and settings.min_bandwidth > 0:
        last = rows[-1]
        best = max(last.bandwidths(s)[1] for s in last.sides if s.backend == settings.backends[0])
        if best < settings.min_bandwidth:
            found.append(
                f"busbw of {settings.backends[0]} at {last.case.bytes} B is {best:.3f} GB/s, below --min-bw "
                f"{settings.min_bandwidth:g}"
            )
    return found
