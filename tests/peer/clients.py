"""Trains small models through libraries that use torch.distributed, on Gloo and on pycomm, and compares to the bit.

With two ranks every sum is the same on both backends, so each loss and each weight has to be equal exactly. The
status is 1 if one differs, or if a job on pycomm fails; Gloo may abort when the interpreter ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

JOBS: Final = Path(__file__).with_name("jobs")

#: Scripts and the library that each needs beside torch.
CLIENTS: Final = {
    "with_accelerate": "accelerate",
    "with_lightning": "lightning",
    "with_transformers": "transformers",
    "with_fsdp_checkpoint": "torch",
    "with_tensor_parallel": "torch",
    "with_pipelining": "torch",
    "with_functional": "torch",
}

EXAMPLES = """\
examples:
  python tests/peer/clients.py
  python tests/peer/clients.py -k 'fsdp|pipelining' --out runs/clients.jsonl
"""


@dataclass(frozen=True)
class Run:
    """What one job on one backend came to."""

    status: int  # exit code, or -1: it ran out of time
    seconds: float
    facts: dict[str, Any] | None  # what rank 0 reported: backend, wrapped, ranks
    output: str

    @property
    def final_loss(self) -> float:
        """The last loss of the last rank that has any; nan without a report."""
        losses = [loss for rank in (self.facts or {}).get("ranks", []) for loss in rank[0][-1:]]
        return float.fromhex(losses[-1]) if losses else float("nan")


def environment() -> dict[str, str]:
    """For the jobs: one thread, no network."""
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    return {**os.environ, **fixed, **quiet}


def run(name: str, backend: str, timeout: float) -> Run:
    """Runs a job on two ranks."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += [str(JOBS / f"{name}.py"), backend]
    started = time.monotonic()
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        try:
            output, status = job.communicate(timeout=timeout)[0], job.returncode
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun ends its ranks
            output, status = job.communicate()[0], -1
    found = re.search(r"^RESULT (\{.*\})$", output, re.MULTILINE)
    facts = json.loads(found.group(1)) if found else None
    return Run(status, round(time.monotonic() - started, 1), facts, output)


def compare(gloo: Run, ours: Run) -> str:
    """What is wrong, in words; nothing if all is well."""
    if gloo.facts is None:
        return f"no result on Gloo (status {gloo.status}):\n{gloo.output[-3000:]}"
    if ours.facts is None or ours.status != 0:
        return f"failed on pycomm (status {ours.status}):\n{ours.output[-3000:]}"
    if ours.facts["backend"] != "pycomm":
        return f"ran on {ours.facts['backend']}"
    if ours.facts["wrapped"] and not ours.facts["wrapped"].startswith("pycomm."):
        return f"was wrapped by {ours.facts['wrapped']}"
    for rank, pair in enumerate(zip(gloo.facts["ranks"], ours.facts["ranks"], strict=True)):
        (losses, weights), (our_losses, our_weights) = pair
        if losses != our_losses:
            return f"rank {rank}: losses {our_losses}, on Gloo {losses}"
        if weights != our_weights:
            return f"rank {rank}: other weights than on Gloo"
    return ""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", metavar="REGEX", default="", help="only jobs whose name has a match")
    parser.add_argument(
        "--timeout", type=float, default=240, help="seconds for a job (default: 240)"
    )
    parser.add_argument("--out", type=Path, help="file of JSON lines, one a job and backend")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    return parser.parse_args(arguments)


def table_row(name: str, gloo: Run, ours: Run, wrong: str) -> list[str]:
    """The cells of the summary for one job."""
    times = f"{gloo.seconds:g} / {ours.seconds:g}"
    verdict = "differs or failed" if wrong else "equal to the bit"
    if gloo.status != 0 and gloo.facts is not None:
        verdict += f"; Gloo ended with status {gloo.status}"
    return [name, f"{gloo.final_loss:.9g}", f"{ours.final_loss:.9g}", times, verdict]


def write(out: Path | None, name: str, backend: str, result: Run) -> None:
    """Appends one line to the file."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        row = {"job": name, "backend": backend, "status": result.status, "seconds": result.seconds}
        with out.open("a") as file:
            file.write(json.dumps({**row, "facts": result.facts}) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    names = [name for name in CLIENTS if re.search(options.k, name)]
    if options.list:
        print("\n".join(names))
        return 0
    console, failed = Console(highlight=False, soft_wrap=True), False
    if not console.is_terminal:
        console.width = 120
    table = Table("job", "final loss, Gloo", "pycomm", "seconds", "verdict")
    for name in names:
        if importlib.util.find_spec(CLIENTS[name]) is None:
            table.add_row(name, "", "", "", f"not run: no {CLIENTS[name]} here")
            continue
        with console.status(name):
            gloo, ours = (run(name, backend, options.timeout) for backend in ("gloo", "pycomm"))
        wrong = compare(gloo, ours)
        write(options.out, name, "gloo", gloo)
        write(options.out, name, "pycomm", ours)
        table.add_row(*table_row(name, gloo, ours, wrong))
        if wrong:
            failed = True
            console.print(f"{name}: {wrong}", markup=False)
    console.print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
