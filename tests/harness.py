"""Run a function on several ranks, each a process of its own, and the small helpers of the tests.

    def worker(rank: int, n: int) -> float:
        t = torch.full((3,), float(rank))
        dist.all_reduce(t)
        return t[0].item()

    assert harness.run(2, worker) == [1.0, 1.0]

A rank is a fork of a server that has imported torch (see `preload.py`), so it starts in tens of
milliseconds. The worker travels by cloudpickle: closures, lambdas and local classes all work.
"""

from __future__ import annotations

import dis
import faulthandler
import functools
import importlib
import inspect
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import types
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn

T = TypeVar("T")

#: Seconds that the other ranks get to report once one rank has failed.
GRACE: Final = 2.0
#: Of the CPU kernels, best first.
INSTRUCTION_SETS: Final = ("avx512", "avx2", "generic")

_TESTS: Final = Path(__file__).resolve().parent
_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["preload"])

# cloudpickle overlooks the globals that the body of a class within a function names (decorators,
# annotations): those are loaded by another instruction than a function's own ones.
cloudpickle.cloudpickle.GLOBAL_OPS += (dis.opmap["LOAD_NAME"],)


class RankFailure(AssertionError):
    """At least one rank raised, died or did not finish; the message shows what each one did."""


class _Died:
    """The result of a rank that died and was allowed to."""

    def __repr__(self) -> str:
        return "DIED"


DIED: Final = _Died()


@dataclass(frozen=True)
class _Job:
    """All that one rank is told; it travels by pickle."""

    rank: int
    world_size: int
    work: bytes  # (worker, args) by cloudpickle
    init: bool
    backend: str
    group_timeout: float
    env: dict[str, str | None]
    folder: str  # shared by the ranks of one run

    @property
    def trace(self) -> Path:
        """Where faulthandler writes this rank's stacks."""
        return Path(self.folder) / f"trace.{self.rank}"


def warm_up() -> None:
    """Start the fork server in the background; `run` does it when nobody has."""
    before = os.environ.get("PYTHONPATH")
    # Python 3.11's fork server ignores the parent's sys.path when it imports `preload`.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_TESTS), *filter(None, sys.path)])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def run(
    n: int,
    worker: Callable[..., Any],
    *args: Any,
    wall: float = 30,
    init: bool = True,
    may_die: Collection[int] = (),
    stopped: Collection[int] = (),
    env: Mapping[str, str | None] | None = None,
    group_timeout: float = 8,
    backend: str = "pycomm",
) -> list[Any]:
    """Run `worker(rank, n, *args)` on n ranks and return the results in rank order.

    With `init`, each rank first joins a default group of the given backend, and leaves it after
    the worker has returned. A rank in `may_die` that dies counts as the result `DIED`; one in
    `stopped` is ended, and has died so, when all others are done. Entries
    of `env` are set in the ranks before anything else; None removes a variable. Any rank that
    raises, dies or is not done after `wall` seconds makes this raise `RankFailure`.
    """
    __tracebackhide__ = True
    warm_up()
    work = _pickle_work(worker, args)
    with tempfile.TemporaryDirectory(prefix="pycomm-test-") as folder, ExitStack() as stack:
        ranks = []
        for rank in range(n):
            job = _Job(rank, n, work, init, backend, group_timeout, dict(env or {}), folder)
            ranks.append(_Rank(job, rank in may_die))
            stack.callback(ranks[-1].kill)
        _collect([rank for rank in ranks if rank.job.rank not in stopped], time.monotonic() + wall)
        for rank in stopped:
            ranks[rank].process.kill()
        _collect([ranks[rank] for rank in stopped], time.monotonic() + GRACE)
        _dump_stacks([rank for rank in ranks if not rank.finished])
        if any(rank.failed for rank in ranks):
            reports = "\n".join(rank.report(wall) for rank in ranks)
            raise RankFailure(f"{n} ranks, worker {_name(worker)}:\n{reports}")
        return [rank.result for rank in ranks]


def _pickle_work(worker: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a worker; one from a test module goes by value.

    Then the rank needs not import that module, and keeps pytest's rewritten assertions.
    """
    function = worker
    while isinstance(function, functools.partial):
        function = function.func
    module = inspect.getmodule(function)
    if module is not None and module.__name__.startswith("test_"):
        cloudpickle.register_pickle_by_value(module)
    stream = io.BytesIO()
    _Pickler(stream).dump((worker, args))
    return stream.getvalue()


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, fields = cloudpickle.cloudpickle._code_reduce(code)
    return make, tuple(code.co_filename if f == "<dynamic-code>" else f for f in fields)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but code keeps its file name, so that tracebacks show source lines."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )


def _name(worker: Callable[..., Any]) -> str:
    return getattr(worker, "__qualname__", repr(worker))


@dataclass(eq=False)
class _Rank:
    """The parent's view of one rank: its process, the pipe for its answer, and what came of it."""

    job: _Job
    may_die: bool
    finished: bool = False
    answer: tuple[bool, Any] | None = None  # (True, result) or (False, traceback)
    process: Any = field(init=False)
    receiver: connection.Connection = field(init=False)

    def __post_init__(self) -> None:
        self.receiver, sender = _CONTEXT.Pipe(duplex=False)
        self.process = _CONTEXT.Process(target=_rank_main, args=(self.job, sender), daemon=True)
        self.process.start()
        sender.close()

    def handles(self) -> list[Any]:
        """What to wait on: the process, and the pipe until it has delivered or ended."""
        pipe = [] if self.receiver.closed else [self.receiver]
        return [self.process.sentinel, *pipe]

    def poll(self) -> None:
        """Take in what has happened since the last call."""
        ended = connection.wait([self.process.sentinel], 0)
        if not self.receiver.closed and self.receiver.poll():
            with suppress(EOFError):  # it died before it could answer; the exit code says more
                self.answer = cloudpickle.loads(self.receiver.recv_bytes())
            self.receiver.close()
        if ended:
            self.process.join()
            self.finished = True

    def kill(self) -> None:
        """End the process if it still runs, and free what the parent holds of it."""
        if not self.finished:
            self.process.kill()
        self.process.join()
        self.receiver.close()

    @property
    def died(self) -> bool:
        """Whether the process ended by a signal or by a failing exit code."""
        raised = self.answer is not None and not self.answer[0]
        return self.finished and not raised and (self.process.exitcode != 0 or not self.answer)

    @property
    def failed(self) -> bool:
        """Whether this rank alone makes the run fail."""
        if self.died:
            return not self.may_die
        return not self.finished or not self.answer or not self.answer[0]

    @property
    def result(self) -> Any:
        """What the worker returned, or DIED."""
        return DIED if self.died or self.answer is None else self.answer[1]

    def report(self, wall: float) -> str:
        """Say in words what became of this rank."""
        head = f"--- rank {self.job.rank} "
        if self.died:
            return f"{head}died: {_exit_in_words(self.process.exitcode)}\n{self._stacks()}"
        if not self.finished:
            limit = f"limit {wall} s, or {GRACE} s after a failure"
            return f"{head}had not finished ({limit}); its stacks:\n{self._stacks()}"
        assert self.answer is not None
        succeeded, value = self.answer
        return f"{head}returned {value!r}" if succeeded else f"{head}raised\n{value}"

    def _stacks(self) -> str:
        try:
            return self.job.trace.read_text(errors="replace")
        except FileNotFoundError:
            return "(it never started)\n"


def _exit_in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}"


def _collect(ranks: Sequence[_Rank], deadline: float) -> None:
    """Wait until all ranks have ended, the deadline is there, or one failed and GRACE is over."""
    hurried = False
    while True:
        running = [rank for rank in ranks if not rank.finished]
        left = deadline - time.monotonic()
        if not running or left <= 0:
            return
        connection.wait([handle for rank in running for handle in rank.handles()], left)
        for rank in running:
            rank.poll()
        if not hurried and any(_has_failed(rank) for rank in ranks):
            hurried = True
            deadline = min(deadline, time.monotonic() + GRACE)


def _has_failed(rank: _Rank) -> bool:
    raised = rank.answer is not None and not rank.answer[0]
    return raised or (rank.finished and rank.failed)


def _dump_stacks(stuck: Sequence[_Rank]) -> None:
    """Ask the ranks that still run for their stacks and wait, shortly, for the files to fill."""
    for rank in stuck:
        if rank.job.trace.exists():  # its handler for the signal is in place
            os.kill(rank.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 1
    sizes: list[int] = []
    while stuck and time.monotonic() < deadline:
        time.sleep(0.02)
        before, sizes = sizes, [_size(rank.job.trace) for rank in stuck]
        if sizes == before and all(sizes):
            return


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _rank_main(job: _Job, sender: connection.Connection) -> None:
    """Be one rank: join the group, run the worker, leave, answer."""
    trace = Path(job.folder, f"new.{job.rank}").open("w")  # noqa: SIM115  (open to the end)
    faulthandler.enable(trace)
    faulthandler.register(signal.SIGUSR1, trace)
    Path(trace.name).rename(job.trace)
    try:
        result = _work(job)
        if dist.is_initialized():
            dist.destroy_process_group()
        answer = cloudpickle.dumps((True, result))
    except BaseException:
        sender.send_bytes(cloudpickle.dumps((False, traceback.format_exc())))
        os._exit(1)
    sender.send_bytes(answer)


def _work(job: _Job) -> Any:
    for name, value in job.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.set_num_threads(1)
    worker, args = cloudpickle.loads(job.work)
    if job.init:
        if job.backend == "pycomm":
            importlib.import_module("pycomm")  # registers the backend
        dist.init_process_group(
            job.backend,
            init_method=f"file://{job.folder}/rendezvous",
            rank=job.rank,
            world_size=job.world_size,
            timeout=td(job.group_timeout),
        )
    return worker(job.rank, job.world_size, *args)


# The implementation under test: pycomm or, to check the tests themselves, torch on Gloo.

IMPLEMENTATION: Final = os.environ.get("PYCOMM_TEST_DDP", "pycomm")
BACKEND: Final = "gloo" if IMPLEMENTATION == "torch" else "pycomm"


def ddp_class() -> Callable[..., Any]:
    """The DistributedDataParallel class under test."""
    if IMPLEMENTATION == "torch":
        return torch.nn.parallel.DistributedDataParallel
    module: Any = importlib.import_module("pycomm")
    return module.DistributedDataParallel


# The vocabulary of the tests.


@dataclass(frozen=True)
class Refused:
    """An error as a rank hands it back: the names of its class and bases, and its text."""

    kinds: tuple[str, ...]
    message: str


def attempt(
    step: Callable[[], T], error: type[Exception] | tuple[type[Exception], ...] = RuntimeError
) -> T | Refused:
    """What `step` returns or, if it raises one of the given errors, that as `Refused`."""
    try:
        return step()
    except error as e:
        return Refused(tuple(kind.__name__ for kind in type(e).__mro__), str(e))


def refused(results: Sequence[Any], *words: str) -> bool:
    """Whether every rank refused, each with a message that has all the words."""
    messages = [r.message for r in results if isinstance(r, Refused)]
    return len(messages) == len(results) and all(w in m for w in words for m in messages)


def right_or_refused(results: Sequence[Any], right: Any, *words: str) -> bool:
    """Whether all ranks have the right value, or all refused with these words."""
    return list(results) == [right] * len(results) or refused(results, *words)


def td(seconds: float) -> timedelta:
    """A duration as torch.distributed wants it."""
    return timedelta(seconds=seconds)


def near(a: torch.Tensor | complex, b: torch.Tensor | complex, tol: float = 1e-6) -> bool:
    """Whether a and b have one shape and differ by at most tol, absolutely or relatively."""
    x, y = torch.as_tensor(a), torch.as_tensor(b)
    if x.shape != y.shape:
        return False
    wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float64)
    return torch.allclose(x.to(wide), y.to(wide), rtol=tol, atol=tol)


def lin(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer without bias."""
    return nn.Linear(inputs, outputs, bias=False)


def P(count: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter of `count` ones."""
    return nn.Parameter(torch.ones(count, dtype=dtype))


def seeded(make: Callable[[], T]) -> T:
    """What `make` returns after seeding torch with 0: the same on all ranks."""
    torch.manual_seed(0)
    return make()


def G(seed: int) -> torch.Generator:
    """A seeded generator."""
    return torch.Generator().manual_seed(seed)


def mean_grads(
    ref: nn.Module, losses: Sequence[Callable[[nn.Module], torch.Tensor]]
) -> list[torch.Tensor]:
    """The mean over ranks of the gradients of a plain module; `losses[k]` is rank k's loss.

    Each rank's gradient is taken on a fresh copy, so that buffers start alike.
    """
    total = [torch.zeros_like(p) for p in ref.parameters()]
    for loss in losses:
        model = deepcopy(ref)
        loss(model).backward()
        for t, p in zip(total, model.parameters(), strict=True):
            if p.grad is not None:
                t += p.grad / len(losses)
    return total
