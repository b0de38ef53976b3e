"""The benchmark's own parts: exact results, derived figures, and a short run of the whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import accuracy
import bars
import cases
import numpy as np
import pytest
import rows
from collectives import Driver, Settings, WrongResult, cases_of
from names import BOUND, COMMUNICATOR, FLOOR, GLOO, OPEN_MPI, PYCOMM
from ranks import quartiles

from pycomm.extension import core

ROOT = Path(__file__).parents[1]
CODEC_CELL = r"\d+\.\d GB/s, \d+\.\d\d \[\d+\.\d\d-\d+\.\d\d\]"


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


@pytest.mark.long
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


@pytest.mark.long
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


def run_script(name: str, *arguments: str) -> str:
    """What a benchmark prints."""
    ended = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / name, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def table_rows(printed: str) -> list[list[str]]:
    """Cells of every line of Markdown's tables, titles too."""
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.long
def test_accuracy(tmp_path: Path) -> None:
    """Every compressor trains both tasks, and the tables say what the runs gave."""
    picture, record = tmp_path / "accuracy.png", tmp_path / "runs.json"
    printed = run_script("accuracy.py", "--quick", "--plot", str(picture), "--json", str(record))
    runs = [accuracy.Run(**run) for run in json.loads(record.read_text())]
    names = list(accuracy.COMPRESSORS)
    assert [(run.task, run.compressor) for run in runs] == [
        (task, name) for task in accuracy.TASKS for name in names
    ]
    found = table_rows(printed)
    assert [row[0] for row in found] == ["digits", *names, "gpt", *names]
    for run, row in zip(runs, [row for row in found if row[0] in names], strict=True):
        assert row[1] == f"{run.loss:.4f}"
        if run.compressor in accuracy.BARS:  # those that send every value
            assert abs(float(row[3])) < 1, "a few steps do not drive weights apart"
        assert run.curve[-1] < run.curve[0], "nothing was learned"
    losses = [run.loss for run in runs if run.task == "gpt"]
    assert len(set(losses)) == len(losses), (
        "each compressor and each start has roundings of its own"
    )
    assert picture.stat().st_size > 0


def made_up_runs(**losses: list[float]) -> list[accuracy.Run]:
    """Of two seeds by compressor."""
    return [
        accuracy.Run(
            "task", name.replace("none_", accuracy.NUDGED), seed, 0, loss, [2.0, loss], 1.0
        )
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]


def test_accuracy_compares_within_a_seed_and_judges_by_the_noise() -> None:
    runs = made_up_runs(none=[1.0, 2.0], none_=[1.001, 2.002], fp16=[1.01, 2.0], int8=[1.0, 2.1])
    results, noise = accuracy.results_of(runs), accuracy.noise_of(runs)
    assert results["int8"].differences == pytest.approx([0.0, 5.0])
    assert results["int8"].difference == pytest.approx(2.5)
    assert noise == pytest.approx(200 * 0.001 / 2**0.5, rel=1e-2)  # two runs of each kind
    fp16, int8 = accuracy.verdicts("task", results, noise)
    assert fp16.endswith("+0.50 %, at most 0.14 %: DOES NOT HOLD")
    assert int8.endswith("+2.50 %, at most 1 %: DOES NOT HOLD")
    runs = made_up_runs(none=[1.0, 2.0], none_=[1.01, 2.0], fp16=[1.01, 2.0], int8=[1.0, 1.99])
    results, noise = accuracy.results_of(runs), accuracy.noise_of(runs)
    assert [line.rsplit(": ", 1)[1] for line in accuracy.verdicts("task", results, noise)] == [
        "holds",
        "holds",
    ]


@pytest.mark.long
def test_codecs(tmp_path: Path) -> None:
    """Every layout, instruction set, codec and operation is measured, and against what it says."""
    picture, record = tmp_path / "codecs.png", tmp_path / "codecs.json"
    sets = [name for name in ("avx512", "avx2", "generic") if core.set_instruction_set(name)]
    assert core.set_instruction_set(sets[0])
    command = ["--quick", "--codecs", "fp16,int8:64", "--instruction-sets", ",".join(sets)]
    printed = run_script("codecs.py", *command, "--plot", str(picture), "--json", str(record))
    layouts = ("0.25 MB", "0.0625 MB", "30 tensors, 0.25 MB")
    found = table_rows(printed)
    titles = [f"{layout}, {name}" for layout in layouts for name in sets]
    measured = found[: 3 * len(titles)]
    assert [row[0] for row in measured] == [x for t in titles for x in (t, "fp16", "int8:64")]
    for row in measured:
        assert len(row) == 5
        assert row[0] in titles or all(re.fullmatch(CODEC_CELL, cell) for cell in row[1:]), row
    ways = found[3 * len(titles) :]
    assert [row[0] for row in ways[::6]] == [f"torch's way, {t}, {sets[0]}" for t in layouts]
    assert len(ways) == 6 * len(layouts)
    samples = json.loads(record.read_text())["0.25 MB, generic"]
    moved = {(s["codec"], s["operation"]): s["moved"] / 65536 for s in samples}
    assert moved["fp16", "encode with residual"] == 14 + 4 / 1024
    assert moved["fp16", "reduce"] == 20 + 8 / 1024
    assert moved["int8:64", "encode"] == 5 + 4 / 64
    assert moved["int8:64", "sum of 2"] == 6 + 8 / 64
    assert all(s["seconds"] > 0 and s["copy_seconds"] > 0 for s in samples)
    assert picture.stat().st_size > 0


@pytest.mark.long
@pytest.mark.parametrize("links", ["", "1000"])
def test_advise(tmp_path: Path, links: str) -> None:
    """Every compression is measured and predicted, over shared memory and a shaped link."""
    if links and (os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc")):
        pytest.skip("needs root, ip and tc")
    picture, record = tmp_path / "advise.png", tmp_path / "advise.json"
    command = ["--links", links, "--values", "4.2e6", "--repeats", "2"]
    printed = run_script("advise.py", *command, "--plot", str(picture), "--json", str(record))
    names = ["none", "fp16", "bf16", "fp8", "int8", "top-k", "low rank"]
    found = [row[0] for row in table_rows(printed)]
    assert found == ["shared memory", *names, *(["1000 Mbit/s", *names] if links else [])]
    rows = json.loads(record.read_text())
    assert all(row["seconds"] > 0 and row["predicted"] > 0 for row in rows)
    if links:  # 16.8 MB take 0.13 s each way; a quarter of them less
        by_name = {row["compression"]: row for row in rows if row["where"] == "1000 Mbit/s"}
        assert by_name["none"]["seconds"] > 0.12
        assert by_name["int8"]["predicted"] > 2
    assert picture.stat().st_size > 0
    remaining = (
        subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False).stdout
        if links
        else ""
    )
    assert "pycomm" not in remaining


@pytest.mark.long
def test_tensor_parallel(tmp_path: Path) -> None:
    """Every variant is checked and timed; memory is what the sizes say."""
    picture, record = tmp_path / "picture.png", tmp_path / "rows.json"
    command = ["--widths", "64", "--positions", "8", "--repeats", "3", "--steps", "1"]
    printed = run_script(
        "tensor_parallel.py", *command, "--plot", str(picture), "--json", str(record)
    )
    title, *found = table_rows(printed)
    rows = json.loads(record.read_text())["64"]
    names = list(rows[0])
    assert len(rows) == 3
    assert [row[0] for row in found] == names
    assert title[1] == "step, ms"
    split, whole = (
        12 * 64**2 + 7 * 64,
        6 * 64,
    )  # weights and biases of outputs; norms, biases of sums
    for name, row in zip(names, found, strict=True):
        ratios = sorted(
            one["torch on Gloo" + ", sequence parallel" * ("sequence" in name)] / one[name]
            for one in rows
        )
        assert float(row[2].split()[0]) == pytest.approx(ratios[1], abs=0.006)
        parts = 1 if name == "whole block, one rank" else 2
        assert float(row[4]) == pytest.approx(8e-6 * (split / parts + whole), abs=0.006)
        assert 0 < float(row[5]) <= float(found[0][5])
    assert printed.count("times as fast as") == 4
    assert picture.stat().st_size > 0


@pytest.mark.parametrize(
    "values", [[1.0, 30.0], [5.0, 0.1, 2.0], [3.0] * 4, [float(i) for i in range(9)]]
)
def test_quartiles_lie_among_the_values(values: list[float]) -> None:
    """Of two that are far apart, too: no time is negative."""
    low, middle, high = quartiles(values)
    assert min(values) <= low <= middle <= high <= max(values)
    assert middle == np.median(values)
