"""What of torch's suite is run, and what may fail: the one table behind the runner and EXPECTED.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

NAMES_FILE: Final = Path(__file__).with_name("gloo_passes.txt")
#: Tests that torch opens to MPI only. Gloo has no all_to_all of lists of tensors; pycomm has.
ALL_TO_ALL: Final = (
    "test_all_to_all",
    "test_all_to_all_complex",
    "test_all_to_all_full_group",
    "test_all_to_all_group",
)
#: Tests that call dist.monitored_barrier, and want it to get through or to name the missing ranks.
MONITORED: Final = (
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
)
#: The one of ALL_TO_ALL that needs the group of ranks 1 and 2.
ALL_TO_ALL_GROUP: Final = "test_all_to_all_group"

#: Verdicts that leave the runner's status at 0.
GOOD: Final = ("pass", "expected failure")


@dataclass(frozen=True)
class Exempt:
    """A test that is expected to fail with a backend, and why; a pass is then an error of this table."""

    test: str
    backend: str
    reason: str
    evidence: str
    until: str = ""  # the torch that no longer has the reason, as 2.14; empty for none

    def holds(self) -> bool:
        """Whether it applies to the torch at hand."""
        return not self.until or _version(torch.__version__) < _version(self.until)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


_GLOO: Final = (
    "Gloo has no all_to_all of lists; torch skips the test for it",
    "this runner takes the skip away and Gloo refuses the call",
)
_MONITORED: Final = (
    "`dist.monitored_barrier` of torch 2.13 refuses every backend that is not named gloo, before it is called",
    "its error in torch 2.13.0: monitored_barrier is only implemented for GLOO backend; the tests pass with 2.14.1",
    "2.14",
)
EXEMPT: Final = (
    Exempt(
        "test_ddp_logging_data_cpu",
        "pycomm",
        "torch's C++ DDP logger knows the names of its own backends only: it writes `custom` where the test "
        "wants the backend's name",
        "Gloo under another name (`register_backend` with a creator of ProcessGroupGloo) fails it alike",
    ),
    *(Exempt(test, "pycomm", *_MONITORED) for test in MONITORED),
    Exempt(
        "test_invalid_static_graph",
        "pycomm",
        "after a backward that failed the test wants the next forward to speak of parameters without a gradient, where "
        "pycomm speaks of the backward that failed",
        "its error: an error ended the last backward() before the gradients of lin1.weight came",
    ),
    *(Exempt(test, "gloo", *_GLOO) for test in ALL_TO_ALL),
)


def listed(world: int) -> list[str]:
    """The names to run with so many ranks, in order."""
    names = set(ALL_TO_ALL)
    if world < 3:
        names.remove(ALL_TO_ALL_GROUP)
    for line in NAMES_FILE.read_text().splitlines():
        name, *worlds = line.split()
        if name != "#" and str(world) in worlds:
            names.add(name)
    return sorted(names)


def exempt(test: str, backend: str) -> Exempt | None:
    """The exemption of a test with a backend, if it has one."""
    for entry in EXEMPT:
        if (entry.test, entry.backend) == (test, backend) and entry.holds():
            return entry
    return None


def verdict(test: str, backend: str, status: str) -> str:
    """A status seen against what is expected; those in GOOD are as they should be."""
    if exempt(test, backend) is None:
        return status
    return {"fail": "expected failure", "pass": "unexpected pass"}.get(status, status)


def exempt_table() -> str:
    """The exemptions as the Markdown table of EXPECTED.md."""
    rows = ["| test | fails with | torch | reason | evidence |", "|---|---|---|---|---|"]
    for e in EXEMPT:
        versions = f"before {e.until}" if e.until else "any"
        rows.append(f"| `{e.test}` | {e.backend} | {versions} | {e.reason} | {e.evidence} |")
    return "\n".join(rows) + "\n"
