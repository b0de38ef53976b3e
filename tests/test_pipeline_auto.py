"""The schedule that is looked for: right, within memory, never longer than one with a name, the same on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm import InvalidArgument
from pycomm.pipeline.schedules import NAMES, Costs, Kind, Schedule, build, lower, simulate, validate
from pycomm.pipeline.schedules.action import looped, v_shaped
from pycomm.pipeline.schedules.greedy import Greedy, Policy

ROOT = Path(__file__).resolve().parent.parent
TIMES = [(1, 1, 1), (1, 1.2, 0.8), (1, 2, 0.5), (1, 0.8, 1.5)]


def named(ranks: int, microbatches: int) -> list[Schedule]:
    found = [build(name, ranks, microbatches) for name in NAMES if name != "auto"]
    return [*found, build("zb_h1", ranks, microbatches, 2)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (4, 3), (4, 8), (3, 10)])
def test_nothing_with_a_name_is_shorter(
    ranks: int, microbatches: int, times: tuple[float, float, float]
) -> None:
    """Whatever fits into the memory."""
    forward, input_, weight = times
    for transfer in (0.0, 0.2):
        costs = Costs(forward, input_, weight, transfer=transfer)
        for memory in (None, float(ranks), 1.5):
            schedule = build("auto", ranks, microbatches, costs=costs, memory=memory)
            played = simulate(schedule, costs)
            validate(schedule)
            validate(lower(schedule))
            limit = memory or float("inf")
            assert max(played.peak_memory) <= limit + 1e-6
            for other in named(ranks, microbatches):
                theirs = simulate(other, costs)
                if max(theirs.peak_memory) <= limit:
                    assert played.makespan <= theirs.makespan * (1 + 1e-6)


def test_it_is_shorter_than_all_of_them_where_costs_are_unequal() -> None:
    """With messages that take time, or W cheaper than I, and memory to spare."""
    for costs, at_most in ((Costs(1, 2, 0.5), 30.5), (Costs(1, 1.2, 0.8, transfer=0.1), 26.0)):
        best = min(simulate(schedule, costs).makespan for schedule in named(4, 8))
        schedule = build("auto", 4, 8, costs=costs)
        assert schedule.name == "auto (greedy)"
        assert simulate(schedule, costs).makespan <= at_most < best


def test_less_memory_than_any_with_a_name_needs() -> None:
    """Down to one microbatch at a time on each rank; more memory never makes it longer."""
    costs = Costs()
    spans = []
    for memory in (1, 1.5, 2, 3, 4, 8):
        schedule = build("auto", 4, 8, costs=costs, memory=memory)
        validate(schedule)
        played = simulate(schedule, costs)
        assert max(played.peak_memory) <= memory
        spans.append(played.makespan)
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] == 25.5
    with pytest.raises(InvalidArgument, match=r"rank 0 may hold 0\.9, but one microb.* weigh 1 in"):
        build("auto", 4, 8, costs=costs, memory=0.9)


def test_costs_and_memory_of_each_stage() -> None:
    """A slow stage: its rank never waits once it has begun. Memory holds for each rank on its own."""
    times = [1.0, 1.0, 4.0, 1.0]
    weights = [1.0, 2.0, 1.0, 0.5]
    costs = Costs(times, times, times, activation=weights)
    memory = [4.0, 4.0, 3.0, 0.5]
    schedule = build("auto", 4, 8, costs=costs, memory=memory)
    validate(schedule)
    played = simulate(schedule, costs)
    assert schedule.chunks == 1
    assert all(p <= limit for p, limit in zip(played.peak_memory, memory, strict=True))
    assert played.bubble < simulate(build("1f1b", 4, 8), costs).bubble
    with pytest.raises(InvalidArgument, match=r"rank 3 may hold 0\.4, .* weigh 0\.5"):
        build("auto", 4, 8, costs=costs, memory=[4.0, 4.0, 3.0, 0.4])


def test_full_backwards_where_they_are_cheaper() -> None:
    """Splitting costs something; the first stage's I is never split from its W without need."""
    schedule = build("auto", 4, 8, costs=Costs(1, 1, 1, full=1.2))
    kinds = [action.kind for rank in range(4) for action in schedule.compute(rank)]
    assert kinds.count(Kind.B) > kinds.count(Kind.I)
    costs = Costs(1, 1, 1)
    first = build("auto", 4, 8, costs=costs).compute(0)
    pairs = [
        (one, other)
        for one, other in pairwise(first)
        if one == (0, Kind.I, other.microbatch) and other == (0, Kind.W, one.microbatch)
    ]
    assert pairs == []


def test_refusals_say_what_is_possible() -> None:
    with pytest.raises(
        InvalidArgument, match=r"costs are for 6 stages, but 4 ranks need a multiple"
    ):
        build("auto", 4, 8, costs=Costs([1.0] * 6))
    with pytest.raises(InvalidArgument, match=r"costs are for 4 stages, but 4 ranks need 2 times"):
        build("auto", 4, 8, 2, costs=Costs([1.0] * 4))
    with pytest.raises(
        InvalidArgument, match=r"costs are for different numbers of stages: \[3, 4\]"
    ):
        build("auto", 4, 8, costs=Costs([1.0] * 4, [1.0] * 3))
    with pytest.raises(InvalidArgument, match="memory is given for 3 ranks, not for 4"):
        build("auto", 4, 8, memory=[1.0] * 3)
    with pytest.raises(InvalidArgument, match="only auto takes them"):
        build("zbv", 4, 8, memory=3.0)


def test_every_process_finds_the_same() -> None:
    """Whatever its hash seed."""
    program = (
        "from pycomm.pipeline.schedules import *;"
        "print(build('auto', 4, 6, costs=Costs([1, 1.5, 1, 2], [1, 2, 1, 2], [.5, 1, .5, 1]), memory=[4, 3, 2, 2]))"
    )
    found = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", program]
        seeded = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=ROOT, env=seeded
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert "Action" in found.pop()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_greed_is_always_right(data: st.DataObject) -> None:
    """For any stages, costs, memory in which one microbatch has room, and policy: complete and within memory."""
    ranks, microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    chunks = data.draw(st.integers(1, 3))
    is_v = chunks == 2 and data.draw(st.booleans())
    placement = v_shaped(ranks) if is_v else looped(ranks, chunks)
    stages = len(placement)
    each = st.lists(st.integers(0, 6), min_size=stages, max_size=stages)
    weights = data.draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    forward, input_, weight, full = (data.draw(each) for _ in range(4))
    costs = Costs(forward, input_, weight, full, data.draw(st.integers(0, 4)), weights)
    needed = [
        sum(w for w, r in zip(weights, placement, strict=True) if r == q) for q in range(ranks)
    ]
    memory = [float(one + data.draw(st.integers(0, 6))) for one in needed]
    policy = Policy(
        data.draw(st.booleans()),
        data.draw(st.booleans()),
        data.draw(st.sampled_from([None, 1, 2])),
        data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
    )
    of_stages = costs.of_stages(stages, chunks)
    programs = Greedy(placement, microbatches, of_stages, memory, policy).programs()
    schedule = Schedule("greedy", microbatches, placement, tuple(map(tuple, programs)))
    validate(schedule)
    validate(lower(schedule))
    peaks = simulate(schedule, costs).peak_memory
    assert all(peak <= limit for peak, limit in zip(peaks, memory, strict=True))
