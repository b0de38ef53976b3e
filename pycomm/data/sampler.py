"""Samplers for DataLoader: every rank's part of a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from pycomm.data.agreement import agree_on_seed, check_same, place
from pycomm.data.shards import Indices, Layout, Passed, Shards
from pycomm.errors import InvalidArgument


class _Shared:
    """What both samplers have: an epoch, its split over ranks, where it was resumed."""

    def __init__(
        self,
        shards: Shards,
        num_replicas: int | None,
        rank: int | None,
        seed: int | None,
        batch_size: int | None,
        speeds: Sequence[float] | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.num_replicas, self.rank, self._is_grouped = place(num_replicas, rank, group)
        self._group, self._shards = group, shards
        self.seed = agree_on_seed(seed, self._is_grouped, group)
        self.epoch = 0
        self._layout = Layout(self.num_replicas, batch_size, tuple(speeds) if speeds else None)
        self._passed: list[Passed] = []
        self._split: list[list[Indices]] | None = None
        self._check()

    def set_epoch(self, epoch: int) -> None:
        """Shuffles anew, and starts at the beginning unless this epoch was resumed. Collective in a group."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise InvalidArgument(f"epoch must be a whole number of 0 or more: {epoch!r}")
        if epoch != self.epoch:
            self.epoch, self._passed, self._split = epoch, [], None
        self._check()

    def state_dict(self, steps: int) -> dict[str, Any]:
        """To go on in the middle of an epoch, on any number of ranks: every sample comes once in it all the same.

        steps: batches that every rank has trained on since the epoch began or was resumed; samples, of a ShardedSampler
        without a batch size. They are the caller's to count, as a DataLoader's workers draw ahead.
        """
        if self._layout.batch_size is None and self._layout.speeds and steps:
            raise InvalidArgument(
                "ranks of different speeds have no step in common: give batch_size"
            )
        passed = [*self._passed, Passed(self._layout, steps)] if steps else self._passed
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "samples": self._shards.describe(),
            "passed": [
                (one.layout.ranks, one.layout.batch_size, one.layout.speeds, one.steps)
                for one in passed
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where state_dict() was called. Collective in a group."""
        ours = self._shards.describe()
        for name, value in state["samples"].items():
            if ours[name] != value:
                raise InvalidArgument(
                    f"this state is of a sampler with {name} {value!r}, this one has {ours[name]!r}"
                )
        self.seed, self.epoch, self._split = state["seed"], state["epoch"], None
        self._passed = [
            Passed(Layout(ranks, batch_size, tuple(speeds) if speeds else None), steps)
            for ranks, batch_size, speeds, steps in state["passed"]
        ]
        self._check()

    def _check(self) -> None:
        if not self._is_grouped:
            return
        notes = {"seed": self.seed, "epoch": self.epoch, **self._shards.describe()}
        notes |= {"batch_size": self._layout.batch_size, "speeds": self._layout.speeds}
        notes["steps done"] = [(one.layout, one.steps) for one in self._passed]
        check_same("the sampler", notes, self._group)

    def _parts(self) -> list[Indices]:
        """This rank's samples, batch by batch."""
        if self._split is None:
            self._split = self._shards.split(self.seed, self.epoch, self._layout, self._passed)
        return [window[self.rank] for window in self._split]


class ShardedSampler(_Shared, Sampler[int]):
    """Every rank's samples of a dataset, for DataLoader's `sampler`.

    With shuffle=False, for evaluation, each sample comes exactly once, and numbers differ by one at most; with
    shuffle=True, for training, all ranks get equally many, which a few repeated samples at the end may make up for.
    `pad` chooses this; drop_last leaves a few out instead.

    Ranks get equal numbers of samples. costs (one per sample, as its length) also makes their sums alike; classes
    (one per sample) the numbers of each class; speeds (one per rank) makes numbers, and sums, proportional. With
    batch_size that holds in every step, and `batch_size` is what this rank's DataLoader must take; else over the
    epoch.

    num_replicas, rank: the group's if None; then making a sampler, set_epoch() and load_state_dict() are collective and
    raise MismatchError on all ranks if these would not split alike. seed: None lets the group's first rank draw one.
    """

    def __init__(
        self,
        data: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int | None = 0,
        *,
        pad: bool | None = None,
        drop_last: bool = False,
        batch_size: int | None = None,
        costs: Sequence[float] | None = None,
        classes: Sequence[int] | None = None,
        speeds: Sequence[float] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if pad is None:
            pad = shuffle and not drop_last and not (speeds and batch_size is None)
        if pad and speeds and batch_size is None:
            raise InvalidArgument("ranks of different speeds get different numbers: leave out pad")
        shards = Shards(
            len(data), shuffle=shuffle, pad=pad, drop_last=drop_last, costs=costs, classes=classes
        )
        _Shared.__init__(self, shards, num_replicas, rank, seed, batch_size, speeds, group)

    @property
    def batch_size(self) -> int | None:
        """Of this rank's batches, by its speed."""
        size = self._layout.batch_size
        return None if size is None else self._layout.shares(size * self.num_replicas)[self.rank]

    def __iter__(self) -> Iterator[int]:
        for part in self._parts():
            yield from part.tolist()

    def __len__(self) -> int:
        return sum(map(len, self._parts()))


class BalancedBatchSampler(_Shared, Sampler[list[int]]):
    """Every rank's batches, for DataLoader's `batch_sampler`, of samples that cost differently: with equal sums.

    costs: one per sample, as its length. batch_size: samples of a rank; with speeds (one per rank) on average, and
    sums are proportional to speeds. All ranks get the same number of batches: what is left of the samples makes a
    smaller last one, with a few repeated if pad (so it is with shuffle), without that one if drop_last. The rest is
    as for ShardedSampler.
    """

    def __init__(
        self,
        costs: Sequence[float],
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int | None = 0,
        *,
        pad: bool | None = None,
        drop_last: bool = False,
        speeds: Sequence[float] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if pad is None:
            pad = shuffle and not drop_last
        shards = Shards(
            len(costs), shuffle=shuffle, pad=pad, drop_last=drop_last, costs=costs, classes=None
        )
        _Shared.__init__(self, shards, num_replicas, rank, seed, batch_size, speeds, group)

    def __iter__(self) -> Iterator[list[int]]:
        for part in self._parts():
            if len(part):
                yield part.tolist()

    def __len__(self) -> int:
        return sum(len(part) > 0 for part in self._parts())

    def weights(self) -> list[float]:
        """What to multiply this rank's mean losses by, batch by batch, so that ranks' average is that of all samples.

        Not 1 where ranks have different numbers of samples.
        """
        self._parts()
        assert self._split is not None
        counts = [[len(part) for part in window] for window in self._split]
        return [one[self.rank] * self.num_replicas / sum(one) for one in counts if one[self.rank]]
