"""What nvcc makes of the CUDA kernels, without a GPU: no spills, and 16 bytes per access."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
NVCC: Final = shutil.which("nvcc")
ARCHITECTURES: Final = ("80", "90", "100")  # as in setup.py
#: `make test` compiles for one of them, once; `make test-nvcc` for all, and looks at fused products too.
USUAL: Final = "90"

pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, text=True, timeout=900, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def disassembler() -> Path | None:
    """nvdisasm of the toolkit, or the one that Triton's wheel brings."""
    if found := shutil.which("nvdisasm"):
        return Path(found)
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    tool = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm"
    return tool if os.access(tool, os.X_OK) else None


@dataclass(frozen=True)
class Unit:
    """A file of kernels and what is asked of each of them."""

    source: str
    kernels: int
    most_registers: int
    #: Bytes of local memory for lists that are indexed and for calls; no spills all the same.
    most_stack: int = 0


UNITS: Final = {
    "codec": Unit("csrc/kernels/codec_cuda.cu", 6 * 3, 64),  # formats, dtypes
    # Integers, floats and bool with the ops that each has. Its launcher asks how many threads fit.
    "reduce": Unit("csrc/kernels/elementwise_cuda.cu", 8 * 8 + 6 * 6 + 7, 64),
    # Algorithms, dtypes (and formats). A block of 256 threads has a multiprocessor, so registers are
    # no matter; sources are looked up in a list.
    "p2p": Unit("csrc/p2p/all_reduce_cuda.cu", 3 * 15, 255, 176),
    "p2p compressed": Unit("csrc/p2p/compressed_cuda.cu", 3 * 6 * 3, 255, 48),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", UNITS)
def test_kernels_compile_to_wide_accesses_without_spills(
    name: str, architecture: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Everything stays in registers, and bulk loads and stores are of 16 bytes."""
    thorough: bool = request.config.getoption("--all-architectures")
    if architecture != USUAL and not thorough:
        pytest.skip("make test-nvcc compiles for it")
    unit, cubin = UNITS[name], tmp_path / "kernels.cubin"
    report = compiled(unit, architecture, cubin)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    print(f"sm_{architecture}, {name}: {sorted(registers)} registers")
    assert len(registers) == unit.kernels <= len(frames)
    assert {frame[1:] for frame in frames} == {("0", "0")}
    assert max(int(frame[0]) for frame in frames) <= unit.most_stack
    assert max(registers) <= unit.most_registers

    tool = disassembler()
    if tool is None:
        pytest.skip("spills were checked; there is no nvdisasm to look at the accesses with")
    code = instructions(tool, cubin)
    assert len(code) == unit.kernels
    # Of pointers out of a list the compiler does not see that they are global (LD, ST).
    space = "G" if unit.most_stack == 0 else "G?"
    for access in ("LD", "ST"):
        wide = re.compile(rf"\b{access}{space}\.E\.128\b")
        assert [kernel for kernel, body in code.items() if not wide.search(body)] == []
    if unit.most_stack == 0:
        assert [kernel for kernel, body in code.items() if re.search(r"\b(LDL|STL)\b", body)] == []
    if not thorough:
        return
    # No product of ours is fused with a sum: forbidding it changes nothing.
    unfused = tmp_path / "unfused.cubin"
    compiled(unit, architecture, unfused, "-fmad=false")
    assert code == instructions(tool, unfused)


def compiled(unit: Unit, architecture: str, cubin: Path, *more: str) -> str:
    """What the compiler reports."""
    return run(
        NVCC or "", "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-Xptxas", "-v", *more,
        "-cubin", "-o", cubin, unit.source,
    )  # fmt: skip


def instructions(tool: Path, cubin: Path) -> dict[str, str]:
    """The text of every kernel by its name."""
    parts = re.split(r"^\.text\.(\w+):$", run(tool, cubin), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))
