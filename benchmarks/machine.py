"""Where a run was made: the processor, the versions, and how busy others kept the machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Clock:
    """Seconds: of the wall, of all CPUs at work (for anyone), and of the benchmark at work."""

    wall: float
    machine: float
    benchmark: float


def read_clock(ranks_s: float) -> Clock:
    """Now; the ranks' CPU seconds are the caller's to know."""
    user, nice, system, _idle, _iowait, *rest = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    ticks = user + nice + system + sum(rest)
    own = os.times()
    return Clock(own.elapsed, ticks / os.sysconf("SC_CLK_TCK"), own.user + own.system + ranks_s)


def others_share(start: Clock, end: Clock) -> float:
    """The part of the machine's CPU time that went to none of the benchmark's processes."""
    available = (end.wall - start.wall) * (os.cpu_count() or 1)
    used = end.benchmark - start.benchmark
    return max(0.0, end.machine - start.machine - used) / available


def describe(others: float, peers: dict[str, str]) -> dict[str, object]:
    """For the record; `peers` are versions by engine."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "real_time_scheduler": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
        "cpu_share_of_others": others,
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "pycomm": pycomm_version(),
        "commit": commit(),
        "peers": peers,
        "command": shlex.join(["python", "benchmarks/collectives.py", *sys.argv[1:]]),
        "finished": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def pycomm_version() -> str:
    import pycomm  # here: --help and a missing build do without it

    return pycomm.__version__


def commit() -> str:
    """Of the working tree; with a + if it has changes that are not committed."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head = [*git, "rev-parse", "--short", "HEAD"]
    status = [*git, "status", "--porcelain", "--untracked-files=no"]
    try:
        name, changes = (
            subprocess.run(it, capture_output=True, text=True, check=True).stdout.strip()
            for it in (head, status)
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + "+" * bool(changes)


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def version_of(python: Path, package: str) -> str:
    """Of a package in another environment."""
    code = f"from importlib import metadata; print(metadata.version({package!r}))"
    command = [str(python), "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
