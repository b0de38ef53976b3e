"""The engines' rank processes, and the driver's talk with them.

Each MPI library needs processes of its own. All of them live throughout the run; those that are
not asked anything are blocked in a socket read.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import bound
import machine
from names import INTEL_MPI, MPICH, ONECCL, OPEN_MPI
from native import CannotCompile, compile_shared

HERE = Path(__file__).parent
START_TIMEOUT_S = 120.0
REPLY_TIMEOUT_S = 300.0
PEER_FOLDERS = {OPEN_MPI: "openmpi", MPICH: "mpich", INTEL_MPI: "impi", ONECCL: "oneccl"}

Message = dict[str, Any]


class TeamError(Exception):
    """An engine could not be started, or a rank of it is gone; the message says which."""


@dataclass
class Team:
    """The ranks of one engine, rank 0 first."""

    name: str
    processes: list[subprocess.Popen[bytes]]
    streams: list[TextIO] = field(default_factory=list)

    def ask(self, verb: str, **arguments: object) -> list[Message]:
        """All ranks do it at the same time; the replies, by rank."""
        line = json.dumps({"verb": verb, **arguments}) + "\n"
        for rank in range(len(self.streams)):
            self.exchange(rank, lambda stream: stream.write(line) and stream.flush())
        replies = []
        for rank in range(len(self.streams)):
            text = self.exchange(rank, lambda stream: stream.readline())
            if not text:
                raise TeamError(f"{self.name}: rank {rank} ended during {verb} {arguments}")
            replies.append(json.loads(text))
        return replies

    def exchange(self, rank: int, action: Callable[[TextIO], Any]) -> Any:
        try:
            return action(self.streams[rank])
        except OSError as error:
            raise TeamError(f"{self.name}: no answer from rank {rank}: {error}") from error

    def close(self) -> None:
        """Let the ranks end by themselves; end the processes that do not."""
        for stream in self.streams:
            try:
                stream.write('{"verb": "quit"}\n')
                stream.close()
            except OSError:
                pass  # it is gone already
        for process in self.processes:
            try:
                process.wait(timeout=10 if self.streams else 1)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()


@dataclass(frozen=True)
class Launch:
    """How to start an engine's ranks."""

    name: str
    commands: list[list[str]]  # one per process to start: a launcher, or each rank
    environment: Mapping[str, str]


def start(launch: Launch, listener: socket.socket, world_size: int) -> Team:
    """Start the processes and wait until all ranks have called."""
    environment = {**os.environ, **COMMON_ENVIRONMENT, **launch.environment}
    team = Team(launch.name, [])
    for command in launch.commands:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        team.processes.append(process)
    by_rank: dict[int, TextIO] = {}
    deadline = time.monotonic() + START_TIMEOUT_S
    listener.settimeout(0.2)
    while len(by_rank) < world_size:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if time.monotonic() < deadline and all(p.poll() is None for p in team.processes):
                continue
            team.close()
            raise TeamError(f"{launch.name}: its ranks did not start, see above") from None
        connection.settimeout(REPLY_TIMEOUT_S)
        stream = connection.makefile("rw")
        connection.close()
        by_rank[json.loads(stream.readline())["rank"]] = stream
    team.streams = [by_rank[rank] for rank in range(world_size)]
    return team


COMMON_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
    "NUMPY_MADVISE_HUGEPAGE": "0",  # the same pages for everyone
}


# ----------------------------------------------------------------------------------- how they start


@dataclass(frozen=True)
class Place:
    """Where the engines meet, and what decides how they are started."""

    folder: Path  # for sockets and rendezvous files
    peers: Path  # the peers' environments
    world_size: int

    @property
    def socket(self) -> str:
        return str(self.folder / "driver")

    @property
    def crowded(self) -> bool:
        return self.world_size > len(os.sched_getaffinity(0))


def torch_launch(place: Place, with_bound: bool) -> Launch:
    script = [
        sys.executable,
        str(HERE / "torch_rank.py"),
        place.socket,
        str(place.folder / "store"),
    ]
    flags = ["--bound"] * with_bound
    ranks = range(place.world_size)
    commands = [[*script, str(rank), str(place.world_size), *flags] for rank in ranks]
    return Launch("torch", commands, {})


def mpi_flags(name: str, crowded: bool) -> list[str]:
    """Open MPI's mpirun refuses root and more ranks than cores unless told; no one binds ranks."""
    if name != OPEN_MPI:
        return []
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [*flags, "--mca", "mpi_yield_when_idle", "1"] if crowded else flags


def mpi_settings(name: str, crowded: bool) -> dict[str, str]:
    """What is best for a library on one host, with more ranks than cores or not; in the report."""
    match name:
        case "MPICH":
            return {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"} if crowded else {}
        case "Intel MPI":  # yields by itself where crowded; its I_MPI_WAIT_MODE=0 would undo that
            return {"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}
        case "oneCCL":  # without a worker thread beside each rank it is faster here
            return {"CCL_WORKER_OFFLOAD": "0", **mpi_settings(INTEL_MPI, crowded)}
    return {}


def peer_launch(name: str, place: Place) -> Launch:
    """A peer in the environment of its own that `make bench-peers` has made."""
    home = place.peers / PEER_FOLDERS[name]
    binaries = home / "bin"
    python = binaries / "python"
    launcher = binaries / ("mpirun" if name == OPEN_MPI else "mpiexec.hydra")
    if not launcher.exists():
        raise TeamError(f"{name}: not installed (make bench-peers installs it)")
    script = [str(python), str(HERE / "mpi_peer.py"), place.socket, name]
    environment = {"PATH": f"{binaries}:{os.environ['PATH']}", **mpi_settings(name, place.crowded)}
    if name in (INTEL_MPI, ONECCL):
        environment |= {"I_MPI_ROOT": str(home), "LD_LIBRARY_PATH": str(home / "lib")}
    if name == ONECCL:
        environment["CCL_ROOT"] = str(home)
        script = [str(python), str(HERE / "oneccl_peer.py"), place.socket, name]
        script += [build_oneccl(home), str(place.folder / "oneccl")]
    flags = mpi_flags(name, place.crowded)
    return Launch(
        name, [[str(launcher), *flags, "-n", str(place.world_size), *script]], environment
    )


def build_oneccl(home: Path) -> str:
    flags = ["-O2", "-std=c++17", f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lccl"]
    try:
        return str(compile_shared(HERE / "oneccl_peer.cpp", flags))
    except CannotCompile as error:
        raise TeamError(f"oneCCL: {error}") from error


class Teams:
    """Every engine that could be started; the context manager ends them all."""

    def __init__(self, world_size: int, peers: list[str], peers_folder: Path) -> None:
        self.temporary = tempfile.TemporaryDirectory(prefix="pycomm-bench-")
        self.place = Place(Path(self.temporary.name), peers_folder, world_size)
        self.peers = peers
        self.teams: list[Team] = []
        self.missing: dict[str, str] = {}  # why, by engine

    def __enter__(self) -> Teams:
        try:
            self.start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start_all(self) -> None:
        with_bound = self.build_bound()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.place.socket)
            listener.listen(self.place.world_size)
            launch = torch_launch(self.place, with_bound)
            self.teams.append(start(launch, listener, self.place.world_size))
            for name in self.peers:
                try:
                    launch = peer_launch(name, self.place)
                    self.teams.append(start(launch, listener, self.place.world_size))
                except TeamError as error:
                    self.missing[name] = str(error)

    def build_bound(self) -> bool:
        try:
            bound.build()
        except CannotCompile as error:
            self.missing["memory bound"] = f"memory bound: {error}"
            return False
        return True

    def __exit__(self, *_: object) -> None:
        for team in self.teams:
            team.close()
        self.temporary.cleanup()


# ----------------------------------------------------------------------------------------- versions

PACKAGES = {OPEN_MPI: "openmpi", MPICH: "mpich", INTEL_MPI: "impi-rt", ONECCL: "oneccl"}


def peer_versions(names: list[str], folder: Path, world_size: int) -> dict[str, str]:
    """Version and settings of each peer that ran, in one line."""
    crowded = world_size > len(os.sched_getaffinity(0))
    lines = {}
    for name in PACKAGES.keys() & set(names):
        python = folder / PEER_FOLDERS[name] / "bin" / "python"
        version = machine.version_of(python, PACKAGES[name])
        how = "ctypes" if name == ONECCL else f"mpi4py {machine.version_of(python, 'mpi4py')}"
        flags = mpi_flags(name, crowded)
        flags += [f"{key}={value}" for key, value in mpi_settings(name, crowded).items()]
        lines[name] = ", ".join([version, how, " ".join(flags) or "defaults"])
    return dict(sorted(lines.items()))
