"""Going on after a failure: the survivors' own group, without a restart of any process."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pycomm.backend import get_communicator
from pycomm.errors import InvalidArgument, MismatchError, PeerDiedError
from pycomm.extension import core

if TYPE_CHECKING:
    from pycomm._core import Communicator

log = logging.getLogger("pycomm")

#: Seconds between two tries to agree with the other survivors.
PAUSE = 0.02


def shrink(
    ranks: Sequence[int] | None = None, *, timeout: timedelta = timedelta(seconds=60)
) -> dist.ProcessGroup:
    """Collective over ``ranks``: the default process group becomes one of these alone; returns it.

    ``ranks`` are ranks of the present default group, whose CPU backend must be pycomm, and the same on all of them;
    None means those whose processes have not ended and that have not left, and agrees on them. The new ranks count from
    0 in the same order. What is under way on the old group, on any rank, ends with AbortedError, so a rank that waits
    there comes here, too. All other process groups are destroyed, as by ``destroy_process_group``; make them anew, and
    wrap models in DistributedDataParallel anew (or give it the new group by ``_update_process_group``).

    The ranks find each other through the old group's memory: it does not matter whether the Store's host is alive. A
    new Store is served by the new rank 0. ``timeout`` is for all of this; that of operations stays the group's.

    Raises InvalidArgument if this rank is not among ``ranks``; MismatchError if the survivors give different ranks;
    PeerDiedError if one of them dies meanwhile (call it again without that rank); TimeoutError if one does not come.
    """
    began = time.monotonic()
    old = get_communicator()
    if ranks is not None and not ranks:
        raise InvalidArgument(f"rank {old.rank}: shrink needs at least one rank")
    deadline = began + timeout.total_seconds()
    while True:
        wanted = sorted(ranks) if ranks is not None else old.living_ranks()
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        try:
            new = core.shrink(old, wanted, left)
            break
        except (MismatchError, PeerDiedError):
            # Survivors may learn one after another that one more is gone.
            if ranks is not None or time.monotonic() > deadline:
                raise
            time.sleep(PAUSE)
    store = _serve_store(new, timeout)
    backend = dist.get_backend_config()
    dist.destroy_process_group()
    dist.init_process_group(
        backend, store=store, rank=new.rank, world_size=new.world_size, timeout=old.timeout
    )
    new.shutdown()
    log.warning(
        "rank %d of %d goes on as rank %d of %d: the group shrank to ranks %s in %.2f s",
        *(old.rank, old.world_size, new.rank, new.world_size, wanted, time.monotonic() - began),
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def _serve_store(communicator: Communicator, timeout: timedelta) -> dist.Store:
    """A Store in rank 0's process, for all ranks of the communicator: they share a host and its loopback."""
    rank, world_size = communicator.rank, communicator.world_size
    port = torch.zeros(1, dtype=torch.int64)
    store: dist.Store
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False
        )
        port[0] = store.port
    communicator.broadcast(port, 0, timeout=timeout)
    if rank != 0:
        store = dist.TCPStore(
            "127.0.0.1",
            int(port),
            world_size,
            is_master=False,
            timeout=timeout,
            wait_for_workers=False,
        )
    return store
