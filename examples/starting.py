"""What the examples share: the start of ranks by torchrun, and whether ranks hold the same."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def threads_per_rank(ranks_here: int) -> int:
    """Share this machine's cores among its ranks."""
    return max(1, len(os.sched_getaffinity(0)) // ranks_here)


def start_ranks(script: str, ranks: int) -> int:
    """Run a script with this program's arguments once per rank, by torchrun; return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for sums in the same order
    try:
        torchrun(["--standalone", f"--nproc-per-node={ranks}", script, *sys.argv[1:]])
    except ChildFailedError:
        return 1  # torchrun has named the rank
    return 0


def count(text: str) -> int:
    """Parse an argument that must be a whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def ranks_that_differ(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None
) -> list[int]:
    """Return the ranks of a group whose tensors are not, bit for bit, those of its rank 0."""
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(tensor.detach().cpu().numpy().tobytes())
    mine = torch.tensor(list(sha256.digest()), dtype=torch.uint8)
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, mine, group=group)
    return [rank for rank, digest in enumerate(digests) if not torch.equal(digest, digests[0])]
