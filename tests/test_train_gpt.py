"""examples/train_gpt.py: the same losses, step by step, however the model is split."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
SMALL = ["--steps", "8", "--layers", "2", "--width", "36", "--heads", "3", "--positions", "16"]


def train(*arguments: str, fails: int = 0) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == fails, done.stdout + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the others are compared with."""
    out = tmp_path_factory.mktemp("one")
    train(*SMALL, "--tp", "1", "--out", str(out))
    return out


def losses_of(out: Path) -> list[float]:
    metrics: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    losses: list[float] = metrics["losses"]
    return losses


@pytest.mark.long
@pytest.mark.parametrize(
    "split",
    [
        ["--tp", "2"],  # three heads and an odd number of letters on two ranks
        ["--tp", "2", "--sequence-parallel", "--overlap-chunks", "2"],
        ["--dp", "2", "--tp", "2"],
        ["--tp", "2", "--backend", "gloo"],
        ["--dp", "2", "--pp", "2", "--tp", "1"],
        ["--pp", "2", "--tp", "2", "--sequence-parallel", "--schedule", "zb_h1"],
        ["--pp", "4", "--tp", "1", "--microbatches", "3"],
        ["--pp", "2", "--tp", "1", "--schedule", "zbv", "--backend", "gloo"],
    ],
    ids=" ".join,
)
def test_losses_are_those_of_one_rank(split: list[str], one_rank: Path, tmp_path: Path) -> None:
    printed = train(*SMALL, *split, "--out", str(tmp_path), "--compare", str(one_rank))
    assert "largest difference" in printed
    ours, theirs = losses_of(tmp_path), losses_of(one_rank)
    assert len(ours) == 8
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1e-5
    assert ours[-1] < 0.95 * ours[0]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["parameters_here"] < 0.6 * metrics["parameters"]
    assert (tmp_path / "loss.png").stat().st_size > 10_000


@pytest.mark.long
def test_what_does_not_fit_is_said(one_rank: Path, tmp_path: Path) -> None:
    """Another training, other losses, and sizes that cannot be."""
    other = ["--compare", str(one_rank), "--out", str(tmp_path)]
    assert "was trained with --seed 0" in train(*SMALL, "--seed", "1", *other, fails=2)
    assert "not divisible by --heads 5" in train(*SMALL, "--heads", "5", fails=2)
    assert "--batch-size 16" in train(*SMALL, "--dp", "3", fails=2)
    spoiled = json.loads((one_rank / "metrics.json").read_text())
    spoiled["losses"][3] += 2e-5
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "metrics.json").write_text(json.dumps(spoiled))
    arguments = [*SMALL, "--tp", "1", "--compare", str(changed), "--out", str(tmp_path)]
    assert "differ by more than --tolerance 1e-05" in train(*arguments, fails=1)
