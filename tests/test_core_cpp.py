"""The C++ tests of the communication core: tests/cpp, without a sanitizer.

``tests/cpp/run.sh thread`` and ``address`` run the same program under ThreadSanitizer and AddressSanitizer.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CXX = os.environ.get("CXX", "g++")


@pytest.mark.skipif(shutil.which(CXX) is None, reason=f"needs a C++ compiler ({CXX})")
def test_ranks_as_threads(tmp_path: Path) -> None:
    done = subprocess.run(
        ["tests/cpp/run.sh", "plain"], cwd=ROOT, text=True, timeout=600, check=False,
        env={**os.environ, "PYCOMM_BUILD": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"^(\d+) checks passed$", done.stdout, re.MULTILINE)
    assert passed, done.stdout[-8000:]
    assert int(passed[1]) > 100_000
