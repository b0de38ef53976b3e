"""Messages between two ranks: Communicator.send and recv."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import DIED, Refused, attempt, run, td

import pycomm

KB, MB = 1 << 10, 1 << 20
RING = 64 * KB  # of most tests, so that much does not fit
DTYPES = [getattr(torch, name) for name in pycomm._core.support_table()]


def group(n: int, worker: Callable[..., Any], *args: Any, ring: int = RING, **options: Any) -> Any:
    """Runs worker(communicator, rank, n, *args) on n ranks that share a communicator."""

    def on_rank(rank: int, n: int) -> Any:
        return worker(pycomm.get_communicator(), rank, n, *args)

    env = {"PYCOMM_CHANNEL_BYTES": str(ring)}
    return run(n, on_rank, env=env, **options)


def pattern(count: int, seed: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Bytes that tell their place and their message, seen as any dtype."""
    item = torch.empty(0, dtype=dtype).element_size()
    raw = (torch.arange(count * item) * 7 + seed * 31) % 251
    if dtype is torch.bool:
        return raw % 2 == 1
    return raw.to(torch.uint8).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def threads() -> int:
    """Threads of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


# What arrives


COUNTS = [0, 1, 3, 47, 48, 49, 64, 65, 1000, 64 * KB, 64 * KB + 1, 3 * 64 * KB + 17, 4 * MB + 3]


@pytest.mark.parametrize("ring", [4 * KB, RING, MB])
def test_sizes(ring: int) -> None:
    """Every size arrives whole, through rings smaller and larger than it, both ways."""

    def worker(c: Any, rank: int, _: int) -> bool:
        good = True
        for count in COUNTS if ring >= RING else COUNTS[:-1]:
            for sender in (0, 1):
                data = pattern(count, count + sender)
                if rank == sender:
                    good &= c.send(data, 1 - rank) is None
                else:
                    got = torch.zeros(count, dtype=torch.uint8)
                    good &= c.recv(got, sender) == sender and same(got, data)
        return good

    assert group(2, worker, ring=ring) == [True, True]


def test_large_message() -> None:
    """64 MB."""

    def worker(c: Any, rank: int, _: int) -> bool:
        data = torch.arange(16 * MB, dtype=torch.int32)
        if rank == 0:
            c.send(data, 1)
            return True
        got = torch.zeros_like(data)
        return c.recv(got, 0) == 0 and torch.equal(got, data)

    assert group(2, worker, ring=512 * KB) == [True, True]


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KB
    return 0


@pytest.mark.long
@pytest.mark.skipif(_memory_available() < 8 << 30, reason="needs 8 GB of free memory")
def test_more_than_two_to_the_31_bytes() -> None:
    """Counts and positions are 64 bits wide."""

    def worker(c: Any, rank: int, _: int) -> bool:
        data = torch.zeros((1 << 31) + 5, dtype=torch.uint8)
        places = torch.tensor([0, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 31) + 4])
        if rank == 0:
            data[places] = torch.arange(1, 6, dtype=torch.uint8)
            c.send(data, 1)
            return True
        c.recv(data, 0)
        return data[places].tolist() == [1, 2, 3, 4, 5] and int(data.count_nonzero()) == 5

    assert group(2, worker, ring=512 * KB, wall=60, group_timeout=50) == [True, True]


def test_dtypes() -> None:
    """Every dtype travels bit by bit, whatever it means."""

    def worker(c: Any, rank: int, _: int) -> list[str]:
        wrong = []
        for count in (1, 5, 40_000):
            for dtype in DTYPES:
                data = pattern(count, 5, dtype)
                if rank == 0:
                    c.send(data, 1)
                else:
                    got = torch.zeros(count, dtype=torch.uint8).to(dtype)
                    c.recv(got, 0)
                    if not same(got, data):
                        wrong.append(f"{dtype} {count}")
        return wrong

    assert group(2, worker) == [[], []]


def test_shapes_and_noncontiguous_tensors() -> None:
    """Any shape is a row of elements; what is not contiguous is refused in words."""

    def worker(c: Any, rank: int, _: int) -> bool:
        matrix = torch.arange(12.0).reshape(3, 4)
        for step in (lambda: c.send(matrix.t(), 1 - rank), lambda: c.recv(matrix.t(), 1 - rank)):
            result = attempt(step)
            assert isinstance(result, Refused)
            assert "InvalidArgument" in result.kinds
            assert "contiguous" in result.message
        if rank == 0:
            c.send(matrix, 1)
            return True
        got = torch.zeros(2, 6)
        c.recv(got, 0)
        return torch.equal(got.flatten(), matrix.flatten())

    assert group(2, worker) == [True, True]


# Which receive gets what


@pytest.mark.parametrize("count", [1, 100, 300_000])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]])
def test_tags_in_any_order(count: int, order: list[int]) -> None:
    """A receive takes its tag's message, though larger ones than the ring stand before it."""

    def worker(c: Any, rank: int, _: int) -> bool:
        if rank == 0:
            for tag in range(4):
                c.send(pattern(count, tag), 1, tag)
            return True
        good = True
        for tag in order:
            got = torch.zeros(count, dtype=torch.uint8)
            good &= c.recv(got, 0, tag) == 0 and same(got, pattern(count, tag))
        return good

    assert group(2, worker) == [True, True]


def test_extreme_tags() -> None:
    """Tags are any 32-bit integers."""

    def worker(c: Any, rank: int, _: int) -> bool:
        tags = [0, -1, 2**31 - 1, -(2**31)]
        tensors = [torch.full((2,), float(i)) for i in range(4)]
        if rank == 0:
            for tag, tensor in zip(tags, tensors, strict=True):
                c.send(tensor, 1, tag)
            return True
        got = torch.zeros(2)
        return all(
            c.recv(got, 0, tag) == 0 and torch.equal(got, tensor)
            for tag, tensor in reversed(list(zip(tags, tensors, strict=True)))
        )

    assert group(2, worker) == [True, True]


@pytest.mark.parametrize("receives_first", [False, True])
def test_order_within_a_tag(receives_first: bool) -> None:
    """A thousand messages of two tags and mixed sizes; receives take them in the order of posting."""

    def size(i: int) -> int:
        return [1, 10, 500, 5000, 70_000][i % 5] + i

    def worker(c: Any, rank: int, _: int) -> bool:
        everything = range(1000)
        sent = [pattern(size(i), i) for i in everything]
        if rank == 0:
            if receives_first:
                c.barrier()
            for pending in [c.send(t, 1, i % 2, async_op=True) for i, t in enumerate(sent)]:
                pending.wait()
            return True
        got = [torch.zeros(size(i), dtype=torch.uint8) for i in everything]
        pending = [c.recv(t, 0, i % 2, async_op=True) for i, t in enumerate(got)]
        if receives_first:
            c.barrier()
        for p in reversed(pending):
            p.wait()
        assert all(p.is_done() and p.source() == 0 for p in pending)
        return all(same(a, b) for a, b in zip(got, sent, strict=True))

    assert group(2, worker) == [True, True]


@pytest.mark.parametrize("count", [1, 200_000])
def test_any_source(count: int) -> None:
    """Each message is received once, and recv returns whose it is."""

    def worker(c: Any, rank: int, n: int) -> bool:
        if rank > 0:
            for turn in range(5):
                c.send(pattern(count, rank * 10 + turn), 0, tag=7)
            return True
        seen = [0] * n
        good = True
        for turn in range(5 * (n - 1)):
            got = torch.zeros(count, dtype=torch.uint8)
            source = c.recv(got, -1 if turn % 2 else None, tag=7)
            good &= same(got, pattern(count, source * 10 + seen[source]))
            seen[source] += 1
        return good and seen == [0, 5, 5, 5][:n]

    assert group(4, worker) == [True] * 4


def test_source_of_a_pending() -> None:
    """-1 before it is done; afterwards the rank. A send has none."""

    def worker(c: Any, rank: int, _: int) -> bool:
        if rank == 1:
            c.barrier()
            p = c.send(torch.ones(1), 0, async_op=True)
            p.wait()
            return bool(p.source() == -1)
        p = c.recv(torch.zeros(1), async_op=True)
        before = p.is_done(), p.source()
        c.barrier()
        p.wait()
        return before == (False, -1) and p.source() == 1

    assert group(2, worker) == [True, True]


# Much at once


@pytest.mark.parametrize("count", [1, 64 * MB])
def test_mutual_sends_do_not_block(count: int) -> None:
    """Both ranks send 1 or 64 Mi floats, and only then receive."""

    def worker(c: Any, rank: int, _: int) -> bool:
        send = c.send(torch.full((count,), float(rank)), 1 - rank, async_op=True)
        got = torch.zeros(count)
        receive = c.recv(got, 1 - rank, async_op=True)
        receive.wait()
        send.wait()
        return bool((got == 1 - rank).all())

    assert group(2, worker, ring=512 * KB) == [True, True]


@pytest.mark.parametrize("n", [3, 4])
def test_ring_exchange(n: int) -> None:
    """Everyone passes a tensor on to the next rank, n times around."""

    def worker(c: Any, rank: int, n: int) -> bool:
        held = pattern(100_000, rank)
        for _ in range(2 * n):
            send = c.send(held, (rank + 1) % n, async_op=True)
            got = torch.zeros_like(held)
            assert c.recv(got, (rank - 1) % n) == (rank - 1) % n
            send.wait()
            held = got
        return same(held, pattern(100_000, rank))

    assert group(n, worker) == [True] * n


@pytest.mark.parametrize("count", [0, 1, 1_000_000])
def test_messages_to_oneself(count: int) -> None:
    """A send to oneself is complete at once, before or after its receive, and keeps its tensor's values."""

    def worker(c: Any, rank: int, _: int) -> bool:
        data = pattern(count, rank)
        early = torch.zeros(count, dtype=torch.uint8)
        posted = c.recv(early, rank, 3, async_op=True)
        c.send(data, rank, 3)
        good = posted.is_done() and posted.source() == rank and same(early, data)
        for turn in range(3):
            c.send(data + turn, rank)
        c.send(data + 9, rank, 1)
        got = torch.zeros(count, dtype=torch.uint8)
        good &= c.recv(got, None, 1) == rank and same(got, data + 9)
        for turn in range(3):
            good &= c.recv(got, rank) == rank and same(got, data + turn)
        return good

    assert group(2, worker) == [True, True]
    assert group(1, worker) == [True]


def test_threads_and_collectives_beside() -> None:
    """Three threads exchange messages by tag while the main thread reduces."""

    def worker(c: Any, rank: int, _: int) -> bool:
        good = [True] * 4

        def exchange(tag: int) -> None:
            for turn in range(60):
                count = [1, 1000, 100_000][(turn + tag) % 3]
                send = c.send(pattern(count, turn + tag + rank), 1 - rank, tag, async_op=True)
                got = torch.zeros(count, dtype=torch.uint8)
                c.recv(got, 1 - rank, tag)
                send.wait()
                good[tag] &= same(got, pattern(count, turn + tag + 1 - rank))

        workers = [threading.Thread(target=exchange, args=(tag,)) for tag in (1, 2, 3)]
        for thread in workers:
            thread.start()
        for turn in range(60):
            tensor = torch.full((20_000,), float(rank + turn))
            c.all_reduce(tensor)
            good[0] &= bool((tensor == 2 * turn + 1).all())
        for thread in workers:
            thread.join()
        return all(good)

    assert group(2, worker) == [True, True]


# What ends a message otherwise


@pytest.mark.parametrize("late", ["send", "recv"])
@pytest.mark.parametrize("what", ["count", "dtype"])
@pytest.mark.parametrize("count", [5, 200_000])
def test_mismatch(what: str, late: str, count: int) -> None:
    """The receiver names both calls; the communicator ends on all ranks, with the same kind."""

    def worker(c: Any, rank: int, _: int) -> Any:
        store = dist.distributed_c10d._get_default_store()
        other = torch.zeros(count + 1) if what == "count" else torch.zeros(count).int()
        calls = {
            0: lambda: c.send(torch.zeros(count), 1, 4, async_op=True),
            1: lambda: c.recv(other, 0, 4, async_op=True),
            2: lambda: c.recv(torch.zeros(1), 1, async_op=True),
        }
        order = [2, 1, 0] if late == "send" else [2, 0, 1]
        turn = order.index(rank)
        if turn > 0:
            store.wait([f"turn{turn}"], timedelta(seconds=10))
        pending = calls[rank]()
        store.set(f"turn{turn + 1}", "yes")
        first = attempt(pending.wait)
        return first, attempt(lambda: c.recv(torch.zeros(1), 0)), attempt(c.barrier)

    sender, receiver, third = group(3, worker)
    for refused in (receiver[0], third[0]):
        assert isinstance(refused, Refused)
        assert "MismatchError" in refused.kinds
        theirs = f"send(count={count}, dtype=float32, to rank 1, tag=4)"
        mine = "recv(count=" + (
            f"{count + 1}, dtype=float32" if what == "count" else f"{count}, dtype=int32"
        )
        for words in ("rank 1", "rank 0", theirs, mine):
            assert words in refused.message, refused.message
    for result in (sender[1], receiver[1], third[1], sender[2], receiver[2], third[2]):
        assert isinstance(result, Refused)
        assert {"AbortedError", "MismatchError"} & set(result.kinds)
    assert "AbortedError" in receiver[1].kinds
    assert count < 100 or isinstance(sender[0], Refused)  # the small one was complete at once


@pytest.mark.parametrize("own", [True, False])
def test_timeout(own: bool) -> None:
    """Without its message a receive ends by its own timeout or the communicator's, and says what is there."""

    def worker(c: Any, rank: int, _: int) -> Any:
        if rank == 0:
            c.send(torch.zeros(1), 1, 5)
            return attempt(lambda: c.recv(torch.zeros(1), 1))
        if not own:
            c.timeout = td(0.3)
        began = time.monotonic()
        result = attempt(lambda: c.recv(torch.zeros(3), 0, 6, timeout=td(0.3) if own else None))
        return result, time.monotonic() - began

    other, (result, took) = group(2, worker)
    assert isinstance(result, Refused)
    assert "TimeoutError" in result.kinds
    for words in (
        "rank 1: recv(count=3, dtype=float32, from rank 0, tag=6)",
        "300 ms",
        "rank 0 has sent no such message, but others with tag 5",
    ):
        assert words in result.message, result.message
    assert 0.25 < took < 3
    assert isinstance(other, Refused)
    assert "rank 1" in other.message


def test_timeout_of_a_send() -> None:
    """A message that nobody takes: the error says how much went through."""

    def worker(c: Any, rank: int, _: int) -> Any:
        if rank == 0:
            return attempt(lambda: c.send(torch.zeros(MB), 1, timeout=td(0.2)))
        return attempt(lambda: c.recv(torch.zeros(1), 0, 99))

    # Rank 1 waits for another tag, which draws the whole message from the channel.
    sender, receiver = group(2, worker, group_timeout=0.7)
    assert sender is None
    assert isinstance(receiver, Refused)

    def alone(c: Any, rank: int, _: int) -> Any:
        if rank == 0:
            return attempt(lambda: c.send(torch.zeros(MB), 1, timeout=td(0.2)))
        return until(lambda: isinstance(attempt(c.barrier), Refused))

    sender, other = group(2, alone)
    assert other is True
    assert isinstance(sender, Refused)
    assert "TimeoutError" in sender.kinds
    for words in ("rank 0: send(count=1048576", "to rank 1", "200 ms", "of 4194304 bytes"):
        assert words in sender.message, sender.message


@pytest.mark.parametrize("peer", [1, None])
def test_killed_peer(peer: int | None) -> None:
    """A receive ends soon after its source was killed, and says so."""

    def worker(c: Any, rank: int, _: int) -> Any:
        if rank == 1:
            c.send(torch.ones(1), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        c.recv(torch.zeros(1), 1)
        began = time.monotonic()
        result = attempt(lambda: c.recv(torch.zeros(1), peer, 9))
        return result, time.monotonic() - began

    (result, took), died = group(2, worker, may_die=[1])
    assert died is DIED
    assert took < 3
    assert isinstance(result, Refused)
    assert "PeerDiedError" in result.kinds
    assert "rank 0: recv(" in result.message
    assert "lost rank 1" in result.message


@pytest.mark.parametrize("how", ["killed", "left"])
def test_messages_outlive_their_sender(how: str) -> None:
    """What was sent completely is received, whatever became of the sender; then nothing more."""

    def worker(c: Any, rank: int, _: int) -> Any:
        if rank == 1:
            for tag in range(3):
                c.send(pattern(10_000, tag), 0, tag)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            c.shutdown()
            return None
        return attempt(lambda: c.recv(torch.zeros(1), 1, 77))  # ends when rank 1 is gone

    def patient(c: Any, rank: int, _: int) -> Any:
        pid = torch.tensor([os.getpid()])
        if rank == 1:
            c.send(pid, 0, 9)
            return worker(c, rank, 2)
        c.recv(pid, 1, 9)
        assert until(lambda: _is_gone(int(pid), how))
        got = [torch.zeros(10_000, dtype=torch.uint8) for _ in range(3)]
        for tag in (2, 0, 1):
            c.recv(got[tag], 1, tag)
        good = all(same(t, pattern(10_000, tag)) for tag, t in enumerate(got))
        return good, worker(c, rank, 2)

    (good, result), _ = group(2, patient, may_die=[1] if how == "killed" else [])
    assert good
    assert isinstance(result, Refused)
    assert "PeerDiedError" in result.kinds
    assert ("died" if how == "killed" else "left the group") in result.message


def _is_gone(pid: int, how: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or while it is read
        return True
    return state in "ZX" or how == "left"  # one that left may live on


def test_shutdown_finishes_sends_and_ends_receives() -> None:
    """A large send is taken before its rank has left; a receive that waits gets AbortedError."""

    def worker(c: Any, rank: int, _: int) -> Any:
        if rank == 0:
            send = c.send(pattern(MB, 1), 1, async_op=True)
            receive = c.recv(torch.zeros(1), 1, async_op=True)
            c.shutdown()
            send.wait()
            return attempt(receive.wait), attempt(lambda: c.send(torch.zeros(1), 1))
        got = torch.zeros(MB, dtype=torch.uint8)
        c.recv(got, 0)
        return same(got, pattern(MB, 1))

    (receive, later), good = group(2, worker)
    assert good is True
    for result in (receive, later):
        assert isinstance(result, Refused)
        assert "AbortedError" in result.kinds


def test_abort_ends_waits() -> None:
    """abort() on any rank ends sends and receives that wait on all, with its reason."""

    def worker(c: Any, rank: int, _: int) -> Any:
        if rank == 2:
            c.barrier()
            return c.abort("of a test")
        pending = (
            c.recv(torch.zeros(1), 2, async_op=True),
            c.send(torch.zeros(MB), 2, async_op=True),
        )
        c.barrier()
        return [attempt(p.wait) for p in pending]

    for results in group(3, worker)[:2]:
        for result in results:
            assert isinstance(result, Refused)
            assert "AbortedError" in result.kinds
            assert "of a test" in result.message


@pytest.mark.parametrize("asynchronous", [False, True])
def test_interrupt(asynchronous: bool) -> None:
    """Ctrl-C ends recv and the communicator, but of a Pending only the wait."""

    def worker(c: Any, rank: int, _: int) -> Any:
        store = dist.distributed_c10d._get_default_store()
        got = torch.zeros(1)
        if rank == 1:
            store.wait(["interrupted"], timedelta(seconds=10))
            return attempt(lambda: c.send(torch.ones(1), 0))

        def handler(number: int, frame: Any) -> None:
            raise KeyboardInterrupt

        pending = c.recv(got, 1, async_op=True) if asynchronous else None
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pending.wait() if pending else c.recv(got, 1)
        soon = time.monotonic() - began < 2
        store.set("interrupted", "yes")
        if pending:
            pending.wait()
        return soon, got.item()

    (soon, value), sent = group(2, worker)
    assert soon
    if asynchronous:
        assert (value, sent) == (1.0, None)
    else:
        assert isinstance(sent, Refused)
        assert "was interrupted" in sent.message
        assert "recv(count=1" in sent.message


@pytest.mark.parametrize(
    ("words", "step"),
    [
        ("below the world size 2", lambda c: c.send(torch.zeros(1), 2)),
        ("below the world size 2", lambda c: c.send(torch.zeros(1), -1)),
        ("below the world size 2", lambda c: c.recv(torch.zeros(1), 5)),
        ("below the world size 2", lambda c: c.recv(torch.zeros(1), -2)),
        ("timeout of 0", lambda c: c.send(torch.zeros(1), 1, timeout=timedelta(0))),
        ("negative", lambda c: c.send(torch.zeros(1), 1, timeout=timedelta(seconds=-1))),
    ],
)
def test_invalid_arguments(words: str, step: Callable[[Any], Any]) -> None:
    """Refused before anything is sent, with the call in words; the communicator lives on."""

    def worker(c: Any, rank: int, _: int) -> Any:
        result = attempt(lambda: step(c))
        c.barrier()
        return result

    for result in group(2, worker):
        assert isinstance(result, Refused)
        assert "InvalidArgument" in result.kinds
        assert words in result.message


# The helper thread


def test_nobody_waits() -> None:
    """Messages travel while both ranks do something else, and while nobody even looks."""

    def worker(c: Any, rank: int, _: int) -> bool:
        store = dist.distributed_c10d._get_default_store()
        data, got = pattern(MB, rank), torch.zeros(MB, dtype=torch.uint8)
        pending = c.send(data, 1 - rank, async_op=True), c.recv(got, 1 - rank, async_op=True)
        expected = pattern(MB, 1 - rank)
        arrived = until(lambda: same(got, expected))  # never asks the communicator
        store.set(f"arrived{rank}", "yes")
        store.wait([f"arrived{1 - rank}"], timedelta(seconds=10))
        for p in pending:
            p.wait()
        return arrived

    assert group(2, worker) == [True, True]


def test_idle_costs_nothing() -> None:
    """The helper starts with the first transfer that is not complete at once, is one, and rests afterwards."""

    def cpu() -> float:
        times = os.times()
        return times.user + times.system

    def rests() -> bool:
        before = cpu()
        time.sleep(0.5)
        return cpu() - before < 0.05

    def worker(c: Any, rank: int, _: int) -> tuple[bool, int, bool]:
        before = threads()
        for _ in range(3):
            c.send(torch.zeros(1), rank)
            c.recv(torch.zeros(1), rank)
        quiet = threads() == before
        for _ in range(10):
            pending = c.recv(torch.zeros(1), 1 - rank, async_op=True)
            c.send(torch.zeros(1), 1 - rank)
            pending.wait()
        c.barrier()
        return quiet, threads() - before, until(rests)

    for quiet, started, rested in group(2, worker):
        assert quiet
        assert started <= 1
        assert rested


EXIT = """
import contextlib, sys, torch, torch.distributed as dist, pycomm
from datetime import timedelta
rank, folder = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(folder + "/store", 2)
c = pycomm.create_communicator(store, rank, 2, timedelta(seconds=20))
pending = [c.recv(torch.zeros(10), 1 - rank, 1, async_op=True) for _ in range(20)]
with contextlib.suppress(pycomm.Error):  # the other rank may be gone
    pending += [c.send(torch.zeros(1 << 20), 1 - rank, 2, async_op=True) for _ in range(3)]
if sys.argv[3] == "cycle":
    c.__class__.me = c
    pending[0].__class__.all = pending
with contextlib.suppress(pycomm.Error):  # the other rank may be gone
    c.send(torch.zeros(10), 1 - rank, 1)
"""


@pytest.mark.parametrize("how", ["plain", "cycle"])
def test_exit_without_farewell(how: str, tmp_path: Path) -> None:
    """Interpreters that end with messages under way, and a helper at work, end with status 0."""
    command = [sys.executable, "-c", EXIT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), how], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert errors == ["", ""]
