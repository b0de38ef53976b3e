"""torch.distributed around the collectives: works, numbers, hooks, timeouts, splits, profiles, many groups."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import Refused, attempt, run, td
from reference import all_gather_single, finished, reduce_scatter_single

import pycomm

ROOT: Final = Path(__file__).resolve().parent.parent
BIG: Final = 100_003


def world() -> Any:
    """The default process group."""
    return dist.group.WORLD


def backend(group: Any = None) -> Any:
    """The c10d backend under a group."""
    return (group or world())._get_backend(torch.device("cpu"))


def ones(count: int) -> torch.Tensor:
    """So many ones."""
    return torch.ones(count)


def calls(
    rank: int, n: int, count: int
) -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    """Every collective of torch's: its title in profiles, how to call it, and its results."""

    def some() -> list[torch.Tensor]:
        return [torch.full((count,), rank + 1.0) for _ in range(n)]

    x, whole, outs, ins = ones(count), ones(n * count), some(), some()
    out = torch.zeros(n * count)
    on_root = outs if rank == 0 else None
    from_root = ins if rank == 0 else None
    reduced, gathered = torch.zeros(count), torch.zeros(n * count)
    return {
        "all_reduce": (lambda **k: dist.all_reduce(x, **k), [x]),
        "reduce": (lambda **k: dist.reduce(x, 0, **k), [x]),
        "broadcast": (lambda **k: dist.broadcast(x, 0, **k), [x]),
        "all_gather": (lambda **k: dist.all_gather(outs, x, **k), outs),
        "all_gather_into_tensor": (lambda **k: all_gather_single(gathered, x, **k), [gathered]),
        "gather": (lambda **k: dist.gather(x, on_root, 0, **k), on_root or []),
        "scatter": (lambda **k: dist.scatter(reduced, from_root, 0, **k), [reduced]),
        "reduce_scatter": (lambda **k: dist.reduce_scatter(reduced, ins, **k), [reduced]),
        "reduce_scatter_tensor": (
            lambda **k: reduce_scatter_single(reduced, whole, **k),
            [reduced],
        ),
        "all_to_all": (lambda **k: dist.all_to_all(outs, ins, **k), outs),
        "barrier": (lambda **k: dist.barrier(**k), []),
        "all_to_all ": (lambda **k: dist.all_to_all_single(out, whole, **k), [out]),
    }


# Works


@pytest.mark.parametrize("count", [3, BIG])
def test_works_know_their_results_and_numbers(count: int) -> None:
    """result() and the future hold the outputs' own memory; sequence numbers are alike on all ranks."""

    def worker(rank: int, n: int) -> tuple[list[int], list[str]]:
        numbers, wrong = [backend()._get_sequence_number_for_group()], []
        for name, (call, outputs) in calls(rank, n, count).items():
            work = call(async_op=True)
            future = work.get_future().then(lambda f: len(f.value()))
            finished(work)
            numbers.append(work._get_sequence_number())
            addresses = [t.data_ptr() for t in outputs]
            if [t.data_ptr() for t in work.result()] != addresses:
                wrong.append(f"{name}: result")
            if [t.data_ptr() for t in work.get_future().value()] != addresses:
                wrong.append(f"{name}: future")
            if future.wait() != len(outputs):
                wrong.append(f"{name}: callback")
            if not (work.is_completed() and work.is_success() and work.exception() is None):
                wrong.append(f"{name}: state")
            call()
            numbers.append(backend()._get_sequence_number_for_group())
        return numbers, wrong

    results = run(3, worker)
    assert [wrong for _, wrong in results] == [[]] * 3
    numbers = results[0][0]
    assert all(of_rank == numbers for of_rank, _ in results)
    first = numbers[0]
    assert numbers == list(range(first, first + len(numbers)))


def test_refused_calls_and_failed_works() -> None:
    """The future and the work of an operation that fails both carry its error; the other calls' do not."""

    def worker(rank: int, n: int) -> list[Any]:
        t = ones(BIG + rank)
        fine: Any = dist.all_reduce(ones(3), async_op=True)
        work: Any = dist.all_reduce(t, async_op=True)
        future = work.get_future()
        found = [
            attempt(work.wait),
            attempt(future.wait),
            attempt(lambda: future.then(lambda f: f.value()).wait()),
        ]
        late = attempt(lambda: work.get_future().wait())
        fine.wait()
        return [*found, late, fine.is_success(), work.is_success(), str(backend().get_error())]

    for results in run(2, worker):
        for found in results[:4]:
            assert isinstance(found, Refused), found
            assert "disagree" in found.message
        assert results[4:6] == [True, False]
        assert results[6] in ("ErrorType.COMM_ERROR", "ErrorType.REMOTE_ERROR")


def test_get_error_says_how_it_ended() -> None:
    """SUCCESS; TIMEOUT where time ran out; REMOTE_ERROR or COMM_ERROR after an abort elsewhere or here."""

    def worker(rank: int, n: int) -> list[str]:
        store = dist.distributed_c10d._get_default_store()
        found = [str(backend().get_error())]
        first: Any = dist.new_group(timeout=td(0.3))
        second: Any = dist.new_group()
        if rank == 0:
            attempt(lambda: dist.all_reduce(ones(3), group=first))
            backend(second).abort()
            store.set("over", "")
        else:
            store.wait(["over"], td(10))
            attempt(lambda: dist.all_reduce(ones(3), group=first))
            attempt(lambda: dist.all_reduce(ones(3), group=second))
        return [*found, str(backend(first).get_error()), str(backend(second).get_error())]

    here, there = run(2, worker)
    assert here == ["ErrorType.SUCCESS", "ErrorType.TIMEOUT", "ErrorType.COMM_ERROR"]
    assert there == ["ErrorType.SUCCESS", "ErrorType.TIMEOUT", "ErrorType.REMOTE_ERROR"]


# Hooks


@pytest.mark.parametrize("count", [3, BIG])
def test_a_completion_hook_hears_of_every_operation(count: int) -> None:
    """Once each, with type, number and times, sync or async; a hook that raises ends nothing."""

    def worker(rank: int, n: int) -> list[Any]:
        heard: list[Any] = []
        lock = threading.Lock()

        def hook(info: Any) -> None:
            with lock:
                heard.append(info)
            if len(heard) == 2:
                raise RuntimeError("a hook's own failure")

        backend()._register_on_completion_hook(hook)
        names = []
        for turn in range(2):
            for call, _ in calls(rank, n, count).values():
                work = call(async_op=turn == 1)
                if turn:
                    finished(work)
            names = [str(info.op_type) for info in heard]
        backend()._wait_for_pending_works()
        numbers = [info.seq for info in heard]
        times = all(i.time_started <= i.time_finished and i.active_duration >= td(0) for i in heard)
        return [
            len(heard),
            numbers == list(range(numbers[0], numbers[0] + len(numbers))),
            times,
            names[:3],
        ]

    number = 2 * len(calls(0, 2, 1))
    names = ["OpType.ALLREDUCE", "OpType.REDUCE", "OpType.BROADCAST"]
    assert run(2, worker) == [[number, True, True, names]] * 2


def test_durations_are_known_once_timing_is_on() -> None:
    """_get_duration() after _enable_collectives_timing(); before it, an error says what to do."""

    def worker(rank: int, n: int) -> tuple[Any, float]:
        work: Any = dist.all_reduce(ones(3), async_op=True)
        finished(work)
        before = attempt(work._get_duration)
        backend()._enable_collectives_timing()
        work = dist.all_reduce(ones(BIG), async_op=True)
        finished(work)
        return before, work._get_duration()

    for before, duration in run(2, worker):
        assert isinstance(before, Refused)
        assert "enableCollectivesTiming" in before.message
        assert 0 < duration < 5000


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_abort_hook"),
    reason="torch before 2.14 has no abort hooks",
)
@pytest.mark.parametrize("cause", ["abort", "timeout", "mismatch"])
def test_abort_hooks_run_once(cause: str) -> None:
    """Registered hooks run when the group ends, in the order of their ids, once; a removed one does not."""

    def worker(rank: int, n: int) -> list[int]:
        store = dist.distributed_c10d._get_default_store()
        group: Any = dist.new_group(timeout=td(0.3))
        ran: list[int] = []
        for number in (3, 1, 2):
            group.register_abort_hook(number, lambda number=number: ran.append(number))
        group.unregister_abort_hook(2)
        dist.all_reduce(ones(3), group=group)
        assert not ran
        if cause == "abort" and rank == 0:
            backend(group).abort()
        elif cause == "mismatch":
            attempt(lambda: dist.all_reduce(ones(3 + rank), group=group))
        elif rank == 0:
            attempt(lambda: dist.all_reduce(ones(3), group=group))
        if rank == 0:
            store.set("over", "")
        else:
            store.wait(["over"], td(10))
        for _ in range(2):
            attempt(lambda: dist.all_reduce(ones(3), group=group))
        return ran

    assert run(2, worker) == [[1, 3]] * 2


# Timeouts


def set_timeout(seconds: float, group: Any = None) -> None:
    """torch's way to change a group's timeout, by the name that this torch has for it."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(td(seconds), group)
    else:
        dist.distributed_c10d._set_pg_timeout(td(seconds), group)


def test_a_group_s_timeout_can_be_changed() -> None:
    """The new limit holds for later calls, also asynchronous ones; options tell it; 0 is refused."""

    def worker(rank: int, n: int) -> list[Any]:
        store = dist.distributed_c10d._get_default_store()
        group: Any = dist.new_group(timeout=td(30))
        comm = pycomm.get_communicator(group)
        before = comm.timeout.total_seconds(), backend(group).options._timeout.total_seconds()
        refused = attempt(lambda: set_timeout(0, group))
        set_timeout(0.4, group)
        after = comm.timeout.total_seconds(), backend(group).options._timeout.total_seconds()
        found = None
        if rank == 0:
            found = attempt(lambda: dist.all_reduce(ones(3), group=group))
            store.set("over", "")
        else:
            store.wait(["over"], td(10))
        return [before, after, refused, found, pycomm.get_communicator().timeout.total_seconds()]

    results = run(2, worker)
    for before, after, refused, _, other in results:
        assert before == (30, 30)
        assert after == (0.4, 0.4)
        assert isinstance(refused, Refused)
        assert other == 8
    assert "TimeoutError" in results[0][3].kinds
    assert "400 ms" in results[0][3].message


def test_an_ephemeral_timeout_ends_with_the_first_operation() -> None:
    """What is added is granted until an operation that used it is done, and then no more."""
    extend: Any = getattr(dist.distributed_c10d, "_add_ephemeral_timeout_for_all_pgs", None)
    if extend is None:
        pytest.skip("this torch has no ephemeral timeouts")

    def worker(rank: int, n: int) -> tuple[Any, Any, float]:
        store = dist.distributed_c10d._get_default_store()
        group: Any = dist.new_group(timeout=td(0.5))
        dist.all_reduce(ones(3), group=group)
        t = ones(3)
        if rank == 1:
            store.wait(["go"], td(10))
            time.sleep(0.8)  # longer than the timeout, shorter than with what was added
            dist.all_reduce(t, group=group)
            store.wait(["over"], td(20))
            return None, None, t[0].item()
        extend(td(8))
        store.set("go", "")
        first = attempt(lambda: dist.all_reduce(t, group=group))
        began = time.monotonic()
        second = attempt(lambda: dist.all_reduce(ones(3), group=group))
        took = time.monotonic() - began
        store.set("over", "")
        assert took < 5, took
        return first, second, t[0].item()

    (first, second, a), (_, _, b) = run(2, worker, group_timeout=30)
    assert first is None
    assert (a, b) == (2, 2)
    assert "TimeoutError" in second.kinds
    assert "500 ms" in second.message


# Splits


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "split_group"), reason="this torch's groups cannot be split"
)
def test_split_groups() -> None:
    """A part of a group's ranks makes a group of its own, with a timeout and options of its own."""

    def worker(rank: int, n: int) -> list[Any]:
        parts = [[3, 1], [0, 2]]  # ranks of the parent, in the order of the new group
        mine = next(part for part in parts if rank in part)
        assert backend().supports_splitting
        results: list[Any] = []
        for turn in range(2):
            name = f"part {min(mine)} {turn}"
            child = world().split_group(mine, timeout=td(5), group_name=name)
            place = mine.index(rank)
            assert (child.rank(), child.size()) == (place, 2)
            t = torch.full((BIG,), rank + 1.0)
            child.allreduce([t]).wait()
            got = [torch.zeros(1) for _ in range(2)]
            child.allgather([got], [torch.tensor([float(rank)])]).wait()
            results += [t[-1].item(), [g.item() for g in got]]
            part = backend(child)
            assert part.options._timeout == td(5)
            assert pycomm.get_communicator(child).timeout == td(5)
            part.set_timeout(td(6))
            assert part.options._timeout == td(6)
            assert backend().options._timeout == td(8)
            child.shutdown()
        rest = world().split_group([0, 2], timeout=td(5), group_name="rest")
        assert (rest is None) == (rank in (1, 3))
        u = ones(3)
        dist.all_reduce(u)
        return [*results, u[0].item()]

    results = run(4, worker)
    for rank, found in enumerate(results):
        total, order = (6.0, [3.0, 1.0]) if rank % 2 else (4.0, [0.0, 2.0])
        assert found == [total, order, total, order, 4.0]


# Profiles


def test_every_collective_has_a_name_in_profiles() -> None:
    """torch.profiler lists pycomm:<operation>, sync and async."""

    def worker(rank: int, n: int) -> list[list[str]]:
        missing = []
        for async_op in (False, True):
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                for call, _ in calls(rank, n, 5).values():
                    work = call(async_op=async_op)
                    if async_op:
                        finished(work)
                if not async_op:
                    dist.monitored_barrier()
                names = {f"pycomm:{name.strip()}" for name in calls(rank, n, 1)}
                if not async_op:
                    names.add("pycomm:monitored_barrier")
            seen = {event.name for event in profile.events() or ()}
            missing.append(sorted(names - seen))
        return missing

    assert run(2, worker, wall=60) == [[[], []]] * 2


# Many groups


def held() -> tuple[int, int, int]:
    """How many descriptors, threads and memory maps this process has."""

    def number(what: str) -> int:
        return len(list(Path("/proc/self", what).iterdir()))

    maps = Path("/proc/self/maps").read_text().count("\n")
    return number("fd"), number("task"), maps


def test_groups_leave_nothing_behind() -> None:
    """200 groups made, used and destroyed: no descriptors, no threads, no memory maps are left."""

    def worker(rank: int, n: int) -> tuple[Any, Any, bool]:
        right = True

        def one(turn: int) -> None:
            nonlocal right
            group: Any = dist.new_group()
            t = torch.full((3,), rank + 1.0)
            finished(dist.all_reduce(t, group=group, async_op=True))
            u = torch.full((5,), rank + 1.0)
            dist.all_reduce(u, group=group)
            right &= bool((t == 3).all()) and bool((u == 3).all())
            dist.destroy_process_group(group)

        for turn in range(10):  # what is allocated once
            one(turn)
        before = held()
        for turn in range(200):
            one(turn)
        return before, held(), right

    for before, after, right in run(2, worker, wall=60):
        assert right
        assert after[:2] == before[:2]
        assert after[2] <= before[2] + 20  # malloc's own, but not one for each group


def test_init_and_destroy_several_times(tmp_path: Path) -> None:
    """A process may join and leave three worlds, with sub-groups and works that nobody waited for."""

    def worker(rank: int, n: int) -> tuple[list[float], Any, Any]:
        totals, counts = [], []
        for turn in range(3):
            method = f"file://{tmp_path}/{turn}"
            dist.init_process_group(
                "pycomm", init_method=method, rank=rank, world_size=n, timeout=td(8)
            )
            group: Any = dist.new_group([0, 1])
            t, u = torch.full((BIG,), rank + 1.0), torch.full((BIG,), rank + 1.0)
            dist.all_reduce(t, async_op=True)
            dist.all_reduce(u, group=group, async_op=True)  # destroying the group finishes both
            dist.destroy_process_group()
            del group  # it holds its communicator, and that a pidfd if it ever slept
            totals += [t[-1].item(), u[-1].item()]
            counts.append(held())
        return totals, counts[0][:2], counts[-1][:2]

    for totals, first, last in run(2, worker, init=False):
        assert totals == [3.0] * 6
        assert first == last


# The end of a process

EXIT: Final = """
import gc, os, sys
import torch, torch.distributed as dist
import pycomm

torch.set_num_threads(1)

def rank_main(rank, turn, folder):
    dist.init_process_group("pycomm", init_method=f"file://{folder}/{turn}", rank=rank, world_size=2)
    group = dist.new_group()
    t = torch.full((100_003,), rank + 1.0)
    dist.all_reduce(t)
    assert t[0] == 3
    pending = dist.all_reduce(t, async_op=True)
    if turn % 3 == 0:
        pending.wait()
    if turn % 3 == 1:
        pending.get_future().then(lambda f: f.value())
        others = [dist.all_reduce(t, group=group, async_op=True) for _ in range(20)]
        globals()["kept"] = others
    if turn % 3 == 2 and rank == 1:  # a peer may never come
        dist.all_reduce(torch.ones(5), group=group, async_op=True)
    if turn % 2:
        globals()["group"] = group

failed = 0
gc.freeze()  # an interpreter's end need not visit, and so copy, what a fork shares
for turn in range(10):
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:  # from here on an ordinary interpreter, which ends as one
            rank_main(rank, turn, sys.argv[1])
            sys.exit(0)
        children.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    if any(statuses):
        print("turn", turn, "statuses", statuses, flush=True)
        failed += 1
sys.exit(failed)
"""


def test_a_process_may_end_without_destroying_its_groups(tmp_path: Path) -> None:
    """Exit status 0, ten times, also with operations under way, waited for by nobody, or without a peer."""
    script = tmp_path / "ranks.py"
    script.write_text(EXIT)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Traceback" not in done.stdout, done.stdout[-6000:]
