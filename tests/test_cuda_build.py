"""What nvcc makes of the CUDA kernels, without a GPU: no spills, and 16 bytes per access."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
NVCC: Final = shutil.which("nvcc")
ARCHITECTURES: Final = ("80", "90", "100")  # as in setup.py
#: Of a thread: with more, a processor holds fewer of transcode_kernel's threads than its launcher counts on.
MOST_REGISTERS: Final = 64
KERNELS: Final = 6 * 3  # formats, dtypes

pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, text=True, timeout=300, check=False,
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_codec_kernel_compiles_to_wide_accesses_without_spills(
    architecture: str, tmp_path: Path
) -> None:
    cubin = tmp_path / "codec.cubin"
    report = compile_codec(architecture, cubin)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    print(f"sm_{architecture}: {sorted(registers)} registers")
    assert len(registers) == len(spills) == KERNELS
    assert set(spills) == {("0", "0")}
    assert max(registers) <= MOST_REGISTERS

    tool = disassembler()
    if tool is None:
        pytest.skip("spills were checked; there is no nvdisasm to look at the accesses with")
    code = instructions(tool, cubin)
    assert len(code) == KERNELS
    assert [name for name, body in code.items() if "LDG.E.128" not in body] == []
    assert [name for name, body in code.items() if "STG.E.128" not in body] == []
    # No product of ours is fused with a sum: forbidding it changes nothing.
    unfused = tmp_path / "unfused.cubin"
    compile_codec(architecture, unfused, "-fmad=false")
    assert code == instructions(tool, unfused)


def compile_codec(architecture: str, cubin: Path, *more: str) -> str:
    return run(
        NVCC or "", "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-Xptxas", "-v", *more,
        "-cubin", "-o", cubin, "csrc/kernels/codec_cuda.cu",
    )  # fmt: skip


def instructions(tool: Path, cubin: Path) -> dict[str, str]:
    """The text of every kernel by its name."""
    parts = re.split(r"^\.text\.(\w+):$", run(tool, cubin), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))
