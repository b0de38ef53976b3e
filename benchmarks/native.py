"""Compiles the benchmarks' small native parts when they are needed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "benchmarks"


class CannotCompile(Exception):
    """No compiler, or it refused; the message is one line."""


def compile_shared(source: Path, flags: Sequence[str]) -> Path:
    """A shared library of one C or C++ file, made again when that file is newer."""
    library = FOLDER / f"{source.stem}.so"
    if library.exists() and library.stat().st_mtime >= source.stat().st_mtime:
        return library
    compiler = shutil.which("gcc" if source.suffix == ".c" else "g++")
    if compiler is None:
        raise CannotCompile("no gcc or g++ on the PATH")
    FOLDER.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [compiler, "-shared", "-fPIC", str(source), "-o", str(unfinished), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise CannotCompile((errors or done.stderr.splitlines() or ["compiler failed"])[0])
    unfinished.rename(library)
    return library
