"""Links from measurements: latency and bandwidth by least squares."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pycomm.errors import InvalidArgument
from pycomm.plan.algorithms import seconds_of
from pycomm.plan.cluster import Group, Link

_FREE = Link(math.inf, 0.0)
_CHUNKED = {("all_reduce", "tree"), ("broadcast", "ring")}  # by the link's own figures


@dataclass(frozen=True)
class Sample:
    """A measured collective: `bytes` as predict() counts them."""

    bytes: float
    seconds: float
    algorithm: str
    operation: str = "all_reduce"


def fit_link(samples: Iterable[Sample], world_size: int, gap_share: float = 1.0) -> Link:
    """The link of `world_size` equal ranks on which the model comes nearest to the samples, by relative squares.

    Two samples are met exactly, if some latency and bandwidth above 0 do so; sums are in it, so predict with infinite
    memory. gap_share: the gap by the latency. Raises InvalidArgument for fewer than two samples, for two of one size,
    and where larger messages take less time.
    """
    rows = [_row(sample, world_size, gap_share) for sample in samples]
    if len(rows) < 2:
        raise InvalidArgument(f"a link is fitted to at least two samples, not to {len(rows)}")
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        raise InvalidArgument("the samples tell latency and bandwidth not apart; take two sizes")
    latency = (a * bb - b * ab) / determinant
    inverse = (b * aa - a * ab) / determinant
    if latency < 0:  # large messages are slower than small ones foretell: bytes alone
        latency, inverse = 0.0, b / bb
    if inverse <= 0:
        raise InvalidArgument(
            f"no link fits the samples (latency {latency:.3g} s, {inverse:.3g} s per byte); "
            "measure again, or sizes that are further apart"
        )
    return Link(1 / inverse, latency, gap_share * latency)


def _row(sample: Sample, world_size: int, gap_share: float) -> tuple[float, float]:
    """How many latencies and how many bytes go into the sample, by its seconds."""
    if not sample.seconds > 0:
        raise InvalidArgument(f"a sample's seconds must be positive: {sample.seconds}")
    if (sample.operation, sample.algorithm) in _CHUNKED:
        raise InvalidArgument(f"{sample.algorithm} cuts chunks by the link: fit another algorithm")
    group = Group(1, world_size, _FREE, _FREE)
    of_one = replace(group, inside=Link(math.inf, 1.0, gap_share))
    latencies = seconds_of(sample.operation, sample.algorithm, of_one, sample.bytes).latency
    of_bytes = replace(group, inside=Link(1.0, 0.0))
    bytes = seconds_of(sample.operation, sample.algorithm, of_bytes, sample.bytes).wire
    return latencies / sample.seconds, bytes / sample.seconds
