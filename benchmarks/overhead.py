"""What watching costs: an 8-byte all-reduce with the header check and the flight recorder, and without.

    python benchmarks/overhead.py

Two ranks, each with three communicators: as users have it, without the flight recorder, and also without the comparison
of headers. They take turns within every repeat; ratios are of one repeat, and the median [quartiles] of these is shown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from ranks import quartiles

from pycomm import Communicator
from pycomm.config import config
from pycomm.extension import core
from pycomm.rendezvous import MOST_HEAP_BYTES, create_communicator

VARIANTS = ("as users have it", "no recorder", "no recorder, no header check")


def communicators(rank: int, store: dist.Store) -> list[Communicator]:
    """One of each variant."""
    plain = create_communicator(dist.PrefixStore("a", store), rank, 2)
    silent = create_communicator(
        dist.PrefixStore("b", store), rank, 2, settings=replace(config(), records=0)
    )
    return [plain, silent, unchecked(rank, dist.PrefixStore("c", store))]


def unchecked(rank: int, store: dist.Store) -> Communicator:
    """One that compares no headers, which no setting gives."""
    timeout = timedelta(minutes=1)
    if rank != 0:
        return core.join_shm(store.get("offer").decode(), rank, timeout)
    settings = config()
    offer = core.ShmOffer(
        2,
        slot_bytes=settings.slot_bytes,
        slots=settings.slots,
        streaming=settings.streaming,
        spin_polls=settings.spin_polls,
        heap_bytes=min(settings.heap_bytes, MOST_HEAP_BYTES // 2),
        channel_bytes=settings.channel_bytes,
        single_copy=settings.single_copy,
        records=0,
        liveness=settings.liveness,
        check_headers=False,
    )
    store.set("offer", offer.address)
    return offer.accept(timeout)


def measure(rank: int, path: str, repeats: int, calls: int, answers: multiprocessing.Queue) -> None:
    """One rank: nanoseconds a call, per repeat and variant."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    variants = communicators(rank, dist.FileStore(path, 2))
    tensor = torch.ones(2)
    rows = []
    for repeat in range(repeats + 2):
        row = [0.0] * len(variants)
        for turn in range(len(variants)):
            which = (turn + repeat) % len(variants)
            variants[which].barrier()
            began = time.perf_counter()
            for _ in range(calls):
                variants[which].all_reduce(tensor)
            row[which] = (time.perf_counter() - began) / calls * 1e9
        rows.append(row)
    if rank == 0:
        answers.put(rows[2:])


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=2000, help="repeats (2000)")
    parser.add_argument("--calls", type=int, default=100, help="calls per repeat and variant (100)")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        ranks = [
            context.Process(target=measure, args=(rank, path, args.repeats, args.calls, answers))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        rows = answers.get(timeout=600)
        for process in ranks:
            process.join()
    print(f"8-byte all_reduce, 2 ranks, {args.repeats} repeats of {args.calls} calls\n")
    print("| variant | median | against the last |\n|---|---:|---:|")
    for index, name in enumerate(VARIANTS):
        ratios = [row[index] / row[-1] for row in rows]
        low, middle, high = quartiles(ratios)
        time_of = median(row[index] for row in rows)
        print(f"| {name} | {time_of:.0f} ns | {middle:.3f} [{low:.3f}-{high:.3f}] |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
