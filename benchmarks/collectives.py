"""pycomm's collectives on the CPU beside Gloo's, in one interleaved run.

Four variants of each call, on private ordinary tensors (all_reduce and broadcast in place):

  gloo                   dist.all_reduce(...) on a gloo group
  pycomm                 dist.all_reduce(...) on a pycomm group
  pycomm.Communicator    the communicator under that group, called directly
  fake (dispatch floor)  dist.all_reduce(...) on torch's fake backend, which moves nothing (to 64 B)

Every repeat times each variant once, in a shuffled order that all ranks share. A sample is as many
calls as fill the minimum time, after a barrier and one untimed call; its time is the slowest
rank's. Ratios are taken within a repeat. Results are checked for exact equality before anything
is timed.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import repeat
from pathlib import Path
from types import FrameType
from typing import Protocol

import report
import torch
import torch.distributed as dist
from report import COMMUNICATOR, FLOOR, GLOO, PYCOMM, Case, Row, Run
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
FLAG_PROBES = 5
FLOOR_BYTES = 64  # the dispatch floor is measured up to this size
MIN_REPEATS = 7
ROOT = 0

EXAMPLES = """\
units:
  sizes in bytes, with K, M, G as powers of 1024, of the whole buffer as in nccl-tests: all_gather's
  output, reduce_scatter's input. A size is rounded up to a whole number of elements for each rank.
  Bandwidths in GB/s of 1e9 bytes. Times per call, of the slowest rank.

examples:
  python benchmarks/collectives.py
  python benchmarks/collectives.py --ops all_reduce --sizes 8,1M,64M --check-bars
  python benchmarks/collectives.py --ranks 4 --ops all_gather,reduce_scatter --dtype bfloat16
"""

Call = Callable[[], object]


@dataclass(frozen=True)
class Settings:
    """What the command line asked for."""

    ops: list[str]
    sizes: list[int]
    dtype: str
    world_size: int
    repeats: int
    min_time_ms: float
    seed: int
    out: Path
    check_bars: bool
    rank_process: bool

    def to_json(self) -> dict[str, object]:
        hidden = ("out", "check_bars", "rank_process")
        return {name: value for name, value in asdict(self).items() if name not in hidden}


# ------------------------------------------------------------------------------------- command line


def parse_bytes(text: str) -> int:
    """'8' -> 8, '32K' -> 32768, '1M' -> 1048576."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"not a size in bytes: {text!r} (examples: 8, 32K, 1M)")
    return int(digits) * factor


def parse_sizes(text: str) -> list[int]:
    return sorted({parse_bytes(part) for part in text.split(",")})


def parse_ops(text: str) -> list[str]:
    ops = list(dict.fromkeys(text.split(",")))
    for op in ops:
        if op not in OPS:
            raise argparse.ArgumentTypeError(f"unknown operation {op!r} (known: {', '.join(OPS)})")
    return ops


def parse_arguments() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes to start, one thread each (default 2)")
    add("--ops", type=parse_ops, default=list(OPS), help=f"default {','.join(OPS)}")
    add("--sizes", type=parse_sizes, default="8,1K,32K,256K,1M,16M,64M", help="default %(default)s")
    add("--dtype", choices=DTYPES, default="float32", help="default float32")
    add("--repeats", type=int, default=9, help=f"at least {MIN_REPEATS} (default 9)")
    add("--min-time", type=float, default=30.0, help="least ms a sample lasts (default 30)")
    add("--seed", type=int, default=0, help="of the order within a repeat (default 0)")
    add("--out", type=Path, default=Path("runs/bench"), help="folder (default runs/bench)")
    add("--check-bars", action="store_true", help="exit 1 unless the speed bars hold")
    add("--rank-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    settings = Settings(
        ops=args.ops,
        sizes=args.sizes,
        dtype=args.dtype,
        world_size=args.ranks,
        repeats=args.repeats,
        min_time_ms=args.min_time,
        seed=args.seed,
        out=args.out,
        check_bars=args.check_bars,
        rank_process=args.rank_process,
    )
    if problem := problem_with(settings):
        parser.error(problem)
    return settings


def problem_with(settings: Settings) -> str | None:
    if settings.world_size < 1:
        return "--ranks: at least 1"
    if settings.repeats < MIN_REPEATS:
        return f"--repeats: at least {MIN_REPEATS}, or the spread means nothing"
    if settings.min_time_ms <= 0:
        return "--min-time: more than 0 ms"
    if settings.check_bars:
        missing = {bar.size_bytes for bar in report.BARS} - set(settings.sizes)
        applies = report.bars_apply("all_reduce", settings.dtype, settings.world_size)
        if missing or not applies or "all_reduce" not in settings.ops:
            return "--check-bars needs all_reduce, float32, --ranks 2 and sizes 8, 1M and 64M"
    return None


def launch(settings: Settings) -> int:
    """Start the ranks under torchrun and wait for them; signals are passed on."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(settings.world_size)]
    command += [str(Path(__file__).resolve()), *sys.argv[1:], "--rank-process"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    process = subprocess.Popen(command, env=environment)

    def forward(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    return process.wait()


# ----------------------------------------------------------------------------------------- variants


class Communicator(Protocol):
    """What is used of pycomm's."""

    def all_reduce(self, tensor: torch.Tensor, /) -> object: ...
    def broadcast(self, tensor: torch.Tensor, root: int, /) -> object: ...
    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, /) -> object: ...
    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, /) -> object: ...
    def flag_latency_ns(self) -> float: ...


@dataclass(frozen=True)
class Buffers:
    """What a call reads and writes; one tensor for the operations in place."""

    input: torch.Tensor
    output: torch.Tensor

    def clear(self) -> None:
        """Zeros: repeated sums stay finite, whatever the number of calls."""
        self.input.zero_()
        self.output.zero_()


@dataclass(frozen=True)
class Bench:
    """One rank's groups, and what it needs to time them."""

    settings: Settings
    rank: int
    groups: dict[str, dist.ProcessGroup]
    communicator: Communicator
    progress: Progress

    def variants(self, size_bytes: int) -> list[str]:
        floor = [FLOOR] * (FLOOR in self.groups and size_bytes <= FLOOR_BYTES)
        return [GLOO, PYCOMM, COMMUNICATOR, *floor]

    def flag_latency_ns(self) -> float:
        """The best of a few probes, as one that was preempted says nothing; 0 without a peer."""
        if self.settings.world_size == 1:
            return 0.0
        return min(self.communicator.flag_latency_ns() for _ in range(FLAG_PROBES))

    def advance(self) -> None:
        """Draws; so never inside a sample."""
        self.progress.advance(self.progress.task_ids[0])
        self.progress.refresh()


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def make_case(op: str, size_bytes: int, dtype: str, world_size: int) -> Case:
    """The size rounded up to a whole number of elements for each rank."""
    item_bytes = torch_dtype(dtype).itemsize
    count = math.ceil(size_bytes / (item_bytes * world_size)) * world_size
    return Case(op, count * item_bytes, count, dtype, world_size)


def make_call(bench: Bench, op: str, variant: str, buffers: Buffers) -> Call:
    """One call of the operation without arguments, at the least cost that Python allows."""
    source, target = buffers.input, buffers.output
    if variant == COMMUNICATOR:
        direct = bench.communicator
        calls: dict[str, Call] = {
            "all_reduce": partial(direct.all_reduce, target),
            "broadcast": partial(direct.broadcast, target, ROOT),
            "all_gather": partial(direct.all_gather_single, target, source),
            "reduce_scatter": partial(direct.reduce_scatter_single, target, source),
        }
    else:
        group = bench.groups[variant]
        calls = {
            "all_reduce": partial(dist.all_reduce, target, group=group),
            "broadcast": partial(dist.broadcast, target, ROOT, group=group),
            "all_gather": partial(dist.all_gather_single, target, source, group=group),
            "reduce_scatter": partial(dist.reduce_scatter_single, target, source, group=group),
        }
    return calls[op]


def make_buffers(case: Case) -> Buffers:
    """Touched pages throughout: `zeros` alone would map the same zero page again and again."""
    whole = torch.ones(case.count, dtype=torch_dtype(case.dtype))
    shard = torch.ones(case.count // case.world_size, dtype=whole.dtype)
    match case.op:
        case "all_gather":
            return Buffers(shard, whole)
        case "reduce_scatter":
            return Buffers(whole, shard)
    return Buffers(whole, whole)


# -------------------------------------------------------------------------------------- correctness


def pattern(count: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers that differ by rank and place; sums over 25 ranks are exact in any dtype."""
    return ((torch.arange(count, dtype=torch.int32) * 3 + rank * 7) % 11).to(dtype)


def expected(case: Case, rank: int) -> torch.Tensor:
    dtype, shard = torch_dtype(case.dtype), case.count // case.world_size
    if case.op == "broadcast":
        return pattern(case.count, ROOT, dtype)
    if case.op == "all_gather":
        return torch.cat([pattern(shard, peer, dtype) for peer in range(case.world_size)])
    total = torch.zeros(case.count, dtype=dtype)
    for peer in range(case.world_size):
        total += pattern(case.count, peer, dtype)
    return total if case.op == "all_reduce" else total[rank * shard : (rank + 1) * shard]


def is_exact(call: Call, buffers: Buffers, rank: int, want: torch.Tensor) -> bool:
    """One call with known inputs."""
    buffers.output.fill_(1)
    buffers.input.copy_(pattern(buffers.input.numel(), rank, buffers.input.dtype))
    call()
    exact = torch.equal(buffers.output, want)
    buffers.clear()
    return exact


def verify(rank: int, case: Case, calls: dict[str, Call], buffers: Buffers) -> None:
    """Every rank stops, and rank 0 names the culprits, unless each variant is exact everywhere."""
    want = expected(case, rank)
    for variant, call in calls.items():
        if variant == FLOOR:
            continue
        wrong = torch.zeros(case.world_size, dtype=torch.int64)
        wrong[rank] = not is_exact(call, buffers, rank, want)
        dist.all_reduce(wrong)
        if wrong.any():
            if rank == 0:
                what = f"{case.op} of {case.size_bytes} bytes of {case.dtype} through {variant}"
                where = f"on ranks {wrong.nonzero().flatten().tolist()}"
                print(f"wrong result: {what}, {where}", file=sys.stderr, flush=True)
            dist.barrier()  # the first to leave has the others killed
            raise SystemExit(1)


# ------------------------------------------------------------------------------------------- timing


def timed_us(call: Call, iterations: int) -> float:
    """Mean time of one call on this rank, after a barrier and one call that is not timed."""
    dist.barrier()
    call()
    start = time.perf_counter_ns()
    for _ in repeat(None, iterations):
        call()
    return (time.perf_counter_ns() - start) / iterations / 1e3


def rank_0_decides(value: int) -> int:
    decision = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(decision, 0)
    return int(decision)


def sample_us(call: Call, iterations: int, min_time_us: float) -> tuple[float, int]:
    """A sample that fills the minimum time on rank 0's clock, and the calls that it took.

    Shorter ones only warm up: they are thrown away, and tell how many calls are needed.
    """
    while True:
        time_us = timed_us(call, iterations)
        wanted = math.ceil(1.2 * min_time_us / time_us)
        filled = time_us * iterations >= min_time_us
        more = rank_0_decides(0 if filled else min(wanted, 8 * iterations))
        if not more:
            return time_us, iterations
        iterations = more


def slowest_rank(samples: Sequence[Sequence[float]]) -> list[list[float]]:
    """Each sample's maximum over the ranks."""
    matrix = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(matrix, dist.ReduceOp.MAX)
    result: list[list[float]] = matrix.tolist()
    return result


def measure(bench: Bench, case: Case) -> list[Row]:
    """The rows of one case."""
    settings, buffers = bench.settings, make_buffers(case)
    variants, min_time_us = bench.variants(case.size_bytes), settings.min_time_ms * 1e3
    calls = {variant: make_call(bench, case.op, variant, buffers) for variant in variants}
    verify(bench.rank, case, calls, buffers)

    flags = [bench.flag_latency_ns()]
    needed = {name: sample_us(call, 2, min_time_us)[1] for name, call in calls.items()}
    samples: dict[str, list[float]] = {variant: [] for variant in variants}
    iterations: dict[str, list[int]] = {variant: [] for variant in variants}
    order = random.Random(f"{settings.seed} {case.op} {case.size_bytes}")
    for _ in range(settings.repeats):
        for name in order.sample(variants, len(variants)):
            time_us, needed[name] = sample_us(calls[name], needed[name], min_time_us)
            samples[name].append(time_us)
            iterations[name].append(needed[name])
        bench.advance()
    flags.append(bench.flag_latency_ns())

    slowest = dict(zip(variants, slowest_rank([samples[name] for name in variants]), strict=True))
    return [
        report.make_row(case, name, iterations[name], slowest[name], slowest[GLOO], flags)
        for name in variants
    ]


# -------------------------------------------------------------------------------------------- ranks


def new_group(backend: str) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group


def open_groups() -> dict[str, dist.ProcessGroup]:
    """Gloo's is the default group; the fake backend is not public, and left out where missing."""
    dist.init_process_group(GLOO, timeout=timedelta(minutes=5))
    assert dist.group.WORLD is not None
    groups = {GLOO: dist.group.WORLD, PYCOMM: new_group(PYCOMM)}
    try:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401
    except ImportError:
        return groups
    return {**groups, FLOOR: new_group("fake")}


def open_progress(rank: int) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("repeats"),
        TimeElapsedColumn(),
        console=Console(quiet=rank != 0),
        auto_refresh=False,  # no drawing thread beside the timed one
        transient=True,
    )


def run_rank(settings: Settings) -> None:
    """Measure everything; rank 0 writes the JSON."""
    import pycomm  # here, because --help and the parent process do without it

    torch.set_num_threads(1)
    groups = open_groups()
    rank, world_size = dist.get_rank(), settings.world_size
    progress = open_progress(rank)
    bench = Bench(settings, rank, groups, pycomm.get_communicator(groups[PYCOMM]), progress)
    sizes = [(op, size_bytes) for op in settings.ops for size_bytes in settings.sizes]
    cases = dict.fromkeys(make_case(*size, settings.dtype, world_size) for size in sizes)
    rows: list[Row] = []
    gc.collect()
    gc.disable()
    clock = read_clock()
    with progress:
        task = progress.add_task("", total=len(cases) * settings.repeats)
        for case in cases:
            progress.update(task, description=f"{case.op} {report.format_bytes(case.size_bytes)}")
            progress.refresh()
            rows += (found := measure(bench, case))
            progress.console.print(summary(found), soft_wrap=True)
    others = others_share(clock, read_clock())
    if rank == 0:
        machine = describe_machine(getattr(pycomm, "__version__", "unknown"), others)
        Run(machine, settings.to_json(), rows).save(settings.out / "collectives.json")
    dist.barrier()
    dist.destroy_process_group()


def summary(rows: Sequence[Row]) -> str:
    """A line for one case, while the rest still runs."""
    times = [f"{row.variant} {report.format_time(row.time_us)}" for row in rows]
    head = f"{rows[0].op} {report.format_bytes(rows[0].size_bytes)}"
    return f"{head} ({report.format_flags(rows[0])}): {', '.join(times)}"


@dataclass(frozen=True)
class Clock:
    """Seconds: of the wall, of all CPUs at work (for anyone), and of this process at work."""

    wall: float
    machine: float
    process: float


def read_clock() -> Clock:
    user, nice, system, _idle, _iowait, *rest = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    ticks = user + nice + system + sum(rest)
    own = os.times()
    return Clock(own.elapsed, ticks / os.sysconf("SC_CLK_TCK"), own.user + own.system)


def others_share(start: Clock, end: Clock) -> float:
    """The part of the machine's CPU time that went to none of the ranks."""
    ranks = torch.tensor([end.process - start.process], dtype=torch.float64)
    dist.all_reduce(ranks)
    available = (end.wall - start.wall) * (os.cpu_count() or 1)
    return max(0.0, end.machine - start.machine - float(ranks)) / available


def describe_machine(pycomm_version: str, others: float) -> dict[str, object]:
    arguments = [argument for argument in sys.argv[1:] if argument != "--rank-process"]
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "real_time_scheduler": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
        "cpu_share_of_others": others,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pycomm": pycomm_version,
        "command": shlex.join(["python", "benchmarks/collectives.py", *arguments]),
        "finished": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> int:
    settings = parse_arguments()
    if settings.rank_process:
        run_rank(settings)
        return 0
    if status := launch(settings):
        print("the ranks did not finish; no results were written", file=sys.stderr)
        return status
    console = report.open_console()
    run = Run.load(settings.out / "collectives.json")
    report.publish(run, settings.out, console)
    if not settings.check_bars:
        return 0
    table, passed = report.bars_table(run)
    console.print(table)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
