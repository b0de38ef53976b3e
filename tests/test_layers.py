"""The order of the layers, read off the sources: no #include points upwards."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

from pycomm.config import Config

ROOT: Final = Path(__file__).resolve().parent.parent
CSRC: Final = ROOT / "csrc"

#: Patterns of files and their layer, the first that fits counts. A file includes its own layer and
#: lower ones.
LAYERS: Final = (
    (
        r"(common|error|hex|interrupt|python_interrupt|forks|clock|call_site|test_fault)\.h",
        0,
    ),
    (r"process\.(h|cpp)", 0),
    (r"kernels/.*", 1),
    (r"slots\.h", 2),
    (r"algorithms/.*", 3),
    (r"(board|communicator|worker|recorder)\.(h|cpp)", 4),
    (r"(shm|nccl|p2p)/.*", 5),
    (
        r"((core|communicator|codec|nccl|kernels_cuda|p2p_cuda)_bindings\.cpp|bindings\.h|python_(tensor|call_site|transcode|device_reader)\.(h|cpp)|dlpack\.h)",
        6,
    ),
    (r"c10d/.*", 6),
)
SUFFIXES: Final = {".h", ".cpp", ".cu", ".cuh"}
TORCH: Final = re.compile(r"(torch|ATen|c10|caffe2)/")

SOURCES: Final = sorted(p for p in CSRC.rglob("*") if p.suffix in SUFFIXES)


def layer_of(name: str) -> int:
    """The layer of a file under csrc/."""
    for pattern, layer in LAYERS:
        if re.fullmatch(pattern, name):
            return layer
    raise AssertionError(f"csrc/{name} is in no layer; add it to LAYERS in {Path(__file__).name}")


def includes(source: Path) -> list[tuple[str, str]]:
    """Every #include of a file: what is written, and the file under csrc/ that it means, if any."""
    found = []
    written = re.findall(r'^\s*#\s*include\s*([<"][^>"]+)[>"]', source.read_text(), re.MULTILINE)
    for text in written:
        near, under = (source.parent / text[1:]).resolve(), (CSRC / text[1:]).resolve()
        target = next((p for p in (near, under) if p.is_file() and text[0] == '"'), None)
        found.append((text[1:], target.relative_to(CSRC).as_posix() if target else ""))
    return found


ARROWS: Final = [
    (source.relative_to(CSRC).as_posix(), target)
    for source in SOURCES
    for _, target in includes(source)
    if target
]


def test_every_source_has_a_layer() -> None:
    """No file escapes the rules, and the rules see the files."""
    layers = {layer_of(source.relative_to(CSRC).as_posix()) for source in SOURCES}
    assert layers == set(range(7))
    assert ("shm/shm_collectives.cpp", "algorithms/ring.h") in ARROWS


def test_every_quoted_include_is_a_file_of_ours() -> None:
    """Quotes mean our own files, so that no arrow is overlooked."""
    for source in SOURCES:
        text = source.read_text()
        quoted = re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE)
        ours = {written for written, target in includes(source) if target}
        assert not set(quoted) - ours, source


def test_no_include_points_upwards() -> None:
    """common < kernels < slots < algorithms < communicator < shm < bindings and c10d."""
    upwards = [f"{a} -> {b}" for a, b in ARROWS if layer_of(b) > layer_of(a)]
    assert upwards == []


def test_siblings_do_not_know_each_other() -> None:
    """Neither bindings nor shm/ nor nccl/ include c10d/, or it them; shm/ and nccl/ are strangers, too."""
    bad = []
    for a, b in ARROWS:
        if b.startswith("c10d/") and not a.startswith("c10d/"):
            bad.append(f"{a} -> {b}")
        if a.startswith("c10d/") and (layer_of(b) == 6 and not b.startswith("c10d/")):
            bad.append(f"{a} -> {b}")
        if a.startswith("c10d/") and b.startswith(("shm/", "nccl/")):
            bad.append(f"{a} -> {b}")
        if {a.split("/")[0], b.split("/")[0]} == {"shm", "nccl"}:
            bad.append(f"{a} -> {b}")
    assert bad == []


def test_algorithms_know_the_seam_and_not_the_memory() -> None:
    """algorithms/ includes slots.h and the kernels, but nothing of shm/ or of a communicator."""
    allowed = re.compile(r"common\.h|slots\.h|kernels/.*|algorithms/.*")
    bad = [(a, b) for a, b in ARROWS if a.startswith("algorithms/") and not allowed.fullmatch(b)]
    assert bad == []


def test_kernels_do_not_wait() -> None:
    """kernels/ includes only the vocabulary, the error type and itself."""
    allowed = re.compile(r"common\.h|error\.h|kernels/.*")
    bad = [(a, b) for a, b in ARROWS if a.startswith("kernels/") and not allowed.fullmatch(b)]
    assert bad == []


def test_there_is_no_circle_of_headers() -> None:
    """Headers of one layer do not include each other in a circle."""
    targets: dict[str, set[str]] = {}
    for a, b in ARROWS:
        targets.setdefault(a, set()).add(b)

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(targets.get(start, ()))
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += targets.get(name, ())
        return seen

    assert [name for name in targets if name in reach(name)] == []


@pytest.mark.parametrize("library", ["torch", "pybind11", "cuda"])
def test_foreign_headers_stay_where_they_belong(library: str) -> None:
    """Only c10d/ includes torch; only bindings include pybind11 and Python; only .cu files CUDA."""
    pattern, home = {
        "torch": (TORCH, re.compile(r"c10d/.*")),
        "pybind11": (
            re.compile(r"pybind11/|Python\.h"),
            re.compile(
                r"(\w+_)?bindings\.(h|cpp)|python_(tensor|call_site|interrupt|transcode|device_reader)\.(h|cpp)|c10d/bindings\.cpp"
            ),
        ),
        "cuda": (re.compile(r"cuda|cub/|cooperative_groups"), re.compile(r".*\.cuh?")),
    }[library]
    users = {
        source.relative_to(CSRC).as_posix()
        for source in SOURCES
        for written, target in includes(source)
        if not target and pattern.match(written)
    }
    assert users  # the pattern does find them where they belong
    assert [name for name in users if not home.fullmatch(name)] == []


# Python

PYTHON: Final = [ROOT / "setup.py", *sorted((ROOT / "pycomm").rglob("*.py"))]
READERS: Final = {"setup.py", "pycomm/config.py"}


def uses_environment(source: Path) -> bool:
    """Whether a file touches os.environ or os.getenv."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and _imports_it(node))
        for node in ast.walk(ast.parse(source.read_text()))
    )


def _imports_it(node: ast.ImportFrom) -> bool:
    return any(alias.name in ("environ", "getenv", "environb") for alias in node.names)


def test_one_reader_of_the_environment() -> None:
    """Only config.py (and setup.py, which runs without pycomm) look at environment variables."""
    users = {p.relative_to(ROOT).as_posix() for p in PYTHON if uses_environment(p)}
    assert users == READERS


def test_the_core_reads_no_environment() -> None:
    """C++ gets its settings as arguments."""
    assert [p.name for p in SOURCES if "getenv" in p.read_text()] == []


def test_every_variable_in_the_sources_is_documented() -> None:
    """A quoted PYCOMM_ name anywhere in our Python is one that config.py knows."""
    named = {
        name
        for source in PYTHON
        for name in re.findall(r"""["'](PYCOMM_[A-Z_]+)["']""", source.read_text())
    }
    macros = {"PYCOMM_WITH_CUDA"}  # compiler definitions of setup.py
    assert named - macros <= set(Config.variables())
