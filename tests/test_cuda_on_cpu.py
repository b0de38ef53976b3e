"""The CUDA kernels' source, run on the CPU by tests/cuda_on_cpu and compared with the CPU's kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CXX = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++17", "-O1", "-g", "-fwrapv", "-Wall", "-Wextra", "-Wno-psabi"]
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

pytestmark = pytest.mark.skipif(shutil.which(CXX) is None, reason=f"needs a C++ compiler ({CXX})")


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, text=True, timeout=300, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def test_reduce_kernel_gives_the_same_bits_as_the_cpu(tmp_path: Path) -> None:
    test = ROOT / "tests/cuda_on_cpu/reduce_kernel_test.cpp"
    sources = [test, *(ROOT / "csrc/kernels").glob("*.cpp")]
    objects = [tmp_path / f"{source.stem}.o" for source in sources]

    def build(source: Path, target: Path) -> None:
        # The kernel under test is compiled into the test's own file, where products must not be fused
        # with sums, as nvcc's are not; tests/cpp sanitizes the rest.
        own = [*SANITIZE, "-ffp-contract=off"] if source == test else []
        run(CXX, *FLAGS, *own, "-c", source, "-o", target)

    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(build, sources, objects))
    run(CXX, *SANITIZE, *objects, "-o", tmp_path / "reduce_kernel_test")
    passed = re.search(r"^(\d+) checks passed$", run(tmp_path / "reduce_kernel_test"), re.MULTILINE)
    assert passed
    pairs = 8 * 8 + 6 * 6 + 7  # integers, floats and bool with the ops that each has
    assert int(passed[1]) > pairs * 7 * 8 * 6  # counts, sources, grids
