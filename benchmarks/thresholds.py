"""Measures what the thresholds of csrc/algorithms/choose.h decide, on this machine.

Four comparisons, each interleaved in one run, as ratios of medians:

  algorithms  one_shot, two_shot and ring all_reduce over sizes: where the fastest one changes
  streaming   slots written through the caches or past them, with the flag latency beside it
  single copy private tensors copied straight from rank to rank or through slots
  slots       bytes of a slot

Ranks are processes, each on a core of its own where there are enough.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from words import format_bytes, format_time

from pycomm import Communicator, create_communicator
from pycomm.config import Config

ALGORITHMS = ("one_shot", "two_shot", "ring")
SMALL = [1 << k for k in range(12, 21)]
LARGE = [64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20]
MIDDLE = [1 << k for k in range(16, 24)]
SLOT_BYTES = [64 << 10, 128 << 10, 256 << 10, 512 << 10]
SAMPLE_BYTES = 16 << 20  # moved by one sample's calls, about

EXAMPLES = """\
units: sizes in bytes with K, M as powers of 1024; times per all_reduce of float32, of rank 0.

examples:
  python benchmarks/thresholds.py
  python benchmarks/thresholds.py --ranks 4 --repeats 21
"""

Calls = dict[str, Callable[[torch.Tensor], object]]
Times = dict[str, dict[int, float]]  # microseconds by variant and size


def measure(communicator: Communicator, calls: Calls, sizes: list[int], repeats: int) -> Times:
    """Medians of each variant's calls, one sample of each in turn."""
    medians: Times = {name: {} for name in calls}
    for size in sizes:
        tensor = torch.zeros(size // 4)
        number = max(1, SAMPLE_BYTES // (size + 16384))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                communicator.barrier()
                call(tensor)
                began = time.perf_counter()
                for _ in range(number):
                    call(tensor)
                samples[name].append((time.perf_counter() - began) / number)
        for name in calls:
            medians[name][size] = 1e6 * statistics.median(samples[name])
    return medians


def rank_main(rank: int, world_size: int, port: int, repeats: int) -> None:
    """One rank: all comparisons; rank 0 shows them."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= world_size:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)

    def communicator(name: str, **settings: object) -> Communicator:
        prefixed = dist.PrefixStore(name, store)
        chosen = Config(**settings)  # type: ignore[arg-type]
        return create_communicator(prefixed, rank, world_size, timedelta(minutes=2), chosen)

    plain = communicator("plain")
    flags = [plain.flag_latency_ns()]
    algorithms: Calls = {name: partial(plain.all_reduce, algorithm=name) for name in ALGORITHMS}
    by_algorithm = measure(plain, algorithms, SMALL, repeats)
    streams: Calls = {
        name: communicator(name, streaming=name, single_copy="never").all_reduce
        for name in ("never", "always")
    }
    by_stream = measure(plain, streams, LARGE, repeats)
    flags.append(plain.flag_latency_ns())
    copies: Calls = {
        name: communicator(f"once {name}", single_copy=name).all_reduce
        for name in ("never", "always")
    }
    by_copy = measure(plain, copies, MIDDLE, repeats)
    flags.append(plain.flag_latency_ns())
    slots: Calls = {
        format_bytes(size): communicator(f"slot{size}", slot_bytes=size).all_reduce
        for size in SLOT_BYTES
    }
    by_slot = measure(plain, slots, LARGE, repeats)
    flags.append(plain.flag_latency_ns())
    if rank == 0:
        latencies = ", ".join(f"{flag:.0f}" for flag in flags)
        show(f"all_reduce by algorithm, {world_size} ranks", by_algorithm)
        show(f"slots past the caches (flags {latencies} ns)", by_stream)
        show("copied once", by_copy)
        show("bytes of a slot", by_slot)


def show(title: str, times: Times) -> None:
    """Times by size and variant, the fastest in bold."""
    table = Table(title=title)
    table.add_column("size", justify="right")
    for name in times:
        table.add_column(name, justify="right")
    for size in next(iter(times.values())):
        best = min(by_size[size] for by_size in times.values())
        cells = [format_time(by_size[size]) for by_size in times.values()]
        marks = [by_size[size] == best for by_size in times.values()]
        row = [f"[bold]{c}[/]" if m else c for c, m in zip(cells, marks, strict=True)]
        table.add_row(format_bytes(size), *row)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--repeats", type=int, default=15, help="samples of each (default 15)")
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank_main, args=(rank, args.ranks, store.port, args.repeats))
        for rank in range(args.ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
