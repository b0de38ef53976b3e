"""Builds fake_nccl.cpp, and makes it the NCCL and the CUDA runtime of a rank."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from pycomm.extension import core

HERE: Final = Path(__file__).resolve().parent
SOURCE: Final = HERE / "fake_nccl.cpp"
TYPES: Final = HERE.parent.parent / "csrc/nccl/nccl_types.h"
HEARTBEAT: Final = timedelta(milliseconds=60)


def build() -> str:
    """The path of the library, built if the sources are newer."""
    library = HERE.parent.parent / "build/fake_nccl/libfake_nccl.so"
    newest = max(SOURCE.stat().st_mtime, TYPES.stat().st_mtime)
    if not library.exists() or library.stat().st_mtime < newest:
        library.parent.mkdir(parents=True, exist_ok=True)
        # Built aside and moved, since several pytest processes may come at once.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder, library.name)
            flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread"]
            flags += [
                "-fvisibility=hidden",
                "-Wl,-Bsymbolic",
            ]  # it calls itself, not what torch has loaded
            command = ["g++", *flags, str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            os.replace(made, library)  # noqa: PTH105  (atomic)
    return str(library)


class Fake:
    """One rank's view of the fake: its communicator, and the switches of its faults."""

    def __init__(self, library: str, folder: str, rank: int, world_size: int) -> None:
        os.environ["FAKE_NCCL_DIR"] = folder
        self.library = library
        self.rank = rank
        self.world_size = world_size
        self.calls: Any = ctypes.CDLL(library)
        self.calls.fake_forget_places()
        self.calls.fake_stream.restype = ctypes.c_void_p
        self.calls.fake_end_capture.restype = ctypes.c_void_p
        self.store = dist.HashStore() if world_size == 1 else self._file_store(folder)
        self.stream = int(self.calls.fake_stream())
        core.set_stream_source(lambda device: self.stream)

    def _file_store(self, folder: str) -> Any:
        return dist.FileStore(f"{folder}/store", self.world_size)

    def api(self) -> Any:
        return core.NcclApi(self.library, self.library)

    def communicator(self, timeout: float = 8.0, store: Any = None, **settings: Any) -> Any:
        """This rank's NcclCommunicator."""
        settings.setdefault("heartbeat", HEARTBEAT)
        return core.NcclCommunicator(
            self.api(),
            store or self.store,
            self.rank,
            self.world_size,
            timedelta(seconds=timeout),
            core.NcclSettings(**settings),
        )

    def fault(self, what: str, at: int = 0, value: int = 0) -> None:
        self.calls.fake_fault(what.encode(), at, value)

    def synchronize(self) -> None:
        """Wait until the rank's own stream is empty."""
        self.calls.fake_synchronize(ctypes.c_void_p(self.stream))
