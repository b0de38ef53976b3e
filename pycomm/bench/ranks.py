"""The ranks: started here, or joined where torchrun, mpirun or srun has started them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from pycomm.bench.settings import Settings
from pycomm.config import Launch, child_environment
from pycomm.errors import InvalidArgument

#: Seconds that other ranks get to end by themselves when one has failed.
GRACE: Final = 10.0
_TIMEOUT: Final = timedelta(seconds=120)


def start(arguments: list[str], ranks: int) -> int:
    """Runs this command on so many processes; their exit status. One that fails ends the others."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        told = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "pycomm.bench", *arguments]
        processes.append(subprocess.Popen(command, env=child_environment(told)))
    try:
        return _await(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _await(processes: list[subprocess.Popen[bytes]]) -> int:
    deadline = None
    while True:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            break
        if deadline is None and any(codes):
            deadline = time.monotonic() + GRACE
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"pycomm.bench: rank {rank} was ended by signal {-code}", file=sys.stderr)
    failed = [code for code in codes if code]
    return (2 if 2 in failed else 1) if failed else 0


def missing(backend: str) -> str:
    """Why it cannot be used here, or nothing."""
    if backend == "nccl" and not torch.cuda.is_available():
        return "there is no GPU here that torch can use"
    if backend == "mpi" and not dist.is_mpi_available():
        return "this torch was built without MPI; benchmarks/collectives.py --peers measures MPI by mpi4py"
    if backend == "gloo" and not dist.is_gloo_available():
        return "this torch was built without Gloo"
    return ""


def check_plot() -> None:
    """Raises InvalidArgument where nothing can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgument("--plot needs matplotlib: pip install matplotlib")


def check_memory(settings: Settings, ranks_here: int) -> None:
    """Raises InvalidArgument if the largest buffers do not fit into what is free."""
    per_backend = 3 * (2 if settings.check else 1)
    needed = max(settings.sizes) * len(settings.ways) * ranks_here * per_backend
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    if needed > free:
        raise InvalidArgument(
            f"-e {max(settings.sizes)} needs about {needed / 2**30:.1f} GB on this host, of which "
            f"{free / 2**30:.1f} are free: a smaller -e, or fewer ranks or backends"
        )


def join(
    settings: Settings, launch: Launch
) -> tuple[dict[str, dist.ProcessGroup], dist.ProcessGroup]:
    """The backends' groups by name, and one for what the ranks tell each other between measurements."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if settings.bind and settings.ranks is not None and len(cores) >= launch.world_size:
        os.sched_setaffinity(0, {cores[launch.local_rank]})
    dist.init_process_group(
        "gloo", rank=launch.rank, world_size=launch.world_size, timeout=_TIMEOUT
    )
    control = dist.group.WORLD
    assert control is not None
    groups: dict[str, Any] = {
        name: dist.new_group(backend=name, timeout=_TIMEOUT) for name in settings.backends
    }
    return groups, control
