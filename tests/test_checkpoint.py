"""Checkpoints: whatever dies or fails, and at whichever operation on the disk, a whole one is found again."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import re
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import DIED, attempt, ddp_class, refused, run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import pycomm
from pycomm import checkpoint

HIDDEN = re.compile(r"\.step-\d{8}\.tmp-[0-9a-f]{8}")


def make_state(version: int) -> dict[str, Any]:
    """A state that its version determines to the bit: tensors, nested ones, and plain values."""
    generator = torch.Generator().manual_seed(version)
    return {
        "weights": torch.randn(1500, generator=generator),
        "nested": {
            "half": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
            "list": [torch.full((2,), version), {"count": version * 10}],
            "empty": {},
        },
        "flags": torch.rand(9, generator=generator) > 0.5,
        "scalar": torch.tensor(float(version), dtype=torch.float64),
        "version": version,
        "text": f"version {version}",
        "nothing": None,
    }


def sharded(n: int, version: int, rows: int = 7) -> DTensor:
    """A tensor of which each of n ranks has some rows."""
    whole = torch.arange(rows * 5, dtype=torch.float32).reshape(rows, 5) + version
    return distribute_tensor(whole, init_device_mesh("cpu", (n,)), [Shard(0)])


def same(a: Any, b: Any) -> bool:
    """Whether two states have the same structure and the same bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def load_version(folder: Path, step: int | None = None) -> tuple[int, int]:
    """Loads a checkpoint over other values: its step and its version, every bit of which was compared."""
    state = make_state(0)
    found = checkpoint.load(state, folder, step)
    assert same(state, make_state(state["version"]))
    return found, state["version"]


def names(folder: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


# ---- what is saved is what is loaded --------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "backend"), [(2, "pycomm"), (3, "pycomm"), (2, "gloo")])
def test_round_trip(tmp_path: Path, n: int, backend: str) -> None:
    """Every kind of value comes back bit by bit, in place, without a warning; folders are made."""
    folder = tmp_path / "made" / "for it"

    def worker(rank: int, _: int) -> tuple[Path, int, bool]:
        warnings.simplefilter("error")
        path = checkpoint.save(make_state(5), folder, 5)
        state = make_state(1)
        weights, nested = state["weights"], state["nested"]
        step = checkpoint.load(state, str(folder))
        assert state["weights"] is weights
        assert state["nested"] is nested
        return path, step, same(state, make_state(5))

    assert run(n, worker, backend=backend) == [(folder / "step-00000005", 5, True)] * n
    assert checkpoint.latest(folder) == 5
    assert names(folder) == ["step-00000005"]


def test_without_a_group(tmp_path: Path) -> None:
    """A process on its own saves, and loads what several ranks saved, without a warning."""

    def alone(_: int, __: int) -> tuple[int, int]:
        warnings.simplefilter("error")
        assert load_version(tmp_path) == (1, 11)
        checkpoint.save(make_state(12), tmp_path, 2)
        return load_version(tmp_path)

    run(2, lambda rank, n: checkpoint.save(make_state(11), tmp_path, 1))
    assert run(1, alone, init=False) == [(2, 12)]


def test_another_number_of_ranks(tmp_path: Path) -> None:
    """3 ranks save, 2 load and save, 3 load: sharded tensors are cut anew, plain ones are whole on all."""

    def worker(rank: int, n: int, load: int | None, save: int) -> list[Any]:
        found: list[Any] = []
        if load is not None:
            state = make_state(0) | {"sharded": sharded(n, -1)}
            checkpoint.load(state, tmp_path)
            local = state["sharded"].to_local()
            assert local.shape[0] < 7
            assert same(local, sharded(n, load).to_local())
            del state["sharded"]
            assert same(state, make_state(state["version"]))
            found = [state["version"]]
        checkpoint.save(make_state(save) | {"sharded": sharded(n, save)}, tmp_path, save)
        return found

    assert run(3, worker, None, 1) == [[]] * 3
    assert run(2, worker, 1, 2) == [[1]] * 2
    assert run(3, worker, 2, 3) == [[2]] * 3


def test_group_of_some_ranks(tmp_path: Path) -> None:
    """A group of ranks 1 and 2 saves and loads by itself; rank 0 is told that it is not in it."""

    def worker(rank: int, _: int) -> Any:
        group: Any = dist.new_group([1, 2])
        if rank == 0:
            return attempt(lambda: checkpoint.save({}, tmp_path, 1, group=group))
        checkpoint.save(make_state(4), tmp_path, 1, group=group)
        state = make_state(0)
        return checkpoint.load(state, tmp_path, group=group), same(state, make_state(4))

    first, *members = run(3, worker)
    assert refused([first], "rank 0 is not a member")
    assert "InvalidArgument" in first.kinds
    assert members == [(1, True)] * 2


# ---- modules and optimizers -----------------------------------------------------------------------------------------


def make_model(wrapped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    if wrapped:
        model = ddp_class()(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    """Trains on data that step and rank determine; returns all parameters and buffers."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return [tensor.clone() for tensor in model.state_dict().values()]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "seen": 3}


def resume(folder: Path, wrapped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new model and optimizer with the newest checkpoint in them."""
    model, optimizer = make_model(wrapped)
    nn.init.zeros_(next(model.parameters()))
    state = state_of(model, optimizer)
    checkpoint.load(state, folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return model, optimizer


def test_training_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    """As the docstring shows it, with DistributedDataParallel: the same bits as without a stop."""

    def first(rank: int, _: int) -> list[torch.Tensor]:
        model, optimizer = make_model(wrapped=True)
        train(model, optimizer, range(3))
        state = state_of(model, optimizer)
        assert not [key for key in state["model"] if "module" in key]
        checkpoint.save(state, tmp_path, 3)
        return train(model, optimizer, range(3, 6))

    def second(rank: int, _: int) -> list[torch.Tensor]:
        return train(*resume(tmp_path, wrapped=True), range(3, 6))

    whole, resumed = run(2, first), run(2, second)
    assert all(same(a, b) for a, b in zip(whole, resumed, strict=True))


def test_bare_module_loads_what_a_wrapped_one_saved(tmp_path: Path) -> None:
    """The names are the same: a process without a group evaluates what DistributedDataParallel trained."""

    def wrapped(rank: int, _: int) -> list[torch.Tensor]:
        model, optimizer = make_model(wrapped=True)
        trained = train(model, optimizer, range(3))
        checkpoint.save(state_of(model, optimizer), tmp_path, 3)
        return trained

    def bare(_: int, __: int) -> list[torch.Tensor]:
        model, _optimizer = resume(tmp_path, wrapped=False)
        only = make_model(wrapped=False)[0]
        checkpoint.load({"model": only}, tmp_path)  # a part, and an object in place of its state
        assert same([*only.state_dict().values()], [*model.state_dict().values()])
        return [*model.state_dict().values()]

    trained = run(2, wrapped)
    assert same(run(1, bare, init=False)[0], trained[0])


def test_optimizer_without_state_is_refused(tmp_path: Path) -> None:
    """Loading into a fresh optimizer's own state_dict would drop all moments; DCP does not mind."""

    def worker(rank: int, _: int) -> Any:
        model, optimizer = make_model(wrapped=False)
        train(model, optimizer, range(1))
        checkpoint.save({"optimizer": optimizer}, tmp_path, 1)
        fresh = make_model(wrapped=False)[1]
        return attempt(lambda: checkpoint.load({"optimizer": fresh}, tmp_path))

    assert refused(run(2, worker), "rank 0, 1", "optimizer.state.", "get_state_dict")


# ---- what is on the disk --------------------------------------------------------------------------------------------


def test_keep_and_larger_steps(tmp_path: Path) -> None:
    """The newest are kept and the rest is removed; larger steps are left, with a warning."""

    def worker(rank: int, _: int) -> list[list[str]]:
        seen = []
        for step, keep in ((1, 2), (2, 2), (3, 2), (10, 3), (11, 1)):
            checkpoint.save(make_state(step), tmp_path, step, keep=keep)
            dist.barrier()
            seen.append([name[-2:] for name in names(tmp_path)])
            dist.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint.save(make_state(5), tmp_path, 5, keep=1)
        expected = "saved step 5, but in .* the newest is still step 11; remove"
        assert [bool(re.match(expected, str(w.message))) for w in caught] == [True] * (rank == 0)
        assert load_version(tmp_path) == (11, 11)
        assert load_version(tmp_path, 5) == (5, 5)
        return seen

    kept = [["01"], ["01", "02"], ["02", "03"], ["02", "03", "10"], ["11"]]
    assert run(2, worker) == [kept] * 2
    assert names(tmp_path) == ["step-00000005", "step-00000011"]


def test_same_step_again(tmp_path: Path) -> None:
    """A second save of a step takes the first one's place; nothing of that remains."""

    def worker(rank: int, _: int) -> tuple[int, int]:
        for version in (6, 7, 8):
            checkpoint.save(make_state(version), tmp_path, 3)
        return load_version(tmp_path)

    assert run(2, worker) == [(3, 8)] * 2
    assert names(tmp_path) == ["step-00000003"]


def test_same_step_where_folders_cannot_be_exchanged(tmp_path: Path) -> None:
    """It is refused in words and the first one stays."""

    def worker(rank: int, _: int) -> tuple[Any, tuple[int, int]]:
        checkpoint.save(make_state(6), tmp_path, 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ctypes, "CDLL", lambda *_, **__: object())
            error = attempt(lambda: checkpoint.save(make_state(7), tmp_path, 3))
        return error, load_version(tmp_path)

    results = run(2, worker)
    words = "step 3", "rank 0", "cannot be replaced atomically", "remove it"
    assert refused([error for error, _ in results], *words)
    assert [version for _, version in results] == [(3, 6)] * 2
    assert names(tmp_path) == ["step-00000003"]


def test_latest_believes_only_what_is_whole(tmp_path: Path) -> None:
    """Junk, temporary folders, half-deleted and cut checkpoints do not count, and are no obstacle."""
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "missing") is None
    run(2, lambda rank, n: checkpoint.save(make_state(1), tmp_path, 1))
    good = tmp_path / "step-00000001"
    shutil.copytree(good, tmp_path / ".step-00000002.tmp-0123abcd")
    for step, change in enumerate(
        (
            lambda path: [file.unlink() for file in path.iterdir()],
            lambda path: (path / "files.json").unlink(),
            lambda path: (path / "files.json").write_text("{}"),
            lambda path: (path / "files.json").write_text("[1]"),
            lambda path: (path / "files.json").write_text('{"__0_0.dis'),
            lambda path: (path / "files.json").write_bytes(b"\xff\x00"),
            lambda path: (path / ".metadata").unlink(),
            lambda path: (path / "__1_0.distcp").unlink(),
            lambda path: os.truncate(path / "__0_0.distcp", 100),
        ),
        start=2,
    ):
        path = tmp_path / f"step-{step:08d}"
        shutil.copytree(good, path)
        change(path)
    (tmp_path / "step-00000098").write_text("not a folder")
    for name in (
        "step-99",
        "step-000000099",
        "step-00000099x",
        "Step-00000099",
        "99",
        "xstep-00000099",
    ):
        shutil.copytree(good, tmp_path / name)
    assert checkpoint.latest(tmp_path) == 1
    before = names(tmp_path)

    def worker(rank: int, _: int) -> tuple[int, int]:
        assert load_version(tmp_path) == (1, 1)
        checkpoint.save(make_state(20), tmp_path, 5, keep=1)  # in the place of a broken one
        return load_version(tmp_path)

    assert run(2, worker) == [(5, 20)] * 2
    gone = {"step-00000001", ".step-00000002.tmp-0123abcd"}
    assert set(before) - set(names(tmp_path)) == gone


def test_latest_does_not_take_unreadable_for_empty(tmp_path: Path) -> None:
    """A job that took it so would start from the beginning."""
    (tmp_path / "file").touch()
    with pytest.raises(pycomm.Error, match=r"cannot look for checkpoints in .*file"):
        checkpoint.latest(tmp_path / "file")


def test_what_is_written_is_on_the_disk_before_it_counts(tmp_path: Path) -> None:
    """The order that a power failure needs: files, their folder, the name, its folder; removal last."""

    def worker(rank: int, _: int) -> list[str]:
        checkpoint.save(make_state(1), tmp_path, 1)
        done: list[str] = []
        operations = Operations(lambda name, path: done.append(f"{name} {Path(path).name}"))
        operations.watch()
        checkpoint.save(make_state(2), tmp_path, 2, keep=1)
        operations.active = False
        return done

    done = run(2, worker)[0]
    hidden = next(line.split()[1] for line in done if line.startswith("os.mkdir ."))
    assert HIDDEN.fullmatch(hidden)
    synced = [done.index(f"fsync {name}") for name in names(tmp_path / "step-00000002")]
    sealed = max(i for i, line in enumerate(done) if line == f"fsync {hidden}")
    named = done.index(f"os.rename {hidden}")
    kept = done.index(f"fsync {tmp_path.name}")
    removed = done.index("os.rename step-00000001")
    assert len(synced) == 4
    assert max(synced) < sealed < named < kept < removed
    assert not [line for line in done[:kept] if line.startswith(("os.remove", "os.rmdir"))]


# ---- ranks that die -------------------------------------------------------------------------------------------------


@dataclass
class Operations:
    """Calls `act` before every operation of this process that changes the disk, and within each write."""

    act: Callable[[str, Any], None]
    active: bool = True
    written: set[str] = field(
        default_factory=lambda: {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
    )

    def watch(self) -> None:
        """Begins to; there is no end, but `active` can be cleared."""
        sys.addaudithook(self._audited)
        fsync, path_open = os.fsync, Path.open

        def watched_fsync(descriptor: Any) -> None:
            self._call("fsync", Path(f"/proc/self/fd/{descriptor}").readlink())
            fsync(descriptor)

        def watched_open(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if mode == "wb":
                return io.BufferedWriter(_WatchedFile(path, self._call))
            return path_open(path, mode, *args, **kwargs)

        os.fsync = watched_fsync  # type: ignore[assignment]
        Path.open = watched_open  # type: ignore[method-assign,assignment]

    def _call(self, name: str, path: Any) -> None:
        if self.active:
            self.act(name, path)

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        if event in self.written or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
            self._call(event, args[0])


class _WatchedFile(io.FileIO):
    """A file whose every write is two, so that death can come between them."""

    def __init__(self, path: Path, call: Callable[[str, Any], None]) -> None:
        super().__init__(path, "w")
        self._call = call

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        half = super().write(view[: len(view) // 2])
        self._call("write", self.name)
        return half + super().write(view[half:])


def die_at(nth: int, pids: list[int]) -> None:
    """Lets the nth operation on the disk from now on be the last thing of these processes, this one last."""
    count = 0

    def act(name: str, path: Any) -> None:
        nonlocal count
        count += 1
        if count == nth:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    Operations(act).watch()


def one_life(
    rank: int, n: int, folder: Path, version: int, again: bool, killer: int, nth: int, all_die: bool
) -> bool:
    """Loads what the life before left, saves once in peace and then, if it lives so long, once more."""
    state = make_state(0) | {"sharded": sharded(n, 0)}
    step = checkpoint.load(state, folder)
    found = state["version"]
    assert same(state.pop("sharded").to_local(), sharded(n, found).to_local())
    assert same(state, make_state(found))
    checkpoint.save(make_state(version) | {"sharded": sharded(n, version)}, folder, step + 1)
    pids: list[Any] = [None] * n
    dist.all_gather_object(pids, os.getpid())
    assert names(folder) == [f"step-{step:08d}", f"step-{step + 1:08d}"]
    dist.barrier()
    if rank == killer:
        others = [pid for pid in pids if pid != os.getpid()] if all_die else []
        die_at(nth, [*others, os.getpid()])
    last = make_state(version + 1) | {"sharded": sharded(n, version + 1)}
    return isinstance(
        attempt(lambda: checkpoint.save(last, folder, step + (1 if again else 2)), pycomm.Error),
        Path,
    )


@pytest.mark.parametrize(
    ("n", "killer", "all_die", "again", "fewest"),
    [
        (2, 0, False, False, 25),
        (2, 1, False, True, 4),
        (2, 0, True, True, 25),
        (3, 0, True, False, 25),
        (3, 2, False, False, 4),
    ],
)
def test_death_at_every_operation(
    tmp_path: Path, n: int, killer: int, all_die: bool, again: bool, fewest: int
) -> None:
    """A rank, or all of them, are killed at the 1st, 2nd, ... operation of a save until it gets through.

    Each time a new job finds, to the bit, what had been saved before or what was being saved; its next save
    works and removes what the dead one left.
    """
    first = make_state(1)
    run(n, lambda rank, _: checkpoint.save(first | {"sharded": sharded(n, 1)}, tmp_path, 1))
    fates = []
    for nth in range(1, 100):
        args = (tmp_path, 10 * nth, again, killer, nth, all_die)
        results = run(n, one_life, *args, may_die=range(n) if all_die else [killer])
        found = {"version": 0}
        checkpoint.load(found, tmp_path)
        fates.append(found["version"] - 10 * nth)
        if results[killer] is not DIED:
            assert results == [True] * n
            break
        assert DIED in results if not all_die else results == [DIED] * n
    assert len(fates) > fewest
    assert set(fates) == {0, 1}
    assert fates == sorted(fates)  # the old one up to some operation, from then on the new one
    assert fates[-1] == 1


# ---- ranks that fail ------------------------------------------------------------------------------------------------


def saves_on(folder: Path) -> tuple[int, int]:
    """The group and the folder are as good as before an error: what was there loads, a save works."""
    dist.barrier()
    assert names(folder) == ["step-00000001"]
    assert load_version(folder) == (1, 1)
    checkpoint.save(make_state(3), folder, 3)
    return load_version(folder)


def test_write_that_fails_on_one_rank(tmp_path: Path) -> None:
    """The kernel refuses to make rank 1's file as long as it must be: Error on both, and nothing is left."""

    def worker(rank: int, n: int) -> tuple[Any, tuple[int, int]]:
        checkpoint.save(make_state(1), tmp_path, 1)
        large = {"sharded": sharded(n, 2, rows=20000)}
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10000, hard))
        error = attempt(lambda: checkpoint.save(large, tmp_path, 2))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return error, saves_on(tmp_path)

    results = run(2, worker)
    words = f"saving step 2 in {tmp_path} failed: rank 1: OSError: ", "File too large"
    assert refused([error for error, _ in results], *words)
    assert [after for _, after in results] == [(3, 3)] * 2


def test_error_at_every_operation(tmp_path: Path) -> None:
    """The 1st, 2nd, ... operation of a rank in a save fails, until a save gets through without.

    Before the checkpoint is in place that is an Error that names the rank, and nothing is left of it.
    """

    def worker(rank: int, n: int) -> list[list[str]]:
        checkpoint.save(make_state(1) | {"sharded": sharded(n, 1)}, tmp_path, 1)
        operations = Operations(lambda name, path: None, active=False)
        operations.watch()
        return [outcomes_of(culprit, rank, n, tmp_path, operations) for culprit in range(n)]

    first, other = run(2, worker)
    assert first == other
    assert len(first[0]) > 25
    assert len(first[1]) > 3
    phases = [[o for o, _ in groupby(filter("saved".__ne__, outcomes))] for outcomes in first]
    assert phases == [["error", "late", "warned"], ["error"]]


def outcomes_of(culprit: int, rank: int, n: int, folder: Path, operations: Operations) -> list[str]:
    """What comes of saves of which one operation of one rank fails: the first, the second, ... until the last."""
    outcomes: list[str] = []
    failing: list[Any] = [1] * n  # by rank: how many operations until the one that fails
    while failing[culprit] <= 0 or not outcomes:
        failing[rank] = len(outcomes) + 1
        step, version = load_version(folder)
        before = names(folder)
        new = make_state(version + 1) | {"sharded": sharded(n, version + 1)}

        def act(name: str, path: Any) -> None:
            failing[rank] -= 1
            if failing[rank] == 0 and rank == culprit:
                raise OSError(errno.ENOSPC, "full")

        dist.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            operations.act, operations.active = act, True
            outcome = attempt(partial(checkpoint.save, new, folder, step + 1))
            operations.active = False
        warned: list[Any] = [None] * n
        dist.all_gather_object(warned, [str(w.message) for w in caught])
        dist.all_gather_object(failing, failing[rank])
        found = load_version(folder)
        if isinstance(
            outcome, Path
        ):  # some errors do not matter, as of a folder that is there already
            assert found == (step + 1, version + 1)
            assert all("could not remove" in message for message in chain(*warned))
            outcomes.append("warned" if any(warned) else "saved")
        else:
            assert refused([outcome], f"failed: rank {culprit}: OSError: [Errno 28] full")
            assert found in ((step, version), (step + 1, version + 1))
            outcomes.append("error" if found == (step, version) else "late")
        assert names(folder) == before or outcomes[-1] != "error"
        assert any(warned) or not any(HIDDEN.fullmatch(name) for name in names(folder))
        dist.barrier()
    assert outcomes.pop() == "saved"
    return outcomes


def mount_small_disk(folder: Path) -> str | None:
    """Mounts 256 KiB of memory over a folder, for this process alone; what refused it, if something did."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 0x20000, (1 << 18) | (1 << 14)  # CLONE_NEWNS, MS_PRIVATE | MS_REC
    calls = (
        lambda: libc.unshare(new_mounts),
        lambda: libc.mount(b"none", b"/", None, private, None),
        lambda: libc.mount(b"none", bytes(folder), b"tmpfs", 0, b"size=256k"),
    )
    for call in calls:
        if call() != 0:
            return os.strerror(ctypes.get_errno())
    return None


def test_full_disk(tmp_path: Path) -> None:
    """No space is left: Error on both ranks, and what was saved before is still there."""

    def worker(rank: int, n: int) -> Any:
        refusal = [mount_small_disk(tmp_path) if rank == 0 else None, os.getpid()]
        dist.broadcast_object_list(refusal, 0)
        if refusal[0]:
            return refusal[0]
        disk = tmp_path if rank == 0 else Path(f"/proc/{refusal[1]}/root{tmp_path}")
        checkpoint.save(make_state(1), disk, 1)
        large = {"sharded": sharded(n, 2, rows=20000)}
        error = attempt(lambda: checkpoint.save(large, disk, 2))
        after = saves_on(disk)
        dist.barrier()
        return error, after

    results = run(2, worker)
    if isinstance(results[0], str):
        pytest.skip(f"no mounts of its own for a process: {results[0]}")
    assert refused([error for error, _ in results], "OSError: [Errno 28] No space left on device")
    assert [after for _, after in results] == [(3, 3)] * 2


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """It is below a file; and one that only rank 0 sees is refused as well, for half would be missing."""
    (tmp_path / "file").touch()

    def worker(rank: int, _: int) -> list[Any]:
        own = tmp_path / f"of rank {rank}"
        return [
            attempt(lambda: checkpoint.save(make_state(1), tmp_path / "file" / "below", 1)),
            attempt(lambda: checkpoint.save(make_state(1), own, 1)),
        ]

    below, own = zip(*run(2, worker), strict=True)
    assert refused(below, "saving step 1", "rank 0: FileExistsError", str(tmp_path / "file"))
    assert refused(own, "rank 1: does not see", "of rank 1", "one folder")
    assert names(tmp_path) == ["file", "of rank 0"]
    assert names(tmp_path / "of rank 0") == []


class Refusing:
    """An object that cannot be pickled, nor can its error be."""

    class CannotError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"cannot, {one} and {two}")

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error or self.CannotError(1, 2)

    def __reduce__(self) -> Any:
        raise self.error


class Stateful:
    """An object whose state cannot be had, or not be taken back, on rank 1."""

    def __init__(self, gives: bool, takes: bool = True) -> None:
        self.gives, self.takes = gives or dist.get_rank() == 0, takes or dist.get_rank() == 0

    def state_dict(self) -> dict[str, Any]:
        if not self.gives:
            raise KeyError("no state")
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.takes:
            raise ValueError("not mine")


def test_state_that_fails_on_one_rank(tmp_path: Path) -> None:
    """An error that one rank alone meets is raised on all of them, whatever it is."""

    def worker(rank: int, n: int) -> list[Any]:
        checkpoint.save(make_state(1) | {"object": Stateful(True)}, tmp_path, 1)
        own = {f"rank {rank}": Refusing() if rank == 1 else 0}
        outcomes = [
            attempt(lambda: checkpoint.save(own, tmp_path, 2)),
            attempt(lambda: checkpoint.save({"object": Stateful(False)}, tmp_path, 2)),
            attempt(lambda: checkpoint.load({"object": Stateful(False)}, tmp_path)),
            attempt(lambda: checkpoint.load({"object": Stateful(True, False)}, tmp_path)),
        ]
        assert saves_on(tmp_path) == (3, 3)
        return outcomes

    outcomes = list(zip(*run(2, worker), strict=True))
    words = "rank 1: CannotError: cannot, 1 and 2", "rank 1: KeyError", "rank 1: KeyError"
    for outcome, text in zip(outcomes, (*words, "rank 1: ValueError: not mine"), strict=True):
        assert refused(outcome, text)


def test_interrupted_save(tmp_path: Path) -> None:
    """Ctrl-C stays one on the rank that got it; the other gets Error, and nothing is left."""

    def worker(rank: int, _: int) -> Any:
        checkpoint.save(make_state(1), tmp_path, 1)
        own = {f"rank {rank}": Refusing(KeyboardInterrupt()) if rank == 1 else 0}
        try:
            outcome: Any = attempt(lambda: checkpoint.save(own, tmp_path, 2))
        except KeyboardInterrupt:
            outcome = "interrupted"
        assert saves_on(tmp_path) == (3, 3)
        return outcome

    other, interrupted = run(2, worker)
    assert refused([other], "saving step 2", "rank 1: KeyboardInterrupt")
    assert interrupted == "interrupted"


def test_load_of_what_is_not_there(tmp_path: Path) -> None:
    """Each is refused on every rank, and says what is there."""

    def worker(rank: int, _: int) -> list[Any]:
        nothing = attempt(lambda: checkpoint.load({}, tmp_path))
        checkpoint.save(make_state(1), tmp_path, 1)
        checkpoint.save(make_state(2), tmp_path, 2)
        shape = make_state(0) | {"flags": torch.ones(3)}
        return [
            nothing,
            attempt(lambda: checkpoint.load(make_state(0), tmp_path, 7)),
            attempt(lambda: checkpoint.load({"other": torch.ones(1)}, tmp_path)),
            attempt(lambda: checkpoint.load({"nested": {"empty": {}}}, tmp_path)),
            attempt(lambda: checkpoint.load(shape, tmp_path)),
        ]

    nothing, step, entry, part, shape = zip(*run(2, worker), strict=True)
    assert refused(nothing, f"loading from {tmp_path} failed: rank 0: there is no complete")
    assert refused(step, "loading step 7", "no complete checkpoint of this step, only [1, 2]")
    assert refused(entry, "rank 0, 1: ", "other")
    assert refused(part, "rank 0, 1: the checkpoint has nested.half, nested.list", "has no place")
    assert refused(shape, "rank 0, 1: ", "flags", "[9]", "[3]")


def test_calls_that_differ(tmp_path: Path) -> None:
    """Ranks that save or load different steps are told so; impossible ones are refused at once."""

    def worker(rank: int, _: int) -> list[Any]:
        checkpoint.save(make_state(1), tmp_path, 1)
        return [
            attempt(lambda: checkpoint.save(make_state(1), tmp_path, 2 + rank)),
            attempt(lambda: checkpoint.load(make_state(0), tmp_path, 1 if rank else None)),
            attempt(lambda: checkpoint.save(make_state(1), tmp_path, -1)),
            attempt(lambda: checkpoint.save(make_state(1), tmp_path, 1, keep=0)),
            attempt(lambda: checkpoint.save(make_state(1), tmp_path, 1.5), TypeError),  # type: ignore[arg-type]
        ]

    saved, loaded, negative, none, broken = zip(*run(2, worker), strict=True)
    assert refused(
        saved, "rank 0 called save(step=2, keep=2) but rank 1 called save(step=3, keep=2)"
    )
    assert refused(loaded, "rank 0 called load(step=None) but rank 1 called load(step=1)")
    assert all("MismatchError" in outcome.kinds for outcome in (*saved, *loaded))
    assert refused(negative, "step is -1")
    assert refused(none, "keep is 0")
    assert refused(broken, "float")
    assert names(tmp_path) == ["step-00000001"]


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    """While one saves the other is refused, and what the one is writing is not taken for a leftover."""
    writing = tmp_path / ".step-00000009.tmp-0123abcd"
    writing.mkdir()
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    save: Callable[[int, int], Any] = lambda rank, n: attempt(  # noqa: E731
        lambda: checkpoint.save(make_state(1), tmp_path, 1)
    )
    assert refused(run(2, save), "rank 0: another job is saving")
    assert names(tmp_path) == [writing.name]
    os.close(descriptor)
    assert run(2, save) == [tmp_path / "step-00000001"] * 2
    assert names(tmp_path) == ["step-00000001"]


def test_old_checkpoint_that_cannot_be_removed(tmp_path: Path) -> None:
    """The new one is in place, so it is only a warning."""

    def worker(rank: int, _: int) -> list[str]:
        checkpoint.save(make_state(1), tmp_path, 1)

        def refuse(path: Path) -> None:
            raise OSError(f"cannot remove {path}")

        with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always")
            patch.setattr(shutil, "rmtree", refuse)
            checkpoint.save(make_state(2), tmp_path, 2, keep=1)
        assert load_version(tmp_path) == (2, 2)
        return [str(w.message) for w in caught]

    (warning,), none = run(2, worker)
    assert re.match(
        r"saved step 2, but could not remove .*: cannot remove .*\.step-00000001", warning
    )
    assert none == []
    assert checkpoint.latest(tmp_path) == 2
