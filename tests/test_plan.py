"""pycomm.plan: its formulas against a simulation of messages, its limits, what it shares with advise(), its command.

benchmarks/plan.py compares it with measured runs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from messages_on_links import Traffic, binomial, everybody, folded, ring, swaps, two_trees

from pycomm import InvalidArgument
from pycomm.compression import advise
from pycomm.compression.cost import Rates
from pycomm.extension import core
from pycomm.plan import (
    ALGORITHMS,
    LINKS,
    Bucket,
    Cluster,
    Group,
    Job,
    Link,
    Sample,
    bubble,
    buckets_of,
    curve,
    drain,
    fit_link,
    predict,
    predict_step,
    predictions,
)
from pycomm.plan.__main__ import main
from pycomm.plan.scale import hosts_up_to, table
from pycomm.plan.words import read_bytes, read_link, read_rate, read_seconds, say_seconds

ROOT = Path(__file__).resolve().parent.parent
MESSAGES = Link(1e9, 1e-5)  # the alpha-beta model: every message costs its latency
OVERLAPPING = Link(1e9, 1e-5, 2e-6)
WORLDS = (2, 3, 4, 7, 8, 16)
SIZES = (0.0, 1e3, 1e6)


def alone(p: int, link: Link) -> Group:
    """Ranks of one level."""
    return Group(1, p, link, link)


def seconds(operation: str, algorithm: str, group: Group, n: float) -> float:
    return predict(group, n, operation=operation, algorithm=algorithm).seconds


# ---- formulas against messages


def simulated(operation: str, algorithm: str, p: int, link: Link, n: float) -> float:
    """By messages, without hosts."""
    traffic, ranks = Traffic(link), list(range(p))
    power = 1 << (p.bit_length() - 1)
    halves = [(1 << i, n / 2 ** (i + 1)) for i in range(power.bit_length() - 1)]
    match operation, algorithm:
        case "all_reduce", "one_shot":
            everybody(traffic, ranks, n, [[]] * p)
        case "all_reduce", "two_shot":
            everybody(traffic, ranks, n / p, everybody(traffic, ranks, n / p, [[]] * p))
        case "all_reduce", "ring":
            ring(traffic, ranks, 2 * (p - 1), n / p)
        case "all_reduce", "recursive_doubling":
            folded(traffic, p, [(distance, n) for distance, _ in halves], n, n)
        case "all_reduce", "halving_doubling":
            folded(traffic, p, [*halves, *halves[::-1]], n, n)
        case "reduce_scatter", "two_shot":
            everybody(traffic, ranks, n / p, [[]] * p)
        case "reduce_scatter", "recursive_halving":
            folded(traffic, p, halves, n, n / p)
        case "all_gather", "one_shot":
            everybody(traffic, ranks, n / p, [[]] * p)
        case "all_gather", "recursive_doubling":
            folded(traffic, p, halves[::-1], n / p, n)
        case (("reduce_scatter" | "all_gather"), "ring"):
            ring(traffic, ranks, p - 1, n / p)
        case "broadcast", "tree":
            binomial(traffic, ranks, n)
        case _:
            raise AssertionError(f"{operation} {algorithm} is not simulated")
    return traffic.seconds()


EXACT = [
    (operation, algorithm)
    for operation, known in ALGORITHMS.items()
    for algorithm in known
    if algorithm not in ("hierarchical", "scatter")
    and (operation, algorithm) not in (("all_reduce", "tree"), ("broadcast", "ring"))
]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("p", WORLDS)
@pytest.mark.parametrize(("operation", "algorithm"), EXACT)
def test_formulas_are_what_messages_take(operation: str, algorithm: str, p: int, n: float) -> None:
    """To the last digit; but a tree's root gains if messages overlap, and of ranks too many for a power of two some
    need not wait for all steps."""
    folds = "recursive" in algorithm or algorithm == "halving_doubling"
    is_bound = folds and p & (p - 1) != 0
    for link in (MESSAGES, OVERLAPPING):
        by_messages = simulated(operation, algorithm, p, link, n)
        by_formula = seconds(operation, algorithm, alone(p, link), n)
        if is_bound or (operation, link) == ("broadcast", OVERLAPPING):
            assert by_messages <= by_formula * (1 + 1e-9)
            assert by_formula <= by_messages * 2
        else:
            assert by_formula == pytest.approx(by_messages, rel=1e-9)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_half_duplex_takes_twice_the_wire(p: int) -> None:
    """Where everybody sends and receives at the same time."""
    half = Link(1e9, 0.0, 0.0, duplex=False)
    for algorithm in ("ring", "two_shot", "recursive_doubling", "halving_doubling"):
        whole = seconds("all_reduce", algorithm, alone(p, replace(half, duplex=True)), 1e6)
        assert seconds("all_reduce", algorithm, alone(p, half), 1e6) == pytest.approx(2 * whole)
    by_messages = simulated("all_reduce", "recursive_doubling", p, half, 1e6)
    assert seconds("all_reduce", "recursive_doubling", alone(p, half), 1e6) == pytest.approx(
        by_messages
    )


@pytest.mark.parametrize("p", [3, 7, 8, 15])
@pytest.mark.parametrize("n", [1e5, 1e7, 1e9])
def test_two_trees_come_near(p: int, n: float) -> None:
    """With the best number of chunks that messages find: within a third, and never below 2 n."""
    best = math.inf
    for chunks in (1, 2, 4, 8, 16, 32, 64):
        traffic = Traffic(OVERLAPPING)
        two_trees(traffic, p, n, chunks)
        best = min(best, traffic.seconds())
    found = seconds("all_reduce", "tree", alone(p, OVERLAPPING), n)
    assert found == pytest.approx(best, rel=0.34)
    assert found >= 2 * n / OVERLAPPING.bandwidth


@pytest.mark.parametrize("p", [2, 5, 8])
@pytest.mark.parametrize("n", [0.0, 1e4, 1e8])
def test_a_broadcast_in_chunks(p: int, n: float) -> None:
    """No number of chunks is faster by messages; the chosen one is as fast as they say."""
    found = seconds("broadcast", "ring", alone(p, OVERLAPPING), n)
    times = []
    for chunks in sorted({round(1.2**i) for i in range(44)}):
        traffic = Traffic(OVERLAPPING)
        before: list[list[int]] = [[] for _ in range(p)]
        for _ in range(chunks):
            for rank in range(p - 1):
                before[rank + 1] = [traffic.send(rank, rank + 1, n / chunks, before[rank])]
        times.append(traffic.seconds())
    assert found == pytest.approx(min(times), rel=0.01)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_a_broadcast_by_scatter(p: int) -> None:
    """Half goes to the middle, which hands on, then all gather in a ring."""
    traffic, n = Traffic(MESSAGES), 1e6
    got: dict[int, list[int]] = {0: []}
    distance = p
    while (distance := distance // 2) >= 1:
        for i in list(got):
            bytes = n * distance / p
            got[i + distance] = [traffic.send(i, i + distance, bytes, got[i])]
    before = [got[i] for i in range(p)]
    for _ in range(p - 1):
        sent = [traffic.send(i, (i + 1) % p, n / p, before[i]) for i in range(p)]
        before = [[sent[i - 1]] for i in range(p)]
    found = seconds("broadcast", "scatter", alone(p, MESSAGES), n)
    assert found == pytest.approx(traffic.seconds(), rel=0.1)


# ---- hosts


INSIDE, BETWEEN = Link(1e10, 1e-6, 1e-7), Link(1e9, 2e-5, 1e-6)


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (4, 2), (2, 4), (3, 3), (4, 8)])
@pytest.mark.parametrize("n", [1e3, 1e6, 1e8])
def test_a_ring_over_hosts(hosts: int, local: int, n: float) -> None:
    """Fast and slow links in one ring."""
    p = hosts * local
    traffic = Traffic(INSIDE, BETWEEN, local)
    ring(traffic, list(range(p)), 2 * (p - 1), n / p)
    found = seconds("all_reduce", "ring", Group(hosts, local, INSIDE, BETWEEN), n)
    assert found == pytest.approx(traffic.seconds(), rel=0.16)


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (4, 2), (2, 4), (3, 3), (4, 8)])
def test_hierarchical_over_hosts(hosts: int, local: int) -> None:
    """All three parts by two_shot, which is the best there; the host's ranks share its link."""
    n, p = 1e7, hosts * local
    traffic = Traffic(INSIDE, BETWEEN, local)
    got: list[list[int]] = [[] for _ in range(p)]

    def together(groups: list[list[int]], bytes: float) -> None:
        for ranks in groups:
            arrived = everybody(traffic, ranks, bytes, [got[rank] for rank in ranks])
            for rank, messages in zip(ranks, arrived, strict=True):
                got[rank] = messages

    of_hosts = [list(range(h * local, (h + 1) * local)) for h in range(hosts)]
    across = [list(range(i, p, local)) for i in range(local)]
    together(of_hosts, n / local)
    together(across, n / local / hosts)
    together(across, n / local / hosts)
    together(of_hosts, n / local)
    group = Group(hosts, local, INSIDE, BETWEEN)
    assert predict(group.across, n / local).algorithm == "two_shot" or hosts == 2
    found = seconds("all_reduce", "hierarchical", group, n)
    assert found == pytest.approx(traffic.seconds(), rel=0.1)


def test_swaps_over_hosts_share_the_link() -> None:
    """The step that leaves a host has as many flows as the host has ranks."""
    traffic, n = Traffic(INSIDE, BETWEEN, 2), 1e7
    swaps(traffic, 4, [(1, n), (2, n)], [[] for _ in range(4)])
    group = Group(2, 2, INSIDE, BETWEEN)
    found = seconds("all_reduce", "recursive_doubling", group, n)
    assert found == pytest.approx(traffic.seconds(), rel=0.01)
    halving = predict(group, n, algorithm="halving_doubling").cost.wire
    assert halving == pytest.approx(2 * (n / 2 / 1e10 + 2 * n / 4 / 1e9))


def test_one_host_of_many_ranks_and_many_hosts_of_one_rank_are_alike() -> None:
    """By all algorithms."""
    for operation, known in ALGORITHMS.items():
        for algorithm in set(known) - {"hierarchical"}:
            one, many = (
                seconds(operation, algorithm, Group(*shape, OVERLAPPING, OVERLAPPING), 1e6)
                for shape in ((1, 8), (8, 1))
            )
            assert one == pytest.approx(many), (operation, algorithm)


# ---- limits


@pytest.mark.parametrize("operation", ALGORITHMS)
def test_one_rank_waits_for_nobody(operation: str) -> None:
    for one in predictions(alone(1, MESSAGES), 1e9, operation, memory=1e9):
        assert one.seconds == 0
        assert one.busbw == 0


@pytest.mark.parametrize("operation", ALGORITHMS)
def test_no_bytes_cost_latencies_alone(operation: str) -> None:
    for group in (alone(8, MESSAGES), Group(4, 2, INSIDE, BETWEEN)):
        for one in predictions(group, 0, operation, memory=1e9):
            assert one.cost.wire == one.cost.kernels == 0
            assert one.seconds == one.cost.latency > 0


@pytest.mark.parametrize("operation", ALGORITHMS)
@pytest.mark.parametrize("memory", [math.inf, 1e10])
def test_more_takes_longer(operation: str, memory: float) -> None:
    """More bytes, a longer latency, a narrower link: never less time, by any algorithm."""
    group = Group(4, 4, INSIDE, BETWEEN)
    sizes = [0, 1, 1e3, 1e5, 1e6, 3e6, 1e7, 1e8, 1e9]
    by_size = [predictions(group, n, operation, memory=memory) for n in sizes]
    for smaller, larger in pairwise(by_size):
        for one, other in zip(smaller, larger, strict=True):
            assert one.seconds <= other.seconds, one.algorithm
    for worse in (
        replace(group, between=replace(BETWEEN, latency=1e-4, gap=1e-5)),
        replace(group, between=replace(BETWEEN, bandwidth=1e8)),
        replace(group, inside=replace(INSIDE, bandwidth=1e8, latency=1e-4, gap=1e-5)),
        replace(group, neighbours=3),
    ):
        for n in (1e3, 1e7):
            found = predictions(worse, n, operation, memory=memory)
            for one, other in zip(predictions(group, n, operation), found, strict=True):
                assert one.seconds <= other.seconds, one.algorithm


def test_more_ranks_take_longer() -> None:
    """By the best algorithm, up to thousands; powers of two, as else a rank too many can cost more than one more."""
    for link in (MESSAGES, OVERLAPPING):
        for n in (8, 1e6, 1e9):
            times = [predict(alone(2**i, link), n).seconds for i in range(14)]
            assert times == sorted(times)


def test_the_best_is_the_fastest() -> None:
    """One shot of few bytes, trees of few bytes and many ranks; bandwidth of many bytes."""
    for p, n, expected in (
        (2, 8, "one_shot"),
        (512, 8, "recursive_doubling"),
        (4, 1e9, "two_shot"),
    ):
        group = alone(p, OVERLAPPING)
        best = predict(group, n)
        assert best.algorithm == expected
        assert best.seconds == min(one.seconds for one in predictions(group, n))
    large = predict(alone(8, MESSAGES), 1e10)
    assert large.busbw == pytest.approx(MESSAGES.bandwidth, rel=0.01)


# ---- compression


@pytest.mark.parametrize("p", [2, 3, 8])
@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8", "int8"])
def test_what_advise_says(name: str, p: int) -> None:
    """Both are one model: without latencies the wire takes as long, and kernels by the same formula."""
    advice = advise([torch.zeros(512, 512)], 1e9, world_size=p, compressions=[name])[1]
    link = Link(1e9, 0.0)
    one = predict(
        alone(p, link), 4 * 512 * 512, algorithm="two_shot", compression=name, memory=1e10
    )
    assert one.cost.wire == pytest.approx(advice.seconds_wire)
    feedback = name in ("fp8", "int8")
    value = core.Codec("fp16" if name == "fp16" else "bf16").value_bytes if not feedback else 1
    rates = Rates.of_memory(1e10, value, feedback)
    assert one.cost.kernels == pytest.approx(rates.seconds(512 * 512, p))


def test_what_kernels_read_and_write() -> None:
    """int8 of three ranks, by hand: 2/3 of all values encoded and decoded, a third summed."""
    rates = Rates.of_memory(1.0, 1, feedback=True)
    assert (rates.encode, rates.decode, rates.more) == (4 + 8 + 1, 1 + 4, 1)
    assert rates.reduce == 4 + 1 + 8 + 1 + 4
    assert rates.seconds(3, 3) == pytest.approx(2 * (13 + 5) + 18 + 1)
    assert rates.seconds(3, 1) == 0


def test_compression_pays_on_slow_links_alone() -> None:
    slow, fast = (alone(8, Link(bandwidth, 1e-6)) for bandwidth in (1e8, 1e12))
    for group, pays in ((slow, True), (fast, False)):
        plain = predict(group, 1e8, memory=1e11)
        packed = predict(group, 1e8, memory=1e11, compression="int8")
        assert (packed.seconds < plain.seconds) == pays
        assert packed.wire_bytes == pytest.approx(1e8 / 4, rel=0.02)


# ---- fitting


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring", "halving_doubling"])
@pytest.mark.parametrize("p", [2, 6])
def test_a_link_is_found_again(algorithm: str, p: int) -> None:
    """From the times of two sizes, and of more."""
    for sizes in ((1e4, 1e6), (1e3, 1e5, 1e7)):
        times = [seconds("all_reduce", algorithm, alone(p, OVERLAPPING), n) for n in sizes]
        samples = [Sample(n, t, algorithm) for n, t in zip(sizes, times, strict=True)]
        found = fit_link(samples, p, gap_share=0.2)
        assert found.bandwidth == pytest.approx(OVERLAPPING.bandwidth)
        assert found.latency == pytest.approx(OVERLAPPING.latency)
        assert found.gap == pytest.approx(OVERLAPPING.gap)


def test_a_latency_below_zero_is_none() -> None:
    """Where large messages are slower than small ones foretell."""
    found = fit_link([Sample(1e6, 1.0, "ring"), Sample(2e6, 2.2, "ring")], 2)
    assert found.latency == 0
    assert 1e6 / 1.1 < found.bandwidth < 1e6


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "at least two samples"),
        ([(1e6, 1.0)], "at least two samples"),
        ([(1e6, 1.0), (1e6, 2.0)], "tell latency and bandwidth not apart"),
        ([(1e3, 2.0), (1e6, 1.0)], "no link fits"),
        ([(1e3, 0.0), (1e6, 1.0)], "must be positive"),
    ],
)
def test_what_cannot_be_fitted(samples: list[tuple[float, float]], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        fit_link([Sample(n, t, "ring") for n, t in samples], 2)
    with pytest.raises(InvalidArgument, match="fit another algorithm"):
        fit_link([Sample(1e3, 1.0, "tree"), Sample(1e6, 2.0, "tree")], 4)


# ---- steps


def test_the_pipelines_bubble() -> None:
    """Against 1F1B's and GPipe's own order, in units of one microbatch's forward and backward."""
    for stages in (1, 2, 4, 7):
        for microbatches in (1, 3, 4, 16):
            ends = [0.0] * stages  # GPipe: all forward, then all backward, which take twice as long
            done = [[0.0] * microbatches for _ in range(stages)]
            for m in range(microbatches):
                for s in range(stages):
                    ends[s] = max(ends[s], done[s - 1][m] if s else 0.0) + 1
                    done[s][m] = ends[s]
            for m in range(microbatches):
                for s in reversed(range(stages)):
                    ends[s] = max(ends[s], done[s + 1][m] if s + 1 < stages else 0.0) + 2
                    done[s][m] = ends[s]
            idle = 1 - 3 * microbatches / max(ends)
            assert bubble(stages, microbatches) == pytest.approx(idle)


def test_buckets_leave_while_backward_goes_on() -> None:
    """By hand: the second waits for the link, the third for backward."""
    buckets = [Bucket(1.0, 3.0), Bucket(2.0, 1.0), Bucket(6.0, 2.5)]
    found = drain(buckets, 6.0)
    assert found.spans == ((1.0, 4.0), (4.0, 5.0), (6.0, 8.5))
    assert (found.end, found.exposed) == (8.5, 2.5)
    after = drain(buckets, 6.0, overlap=False)
    assert after.spans[0] == (6.0, 9.0)
    assert after.exposed == 6.5
    assert drain([], 6.0).exposed == 0
    assert drain([Bucket(1.0, 0.5)], 6.0).exposed == 0


def test_buckets_are_filled_as_ddp_does() -> None:
    """The first one is small, and the parameter that fills a bucket closes it."""
    assert buckets_of([3, 3, 3, 3, 3], 6, 1) == [[0], [1, 2], [3, 4]]
    assert buckets_of([3, 3, 3, 3], 5) == [[0, 1], [2, 3]]
    assert buckets_of([], 5) == []
    torchs, _ = torch.distributed._compute_bucket_assignment_by_size(
        [torch.zeros(n) for n in (100, 300, 100, 500, 50, 50)], [400, 1600]
    )
    assert buckets_of([400, 1200, 400, 2000, 200, 200], 1600, 400) == torchs


JOB = Job(7e9, 32, 4096, 2048, microbatches=4)
CLUSTER = Cluster(16, 8, LINKS["nvlink4"], LINKS["8xib400"], 3e12)


def test_a_step_by_hand() -> None:
    """Computation, tensor parallelism and the bubble add up."""
    job = replace(JOB, tensor=4, pipeline=2, overlap=False)
    step = predict_step(job, CLUSTER)
    assert step.data == 16
    assert step.compute == pytest.approx(4 * 6 * 7e9 * 2048 / 8 / 4e14)
    one = predict(Group(1, 4, LINKS["nvlink4"], LINKS["8xib400"]), 2048 * 4096 * 2, memory=3e12)
    assert step.tensor == pytest.approx(4 * 4 * 16 * one.seconds)
    busy = step.compute + step.tensor + step.pipeline
    assert step.bubble / (step.bubble + busy) == pytest.approx(1 / 5)
    assert step.hidden == pytest.approx(0)
    gradients = 4 * 7e9 / 8
    count = math.ceil(gradients / job.bucket_bytes)
    group = Group(8, 2, LINKS["nvlink4"], LINKS["8xib400"], 4)
    assert step.exposed == pytest.approx(
        count * predict(group, gradients / count, memory=3e12).seconds
    )
    assert step.tokens == 16 * 4 * 2048
    assert step.efficiency == pytest.approx(step.compute / step.seconds)


def test_overlap_and_compression_shorten_a_step() -> None:
    slow = replace(CLUSTER, between=LINKS["eth100"])
    none, overlapped, packed = (
        predict_step(replace(JOB, **change), slow)
        for change in ({"overlap": False}, {}, {"compression": "int8"})
    )
    assert packed.seconds < overlapped.seconds < none.seconds
    assert none.compute == overlapped.compute == packed.compute
    assert overlapped.hidden > 0
    alone_ = predict_step(JOB, Cluster())
    assert alone_.seconds == alone_.compute


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (8, 1, (1, 8, 1)),
        (4, 1, (1, 4, 1)),
        (16, 1, (2, 8, 1)),
        (16, 8, (16, 1, 8)),
        (16, 4, (8, 2, 4)),
        (2, 4, (1, 2, 1)),
        (1, 16, (1, 1, 8)),
        (2, 16, (2, 1, 8)),
    ],
)
def test_where_groups_lie(size: int, stride: int, expected: tuple[int, int, int]) -> None:
    """Hosts, ranks on each, and how many groups share a host's link."""
    group = CLUSTER.group(size, stride)
    assert (group.hosts, group.local, group.neighbours) == expected


def test_curves_reach_ten_thousand_ranks() -> None:
    points = curve(CLUSTER, 10_000, 2**26, "fp8", {"plain": JOB, "split": replace(JOB, tensor=8)})
    assert [p.ranks for p in points] == [*(8 * 2**i for i in range(11)), 10_000]
    assert hosts_up_to(8, 8) == [1]
    assert {name for p in points for name in p.ways} == {*ALGORITHMS["all_reduce"], "fp8"}
    best = [point.best.seconds for point in points[:-1]]
    assert best == sorted(best)
    lines = table(points).splitlines()
    assert len(lines) == 2 + len(points)
    assert lines[-1].startswith("| 10000 | 1250 | ")


# ---- bad input


BAD: list[tuple[Any, str]] = [
    (lambda: Link(0, 1e-6), "bandwidth must be positive"),
    (lambda: Link(math.nan, 1e-6), "bandwidth must be positive"),
    (lambda: Link(1e9, -1), "latency must be 0 or more"),
    (lambda: Link(1e9, math.inf), "latency must be 0 or more"),
    (lambda: Link(1e9, 1e-6, 2e-6), "gap must lie between"),
    (lambda: Group(0, 1, MESSAGES, MESSAGES), "must be positive"),
    (lambda: Cluster(0, 1), "must be positive"),
    (lambda: Cluster(memory=0), "memory must be positive"),
    (lambda: CLUSTER.group(2, 3), "do not lie alike"),
    (lambda: CLUSTER.group(3, 4), "do not lie alike"),
    (lambda: CLUSTER.group(2, 12), "do not lie alike"),
    (lambda: predict(alone(2, MESSAGES), -1), "bytes must be 0 or more"),
    (lambda: predict(alone(2, MESSAGES), math.inf), "bytes must be 0 or more"),
    (lambda: predict(alone(2, MESSAGES), math.nan), "bytes must be 0 or more"),
    (lambda: predict(alone(2, MESSAGES), 1, memory=0), "memory must be positive"),
    (lambda: predict(alone(2, MESSAGES), 1, operation="gossip"), "unknown operation 'gossip'"),
    (lambda: predict(alone(2, MESSAGES), 1, algorithm="rings"), "unknown algorithm 'rings'"),
    (lambda: predict(alone(2, MESSAGES), 1, compression="zip"), "unknown compression 'zip'"),
    (
        lambda: predict(alone(2, MESSAGES), 1, operation="broadcast", compression="int8"),
        "only an all_reduce is compressed",
    ),
    (lambda: bubble(0, 1), "must be positive"),
    (lambda: buckets_of([1.0], 0), "bytes must be positive"),
    (lambda: replace(JOB, parameters=0), "parameters must be positive"),
    (lambda: replace(JOB, flops=math.inf), "flops must be positive"),
    (lambda: replace(JOB, pipeline=3), "32 layers do not divide into 3"),
    (lambda: predict_step(replace(JOB, tensor=3), CLUSTER), "128 ranks do not divide"),
    (lambda: hosts_up_to(7, 8), "fewer than one host's 8"),
]


@pytest.mark.parametrize(("call", "words"), BAD, ids=[words for _, words in BAD])
def test_refusals(call: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        call()


# ---- the command


def test_figures_with_units() -> None:
    assert [read_bytes(t) for t in ("8", "64K", "1.5M", "1G")] == [8, 65536, 1.5 * 2**20, 2**30]
    assert [read_rate(t) for t in ("1e9", "25GB", "200Gbit", "3T")] == [1e9, 25e9, 25e9, 3e12]
    assert [read_seconds(t) for t in ("5us", "1.5ms", "2s", "3 ns")] == [
        pytest.approx(t) for t in (5e-6, 1.5e-3, 2, 3e-9)
    ]
    assert read_link("1Gbit,1ms,0s,half") == Link(1.25e8, 1e-3, 0.0, False)
    assert read_link("eth25") is LINKS["eth25"]
    assert [say_seconds(s) for s in (0, 1.5e-6, 0.0123, 4)] == ["0 us", "1.5 us", "12.3 ms", "4 s"]
    for read, text in ((read_bytes, "64X"), (read_bytes, "-1"), (read_rate, "1e999"), (read_seconds, ""),
                       (read_link, "1"), (read_link, "1,2,3,4"), (read_link, "0,1us")):  # fmt: skip
        with pytest.raises(InvalidArgument):
            read(text)


def test_a_collective_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = tmp_path / "plan.json"
    words = ["collective", "--bytes", "1M", "--hosts", "4", "--between", "1Gbit,100us", "--json"]
    assert main([*words, str(record)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all_reduce of 1048576 bytes, 4 ranks:"
    names = [line.split("|")[1].strip() for line in lines[4:]]
    assert set(names) == {*ALGORITHMS["all_reduce"]} - {"hierarchical"}
    found = json.loads(record.read_text())
    assert [one["algorithm"] for one in found] == names
    assert [one["seconds"] for one in found] == sorted(one["seconds"] for one in found)
    ring_ = next(one for one in found if one["algorithm"] == "ring")
    assert ring_["seconds"] == pytest.approx(6 * (1e-4 + 2**18 / 1.25e8))


def test_a_step_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = tmp_path / "step.json"
    words = "step --hosts 2 --ranks-per-host 8 --inside nvlink4 --tensor 4 --pipeline 2 --microbatches 8"
    assert main([*words.split(), "--json", str(record)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("16 ranks: data 2 x tensor 4 x pipeline 2;")
    assert "| pipeline bubble |" in printed
    found = json.loads(record.read_text())
    parts = ("compute", "tensor", "pipeline", "bubble", "exposed")
    assert found["seconds"] == pytest.approx(sum(found[name] for name in parts))


def test_a_curve_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    words = ["scale", "--ranks", "64", "--ranks-per-host", "8", "--compression", "int8", "--plot"]
    assert main([*words, str(picture)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "required: COMMAND"),
        ("gossip", "invalid choice: 'gossip'"),
        ("collective --bytes 64X", "'64X' is no number of bytes"),
        ("collective --between fast", "'fast' is no link"),
        ("collective --between 0,1us", "bandwidth must be positive"),
        ("collective --hosts 0", "'0' is no positive whole number"),
        ("collective --hosts 1.5", "'1.5' is no positive whole number"),
        ("collective --operation broadcast --compression int8", "only an all_reduce is compressed"),
        ("step --tensor 3", "1 ranks do not divide"),
        ("step --parameters=-7e9", "'-7e9' is no positive number"),
        ("step --flops nan", "'nan' is no positive number"),
        ("step --pipeline 2 --hosts 2 --layers 3", "3 layers do not divide"),
        ("scale --ranks 4 --ranks-per-host 8", "fewer than one host's 8"),
        ("collective --json /nowhere/plan.json", "/nowhere/plan.json cannot be written"),
        ("scale --ranks 4 --plot /nowhere/plan.png", "/nowhere/plan.png cannot be written"),
        ("scale --ranks 4 --plot plan.xyz", "xyz is no kind of picture"),
    ],
)
def test_bad_words_are_refused_in_a_line(
    words: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words.split())
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.startswith("pycomm.plan: ")
    assert said.count("\n") == 1


def test_the_command_explains_itself() -> None:
    command = [sys.executable, "-m", "pycomm.plan", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for word in ("units:", "examples:", "exit status:", "powers of 1024", *LINKS):
        assert word in done.stdout


# ---- the comparison


@pytest.mark.long
def test_the_comparison_runs(tmp_path: Path) -> None:
    """All of it, with few sizes; how near the predictions come is not asked of a busy machine, which may spoil some."""
    links = "300" if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc") else ""
    record = tmp_path / "plan.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "plan.py"), "--links", links]
    command += ["--hosts", "2,3", "--repeats", "2", "--most", "65536", "--models", "gpt"]
    done = subprocess.run(
        [*command, "--json", str(record)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(record.read_text())
    places = {row["where"] for row in rows} | {"shared memory"}
    assert places == {"shared memory", *(f"{n} hosts, {links} Mbit/s" for n in (2, 3) if links)}
    for spoilt, first in (
        ("left out 8 B", "8 B"),
        ("left out 64 KB", "64 KB"),
        ("left out 48 MB", "48 MB"),
    ):
        is_there = any(
            row["what"] == f"{first}, {shot}" for row in rows for shot in ("one_shot", "two_shot")
        )
        assert is_there != (spoilt in done.stdout), first
    assert all(row["predicted"] > 0 and min(row["seconds"]) > 0 for row in rows)
    if links:  # 4 MiB and more of gradients cannot come sooner than the link lets them
        steps = [row["seconds"][1] for row in rows if row["what"].startswith("step of deep")]
        assert len(steps) == 2
        assert min(steps) > 33.5e6 / 37.5e6 * 0.9
    assert "within 20 %" in done.stdout
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False).stdout
    assert not links or "switch" not in names
