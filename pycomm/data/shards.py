"""Who gets which samples of an epoch: an order that all ranks can compute, and how it is split over them."""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pycomm.errors import InvalidArgument

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Over whom samples are split. batch_size: of a rank on average; None if only whole epochs are to be balanced.

    speeds: of each rank, in any unit; None if they are alike.
    """

    ranks: int
    batch_size: int | None = None
    speeds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "batch_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidArgument(f"{name} must be a whole number of 1 or more: {value!r}")
        if self.speeds is None:
            return
        if len(self.speeds) != self.ranks:
            raise InvalidArgument(f"{len(self.speeds)} speeds are given for {self.ranks} ranks")
        if not all(0 < speed < math.inf for speed in self.speeds):
            raise InvalidArgument(f"speeds must be positive: {self.speeds}")

    def shares(self, count: int) -> list[int]:
        """How many of so many samples each rank gets: in proportion to speeds, and at least one if there are enough."""
        speeds = self.speeds or (1.0,) * self.ranks
        exact = [count * speed / sum(speeds) for speed in speeds]
        shares = [int(share) for share in exact]
        by_remainder = sorted(range(self.ranks), key=lambda rank: shares[rank] - exact[rank])
        for rank in by_remainder[: count - sum(shares)]:
            shares[rank] += 1
        while 0 in shares and max(shares) > 1:
            shares[shares.index(max(shares))] -= 1
            shares[shares.index(0)] += 1
        return shares


@dataclass(frozen=True)
class Passed:
    """What was done of an epoch before it was resumed: steps by ranks that were laid out like this.

    A step is a batch of each rank, or one sample if there are no batches.
    """

    layout: Layout
    steps: int


class Shards:
    """The samples 0 to count - 1, split anew every epoch; the same for the same arguments in every process."""

    def __init__(
        self,
        count: int,
        *,
        shuffle: bool,
        pad: bool,
        drop_last: bool,
        costs: Sequence[float] | None,
        classes: Sequence[int] | None,
    ) -> None:
        """pad: repeat some samples so that all ranks get equally many; drop_last: leave some out for that."""
        if pad and drop_last:
            raise InvalidArgument(
                "pad and drop_last exclude each other: either repeats or leaves out"
            )
        if costs is not None and classes is not None:
            raise InvalidArgument("samples are balanced by costs or by classes, not by both")
        self.count, self._shuffle = count, shuffle
        self._pad, self._drop_last = pad, drop_last
        self._costs = _column("costs", costs, count, np.float64)
        self._classes = _column("classes", classes, count, np.int64)
        if self._costs is not None and not (np.isfinite(self._costs) & (self._costs >= 0)).all():
            raise InvalidArgument("costs of samples must be numbers of 0 or more")

    def describe(self) -> dict[str, object]:
        """All that ranks must have in common."""
        return {
            "count": self.count,
            "shuffle": self._shuffle,
            "pad": self._pad,
            "drop_last": self._drop_last,
            "costs": None if self._costs is None else zlib.crc32(self._costs.tobytes()),
            "classes": None if self._classes is None else zlib.crc32(self._classes.tobytes()),
        }

    def split(
        self, seed: int, epoch: int, layout: Layout, passed: Sequence[Passed] = ()
    ) -> list[list[Indices]]:
        """An epoch's global batches, each with the samples of every rank; one batch if the layout has no batch size."""
        rest = self._order(seed, epoch)
        for before in passed:
            done = self._done(self._windows(rest, before.layout), before)
            rest = rest[~np.isin(rest, done)]
        return self._windows(rest, layout)

    def _order(self, seed: int, epoch: int) -> Indices:
        if not self._shuffle:
            return np.arange(self.count, dtype=np.int64)
        keys = np.random.PCG64([seed, epoch]).random_raw(self.count)
        return np.argsort(keys, kind="stable").astype(np.int64)

    def _done(self, windows: list[list[Indices]], before: Passed) -> Indices:
        if before.layout.batch_size is None:
            parts = [part[: before.steps] for window in windows for part in window]
        else:
            parts = [part for window in windows[: before.steps] for part in window]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _windows(self, order: Indices, layout: Layout) -> list[list[Indices]]:
        size = layout.ranks * layout.batch_size if layout.batch_size else max(len(order), 1)
        found = []
        for number, start in enumerate(range(0, len(order), size)):
            window = order[start : start + size]
            over = len(window) % layout.ranks
            if layout.batch_size and self._drop_last and len(window) < size:
                break
            if over and self._drop_last:
                window = window[:-over]
            missing = layout.ranks - over if over and self._pad else 0
            shares = layout.shares(len(window) + missing)
            # Repeats go to different ranks, behind what they have anyway.
            by_share = sorted(range(layout.ranks), key=lambda rank: (shares[rank], rank))
            short = by_share[layout.ranks - missing :]
            for rank in short:
                shares[rank] -= 1
            parts = self._split(window, shares, layout.speeds, number)
            for rank, again in zip(short, np.resize(order, missing), strict=True):
                parts[rank] = np.append(parts[rank], again)
            found.append(parts)
        return found

    def _split(
        self, window: Indices, shares: list[int], speeds: tuple[float, ...] | None, number: int
    ) -> list[Indices]:
        """One part per rank, each in the window's order."""
        if self._costs is not None:
            owner = _by_cost(self._costs[window], shares, speeds)
        elif self._classes is not None:
            classes = self._classes[window]
            known, inverse = np.unique(classes, return_inverse=True)
            # Another class comes first in every batch: the first one's odd samples go to the first ranks.
            turned = (inverse - number) % len(known) if len(known) else inverse
            owner = np.empty(len(window), np.int64)
            owner[np.argsort(turned, kind="stable")] = _dealt(shares)
        else:
            owner = _dealt(shares)
        return [window[owner == rank] for rank in range(len(shares))]


def _dealt(shares: list[int]) -> Indices:
    """Ranks in turn, those with more samples more often: at any point each has its part of what was dealt."""
    if max(shares) - min(shares) <= 1 and sorted(shares, reverse=True) == shares:
        return np.arange(sum(shares)) % len(shares)
    at = np.concatenate([(np.arange(share) + 0.5) / max(share, 1) for share in shares])
    ranks = np.repeat(np.arange(len(shares)), shares)
    return ranks[np.lexsort((ranks, at))]


def _by_cost(
    costs: npt.NDArray[np.float64], shares: list[int], speeds: tuple[float, ...] | None
) -> Indices:
    """The most expensive sample first, each to the rank that would be done first and may have more."""
    owner = np.empty(len(costs), np.int64)
    left = list(shares)
    idle = [(0.0, rank) for rank, share in enumerate(shares) if share]
    for index in np.argsort(-costs, kind="stable").tolist():
        load, rank = heapq.heappop(idle)
        owner[index] = rank
        left[rank] -= 1
        if left[rank]:
            speed = speeds[rank] if speeds else 1.0
            heapq.heappush(idle, (load + float(costs[index]) / speed, rank))
    return owner


def _column(
    name: str, values: Sequence[float] | None, count: int, dtype: type
) -> npt.NDArray[Any] | None:
    if values is None:
        return None
    column: npt.NDArray[Any] = np.asarray(values, dtype=dtype)
    if column.shape != (count,):
        raise InvalidArgument(
            f"{name} must be one number for each of {count} samples: {column.shape}"
        )
    return column
