"""Builds pycomm's two extension modules with torch's build helper and ninja.

``pycomm._core`` holds the communication core and no torch headers; it includes CUDA kernels where
nvcc is found (``PYCOMM_CUDA=auto|0|1``). ``pycomm._c10d`` is the thin adapter to torch and is tied to
the torch that it is built with.
Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc")


def cuda_roots() -> list[Path]:
    """Where a CUDA toolkit may be, best guess first.

    ``nvcc`` on the PATH may be a wrapper script that runs the real one elsewhere, so what it executes counts as well.
    """
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if found := shutil.which("nvcc"):
        nvcc = Path(found).resolve()
        roots.append(nvcc.parent.parent)
        head = nvcc.read_bytes()[:4096]
        if head.startswith(b"#!"):
            roots += [Path(m.decode()) for m in re.findall(rb"(/[\w./+-]+)/bin/nvcc", head)]
    roots += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    roots += [Path(entry) / "nvidia" / "cu13" for entry in sys.path if entry]
    return roots


def find_cuda() -> Path | None:
    """The first root that has both the compiler and its headers, or None; PYCOMM_CUDA=0 and =1 insist."""
    wanted = os.environ.get("PYCOMM_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        sys.exit(f"PYCOMM_CUDA must be auto, 0 or 1, not {wanted!r}")
    if wanted == "0":
        return None
    for root in cuda_roots():
        if (root / "bin/nvcc").exists() and (root / "include/cuda_runtime.h").exists():
            return root
    if wanted == "1":
        sys.exit(
            "PYCOMM_CUDA=1, but no root with bin/nvcc and include/cuda_runtime.h was found; set CUDA_HOME"
        )
    return None


CUDA = find_cuda()
if CUDA:
    os.environ["CUDA_HOME"] = str(
        CUDA
    )  # before torch looks for it, which stops at a wrapper script

try:
    import pybind11
    import torch
    from setuptools import Extension, setup
    from torch.utils import cpp_extension
except ModuleNotFoundError as error:
    sys.exit(
        f"Building pycomm needs {error.name} in the environment that it is built for.\n"
        "Run `make build`, or: pip install torch pybind11 ninja 'setuptools>=77', then\n"
        "pip install --no-build-isolation . (an isolated build would compile against another torch)."
    )

ARCHITECTURES = ("80", "90", "100")
CXX_FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]
# GCC 12 warns about its own AVX-512 headers.
CXX_FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
# Sums and products of integers wrap, as torch's do.
CXX_FLAGS += ["-fwrapv"]
NVCC_FLAGS = ["-std=c++17", "-O3", "--threads=2", "-Xcompiler=-fPIC,-fvisibility=hidden"]


def dependencies() -> list[str]:
    """What an installed pycomm needs: of the torch that a build accepts, only the minor version that it had."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    accepted = next(r for r in project["build-system"]["requires"] if r.startswith("torch"))
    major, minor = torch.__version__.split(".")[:2]
    return [f"{accepted},=={major}.{minor}.*", "numpy"]


def targets(architectures: Sequence[str]) -> list[str]:
    return [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]


def sources(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in CSRC.glob(pattern))


def core_extension() -> Extension:
    """The communication core: pybind11, but no torch."""
    extension = Extension(
        "pycomm._core",
        sources=[
            name
            for name in sources("*.cpp", "kernels/*.cpp", "shm/*.cpp", "nccl/*.cpp")
            if CUDA or not name.endswith("_cuda_bindings.cpp")
        ],
        include_dirs=[pybind11.get_include()],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
        extra_link_args=["-Wl,--strip-all", "-ldl"],
        language="c++",
    )
    if CUDA:
        lib = next(path for path in (CUDA / "lib64", CUDA / "lib") if path.exists())
        extension.sources += sources("kernels/*.cu", "p2p/*.cu", "p2p/*.cpp")
        extension.include_dirs.append(str(CUDA / "include"))
        extension.extra_compile_args["cxx"] = [*CXX_FLAGS, "-DPYCOMM_WITH_CUDA"]
        # Static, so that the module also loads where there is no CUDA runtime.
        extension.extra_link_args += [f"-L{lib}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return extension


def c10d_extension() -> Extension:
    """The adapter to torch.distributed."""
    return cpp_extension.CppExtension(
        "pycomm._c10d",
        sources=sources("c10d/*.cpp"),
        extra_compile_args={"cxx": [*CXX_FLAGS, "-std=c++20", "-O2", "-w", "-DUSE_C10D_GLOO"]},
        extra_link_args=["-Wl,--strip-all"],
        libraries=["torch_python"],
    )


class BuildExtension(cpp_extension.BuildExtension):
    """torch's builder, plus a note beside the modules that says what they were built with.

    tests/gpu needs a part of it alone, soon: ``--core-only``, ``--architectures=90``.
    """

    user_options: ClassVar = [
        *cpp_extension.BuildExtension.user_options,
        ("core-only", None, "build pycomm._core alone"),
        ("architectures=", None, "compute capabilities that kernels are compiled for: 80,90"),
    ]
    boolean_options: ClassVar = [*cpp_extension.BuildExtension.boolean_options, "core-only"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.core_only = False
        self.architectures = ",".join(ARCHITECTURES)

    def finalize_options(self) -> None:
        super().finalize_options()
        core = self.extensions[0]
        core.extra_compile_args["nvcc"] = [*NVCC_FLAGS, *targets(self.architectures.split(","))]
        if self.core_only:
            self.extensions = [core]

    def run(self) -> None:
        banner(self.architectures)
        super().run()
        note = Path(self.get_ext_fullpath("pycomm._core")).parent / "_build_info.py"
        note.write_text(
            '"""Written by setup.py: what the extension modules beside this file were built with."""\n\n'
            f"TORCH_VERSION = {torch.__version__!r}\n"
            f"CUDA_TOOLKIT = {str(CUDA.name) if CUDA else None!r}\n"
        )


def banner(architectures: str) -> None:
    """Says what was found and what follows from it."""
    cuda = (
        f"nvcc in {CUDA}: kernels for sm_{architectures.replace(',', ', sm_')}" if CUDA else "off"
    )
    why = "" if CUDA else f" (PYCOMM_CUDA={os.environ.get('PYCOMM_CUDA', 'auto')}, no toolkit used)"
    print(
        f"pycomm: Python {platform.python_version()}, torch {torch.__version__}, pybind11 {pybind11.__version__}\n"
        f"pycomm: CUDA {cuda}{why}\n"
        f"pycomm: _core loads with every torch; _c10d only with torch {torch.__version__}",
        flush=True,
    )


setup(
    install_requires=dependencies(),
    ext_modules=[core_extension(), c10d_extension()],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
)
