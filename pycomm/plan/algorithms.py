"""The seconds of a collective by each algorithm: latencies, bytes over bandwidths, and sums.

Every algorithm is written as the phases that one rank goes through; `seconds` of a phase is the one place where a link
is asked. Sources, named below by letters:

- T: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 19 (2005).
- P: Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69 (2009).
- S: Sanders, Speck, Traeff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel Computing 35
  (2009); NCCL has its double binary trees since 2.4.
- M: Mikami et al.: Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash (2018), "2D-Torus all-reduce".
- N: NCCL's user guide (rings and trees, cut into chunks), and nccl-tests' PERFORMANCE.md, whose factors for busbw are
  the bytes that the rings below send.

n: bytes (of an all_gather all outputs', of a reduce_scatter all inputs'), p: ranks, lg: logarithm to base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pycomm.compression.cost import share
from pycomm.errors import InvalidArgument
from pycomm.plan.cluster import Group, Link


@dataclass(frozen=True)
class Cost:
    """Seconds, by what they are spent on."""

    latency: float = 0.0
    wire: float = 0.0
    kernels: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all."""
        return self.latency + self.wire + self.kernels

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.latency + other.latency, self.wire + other.wire, self.kernels + other.kernels
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(self.latency * times, self.wire * times, self.kernels * times)


def phase(
    link: Link,
    steps: float,
    sent: float,
    *,
    messages: int = 1,
    flows: int = 1,
    both_ways: bool = True,
) -> Cost:
    """Of `steps` one after the other, in each of which a rank sends `sent` bytes in so many messages at once.

    flows: ranks that use the same end of the link at the same time. both_ways: it receives as much meanwhile.
    """
    if steps <= 0 or messages < 1:
        return Cost()
    crowd = flows * (2 if both_ways and not link.duplex else 1)
    start = link.latency + (messages - 1) * link.each_further
    return Cost(steps * start, steps * sent * crowd / link.bandwidth)


def _slower(*costs: Cost) -> Cost:
    """Of things that happen at the same time."""
    return max(costs, key=lambda cost: cost.seconds)


def _levels(group: Group, steps: int) -> tuple[int, int]:
    """How many of the steps whose distances double stay in a host, and how many leave it."""
    inside = min(steps, group.local.bit_length() - 1) if group.hosts > 1 else steps
    return inside, steps - inside


def _ring(group: Group, steps: int, sent: float) -> Cost:
    """In every step everybody sends to the next rank; one rank of each host to another host.

    A piece on its way meets fast and slow links; but no link takes pieces faster than one after the other.
    """
    levels = [(group.hosts if group.hosts > 1 else 0, group.between, group.neighbours)]
    levels.append((group.world_size - levels[0][0], group.inside, 1))
    around, queues = Cost(), []
    for hops, link, flows in levels:
        if hops:
            around += phase(link, hops, sent, flows=flows) * (steps / group.world_size)
            wire = phase(link, steps, sent, flows=flows).wire
            queues.append(Cost(steps * link.each_further, wire))
    return _slower(around, *queues)


def _everybody(group: Group, each: float) -> Cost:
    """Everybody sends `each` bytes to everybody else, at once."""
    near, far = group.local - 1, group.world_size - group.local
    flows = group.local * group.neighbours
    return _slower(
        phase(group.inside, 1, near * each, messages=near),
        phase(group.between, 1, far * each, messages=far, flows=flows),
    )


def _exchange(group: Group, step: int, steps: int, sent: float) -> Cost:
    """Step `step` of those whose distances double: everybody swaps with one partner."""
    if step < _levels(group, steps)[0]:
        return phase(group.inside, 1, sent)
    return phase(group.between, 1, sent, flows=group.local * group.neighbours)


def _fold(group: Group, sent: float) -> Cost:
    """A rank too many for a power of two sends to its neighbour, or gets the result from it."""
    if group.local > 1:
        return phase(group.inside, 1, sent, both_ways=False)
    return phase(group.between, 1, sent, flows=group.neighbours, both_ways=False)


def _lg(p: int) -> int:
    """Rounded up."""
    return (p - 1).bit_length()


# ---- all_reduce -----------------------------------------------------------------------------------------------------


def one_shot(group: Group, n: float, summed: float) -> Cost:
    """Everybody sends all it has to everybody, and sums: (p-1) n. csrc/algorithms/one_shot.h.

    With a gap of 0, one latency.
    """
    p = group.world_size
    return _everybody(group, n) + Cost(kernels=(p - 1) * n * summed)


def two_shot(group: Group, n: float, summed: float) -> Cost:
    """Everybody sums its shard of all, then sends it to all: 2 (p-1)/p n, as T's pairwise exchange, twice.

    csrc/algorithms/two_shot.h.
    """
    return reduce_scatter_two_shot(group, n, summed) + all_gather_one_shot(group, n, summed)


def ring(group: Group, n: float, summed: float) -> Cost:
    """2 (p-1) steps of n/p each; no algorithm sends fewer bytes (P)."""
    return reduce_scatter_ring(group, n, summed) + all_gather_ring(group, n, summed)


def recursive_doubling(group: Group, n: float, summed: float) -> Cost:
    """lg p swaps of all n (T); with p no power of two, one step more before and one after."""
    p = group.world_size
    steps = p.bit_length() - 1
    swaps = sum((_exchange(group, step, steps, n) for step in range(steps)), Cost())
    found = swaps + Cost(kernels=steps * n * summed)
    if p & (p - 1):
        found += _fold(group, n) + _fold(group, n) + Cost(kernels=n * summed)
    return found


def halving_doubling(group: Group, n: float, summed: float) -> Cost:
    """Rabenseifner's (T): swaps of n/2, n/4, ... and back, 2 lg p latencies and 2 (p-1)/p n.

    Halves go to the nearest partners, so that few bytes leave a host. With p no power of two, one step more of n before
    and one after.
    """
    p = group.world_size
    steps = p.bit_length() - 1
    found = Cost()
    for step in range(steps):
        half = n / 2 ** (step + 1)
        found += _exchange(group, step, steps, half) * 2 + Cost(kernels=half * summed)
    if p & (p - 1):
        found += _fold(group, n) + _fold(group, n) + Cost(kernels=n * summed)
    return found


def tree(group: Group, n: float, summed: float) -> Cost:
    """Two binary trees, each of which sums half and hands it down, chunk by chunk (S, N): 2 n, depth lg p.

    A rank is inside one tree and a leaf of the other, so it sends and receives 4 messages a chunk. The first chunk goes
    up and down, 2 lg p hops (lg rounded down), in each of which a parent takes two messages; the others follow. Chunks
    are of the best size. The ranks of a host are a chain below one that is in the trees.
    """
    p = group.world_size
    if p <= 2:
        return ring(group, n, summed)
    levels = []  # hops from top to bottom, link, groups that share it
    if group.hosts > 1:
        levels.append((group.hosts.bit_length() - 1, group.between, group.neighbours))
    if group.local > 1:
        hops = group.local - 1 if group.hosts > 1 else p.bit_length() - 1
        levels.append((hops, group.inside, 1))
    wholes = [2 * n * flows * (2 - link.duplex) / link.bandwidth for _, link, flows in levels]
    gap = max(link.each_further for _, link, _ in levels)
    down = sum(hops for hops, _, _ in levels)
    chunks = max(1, round(math.sqrt(down * max(wholes) / (4 * gap)))) if gap else 64
    found = Cost(4 * (chunks - 1) * gap, (chunks - 1) / chunks * max(wholes), n * summed)
    for (hops, link, _), whole in zip(levels, wholes, strict=True):
        found += Cost(2 * hops * link.latency, 2 * hops * whole / 2 / chunks)
    return found


def hierarchical(group: Group, n: float, summed: float) -> Cost:
    """Reduce-scatter in a host, all-reduce of n/local across hosts, all-gather in the host, each by the best way (M).

    All ranks of a host take part in the middle, and share its link.
    """
    return (
        best("reduce_scatter", group.of_a_host, n, summed)[1]
        + best("all_reduce", group.across, n / group.local, summed)[1]
        + best("all_gather", group.of_a_host, n, summed)[1]
    )


# ---- the others -----------------------------------------------------------------------------------------------------


def reduce_scatter_two_shot(group: Group, n: float, summed: float) -> Cost:
    """Everybody sends everybody its shard: (p-1)/p n (T: pairwise exchange)."""
    p = group.world_size
    return _everybody(group, n / p) + Cost(kernels=share(p) * n * summed)


def reduce_scatter_ring(group: Group, n: float, summed: float) -> Cost:
    """p-1 steps of n/p (P)."""
    p = group.world_size
    return _ring(group, p - 1, n / p) + Cost(kernels=share(p) * n * summed)


def recursive_halving(group: Group, n: float, summed: float) -> Cost:
    """Swaps of n/2, n/4, ...: lg p latencies, (p-1)/p n (T); with p no power of two, two steps more."""
    p = group.world_size
    steps = p.bit_length() - 1
    found = Cost()
    for step in range(steps):
        half = n / 2 ** (step + 1)
        found += _exchange(group, step, steps, half) + Cost(kernels=half * summed)
    if p & (p - 1):
        found += _fold(group, n) + _fold(group, n / p) + Cost(kernels=n * summed)
    return found


def reduce_scatter_hierarchical(group: Group, n: float, summed: float) -> Cost:
    """In every host, then the n/local of each rank across hosts."""
    return (
        best("reduce_scatter", group.of_a_host, n, summed)[1]
        + best("reduce_scatter", group.across, n / group.local, summed)[1]
    )


def all_gather_one_shot(group: Group, n: float, summed: float) -> Cost:
    """Everybody sends its n/p to everybody: (p-1)/p n."""
    return _everybody(group, n / group.world_size)


def all_gather_ring(group: Group, n: float, summed: float) -> Cost:
    """p-1 steps of n/p (T)."""
    return _ring(group, group.world_size - 1, n / group.world_size)


def all_gather_doubling(group: Group, n: float, summed: float) -> Cost:
    """Swaps of n/p, 2n/p, ...: lg p latencies, (p-1)/p n (T); with p no power of two, two steps more."""
    p = group.world_size
    steps = p.bit_length() - 1
    found = Cost()
    for step in range(steps):
        found += _exchange(group, steps - 1 - step, steps, n / 2 ** (steps - step))
    if p & (p - 1):
        found += _fold(group, n / p) + _fold(group, n)
    return found


def all_gather_hierarchical(group: Group, n: float, summed: float) -> Cost:
    """Across hosts, then in every host."""
    return (
        best("all_gather", group.across, n / group.local, summed)[1]
        + best("all_gather", group.of_a_host, n, summed)[1]
    )


def broadcast_tree(group: Group, n: float, summed: float) -> Cost:
    """A binomial tree: lg p times n (T); across hosts first."""
    far, near = _lg(group.hosts), _lg(group.local)
    return phase(
        group.between, far, n, flows=group.neighbours, both_ways=False
    ) + phase(group.inside, near, n, both_ways=False)  # fmt: skip


def broadcast_scatter(group: Group, n: float, summed: float) -> Cost:
    """A binomial scatter, then a ring all-gather: (lg p + p - 1) latencies, 2 (p-1)/p n (T: van de Geijn's)."""
    p = group.world_size
    link, flows = (group.between, group.neighbours) if group.hosts > 1 else (group.inside, 1)
    scatter = phase(link, _lg(p), share(p) * n / max(_lg(p), 1), flows=flows, both_ways=False)
    return scatter + all_gather_ring(group, n, summed)


def broadcast_ring(group: Group, n: float, summed: float) -> Cost:
    """From rank to rank in k chunks, of the best size (N): p - 1 hops of the first, and the others behind it."""
    far, near = group.hosts - 1, group.world_size - group.hosts
    hops = [(near, group.inside, 1), (far, group.between, group.neighbours)]
    wires = [phase(link, 1, n, flows=flows, both_ways=False).wire for _, link, flows in hops]
    slowest = max((wire for (many, _, _), wire in zip(hops, wires, strict=True) if many), default=0)
    gap = max((link.each_further for many, link, _ in hops if many), default=0)
    spread = sum(many * wire for (many, _, _), wire in zip(hops, wires, strict=True)) - slowest
    chunks = max(1, round(math.sqrt(max(spread, 0.0) / gap))) if gap else 64
    found = Cost((chunks - 1) * gap, (chunks - 1) / chunks * slowest)
    for (many, link, _), wire in zip(hops, wires, strict=True):
        found += Cost(many * link.latency, many * wire / chunks)
    return found


Algorithm = Callable[[Group, float, float], Cost]

#: By operation and name. Of group, bytes, and the seconds that it takes to add a byte.
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "one_shot": one_shot,
        "two_shot": two_shot,
        "ring": ring,
        "recursive_doubling": recursive_doubling,
        "halving_doubling": halving_doubling,
        "tree": tree,
        "hierarchical": hierarchical,
    },
    "reduce_scatter": {
        "two_shot": reduce_scatter_two_shot,
        "ring": reduce_scatter_ring,
        "recursive_halving": recursive_halving,
        "hierarchical": reduce_scatter_hierarchical,
    },
    "all_gather": {
        "one_shot": all_gather_one_shot,
        "ring": all_gather_ring,
        "recursive_doubling": all_gather_doubling,
        "hierarchical": all_gather_hierarchical,
    },
    "broadcast": {
        "tree": broadcast_tree,
        "scatter": broadcast_scatter,
        "ring": broadcast_ring,
    },
}


def seconds_of(operation: str, algorithm: str, group: Group, n: float, summed: float = 0.0) -> Cost:
    """By one algorithm. Raises InvalidArgument for unknown names and negative sizes."""
    if operation not in ALGORITHMS:
        raise InvalidArgument(f"unknown operation {operation!r}; known are {', '.join(ALGORITHMS)}")
    if algorithm not in ALGORITHMS[operation]:
        raise InvalidArgument(
            f"unknown algorithm {algorithm!r}; for {operation} known are "
            f"{', '.join(ALGORITHMS[operation])}"
        )
    if not 0 <= n < math.inf:
        raise InvalidArgument(f"bytes must be 0 or more: {n}")
    return ALGORITHMS[operation][algorithm](group, n, summed)


def every(operation: str, group: Group, n: float, summed: float = 0.0) -> dict[str, Cost]:
    """By all algorithms that make sense there: hierarchical ones need hosts of several ranks."""
    names = list(ALGORITHMS.get(operation, {"": None}))
    if min(group.hosts, group.local) == 1:
        names = [name for name in names if name != "hierarchical"]
    return {name: seconds_of(operation, name, group, n, summed) for name in names}


def best(operation: str, group: Group, n: float, summed: float = 0.0) -> tuple[str, Cost]:
    """The fastest algorithm, and what it costs."""
    found = every(operation, group, n, summed)
    name = min(found, key=lambda name: found[name].seconds)
    return name, found[name]
