"""Going on after a failure: shrink, forked children, last words, dumps, and what stats() and the records say."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import DIED, Refused, attempt, run, td
from last_words import ENDS, check_last_words

import pycomm
from pycomm.config import Config
from pycomm.extension import core

ROOT = Path(__file__).resolve().parent.parent


def ones(count: int = 4) -> torch.Tensor:
    return torch.ones(count)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ---- shrink


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("explicit", [False, True])
def test_survivors_go_on(culprit: int, explicit: bool) -> None:
    """Whoever dies, rank 0 with its Store included, the others have a smaller default group, and it has groups."""

    def worker(rank: int, n: int) -> tuple[int, int, float, float]:
        dist.all_reduce(ones())
        if rank == culprit:
            kill_me()
        found = attempt(lambda: [dist.all_reduce(ones(1 << 18)) for _ in range(3)])
        assert isinstance(found, Refused)
        group = pycomm.shrink([r for r in range(n) if r != culprit] if explicit else None)
        x, y = ones(1 << 18), ones()
        dist.all_reduce(x, group=group)
        both: Any = dist.new_group([0, 1])
        dist.all_reduce(y, group=both)
        return dist.get_rank(), dist.get_world_size(), x[-1].item(), y[0].item()

    results = run(3, worker, may_die={culprit})
    assert results.pop(culprit) is DIED
    assert results == [(0, 2, 2.0, 2.0), (1, 2, 2.0, 2.0)]


def test_one_after_another_down_to_one() -> None:
    """Each survivor's group may shrink again."""

    def worker(rank: int, n: int) -> list[int]:
        sizes = []
        for doomed in range(n - 1, 0, -1):
            if dist.get_rank() == doomed:
                kill_me()
            attempt(lambda: [dist.barrier() for _ in range(2)])
            pycomm.shrink()
            sizes.append(dist.get_world_size())
        return sizes

    assert run(4, worker, may_die={1, 2, 3})[0] == [3, 2, 1]


def test_a_rank_that_waits_in_the_old_group_comes_along() -> None:
    """shrink() of some ranks ends the wait of the others, who can join in; nobody had failed before."""

    def worker(rank: int, n: int) -> tuple[str, int]:
        error = "none"
        if rank == 2:
            error = str(attempt(dist.barrier))
        pycomm.shrink([0, 2] if rank != 1 else [1])
        return error, dist.get_world_size()

    (_, a), (_, b), (error, c) = run(3, worker)
    assert (a, b, c) == (2, 1, 2)
    assert "AbortedError" in error


def test_survivors_that_disagree() -> None:
    """Different explicit ranks raise MismatchError naming both on who follows; who leads it waits in vain."""

    def worker(rank: int, n: int) -> Any:
        if rank == 1:
            found = attempt(lambda: pycomm.shrink([0, 1], timeout=td(5)))
        else:
            found = attempt(lambda: pycomm.shrink([0, 1, 2], timeout=td(1)))
        return found

    first, second, third = run(3, worker)
    assert "MismatchError" in second.kinds, second
    assert "[0, 1]" in second.message
    assert "[0, 1, 2]" in second.message
    for found in (first, third):
        assert {"TimeoutError", "PeerDiedError"} & set(found.kinds), found


@pytest.mark.parametrize("ranks", [[], [1], [0, 0], [0, 5], [-1, 0], [5000]])
def test_wrong_ranks(ranks: list[int]) -> None:
    """Refused before anything happens: the group still works."""

    def worker(rank: int, n: int) -> tuple[Any, float]:
        found = attempt(lambda: pycomm.shrink(ranks))
        x = ones()
        dist.all_reduce(x)
        return found, x[0].item()

    found, total = run(1, worker)[0]
    assert "InvalidArgument" in found.kinds, found
    assert total == 1.0


# ---- fork


def test_a_forked_child_is_refused_and_the_parent_unharmed() -> None:
    """Every use raises at once; the child's exit, with or without destructors, tells nobody that the rank left."""

    def worker(rank: int, n: int) -> tuple[int, float]:
        communicator = pycomm.get_communicator()
        group: Any = dist.new_group([0, 1])
        work: Any = dist.all_reduce(ones(), async_op=True)
        work.wait()
        pid = os.fork()
        if pid == 0:
            uses = [
                lambda: dist.all_reduce(ones()),
                lambda: dist.barrier(group),
                lambda: communicator.all_reduce(ones()),
                lambda: communicator.all_reduce(ones(), async_op=True),
                lambda: communicator.send(ones(), 1 - rank),
                lambda: communicator.abort("child"),
                lambda: pycomm.shrink([rank]),
            ]
            answers = [str(attempt(use)) for use in uses]
            dist.destroy_process_group()
            os._exit(sum("was forked from rank" not in answer for answer in answers))
        status = os.waitpid(pid, 0)[1]
        x = ones()
        dist.all_reduce(x)
        dist.all_reduce(x, group=group)
        return os.waitstatus_to_exitcode(status), x[0].item()

    assert run(2, worker) == [(0, 4.0)] * 2


def begun(kind: str, rank: int) -> tuple[Any, torch.Tensor]:
    """What this rank has begun and the other not, and where its result will be."""
    communicator = pycomm.get_communicator()
    x = ones(1 << 20)
    match kind:
        case "collective":
            return dist.all_reduce(x, async_op=True), x
        case "receive":
            return dist.irecv(x, 1 - rank), x
        case "send":  # more than its channel takes
            return dist.isend(x, 1 - rank), x
        case "coalesced":
            with dist._coalescing_manager(async_ops=True) as works:
                dist.all_reduce(x)
            return works, x
        case "core collective":
            return communicator.all_reduce(x, async_op=True), x
        case "core receive":
            return communicator.recv(x, 1 - rank, async_op=True), x
        case "core send":
            return communicator.send(x, 1 - rank, async_op=True), x
    raise AssertionError(kind)


def answered(kind: str, rank: int) -> None:
    """The other rank's part of it."""
    x = ones(1 << 20) * 2
    if "send" in kind:
        dist.recv(x, 1 - rank)
    elif "receive" in kind:
        dist.send(x, 1 - rank)
    else:
        dist.all_reduce(x)


KINDS = ("collective", "receive", "send", "coalesced")


@pytest.mark.parametrize("kind", [*KINDS, *(f"core {kind}" for kind in KINDS[:3])])
def test_a_forked_child_cannot_wait_for_what_its_parent_began(kind: str) -> None:
    """Nothing would ever end it there, and a message must not be moved from there. The parent's own wait is as ever.

    Only a Future that was asked for before the fork waits for ever in the child: its wait() is torch's own.
    """

    def worker(rank: int, n: int) -> tuple[str, float] | None:
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["forked"], td(10))
            answered(kind, rank)
            return None
        work, x = begun(kind, rank)
        here, there = os.pipe()
        if os.fork() == 0:
            uses = [work.wait, work.wait]
            if hasattr(work, "is_done"):
                uses.append(work.is_done)
            elif kind == "coalesced":
                uses += [work.works[0].is_completed, lambda: work.works[0].get_future()]
            else:
                uses += [work.is_completed, lambda: work.wait(td(1)), work.get_future]
            uses.append(lambda: pycomm.empty(4, shared=True))
            answers = [attempt(use) for use in uses]
            os.write(there, "\n".join(str(answer) for answer in answers).encode())
            os._exit(0)
        os.close(there)
        with os.fdopen(here) as pipe:
            said = pipe.read()
        os.wait()
        store.set("forked", "yes")
        work.wait()
        return said, x[-1].item()

    found, _ = run(2, worker)
    assert found is not None
    said, value = found
    answers = said.split("\n")
    assert len(answers) >= 4, said
    assert all("was forked from rank 0 (pid " in answer for answer in answers), said
    assert value == (1.0 if "send" in kind else 2.0 if "receive" in kind else 3.0)


@pytest.mark.parametrize("through", ["c10d", "core"])
def test_a_forked_child_may_look_at_what_is_over(through: str) -> None:
    """It was so at the fork, and so it is in the child."""

    def worker(rank: int, n: int) -> int:
        x = ones()
        work: Any = (
            dist.all_reduce(x, async_op=True)
            if through == "c10d"
            else pycomm.get_communicator().all_reduce(x, async_op=True)
        )
        work.wait()
        if (pid := os.fork()) == 0:
            done = work.is_completed if through == "c10d" else work.is_done
            work.wait()
            os._exit(0 if done() and x[0] == 2.0 else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert run(2, worker) == [0, 0]


def test_workers_of_a_data_loader() -> None:
    """They are forked after the group is made; training goes on around them."""

    def worker(rank: int, n: int) -> float:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        data = torch.utils.data.TensorDataset(torch.arange(8.0))
        total = torch.zeros(1)
        for _ in range(2):
            for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
                part = batch.sum().reshape(1)
                dist.all_reduce(part)
                total += part
        return total.item()

    assert run(2, worker) == [112.0] * 2


# ---- how peers are watched


@pytest.mark.parametrize("liveness", ["pid", "lock", "heartbeat"])
def test_every_way_to_notice_a_death(liveness: str) -> None:
    """Also those for containers, which the setting forces here; a forked child of the dead does not hide it."""

    def worker(rank: int, n: int) -> tuple[Any, float]:
        dist.barrier()
        if rank == 1:
            if os.fork() == 0:
                time.sleep(8)  # it holds what a fork inherits
                os._exit(0)
            kill_me()
        began = time.monotonic()
        found = attempt(lambda: [dist.all_reduce(ones()) for _ in range(2)])
        return found, time.monotonic() - began

    results = run(3, worker, may_die={1}, env={"PYCOMM_LIVENESS": liveness})
    for rank in (0, 2):
        found, seconds = results[rank]
        assert "PeerDiedError" in found.kinds, found
        assert "rank 1" in found.message
        assert seconds < 3


# ---- last words


@pytest.mark.parametrize("ending", ENDS, ids=lambda ending: ending[0])
def test_how_a_process_ends_is_told(ending: tuple[str, str, str], tmp_path: Path) -> None:
    """Whole processes, whose interpreters end as users' do."""
    check_last_words(ending, tmp_path)


# ---- what is recorded


def test_records_and_stats() -> None:
    """Both say what was called; any rank can read any rank's records."""

    def worker(rank: int, n: int) -> None:
        before = pycomm.stats()
        x = torch.ones(2, 3)
        dist.all_reduce(x)
        dist.broadcast(torch.ones(1 << 16), 1)
        work: Any = dist.all_reduce(ones(5), async_op=True)
        work.wait()
        if rank == 0:
            dist.send(ones(7), 1, tag=3)
        else:
            dist.recv(ones(7), 0, tag=3)
        dist.barrier()
        after = pycomm.stats()
        assert after["operations"] - before["operations"] == 5
        assert after["kinds"]["all_reduce"]["bytes"] == 24 + 20
        assert after["kinds"]["send" if rank == 0 else "recv"]["bytes"] == 28
        assert after["seconds"] >= after["seconds_wait"] >= 0
        for other in range(n):
            records = pycomm.get_communicator().records(other)
            names = [r["operation"] for r in records if r["operation"] != "flag_latency"]
            message = "send" if other == 0 else "recv"
            assert names[:5] == ["all_reduce", "broadcast", "all_reduce", message, "barrier"]
            assert [r["record_id"] for r in records] == sorted(r["record_id"] for r in records)
            first, third = records[0], records[2]
            assert (first["shape"], first["count"], first["dtype"]) == ([2, 3], 6, "float32")
            assert "test_recovery.py" in third["line"]  # queued, so its line was noted
            done = [r for r in records if r["state"] == "completed"]
            assert all(r["started_ns"] <= r["finished_ns"] for r in done)
        state = pycomm.get_communicator().rank_state(1 - rank)
        assert state["alive"]
        assert not state["stopped"]
        dist.barrier()

    run(2, worker)


def test_the_ring_keeps_the_newest() -> None:
    """With room for 8 records the 8 newest are there."""

    def worker(rank: int, n: int) -> list[int]:
        for _ in range(21):
            dist.all_reduce(ones())
        return [r["record_id"] for r in pycomm.get_communicator().records(1 - rank)]

    for ids in run(2, worker, env={"PYCOMM_RECORDS": "8"}):
        assert ids == list(range(ids[-1] - 7, ids[-1] + 1))


def test_without_records() -> None:
    """PYCOMM_RECORDS=0: nothing is recorded, and the errors say so in place of a last call."""

    def worker(rank: int, n: int) -> tuple[list[Any], str]:
        dist.all_reduce(ones())
        found: list[Any] = pycomm.get_communicator().records(rank)
        if rank == 1:
            kill_me()
        return found, str(attempt(lambda: [dist.barrier() for _ in range(2)]))

    records, message = run(2, worker, may_die={1}, env={"PYCOMM_RECORDS": "0"})[0]
    assert records == []
    assert "PYCOMM_RECORDS is 0" in message
    assert "PeerDiedError" in message


def test_every_line_is_named_if_asked() -> None:
    """PYCOMM_CALL_SITES=always: also of synchronous calls that succeed."""

    def worker(rank: int, n: int) -> list[str]:
        dist.all_reduce(ones())
        dist.barrier()
        return [r["line"] for r in pycomm.get_communicator().records(rank)]

    for lines in run(2, worker, env={"PYCOMM_CALL_SITES": "always"}):
        assert lines
        assert all("test_recovery.py" in line for line in lines)


# ---- dumps


def test_a_failure_is_dumped_and_read(tmp_path: Path) -> None:
    """Every survivor writes its view; the reader's paragraph names the dead rank."""

    def worker(rank: int, n: int) -> str:
        dist.barrier()
        if rank == 1:
            kill_me()
        return str(attempt(lambda: [dist.all_reduce(ones()) for _ in range(2)]))

    results = run(3, worker, may_die={1}, env={"PYCOMM_TRACE_DIR": str(tmp_path)})
    assert "PeerDiedError" in results[0]
    dumps = sorted(path.name for path in tmp_path.glob("*.json"))
    assert dumps == ["pycomm-trace.0.json", "pycomm-trace.2.json"]
    assert json.loads((tmp_path / dumps[0]).read_text())["rank"] == 0
    answer = subprocess.run(
        [sys.executable, "-m", "pycomm.trace", tmp_path], capture_output=True, text=True, cwd=ROOT
    )
    assert answer.returncode == 1, answer
    assert "Rank 1 (pid " in answer.stdout
    assert "died" in answer.stdout


def test_a_blocked_rank_dumps_on_a_signal(tmp_path: Path) -> None:
    """SIGUSR2 while it waits: the operation goes on."""

    def worker(rank: int, n: int) -> float:
        store = dist.distributed_c10d._get_default_store()
        x = ones()
        if rank == 0:
            store.set("pid", str(os.getpid()))
            dist.all_reduce(x)
            return x[0].item()
        os.kill(int(store.get("pid")), signal.SIGUSR2)
        deadline = time.monotonic() + 10
        while not (tmp_path / "pycomm-trace.0.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        dist.all_reduce(x)
        return x[0].item()

    assert run(2, worker, env={"PYCOMM_TRACE_DIR": str(tmp_path)}) == [2.0, 2.0]
    assert (tmp_path / "pycomm-trace.0.json").exists()


# ---- faults on demand


def test_fault_from_the_environment() -> None:
    """PYCOMM_TEST_FAULT is what the matrix uses, for scripts."""

    def worker(rank: int, n: int) -> str:
        return str(attempt(lambda: [dist.all_reduce(ones()) for _ in range(4)]))

    env = {"PYCOMM_TEST_FAULT": "what=raise,rank=1,operation=3"}
    first, second = run(2, worker, env=env)
    assert "asked for this error" in first
    assert "asked for this error" in second


@pytest.mark.parametrize("text", ["kill", "what=kill,rank=x", "what=kill;rank=1"])
def test_a_malformed_fault(text: str) -> None:
    """Refused in words."""
    with pytest.raises(ValueError, match="PYCOMM_TEST_FAULT must be like"):
        Config.test_fault({"PYCOMM_TEST_FAULT": text})
    assert Config.test_fault({}) is None


def test_an_unknown_fault() -> None:
    """Refused by the core, too."""
    with pytest.raises(pycomm.InvalidArgument, match="unknown test fault"):
        core.set_test_fault("explode", 0, 2)


def test_the_line_of_a_call() -> None:
    """The innermost frame that is not torch's or ours."""
    assert "test_recovery.py" in core.call_site()
    assert "in test_the_line_of_a_call" in core.call_site()


# ---- the example


@pytest.mark.long
@pytest.mark.parametrize("extra", [[], ["--rejoin"]])
def test_elastic_training_in_process(extra: list[str], tmp_path: Path) -> None:
    """One of three is killed in mid-epoch: the result is that of an undisturbed run, within 1 %."""
    accuracies = []
    for name, kill in (("calm", []), ("disturbed", ["--kill", "1@20", *extra])):
        out = tmp_path / name
        command = [sys.executable, "examples/elastic_digits.py", "--epochs", "4", "--out", str(out)]
        subprocess.run(
            [*command, "--min-accuracy", "0.5", *kill], cwd=ROOT, check=True, timeout=120
        )
        metrics = json.loads((out / "metrics.json").read_text())
        accuracies.append(metrics["test_accuracy"])
    assert metrics["ranks_at_the_end"] == (3 if extra else 2)
    assert any("PeerDiedError" in event for event in metrics["events"])
    assert abs(accuracies[0] - accuracies[1]) <= 0.01


@pytest.mark.long
def test_elastic_training_under_torchrun(tmp_path: Path) -> None:
    """All start again from the newest checkpoint, and the accuracy is reached."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", "--max-restarts", "2", "examples/elastic_digits.py"]
    command += ["--epochs", "4", "--kill", "1@20", "--min-accuracy", "0.9", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=180)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert any("goes on at step 14" in event for event in metrics["events"])


def test_timeout_of_shrink() -> None:
    """A survivor that does not call it is named."""

    def worker(rank: int, n: int) -> Any:
        if rank == 1:
            dist.distributed_c10d._get_default_store().wait(["done"], timedelta(seconds=10))
            return None
        found = attempt(lambda: pycomm.shrink(timeout=td(0.5)))
        dist.distributed_c10d._get_default_store().set("done", "")
        return found

    found = run(2, worker)[0]
    assert "TimeoutError" in found.kinds, found
    assert "1" in found.message
