"""python -m pycomm.bench: factors, contents, verdicts, files, and runs of the command (BEN-01)."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run

from pycomm.bench.measure import Row, Side, _check, _differences
from pycomm.bench.operations import (
    DTYPES,
    IN_PLACE,
    OPERATIONS,
    OUT_OF_PLACE,
    REDUCTIONS,
    Case,
    bus_factor,
    count_for,
    expected,
    prepare,
)
from pycomm.bench.plot import crossings, curves
from pycomm.bench.report import HEADS, cells_of, failures, ratio_of, slower_than
from pycomm.bench.settings import parser, read_size, settings_of, sizes_of
from pycomm.errors import InvalidArgument

ROOT = Path(__file__).resolve().parent.parent


def bench(
    *words: str, code: int = 0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pycomm.bench", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


# ---- formulas


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0), ("all_reduce", 4, 1.5), ("all_reduce", 1, 0.0), ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875), ("all_to_all", 2, 0.5), ("gather", 4, 0.75), ("scatter", 4, 0.75),
        ("broadcast", 4, 1.0), ("reduce", 7, 1.0), ("send_recv", 2, 1.0), ("barrier", 2, 0.0),
    ],
)  # fmt: skip
def test_bus_factors(operation: str, ranks: int, factor: float) -> None:
    assert bus_factor(operation, ranks) == factor


def test_a_row_by_hand() -> None:
    """BEN-01: 4 ranks gather 1 MiB in all in 100 us: 10.49 GB/s, of which three quarters come in."""
    assert count_for("all_gather", 1 << 20, "float", 4) == 65536
    assert count_for("all_reduce", 1 << 20, "float", 4) == 262144
    assert count_for("all_gather", 1 << 20, "half", 3) == 174762  # a little less than asked for
    case = Case("all_gather", 65536, "float", "sum", 0, 0, 4)
    assert case.bytes == 1 << 20
    side = Side("pycomm", False, times=[90.0, 100.0, 130.0], medians=[100.0])
    row = Row(case, [side])
    algorithm, bus = row.bandwidths(side)
    assert algorithm == pytest.approx((1 << 20) / 100e-6 / 1e9)
    assert bus == pytest.approx(algorithm * 0.75)
    cells = dict(zip([head for head, _ in HEADS], cells_of(row, side), strict=True))
    assert cells["size"] == "1048576"
    assert (cells["median"], cells["min"], cells["p99"]) == ("100.00", "90.00", "130.00")
    assert (cells["algbw"], cells["busbw"], cells["#wrong"]) == ("10.486", "7.864", "0")
    assert (cells["redop"], cells["root"], cells["place"]) == ("none", "-1", "out")


def test_sizes() -> None:
    assert [read_size(text) for text in ("8", "1K", "1.5m", "2GB")] == [8, 1024, 1572864, 2 << 30]
    assert sizes_of(8, 64, 2, None) == (8, 16, 32, 64)
    assert sizes_of(8, 40, 2, 16) == (8, 24, 40)
    assert sizes_of(3, 5, 1.1, None) == (3, 4, 5)
    for wrong in ((8, 4, 2.0, None), (8, 64, 1.0, None), (0, 64, 2.0, None)):
        with pytest.raises(InvalidArgument):
            sizes_of(*wrong)


# ---- contents


@pytest.mark.parametrize("n", [1, 3])
def test_every_operation_gives_what_is_expected(n: int) -> None:
    """Each dtype and reduction, on pycomm and on Gloo; a value that is off is found, named by place."""

    def worker(rank: int, n: int) -> int:
        gloo = dist.new_group(backend="gloo")
        ran = 0
        groups: dict[str, Any] = {"pycomm": dist.group.WORLD, "gloo": gloo}
        for backend, group in groups.items():
            for operation in OPERATIONS[:-1]:
                if n == 1 and operation == "send_recv":
                    continue
                for dtype in ("float", "bfloat16", "int64") if backend == "gloo" else DTYPES:
                    for op in REDUCTIONS if operation == "all_reduce" else ("sum",):
                        case = Case(operation, 5, dtype, op, n - 1, rank, n)
                        for in_place, known in ((False, OUT_OF_PLACE), (True, IN_PLACE)):
                            if operation in known and not (
                                backend == "gloo" and operation == "reduce" and dtype == "bfloat16"
                            ):
                                call = prepare(case, group, in_place, offset=8)
                                call.fill()
                                call.run()
                                wanted = expected(case)
                                assert wanted is None or torch.equal(call.result, wanted), case
                                ran += 1
        return ran

    assert len(set(run(n, worker))) == 1


def test_a_wrong_result_is_told_to_all_ranks() -> None:
    """Of one rank: how many elements, and the first one."""

    def worker(rank: int, n: int) -> tuple[int, str]:
        group: Any = dist.group.WORLD
        case = Case("all_reduce", 9, "half", "sum", 0, rank, n)
        call = prepare(case, group, True, 0)
        sound = call.run

        def spoiled() -> None:
            sound()
            if rank == 1:
                call.result[7] += 1

        call.run = spoiled
        side = Side("pycomm", True)
        _check(side, call, case, group)
        return side.wrong, side.first_wrong

    first, second, third = run(3, worker)
    assert first == second == third
    wanted = sum((7 * 3 + rank * 5 + 0) % 7 for rank in range(3))
    assert first == (1, f"rank 1, element 7: expected {wanted:.1f}, got {wanted + 1:.1f}")


def test_a_wrong_element_is_named() -> None:
    wanted = torch.arange(6.0)
    found = wanted.clone()
    assert _differences(found, wanted, 1) == (0, "")
    found[4] = 9
    found[5] = torch.nan
    assert _differences(found, wanted, 1) == (2, "rank 1, element 4: expected 4.0, got 9.0")


# ---- verdicts


def row_of(size: int, ours: list[float], theirs: list[float], wrong: int = 0) -> Row:
    case = Case("all_reduce", size // 4, "float", "sum", 0, 0, 2)
    sides = [
        Side("pycomm", True, list(ours), list(ours)),
        Side("gloo", True, list(theirs), list(theirs), wrong, "rank 1, element 2"),
    ]
    return Row(case, sides)


def record_of(*rows: Row) -> dict[str, Any]:
    return {
        "rows": [
            {
                "bytes": row.case.bytes, "dtype": "float", "ranks": 2,
                "sides": [
                    {
                        "backend": s.backend, "in_place": s.in_place, "rounds_us": s.medians,
                        "median_us": s.median, "busbw": row.bandwidths(s)[1],
                    }
                    for s in row.sides
                ],
            }
            for row in rows
        ]
    }  # fmt: skip


def test_ratios_are_taken_within_rounds() -> None:
    row = row_of(1024, [1, 2, 100], [3, 4, 500])
    assert ratio_of(row, row.sides[1]) == 3
    assert ratio_of(row, row.sides[0]) == 1


def test_slower_than_noise_explains() -> None:
    before = record_of(row_of(8, [10, 11, 12, 10, 11], [5, 5, 5, 5, 5]))
    noisy = record_of(row_of(8, [9, 30, 31, 10, 30], [5, 5, 5, 5, 5]))
    slower = record_of(row_of(8, [20, 21, 22, 20, 21], [5.2, 5.2, 5.2, 5.2, 5.2]))
    other = record_of(row_of(16, [90] * 5, [90] * 5))
    assert (
        slower_than(before, before)
        == slower_than(before, noisy)
        == slower_than(before, other)
        == []
    )
    (line,) = slower_than(before, slower)
    assert (
        line
        == "slower: 8 B of float, 2 ranks, pycomm, in place: 21.00 us, 11.00 before (1.91 times)"
    )


def test_failures() -> None:
    settings = settings_of(parser().parse_args(["all_reduce", "--backend", "pycomm,gloo"]))
    rows = [row_of(1 << 20, [1000.0], [900.0], wrong=3)]
    assert failures(settings, rows) == ["wrong: 1048576 B with gloo: 3 elements; rank 1, element 2"]
    rows = [row_of(1 << 20, [1000.0], [900.0])]
    assert failures(replace(settings, min_bandwidth=1.0), rows) == []
    (low,) = failures(replace(settings, min_bandwidth=1.1), rows)
    assert low == "busbw of pycomm at 1048576 B is 1.049 GB/s, below --min-bw 1.1"


def test_curves_and_their_crossings() -> None:
    made = record_of(*(row_of(4 << i, [float(4**i)], [4.0 * 2**i]) for i in range(5)))
    lines = curves(made, True)
    assert {name: len(points) for name, points in lines.items()} == {"pycomm": 5, "gloo": 5}
    assert curves(made, False) == {}
    assert crossings(lines["pycomm"], lines["gloo"]) == []  # they touch at a point
    lines["gloo"] = [(size, time * 1.5, bus) for size, time, bus in lines["gloo"]]
    ((size, _),) = crossings(lines["pycomm"], lines["gloo"])
    assert size == pytest.approx(4 * 6)


# ---- the command


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "required: OPERATION"),
        ("gossip --ranks 2", "invalid choice: 'gossip'"),
        ("all_reduce -b 8X --ranks 2", "'8X' is no size"),
        ("all_reduce -b 64 -e 8 --ranks 2", "-e 8 bytes are fewer than -b 64"),
        ("all_reduce -f 1 --ranks 2", "never grows"),
        ("all_reduce --ranks 0", "'0' is no whole number of 1 or more"),
        ("all_reduce --backend gloo,mpx --ranks 2", "--backend gloo,mpx: each once"),
        ("all_reduce --backend gloo,gloo --ranks 2", "each once"),
        ("all_reduce --backend nccl --ranks 2", "--backend nccl: there is no GPU"),
        ("all_reduce --backend mpi --ranks 2", "--backend mpi: this torch was built without MPI"),
        ("all_reduce", "--ranks N starts ranks here"),
        ("reduce -r 2 --ranks 2", "--root 2: ranks are 0 to 1"),
        ("send_recv --ranks 1", "send_recv needs two ranks"),
        ("all_reduce -e 900G --ranks 2", "needs about"),
        ("all_reduce --ranks 2 --plot a.xyz", "ends in .png or .svg"),
        ("all_reduce --ranks 2 -J /nowhere/at/all.json", "there is no such folder"),
        ("all_reduce --ranks 2 --compare /nowhere.json", "is no --json of an earlier run"),
    ],
)
def test_bad_words_are_refused_in_a_line(
    words: str, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pycomm.bench.__main__ import main

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as left:
        main(words.split())
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.startswith("pycomm.bench: ")
    assert said.count("\n") == 1


SHORT = ("-n", "3", "-w", "1", "--rounds", "2", "--ranks", "2")


def test_a_run_and_its_files(tmp_path: Path) -> None:
    """Two backends take turns on each size; then a comparison with that run, and a bandwidth that nothing reaches."""
    files = [
        "--json",
        str(tmp_path / "a.json"),
        "--csv",
        str(tmp_path / "a.csv"),
        "--plot",
        str(tmp_path / "a.png"),
    ]
    words = [
        "all_gather",
        "-b",
        "64",
        "-e",
        "4K",
        "-f",
        "8",
        "--backend",
        "pycomm,gloo",
        "-u",
        "4",
        *SHORT,
    ]
    done = bench(*words, *files)
    assert "# out of bounds values: 0 OK" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if line and line[0] != "#"]
    assert [(x[0], x[5], x[6]) for x in lines] == [
        (size, backend, place)
        for size in ("64", "512", "4096")
        for backend in ("pycomm", "gloo")
        for place in ("out", "in")
    ]
    made = json.loads((tmp_path / "a.json").read_text())
    assert made["version"] == 1
    assert made["facts"]["ranks"] == 2
    assert made["facts"]["copy_gbps"] > 0
    for row in made["rows"]:
        for side in row["sides"]:
            assert len(side["rounds_us"]) == 2
            assert side["wrong"] == 0
            assert side["busbw"] == pytest.approx(side["algbw"] / 2)
            assert 0 < side["min_us"] <= side["median_us"] <= side["p99_us"]
    table = list(csv.reader((tmp_path / "a.csv").open()))
    assert len(table) == 13
    assert table[0][7] == "median (us)"
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for row in made["rows"]:  # an earlier run that was a thousand times as fast
        for side in row["sides"]:
            side["rounds_us"] = [time / 1000 for time in side["rounds_us"]]
    (tmp_path / "b.json").write_text(json.dumps(made))
    done = bench(*words, "--compare", str(tmp_path / "b.json"), "--min-bw", "1e6", code=1)
    assert done.stderr.count("slower: ") == 12
    assert "below --min-bw 1e+06" in done.stderr


@pytest.mark.long
def test_every_operation_runs() -> None:
    for operation in OPERATIONS:
        done = bench(operation, "-b", "1K", "-e", "1K", "--backend", "pycomm,gloo", *SHORT)
        assert "0 OK" in done.stdout, operation


@pytest.mark.parametrize(
    ("what", "said"),
    [("kill", "rank 1 was ended by signal 9"), ("raise", "PYCOMM_TEST_FAULT asked for this error")],
)
def test_a_planted_fault_ends_the_command(what: str, said: str) -> None:
    """A rank that dies, and one that raises."""
    fault = {"PYCOMM_TEST_FAULT": f"what={what},rank=1,operation=2"}
    done = bench("all_reduce", "-b", "8", "-e", "8", *SHORT, code=1, env=fault)
    assert said in done.stderr
    assert "rank 0: " in done.stderr
