"""pycomm leaves nothing: no file, thread, descriptor or child; and others on the machine neither see nor reach it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import DIED, attempt, run, td
from strangers import offered, until

import pycomm

MIB: Final = 1 << 20


@dataclass(frozen=True)
class State:
    """What this process has, as the kernel sees it."""

    descriptors: tuple[str, ...]
    threads: int
    children: tuple[str, ...]
    segments: int  # mappings of one
    files: tuple[str, ...]  # of ours, where shared memory lies

    @classmethod
    def now(cls) -> State:
        links = []
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                links.append(str(entry.readlink()))
        tasks = list(Path("/proc/self/task").iterdir())
        children = [(task / "children").read_text() for task in tasks]
        return cls(
            tuple(sorted(links)),
            len(tasks),
            tuple(sorted(" ".join(children).split())),
            Path("/proc/self/maps").read_text().count("memfd:pycomm"),
            tuple(sorted(f.name for f in Path("/dev/shm").glob("*pycomm*"))),
        )


def same_as(before: State) -> State:
    """The state, once it is that of before; threads may take a moment to end."""
    gc.collect()
    until(lambda: State.now() == before, 5)
    return State.now()


@pytest.fixture
def folder() -> Iterator[str]:
    """One that every user may use."""
    made = Path(tempfile.mkdtemp(prefix="pycomm-test-"))
    made.chmod(0o777)
    yield str(made)
    shutil.rmtree(made)


def init(folder: str, rank: int, n: int, seconds: float = 10) -> None:
    """Begin the default group."""
    url = f"file://{folder}/rendezvous"
    dist.init_process_group("pycomm", url, rank=rank, world_size=n, timeout=td(seconds))


def use(rank: int, n: int) -> None:
    """Collectives and messages of all sizes, asynchronous and in a group of a group."""
    for count in (1, 10_000, 3_000_000):
        dist.all_reduce(torch.ones(count))
        work: Any = dist.all_reduce(torch.ones(count), async_op=True)
        work.wait()
        dist.broadcast(torch.ones(count), 0)
        requests: Any = [dist.isend(torch.ones(count), (rank + 1) % n)]
        requests.append(dist.irecv(torch.ones(count), (rank - 1) % n))
        for request in requests:
            request.wait()
    dist.all_reduce(pycomm.empty(10_000, shared=True))
    group: Any = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


# ---- a process that lives on


def test_init_use_destroy(folder: str) -> None:
    """All is as before, each time."""

    def worker(rank: int, n: int) -> list[tuple[State, State]]:
        states = []
        for number in range(4):
            before = State.now()
            init(f"{folder}", rank, n)
            use(rank, n)
            during = State.now()
            assert during.segments > 0
            assert during.files == ()
            assert during.children == before.children
            dist.destroy_process_group()
            if number > 0:  # what torch begins once for all is not ours
                states.append((before, same_as(before)))
        return states

    for states in run(2, worker, init=False):
        for before, after in states:
            assert after == before
            assert after.segments == 0


def invalid(rank: int, n: int) -> None:
    dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)


def mismatch(rank: int, n: int) -> None:
    dist.all_reduce(torch.ones(3 + rank))


def timeout(rank: int, n: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["late"], td(10))
        raise pycomm.TimeoutError
    try:
        dist.all_reduce(torch.ones(100_000))
    finally:
        store.set("late", "")


def left(rank: int, n: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(100_000), 1)
    else:
        raise pycomm.PeerDiedError


def aborted(rank: int, n: int) -> None:
    communicator = pycomm.get_communicator()
    if rank == 1:
        communicator.abort("enough")
    communicator.barrier()


def alone(rank: int, n: int) -> None:
    pycomm.create_communicator(dist.HashStore(), rank, n, td(0.1))


def interrupted(rank: int, n: int) -> None:
    def handler(number: int, frame: Any) -> None:
        raise pycomm.AbortedError

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    pycomm.create_communicator(dist.HashStore(), rank, n, td(10))


@pytest.mark.parametrize(
    ("provoke", "kind"),
    [
        (invalid, "InvalidArgument"),
        (mismatch, "MismatchError"),
        (timeout, "TimeoutError"),
        (left, "PeerDiedError"),
        (aborted, "AbortedError"),
        (alone, "TimeoutError"),
        (interrupted, "AbortedError"),
    ],
)
def test_after_an_error(provoke: Callable[[int, int], None], kind: str, folder: str) -> None:
    """All is as before, once the group is destroyed."""

    def worker(rank: int, n: int) -> tuple[Any, State, State]:
        init(folder, rank, n)
        use(rank, n)
        dist.destroy_process_group()
        gc.collect()
        before = State.now()
        init(folder, rank, n, 0.5)
        found = attempt(lambda: provoke(rank, n))
        dist.destroy_process_group()
        return found, before, same_as(before)

    for found, before, after in run(2, worker, init=False):
        assert kind in found.kinds
        assert after == before


def test_after_a_death(folder: str) -> None:
    """The survivor has nothing left of the rank that was killed inside a collective."""

    def worker(rank: int, n: int) -> tuple[Any, State, State]:
        init(folder, rank, n)
        use(rank, n)
        dist.destroy_process_group()
        gc.collect()
        before = State.now()
        init(folder, rank, n)
        if rank == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()

        def reduce() -> None:
            while True:
                dist.all_reduce(torch.ones(MIB))

        found = attempt(reduce)
        dist.destroy_process_group()
        return found, before, same_as(before)

    (found, before, after), died = run(2, worker, init=False, may_die=[1])
    assert died is DIED
    assert "PeerDiedError" in found.kinds
    assert after == before


# ---- many groups


@dataclass(frozen=True)
class Use:
    """What grows if groups leave something."""

    descriptors: int
    threads: int
    segments: int
    resident: int  # MiB

    @classmethod
    def now(cls) -> Use:
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(
            libc, "malloc_trim"
        ):  # glibc's arenas: how many there are depends on which threads met
            libc.malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        state = State.now()
        resident = pages * resource.getpagesize() // MIB
        return cls(len(state.descriptors), state.threads, state.segments, resident)


def is_flat(uses: list[Use]) -> bool:
    """Whether nothing grows; memory by less than what one group would take, each time."""
    first = uses[0]
    return all(
        (u.descriptors, u.threads, u.segments) == (first.descriptors, first.threads, first.segments)
        and u.resident - first.resident < 8
        for u in uses
    )


def test_rob_07_cycles_of_groups() -> None:
    """pytorch#129868: 60 times new_group, use, destroy; descriptors, threads, segments and memory are flat."""

    def worker(rank: int, n: int) -> list[Use]:
        uses = []
        for number in range(1, 61):
            group: Any = dist.new_group(timeout=td(10))
            dist.all_reduce(torch.ones(200_000), group=group)
            work: Any = dist.all_reduce(torch.ones(10), group=group, async_op=True)
            work.wait()
            requests: Any = [dist.isend(torch.ones(300_000), 1 - rank, group=group)]
            requests.append(dist.irecv(torch.ones(300_000), 1 - rank, group=group))
            for request in requests:
                request.wait()
            dist.destroy_process_group(group)
            del group, work, requests
            if number % 20 == 0:
                uses.append(Use.now())
        return uses

    for uses in run(2, worker):
        assert len(uses) == 3
        assert is_flat(uses), uses


def test_communicators_that_are_dropped() -> None:
    """Without destroy: the last reference is enough."""

    def worker(rank: int, n: int) -> list[Use]:
        uses = []
        store = dist.distributed_c10d._get_default_store()
        for number in range(1, 61):
            c = pycomm.create_communicator(store, rank, n, td(10))
            pending: Any = c.all_reduce(torch.ones(200_000), async_op=True)
            c.send(torch.ones(300_000), 1 - rank, async_op=True)
            c.recv(torch.ones(300_000), 1 - rank)
            pending.wait()
            c.barrier()
            del c, pending
            if number % 20 == 0:
                uses.append(Use.now())
        return uses

    for uses in run(2, worker):
        assert len(uses) == 3
        assert is_flat(uses), uses


def test_rob_07_groups_that_are_dropped(folder: str) -> None:
    """The same if only the default group is destroyed: torch keeps the others until then, and they all end with it."""

    def worker(rank: int, n: int) -> list[Use]:
        uses = []
        for _ in range(4):
            init(folder, rank, n)
            for _ in range(10):
                group: Any = dist.new_group()
                dist.all_reduce(torch.ones(200_000), group=group)
            del group
            dist.destroy_process_group()
            uses.append(Use.now())
        return uses

    for uses in run(2, worker, init=False):
        assert is_flat(uses[1:]), uses
        assert uses[-1].segments == 0


def test_rob_07_many_groups_at_once() -> None:
    """200 live groups of 4 ranks fit into 1024 descriptors each."""

    def worker(rank: int, n: int) -> tuple[int, int, float]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        threads = Use.now().threads
        groups: list[Any] = [dist.new_group(timeout=td(20)) for _ in range(200)]
        total = 0.0
        for number, group in enumerate(groups):
            t = torch.full((5,), float(number))
            dist.all_reduce(t, group=group)
            total += t[0].item()
        now = Use.now()
        return now.descriptors, now.threads - threads, total

    for descriptors, threads, total in run(4, worker, wall=120, group_timeout=30):
        assert descriptors < 1024
        assert threads <= 4
        assert total == 4 * sum(range(200))


# ---- whatever /dev/shm is like

IN_A_SANDBOX: Final = """
import json, os, signal, sys, tempfile
from multiprocessing import get_context
import torch, torch.distributed as dist
import pycomm

def rank(number, n, url, news, forever):
    dist.init_process_group("pycomm", url, rank=number, world_size=n)
    tensor = torch.ones(32 << 20)  # twice what /dev/shm holds
    dist.all_reduce(tensor)
    inode = next(line.split()[4] for line in open("/proc/self/maps") if "memfd:pycomm" in line)
    news.send((tensor[-1].item(), inode))
    while forever:
        dist.all_reduce(torch.ones(1 << 20))
    dist.destroy_process_group()

def mapped(inode):
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found += sum(line.split()[4] == inode for line in open(f"/proc/{pid}/maps"))
        except OSError:
            pass
    return found

found = {}
for forever in (False, True):
    context = get_context("fork")
    here, there = context.Pipe(False)
    url = "file://" + tempfile.mkdtemp() + "/store"
    ranks = [context.Process(target=rank, args=(r, 2, url, there, forever)) for r in range(2)]
    for r in ranks:
        r.start()
    news = [here.recv() for _ in ranks]
    if forever:
        alive = mapped(news[0][1])
        for r in ranks:
            os.kill(r.pid, signal.SIGKILL)
    for r in ranks:
        r.join()
    found["killed" if forever else "ended"] = {
        "sums": [s for s, _ in news],
        "codes": [r.exitcode for r in ranks],
        "files": os.listdir("/dev/shm"),
        "mapped": mapped(news[0][1]),
    }
found["alive"] = alive
try:
    open("/dev/shm/x", "w").close()
    found["writable"] = True
except OSError:
    found["writable"] = False
print(json.dumps(found))
"""


@pytest.mark.parametrize("options", ["size=64m", "ro", "size=4k,nr_inodes=1"])
def test_any_dev_shm(options: str) -> None:
    """It may be small, read-only or full: nothing is put there or left, not even by ranks killed in a collective."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("this machine does not let us have mounts of our own")
    mount = f"mount --make-rprivate / && mount -t tmpfs -o {options} tmpfs /dev/shm"
    script = f'{mount} && exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, IN_A_SANDBOX]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for way, codes in (("ended", [0, 0]), ("killed", [-signal.SIGKILL] * 2)):
        assert found[way] == {"sums": [2.0, 2.0], "codes": codes, "files": [], "mapped": 0}
    assert found["alive"] > 0  # the count does see segments
    assert found["writable"] == (options == "size=64m")


# ---- others on the machine


def as_nobody() -> None:
    """Become another user than the tests'."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@pytest.mark.parametrize("users", [1, pytest.param(2, marks=needs_root)])
def test_two_jobs_at_once(users: int, folder: str) -> None:
    """Each gets its own sums, whether one user runs both or two."""

    def worker(rank: int, _: int) -> list[float]:
        job, rank = divmod(rank, 2)
        if job == 1 and users == 2:
            as_nobody()
        got = []
        for number in range(10):
            store = dist.PrefixStore(str(number), dist.FileStore(f"{folder}/{job}", 2))
            c = pycomm.create_communicator(store, rank, 2, td(10))
            t = torch.full((100_000,), 10.0**job)
            c.all_reduce(t)
            got.append(t[-1].item())
        return got

    first, second = [2.0] * 10, [20.0] * 10
    assert run(4, worker, init=False) == [first, first, second, second]


@needs_root
def test_no_other_user_reaches_the_segment(folder: str) -> None:
    """Neither by a file of any kind, nor through /proc."""

    def worker(rank: int, _: int) -> Any:
        files = dist.FileStore(f"{folder}/files", 3)
        if rank < 2:
            c = pycomm.create_communicator(dist.PrefixStore("job", files), rank, 2, td(10))
            if rank == 0:
                files.set("pid", str(os.getpid()))
            files.wait(["tried"], td(10))
            c.barrier()
            return "done"
        files.wait(["pid"], td(10))
        pid = int(files.get("pid"))
        as_owner = reachable(pid)
        Path(f"{folder}/files").chmod(0o666)
        as_nobody()
        as_other = reachable(pid)
        files.set("tried", "")
        return as_owner, as_other

    def reachable(pid: int) -> list[str]:
        """The ways by which the segment can be opened."""
        process = Path(f"/proc/{pid}")
        ways = []
        for way in ("fd", "map_files", "maps", "mem"):
            with contextlib.suppress(PermissionError):
                entries = process / way
                if entries.is_dir():
                    opened = [e for e in entries.iterdir() if "memfd:pycomm" in str(e.readlink())]
                    ways += [way] if opened else []
                else:
                    entries.open("rb").close()
                    ways.append(way)
        return ways

    done, _, (as_owner, as_other) = run(3, worker, init=False)
    assert done == "done"
    assert "map_files" in as_owner  # the segment lies there for those who may look
    assert as_other == []


@needs_root
def test_another_user_knows_the_name_only() -> None:
    """A name from /proc/net/unix lets nobody in, nor does it disturb."""
    store = dist.HashStore()
    job = threading.Thread(target=lambda: pycomm.create_communicator(store, 0, 2, td(10)))
    job.start()
    name = offered(store).name

    def worker(_: int, __: int) -> bytes:
        as_nobody()
        assert f"@{name}" in Path("/proc/net/unix").read_text()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect("\0" + name)
            heard, descriptors, _, _ = socket.recv_fds(stranger, 4096, 10)
            assert descriptors == []
            return heard

    [heard] = run(1, worker, init=False)
    assert b"does not let user 65534 join" in heard
    pycomm.create_communicator(store, 1, 2, td(10))
    job.join(10)
    assert not job.is_alive()
