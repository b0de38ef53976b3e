"""Pipeline schedules: reference figures, every shape and count, planted faults that validate() must see, no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm import InvalidArgument
from pycomm.pipeline.schedules import (
    NAMES,
    Action,
    Batch,
    Costs,
    Kind,
    Limits,
    Schedule,
    Step,
    build,
    lower,
    simulate,
    validate,
)
from pycomm.pipeline.schedules.action import COMPUTE, actions_of

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "pycomm/pipeline/schedules").glob("*.py"))
SMALL, LARGE = (4, 8), (8, 32)

# ---- figures of torch's own action lists on an event simulator: makespan, bubble, bubble by span

EQUAL = {
    ("gpipe", 1): ((33, 9, 9), (117, 21, 21)),
    ("1f1b", 1): ((33, 9, 9), (117, 21, 21)),
    ("interleaved", 2): ((28.5, 4.5, 4.5), (106.5, 10.5, 10.5)),
    ("interleaved", 4): ((26.25, 2.25, 2.25), (101.25, 5.25, 5.25)),
    ("looped_bfs", 2): ((28.5, 4.5, 4.5), (106.5, 10.5, 10.5)),
    ("zb_h1", 1): ((27, 3, 3), (103, 7, 7)),
    ("zb_h1", 2): ((25.5, 1.5, 1.5), (99.5, 3.5, 3.5)),
    ("zb_h2", 1): ((27, 3, 0), (103, 7, 0)),
    ("zbv", 2): ((25.5, 1.5, 0), (99.5, 3.5, 0)),
    ("dualpipev", 2): ((25.5, 1.5, 1.5), (99.5, 3.5, 3.5)),
}

#: For four ranks: activations of each at once, and W that are due.
HELD = {
    ("gpipe", 1): ((8, 8, 8, 8), (0, 0, 0, 0)),
    ("1f1b", 1): ((4, 3, 2, 1), (0, 0, 0, 0)),
    ("interleaved", 2): ((11, 9, 7, 5), (0, 0, 0, 0)),
    ("interleaved", 4): ((19, 17, 15, 13), (0, 0, 0, 0)),
    ("looped_bfs", 2): ((16, 16, 16, 16), (0, 0, 0, 0)),
    ("zb_h1", 1): ((4, 4, 4, 4), (1, 2, 3, 4)),
    ("zb_h1", 2): ((8, 8, 8, 8), (1, 2, 3, 4)),
    ("zb_h2", 1): ((7, 7, 7, 7), (1, 3, 5, 7)),
    ("zbv", 2): ((8, 8, 8, 8), (1, 3, 5, 7)),
    ("dualpipev", 2): ((9, 9, 9, 9), (1, 2, 3, 4)),
}

#: Makespans: (F, I, W) = (1, 1.2, 0.8) for both sizes, then (1, 2, 0.5).
UNEQUAL = {
    ("gpipe", 1): (33, 117, 38.5, 136.5),
    ("1f1b", 1): (33, 117, 38.5, 136.5),
    ("interleaved", 2): (28.5, 106.5, 33.25, 124.25),
    ("interleaved", 4): (26.25, 101.25, 30.625, 118.125),
    ("zb_h1", 1): (28.2, 105.8, 35.5, 129.5),
    ("zb_h1", 2): (26.1, 100.9, 31.75, 120.75),
    ("zbv", 2): (25.8, 100.2, 32.5, 122.5),
    ("dualpipev", 2): (26.1, 101.1, 32.75, 123.75),
}


@pytest.mark.parametrize(("name", "chunks"), EQUAL)
def test_figures_of_equal_costs(name: str, chunks: int) -> None:
    for (ranks, microbatches), figures in zip((SMALL, LARGE), EQUAL[name, chunks], strict=True):
        played = simulate(build(name, ranks, microbatches, chunks))
        assert (played.makespan, played.bubble, played.span_bubble) == figures


@pytest.mark.parametrize(("name", "chunks"), HELD)
def test_what_ranks_hold(name: str, chunks: int) -> None:
    schedule = build(name, *SMALL, chunks)
    played = simulate(schedule)
    assert (played.peak_activations, played.peak_weights) == HELD[name, chunks]
    assert schedule.limits == Limits(*HELD[name, chunks])
    weights = [one / chunks for one in HELD[name, chunks][0]]
    assert played.peak_memory == pytest.approx(weights)


@pytest.mark.parametrize(("name", "chunks"), UNEQUAL)
def test_makespans_of_unequal_costs(name: str, chunks: int) -> None:
    found = [
        simulate(build(name, ranks, microbatches, chunks), costs).makespan
        for costs in (Costs(1, 1.2, 0.8), Costs(1, 2, 0.5))
        for ranks, microbatches in (SMALL, LARGE)
    ]
    assert found == pytest.approx(UNEQUAL[name, chunks], rel=1e-12)


def test_zbv_bubbles_by_span_of_unequal_costs() -> None:
    figures = {(1, 1.2, 0.8): (1.2, 2.8), (1, 2, 0.5): (4.5, 10.5)}
    for times, expected in figures.items():
        found = [
            simulate(build("zbv", *size), Costs(*times)).span_bubble for size in (SMALL, LARGE)
        ]
        assert found == pytest.approx(expected)


def test_messages_take_time() -> None:
    """Equal for free messages, 1F1B exposes more of them than GPipe does."""
    figures = {
        "gpipe": (33.6, 36.0),
        "1f1b": (34.6, 41.0),
        "interleaved": (29.9, 35.5),
    }
    for name, expected in figures.items():
        found = [simulate(build(name, *SMALL), Costs(transfer=c)).makespan for c in (0.1, 0.5)]
        assert found == pytest.approx(expected)


def test_formulas_of_bubbles() -> None:
    """Of 1F1B and GPipe (p - 1)(F + B), interleaved and looped a chunk's part of it, ZB-H1 without 2 W."""
    forward, input_, weight = 3, 5, 2
    costs = Costs(forward, input_, weight)
    for ranks in (1, 2, 3, 5, 8):
        ramp = (ranks - 1) * (forward + input_ + weight)
        for name in ("gpipe", "1f1b"):
            assert simulate(build(name, ranks, 2 * ranks), costs).bubble == ramp
        for chunks in (1, 2, 3):
            for name in ("interleaved", "looped_bfs"):
                played = simulate(build(name, ranks, 2 * ranks, chunks), costs)
                assert played.bubble == pytest.approx(ramp / chunks)
            played = simulate(build("zb_h1", ranks, 2 * ranks, chunks), costs)
            expected = (ranks - 1) * (forward + input_ - weight) / chunks
            assert played.bubble == pytest.approx(expected)


def test_full_backward_may_be_cheaper_than_its_parts() -> None:
    costs = Costs(1, 1, 1, full=1.5)
    assert simulate(build("1f1b", 1, 4), costs).makespan == 4 * 2.5
    assert simulate(build("zb_h1", 1, 4), costs).makespan == 4 * 3


def test_costs_of_each_stage() -> None:
    """The slowest stage sets the pace: its work, the way to it, and the way back."""
    times = [1, 5, 2]
    played = simulate(build("gpipe", 3, 4), Costs(times, times, times, activation=[1, 2, 3]))
    assert played.work == (12, 60, 24)
    assert played.makespan == (1 + 4 * 5 + 2) + (4 + 4 * 10 + 2)
    assert played.bubble == played.makespan - 60
    assert played.peak_memory == (4, 8, 12)


# ---- any shape and count

COUNTS = st.integers(1, 9)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from([name for name in NAMES if name != "auto"]))
    chunks = draw(st.integers(1, 4)) if name in ("interleaved", "looped_bfs", "zb_h1") else None
    return build(name, draw(COUNTS), draw(st.integers(1, 24)), chunks)


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_every_shape_is_right(schedule: Schedule) -> None:
    """Complete, in order, within limits; with messages, too, which cannot deadlock and change no computation."""
    validate(schedule)
    lowered = lower(schedule)
    validate(lowered)
    programs = [schedule.compute(rank) for rank in range(schedule.ranks)]
    assert programs == [lowered.compute(rank) for rank in range(schedule.ranks)]
    count = sum(len(list(actions_of(program))) for program in lowered.programs)
    hops = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    work = sum(map(len, programs))
    assert count == work + 2 * 2 * hops * schedule.microbatches


@settings(max_examples=150, deadline=None)
@given(schedules(), st.data())
def test_clocks_obey_costs(schedule: Schedule, data: st.DataObject) -> None:
    """On any costs nothing starts before what it needs has ended, ranks do one thing at a time, and no makespan is
    shorter than the busiest rank's work or the way of one microbatch."""
    each = st.lists(st.integers(0, 9), min_size=schedule.stages, max_size=schedule.stages)
    forward, input_, weight = (data.draw(each) for _ in range(3))
    transfer = data.draw(st.integers(0, 5))
    played_costs = Costs(forward, input_, weight, transfer=transfer)
    played = simulate(schedule, played_costs)
    ends = {one.action: one.end for rank in played.intervals for one in rank}
    for rank, intervals in enumerate(played.intervals):
        free = 0.0
        for (stage, kind, microbatch), start, end in intervals:
            before = [free]
            if kind == Kind.F and stage:
                hop = transfer * (schedule.placement[stage - 1] != rank)
                before.append(ends[Action(stage - 1, Kind.F, microbatch)] + hop)
            if kind in (Kind.B, Kind.I) and stage + 1 < schedule.stages:
                hop = transfer * (schedule.placement[stage + 1] != rank)
                later = [Action(stage + 1, k, microbatch) for k in (Kind.B, Kind.I)]
                before.append(next(ends[one] for one in later if one in ends) + hop)
            assert start == max(before)
            free = end
    assert played.makespan >= max(played.work)
    assert played.makespan >= sum(forward) + sum(input_)
    assert 0 <= played.span_bubble <= played.makespan - min(played.work)
    assert 0 <= played.efficiency <= 1
    assert simulate(lower(schedule), played_costs).intervals == played.intervals


@pytest.mark.parametrize("name", NAMES)
def test_edges(name: str) -> None:
    """One rank, one microbatch, fewer microbatches than ranks, and numbers that do not divide."""
    for ranks in (1, 2, 3, 4, 7):
        for microbatches in (1, 2, 3, 5, 11, 13):
            schedule = lower(build(name, ranks, microbatches))
            validate(schedule)
            if ranks == 1:
                assert all(action.kind in COMPUTE for action in actions_of(schedule.programs[0]))
                assert simulate(schedule).bubble == 0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "auto"])
def test_none_is_longer_than_gpipe(name: str) -> None:
    """With equal costs, also for few microbatches; those that are no multiple of the ranks add no bubble."""
    for ranks in (2, 3, 4, 6):
        spans = [simulate(build(name, ranks, count)) for count in range(1, 4 * ranks)]
        for count, played in enumerate(spans, 1):
            assert played.makespan <= simulate(build("gpipe", ranks, count)).makespan + 1e-9
        full = 2 * ranks if name in ("zb_h2", "zbv", "dualpipev") else ranks
        assert len({round(played.bubble, 6) for played in spans[full - 1 :]}) == 1


def test_large_schedules_take_seconds_at_most() -> None:
    schedule = lower(build("zbv", 16, 128))
    validate(schedule)
    assert simulate(schedule).span_bubble == 0
    assert sum(map(len, schedule.programs)) > 16 * 2 * 3 * 128


def test_refusals_say_what_is_possible() -> None:
    with pytest.raises(InvalidArgument, match=r"no schedule 'pipedream', but: gpipe, 1f1b"):
        build("pipedream", 2, 2)
    with pytest.raises(InvalidArgument, match=r"1f1b has 1 chunk.* not 2: interleaved takes any"):
        build("1f1b", 2, 2, 2)
    with pytest.raises(InvalidArgument, match=r"zbv has 2 chunk.* not 3"):
        build("zbv", 2, 2, 3)
    for name, counts in (("ranks", (0, 2)), ("microbatches", (2, -1)), ("microbatches", (2, True))):
        with pytest.raises(InvalidArgument, match=f"{name} must be a whole number of 1 or more"):
            build("gpipe", *counts)
    with pytest.raises(InvalidArgument, match="forward has 3 costs for 4 stages"):
        simulate(build("gpipe", 4, 2), Costs([1, 2, 3]))
    with pytest.raises(InvalidArgument, match="weight must be 0 or more"):
        simulate(build("gpipe", 4, 2), Costs(weight=-1))
    with pytest.raises(InvalidArgument, match="transfer must be 0 or more"):
        simulate(build("gpipe", 4, 2), Costs(transfer=float("nan")))


# ---- planted faults


def edited(schedule: Schedule, rank: int, edit: Callable[[list[Step]], object]) -> Schedule:
    programs = [list(program) for program in schedule.programs]
    edit(programs[rank])
    return replace(schedule, programs=tuple(map(tuple, programs)))


def swap(first: str, second: str) -> Callable[[list[Step]], None]:
    def edit(program: list[Step]) -> None:
        names = [str(step) for step in program]
        a, b = names.index(first), names.index(second)
        program[a], program[b] = program[b], program[a]

    return edit


def remove(name: str) -> Callable[[list[Step]], object]:
    return lambda program: program.pop([str(step) for step in program].index(name))


def change(name: str, to: Step) -> Callable[[list[Step]], None]:
    def edit(program: list[Step]) -> None:
        program[[str(step) for step in program].index(name)] = to

    return edit


def unbatch(program: list[Step]) -> None:
    """Batches become their actions, sends first: what whole ranks that send before they receive do."""
    actions: list[Step] = []
    for step in program:
        group = step.actions if isinstance(step, Batch) else (step,)
        actions += sorted(group, key=lambda one: "RECV" in str(one))
    program[:] = actions


FAULTS: list[tuple[str, int, Callable[[list[Step]], object], str]] = [
    ("zb_h1", 1, remove("1F2"), r"rank 1: stage 1 has I W of microbatch 2, not F B or F I W"),
    ("zb_h1", 1, remove("1W2"), r"rank 1: stage 1 has F I of microbatch 2"),
    ("1f1b", 2, remove("2B3"), r"rank 2: stage 2 has F of microbatch 3"),
    ("1f1b", 2, change("2B3", Action(2, Kind.I, 3)), r"stage 2 has F I of microbatch 3"),
    (
        "1f1b",
        0,
        lambda program: program.append(Action(0, Kind.B, 1)),
        r"rank 0: 0B1 is there 2 times",
    ),
    ("1f1b", 0, lambda program: program.append(Action(0, Kind.I, 1)), r"has B F I of microbatch 1"),
    ("1f1b", 0, change("0B1", Action(1, Kind.B, 1)), r"rank 0: 1B1 belongs to rank 1"),
    ("1f1b", 0, change("0B1", Action(3, Kind.B, 1)), r"rank 0: 3B1 is of none of the 3 stages"),
    ("1f1b", 0, change("0B1", Action(0, Kind.B, 4)), r"rank 0: 0B4 is of none of the 4 microb"),
    ("zb_h1", 1, swap("1I2", "1W2"), r"rank 1: 1W2 comes before 1I2, which it needs"),
    ("zb_h1", 1, swap("1F2", "1I2"), r"rank 1: 1I2 comes before 1F2, which it needs"),
    ("1f1b", 2, swap("2F0", "2B3"), r"rank 2: 2B3 comes before 2F3, which it needs"),
    ("zbv", 2, swap("2F0", "3F0"), r"rank 2: 3F0 comes before 2F0, which it needs"),
    ("zbv", 0, swap("0I1", "0F3"), r"ranks wait for each other: rank 0 at"),
]


@pytest.mark.parametrize(("name", "rank", "edit", "words"), FAULTS)
def test_faults_in_computation_are_seen(
    name: str, rank: int, edit: Callable[[list[Step]], object], words: str
) -> None:
    schedule = edited(build(name, 3, 4), rank, edit)
    with pytest.raises(InvalidArgument, match=words):
        validate(schedule)


def test_stages_belong_on_all_ranks_alike() -> None:
    schedule = replace(build("gpipe", 3, 4), placement=(0, 1, 1))
    with pytest.raises(
        InvalidArgument, match=r"\(0, 1, 1\), which must be the same number on each"
    ):
        validate(schedule)


def test_limits_are_looked_at() -> None:
    """A forward too early, a W too late."""
    schedule = edited(build("zb_h1", 3, 4), 1, swap("1F3", "1W0"))
    with pytest.raises(InvalidArgument, match=r"rank 1: 4 activations at once, but the limit is 3"):
        validate(schedule)
    schedule = edited(build("zb_h1", 3, 4), 2, swap("2F3", "2W0"))
    allowed = replace(schedule, limits=Limits((3, 3, 4), (1, 2, 2)))
    with pytest.raises(
        InvalidArgument, match=r"rank 2: 3 W that are due at once, but the limit is 2"
    ):
        validate(allowed)
    validate(replace(schedule, limits=None))
    with pytest.raises(InvalidArgument, match="limits of activations are of 2 ranks, not 3"):
        validate(replace(schedule, limits=Limits((9, 9), (9, 9))))


MESSAGE_FAULTS: list[tuple[str, int, Callable[[list[Step]], object], str]] = [
    ("gpipe", 0, remove("0SEND_F2"), r"rank 0: 0SEND_F2 is missing"),
    ("gpipe", 1, remove("1RECV_F2"), r"rank 1: 1RECV_F2 is missing"),
    ("gpipe", 1, remove("1RECV_B2"), r"rank 1: 1RECV_B2 is missing"),
    ("gpipe", 2, remove("2SEND_B2"), r"rank 2: 2SEND_B2 is missing"),
    (
        "gpipe",
        0,
        lambda program: program.append(Action(0, Kind.SEND_F, 1)),
        r"0SEND_F1 is there twice",
    ),
    (
        "gpipe",
        2,
        lambda program: program.append(Action(2, Kind.SEND_F, 1)),
        r"nothing needs 2SEND_F1",
    ),
    ("gpipe", 0, swap("0F2", "0SEND_F2"), r"rank 0: 0SEND_F2 comes before 0F2, which it needs"),
    ("gpipe", 2, swap("2F1", "2RECV_F1"), r"rank 2: 2F1 comes before 2RECV_F1, which it needs"),
    ("gpipe", 0, change("0F2", Batch((Action(0, Kind.F, 2),))), r"\(0F2\) is not of messages only"),
    ("gpipe", 1, swap("1RECV_F1", "1RECV_F2"), r"1F1 comes before 1RECV_F1, which it needs"),
    ("gpipe", 1, swap("1SEND_B2", "1SEND_B3"), r"1SEND_B3 comes before 1B3, which it needs"),
]


@pytest.mark.parametrize(("name", "rank", "edit", "words"), MESSAGE_FAULTS)
def test_faults_in_messages_are_seen(
    name: str, rank: int, edit: Callable[[list[Step]], object], words: str
) -> None:
    schedule = edited(lower(build(name, 3, 4)), rank, edit)
    with pytest.raises(InvalidArgument, match=words):
        validate(schedule)


def move(name: str, before: str) -> Callable[[list[Step]], None]:
    def edit(program: list[Step]) -> None:
        step = program.pop([str(one) for one in program].index(name))
        program.insert([str(one) for one in program].index(before), step)

    return edit


def test_order_of_messages_is_looked_at() -> None:
    schedule = edited(lower(build("gpipe", 2, 4)), 1, move("1RECV_F2", before="1RECV_F1"))
    with pytest.raises(
        InvalidArgument,
        match=r"message 1 from rank 0 to rank 1 is sent as 0SEND_F1 and received as 1RECV_F2",
    ):
        validate(schedule)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv", "dualpipev"])
def test_sends_that_cross_are_a_deadlock_unless_they_are_a_batch(name: str) -> None:
    schedule = lower(build(name, 3, 8))
    validate(schedule)
    for rank in range(3):
        schedule = edited(schedule, rank, unbatch)
    with pytest.raises(
        InvalidArgument, match=r"a deadlock if sends wait for their rec.*: rank 0 in"
    ):
        validate(schedule)


@settings(max_examples=100, deadline=None)
@given(schedules(), st.data())
def test_any_step_too_few_too_many_or_of_others_is_seen(
    schedule: Schedule, data: st.DataObject
) -> None:
    lowered = lower(schedule)
    rank = data.draw(st.integers(0, lowered.ranks - 1))
    program = list(lowered.programs[rank])
    at = data.draw(st.integers(0, len(program) - 1))
    stage, kind, microbatch = next(actions_of((program[at],)))
    match data.draw(st.sampled_from(["drop", "twice", "stage", "microbatch"])):
        case "drop":
            program.pop(at)
        case "twice":
            program.insert(data.draw(st.integers(0, len(program))), program[at])
        case "stage":
            other = data.draw(st.integers(0, lowered.stages).filter(lambda one: one != stage))
            program[at] = Action(other, kind, microbatch)
        case "microbatch":
            count = st.integers(0, lowered.microbatches)
            program[at] = Action(
                stage, kind, data.draw(count.filter(lambda one: one != microbatch))
            )
    programs = (*lowered.programs[:rank], tuple(program), *lowered.programs[rank + 1 :])
    with pytest.raises(InvalidArgument):
        validate(replace(lowered, programs=programs))


# ---- programs that run: threads, with messages that wait for both ends


class Threads:
    """Runs a lowered schedule on a toy model: a stage adds its number to twice its input, and so backwards."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.wires: dict[Action, tuple[threading.Barrier, list[int]]] = {
            action: (threading.Barrier(2), [])
            for program in schedule.programs
            for action in actions_of(program)
            if action.kind in (Kind.SEND_F, Kind.SEND_B)
        }
        self.values: list[dict[Action, int]] = [{} for _ in schedule.programs]

    def run(self) -> list[dict[Action, int]]:
        with ThreadPoolExecutor(self.schedule.ranks) as pool:
            list(pool.map(self.rank, range(self.schedule.ranks)))
        return self.values

    def rank(self, rank: int) -> None:
        with ThreadPoolExecutor(32) as pool:
            for step in self.schedule.programs[rank]:
                if isinstance(step, Batch):
                    list(pool.map(lambda one: self.message(rank, one), step.actions))
                elif step.kind in COMPUTE:
                    self.compute(rank, step)
                else:
                    self.message(rank, step)

    def message(self, rank: int, action: Action) -> None:
        stage, kind, microbatch = action
        values, is_forward = self.values[rank], kind in (Kind.SEND_F, Kind.RECV_F)
        if kind in (Kind.SEND_F, Kind.SEND_B):
            barrier, wire = self.wires[action]
            wire.append(values[Action(stage, Kind.F if is_forward else Kind.I, microbatch)])
            barrier.wait(20)
        else:
            sender, sent = (stage - 1, Kind.SEND_F) if is_forward else (stage + 1, Kind.SEND_B)
            barrier, wire = self.wires[Action(sender, sent, microbatch)]
            barrier.wait(20)
            values[Action(sender, Kind.F if is_forward else Kind.I, microbatch)] = wire[0]

    def compute(self, rank: int, action: Action) -> None:
        stage, kind, microbatch = action
        values = self.values[rank]
        if kind == Kind.F:
            before = values[Action(stage - 1, kind, microbatch)] if stage else microbatch
            values[action] = 2 * before + stage
        elif kind == Kind.W:
            values[action] = values[Action(stage, Kind.I, microbatch)]
        else:
            forward = values[Action(stage, Kind.F, microbatch)]
            is_last = stage + 1 == self.schedule.stages
            after = 0 if is_last else values[Action(stage + 1, Kind.I, microbatch)]
            values[Action(stage, Kind.I, microbatch)] = 2 * after + forward


@pytest.mark.parametrize("name", NAMES)
def test_programs_run_with_messages_that_wait_for_both_ends(name: str) -> None:
    """To the end, and compute what one process would; so they do with fewer microbatches than ranks."""
    for ranks, microbatches in ((4, 6), (3, 2), (1, 2)):
        schedule = lower(build(name, ranks, microbatches))
        found: dict[Action, int] = {}
        for values in Threads(schedule).run():
            found.update(values)
        for microbatch in range(microbatches):
            value, forwards = microbatch, []
            for stage in range(schedule.stages):
                value = 2 * value + stage
                forwards.append(value)
                assert found[Action(stage, Kind.F, microbatch)] == value
            gradient = 0
            for stage in reversed(range(schedule.stages)):
                gradient = 2 * gradient + forwards[stage]
                assert found[Action(stage, Kind.I, microbatch)] == gradient


# ---- no torch


def test_sources_import_neither_torch_nor_what_does() -> None:
    for source in SOURCES:
        tree = ast.parse(source.read_text())
        names = [
            name
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        ]
        ours = {name for name in names if name.split(".")[0] == "pycomm"}
        assert not [name for name in names if name.split(".")[0] in ("torch", "numpy")], source
        assert all(n == "pycomm.errors" or n.startswith("pycomm.pipeline.schedules") for n in ours)
    assert len(SOURCES) > 8


def test_it_works_where_there_is_no_torch() -> None:
    """In a process where nothing can import it, with a package pycomm that runs no code of its own."""
    program = """
import sys, types
class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuses())
package = types.ModuleType("pycomm")
package.__path__ = [sys.argv[1]]
sys.modules["pycomm"] = package
from pycomm.pipeline import schedules
schedule = schedules.lower(schedules.build("zbv", ranks=4, microbatches=8))
schedules.validate(schedule)
print(schedules.simulate(schedule).makespan, "torch" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(ROOT / "pycomm")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert (done.stdout, done.stderr) == ("25.5 False\n", "")
