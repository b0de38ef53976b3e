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
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-unknown-pragmas"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

#: With blocks, fp16, bf16, fp8 twice and int8; without one, all but int8, and fp32.
CODECS = 5 * 4 + 5

pytestmark = pytest.mark.skipif(shutil.which(CXX) is None, reason=f"needs a C++ compiler ({CXX})")


def run(*command: str | Path, code: int = 0) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, text=True, timeout=900, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-8000:]
    return done.stdout


def build(name: str, objects: Path, *sanitize: str) -> Path:
    """The program of tests/cuda_on_cpu/<name>.cpp, linked with the CPU's kernels.

    The kernel under test is compiled into the test's own file, where products must not be fused with
    sums, as nvcc's are not; tests/cpp sanitizes the rest, which `objects` keeps for the next program.
    """
    program = objects / "_".join([name, *sanitize]).replace("=", "_").replace(",", "_")
    test = ROOT / f"tests/cuda_on_cpu/{name}.cpp"
    kernels = {s: objects / f"{s.stem}.o" for s in (ROOT / "csrc/kernels").glob("*.cpp")}
    own = program.with_suffix(".o")

    def compile_one(source: Path, target: Path) -> None:
        extra = [*sanitize, "-ffp-contract=off"] if source == test else []
        run(CXX, *FLAGS, *extra, "-c", source, "-o", target)

    todo = [(test, own), *((s, o) for s, o in kernels.items() if not o.exists())]
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(compile_one, *zip(*todo, strict=True)))
    run(CXX, *sanitize, own, *kernels.values(), "-o", program)
    return program


def checks(output: str) -> int:
    passed = re.search(r"^(\d+) checks passed$", output, re.MULTILINE)
    assert passed, output[-8000:]
    return int(passed[1])


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


def test_reduce_kernel_gives_the_same_bits_as_the_cpu(objects: Path) -> None:
    pairs = 8 * 8 + 6 * 6 + 7  # integers, floats and bool with the ops that each has
    done = checks(run(build("reduce_kernel_test", objects, *SANITIZE)))
    assert done > pairs * 7 * 8 * 6  # counts, sources, grids


def test_codec_kernel_gives_the_same_bits_as_the_cpu(objects: Path) -> None:
    codecs, dtypes, counts, ways = CODECS, 3, 9, 3 * 4 + 1
    done = checks(run(build("codec_kernel_test", objects, *SANITIZE)))
    assert done > codecs * dtypes * counts * ways * 5  # results of each


def thread_sanitizer() -> list[str]:
    """How a program under it is started.

    Its shadow needs its addresses: kernels with vm.mmap_rnd_bits above 28 may have taken them.
    """
    fixed = ["setarch", os.uname().machine, "-R"]
    if shutil.which("setarch") and subprocess.run([*fixed, "true"], check=False).returncode == 0:
        return fixed
    return []


def test_codec_kernel_has_no_races(objects: Path) -> None:
    """And ThreadSanitizer sees one that is there: its exit status is 66."""
    program = build("codec_kernel_test", objects, "-fsanitize=thread")
    launch = thread_sanitizer()
    assert checks(run(*launch, program, "quick")) > CODECS * 2 * 4 * 5
    found = run(*launch, program, "race", code=66)
    assert "data race" in found
    assert "neighbours_kernel" in found


# ---- all_reduce over peer memory ----------------------------------------------------------------

PAIRS = 8 * 8 + 6 * 6 + 7 + 2 * 2  # as above, and the premultiplied sum


@pytest.fixture(scope="module")
def peers(objects: Path) -> Path:
    return build("peer_kernel_test", objects, *SANITIZE)


def test_peer_kernels_give_the_same_bits_as_the_cpu(peers: Path) -> None:
    """Ranks as threads: every dtype and operation, every tail, shuffled schedules."""
    assert checks(run(peers, "all")) > 4 * 3 * (PAIRS + 17 * 2)


def test_peer_kernels_run_in_processes(peers: Path) -> None:
    """Each maps the regions at addresses of its own."""
    assert checks(run(peers, "processes")) > (1 + 2 + 3 + 4) * 12


def test_peer_kernels_report_a_rank_that_does_not_come(peers: Path) -> None:
    """By rank, stage, chunk, expected and seen; the late one is told, and nothing is written any more."""
    assert checks(run(peers, "missing")) > 6 * (4 + 12)


def test_peer_checks_find_planted_faults(peers: Path) -> None:
    """A flag that is not posted, a wrong slot, and one beyond the region: AddressSanitizer's status is 1."""
    assert checks(run(peers, "faults")) >= 5
    found = run(peers, "outside", code=1)
    assert "heap-buffer-overflow" in found
    assert "copy_by_block" in found


def test_peer_kernels_have_no_races(objects: Path) -> None:
    """And ThreadSanitizer sees what a missing release, a slot taken early and a flag not waited for do."""
    program = build("peer_kernel_test", objects, "-fsanitize=thread", "-DQUICK")
    launch = thread_sanitizer()
    assert checks(run(*launch, program, "quick")) > 300
    assert checks(run(*launch, program, "missing")) > 6 * (4 + 12)
    for fault in ("no_release", "no_acquire", "no_await"):
        assert "data race" in run(*launch, program, fault, code=66), fault


def test_compressed_peer_kernels_give_the_same_bits_as_the_cpu(objects: Path) -> None:
    """Results, residuals and counts of every format; as threads and as processes; and a rank that does not come."""
    program = build("peer_compressed_test", objects, *SANITIZE)
    formats, blocks, counts = 6, 2, 4 + 2 + 2
    assert checks(run(program, "all")) > 4 * formats * blocks * counts * 3 * 4
    assert checks(run(program, "processes")) == 1 + 3 * 3
    assert checks(run(program, "missing")) == 3 * 2 * 2


def test_compressed_peer_kernels_have_no_races(objects: Path) -> None:
    """And ThreadSanitizer sees what a flag not waited for does."""
    program = build("peer_compressed_test", objects, "-fsanitize=thread", "-DQUICK")
    launch = thread_sanitizer()
    assert checks(run(*launch, program, "quick")) > 300
    assert "data race" in run(*launch, program, "early", code=66)
