"""The device checks: are the CUDA kernels right, and how fast are they. tests/gpu/run.sh builds and runs this.

    python tests/gpu/gpu_checks.py [--quick | --tiny] [--stand-in]

Ends with 0: all well, 1: a kernel is wrong, 2: a kernel is slower than its share of a copy, 3: no GPU. The figures go
to gpu.json in ${OUT:-runs/gpu}. `--stand-in` lets the CPU's kernels play the device, to test this program where there
is none; its speeds mean nothing and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import gpu_bandwidth
import gpu_cases
import gpu_peer
import torch
from gpu_device import Gpu, StandIn, load_core, why_not

RIGHT, WRONG, SLOW, NO_DEVICE = range(4)
MOST_WORDS: Final = 20  # differences that are printed
LARGE: Final = (
    2**32 + 2**20 + 77
)  # elements: 13 GB for fp16 tensor, wire and result and as much for a copy
QUICK_COUNTS: Final = (0, 1, 65, 1025)


def differences(core: Any, device: StandIn, quick: bool, large: int) -> Iterator[list[str]]:
    """What is wrong, case by case."""
    for case in gpu_cases.cases(QUICK_COUNTS if quick else gpu_cases.COUNTS):
        yield gpu_cases.Comparison(core, device, case).differences()
    for dtype, ops in core.support_table().items():
        for op in ops:
            for sources in gpu_cases.SOURCES:
                for count in gpu_cases.REDUCE_COUNTS[:: 2 if quick else 1]:
                    yield gpu_cases.reduce_differences(core, device, dtype, op, sources, count)
    yield from gpu_peer.differences(device, quick)
    yield gpu_cases.large_differences(core, device, large)


def tiny_differences(core: Any, device: StandIn) -> Iterator[list[str]]:
    """A few cases of every kernel, for tools that slow them down a hundred times."""
    for case in islice(gpu_cases.cases(QUICK_COUNTS), 0, None, 37):
        yield gpu_cases.Comparison(core, device, case).differences()
    for dtype, ops in core.support_table().items():
        yield gpu_cases.reduce_differences(core, device, dtype, ops[0], 3, 1025)


def check(device: StandIn, cases: Iterator[list[str]]) -> dict[str, Any]:
    """Runs all cases; prints and returns what came out."""
    begin, done, wrong = time.monotonic(), 0, list[str]()
    for words in cases:
        done += 1
        wrong += words
        for line in words[: max(0, MOST_WORDS - len(wrong) + len(words))]:
            print(f"WRONG: {line}", flush=True)
    seconds = time.monotonic() - begin
    print(f"{done} cases on {device.name}: {len(wrong)} differences, {seconds:.0f} s", flush=True)
    return {"cases": done, "differences": wrong, "seconds": seconds}


def bandwidth(core: Any, device: StandIn, count: int, repeats: int) -> list[gpu_bandwidth.Row]:
    """Measures and prints."""
    rows = gpu_bandwidth.Bench(core, device, count).measure(repeats)
    print(gpu_bandwidth.HEADER)
    for row in rows:
        print(row.words(), flush=True)
    return rows


def run(core: Any, device: StandIn, quick: bool, out: Path) -> int:
    """All checks; returns the exit status."""
    real = isinstance(device, Gpu)
    large = LARGE if real and not quick else 2**17 + 77
    checked = check(device, differences(core, device, quick, large))
    if real:
        torch.cuda.empty_cache()
    rows = bandwidth(core, device, 2**27 if real else 2**14, 31 if real else 3)
    report = {
        "device": device.name,
        "stand_in": not real,
        "torch": torch.__version__,
        "built_with": core.cuda,
        "correctness": checked,
        "bandwidth": [row.record() for row in rows],
        "target": gpu_bandwidth.TARGET,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(report, indent=1))
    slow = [row.name for row in rows if row.shares()[1] < gpu_bandwidth.TARGET]
    if checked["differences"]:
        print("FAILED: kernels are wrong")
        return WRONG
    if real and slow:
        print(f"FAILED: below {gpu_bandwidth.TARGET:.0%} of a copy: {', '.join(slow)}")
        return SLOW
    print("all right" if real else "all right, but for speeds, which were not of a device")
    return RIGHT


def run_as_asked(options: argparse.Namespace, kind: type[StandIn]) -> int:
    """All checks or a few of them."""
    core = load_core()
    device = kind(core)
    if options.tiny:
        checked = check(device, tiny_differences(core, device))
        return WRONG if checked["differences"] else RIGHT
    return run(core, device, options.quick, Path(os.environ.get("OUT", "runs/gpu")))


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer lengths")
    parser.add_argument("--tiny", action="store_true", help="a few cases, for compute-sanitizer")
    parser.add_argument("--stand-in", action="store_true", help="the CPU's kernels as the device")
    parser.add_argument("--probe", action="store_true", help="print what to build for, or end with 3")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.stand_in:
        return run_as_asked(options, StandIn)
    if (reason := why_not()) is not None:
        print(f"no CUDA device: {reason}; nothing was checked", file=sys.stderr)
        return NO_DEVICE
    if options.probe:
        major, minor = torch.cuda.get_device_capability()
        print(f"{major}{minor}")
        return RIGHT
    if load_core().cuda is None:
        print("pycomm._core was built without CUDA: run tests/gpu/run.sh", file=sys.stderr)
        return NO_DEVICE
    return run_as_asked(options, Gpu)


if __name__ == "__main__":
    sys.exit(main())
