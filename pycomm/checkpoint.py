"""Checkpoints of a job's state that are whole or not there: a save killed at any moment leaves those before it.

A checkpoint is a folder, ``step-00000042``, that torch.distributed.checkpoint (DCP) writes and reads: each rank its
part, and any number of ranks may load it. It gets its name only when all ranks have written and the disk has it.

    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from pycomm import checkpoint

    def state_of(model, optimizer, seen):  # model bare, or wrapped in DistributedDataParallel: the names are the same
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "seen": seen}

    step = 0
    if checkpoint.latest("runs/a") is not None:
        state = state_of(model, optimizer, 0)
        step = checkpoint.load(state, "runs/a")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    ...
    checkpoint.save(state_of(model, optimizer, seen), "runs/a", step)

One name is one value: of sharded tensors (DTensor, FSDP) each rank writes its part, of anything else that several ranks
hold under one name the lowest rank its own, as DistributedDataParallel's buffers want it. So random states and
positions in the data that differ by rank need the rank in their top-level name (``f"random.{rank}"``). Objects other
than tensors are pickled; load only checkpoints that you trust.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import operator
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.futures import Future

from pycomm.errors import Error, InvalidArgument, MismatchError

T = TypeVar("T")

#: Name and bytes of each file of a checkpoint: with it a folder tells that nothing of it is missing.
_LIST: Final = "files.json"
_STEP: Final = re.compile(r"step-(\d{8,})")
_TEMPORARY: Final = re.compile(r"\.step-\d{8,}\.tmp-[0-9a-f]+")


def save(
    state: dict[str, Any],
    folder: Path | str,
    step: int,
    *,
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Collective: writes ``state`` as the checkpoint ``step`` in ``folder`` and returns its path.

    ``state`` holds tensors, sharded tensors, picklable objects, nested dicts and lists of them, and at the top objects
    with ``state_dict()`` and ``load_state_dict()``, as modules. A checkpoint of the same step is replaced, atomically.
    When the new one is in place, the newest ``keep - 1`` of smaller steps are kept and the others removed, as is what
    interrupted saves have left. Larger steps stay, with a warning, for ``latest`` goes on to name them.

    Raises Error on every rank if one fails, naming it and the reason, and PeerDiedError if one dies; smaller steps are
    then as they were. One job may save into a folder at a time. Without a process group, for a process on its own.
    """
    step = operator.index(step)
    if step < 0 or keep < 1:
        raise InvalidArgument(f"step is {step} and keep is {keep}; they must be at least 0 and 1")
    ranks = _Ranks(group)
    place = Path(folder).absolute()
    doing = f"saving step {step} in {place}"
    with ExitStack() as stack:
        draft = _Draft(place, step) if ranks.rank == 0 else None
        calls = ranks.together(
            doing, lambda: (step, keep, stack.enter_context(draft).name if draft else "")
        )
        ranks.check_calls_agree("save", [f"step={step}, keep={keep}" for step, keep, _ in calls])
        path = place / calls[0][2]
        plain: dict[str, Any] = {}

        def resolve() -> None:
            if not path.is_dir():
                raise Error(f"does not see {path}, which rank 0 made; give all ranks one folder")
            plain.update(_without_objects(state))

        ranks.together(doing, resolve)
        writer = _Writer(path)
        with ranks.dcp_errors(doing):
            dcp.save(
                plain,
                storage_writer=writer,
                planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=group,
                no_dist=not ranks.distributed,
            )
        ranks.together(doing, writer.check)
        ranks.together(doing, lambda: draft.publish(keep) if draft else None)
    return place / _name(step)


def latest(folder: Path | str) -> int | None:
    """The newest complete step in a folder, None if there is none. Not collective.

    Complete is a checkpoint that has all its files, each with its number of bytes. Raises Error if the folder is there
    but cannot be read.
    """
    try:
        return max(_complete_steps(Path(folder)), default=None)
    except OSError as error:
        raise Error(f"cannot look for checkpoints in {folder}: {error}") from error


def load(
    state: dict[str, Any],
    folder: Path | str,
    step: int | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Collective: loads a step, the newest complete one if None, into ``state`` and returns its number.

    ``state`` is what would be saved now: tensors are filled in place, other values replaced, ``load_state_dict``
    called. The number of ranks may be another than that which saved. Entries of ``state`` that the checkpoint lacks
    are an error. It may have more of them at the top, not below: an optimizer that has no state yet, whose momentum
    would otherwise be left out in silence, gets one from ``get_state_dict``.

    Raises Error on every rank if there is no such checkpoint, or a rank cannot read it; then ``state`` may be loaded in
    part.
    """
    ranks = _Ranks(group)
    place = Path(folder).absolute()
    doing = f"loading step {step} from {place}" if step is not None else f"loading from {place}"
    calls = ranks.together(doing, lambda: (step, _choose(place, step) if ranks.rank == 0 else 0))
    ranks.check_calls_agree("load", [f"step={step}" for step, _ in calls])
    chosen = calls[0][1]
    path = place / _name(chosen)
    plain: dict[str, Any] = {}

    def resolve() -> None:
        if not _is_complete(path):
            raise Error(f"does not see {path} as rank 0 does; give all ranks one folder")
        plain.update(_without_objects(state))

    def give_back() -> None:
        planner.check()
        reader.check()
        for key, value in state.items():
            if isinstance(value, Stateful):
                value.load_state_dict(plain[key])
            else:
                state[key] = plain[key]

    ranks.together(doing, resolve)
    reader, planner = _Reader(path), _LoadPlanner()
    with ranks.dcp_errors(doing):
        dcp.load(
            plain,
            storage_reader=reader,
            planner=planner,
            process_group=group,
            no_dist=not ranks.distributed,
        )
    ranks.together(doing, give_back)
    return chosen


# ---- ranks ----------------------------------------------------------------------------------------------------------


class _Ranks:
    """Those that save or load together: a group, or a process without one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.distributed else 0
        if self.rank < 0:
            raise InvalidArgument(
                f"rank {dist.get_rank()} is not a member of the group that it saves or loads with"
            )

    def together(self, doing: str, action: Callable[[], T]) -> list[T]:
        """Collective: what ``action`` returned on each rank, or Error on all if it raised on one.

        Ctrl-C stays what it is on the rank that got it.
        """
        own: BaseException | None = None
        mine: tuple[T | None, str | None]
        try:
            mine = action(), None
        except BaseException as error:
            own, mine = error, (None, _in_words(error))
        outcomes: list[Any] = [mine]
        if self.distributed:
            outcomes = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(outcomes, mine, group=self.group)
        if own is not None and not isinstance(own, Exception):
            raise own
        problems = {rank: words for rank, (_, words) in enumerate(outcomes) if words is not None}
        if problems:
            raise Error(_failure(doing, problems)) from own
        return [value for value, _ in outcomes]

    def check_calls_agree(self, function: str, calls: list[str]) -> None:
        """Raises MismatchError if ranks gave other arguments than rank 0."""
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise MismatchError(
                    f"rank {self.rank}: rank 0 called {function}({calls[0]}) but rank {rank} called {function}({call})"
                )

    @contextmanager
    def dcp_errors(self, doing: str) -> Iterator[None]:
        """Turns what DCP raises on every rank, which is no Exception, into Error; but Ctrl-C stays itself."""
        try:
            with nullcontext() if self.distributed else warnings.catch_warnings():
                if not self.distributed:  # as is meant
                    warnings.filterwarnings("ignore", "torch.distributed is")
                yield
        except dcp.CheckpointException as raised:
            failures = {rank: error for rank, (error, _) in raised.failures.items()}
            mine = failures.get(self.rank)
            if mine is not None and not isinstance(mine, Exception):
                raise mine from raised
            words = {rank: _in_words(error) for rank, error in failures.items()}
            raise Error(_failure(doing, words)) from raised


def _failure(doing: str, problems: dict[int, str]) -> str:
    """What went wrong on which ranks; what is the same on several is said once."""
    ranks: dict[str, list[str]] = {}
    for rank, words in problems.items():
        ranks.setdefault(words, []).append(str(rank))
    reports = [f"rank {', '.join(numbers)}: {words}" for words, numbers in ranks.items()]
    return f"{doing} failed: {'; '.join(reports)}"


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"


# ---- between state and DCP ------------------------------------------------------------------------------------------


def _without_objects(state: dict[str, Any]) -> dict[str, Any]:
    """The state with ``state_dict()`` in the place of objects.

    DCP would do it, but an error in one on one rank would leave the others waiting.
    """
    return {key: v.state_dict() if isinstance(v, Stateful) else v for key, v in state.items()}


class _Guarded:
    """Keeps what goes wrong in a step of DCP's for afterwards, when all ranks ask each other.

    DCP's own way to tell them leaves them waiting if an exception or a traceback cannot be pickled.
    """

    _problem: BaseException | None = None

    def _guard(self, step: Callable[[], T], instead: T) -> T:
        try:
            return step()
        except BaseException as error:
            self._problem = self._problem or _root(error)
            return instead

    def check(self) -> None:
        """Raises what went wrong."""
        if self._problem is not None:
            raise self._problem


def _root(error: BaseException) -> BaseException:
    """The system's error behind another: torch.save hides a full disk behind one of its own."""
    cause: BaseException | None = error
    while isinstance(cause, Exception) and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error


class _Writer(_Guarded, dcp.FileSystemWriter):
    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[Any]:
        write = super().write_data
        return self._guard(lambda: write(plan, planner), _done([]))

    def finish(self, metadata: dcp.Metadata, results: Any) -> None:
        finish = super().finish
        self._guard(lambda: finish(metadata, results), None)


class _Reader(_Guarded, dcp.FileSystemReader):
    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        read = super().read_data
        return self._guard(lambda: read(plan, planner), _done(None))


class _LoadPlanner(_Guarded, dcp.DefaultLoadPlanner):
    def create_local_plan(self) -> dcp.LoadPlan:
        plan = super().create_local_plan
        self._guard(self._check_nothing_is_left_out, None)
        return self._guard(plan, dcp.LoadPlan([]))

    def _check_nothing_is_left_out(self) -> None:
        """What the checkpoint has below an entry of the state must have its place there; DCP does not mind."""
        assert self.metadata is not None
        entries = tuple(f"{key}." for key in self.original_state_dict)
        saved = self.metadata.state_dict_metadata
        missing = sorted(n for n in saved.keys() - self.state_dict.keys() if n.startswith(entries))
        if missing:
            raise Error(
                f"the checkpoint has {', '.join(missing[:3])}{', ...' if missing[3:] else ''}, {len(missing)} entries "
                "in all that the state to be loaded has no place for; for an optimizer, make its state with "
                "get_state_dict"
            )


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


# ---- on disk --------------------------------------------------------------------------------------------------------


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _complete_steps(folder: Path) -> list[int]:
    """The steps whose checkpoints have all their files, in order."""
    try:
        names = [match for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    steps = {int(match[1]) for match in names if match[0] == _name(int(match[1]))}
    return sorted(step for step in steps if _is_complete(folder / _name(step)))


def _is_complete(path: Path) -> bool:
    try:
        files = json.loads((path / _LIST).read_bytes())
        if not isinstance(files, dict) or not files:
            return False
        return all((path / name).stat().st_size == count for name, count in files.items())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def _choose(folder: Path, step: int | None) -> int:
    steps = _complete_steps(folder)
    if not steps:
        raise Error("there is no complete checkpoint")
    if step is not None and step not in steps:
        raise Error(f"there is no complete checkpoint of this step, only {steps}")
    return steps[-1] if step is None else step


class _Draft:
    """Rank 0's hold of a checkpoint that is being written: the folder's lock, and a hidden folder for all ranks."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._step = step
        self._token = secrets.token_hex(4)
        self.name = self._hidden(step)
        self._stack = ExitStack()

    def _hidden(self, step: int) -> str:
        return f".{_name(step)}.tmp-{self._token}"

    def __enter__(self) -> _Draft:
        _make_folder(self._folder)
        with ExitStack() as stack:
            stack.enter_context(_lock(self._folder))
            stack.callback(_remove_temporaries, self._folder)
            (self._folder / self.name).mkdir()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def publish(self, keep: int) -> None:
        """Gives the checkpoint its name, once it is on the disk, and then removes what it makes superfluous."""
        path, target = self._folder / self.name, self._folder / _name(self._step)
        files = {file.name: file.stat().st_size for file in path.iterdir()}
        (path / _LIST).write_text(json.dumps(files))
        for file in path.iterdir():
            _sync(file)
        _sync(path)
        if os.path.lexists(target):
            _exchange(path, target)
        else:
            path.rename(target)
        _sync(self._folder)
        self._remove_older(keep)

    def _remove_older(self, keep: int) -> None:
        """Leaves the checkpoint and ``keep - 1`` before it; as it is in place, what fails only warns."""
        problems = []
        try:
            steps = sorted({self._step, *_complete_steps(self._folder)})
            if steps[-1] > self._step:
                warnings.warn(
                    f"saved step {self._step}, but in {self._folder} the newest is still step {steps[-1]}; remove "
                    "larger steps if training went on from a smaller one",
                    stacklevel=2,
                )
            older = steps[: steps.index(self._step)]
            for step in older[: len(older) - (keep - 1)]:
                # A removal that is cut short leaves no checkpoint's name behind.
                (self._folder / _name(step)).rename(self._folder / self._hidden(step))
        except OSError as error:
            problems.append(error)
        problems += _remove_temporaries(self._folder)
        if problems:
            warnings.warn(
                f"saved step {self._step}, but could not remove what it makes superfluous: {problems[0]}",
                stacklevel=2,
            )


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Holds a folder against other jobs' saves; the kernel lets go of it if the process dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Error("another job is saving into this folder; give each one its own") from None
        except OSError:
            pass  # some network file systems lock no folders
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile holds it too
    finally:
        os.close(descriptor)


def _make_folder(path: Path) -> None:
    """Makes a folder and those above it, so that they outlast a power failure."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(path: Path, other: Path) -> None:
    """Lets two names change places, atomically."""
    exchange, here = 2, -100  # RENAME_EXCHANGE, AT_FDCWD
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    if rename is not None and rename(here, bytes(path), here, bytes(other), exchange) == 0:
        return
    reason = os.strerror(ctypes.get_errno()) if rename is not None else "the C library cannot"
    raise Error(
        f"{other} exists and cannot be replaced atomically here ({reason}); remove it, then save again"
    )


def _remove_temporaries(folder: Path) -> list[OSError]:
    """Removes what interrupted saves and removals have left, as far as possible; returns what was not."""
    try:
        found = [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]
    except OSError as error:
        return [error]
    problems = []
    for path in found:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            problems.append(error)
    return problems
