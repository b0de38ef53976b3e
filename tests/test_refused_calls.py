"""System calls that containers refuse (seccomp): results are the same, deaths are noticed; on all ranks, or on one.

Found so: where pidfd_open was refused, a death was noticed by the deadline only.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import DIED, Refused, attempt, run, td
from limits import can_refuse, is_refused, refuse_calls
from test_single_copy import communicators, every_operation, uneven

import pycomm

pytestmark = pytest.mark.skipif(not can_refuse(), reason="needs x86-64's numbers of system calls")

COPIES: Final = ("process_vm_readv", "process_vm_writev", "pidfd_getfd", "ptrace", "kcmp")
COUNTS: Final = (100, 65_537)
PIDFD: Final = ("pidfd_open", "pidfd_getfd")

#: Which calls, with which error, on which ranks of three.
REFUSALS: Final[dict[str, tuple[tuple[str, ...], int, set[int]]]] = {
    "reading memory": (COPIES, errno.EPERM, {0, 1, 2}),
    "reading memory, one rank": (COPIES, errno.EPERM, {1}),
    "unknown calls": ((*COPIES, *PIDFD), errno.ENOSYS, {0, 1, 2}),
    "pidfds, one rank": (PIDFD, errno.EPERM, {2}),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_results_and_a_death(refusal: str) -> None:
    """Whoever asks for single copies and cannot have them gets slots; whoever has no pidfd watches otherwise."""
    names, number, where = REFUSALS[refusal]

    def worker(rank: int, n: int) -> tuple[int, Any]:
        if rank in where:
            refuse_calls(names, number)
            assert all(is_refused(name, number) for name in names)
        pair = communicators(rank, n)  # one that would copy once, and one that never does
        checked = 0
        for count in COUNTS:
            for got, expected in zip(*(every_operation(one, count) for one in pair), strict=True):
                assert torch.equal(got, expected)
                checked += 1
        for got, expected in zip(*(uneven(one) for one in pair), strict=True):
            assert torch.equal(got, expected)
            checked += 1
        pair[0].barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        found = attempt(lambda: [pair[0].all_reduce(torch.ones(100_000)) for _ in range(2)])
        return checked, found

    results = run(3, worker, may_die={1})
    assert results[1] is DIED
    for checked, found in (results[0], results[2]):
        assert checked == len(COUNTS) * 10 + 9
        assert isinstance(found, Refused)
        assert "PeerDiedError" in found.kinds, found
        assert "lost rank 1" in found.message


def test_pids_without_pidfds_are_refused_in_words() -> None:
    """Who forces them is told so by every rank, in place of a death that nobody notices."""

    def worker(rank: int, n: int) -> Any:
        if rank == 1:
            refuse_calls(PIDFD)
        store = dist.PrefixStore("forced", dist.distributed_c10d._get_default_store())
        return attempt(lambda: pycomm.create_communicator(store, rank, n, td(8)))

    for found in run(2, worker, env={"PYCOMM_LIVENESS": "pid"}, backend="gloo"):
        assert isinstance(found, Refused)
        assert "InvalidArgument" in found.kinds
        assert "refuses it pidfd_open. Set PYCOMM_LIVENESS to auto" in found.message
