"""What an NcclCommunicator does when NCCL, a rank or the Store fails: one typed error on every rank, and no hang."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nccl import build
from harness import DIED, Refused, attempt, run
from strangers import until
from test_nccl_communicator import ranks

from pycomm.extension import core


def kinds(results: list[Any]) -> list[str]:
    """The class of what each rank raised."""
    return [r.kinds[0] if isinstance(r, Refused) else repr(r) for r in results]


def messages(results: list[Any]) -> list[str]:
    assert all(isinstance(r, Refused) for r in results), results
    return [r.message for r in results]


def outcome(comm: Any, step: Any) -> Any:
    """What an operation raises, be it at the call or later, and that nothing works afterwards."""

    def whole() -> None:
        work = step()
        if work is not None:
            work.synchronize()

    result = attempt(whole)
    later = attempt(lambda: comm.all_reduce(torch.ones(1)))
    assert isinstance(later, Refused)
    assert later.kinds[0] == "AbortedError", later
    assert "destroy the process group and initialise it again" in later.message
    comm.shutdown()
    return result


# at init


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    """Those that wait are told which; the one that is late hears what they said."""

    def worker(fake: Any) -> Any:
        comm = fake.communicator(0.5)
        if fake.rank == 2:
            comm_state = comm.rank_state(0)["pid"]
            assert comm_state > 0
            deadline = time.monotonic() + 10
            while comm.failure_report() is None and time.monotonic() < deadline:
                time.sleep(0.01)
        return attempt(comm.connect)

    results = ranks(3, worker, tmp_path)
    assert kinds(results) == ["TimeoutError"] * 3
    first = [m for m in messages(results[:2]) if "exceeded its timeout of 500 ms" in m]
    assert first
    assert all("not there yet: rank 2 (pid" in m for m in first)
    assert "this communicator ended before" in messages(results)[2]


def test_a_rank_without_a_communicator(tmp_path: Path) -> None:
    def worker(fake: Any) -> Any:
        return attempt(fake.communicator(0.4).connect) if fake.rank == 1 else None

    late = ranks(2, worker, tmp_path)[1]
    assert late.kinds[0] == "TimeoutError"
    assert "not there yet: rank 0 (which has not made its communicator yet)" in late.message


def test_init_that_never_ends_on_one_rank(tmp_path: Path) -> None:
    """All have come, but NCCL does not get on: every rank gives up, and may try again."""

    def worker(fake: Any) -> Any:
        if fake.rank == 1:
            fake.fault("init_hang")
        comm = fake.communicator(0.6)
        result = attempt(lambda: comm.all_reduce(torch.ones(2)))
        comm.shutdown()
        fake.calls.fake_clear_faults()
        import torch.distributed as dist

        again = fake.communicator(store=dist.PrefixStore("again", fake.store))
        t = torch.ones(2)
        again.all_reduce(t)
        fake.synchronize()
        again.shutdown()
        return result, t.tolist()

    results = ranks(2, worker, tmp_path)
    assert kinds([r for r, _ in results]) == ["TimeoutError"] * 2
    assert any(
        "all ranks have come, so NCCL itself does not get on" in r.message for r, _ in results
    )
    assert [t for _, t in results] == [[2, 2]] * 2


@pytest.mark.parametrize("code", [2, 5])
def test_init_that_fails_on_one_rank(code: int, tmp_path: Path) -> None:
    """The others do not wait for their timeout: they are told."""

    def worker(fake: Any) -> Any:
        if fake.rank == 1:
            fake.fault("init_error", 0, code)
        return attempt(fake.communicator(20).connect)

    name = {2: "ncclSystemError (2)", 5: "ncclInvalidUsage (5)"}[code]
    results = ranks(3, worker, tmp_path)
    assert kinds(results) == ["NcclError"] * 3
    assert all(name in m for m in messages(results))
    assert "rank 1 reported" in results[0].message


def test_ranks_with_different_versions(tmp_path: Path) -> None:
    """Both versions are named, on every rank."""

    def worker(fake: Any) -> Any:
        if fake.rank == 1:
            os.environ["FAKE_NCCL_VERSION"] = "22703"
        return attempt(fake.communicator(20).connect)

    results = ranks(2, worker, tmp_path)
    assert kinds(results) == ["MismatchError"] * 2
    assert all("has NCCL 2.27.3" in m and "rank 0 has 2.30.7" in m for m in messages(results))


# in an operation


@pytest.mark.parametrize("version", ["23007", "22105"])
def test_a_kernel_that_hangs(version: str, tmp_path: Path) -> None:
    """The watchdog ends it on every rank: by revoking where NCCL can, else by aborting."""

    def worker(fake: Any) -> Any:
        comm = fake.communicator(0.7)
        comm.barrier()
        if fake.rank == 1:
            fake.fault("kernel_hang")
        t = torch.ones(2)
        result = attempt(lambda: comm.all_reduce(t, async_op=True).synchronize())
        failure = comm.failure_cause()
        state = until(lambda: (now := comm._comm_state(0)) != "ready" and now)
        record = comm.records(fake.rank)[-1]["state"]
        comm.shutdown()
        return result, failure["cause"], state, record

    results = ranks(2, worker, tmp_path, env={"FAKE_NCCL_VERSION": version})
    assert kinds([r[0] for r in results]) == ["TimeoutError"] * 2
    for result, cause, state, record in results:
        assert "all_reduce(count=2, dtype=float32, op=sum)" in result.message
        assert "(operation 2)" in result.message
        assert cause == "timeout"
        assert state in (("revoked",) if version == "23007" else ("ending", "ended"))
        assert record == "failed"
    said = [r[0].message for r in results if "exceeded its timeout of 700 ms" in r[0].message]
    assert any("its kernel had started; all ranks have called it" in m for m in said)


def test_a_rank_that_does_not_call(tmp_path: Path) -> None:
    """It is named with what it did last; it hears of it with its next call."""

    def worker(fake: Any) -> Any:
        comm = fake.communicator(0.6)
        comm.barrier()
        if fake.rank == 0:
            result = attempt(lambda: comm.all_reduce(torch.ones(3), async_op=True).synchronize())
        else:
            deadline = time.monotonic() + 10
            while comm.failure_report() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            result = attempt(lambda: comm.all_reduce(torch.ones(3)))
        comm.shutdown()
        return result

    results = ranks(2, worker, tmp_path)
    assert kinds(results) == ["TimeoutError"] * 2
    assert "ranks in this operation: 0; not yet: rank 1 (pid" in results[0].message
    assert "has called 1 operations" in results[0].message
    assert (
        "this communicator ended before: rank 0 reported: rank 0: all_reduce" in results[1].message
    )


def test_the_kernel_had_not_started(tmp_path: Path) -> None:
    """Where earlier work on the stream is what is stuck, the message says so."""

    def worker(fake: Any) -> Any:
        comm = fake.communicator(0.5)
        comm.barrier()
        word = ctypes.c_int(0)
        fake.calls.fake_block(ctypes.c_void_p(fake.stream), ctypes.byref(word))
        result = attempt(lambda: comm.all_reduce(torch.ones(3), async_op=True).synchronize())
        word.value = 1
        fake.synchronize()
        comm.shutdown()
        return result

    results = ranks(2, worker, tmp_path)
    assert kinds(results) == ["TimeoutError"] * 2
    assert any("its kernel had not started, since earlier work" in m for m in messages(results))


@pytest.mark.parametrize(("level", "kind"), [("late", "MismatchError"), ("off", "TimeoutError")])
def test_ranks_that_call_different_things(level: str, kind: str, tmp_path: Path) -> None:
    """Calls that do not end are compared, unless that is switched off."""

    def worker(fake: Any) -> Any:
        comm = fake.communicator(0.6, check=level)
        comm.barrier()
        t = torch.ones(3 + fake.rank)
        return outcome(comm, lambda: comm.all_reduce(t, async_op=True))

    results = ranks(2, worker, tmp_path)
    assert kinds(results) == [kind] * 2
    if level == "late":
        assert all(
            "all_reduce(count=3" in m and "all_reduce(count=4" in m for m in messages(results)
        )


DIFFERENT: dict[str, Any] = {
    "count": lambda c, t, r: c.all_reduce(t[: 2 + r]),
    "dtype": lambda c, t, r: c.all_reduce(t if r else t.to(torch.int32)),
    "operation": lambda c, t, r: c.all_reduce(t) if r else c.broadcast(t, 0),
    "op": lambda c, t, r: c.all_reduce(t, "max" if r else "sum"),
    "root": lambda c, t, r: c.broadcast(t, r),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_full_check(what: str, tmp_path: Path) -> None:
    """The difference is raised on every rank before any data is touched, without waiting for a timeout."""

    def worker(fake: Any) -> Any:
        comm = fake.communicator(20, check="full")
        t = torch.ones(4)
        for _ in range(3):
            comm.all_reduce(t)
        parts = [torch.zeros(1 + r) for r in range(2)]
        comm.all_gather(parts, torch.ones(1 + fake.rank))
        fake.synchronize()
        result = outcome(comm, lambda: DIFFERENT[what](comm, t, fake.rank))
        return result, t.tolist()

    results = ranks(2, worker, tmp_path)
    assert kinds([r for r, _ in results]) == ["MismatchError"] * 2
    assert all("ranks disagree on operation 5: rank 0 called" in r.message for r, _ in results)
    assert [t for _, t in results] == [[8, 8, 8, 8]] * 2


@pytest.mark.parametrize(
    ("code", "kind"), [(6, "PeerDiedError"), (2, "NcclError"), (3, "NcclError")]
)
def test_an_asynchronous_error(code: int, kind: str, tmp_path: Path) -> None:
    """ncclRemoteError, ncclSystemError and ncclInternalError in flight reach every rank."""

    def worker(fake: Any) -> Any:
        comm = fake.communicator(20)
        comm.barrier()
        if fake.rank == 0:
            fake.fault("async_error", 0, code)
        t = torch.ones(3)
        return outcome(comm, lambda: comm.all_reduce(t, async_op=True))

    name = {6: "ncclRemoteError", 2: "ncclSystemError", 3: "ncclInternalError"}[code]
    results = ranks(2, worker, tmp_path)
    assert kinds(results) == [kind] * 2
    assert all(f"{name} ({code})" in m for m in messages(results))
    assert "ended, since rank 0 reported" in results[1].message


def test_an_error_at_the_call(tmp_path: Path) -> None:
    def worker(fake: Any) -> Any:
        comm = fake.communicator(20)
        comm.barrier()
        if fake.rank == 1:
            fake.fault("enqueue_error", 0, 1)
        t = torch.ones(3)
        return outcome(comm, lambda: comm.all_reduce(t, async_op=True))

    results = ranks(2, worker, tmp_path)
    assert kinds(results) == ["NcclError"] * 2
    assert all("ncclUnhandledCudaError (1)" in m for m in messages(results))
    assert "it said last: planted: enqueue_error" in results[1].message


def test_a_call_that_nccl_never_takes_in(tmp_path: Path) -> None:
    """ncclInProgress without end, in the call itself."""

    def worker(fake: Any) -> Any:
        comm = fake.communicator(0.5)
        comm.barrier()
        fake.fault("in_progress", 0, 1 << 30)
        t = torch.ones(3)
        return outcome(comm, lambda: comm.all_reduce(t))

    results = ranks(2, worker, tmp_path)
    assert kinds(results) == ["TimeoutError"] * 2
    assert any("exceeded its timeout of 500 ms" in m for m in messages(results))


@pytest.mark.parametrize("how", ["killed", "raises", "leaves"])
def test_a_rank_that_goes(how: str, tmp_path: Path) -> None:
    """Killed, ended by an exception, or gone in good order: found long before the timeout."""

    def worker(fake: Any) -> Any:
        comm = fake.communicator(25)
        comm.barrier()
        if fake.rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                comm._abandon()
            if how == "leaves":
                deadline = time.monotonic() + 10
                while comm.rank_state(0)["sequence"] < 2 and time.monotonic() < deadline:
                    time.sleep(0.01)
                fake.fault("finalize_hang")
                comm.timeout = pycomm_timeout(0.3)
                attempt(comm.shutdown)
            return "gone"
        start = time.monotonic()
        t = torch.ones(3)
        result = outcome(comm, lambda: comm.all_reduce(t, async_op=True))
        assert time.monotonic() - start < 15
        return result

    def pycomm_timeout(seconds: float) -> Any:
        from datetime import timedelta

        return timedelta(seconds=seconds)

    first, second = ranks(2, worker, tmp_path, may_die=[1] if how == "killed" else [])
    assert second == (DIED if how == "killed" else "gone")
    if how == "killed":
        assert first.kinds[0] == "PeerDiedError"
        assert "lost rank 1 (pid" in first.message
        assert "which died; it told last of operation" in first.message
    elif how == "raises":
        assert first.kinds[0] == "MismatchError"
        assert "which has destroyed the group after operation 1" in first.message
    else:
        assert first.kinds[0] == "TimeoutError"
        assert "the other ranks did not leave the group" in first.message


def test_abort_during_a_wait(tmp_path: Path) -> None:
    """From another thread or rank: waits end at once, everywhere."""

    def worker(fake: Any) -> Any:
        comm = fake.communicator(25)
        comm.barrier()
        if fake.rank == 1:
            t = torch.ones(2)
            deadline = time.monotonic() + 10
            while comm.rank_state(0)["sequence"] < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            comm.abort("no longer needed")
            return attempt(lambda: comm.all_reduce(t))
        t = torch.ones(2)
        return outcome(comm, lambda: comm.all_reduce(t, async_op=True))

    results = ranks(2, worker, tmp_path)
    assert kinds(results) == ["AbortedError"] * 2
    assert all("rank 1 aborted: no longer needed" in m for m in messages(results))


def test_an_abort_that_hangs(tmp_path: Path) -> None:
    """NCCL's own abort may not come back: the communicator is given up, and the process goes on."""

    def worker(fake: Any) -> Any:
        from datetime import timedelta

        os.environ["FAKE_NCCL_VERSION"] = "22105"
        fake.fault("abort_hang")
        comm = fake.communicator(0.4, abort_limit=timedelta(milliseconds=200))
        comm.barrier()
        fake.fault("kernel_hang")
        t = torch.ones(2)
        result = attempt(lambda: comm.all_reduce(t, async_op=True).synchronize())
        start = time.monotonic()
        comm.shutdown()
        return result, time.monotonic() - start < 5

    results = ranks(2, worker, tmp_path)
    assert kinds([r for r, _ in results]) == ["TimeoutError"] * 2
    assert all(quick for _, quick in results)


def test_an_interrupt_while_meeting(tmp_path: Path) -> None:
    """Ctrl-C ends the wait for the others at once, and they are told."""

    def worker(fake: Any) -> Any:
        import threading

        comm = fake.communicator(25)
        if fake.rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            result = attempt(comm.connect, KeyboardInterrupt)  # type: ignore[arg-type]
            comm.shutdown()
            return result
        deadline = time.monotonic() + 10
        while comm.failure_report() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return attempt(comm.connect)

    results = ranks(2, worker, tmp_path)
    assert kinds(results) == ["KeyboardInterrupt", "AbortedError"]
    assert "rank 0 was interrupted in making its NCCL communicator" in results[1].message


# of communicators


def test_a_split_that_fails_on_one_rank(tmp_path: Path) -> None:
    def worker(fake: Any) -> Any:
        comm = fake.communicator(20)
        comm.barrier()
        if fake.rank == 1:
            fake.fault("split_error", 0, 3)
        result = attempt(lambda: comm.split(0))
        comm.shutdown()
        return result

    results = ranks(2, worker, tmp_path)
    assert kinds(results) == ["NcclError"] * 2
    assert all(
        "splitting by color 0" in m and "ncclInternalError" in m for m in [results[1].message]
    )
    assert "rank 1" in results[0].message


@pytest.mark.parametrize("version", ["23007", "22105"])
def test_survivors_go_on(version: str, tmp_path: Path) -> None:
    """After a rank has died the others shrink and work on, whether NCCL helps or not."""

    def worker(fake: Any) -> Any:
        comm = fake.communicator(20)
        comm.barrier()
        if fake.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        t = torch.ones(2)
        result = attempt(lambda: comm.all_reduce(t, async_op=True).synchronize())
        small = comm.shrink([1])
        u = torch.ones(2)
        small.all_reduce(u)
        fake.synchronize()
        small.shutdown()
        comm.shutdown()
        return result.kinds[0], u.tolist(), small.rank

    env = {"FAKE_NCCL_VERSION": version}
    assert ranks(3, worker, tmp_path, may_die=[1], env=env) == [
        ("PeerDiedError", [2, 2], 0),
        DIED,
        ("PeerDiedError", [2, 2], 1),
    ]


def test_a_store_that_goes(tmp_path: Path) -> None:
    """Every rank then finds out by itself."""
    library = build()

    def main(rank: int, world_size: int, folder: str) -> Any:
        from fake_nccl import Fake

        class Breaking:
            def __init__(self, store: Any) -> None:
                self.store = store
                self.broken = False

            def __getattr__(self, name: str) -> Any:
                if self.broken:
                    raise RuntimeError("Connection reset by peer")
                return getattr(self.store, name)

        fake = Fake(library, folder, rank, world_size)
        store = Breaking(fake.store)
        comm = fake.communicator(0.5, store=store)
        comm.barrier()
        store.broken = True
        fake.fault("kernel_hang")
        t = torch.ones(2)
        return outcome(comm, lambda: comm.all_reduce(t, async_op=True))

    results = run(2, main, str(tmp_path), init=False)
    assert kinds(results) == ["TimeoutError"] * 2


def test_no_gpu_is_said_at_once(tmp_path: Path) -> None:
    def worker(fake: Any) -> Any:
        os.environ["FAKE_CUDA_DEVICES"] = "-1"
        return attempt(fake.communicator)

    (result,) = ranks(1, worker, tmp_path)
    assert result.kinds[0] == "Error"
    assert "driver version is insufficient" in result.message


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="check must be off, late or full, not 'maybe'"):
        core.NcclSettings(check="maybe")

    def worker(fake: Any) -> Any:
        return attempt(lambda: fake.communicator(records=100))

    (result,) = ranks(1, worker, tmp_path)
    assert "power of two or 0, not 100" in result.message
