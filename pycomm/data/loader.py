"""A DataLoader whose workers live beside process groups."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pycomm.data.sampler import BalancedBatchSampler, ShardedSampler
from pycomm.errors import InvalidArgument


def loader(
    dataset: Dataset[Any],
    sampler: ShardedSampler | BalancedBatchSampler,
    batch_size: int | None = None,
    *,
    workers: int = 0,
    **options: Any,
) -> DataLoader[Any]:
    """A DataLoader of this rank's samples. options: more of its arguments.

    Its workers are no forks of this process, which has threads that communicate, and would get copies of their locks
    as they are at that moment, of sockets and of GPU contexts: they are started by a server process that has none. So
    the dataset must be picklable, and the program's main module importable (`if __name__ == "__main__":`). They live
    for all epochs. Their random numbers (torch, random, numpy) follow from the sampler's seed, the rank and the
    worker, so that no two draw the same.
    """
    if isinstance(sampler, BalancedBatchSampler):
        if batch_size is not None:
            raise InvalidArgument("the batch sampler has a batch_size of its own: leave it out")
        options |= {"batch_sampler": sampler}
    else:
        size = sampler.batch_size if batch_size is None else batch_size
        if size is None:
            raise InvalidArgument("give batch_size, here or to the sampler")
        if sampler.batch_size not in (None, size):
            raise InvalidArgument(
                f"the sampler balances batches of {sampler.batch_size} on rank {sampler.rank}, not of {size}: "
                "leave out batch_size here"
            )
        options |= {"batch_size": size, "sampler": sampler}
    if workers:
        options = {"multiprocessing_context": "forkserver", "persistent_workers": True, **options}
        options["worker_init_fn"] = _Start(options.get("worker_init_fn"))
    drawn = np.random.SeedSequence([sampler.seed, sampler.rank]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(drawn[0]) >> 1)
    return DataLoader(dataset, num_workers=workers, **{"generator": generator, **options})


class _Start:
    """What a worker does first; torch has seeded itself and `random` by then, and numpy in newer versions only."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        seed = torch.initial_seed()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if self._then:
            self._then(worker)
