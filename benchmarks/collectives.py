"""Collectives on the CPU: pycomm beside Gloo, MPI and oneCCL, in one interleaved run.

Variants of each call, all on private ordinary memory (all_reduce, broadcast and reduce in place):

  gloo                   dist.all_reduce(...) on a gloo group
  pycomm                 dist.all_reduce(...) on a pycomm group
  pycomm.Communicator    the communicator under that group, called directly
  Open MPI, MPICH,       blocking calls through mpi4py, each library in its own processes
  Intel MPI
  oneCCL                 blocking calls through ctypes
  fake (dispatch floor)  dist.all_reduce(...) on torch's fake backend, which moves nothing (to 64 B)
  memory bound           an in-place all_reduce's memory traffic, without communication (from 16 MB)

Every repeat takes one sample of each variant, in a shuffled order; the processes of all others are
blocked meanwhile. A sample is as many calls as fill the minimum time, after a barrier and one
untimed call; its time is the slowest rank's. Ratios are taken within a repeat. send_recv is a
ping-pong of ranks 0 and 1, and its time that of one way. Results are checked for exact equality
before anything is timed; a wrong one ends the run with status 1.

No library binds its ranks to cores. On a busy machine two ranks may then share one for a while
(flags of 50 us tell); --bind keeps each engine's ranks on cores of their own.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import machine
import report
from bars import BARS, bars_apply, bars_table
from cases import DTYPES, OPS, Case, make_case
from names import FLOOR, PEERS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rows import Row, Run, Samples, make_row, make_samples
from teams import PEER_FOLDERS, Team, TeamError, Teams, peer_versions

MIN_REPEATS = 7
MAX_BATCHES = 100  # of one sample
WARM_UP_CALLS = 2
PEERS_BY_KEY = {PEER_FOLDERS[name]: name for name in PEERS}

EXAMPLES = """\
units:
  sizes in bytes, with K, M, G as powers of 1024, of the whole buffer as in nccl-tests: all_gather's
  output, reduce_scatter's input. A size is rounded up to a whole number of elements for each rank.
  Bandwidths in GB/s of 1e9 bytes. Times per call, of the slowest rank.

examples:
  python benchmarks/collectives.py
  python benchmarks/collectives.py --ops all_reduce --sizes 8,1M,64M --check-bars
  python benchmarks/collectives.py --peers all --out runs/bench-peers
  python benchmarks/collectives.py --ranks 4 --ops all_gather,reduce_scatter --dtype bfloat16
"""


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
    peers: list[str]
    peers_folder: Path
    out: Path
    check_bars: bool
    bind: bool

    def to_json(self) -> dict[str, object]:
        hidden = ("peers_folder", "out", "check_bars")
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


def parse_names(text: str, known: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown: {name!r} (known: {', '.join(known)})")
    return names


def parse_ops(text: str) -> list[str]:
    return list(OPS) if text == "all" else parse_names(text, OPS)


def parse_peers(text: str) -> list[str]:
    if text in ("all", "none"):
        return list(PEERS) if text == "all" else []
    return [PEERS_BY_KEY[key] for key in parse_names(text, list(PEERS_BY_KEY))]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, keys = parser.add_argument, ",".join(PEERS_BY_KEY)
    add("--ranks", type=int, default=2, help="processes to start, one thread each (default 2)")
    add("--ops", type=parse_ops, default="all", help=f"of {','.join(OPS)} (default all)")
    add("--sizes", type=parse_sizes, default="8,1K,32K,256K,1M,16M,64M", help="default %(default)s")
    add("--dtype", choices=DTYPES, default="float32", help="default float32")
    add("--repeats", type=int, default=9, help=f"at least {MIN_REPEATS} (default 9)")
    add("--min-time", type=float, default=30.0, help="least ms a sample lasts (default 30)")
    add("--seed", type=int, default=0, help="of the order within a repeat (default 0)")
    add("--peers", type=parse_peers, default="none", help=f"of {keys}; or all (default none)")
    here = Path(__file__).resolve().parents[1]
    add("--peers-folder", type=Path, default=here / ".venv-peers", help="default .venv-peers")
    add("--out", type=Path, default=Path("runs/bench"), help="folder (default runs/bench)")
    add("--check-bars", action="store_true", help="exit 1 unless the speed bars hold")
    add("--bind", action="store_true", help="keep each engine's rank r on the r-th core")
    return parser


def parse_arguments() -> Settings:
    parser = make_parser()
    args = parser.parse_args()
    settings = Settings(
        ops=args.ops,
        sizes=args.sizes,
        dtype=args.dtype,
        world_size=args.ranks,
        repeats=args.repeats,
        min_time_ms=args.min_time,
        seed=args.seed,
        peers=args.peers,
        peers_folder=args.peers_folder.absolute(),
        out=args.out,
        check_bars=args.check_bars,
        bind=args.bind,
    )
    if problem := problem_with(settings):
        parser.error(problem)
    return settings


def problem_with(settings: Settings) -> str | None:
    if settings.world_size < 1:
        return "--ranks: at least 1"
    if settings.repeats < MIN_REPEATS:
        return f"--repeats: at least {MIN_REPEATS}, or the spread means nothing"
    if settings.bind and settings.world_size > len(os.sched_getaffinity(0)):
        return "--bind needs as many cores as ranks"
    if settings.min_time_ms <= 0:
        return "--min-time: more than 0 ms"
    if settings.check_bars:
        missing = {bar.size_bytes for bar in BARS} - set(settings.sizes)
        applies = bars_apply("all_reduce", settings.dtype, settings.world_size)
        if missing or not applies or "all_reduce" not in settings.ops:
            return "--check-bars needs all_reduce, float32, --ranks 2 and sizes 8, 1M and 64M"
    return None


# ------------------------------------------------------------------------------------------ driving


class WrongResult(Exception):
    """A variant that is not exact; the message names it."""


@dataclass
class Driver:
    """Interleaves the samples of all engines' variants."""

    settings: Settings
    teams: list[Team]
    progress: Progress
    notes: list[str]
    owners: dict[str, Team] = field(default_factory=dict)  # by variant, of the case at hand

    def note(self, text: str) -> None:
        """Once, in the output and in the results."""
        if text not in self.notes:
            self.notes.append(text)
            self.progress.console.print(f"[yellow]{text}[/]", soft_wrap=True)

    def prepare(self, case: Case) -> None:
        """Buffers and calls in every rank, and which variants there are."""
        self.owners = {}
        for team in self.teams:
            reply = team.ask("prepare", case=asdict(case))[0]
            for variant, why in reply["missing"].items():
                self.note(f"left out: {case.op} through {variant}: {why}")
            self.owners |= dict.fromkeys(reply["variants"], team)

    def verify(self, case: Case) -> None:
        """Each variant exact on every rank, or left out where it has no such operation."""
        for variant, team in list(self.owners.items()):
            replies = team.ask("verify", variant=variant)
            for rank, reply in enumerate(replies):
                if wrong := reply.get("wrong"):
                    what = f"{case.op} of {case.size_bytes} bytes of {case.dtype} through {variant}"
                    where = f"on rank {rank}, offset {wrong['offset']} (in elements)"
                    values = f"expected {wrong['expected']:g}, got {wrong['got']:g}"
                    raise WrongResult(f"wrong result: {what}, {where}: {values}")
            if why := replies[0].get("unsupported"):
                del self.owners[variant]
                if variant != FLOOR:
                    self.note(f"left out: {case.op} through {variant}: {why}")

    def sample(self, variant: str, calls: int) -> tuple[list[list[int]], int]:
        """A sample that fills the minimum time: nanoseconds by rank and batch; calls in a batch.

        Shorter ones only warm up: they are thrown away, and tell how many calls are needed.
        """
        wanted_ns = self.settings.min_time_ms * 1e6
        while True:
            in_batch = math.ceil(calls / MAX_BATCHES)
            batches = math.ceil(calls / in_batch)
            replies = self.owners[variant].ask(
                "sample", variant=variant, batches=batches, calls=in_batch
            )
            nanoseconds = [reply["ns"] for reply in replies]
            total = max(map(sum, nanoseconds))
            if total >= wanted_ns:
                return nanoseconds, in_batch
            done = batches * in_batch
            calls = min(math.ceil(1.2 * wanted_ns * done / max(total, 1)), 8 * done)

    def flag_latency_ns(self) -> float:
        return float(min(reply["ns"] for reply in self.teams[0].ask("probe")))

    def ranks_cpu_s(self) -> float:
        return sum(reply["seconds"] for team in self.teams for reply in team.ask("cpu"))

    def measure(self, case: Case) -> list[Row]:
        """The rows of one case."""
        self.prepare(case)
        self.verify(case)
        variants = list(self.owners)
        raw: dict[str, list[list[list[int]]]] = {variant: [] for variant in variants}
        calls: dict[str, list[int]] = {variant: [] for variant in variants}
        needed = {}
        for variant in variants:
            warm, in_batch = self.sample(variant, WARM_UP_CALLS)
            needed[variant] = in_batch * len(warm[0])
        flags = [self.flag_latency_ns()]
        order = random.Random(f"{self.settings.seed} {case.op} {case.size_bytes}")
        for _ in range(self.settings.repeats):
            for variant in order.sample(variants, len(variants)):
                nanoseconds, in_batch = self.sample(variant, needed[variant])
                needed[variant] = max(needed[variant], in_batch * len(nanoseconds[0]))
                raw[variant].append(nanoseconds)
                calls[variant].append(in_batch)
            flags.append(self.flag_latency_ns())
            self.progress.advance(self.progress.task_ids[0])
            self.progress.refresh()
        samples = {it: make_samples(raw[it], calls[it], case.op) for it in variants}
        return make_rows(case, samples, flags)


def make_rows(case: Case, samples: dict[str, Samples], flags: list[float]) -> list[Row]:
    return [make_row(case, variant, samples, flags) for variant in samples]


def open_progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("repeats"),
        TimeElapsedColumn(),
        console=Console(),
        auto_refresh=False,  # no drawing thread beside the ranks
        transient=True,
    )


def cases_of(settings: Settings) -> list[Case]:
    """Without duplicates: sizes may round to the same, and a barrier has one. send_recv takes two."""
    world_size = settings.world_size
    ops = [op for op in settings.ops if op != "send_recv" or world_size > 1]
    sizes = [(op, size_bytes) for op in ops for size_bytes in settings.sizes]
    return list(dict.fromkeys(make_case(*it, settings.dtype, world_size) for it in sizes))


def measure_all(settings: Settings) -> Run:
    cases, rows = cases_of(settings), list[Row]()
    peers = Teams(settings.world_size, settings.peers, settings.peers_folder)
    with peers as teams, open_progress() as progress:
        driver = Driver(settings, teams.teams, progress, [])
        for why in teams.missing.values():
            driver.note(why)
        if settings.bind:
            for team in teams.teams:
                team.ask("bind", cores=sorted(os.sched_getaffinity(0)))
        task = progress.add_task("", total=len(cases) * settings.repeats)
        clock = machine.read_clock(driver.ranks_cpu_s())
        for case in cases:
            progress.update(task, description=f"{case.op} {report.format_bytes(case.size_bytes)}")
            progress.refresh()
            rows += (found := driver.measure(case))
            progress.console.print(summary(found), soft_wrap=True)
        others = machine.others_share(clock, machine.read_clock(driver.ranks_cpu_s()))
        running = [team.name for team in teams.teams]
    versions = peer_versions(running, settings.peers_folder, settings.world_size)
    return Run(machine.describe(others, versions), settings.to_json(), driver.notes, rows)


def summary(rows: Sequence[Row]) -> str:
    """A line for one case, while the rest still runs."""
    times = [f"{row.variant} {report.format_time(row.time_us)}" for row in rows]
    head = f"{rows[0].op} {report.format_bytes(rows[0].size_bytes)}"
    return f"{head} ({report.format_flags(rows[0])}): {', '.join(times)}"


def main() -> int:
    settings = parse_arguments()
    try:
        run = measure_all(settings)
    except (TeamError, WrongResult) as error:
        print(f"{error}\nno results were written", file=sys.stderr)
        return 1
    run.save(settings.out / "results.json")
    console = report.open_console()
    report.publish(run, settings.out, console)
    if not settings.check_bars:
        return 0
    table, passed = bars_table(run)
    console.print(table)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
