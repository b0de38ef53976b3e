"""The fault matrix: what the other ranks see when one fails, for every kind of failure, moment and operation.

A cell is one job of 2 to 4 ranks in which one rank, the culprit, does something wrong at a certain moment of a certain
operation. Every other rank must get the right class of error, whose message names the culprit, soon; afterwards it must
be able to destroy the group with nothing left over, and go on in the same process: the survivors meet again.

`make faults` runs all cells and prints a table; test_faults.py runs a sample.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from harness import DIED, RankFailure, run
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import pycomm
from pycomm.extension import core

#: Elements: beside the header; in many chunks.
SMALL: Final = 64
LARGE: Final = 1 << 20
#: Seconds that operations may take, where a cell wants them to run out, and where not.
SHORT: Final = 1.0
LONG: Final = 20.0
#: Seconds until everybody must know. A timeout's begin when it is over.
LIMIT: Final = 2.0
LONG_TIME: Final = timedelta(seconds=LONG)


@dataclass(frozen=True)
class Cell:
    """One job of the matrix."""

    fault: str
    moment: str
    operation: str
    world: int
    culprit: int
    error: str  # the class that the others raise
    words: tuple[str, ...] = ()  # that the message must have besides "rank <culprit>"
    timeout: float = LONG

    def __str__(self) -> str:
        return f"{self.fault}-{self.moment}-{self.operation}-{self.culprit} of {self.world}"


# ---- operations


def call(name: str, rank: int, n: int, count: int, **how: Any) -> None:
    """One operation through torch.distributed on `count` floats per rank."""
    x = torch.ones(count)
    many = [torch.ones(count) for _ in range(n)]
    match name:
        case "all_reduce":
            dist.all_reduce(x, **how)
        case "broadcast":
            dist.broadcast(x, 0, **how)
        case "all_gather":
            dist.all_gather(many, x, **how)
        case "reduce_scatter":
            dist.reduce_scatter(x, many, **how)
        case "reduce":
            dist.reduce(x, 0, **how)
        case "gather":
            dist.gather(x, many if rank == 0 else None, 0, **how)
        case "scatter":
            dist.scatter(x, many if rank == 0 else None, 0, **how)
        case "all_to_all":
            dist.all_to_all(many, [torch.ones(count) for _ in range(n)], **how)
        case "barrier":
            dist.barrier(**how)
        case "send_recv":  # in a circle
            works = [dist.isend(x, (rank + 1) % n), dist.irecv(many[0], (rank - 1) % n)]
            for work in works:
                assert work is not None
                work.wait()
        case _:
            raise AssertionError(name)


COLLECTIVES: Final = [
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
]
OPERATIONS: Final = [*COLLECTIVES, "barrier", "send_recv"]


def backward(rank: int, n: int, count: int) -> None:
    """A step of data parallel training; the gradients are all-reduced within."""
    model = pycomm.DistributedDataParallel(torch.nn.Linear(count // 64, 64, bias=False))
    model(torch.ones(1, count // 64)).sum().backward()


# ---- what the culprit does; the others call the operation


def end_process(fault: str) -> None:
    """Ends this process, or stops it."""
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def fail_inside(fault: str, chunk: int, act: Callable[[], None]) -> None:
    """Calls an operation in which this process then fails, in one of its chunks or (-1) at its entry."""
    sequence = pycomm.get_communicator().sequence
    core.set_test_fault(fault, dist.get_rank(), sequence + 1, chunk)
    act()


def strike(store: dist.Store) -> None:
    """Notes when the culprit goes wrong; the clock of all processes of a machine is one."""
    store.set("struck", repr(time.monotonic()))


def interrupt_soon(store: dist.Store, seconds: float = 0.5) -> None:
    """KeyboardInterrupt in the main thread, as Ctrl-C, when it will be blocked."""

    def handler(*_: object) -> None:
        strike(store)
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


MISMATCHES: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    # what the others call, what the culprit calls: (rank, world size)
    "operation": (
        lambda r, n: dist.all_reduce(torch.ones(SMALL)),
        lambda r, n: dist.broadcast(torch.ones(SMALL), 0),
    ),
    "large operation": (
        lambda r, n: dist.all_reduce(torch.ones(LARGE)),
        lambda r, n: dist.barrier(),
    ),
    "count": (
        lambda r, n: dist.all_reduce(torch.ones(SMALL)),
        lambda r, n: dist.all_reduce(torch.ones(SMALL + 1)),
    ),
    "large count": (
        lambda r, n: dist.all_reduce(torch.ones(LARGE)),
        lambda r, n: dist.all_reduce(torch.ones(SMALL)),
    ),
    "dtype": (
        lambda r, n: dist.all_reduce(torch.ones(SMALL)),
        lambda r, n: dist.all_reduce(torch.ones(SMALL, dtype=torch.int32)),
    ),
    "reduce op": (
        lambda r, n: dist.all_reduce(torch.ones(SMALL)),
        lambda r, n: dist.all_reduce(torch.ones(SMALL), op=dist.ReduceOp.MAX),
    ),
    "root": (
        lambda r, n: dist.broadcast(torch.ones(SMALL), 0),
        lambda r, n: dist.broadcast(torch.ones(SMALL), 1),
    ),
    "parts": (
        lambda r, n: dist.all_gather([torch.ones(SMALL) for _ in range(n)], torch.ones(SMALL)),
        lambda r, n: dist.all_gather([torch.ones(r + i) for i in range(n)], torch.ones(2 * r)),
    ),
    "order": (
        lambda r, n: (dist.all_reduce(torch.ones(SMALL)), dist.barrier()),
        lambda r, n: (dist.barrier(), dist.all_reduce(torch.ones(SMALL))),
    ),
}


# ---- the worker


@dataclass
class Found:
    """What a rank reports of its cell."""

    error: str = "none"
    message: str = ""
    cause: tuple[str, int] | None = None  # of the default group, and its culprit
    seconds: float = -1.0
    left_over: list[str] = field(default_factory=list)
    met_again: int = 0


def open_things(with_threads: bool) -> dict[str, int]:
    """What a process must not gather."""
    things = {
        "descriptors": entries("/proc/self/fd"),
        "files in /dev/shm": len(mapped("/dev/shm")),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
    }
    if with_threads:
        things["threads"] = entries("/proc/self/task")
    return things


def mapped(folder: str) -> set[str]:
    """A folder's files that this process has in its memory; other jobs may have theirs there."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if f" {folder}/" in line}


def entries(folder: str) -> int:
    """How many files a folder holds."""
    return sum(1 for _ in Path(folder).iterdir())


def cause_of_failure() -> tuple[str, int] | None:
    """What the core says of the default group, if there is one."""
    failure = pycomm.get_communicator().failure_cause() if dist.is_initialized() else None
    return (failure["cause"], failure["culprit"]) if failure else None


def meet(path: Path, rank: int, n: int, timeout: float) -> None:
    """Makes the default group."""
    dist.init_process_group(
        "pycomm",
        init_method=f"file://{path}",
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=timeout),
    )


def work(rank: int, n: int, cell: Cell, folder: Path) -> Found | str:
    """Be one rank of a cell."""
    warm_up()
    before = open_things(cell.moment != "backward")
    found = Found()
    began = [time.monotonic()]
    store = dist.FileStore(str(folder / "flags"), n)
    try:
        take_part(rank, n, cell, folder, store, began)
    except pycomm.Error as error:
        now = time.monotonic()
        struck = float(store.get("struck")) if store.check(["struck"]) else began[0]
        found.seconds = now - max(began[0], struck)
        found.error, found.message = type(error).__name__, str(error)
        found.cause = cause_of_failure()
    except KeyboardInterrupt:
        found.seconds = time.monotonic() - began[0]
        found.error = "KeyboardInterrupt"
    except RuntimeError as error:  # the culprit's own
        found.error, found.message = type(error).__name__, str(error)
    store.set(f"over {rank}", "yes")
    if dist.is_initialized():
        dist.destroy_process_group()
    after = open_things(cell.moment != "backward")
    found.left_over = [f"{k}: {v} -> {after[k]}" for k, v in before.items() if after[k] > v]
    found.met_again = meet_again(rank, n, cell, folder)
    return found


def warm_up() -> None:
    """What a process opens once and keeps."""
    store = dist.HashStore()
    communicator = pycomm.create_communicator(store, 0, 1)
    communicator.all_reduce(torch.ones(4))
    communicator.shutdown()
    torch.ones(2, requires_grad=True).sum().backward()


def meet_again(rank: int, n: int, cell: Cell, folder: Path) -> int:
    """The survivors' sum of ones, over a new group in the same processes."""
    gone = {cell.culprit} if cell.fault in ("kill", "segv", "exit", "stop") else set[int]()
    ranks = [r for r in range(n) if r not in gone]
    meet(folder / "again", ranks.index(rank), len(ranks), LONG)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


def take_part(
    rank: int, n: int, cell: Cell, folder: Path, store: dist.Store, began: list[float]
) -> None:
    """Until the error."""
    is_culprit = rank == cell.culprit
    act = actions(rank, n, cell)
    if cell.moment == "rendezvous":
        if is_culprit and cell.fault == "interrupt":
            interrupt_soon(store)
        elif is_culprit and cell.fault == "kill":
            end_process("kill")
        elif is_absent(cell, rank):
            store.wait([f"over {r}" for r in range(n) if not is_absent(cell, r)], LONG_TIME)
        began[0] = time.monotonic()
        meet(folder / "first", rank, n, cell.timeout)
        return
    meet(folder / "first", rank, n, cell.timeout)
    call("all_reduce", rank, n, SMALL)
    began[0] = time.monotonic()
    if is_culprit:
        misbehave(cell, act, store, n)
    elif cell.fault == "interrupt" and rank == bystander(cell):
        store.wait([f"over {cell.culprit}"], LONG_TIME)
        began[0] = time.monotonic()
    if cell.fault == "group":
        act = functools.partial(cross, is_culprit, n)
    act()
    call("barrier", rank, n, SMALL)  # what the culprit sent before it failed may have been enough
    call("barrier", rank, n, SMALL)


def bystander(cell: Cell) -> int:
    """The rank that lets the culprit of an interrupt wait."""
    return (cell.culprit + 1) % cell.world


def actions(rank: int, n: int, cell: Cell) -> Callable[[], None]:
    """What this rank calls."""
    is_culprit = rank == cell.culprit
    if cell.fault == "mismatch":
        usual, odd = MISMATCHES[cell.operation]
        return lambda: (odd if is_culprit else usual)(rank, n)
    count = count_of(cell)
    if cell.moment == "backward":
        return lambda: backward(rank, n, count)
    if cell.moment == "wait":
        return lambda: wait_for_all_reduce(count)
    return lambda: call(cell.operation, rank, n, count)


def wait_for_all_reduce(count: int) -> None:
    """An asynchronous operation, and the wait for it."""
    work = dist.all_reduce(torch.ones(count), async_op=True)
    assert work is not None
    work.wait()


def count_of(cell: Cell) -> int:
    """Elements per rank."""
    return LARGE if cell.moment in ("inside large", "backward") else SMALL


def is_absent(cell: Cell, rank: int) -> bool:
    """Whether a rank comes to the rendezvous when the others have given up."""
    absent = {"late": cell.culprit, "interrupt": bystander(cell)}
    return rank == absent.get(cell.fault)


def misbehave(cell: Cell, act: Callable[[], None], store: dist.Store, n: int) -> None:
    """The culprit, once the group is there. Returns if it is to go on like the others."""
    others = [f"over {r}" for r in range(n) if r != cell.culprit]
    strike(store)
    match cell.fault:
        case "kill" | "segv" | "exit" | "stop":
            if cell.moment == "idle" or cell.operation == "send_recv":
                if cell.moment != "idle":
                    dist.isend(torch.ones(count_of(cell)), (cell.culprit + 1) % n)
                end_process(cell.fault)
            fail_inside(cell.fault, 1 if cell.moment == "inside large" else -1, act)
        case "exception":
            try:
                raise ValueError("a bug of the user's")
            except ValueError as error:
                dist.destroy_process_group()
                raise RuntimeError("a bug of the user's") from error
        case "one call less":
            dist.destroy_process_group()
            raise RuntimeError("done early")
        case "late":
            store.wait(others, LONG_TIME)
            raise RuntimeError("late on purpose")
        case "interrupt":
            interrupt_soon(store)
        case "abort":
            dist.distributed_c10d._abort_process_group()
            raise RuntimeError("aborted on purpose")


def cross(is_culprit: bool, n: int) -> None:
    """Two groups of the same ranks; the culprit uses them in another order."""
    groups: list[Any] = [dist.new_group(list(range(n))), dist.new_group(list(range(n)))]
    for group in reversed(groups) if is_culprit else groups:
        dist.all_reduce(torch.ones(SMALL), group=group)


# ---- the matrix


def cells() -> list[Cell]:
    """All of them."""
    return [*deaths(), *stops(), *mismatches(), *delays(), *interrupts(), *departures()]


def deaths() -> Iterator[Cell]:
    worlds = itertools.cycle([2, 3, 4])
    for operation in OPERATIONS:
        moments = ["idle", "inside small", "inside large"]
        if operation == "barrier":
            moments.pop()
        for moment, fault in itertools.product(moments, ["kill", "segv", "exit"]):
            world = next(worlds)
            culprit = world - 1 if fault == "kill" else 0 if fault == "exit" else world // 2
            yield Cell(fault, moment, operation, world, culprit, "PeerDiedError", ("pid ",))
    for world, fault in itertools.product([2, 3, 4], ["kill", "exit"]):
        yield Cell(fault, "backward", "all_reduce", world, 1, "PeerDiedError", ("pid ",))
    for world in (2, 3, 4):  # nobody can know who does not come
        yield Cell("kill", "rendezvous", "init", world, 1, "TimeoutError", timeout=SHORT)


def stops() -> Iterator[Cell]:
    for operation, world in zip(OPERATIONS, itertools.cycle([2, 3, 4]), strict=False):
        yield Cell(
            *("stop", "idle", operation, world, world - 1, "PeerDiedError"),
            words=("stands still", "pid "),
            timeout=SHORT,
        )
    for world in (2, 3):
        yield Cell(
            *("stop", "inside large", "all_reduce", world, 0, "PeerDiedError"),
            words=("stands still",),
            timeout=SHORT,
        )


def mismatches() -> Iterator[Cell]:
    for kind, world in itertools.product(MISMATCHES, [2, 3, 4]):
        yield Cell("mismatch", "entry", kind, world, world - 1, "MismatchError", ("faults.py",))
    for world in (2, 3, 4):
        yield Cell("group", "entry", "all_reduce", world, 0, "MismatchError", ("group",))


def delays() -> Iterator[Cell]:
    for operation, world in zip(OPERATIONS, itertools.cycle([2, 3, 4]), strict=False):
        words = ("not yet", "1000 ms") if operation != "send_recv" else ("1000 ms",)
        yield Cell("late", "idle", operation, world, 1, "TimeoutError", words, timeout=SHORT)
    for world in (2, 3, 4):
        yield Cell("late", "rendezvous", "init", world, 1, "TimeoutError", timeout=SHORT)


def interrupts() -> Iterator[Cell]:
    for operation, world in itertools.product(["all_reduce", "barrier", "broadcast"], [2, 3]):
        for moment in ("inside small", "inside large"):
            yield Cell("interrupt", moment, operation, world, 0, "AbortedError", ("interrupted",))
    for world in (2, 3, 4):
        yield Cell(
            "interrupt",
            "wait",
            "all_reduce",
            world,
            0,
            "PeerDiedError",
            ("left the group because of KeyboardInterrupt",),
        )
    for world, culprit in ((3, 0), (3, 2), (4, 0), (4, 3)):
        yield Cell("interrupt", "rendezvous", "init", world, culprit, "AbortedError", timeout=5)
    for world in (2, 3):
        yield Cell("abort", "idle", "all_reduce", world, 0, "AbortedError", ("aborted",))


def departures() -> Iterator[Cell]:
    for operation, world in itertools.product(["all_reduce", "barrier", "gather"], [2, 3]):
        words = ("ValueError: a bug of the user's",)
        yield Cell("exception", "idle", operation, world, 1, "PeerDiedError", words)
        yield Cell("one call less", "idle", operation, world, 1, "MismatchError", ("destroyed",))


# ---- one cell from outside


def check(cell: Cell, folder: Path, worker: Callable[..., Any] = work) -> float:
    """Runs a cell; returns the seconds until its last rank knew. Raises AssertionError for what is wrong.

    Another `worker` calls `work` in a place of its own.
    """
    ends = cell.fault in ("kill", "segv", "exit", "stop")
    (folder / "run").mkdir()
    absent = [
        rank
        for rank in range(cell.world)
        if cell.moment == "rendezvous" and cell.fault == "interrupt" and is_absent(cell, rank)
    ]
    results = run(
        *(cell.world, worker, cell, folder / "run"),
        init=False,
        may_die={cell.culprit} if ends else (),
        stopped={cell.culprit} if cell.fault == "stop" else (),
        wall=40,
    )
    slowest = 0.0
    survivors = cell.world - ends
    for rank, found in enumerate(results):
        if rank == cell.culprit:
            assert not ends or found is DIED, found
        if rank == cell.culprit or rank in absent:
            continue
        assert found.error == cell.error, (rank, found)
        seconds = found.seconds - (cell.timeout if cell.timeout == SHORT else 0)
        assert seconds < LIMIT, (rank, found)
        assert found.cause == blame(cell), (rank, found)
        for word in (*named(cell, rank), *cell.words):
            assert word in found.message, (rank, word, found)
        assert found.left_over == [], (rank, found)
        assert found.met_again == survivors, (rank, found)
        slowest = max(slowest, seconds)
    return slowest


def named(cell: Cell, rank: int) -> list[str]:
    """How a rank's message names the culprit. Who does not come to a rendezvous only rank 0 can know."""
    if cell.moment == "rendezvous" and cell.error == "TimeoutError":
        return [f"these never came: {cell.culprit}"] if rank == 0 else []
    return [] if cell.fault == "late" else [f"rank {cell.culprit}"]


def blame(cell: Cell) -> tuple[str, int] | None:
    """The cause and the culprit that the core must hand out, if the default group has failed."""
    if cell.moment == "rendezvous" or cell.fault == "group":
        return None
    if cell.fault == "mismatch":
        return ("parts_mismatch" if cell.operation == "parts" else "mismatch"), -1
    if cell.moment == "wait":
        return "exited", cell.culprit
    causes = {
        # In another pid namespace nobody can see that a process stands still.
        "stop": "timeout" if cell.error == "TimeoutError" else "stopped",
        "exception": "exited",
        "one call less": "left",
        "late": "timeout",
        "interrupt": "interrupted",
        "abort": "aborted",
    }
    return causes.get(cell.fault, "died"), cell.culprit


# ---- the table


def main() -> int:
    """Runs all cells; 0 if they pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cells whose name contains this (all)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/faults"), help="folder to write to (runs/faults)"
    )
    args = parser.parse_args()
    chosen = [cell for cell in cells() if args.only in str(cell)]
    rows: list[dict[str, Any]] = []
    console = Console()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        for cell in progress.track(chosen, description="cells"):
            rows.append(judge(cell))
            if rows[-1]["problem"]:
                console.print(f"[red]{cell}[/red]: {rows[-1]['problem']}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "faults.json").write_text(json.dumps(rows, indent=1) + "\n")
    table = summary(rows)
    (args.out / "faults.md").write_text(table)
    show(rows, console)
    print(f"wrote {args.out}/faults.json and faults.md")
    return 1 if any(row["problem"] for row in rows) else 0


def judge(cell: Cell) -> dict[str, Any]:
    """A cell's row."""
    import tempfile

    row: dict[str, Any] = {"cell": str(cell), **asdict(cell), "seconds": None, "problem": ""}
    with tempfile.TemporaryDirectory(prefix="pycomm-fault-") as folder:
        try:
            row["seconds"] = check(cell, Path(folder))
        except (AssertionError, RankFailure) as error:
            row["problem"] = str(error)
    return row


def groups_of(rows: list[dict[str, Any]]) -> Iterator[tuple[str, int, int, float, float]]:
    """(fault, cells, passed, median seconds, slowest) by fault, then of all."""
    for fault in [*dict.fromkeys(row["fault"] for row in rows), "all"]:
        mine = [row for row in rows if fault in (row["fault"], "all")]
        passed = [row["seconds"] for row in mine if not row["problem"]]
        times = sorted(passed) or [float("nan")]
        yield fault, len(mine), len(passed), times[len(times) // 2], times[-1]


def summary(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| fault | cells | passed | median time to notice | slowest |",
        "|---|---:|---:|---:|---:|",
    ]
    for fault, number, passed, median, slowest in groups_of(rows):
        lines.append(f"| {fault} | {number} | {passed} | {median:.2f} s | {slowest:.2f} s |")
    return "\n".join(lines) + "\n"


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """The same on the terminal."""
    table = Table("fault", "cells", "passed", "median", "slowest", title="time to notice")
    for fault, number, passed, median, slowest in groups_of(rows):
        table.add_row(fault, str(number), str(passed), f"{median:.2f} s", f"{slowest:.2f} s")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
