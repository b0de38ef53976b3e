"""What pip is given and what it leaves: the source distribution is whole, and modules that do not fit say why.

That both install and train is `make test-wheel`, which compiles.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

import pytest
import torch

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "pycomm"
#: What a build, with nvcc or without, and the demo need.
NEEDED: Final = ("csrc", "pycomm", "examples", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def in_git(*paths: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split())


def test_a_source_distribution_is_whole(tmp_path: Path) -> None:
    """Every file that a build reads is in it, and nothing that an earlier build left in the tree."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: git says which files there have to be")
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    command += ["sdist", "--formats=tar", "--dist-dir", str(tmp_path)]
    environment = {**os.environ, "PYCOMM_CUDA": "0"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    (archive,) = tmp_path.glob("pycomm-*.tar")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames() if "." in Path(name).name}
        metadata = next(n for n in file.getnames() if n.count("/") == 1 and n.endswith("/PKG-INFO"))
        text = file.extractfile(metadata)
        assert text is not None
        requires = [
            line for line in text.read().decode().splitlines() if "Requires-Dist: torch" in line
        ]
    needed = {name for name in in_git(*NEEDED) if "." in Path(name).name}
    assert {Path(n).suffix for n in needed} >= {".cu", ".cuh", ".h", ".cpp", ".py", ".pyi"}
    assert needed - names == set()
    assert [n for n in names if n.endswith((".so", ".pyc", "_build_info.py", ".o"))] == []
    major, minor = torch.__version__.split(".")[:2]
    assert len(requires) == 1
    assert f"=={major}.{minor}.*" in requires[0], "pip must not bring a torch that cannot load it"


# ---- modules that do not fit


def modules() -> list[Path]:
    return sorted(PACKAGE.glob(f"_c*{EXTENSION_SUFFIXES[0]}"))


def built_with_another_torch(folder: Path) -> None:
    info = folder / "_build_info.py"
    text = info.read_text()
    info.unlink()
    info.write_text(text.replace(torch.__version__, "2.99.0+cpu"))


def not_built(folder: Path) -> None:
    for path in [*folder.glob("_c*.so"), folder / "_build_info.py"]:
        path.unlink()


def built_for_another_python(folder: Path) -> None:
    for path in folder.glob("_c*.so"):
        path.rename(folder / f"{path.name.partition('.')[0]}.cpython-399-x86_64-linux-gnu.so")


def damaged(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (path,) = folder.glob(f"{name}{EXTENSION_SUFFIXES[0]}")
        path.unlink()
        path.write_bytes(b"\x7fELF, cut short")

    return spoil


def misses_a_function(folder: Path) -> None:
    """As an adapter does whose torch has changed."""
    (path,) = folder.glob(f"_c10d{EXTENSION_SUFFIXES[0]}")
    path.unlink()
    source = folder / "adapter.c"
    source.write_text("void gone(void);\nvoid *PyInit__c10d(void) { gone(); return 0; }\n")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-z,now", "-o", str(path), str(source)], check=True
    )


REBUILD: Final = "pip install --no-build-isolation --force-reinstall"
KINDS: Final[list[tuple[Callable[[Path], None], list[str]]]] = [
    (
        built_with_another_torch,
        ["built with torch 2.99.0+cpu", f"torch {torch.__version__} is installed", REBUILD],
    ),
    (not_built, ["modules are missing", "_build_info", "make build"]),
    (
        built_for_another_python,
        ["modules are missing", "This is Python 3.", "_core.cpython-399", "for another one"],
    ),
    (damaged("_core"), ["core does not load", REBUILD]),
    (damaged("_c10d"), ["adapter to torch does not load", REBUILD]),
    (misses_a_function, ["adapter to torch does not load", "undefined symbol: gone", REBUILD]),
]

IMPORTS: Final = """
import os, sys
import torch
for folder in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        sys.path.insert(0, folder)
        try:
            import pycomm
            said = "imported"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        print(said.replace("\\n", " "), flush=True)
        os._exit(0)
    os.wait()
"""


def test_modules_that_do_not_fit_say_why(tmp_path: Path) -> None:
    """Built with another torch, for another Python, not at all, damaged: an ImportError with what to do."""
    folders = []
    for number, spoil in enumerate([lambda _: None, *(kind for kind, _ in KINDS)]):
        folder = tmp_path / str(number) / "pycomm"
        skip = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(PACKAGE, folder, ignore=skip)
        for path in modules():
            (folder / path.name).symlink_to(path)
        spoil(folder)
        folders.append(str(folder.parent))
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *folders],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    said = done.stdout.splitlines()
    assert said[0] == "imported", done.stderr
    assert len(said) == 1 + len(KINDS)
    for text, (kind, words) in zip(said[1:], KINDS, strict=True):
        assert text.startswith("ImportError: pycomm"), (kind, text)
        assert [w for w in words if w not in text] == [], (kind, text)
