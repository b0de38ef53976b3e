"""torchrun, and scripts that only change the backend's name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[1] / "examples"


def torchrun(script: Path, *arguments: str, ranks: int = 2, may_abort: bool = False) -> str:
    """Output of a script under torchrun, which must end with status 0 unless it may abort at exit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert may_abort or done.returncode == 0, f"{arguments}: {done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.long
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14),
    reason="torch finds backends by entry point since 2.14; before, the script needs `import pycomm`",
)
def test_plain_torch_ddp_gives_the_losses_of_gloo() -> None:
    """Only the backend's name differs: no import, torch's own DDP, same losses to 1e-6."""
    ours = json.loads(torchrun(SCRIPTS / "plain_ddp.py", "pycomm"))
    # Gloo now and then aborts when the interpreter ends; its losses are printed by then.
    gloo = json.loads(torchrun(SCRIPTS / "plain_ddp.py", "gloo", may_abort=True))
    assert len(ours) == 30
    assert max(abs(a - b) for a, b in zip(ours, gloo, strict=True)) < 1e-6
    assert ours[-1] < 0.7 * ours[0]


@pytest.mark.long
def test_the_demo_trains_as_on_gloo(tmp_path: Path) -> None:
    """With two ranks a mean is the same halved sum on both backends, so whole histories are equal."""
    histories = []
    for backend in ("pycomm", "gloo"):
        out = tmp_path / backend
        command = [sys.executable, str(EXAMPLES / "train_digits.py"), "--backend", backend]
        command += ["--epochs", "2", "--min-accuracy", "0.1", "--out", str(out)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        metrics = json.loads((out / "metrics.json").read_text())
        assert metrics["ranks_identical"] is True
        assert (out / "curves.png").stat().st_size > 10_000
        histories.append(metrics["history"])
    assert histories[0] == histories[1]
