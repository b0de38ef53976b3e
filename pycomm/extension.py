"""Loads the compiled modules, and explains in words why they cannot be loaded."""

from __future__ import annotations

import importlib
import platform
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch

REBUILD = (
    "Rebuild pycomm with this torch: `make build` in its source tree, or "
    "`pip install --no-build-isolation --force-reinstall --no-deps .`"
)
BUILD = "Build them: `make build` in the source tree, or `pip install --no-build-isolation .`"


def minor(version: str) -> tuple[str, ...]:
    """``2.14.1+cu130`` -> ``("2", "14")``: what the adapter is tied to."""
    return tuple(version.split("+")[0].split(".")[:2])


def check_versions(built_with: str, running: str) -> None:
    """Raises ImportError if an adapter built with one torch cannot serve another."""
    if minor(built_with) != minor(running):
        raise ImportError(
            f"pycomm was built with torch {built_with}, but torch {running} is installed; its adapter to "
            f"torch.distributed only loads with the torch that it was built with. {REBUILD}"
        )


def why_missing(folder: Path) -> str:
    """Why a package of these files has no modules for this interpreter: not built, or built for another one."""
    others = sorted(
        path.name for path in folder.glob("_c*.so") if not path.name.endswith(EXTENSION_SUFFIXES[0])
    )
    if not others:
        return BUILD
    return (
        f"This is Python {platform.python_version()}, whose modules end in {EXTENSION_SUFFIXES[0]}; here are "
        f"{', '.join(others)}, built for another one. {BUILD}"
    )


def load() -> tuple[ModuleType, ModuleType]:
    """The modules ``_core`` and ``_c10d``. Raises ImportError with what to do."""
    try:
        info = importlib.import_module("pycomm._build_info")
        core = importlib.import_module("pycomm._core")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"pycomm's compiled modules are missing ({error}). {why_missing(Path(__file__).parent)}"
        ) from error
    except ImportError as error:
        raise ImportError(f"pycomm's core does not load: {error}. {REBUILD}") from error
    check_versions(info.TORCH_VERSION, torch.__version__)
    for module in (torch, info):  # errors name the user's line, not torch's or ours
        core.skip_files_under(f"{Path(str(module.__file__)).parent}/")
    try:
        return core, importlib.import_module("pycomm._c10d")
    except ImportError as error:
        raise ImportError(f"pycomm's adapter to torch does not load: {error}. {REBUILD}") from error


core, c10d = load()
