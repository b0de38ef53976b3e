"""The benchmark's own parts: exact results, derived figures, and a short run of the whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import bars
import cases
import numpy as np
import pytest
import rows
from collectives import Driver, Settings, WrongResult, cases_of
from names import BOUND, COMMUNICATOR, FLOOR, GLOO, OPEN_MPI, PYCOMM

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_patterns_and_sums_survive_every_dtype(dtype: str) -> None:
    case = cases.make_case("all_reduce", 1000, dtype, 4)
    want = cases.expected(case, 0)
    assert want is not None
    values = cases.decode(want, dtype).astype(np.int64)
    assert (values == sum(cases.pattern(case.count, rank) for rank in range(4))).all()


@pytest.mark.parametrize("op", cases.OPS)
def test_buffers_fit_what_is_expected_in_them(op: str) -> None:
    case = cases.make_case(op, 100, "float32", 3)
    buffers = cases.make_buffers(case)
    assert case.count % 3 == 0
    assert not case.count or buffers.input.ctypes.data % cases.ALIGNMENT == 0
    for rank in range(3):
        want = cases.expected(case, rank)
        assert want is None or want.shape == buffers.output.shape


def test_the_first_wrong_element_is_named() -> None:
    want = cases.encode(np.arange(5, dtype=np.int32), "bfloat16")
    got = want.copy()
    got[3] = want[1]
    assert cases.compare(got, want, "bfloat16") == cases.Mismatch(3, 3.0, 1.0)
    assert cases.compare(want, want, "bfloat16") is None


def samples_of(times: dict[str, list[float]]) -> dict[str, rows.Samples]:
    return {name: rows.Samples(it, it, [1] * len(it)) for name, it in times.items()}


def test_ratios_are_taken_within_a_repeat_and_not_to_oneself() -> None:
    case = cases.make_case("broadcast", 16 << 20, "float32", 2)
    times = {
        GLOO: [30.0, 40.0, 50.0],
        OPEN_MPI: [20.0, 60.0, 20.0],
        PYCOMM: [10.0, 10.0, 10.0],
        COMMUNICATOR: [5.0, 5.0, 5.0],
        FLOOR: [1.0, 1.0, 1.0],
        BOUND: [4.0, 4.0, 4.0],
    }
    found = {
        name: rows.make_row(case, name, samples_of(times), [40.0, 200.0, 5e4]) for name in times
    }
    best = found[COMMUNICATOR].ratio_to_best
    assert best is not None
    assert (best.min, best.median, best.max) == (4.0, 4.0, 8.0)
    assert found[COMMUNICATOR].best_other == OPEN_MPI
    assert found[GLOO].best_other == COMMUNICATOR
    assert found[FLOOR].ratio_to_best is None
    share = found[COMMUNICATOR].bound_fraction
    assert share is not None
    assert share.median == pytest.approx(4.0 / 2 / 5.0)  # half of an all_reduce's bytes
    assert found[GLOO].placement == ["near", "far", "busy"]


def test_batches_take_the_slowest_rank_and_ping_pong_is_one_way() -> None:
    replies = [[[2000, 8000], [4000, 2000]]]
    assert rows.make_samples(replies, [2], "send_recv").batches == [1.0, 2.0]
    assert rows.make_samples(replies, [2], "broadcast").times == [2.5]


def test_a_wrong_result_names_rank_offset_and_values(tmp_path: Path) -> None:
    wrong = {"offset": 7, "expected": 3.0, "got": 4.0}
    team = SimpleNamespace(ask=lambda *_, **__: [{"wrong": None}, {"wrong": wrong}])
    driver = Driver(cast("Settings", None), [], cast("Any", None), [], {PYCOMM: cast("Any", team)})
    with pytest.raises(WrongResult, match=r"rank 1, offset 7 .*expected 3, got 4"):
        driver.verify(cases.make_case("all_reduce", 64, "float32", 2))


def test_a_barrier_is_one_case_and_one_rank_has_no_peer_to_send_to() -> None:
    chosen = SimpleNamespace(ops=["barrier", "send_recv"], sizes=[8, 16], dtype="int32")
    chosen.world_size = 1
    assert [case.op for case in cases_of(cast("Settings", chosen))] == ["barrier"]


def test_a_short_run_writes_results_tables_and_plots(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/collectives.py", "--ops", "all_reduce,barrier"]
    command += ["--sizes", "8,1K", "--repeats", "7", "--min-time", "0.1", "--out", str(tmp_path)]
    command += ["--peers", "openmpi", "--peers-folder", str(tmp_path / "nowhere")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Open MPI: not installed" in done.stdout
    run = rows.Run.load(tmp_path / "results.json")
    assert {row.variant for row in run.rows} == {GLOO, PYCOMM, COMMUNICATOR, FLOOR}
    assert len(run.line("barrier", PYCOMM)) == 1
    assert json.loads((tmp_path / "results.json").read_text())["machine"]["commit"]
    for name in ("results.md", "all_reduce.png", "barrier.png"):
        assert (tmp_path / name).stat().st_size > 0
    assert not bars.bars_table(run)[1], "sizes that were not measured must fail"


def test_thresholds() -> None:
    """All four comparisons, with times in microseconds or more."""
    ended = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "thresholds.py", "--repeats", "1"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    times = [float(t) for t in re.findall(r"([\d.e-]+) (?:µs|ms) ", ended.stdout)]
    assert len(times) == 9 * 3 + 5 * 2 + 8 * 2 + 5 * 4
    assert min(times) > 0.1
