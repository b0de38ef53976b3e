"""Configuration from the environment: the only reader of ``PYCOMM_*`` variables.

Rank 0's settings of the shared segment hold for all ranks. ``python -m pycomm.config`` prints the table.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from pycomm import all_reduce_table

BUILD_VARIABLES = {
    "PYCOMM_CUDA": "Build only: auto, 0 or 1; whether setup.py compiles the CUDA kernels."
}
TEST_VARIABLES = {
    "PYCOMM_TEST_DDP": "Tests only: `torch` runs the DDP contract tests against torch's own class.",
    "PYCOMM_TEST_FAULT": "Tests only: a fault, as `what=kill,rank=1,operation=5`; what: kill, segv, exit, stop, raise, "
    "delay (value=ms), corrupt (the header; value=seed); with chunk=2 inside the operation, else before it. "
    "Operations count from 2.",
}


def _setting(default: Any, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class Config:
    """Settings of this process. A field ``x`` is read from ``PYCOMM_X``."""

    slot_bytes: int = _setting(
        128 * 1024, "Bytes of a slot, the largest chunk of a tensor in flight; a multiple of 4096."
    )
    slots: int = _setting(8, "Slots per rank; a power of two, at least 4.")
    streaming: str = _setting(
        "auto",
        "Whether slots are written past the caches: auto (by measured flag latency), never, always.",
    )
    spin_polls: int = _setting(
        -1, "Polls of a waited-for flag before yielding the core; -1 chooses by ranks and cores."
    )
    heap_bytes: int = _setting(
        16 << 30,
        "Address space per rank for shared tensors (pycomm.empty); memory is used only by tensors. "
        "Divided down so that all ranks' heaps take at most 256 GiB; a multiple of 4096.",
    )
    channel_bytes: int = _setting(
        1024 * 1024,
        "Bytes of the ring that holds one rank's messages to another; a power of two, at least 4096.",
    )
    single_copy: str = _setting(
        "auto",
        "Whether ranks read each other's private tensors of 16 KiB to 4 MiB directly, if the "
        "kernel lets all of them: auto (by measured flag latency), never, always.",
    )
    records: int = _setting(
        512,
        "Operations per rank that the flight recorder remembers; a power of two, or 0: no recorder, no stats().",
    )
    trace_dir: str = _setting(
        "",
        "Where the flight recorder is dumped when an operation fails, or on a signal; `python -m pycomm.trace DIR` "
        "reads it. Empty: nowhere.",
    )
    trace_signal: str = _setting(
        "SIGUSR2",
        "The signal that makes a rank dump, if PYCOMM_TRACE_DIR is set and nobody handles it.",
    )
    call_sites: str = _setting(
        "auto",
        "When the Python line of a call is looked for: auto (of asynchronous operations at the call, "
        "of others if they fail), always (0.3 us a call; traces then name every line), never.",
    )
    liveness: str = _setting(
        "auto",
        "How ranks notice a peer's death: auto (pid; between containers, or without pidfd_open, lock; "
        "else heartbeat), pid, lock, heartbeat.",
    )
    nccl_lib: str = _setting(
        "",
        "The NCCL library to use; empty: the one that the process has loaded, else that of torch's wheels.",
    )
    cudart_lib: str = _setting("", "The CUDA runtime to use beside it; empty: likewise.")
    check: str = _setting(
        "late",
        "How ranks see on GPUs that they call the same: off, late (when an operation does not end in time), full "
        "(before every operation, for some 50 us). CPU tensors' calls are always compared.",
    )
    heartbeat_ms: int = _setting(
        1000,
        "Milliseconds between two looks at the Store for what became of the other ranks of a GPU group.",
    )
    all_reduce: str = _setting(
        "",
        "Which algorithm all_reduce takes up to which size, on shared memory: like 64K:one_shot,two_shot, or @ and a "
        "file that `python -m pycomm.bench --tune FILE` has written. Empty: as csrc/algorithms/choose.h has it.",
    )
    ddp_overlap: str = _setting(
        "auto",
        "Whether DDP's buckets travel while backward goes on, on a thread of their own: "
        "auto (if there are at least two cores per rank), 0, 1.",
    )
    ddp_missing: str = _setting(
        "backward",
        "When DDP refuses to leave gradients local because those of unused parameters are missing: "
        "backward (at its end, and the group ends with it), step (at the optimizer's step or, as "
        "torch and with the group living on, at the next forward).",
    )

    ddp_buckets: str = _setting(
        "direct",
        "Where DDP averages gradients: direct (where they lie), torch (in its Reducer's buckets, as "
        "is done anyway with find_unused_parameters, static_graph, gradient_as_bucket_view, hooks "
        "and sparse gradients).",
    )

    @classmethod
    def variables(cls) -> dict[str, str]:
        """Every variable and what it means."""
        own = {f"PYCOMM_{f.name.upper()}": f.metadata["about"] for f in fields(cls)}
        return own | BUILD_VARIABLES | TEST_VARIABLES

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Config:
        """Reads the variables; warns about unknown ``PYCOMM_*`` names, raises ValueError for bad values."""
        known = cls.variables()
        for name in environment:
            if name.startswith("PYCOMM_") and name not in known:
                warnings.warn(
                    f"unknown variable {name}; known are {', '.join(known)}", stacklevel=2
                )
        values: dict[str, Any] = {}
        for f in fields(cls):
            text = environment.get(f"PYCOMM_{f.name.upper()}")
            if text is None:
                continue
            try:
                values[f.name] = int(text) if f.type == "int" else text
            except ValueError:
                raise ValueError(
                    f"PYCOMM_{f.name.upper()} must be an integer, not {text!r}"
                ) from None
        return cls(**values)

    @classmethod
    def test_fault(cls, environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
        """``PYCOMM_TEST_FAULT`` as arguments of ``core.set_test_fault``, or None; ValueError if it is none."""
        text = environment.get("PYCOMM_TEST_FAULT")
        if not text:
            return None
        try:
            pairs = dict(part.split("=") for part in text.split(","))
            numbers = ("rank", "operation", "chunk", "value")
            return {k: int(v) if k in numbers else v for k, v in pairs.items()}
        except ValueError:
            raise ValueError(
                f"PYCOMM_TEST_FAULT must be like what=kill,rank=1,operation=5, not {text!r}"
            ) from None

    def __post_init__(self) -> None:
        try:
            all_reduce_table.of_text(self.all_reduce, 1)
        except ValueError as error:
            raise ValueError(f"PYCOMM_ALL_REDUCE: {error}") from None
        if not isinstance(getattr(signal, self.trace_signal, None), signal.Signals):
            raise ValueError(
                f"PYCOMM_TRACE_SIGNAL must be a signal's name, like SIGUSR2, not {self.trace_signal!r}"
            )
        for name, allowed in {
            "streaming": ("auto", "never", "always"),
            "single_copy": ("auto", "never", "always"),
            "ddp_overlap": ("auto", "0", "1"),
            "call_sites": ("auto", "always", "never"),
            "check": ("off", "late", "full"),
            "liveness": ("auto", "pid", "lock", "heartbeat"),
            "ddp_missing": ("backward", "step"),
            "ddp_buckets": ("direct", "torch"),
        }.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"PYCOMM_{name.upper()} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}"
                )


#: By launcher (torchrun, Open MPI, MPICH and Hydra, Slurm): variables with rank, ranks, and rank on its host.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Launch:
    """What a launcher told this process: its rank, how many there are, and its rank on this host."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """None if no launcher started this process; ValueError if it told something that is no number."""
        for rank, ranks, local in _LAUNCHERS:
            if rank in environment and ranks in environment:
                here, count = int(environment[rank]), int(environment[ranks])
                return cls(here, count, int(environment.get(local, here)))
        return None


def child_environment(told: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a child, with these variables in it."""
    return {**os.environ, **told}


@cache
def config() -> Config:
    """This process's settings, read once."""
    return Config.from_environment()


def table() -> str:
    """The variables as a markdown table."""
    defaults = {f"PYCOMM_{f.name.upper()}": f.default for f in fields(Config)}
    rows = [
        f"| `{n}` | `{defaults.get(n, '')}` | {about} |" for n, about in Config.variables().items()
    ]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
