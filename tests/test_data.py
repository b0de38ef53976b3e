"""Samplers: exact coverage, balance, resuming on other ranks, agreement; and a DataLoader whose workers live on."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from told_samples import ToldSamples

import pycomm
from pycomm import InvalidArgument, MismatchError
from pycomm.data import BalancedBatchSampler, ShardedSampler

SIZES = (0, 1, 3, 10, 12)
WORLDS = range(1, 8)


def shards(count: int, ranks: int, **options: Any) -> list[ShardedSampler]:
    return [ShardedSampler(range(count), ranks, rank, **options) for rank in range(ranks)]


def everything(samplers: list[ShardedSampler]) -> list[int]:
    return [index for sampler in samplers for index in sampler]


def lengths(count: int) -> list[int]:
    """Of texts: log-normal, as they are."""
    torch.manual_seed(0)
    drawn = torch.distributions.LogNormal(5.0, 1.0).sample((count,))
    return drawn.clamp(16, 1024).long().tolist()


# ---- SMP-01: coverage


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("count", SIZES)
def test_evaluation_sees_every_sample_once(count: int, ranks: int) -> None:
    """Of any number on any number of ranks; a metric over 10 samples counts 10."""
    for options in ({"shuffle": False}, {"shuffle": True, "pad": False}):
        samplers = shards(count, ranks, **options)
        parts = [list(sampler) for sampler in samplers]
        assert sorted(everything(samplers)) == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("count", SIZES)
def test_training_gives_all_ranks_equally_many(count: int, ranks: int) -> None:
    """With repeats only at the end, or without the last ones."""
    for options in ({}, {"costs": lengths(count)}, {"classes": [i % 3 for i in range(count)]}):
        samplers = shards(count, ranks, **options)
        parts = [list(sampler) for sampler in samplers]
        assert len({len(part) for part in parts}) == 1
        assert len(samplers[0]) == -(-count // ranks)
        assert set(everything(samplers)) == set(range(count))
        but_last = [index for part in parts for index in part[:-1]]
        assert len(set(but_last)) == len(but_last)
        dropped = [list(sampler) for sampler in shards(count, ranks, drop_last=True, **options)]
        assert {len(part) for part in dropped} == {count // ranks}
        assert max(Counter(index for part in dropped for index in part).values(), default=1) == 1


def test_order_is_the_datasets_unless_shuffled() -> None:
    assert list(shards(10, 3, shuffle=False)[1]) == [1, 4, 7]
    sampler = shards(1000, 2)[0]
    first = list(sampler)
    assert first == list(sampler)
    assert first != sorted(first)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(shards(1000, 2, seed=1)[0]) not in (first, list(sampler))
    assert abs(sum(first) / len(first) - 499.5) < 40


# ---- SMP-03: balance


def loads(samplers: list[BalancedBatchSampler], costs: list[int]) -> torch.Tensor:
    """Of ranks in each step."""
    return torch.tensor([[sum(costs[i] for i in b) for b in s] for s in samplers]).float()


def test_batches_of_equal_length() -> None:
    """In every step all ranks have nearly the same number of tokens, equally many samples; each sample comes once."""
    costs = lengths(4096)
    samplers = [BalancedBatchSampler(costs, 16, 4, rank, seed=1) for rank in range(4)]
    parts = [list(sampler) for sampler in samplers]
    assert {len(part) for part in parts} == {len(sampler) for sampler in samplers} == {64}
    assert {len(batch) for part in parts for batch in part} == {16}
    assert sorted(i for part in parts for batch in part for i in batch) == list(range(4096))
    load = loads(samplers, costs)
    assert (load.max(0).values / load.mean(0)).mean() <= 1.01
    in_turn = torch.tensor(costs).float().view(64, 16, 4).sum(1).T
    assert (in_turn.max(0).values / in_turn.mean(0)).mean() > 1.15
    again = BalancedBatchSampler(costs, 16, 4, 2, seed=1)
    assert parts[2] == list(again)
    again.set_epoch(1)
    assert parts[2] != list(again)


def test_batches_follow_speeds() -> None:
    """A rank of half the speed gets half the tokens in every step, and a weight that makes up for fewer samples."""
    costs = lengths(4096)
    speeds = [2.0, 2.0, 1.0]
    samplers = [BalancedBatchSampler(costs, 12, 3, rank, speeds=speeds) for rank in range(3)]
    parts = [list(sampler) for sampler in samplers]
    assert len({len(part) for part in parts}) == 1
    assert [len(part[0]) for part in parts] == [15, 14, 7]
    times = loads(samplers, costs) / torch.tensor(speeds)[:, None]
    assert (times.max(0).values / times.mean(0)).mean() <= 1.03
    weights = [sampler.weights() for sampler in samplers]
    assert [one[0] for one in weights] == pytest.approx([15 / 12, 14 / 12, 7 / 12])
    assert all(sum(step) == pytest.approx(3) for step in zip(*weights, strict=True))
    assert {i for part in parts for batch in part for i in batch} == set(range(4096))


def test_last_batches() -> None:
    """What is left makes one batch for every rank, or none; exactly, ranks may have a batch less."""
    for count in range(30):
        costs = lengths(count)
        for speeds in (None, [3.0, 1.0, 1.0]):
            padded = [BalancedBatchSampler(costs, 3, 3, rank, speeds=speeds) for rank in range(3)]
            parts = [list(sampler) for sampler in padded]
            assert {len(part) for part in parts} == {-(-count // 9)}
            assert sum(len(batch) for part in parts for batch in part) - count in (0, 1, 2)
            exact = [
                BalancedBatchSampler(costs, 3, 3, rank, pad=False, speeds=speeds)
                for rank in range(3)
            ]
            assert sorted(i for s in exact for batch in s for i in batch) == list(range(count))
            dropped = [
                BalancedBatchSampler(costs, 3, 3, rank, drop_last=True, speeds=speeds)
                for rank in range(3)
            ]
            assert [len(sampler) for sampler in dropped] == [count // 9] * 3


def test_costs_classes_and_speeds_over_an_epoch() -> None:
    costs = lengths(999)
    parts = [list(sampler) for sampler in shards(999, 3, costs=costs)]
    sums = [sum(costs[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= 1024
    assert {len(part) for part in parts} == {333}
    classes = [int(index % 10 == 0) for index in range(1000)]
    for part in shards(1000, 4, classes=classes):
        assert sum(classes[i] for i in part) == 25
    parts = [list(sampler) for sampler in shards(1000, 3, speeds=[1.0, 2.0, 5.0])]
    assert [len(part) for part in parts] == [125, 250, 625]
    assert sorted(i for part in parts for i in part) == list(range(1000))


def test_classes_in_every_batch() -> None:
    """Of each class ranks have equally many in a step, give or take one, and none is always the one with less."""
    classes = [int(index % 16 == 0) for index in range(1600)]
    samplers = shards(1600, 4, classes=classes, batch_size=8)
    assert {sampler.batch_size for sampler in samplers} == {8}
    parts = [list(sampler) for sampler in samplers]
    for step in range(50):
        counts = [sum(classes[i] for i in part[8 * step : 8 * step + 8]) for part in parts]
        assert max(counts) - min(counts) <= 1
    assert all(15 <= sum(classes[i] for i in part) <= 35 for part in parts)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 60),
    st.integers(1, 6),
    st.none() | st.integers(1, 7),
    st.sampled_from(["count", "costs", "classes"]),
    st.sampled_from([{}, {"pad": False}, {"drop_last": True}, {"shuffle": False}]),
    st.data(),
)
def test_any_mixture_covers_the_dataset(
    count: int, ranks: int, batch: int | None, by: str, ends: dict[str, bool], data: st.DataObject
) -> None:
    values = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    options: dict[str, Any] = {**ends, "batch_size": batch}
    if by != "count":
        options[by] = values
    if data.draw(st.booleans()):
        speeds = st.lists(st.floats(0.1, 10), min_size=ranks, max_size=ranks)
        options["speeds"] = data.draw(speeds)
    samplers = shards(count, ranks, **options)
    found = Counter(everything(samplers))
    assert [len(list(sampler)) for sampler in samplers] == [len(sampler) for sampler in samplers]
    if ends.get("drop_last"):
        unit = ranks * (batch or 1)
        assert found.total() == count // unit * unit
        assert max(found.values(), default=1) == 1
    else:
        assert set(found) == set(range(count))
        exact = ends or ("speeds" in options and batch is None)
        assert found.total() - count in range(1 if exact else ranks)


# ---- resuming


@pytest.mark.parametrize("by", ["count", "costs", "classes", "batches", "batches of speeds"])
def test_an_epoch_goes_on_at_another_world_size(by: str) -> None:
    """Twice: of 4 ranks 2 go on, then 3. What is done and what comes are each sample once."""
    count = 4 * 2 * 30 + 5
    options: dict[str, Any] = {"pad": False, "seed": 5}
    if by in ("costs", "classes"):
        options[by] = lengths(count)
    if by.startswith("batches"):
        options |= {"batch_size": 2, "costs": lengths(count)}
    speeds = {4: [1.0, 1.0, 1.0, 2.0], 2: [1.0, 3.0], 3: [1.0, 1.0, 2.0]}
    seen: list[int] = []
    state = None
    for ranks, steps in ((4, 7), (2, 9), (3, 1000)):
        if by == "batches of speeds":
            options["speeds"] = speeds[ranks]
        samplers = shards(count, ranks, **options)
        for sampler in samplers:
            sampler.set_epoch(3)
            if state:
                sampler.load_state_dict(state)
            sampler.set_epoch(3)
            size = sampler.batch_size or 1
            seen += list(sampler)[: size * steps]
        state = samplers[0].state_dict(steps)
        assert all(sampler.state_dict(steps) == state for sampler in samplers)
        if ranks != 3:
            assert 0 < len(seen) < count
    assert sorted(seen) == list(range(count))
    samplers[0].set_epoch(4)
    assert len(samplers[0]) >= count // 4


def test_states_belong_to_their_samples() -> None:
    state = shards(10, 2, costs=[1] * 10)[0].state_dict(1)
    with pytest.raises(InvalidArgument, match="of a sampler with count 10, this one has 12"):
        shards(12, 2, costs=[1] * 12)[0].load_state_dict(state)
    with pytest.raises(InvalidArgument, match="of a sampler with costs"):
        shards(10, 2, costs=[2] * 10)[0].load_state_dict(state)
    with pytest.raises(InvalidArgument, match="different speeds have no step in common"):
        shards(10, 2, speeds=[1, 2])[0].state_dict(1)


# ---- agreement


REFUSALS: list[tuple[Callable[[], object], str]] = [
    (lambda: ShardedSampler(range(3)), "there is no process group"),
    (lambda: ShardedSampler(range(3), 2), "give both num_replicas and rank"),
    (lambda: ShardedSampler(range(3), 2, 2), "rank must lie between 0 and 1: 2"),
    (lambda: ShardedSampler(range(3), 2, 0, seed=-1), "seed must be a whole number"),
    (lambda: ShardedSampler(range(3), 2, 0, seed=None), "ranks cannot agree on a seed"),
    (lambda: shards(3, 2, pad=True, drop_last=True), "exclude each other"),
    (lambda: shards(3, 2, pad=True, speeds=[1, 2]), "different speeds get different numbers"),
    (lambda: shards(3, 2, speeds=[1]), "1 speeds are given for 2 ranks"),
    (lambda: shards(3, 2, speeds=[1, 0]), "speeds must be positive"),
    (lambda: shards(3, 2, costs=[1, 2]), "costs must be one number for each of 3 samples"),
    (lambda: shards(3, 2, costs=[1, 2, -1]), "costs of samples must be numbers of 0 or more"),
    (lambda: shards(3, 2, costs=[1] * 3, classes=[1] * 3), "by costs or by classes, not by both"),
    (lambda: shards(3, 2, batch_size=0), "batch_size must be a whole number of 1 or more: 0"),
    (lambda: shards(3, 2)[0].set_epoch(-1), "epoch must be a whole number"),
    (lambda: pycomm.data.loader(ToldSamples(3), shards(3, 2)[0]), "give batch_size"),
    (lambda: pycomm.data.loader(ToldSamples(3), shards(3, 2, batch_size=2)[0], 3), "not of 3"),
    (
        lambda: pycomm.data.loader(ToldSamples(3), BalancedBatchSampler([1] * 3, 2, 1, 0), 3),
        "has a batch_size of its own",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSALS)
def test_refusals(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        call()


def test_ranks_that_would_split_differently_are_told() -> None:
    """On every rank: of seeds, epochs, options and datasets that differ."""

    def worker(rank: int, _n: int) -> list[str]:
        made: list[Callable[[], object]] = [
            lambda: ShardedSampler(range(10), seed=rank),
            lambda: ShardedSampler(range(10 + rank)),
            lambda: ShardedSampler(range(10), costs=[1.0 + rank] * 10),
            lambda: ShardedSampler(range(10), shuffle=rank == 0),
            lambda: BalancedBatchSampler([1] * 10, 2 + rank),
            lambda: ShardedSampler(range(10)).set_epoch(rank),
        ]
        words = []
        for make in made:
            with pytest.raises(MismatchError) as caught:
                make()
            words.append(str(caught.value))
        return words

    first, second = harness.run(2, worker)
    assert first == second
    names = (
        "seed 1, that of rank 0 0",
        "count 11",
        "costs",
        "shuffle False",
        "batch_size 3",
        "epoch 1",
    )
    for name, words in zip(names, first, strict=True):
        assert f"the sampler of rank 1 has {name}" in words


def test_ranks_agree_on_a_seed_that_nobody_gives() -> None:
    def worker(rank: int, n: int) -> tuple[int, list[int], tuple[float, ...]]:
        sampler = ShardedSampler(range(100), seed=None)
        assert (sampler.rank, sampler.num_replicas) == (rank, n)
        sampler.set_epoch(2)
        return sampler.seed, list(sampler), pycomm.data.speeds_of_ranks(30 * (rank + 1), 2.0)

    found = harness.run(2, worker)
    assert found[0][0] == found[1][0]
    assert sorted(found[0][1] + found[1][1]) == list(range(100))
    assert found[0][2] == found[1][2] == (15.0, 30.0)
    assert harness.run(2, worker)[0][0] != found[0][0]


# ---- the loader


def epochs(rank: int, n: int, workers: int) -> tuple[list[list[int]], list[set[int]], set[float]]:
    """Three epochs, with an all-reduce in every step: samples, processes that made them, random numbers."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    costs = [1 + index % 7 for index in range(24)]
    sampler = BalancedBatchSampler(costs, 4)
    loader = pycomm.data.loader(ToldSamples(24), sampler, workers=workers)
    seen, made_by, drawn = [], [], set()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        indices: list[int] = []
        pids = set()
        for index, pid, *numbers in loader:
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == n
            indices += index.tolist()
            pids |= set(pid.tolist())
            drawn |= {value for column in numbers for value in column.tolist()}
        seen.append(indices)
        made_by.append(pids)
    return seen, made_by, drawn


def test_workers_live_on_beside_a_group() -> None:
    """The same ones in all epochs, whose random numbers no two share; the group works on, too."""
    first, second = harness.run(2, epochs, 2, wall=120)
    for one, other in zip(first[0], second[0], strict=True):
        assert sorted(one + other) == list(range(24))
    for _, made_by, drawn in (first, second):
        assert made_by[0] == made_by[1] == made_by[2]
        assert len(made_by[0]) == 2
        assert len(drawn) == 3 * 3 * 12
    assert not first[2] & second[2]
    assert not first[1][0] & second[1][0]


def test_no_workers() -> None:
    found = harness.run(2, epochs, 0)
    assert sorted(found[0][0][0] + found[1][0][0]) == list(range(24))
