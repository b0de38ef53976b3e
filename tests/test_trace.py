"""What `python -m pycomm.trace` says about jobs that went wrong, and about one that did not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from trace_scenes import World, done, enter_all_but, ns, with_history

from pycomm.trace import Verdict, diagnose, read_job
from pycomm.trace.__main__ import main

CALL = "all_reduce(count=5, dtype=float32, op=sum)"
NINTH = f"operation 9, {CALL} at train.py:88 in step"
LATE = ("timeout", 1)
DIED = ("died", 1)
DIFFER = ("mismatch",)


def verdict(directory: Path) -> Verdict:
    """The diagnosis of a directory that has nothing but good dumps."""
    job = read_job(directory)
    assert job.notes == []
    found = diagnose(job)
    assert "\n" not in found.text
    assert found.text.endswith(".")
    assert not re.search(r"  |\.\.(?!\.)|,,| ,| \.|\bNone\b(?! of)", found.text), found.text
    return found


def says(directory: Path, kind: str, ranks: set[int], *words: str) -> str:
    """Checks the verdict on dumps; returns the paragraph."""
    found = verdict(directory)
    assert (found.kind, set(found.ranks)) == (kind, ranks), found.text
    assert found.wrong == (kind != "fine")
    for text in words:
        assert text in found.text, f"{text!r} is not in: {found.text}"
    return found.text


# ---- all is well


def test_all_fine(tmp_path: Path) -> None:
    world = with_history(4, "world")
    pair = world.group("tp", 2, 3)
    pair.all_do("all_gather", 6, line="model.py:9 in forward")
    world.dump(tmp_path, at=7)
    text = says(tmp_path, "fine", set(), "Nothing went wrong", "4 ranks in 2 groups")
    assert "operation 1 of group tp, all_gather(count=5, dtype=float32) at model.py:9 in" in text


def test_a_short_wait_is_fine(tmp_path: Path) -> None:
    """A dump on demand finds ranks in the middle of something."""
    world = with_history()
    enter_all_but(world, 1)
    world.dump(tmp_path, at=5.3)
    says(tmp_path, "fine", set(), f"Rank 0 was in {NINTH}, but only since 300 ms.")


def test_a_job_that_has_ended_is_fine(tmp_path: Path) -> None:
    world = with_history()
    for rank in range(3):
        world.end(rank, left=True, alive=rank == 0)
    world.dump(tmp_path, 0, at=9)
    says(tmp_path, "fine", set())


def test_counts_may_differ_where_ranks_have_their_own(tmp_path: Path) -> None:
    """An uneven all_gather that is completed is right."""
    world = World(2)
    for rank in range(2):
        done(world.default.enter(rank, "all_gather", at=1, count=3 + rank), 1.1)
    world.dump(tmp_path, at=2)
    says(tmp_path, "fine", set())


# ---- different calls


@pytest.mark.parametrize(
    ("operation", "other", "differs", "advice"),
    [
        ("broadcast", {}, "", "Compare the branches"),
        ("all_reduce", {"count": 6}, "They differ in the count; ", "equally long"),
        ("all_reduce", {"shape": (2, 3)}, "They differ in the count; ", "equally long"),
        ("all_reduce", {"dtype": "float16"}, "They differ in the dtype; ", "a cast or an autocast"),
        ("all_reduce", {"op": "max"}, "They differ in the op; ", "the same op on every rank"),
    ],
)
def test_one_of_three_calls_something_else(
    tmp_path: Path, operation: str, other: dict[str, object], differs: str, advice: str
) -> None:
    world = with_history()
    enter_all_but(world, 1)
    world.default.enter(1, operation, at=5.01, line="train.py:90 in step", **other)
    world.default.fail(5.02, *DIFFER)
    world.dump(tmp_path, at=5.2)
    text = says(tmp_path, "mismatch", {1}, "The ranks disagree on operation 9: rank 1 called ")
    assert f"but ranks 0 and 2 called {CALL} at train.py:88 in step" in text
    assert f"{differs}2 of 3 ranks agree, so rank 1 is the odd one out".lower() in text.lower()
    assert "completed was operation 8" in text
    assert "1.5 s before that" in text
    assert advice in text
    assert "train.py:90" in text


def test_roots_differ(tmp_path: Path) -> None:
    """Roots are named as ranks of the job."""
    world = World(4, "world")
    pair = world.group("dp", 1, 3)
    pair.all_do("barrier", 1)
    for rank in range(2):
        pair.enter(rank, "broadcast", at=2, root=rank)
    pair.fail(2.1, "mismatch")
    world.dump(tmp_path, at=3)
    text = says(tmp_path, "mismatch", set(), "disagree on operation 2 of group dp: rank 1 called")
    assert "root=1) at" not in text
    assert "broadcast(count=5, dtype=float32, root=1), but rank 3 called" in text
    assert "root=3). They differ in the root. It failed at" in text
    assert "the same source or destination" in text


def test_of_two_ranks_the_one_that_breaks_the_pattern_is_named(tmp_path: Path) -> None:
    """After an all-reduce came a broadcast: rank 1 has left it out."""
    world = with_history(2)
    world.default.enter(0, "broadcast", at=5, line="train.py:70 in step")
    world.default.enter(1, at=5, line="train.py:88 in step")
    world.default.fail(5.1, *DIFFER)
    world.dump(tmp_path, at=6)
    text = says(tmp_path, "mismatch", {1}, "In earlier rounds the call of rank 0 came next")
    assert "rank 1 is the odd one out." in text


def test_one_collective_more(tmp_path: Path) -> None:
    """Rank 1's queue shows that it calls what the others do, one operation later."""
    world = with_history()
    for rank in (0, 2):
        world.default.enter(rank, "broadcast", at=5)
    world.default.enter(1, "barrier", at=5, line="log.py:3 in log")
    world.default.queue(1, "broadcast", at=5)
    world.default.fail(5.1, *DIFFER)
    world.dump(tmp_path, at=6)
    text = says(tmp_path, "mismatch", {1}, "rank 1 called barrier() at log.py:3 in log")
    assert "rank 1's next call is what rank 0 called here, as if it had one operation more" in text


def test_calls_that_differ_in_what_is_not_recorded(tmp_path: Path) -> None:
    """The counts of single parts: then the group's own words say it."""
    world = World(2)
    for rank in range(2):
        world.default.enter(rank, "all_to_all", at=1, count=4 + rank)
    report = (
        "rank 0: ranks disagree on operation 1: ranks 0 and 1 called all_to_all(count=4) with counts of its own for "
        "each rank. Rank 0 has 3 elements for rank 1, which expects 4. "
    )
    world.default.fail(1.1, "parts_mismatch", report=report)
    world.dump(tmp_path, at=2)
    says(tmp_path, "parts_mismatch", set(), "The group failed at", report.strip(". "))


def test_without_checks_a_mismatch_is_found_all_the_same(tmp_path: Path) -> None:
    """Headers may be left unchecked; then wrong sums go unnoticed, but not here."""
    world = World(2)
    for rank in range(2):
        done(world.default.enter(rank, op=("sum", "max")[rank], at=1), 1.1)
    world.dump(tmp_path, at=2)
    says(tmp_path, "mismatch", set(), "They differ in the op.", "op=sum", "op=max")


# ---- ranks that are gone or stand still


def test_killed_between_operations(tmp_path: Path) -> None:
    world = with_history()
    enter_all_but(world, 1)
    world.end(1, alive=False)
    world.default.fail(5.05, *DIED)
    world.dump(tmp_path, 0, 2, at=5.2)
    text = says(tmp_path, "died", {1}, f"Rank 1 (pid 4711) died before it came to {NINTH}")
    assert "in which ranks 0 and 2 waited for it for 50 ms, until the group failed at 20" in text
    assert f"The last that rank 1 did was operation 8, {CALL} at" in text
    assert "rank 1's own output" in text
    assert "Rank 1 wrote no dump: this is what ranks 0 and 2 saw." in text


def test_killed_inside_an_operation(tmp_path: Path) -> None:
    world = with_history()
    enter_all_but(world)
    world.end(1, alive=False)
    world.default.fail(5.05, *DIED)
    world.dump(tmp_path, 0, at=5.2)
    text = says(tmp_path, "died", {1}, f"Rank 1 (pid 4711) died inside {NINTH}")
    assert "in which ranks 0 and 2 waited for it for 50 ms" in text
    assert "At that time rank 1 had been in operation 9" in text


def test_killed_while_nobody_waits(tmp_path: Path) -> None:
    world = with_history()
    world.end(2, alive=False)
    world.dump(tmp_path, 0, 1, at=6)
    says(tmp_path, "died", {2}, "Rank 2 (pid 4712) died; nobody waited for it", "operation 8")


def test_left_because_of_an_exception(tmp_path: Path) -> None:
    world = with_history()
    enter_all_but(world, 1)
    world.end(1, alive=False, left=True, farewell="ValueError: bad batch")
    world.default.fail(5.05, "exited", 1)
    world.dump(tmp_path, 1, at=5.01, reason="ValueError")
    world.dump(tmp_path, 0, 2, at=5.2)
    text = says(
        tmp_path, "exited", {1}, "Rank 1 (pid 4711) left because of ValueError: bad batch, "
    )
    assert "Rank 1 wrote its own dump 40 ms before that: ValueError." in text


def test_left_in_good_order(tmp_path: Path) -> None:
    """The others make one call more."""
    world = with_history()
    enter_all_but(world, 1)
    world.end(1, left=True)
    world.default.fail(5.05, "left", 1)
    world.dump(tmp_path, at=5.2)
    text = says(
        tmp_path, "left", {1}, "Rank 1 (pid 4711) left the group in good order before it came"
    )
    assert "uneven data" in text


def test_a_group_that_a_rank_has_left_does_not_explain_another(tmp_path: Path) -> None:
    world = with_history(3, "world")
    pair = world.group("tp", 0, 1)
    pair.states[1]["left"] = True
    enter_all_but(world, 1)
    world.default.fail(13, *LATE)
    world.dump(tmp_path, 0, 2, at=13.1)
    says(tmp_path, "absent", {1}, "Rank 1 (pid 4711) did not come to operation 9 of group world")


@pytest.mark.parametrize("failed", [True, False])
def test_stopped(tmp_path: Path, failed: bool) -> None:
    world = with_history()
    enter_all_but(world, 1)
    world.end(1, stopped=True)
    if failed:
        world.default.fail(13, "stopped", 1)
    world.dump(tmp_path, 0, 2, at=13.1)
    text = says(tmp_path, "stopped", {1}, "Rank 1 (pid 4711) stands still, stopped by a signal or")
    assert "kill -CONT 4711" in text
    assert ("until the group failed" in text) == failed


def test_stopped_inside_an_operation(tmp_path: Path) -> None:
    world = with_history()
    enter_all_but(world)
    for ring in world.default.rings:
        ring[-1]["met_ns"] = ns(5.01)
    world.end(1, stopped=True)
    world.dump(tmp_path, 0, 2, at=13.1)
    says(
        tmp_path,
        "stopped",
        {1},
        "Rank 1 (pid 4711) stands still",
        f"inside {NINTH}, in which ranks",
    )


# ---- ranks that do not come


def test_late(tmp_path: Path) -> None:
    world = with_history()
    enter_all_but(world, 1)
    world.default.fail(13, *LATE)
    world.dump(tmp_path, 0, 2, at=13.1)
    world.dump(tmp_path, 1, at=15, reason="AbortedError")
    text = says(
        tmp_path, "absent", {1}, f"Rank 1 (pid 4711) did not come to {NINTH}, in which ranks"
    )
    assert "ranks 0 and 2 waited for it for 8.0 s, until the timeout at 20" in text
    assert "Rank 1 wrote its own dump 2.0 s after that: AbortedError." in text
    assert "completed 9.5 s before that" in text
    assert "py-spy dump --pid 4711" in text
    assert "raise the timeout" in text


def test_came_when_it_was_too_late(tmp_path: Path) -> None:
    world = with_history()
    enter_all_but(world, 1)
    world.default.fail(13, *LATE)
    world.default.enter(1, at=13.5).update(state="failed", finished_ns=ns(13.5))
    world.dump(tmp_path, at=14)
    says(tmp_path, "absent", {1}, "Rank 1 came 500 ms after that, too late.")


def test_a_rank_killed_after_a_timeout_was_late_not_dead(tmp_path: Path) -> None:
    """A launcher ends all ranks as soon as one has failed."""
    world = with_history()
    enter_all_but(world, 1)
    world.default.fail(13, *LATE)
    world.end(1, alive=False)
    world.dump(tmp_path, 0, 2, at=14)
    says(tmp_path, "absent", {1}, "did not come to operation 9")


def test_a_hang_that_has_not_failed_yet(tmp_path: Path) -> None:
    """A dump on demand, with the two-hour timeout far away."""
    world = with_history()
    enter_all_but(world, 1)
    for rank in (0, 2):
        world.default.rings[rank][-1]["timeout_ms"] = 7_200_000
    world.dump(tmp_path, 0, at=317)
    text = says(
        tmp_path, "absent", {1}, "ranks 0 and 2 waited for it for 5 min, and still did when"
    )
    assert "its timeout of 2 h 0 min has not passed" in text


def test_several_ranks_are_missing(tmp_path: Path) -> None:
    world = with_history(8)
    enter_all_but(world, 1, 2, 3, 4, 6)
    world.dump(tmp_path, 0, at=14)
    says(tmp_path, "absent", {1, 2, 3, 4, 6}, "Ranks 1-4 and 6 did not come", "waited for them for")


def test_who_waits_for_one_that_waits_for_another(tmp_path: Path) -> None:
    """Rank 0 waits in one group for rank 1, which waits in another for rank 2: that one is the cause."""
    world = with_history(3, "world")
    a, b = world.group("a", 0, 1), world.group("b", 1, 2)
    a.enter(0, at=5)
    b.enter(0, "barrier", at=5, line="b.py:2 in sync")
    a.fail(13, "timeout", 1)
    world.dump(tmp_path, 0, 1, at=13.1)
    text = says(tmp_path, "absent", {2}, "Rank 2 (pid 4712) did not come to operation 1 of group b")
    assert "barrier() at b.py:2 in sync, in which rank 1 waited for it for 8.0 s" in text
    assert f"In turn, rank 0 waited for rank 1 in operation 1 of group a, {CALL}." in text


def test_all_are_there_and_it_does_not_end(tmp_path: Path) -> None:
    world = with_history()
    enter_all_but(world)
    for ring in world.default.rings:
        ring[-1]["met_ns"] = ns(5.01)
    world.dump(tmp_path, at=20)
    says(tmp_path, "stuck", set(), "Ranks 0, 1 and 2 had been in operation 9", "15.0 s", "a bug")


# ---- deadlocks


@pytest.mark.parametrize("failed", ["crossing", "timeout", ""])
def test_two_groups_in_different_order(tmp_path: Path, failed: str) -> None:
    """Rank 0 waits in group tp for rank 1, which waits in group dp for rank 0."""
    world = with_history(3, "world")
    tp, dp = world.group("tp", 0, 1), world.group("dp", 1, 0)
    tp.all_do("barrier", 4.6)
    tp.enter(0, at=5, line="model.py:40 in forward")
    dp.enter(0, "all_gather", at=5.1, line="train.py:60 in sync")
    world.default.enter(2, at=5)  # rank 2 waits, too, but is not in the circle
    if failed == "crossing":
        dp.fail(5.5, "crossing", 1)
    elif failed:
        tp.fail(13, "timeout", 1)
    world.dump(tmp_path, at=13.1)
    wait = "waited" if failed else "waits"
    zero = (
        f"rank 0 (pid 4710) {wait} for rank 1 in operation 2 of group tp, {CALL} at model.py:40 in"
    )
    one = (
        f"rank 1 (pid 4711) {wait} for rank 0 in operation 1 of group dp, all_gather(count=5, dtype"
    )
    text = says(tmp_path, "circle", {0, 1}, "Deadlock: ", zero, one, "the groups in the same order")
    assert ("That lasted 8.1 s, and still did when the dump was written" in text) == (not failed)


def test_both_receive_first(tmp_path: Path) -> None:
    world = with_history(2)
    for rank in range(2):
        world.default.post(rank, "recv", 1 - rank, at=5)
    world.dump(tmp_path, at=15)
    says(
        tmp_path, "circle", {0, 1}, "recv(count=5, dtype=float32, from rank 1, tag=0)", "send first"
    )


def test_tags_differ(tmp_path: Path) -> None:
    world = with_history(2)
    world.default.post(0, "send", 1, at=5, tag=1, count=10**8)
    world.default.post(1, "recv", 0, at=5, tag=2, count=10**8)
    world.dump(tmp_path, at=15)
    says(
        tmp_path,
        "circle",
        {0, 1},
        "send(count=100000000, dtype=float32, to rank 1, tag=1)",
        "with the same tag",
    )


def test_groups_that_fail_together(tmp_path: Path) -> None:
    """Both ranks of a deadlock see it, give up and are gone at once: that is not the cause."""
    world = with_history(3)
    tp, dp = world.group("tp", 0, 1), world.group("dp", 0, 1)
    for rank, group in enumerate((tp, dp)):
        group.enter(rank, at=5)
        group.rings[rank][0].update(state="failed", finished_ns=ns(5.4 + rank / 1000))
        other = 1 - rank
        group.failure = {"text": "...", "cause": "crossing", "culprit": other}
    world.default.enter(2, at=5)
    world.dump(tmp_path, 0, 1, at=5.41)
    world.end(1, alive=False)
    world.default.failure = {"text": "...", "cause": "died", "culprit": 1}
    world.default.rings[2][-1].update(state="failed", finished_ns=ns(5.6))
    world.dump(tmp_path, 2, at=5.7)
    text = says(tmp_path, "circle", {0, 1}, "Deadlock: rank 0 (pid 4710) waited for rank 1 in")
    assert text.endswith("The default group and group dp failed after that.")


def test_a_collective_instead_of_a_message(tmp_path: Path) -> None:
    """Rank 1 sends with another tag and goes on to a barrier."""
    world = with_history()
    done(world.default.post(1, "send", 0, at=5, tag=6), 5)
    world.default.post(0, "recv", 1, at=5, tag=7)
    for rank in (1, 2):
        world.default.enter(rank, "barrier", at=5.1)
    world.default.fail(13, *LATE)
    world.dump(tmp_path, at=13.1)
    text = says(tmp_path, "circle", {0, 1}, "waited for rank 0 in operation 9, barrier()")
    assert "Rank 1 did send it a message of another tag: message 1, send(count=5" in text
    assert "which must come before the collective" in text


# ---- messages


def test_a_message_that_is_never_sent(tmp_path: Path) -> None:
    """One with another tag is, and is named."""
    world = with_history()
    done(world.default.post(1, "send", 0, at=5, tag=6, line="pipe.py:12 in push"), 5.1)
    world.default.post(0, "recv", 1, at=5, tag=7, line="pipe.py:20 in pull")
    world.default.fail(13, *LATE)
    world.dump(tmp_path, at=13.1)
    text = says(tmp_path, "absent", {1}, "Rank 1 (pid 4711) sent nothing for message 1")
    assert (
        "message 1, recv(count=5, dtype=float32, from rank 1, tag=7) at pipe.py:20 in pull" in text
    )
    assert "rank 0 waited for it for 8.0 s, until the timeout" in text
    assert (
        "a message of another tag: message 1, send(count=5, dtype=float32, to rank 0, tag=6)"
        in text
    )


def test_a_message_that_is_never_received(tmp_path: Path) -> None:
    world = with_history()
    world.default.post(0, "send", 1, at=5, count=10**8, line="pipe.py:12 in push")
    world.dump(tmp_path, 0, at=20)
    text = says(tmp_path, "absent", {1}, "Rank 1 (pid 4711) received nothing of message 1, send")
    assert "send(count=100000000, dtype=float32, to rank 1, tag=0) at pipe.py:12 in push" in text


def test_nobody_sends(tmp_path: Path) -> None:
    world = with_history()
    world.default.post(0, "recv", -1, at=5)
    world.dump(tmp_path, 0, at=20)
    says(tmp_path, "absent", {1, 2}, "sent nothing for message 1", "from any rank")


def test_the_sender_dies(tmp_path: Path) -> None:
    world = with_history()
    world.default.post(0, "recv", 1, at=5)
    world.end(1, alive=False)
    world.default.fail(5.1, *DIED)
    world.dump(tmp_path, 0, 2, at=6)
    says(tmp_path, "died", {1}, "Rank 1 (pid 4711) died before it came to message 1")


def test_a_message_of_another_count(tmp_path: Path) -> None:
    """The group's own words name both calls."""
    world = with_history(2)
    done(world.default.post(1, "send", 0, at=5, count=6, line="pipe.py:12 in push"), 5)
    world.default.post(0, "recv", 1, at=5, line="pipe.py:20 in pull")
    report = "rank 0: recv(count=5): the message for it is rank 1's send(count=6)"
    world.default.fail(5.1, "message_mismatch", 1, report)
    world.dump(tmp_path, at=6)
    says(tmp_path, "message_mismatch", {1}, report, "pipe.py:12 in push")


def test_a_message_under_way_is_no_deadlock(tmp_path: Path) -> None:
    """A large message whose two ends are both in it."""
    world = with_history(2)
    world.default.post(0, "send", 1, at=5, count=10**9)
    world.default.post(1, "recv", 0, at=5, count=10**9)
    world.dump(tmp_path, at=8)
    says(tmp_path, "fine", set())


# ---- ended on purpose


def test_abort(tmp_path: Path) -> None:
    world = with_history()
    enter_all_but(world, 1)
    world.default.fail(5.5, "aborted", 1, "rank 1 aborted: the loss is NaN")
    world.dump(tmp_path, at=5.6)
    text = says(tmp_path, "aborted", {1}, "The group failed at 20", "rank 1 aborted: ")
    assert 'the loss is NaN". The last that rank 1 did was operation 8' in text


def test_interrupted(tmp_path: Path) -> None:
    world = with_history()
    enter_all_but(world, 1)
    world.default.fail(5.5, "interrupted", 0, f"rank 0: {CALL} (operation 9) was interrupted")
    world.dump(tmp_path, 0, 2, at=5.6)
    text = says(
        tmp_path, "interrupted", {0}, "The group failed at 20", "(operation 9) was interrupted"
    )
    assert "It had waited 500 ms by then, so nothing else seems wrong." in text


def test_interrupted_since_it_hung(tmp_path: Path) -> None:
    """Somebody lost patience: what they waited for is the cause."""
    world = with_history()
    enter_all_but(world, 1)
    world.default.fail(65, "interrupted", 0, f"rank 0: {CALL} (operation 9) was interrupted")
    world.dump(tmp_path, 0, 2, at=66)
    text = says(tmp_path, "interrupted", {1}, "(operation 9) was interrupted")
    assert "It had waited 60.0 s by then" in text
    assert "Rank 1 (pid 4711) did not come to operation 9" in text


def test_an_unknown_failure_is_quoted(tmp_path: Path) -> None:
    world = World(4, "world")
    pair = world.group("dp", 2, 3)
    for rank in range(2):
        pair.enter(rank, at=1)
    pair.fail(1.1, "other", report="rank 1: cannot read 5 bytes of rank 0: Operation not permitted")
    world.dump(tmp_path, at=2)
    text = says(tmp_path, "other", set(), "Group dp failed at", "the r-th of ranks 2 and 3")
    assert text.endswith('"rank 1: cannot read 5 bytes of rank 0: Operation not permitted".')


def test_other_groups_fail_after_the_first(tmp_path: Path) -> None:
    world = with_history(3, "world")
    pair = world.group("tp", 0, 2)
    enter_all_but(world, 1)
    world.end(1, alive=False)
    world.default.fail(5.05, *DIED)
    pair.enter(1, at=5.1)
    pair.fail(5.3, "died", 0)
    world.dump(tmp_path, 0, 2, at=6)
    says(tmp_path, "died", {1}, "Rank 1 (pid 4711) died", "Group tp failed after that.")


# ---- whoever writes a dump, the verdict is the same


def killed() -> World:
    world = with_history(4)
    enter_all_but(world, 1)
    world.end(1, alive=False)
    world.default.fail(5.05, *DIED)
    return world


def mismatched() -> World:
    world = with_history(4)
    enter_all_but(world, 1)
    world.default.enter(1, "barrier", at=5.01)
    world.default.fail(5.02, *DIFFER)
    return world


def late() -> World:
    world = with_history(4)
    enter_all_but(world, 1)
    world.default.fail(13, *LATE)
    return world


@pytest.mark.parametrize("scene", [killed, mismatched, late])
def test_one_dump_is_enough(tmp_path: Path, scene: Callable[[], World]) -> None:
    verdicts = []
    for rank in (0, 2, 3):
        folder = tmp_path / str(rank)
        scene().dump(folder, rank, at=13.2)
        found = verdict(folder)
        verdicts.append((found.kind, found.ranks, found.text.split(" wrote no dump")[0]))
    scene().dump(tmp_path / "all", 0, 2, 3, at=13.2)
    found = verdict(tmp_path / "all")
    assert set(verdicts) == {(found.kind, found.ranks, found.text.split(" wrote no dump")[0])}
    assert found.wrong


# ---- the command


def test_exit_status_and_paragraph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed().dump(tmp_path / "bad", 0, at=6)
    with_history().dump(tmp_path / "good", at=6)
    assert main([str(tmp_path / "bad")]) == 1
    printed = capsys.readouterr()
    assert printed.out == verdict(tmp_path / "bad").text + "\n"
    assert printed.err == ""
    assert main([str(tmp_path / "good")]) == 0


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = mismatched()
    done(world.default.post(0, "send", 3, at=4.9), 4.95)
    world.default.queue(2, at=5)
    world.dump(tmp_path, at=6)
    assert main([str(tmp_path), "-v", "--last", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("The group failed: it was mismatch") for line in lines)
    eighth, ninth, queued = lines[lines.index("The group: the last operations") + 2 :][:3]
    assert eighth.startswith(f"8  {CALL} at train.py:88 in step")
    assert eighth.count("done in") == 4
    assert ninth.startswith("9  (differs)")
    assert "barrier(): failed after 10 ms" in ninth
    assert f"{CALL} at train.py:88 in step: failed after 20 ms" in ninth
    assert queued.split() == ["queued", "1"]
    assert "send(count=5, dtype=float32, to rank 3, tag=0): done in 50 ms" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{dir}"], "there are no dumps (pycomm-trace.*.json) that can be read in"),
        (["{dir}/missing"], "is no directory"),
        (["{dir}", "--last", "0"], "'0' is no positive number"),
        ([], "DIR"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    try:
        status = main([argument.format(dir=tmp_path) for argument in arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2
    assert words in capsys.readouterr().err


def test_an_output_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_history().dump(tmp_path, 0, at=6)
    assert main([str(tmp_path), "--chrome", str(tmp_path / "missing/out.json")]) == 2
    assert "out.json cannot be written: No such file or directory" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for words in ("examples:", "--chrome out.json", "fr_trace out", "exit status: 0"):
        assert words in shown
