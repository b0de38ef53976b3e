"""What ranks check through torch.distributed: collectives, streams, graphs, compression, DDP and an error's words.

    torchrun --nproc-per-node 2 tests/gpu/gpu_ranks.py                # several ranks on one GPU need NCCL 2.30
    torchrun --nproc-per-node 2 tests/gpu/gpu_ranks.py --device cpu   # the same checks on shared memory

Ends with 1 if a rank finds a difference, which it prints. tests/gpu/run.sh runs it on one rank and on two.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.extension import core

COUNTS: Final = (0, 1, 17, 1025, 70_001, 3_000_000)
CODECS: Final = (("fp16", 0), ("fp16", 256), ("bf16", 0), ("fp8_e4m3", 256), ("int8", 256))
ALGORITHMS: Final = ("one_shot", "two_shot", "ring")
#: Clock cycles that a GPU is kept busy for, so that what does not wait for it is noticed.
BUSY: Final = 50_000_000

# Older torches have the older names alone.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Check = Callable[["Ranks"], Iterator[str]]


class Ranks:
    """This rank, and where its tensors are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def own(self, count: int, rank: int | None = None) -> torch.Tensor:
        """Whole numbers, others on every rank; ranks 0 to 7 add up to numbers that float16 holds."""
        who = self.rank if rank is None else rank
        return ((torch.arange(count) + 3 * who) % 64).float().to(self.device)

    def all(self, count: int) -> torch.Tensor:
        """Every rank's, a row each."""
        return torch.stack([self.own(count, rank) for rank in range(self.world_size)])

    def keep_busy(self) -> None:
        """Puts work on the current stream that takes a while."""
        if self.device.type == "cuda":
            torch.cuda._sleep(BUSY)


def collectives(ranks: Ranks) -> Iterator[str]:
    """Every one, with sizes from none to many chunks."""
    n, rank = ranks.world_size, ranks.rank
    for count in COUNTS:
        own, rows = ranks.own(count), ranks.all(count)
        for op, expected in (
            (dist.ReduceOp.SUM, rows.sum(0)),
            (dist.ReduceOp.AVG, rows.sum(0) / n),
            (dist.ReduceOp.MAX, rows.amax(0)),
        ):
            got = own.clone()
            dist.all_reduce(got, op)
            yield from different(f"all_reduce {op} of {count}", got, expected)
        got = own.clone()
        dist.broadcast(got, n - 1)
        yield from different(f"broadcast of {count}", got, rows[-1])
        gathered = torch.full_like(rows, -1)
        all_gather_single(gathered.view(-1), own)
        yield from different(f"all_gather of {count}", gathered, rows)
        part = torch.full_like(own, -1)
        reduce_scatter_single(part, rows.view(-1) + rank)
        yield from different(f"reduce_scatter of {count}", part, n * own + sum(range(n)))
        swapped = torch.full_like(rows, -1)
        dist.all_to_all_single(swapped, own.expand(n, count).contiguous())
        yield from different(f"all_to_all of {count}", swapped, rows)
        got = torch.full_like(own, -1)
        receive = dist.P2POp(dist.irecv, got, (rank - 1) % n)
        send = dist.P2POp(dist.isend, own, (rank + 1) % n)
        if n > 1:
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            yield from different(f"messages of {count}", got, rows[rank - 1])
    dist.barrier()


def streams(ranks: Ranks) -> Iterator[str]:
    """An operation waits for what is before it on its stream, and what is behind wait() for the operation."""
    count = 1 << 20
    expected = ranks.all(count).sum(0)
    for async_op in (False, True):
        tensor = torch.zeros(count, device=ranks.device)
        ranks.keep_busy()
        tensor.copy_(ranks.own(count))
        work = dist.all_reduce(tensor, async_op=async_op)
        if work is not None:
            work.wait()
        copy = tensor.clone()
        tensor.fill_(-1)
        yield from different(f"all_reduce between other work, async {async_op}", copy, expected)
    works = [
        dist.all_reduce(ranks.own(count), async_op=True) for _ in range(20)
    ]  # nobody keeps these tensors
    for work in works:
        work.wait()


def graphs(ranks: Ranks) -> Iterator[str]:
    """A captured all_reduce gives new sums with every replay."""
    if ranks.device.type != "cuda":
        return
    n, count = ranks.world_size, 4099
    tensor = ranks.own(count)
    dist.all_reduce(tensor)  # makes the communicator
    tensor.copy_(ranks.own(count))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    yield from different("three replays", tensor, ranks.all(count).sum(0) * n**2)


def compression(ranks: Ranks) -> Iterator[str]:
    """Results and residuals have the bits of the same call on the CPU; lists of several dtypes, too."""
    here = pycomm.get_communicator(None, ranks.device.type)
    there = pycomm.get_communicator()
    for name, block in CODECS:
        codec = core.Codec(name, block)
        for algorithm in ALGORITHMS:
            for count in (1, 1025, 300_001):
                chance = torch.Generator().manual_seed(count + ranks.rank)
                values = torch.randn(count, generator=chance)
                parts = [values.clone(), values.half(), values.bfloat16()]
                kept = torch.randn(3 * count, generator=chance) / 64
                moved, moved_kept = (
                    [part.to(ranks.device, copy=True) for part in parts],
                    kept.to(ranks.device, copy=True),
                )
                how: dict[str, Any] = {"factor": 0.5, "algorithm": algorithm, "seed": 7}
                there.compressed_all_reduce(parts, codec, residual=kept, **how)
                here.compressed_all_reduce(moved, codec, residual=moved_kept, **how)
                what = f"{algorithm} of 3 x {count} as {name}:{block}"
                for part, other in zip(parts, moved, strict=True):
                    yield from different(what, other, part)
                yield from different(f"{what}, residuals", moved_kept, kept)


def gradients(ranks: Ranks) -> Iterator[str]:
    """DDP's, plain and compressed: the mean of whole numbers, exactly, while the GPU has more to do."""
    for compressor in (None, "fp16", "bf16"):
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 8)).to(ranks.device)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        ddp = pycomm.DistributedDataParallel(model, bucket_cap_mb=1e-3, compression=compressor)
        for step in range(3):
            ddp.zero_grad()
            data = ranks.own(64).view(4, 16) % 2
            ranks.keep_busy()
            ddp(data).sum().backward()
            own = [torch.zeros_like(p) for p in model.parameters()]
            for rank in range(ranks.world_size):
                whole = model(ranks.own(64, rank).view(4, 16) % 2).sum()
                for total, part in zip(
                    own, torch.autograd.grad(whole, list(model.parameters())), strict=True
                ):
                    total += part / ranks.world_size
            for number, (parameter, expected) in enumerate(
                zip(model.parameters(), own, strict=True)
            ):
                assert parameter.grad is not None
                what = f"gradient {number} of step {step}, compression {compressor}"
                yield from different(what, parameter.grad, expected)


def mismatch(ranks: Ranks) -> Iterator[str]:
    """Ranks that call different sizes are told so, each in the words of both; the last check, for it ends the group."""
    if ranks.world_size == 1:
        return
    group: Any = dist.new_group(timeout=timedelta(seconds=60))
    try:
        dist.all_reduce(torch.ones(5 + ranks.rank, device=ranks.device), group=group)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
            dist.all_reduce(torch.ones(1, device=ranks.device), group=group)
        yield "ranks with different sizes got no error"
    except pycomm.MismatchError as error:
        if "count=5" not in str(error) or "count=6" not in str(error):
            yield f"a mismatch is told as: {error}"


CHECKS: Final[tuple[Check, ...]] = (
    collectives,
    streams,
    graphs,
    compression,
    gradients,
    mismatch,
)


def different(what: str, got: torch.Tensor, expected: torch.Tensor) -> Iterator[str]:
    """A line if they differ."""
    got, expected = got.cpu(), expected.cpu()
    if not torch.equal(got, expected):
        wrong = (got != expected).flatten().nonzero()
        where = int(wrong[0]) if len(wrong) else 0
        yield (
            f"{what}: {len(wrong)} of {got.numel()} elements differ, first {where}: "
            f"{got.flatten()[where]}, not {expected.flatten()[where]}"
        )


def run(device: torch.device, checks: tuple[Check, ...] = CHECKS) -> int:
    """All checks on this rank; prints what is wrong and returns how much."""
    ranks = Ranks(device)
    number = 0
    for check in checks:
        found = list(check(ranks))
        number += len(found)
        for line in found[:10]:
            print(f"WRONG: rank {ranks.rank}: {line}", flush=True)
        print(f"rank {ranks.rank}: {check.__name__}: {len(found)} differences", flush=True)
    return number


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(cuda)")
    kind = parser.parse_args().device
    device = torch.device(kind)
    if kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(local)
        device = torch.device(kind, local)
    dist.init_process_group("pycomm")
    wrong = run(device)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
