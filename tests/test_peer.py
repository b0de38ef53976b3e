"""Some of torch's own distributed tests, with pycomm in Gloo's place; `make peer` runs all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import forked
import judged
import pytest
import torch

PEER = Path(__file__).parent / "peer"

#: Each operation family, the ways to send and receive, objects, deadlines, and DDP; quick ones.
SUBSET = (
    "test_all_gather",
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_max",
    "test_all_reduce_sum",
    "test_all_to_all",
    "test_all_to_all_single_unequal_split",
    "test_barrier",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_gather",
    "test_monitored_barrier_gloo",
    "test_reduce_product",
    "test_scatter",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync",
    "test_ddp_logging_data_cpu",
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the runner wrote about each test of the subset."""
    out = tmp_path_factory.mktemp("peer") / "rows.jsonl"
    command = [sys.executable, str(PEER / "torch_suite.py"), "--out", str(out)]
    command += ["-k", f"^({'|'.join(SUBSET)})$"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    assert found, done.stderr
    return {row["test"]: row for row in found}


@pytest.mark.parametrize("name", SUBSET)
def test_of_torch(name: str, rows: dict[str, dict[str, Any]]) -> None:
    if name not in rows:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    assert rows[name]["verdict"] in ("pass", "expected failure"), rows[name]["detail"]


def test_names_of_the_subset_are_listed() -> None:
    assert set(SUBSET) <= set(judged.listed(2))


def test_document_has_the_table_of_exemptions() -> None:
    assert judged.exempt_table() in (PEER / "EXPECTED.md").read_text()


class Sample(unittest.TestCase):
    """What the executor is shown; pytest must not collect it."""

    __test__ = False

    def passes(self) -> None:
        pass

    def fails(self) -> None:
        os.write(1, b"written before")
        self.fail("on purpose")

    def skips(self) -> None:
        self.skipTest("a reason")

    def dies(self) -> None:
        signal.raise_signal(signal.SIGKILL)

    def hangs(self) -> None:
        signal.pause()


def test_executor_tells_the_outcomes_apart(tmp_path: Path) -> None:
    names = {"passes": "pass", "fails": "fail", "skips": "skip", "dies": "fail"}
    ended = forked.run([Sample(name) for name in names], jobs=3, timeout=60, folder=tmp_path)
    outcomes = {test.id().rpartition(".")[2]: outcome for test, outcome in ended}
    assert {name: outcomes[name].status for name in names} == names
    assert "on purpose" in outcomes["fails"].detail
    assert "written before" in outcomes["fails"].detail
    assert outcomes["skips"].detail == "a reason"


def test_executor_ends_what_takes_too_long(tmp_path: Path) -> None:
    ((_, outcome),) = forked.run([Sample("hangs")], jobs=1, timeout=0.5, folder=tmp_path)
    assert outcome.status == "timeout"
    assert outcome.seconds >= 0.5


@pytest.mark.parametrize(
    ("status", "expected"), [("fail", "expected failure"), ("pass", "unexpected pass")]
)
def test_exempt_tests_must_fail(status: str, expected: str) -> None:
    entry = judged.EXEMPT[0]
    assert judged.verdict(entry.test, entry.backend, status) == expected
    assert judged.verdict("test_barrier", entry.backend, status) == status
