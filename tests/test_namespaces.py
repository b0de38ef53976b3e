"""Ranks in different containers: pids mean nothing across them, shared memory is not a file, and deaths are noticed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Final

import faults
import pytest
import torch
import torch.distributed as dist
from containers import CONTAINER, PIDS_ONLY, Box, can_unshare, contained
from faults import LARGE, SHORT, SMALL, Cell, open_things
from harness import DIED, Refused, attempt, run, td
from last_words import ENDS, check_last_words

import pycomm

pytestmark = pytest.mark.skipif(
    not can_unshare("--pid", "--mount", "--ipc", "--uts", "--fork", "--mount-proc"),
    reason="this machine does not let us have namespaces of our own",
)

ROOT: Final = Path(__file__).resolve().parent.parent

#: By name, where the ranks of a job live; None is the host.
PLACES: Final[dict[str, list[Box | None]]] = {
    "containers": [CONTAINER] * 3,
    "pids only": [PIDS_ONLY] * 3,
    "host and containers": [None, CONTAINER, CONTAINER],
    "containers and host": [CONTAINER, CONTAINER, None],
    "without /proc": [Box(has_proc=False)] * 3,
    "one without /proc": [CONTAINER, Box(has_proc=False), CONTAINER],
}


@pytest.fixture(scope="module")
def port() -> int:
    """Where a Store listens, for ranks that share no files."""
    return STORE.port


STORE: Final = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(name: str, port: int, rank: int, n: int, seconds: float = 10) -> None:
    """Begin the default group."""
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port))
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=n, timeout=td(seconds))


# ---- while all is well


def values(rank: int, n: int) -> list[Any]:
    """What all operations give, small and large."""
    got: list[Any] = []
    for count in (3, 50_000, 3_000_000):
        x = torch.arange(count) % 7 + rank
        total, turned = x.clone(), torch.empty(n, dtype=x.dtype)
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_reduce(total)
        dist.all_gather(parts, x)
        dist.all_to_all_single(turned, torch.arange(n) + 10 * rank)
        root = x.clone()
        dist.broadcast(root, n - 1)
        ring = torch.empty_like(x)
        requests: Any = [dist.isend(x, (rank + 1) % n), dist.irecv(ring, (rank - 1) % n)]
        for request in requests:
            request.wait()
        expected = n * (torch.arange(count) % 7) + n * (n - 1) // 2
        got += [torch.equal(total, expected), [p[-1].item() - x[-1].item() for p in parts]]
        got += [turned.tolist(), root[0].item(), ring[0].item()]
    shared = pycomm.empty(SMALL, shared=True).fill_(1.0)
    dist.all_reduce(shared)
    return [*got, shared[-1].item()]


def expected_values(rank: int, n: int) -> list[Any]:
    """The same, by hand."""
    turned = [10 * peer + rank for peer in range(n)]
    one = [True, [peer - rank for peer in range(n)], turned, n - 1, (rank - 1) % n]
    return [*one * 3, float(n)]


@pytest.mark.parametrize("place", PLACES)
def test_operations_and_a_second_group(place: str, port: int) -> None:
    """Everything works, twice in one process, whatever the ranks have in common, and leaves nothing."""

    def step(rank: int, n: int) -> tuple[list[Any], list[str]]:
        got: list[Any] = []
        left_over: list[str] = []
        has_proc = Path("/proc/self/fd").exists()
        for number in range(3):
            before = open_things(True) if has_proc else {}
            meet(f"well {place} {number}", port, rank, n)
            got.append(values(rank, n))
            dist.destroy_process_group()
            after = open_things(True) if has_proc else {}
            if number > 0:  # what torch opens once and keeps is not ours
                left_over += [f"{k}: {v} -> {after[k]}" for k, v in before.items() if after[k] > v]
        return got, left_over

    boxes = PLACES[place]
    results = run(3, lambda r, n: contained(boxes[r], lambda: step(r, n)), init=False, wall=60)
    for rank, (got, left_over) in enumerate(results):
        assert got == [expected_values(rank, 3)] * 3
        assert left_over == []


def test_each_rank_has_files_of_its_own(port: int) -> None:
    """Nothing is handed over in a file: neither below /tmp nor in /dev/shm is anything seen by two ranks."""
    box = Box(fresh=("/dev/shm", "/tmp"))

    def step(rank: int, n: int) -> tuple[list[str], list[Any]]:
        for folder in ("/dev/shm", "/tmp"):
            Path(folder, f"mine {rank}").touch()
        meet("files", port, rank, n)
        got = values(rank, n)
        seen = [p.name for folder in ("/dev/shm", "/tmp") for p in Path(folder).glob("mine*")]
        return seen, got

    results = run(2, lambda r, n: contained(box, lambda: step(r, n)), init=False)
    for rank, found in enumerate(results):
        assert found == ([f"mine {rank}"] * 2, expected_values(rank, 2))


def test_a_file_store_that_is_not_shared(tmp_path: Path) -> None:
    """Then ranks cannot meet: each says so when its time is over, rank 0 with who is missing."""
    box = Box(fresh=("/dev/shm", str(tmp_path)))

    def step(rank: int, n: int) -> Any:
        store = dist.FileStore(f"{tmp_path}/store", n)
        return attempt(lambda: pycomm.create_communicator(store, rank, n, td(1)))

    results = run(2, lambda r, n: contained(box, lambda: step(r, n)), init=False)
    for found in results:
        assert isinstance(found, Refused)
        assert "TimeoutError" in found.kinds
    assert "these never came: 1" in results[0].message


# ---- deaths: the fault matrix' cells, with each rank in a container


def cells() -> list[tuple[str, Cell]]:
    """Where the ranks live, and what befalls them."""
    chosen = []
    for place, fault in [
        ("containers", "kill"),
        ("pids only", "exit"),
        ("host and containers", "segv"),
        ("containers and host", "kill"),
    ]:
        for moment, operation in [
            ("idle", "barrier"),
            ("idle", "send_recv"),
            ("inside small", "all_reduce"),
            ("inside large", "all_reduce"),
        ]:
            n = 2 if place == "containers" and operation == "barrier" else 3
            culprit = 2 if place == "containers and host" else n - 2
            words = ("pid ", "in another pid namespace")
            cell = Cell(fault, moment, operation, n, culprit, "PeerDiedError", words)
            chosen.append((place, cell))
    for place, n in (("containers", 2), ("host and containers", 3)):
        # Whether a process of another container stands still cannot be seen; that it is late can.
        cell = Cell("stop", "idle", "all_reduce", n, 1, "TimeoutError", ("not yet: 1",), SHORT)
        chosen.append((place, cell))
        cell = Cell("stop", "inside large", "all_reduce", n, 1, "TimeoutError", timeout=SHORT)
        chosen.append((place, cell))
    return chosen


@pytest.mark.parametrize(("place", "cell"), cells(), ids=str)
def test_a_fault_in_another_container(place: str, cell: Cell, tmp_path: Path) -> None:
    """Noticed as soon as on one host, and the rank is named; the survivors meet again, with nothing left over."""
    boxes = PLACES[place]

    def work(rank: int, n: int, cell: Cell, folder: Path) -> Any:
        return contained(boxes[rank], lambda: faults.work(rank, n, cell, folder))

    faults.check(cell, tmp_path, work)


@pytest.mark.parametrize("place", ["without /proc", "one without /proc"])
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_death_where_no_lock_can_be_had(place: str, count: int, port: int) -> None:
    """By a heartbeat, so a little later."""
    boxes = PLACES[place]

    def step(rank: int, n: int) -> tuple[Any, float]:
        meet(f"death {place} {count}", port, rank, n)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        found = attempt(lambda: [dist.all_reduce(torch.ones(count)) for _ in range(2)])
        return found, time.monotonic() - began

    results = run(
        *(3, lambda r, n: contained(boxes[r], lambda: step(r, n))), init=False, may_die={1}
    )
    assert results[1] is DIED
    for found, seconds in (results[0], results[2]):
        assert "PeerDiedError" in found.kinds, found
        assert "lost rank 1" in found.message
        assert seconds < 2 + 1.5


def test_first_processes_of_two_containers(port: int) -> None:
    """Both have pid 1; the message says whose. It is killed as an engine kills a container: from outside."""
    boxes = [Box(host=f"box-{rank}", is_init=True) for rank in range(2)]

    def step(rank: int, n: int, ready: int) -> tuple[int, Any, float]:
        meet("first", port, rank, n, 20)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # of no effect on a first process
            os.write(ready, b"!")
        found = attempt(lambda: [dist.all_reduce(torch.ones(LARGE)) for _ in range(100_000)])
        return os.getpid(), found, time.monotonic()

    def worker(rank: int, n: int) -> Any:
        reader, writer = os.pipe()
        if rank == 1 and (keeper := os.fork()):
            os.read(reader, 1)
            killed = time.monotonic()
            os.kill(keeper, signal.SIGKILL)  # with it goes the container
            return killed
        return contained(boxes[rank], lambda: step(rank, n, writer))

    (pid, found, noticed), killed = run(2, worker, init=False)
    assert pid == 1
    assert "PeerDiedError" in found.kinds, found
    assert "lost rank 1 (pid 1 in another pid namespace, that of host box-1)" in found.message
    assert noticed - killed < 2


def test_pids_are_not_trusted_across_containers(port: int) -> None:
    """Who forces them is told so by every rank, before anybody is taken for dead."""

    def step(rank: int, n: int) -> Any:
        store = dist.PrefixStore("forced", dist.TCPStore("127.0.0.1", port))
        return attempt(lambda: pycomm.create_communicator(store, rank, n, td(10)))

    boxes = PLACES["host and containers"]
    results = run(
        *(3, lambda r, n: contained(boxes[r], lambda: step(r, n))),
        init=False,
        env={"PYCOMM_LIVENESS": "pid"},
    )
    for found in results:
        assert isinstance(found, Refused)
        assert "InvalidArgument" in found.kinds
        assert "by its pid" in found.message
        assert "PYCOMM_LIVENESS to auto" in found.message


# ---- whole processes, by the system's own command


@pytest.mark.parametrize("ending", ENDS, ids=lambda ending: ending[0])
def test_how_a_container_ends_is_told(ending: tuple[str, str, str], tmp_path: Path) -> None:
    """Interpreters that end as users' do, each the first process of `unshare --pid`."""
    unshare = ["unshare", "--pid", "--mount", "--ipc", "--uts", "--fork", "--mount-proc"]
    text = check_last_words(ending, tmp_path, unshare)
    assert "rank 1 (pid 1 in another pid namespace)" in text
