"""What a run is to measure, read from words and checked before anything starts."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pycomm.all_reduce_table import ALGORITHMS
from pycomm.bench.operations import DTYPES, OPERATIONS, OTHERS, REDUCTIONS
from pycomm.bench.ways import COMPRESSIONS, Way
from pycomm.command_line import Parser
from pycomm.errors import InvalidArgument

BACKENDS: Final = ("pycomm", "gloo", "nccl", "mpi")
#: What compress measures if nothing is asked for.
DEFAULT_FORMATS: Final = ("fp16", "bf16", "fp8", "int8")
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

EPILOG: Final = """\
units:
  sizes       64, 8K, 256M: of the whole array; K, M and G are powers of 1024
  time        microseconds, of the slowest rank, of one call; GB/s are 1e9 bytes per second
  algbw       size / time; busbw: times a factor, all_reduce 2(n-1)/n, gather and scatter kinds (n-1)/n, others 1

examples:
  python -m pycomm.bench all_reduce --ranks 2 --backend pycomm,gloo --plot ar.png
  python -m pycomm.bench all_gather -b 1K -e 64M -f 4 --ranks 4 --json ag.json
  python -m pycomm.bench all_reduce --ranks 2 --compare ar.json --min-bw 1.5
  python -m pycomm.bench all_reduce --ranks 2 --backend pycomm,gloo --compression fp16,int8
  python -m pycomm.bench all_reduce --ranks 2 -b 1K -f 2 --tune ~/.pycomm-table
  python -m pycomm.bench ddp --ranks 2 --backend pycomm,gloo --compression fp16 -b 1M
  torchrun --nproc-per-node 2 -m pycomm.bench reduce_scatter -d half

exit status:
  0  measured, and every result is right
  1  a wrong result, a rank that failed, a bandwidth below --min-bw, or slower than --compare
  2  arguments that cannot be, or something that is missing here
"""


@dataclass(frozen=True)
class Settings:
    """Of a run; the same on all ranks."""

    operation: str
    sizes: tuple[int, ...]
    iterations: int
    warmup: int
    rounds: int
    check: bool
    dtype: str
    op: str
    root: int
    together: int
    offset: int
    backends: tuple[str, ...]
    ways: tuple[Way, ...]
    compressions: tuple[str, ...]
    ranks: int | None
    bind: bool
    min_bandwidth: float
    json: Path | None
    csv: Path | None
    plot: Path | None
    compare: Path | None
    tune: Path | None


def read_size(text: str) -> int:
    """Bytes of 64, 8K or 1.5M; raises ArgumentTypeError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, as 8, 64K or 256M")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _count(least: int) -> type[int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {least} or more")
        return int(text)

    return read  # type: ignore[return-value]


def sizes_of(begin: int, end: int, factor: float, increment: int | None) -> tuple[int, ...]:
    """From begin to end, times factor or plus increment; raises InvalidArgument where that does not end."""
    if end < begin:
        raise InvalidArgument(f"-e {end} bytes are fewer than -b {begin}")
    if increment is None and (factor <= 1 or begin == 0):
        raise InvalidArgument(
            f"-b {begin} -f {factor:g} never grows: -b 1 or more, -f above 1, or -i"
        )
    found, size = [], begin
    while size <= end:
        found.append(size)
        size = size + increment if increment else max(size + 1, int(size * factor))
    return tuple(found)


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m pycomm.bench",
        description="What a collective takes, with several backends side by side, checked.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    known = (*OPERATIONS, *OTHERS)
    add("operation", choices=known, metavar="OPERATION", help=", ".join(known))
    add("-b", "--minbytes", type=read_size, default=8, help="smallest size (8)")
    add("-e", "--maxbytes", type=read_size, default=64 << 20, help="largest size (64M)")
    add("-f", "--stepfactor", type=float, default=4.0, help="from one size to the next (4)")
    add("-i", "--stepbytes", type=read_size, help="the same as a difference")
    add("-n", "--iters", type=_count(1), default=20, help="calls of a round (20)")
    add("-w", "--warmup_iters", type=_count(0), default=3, help="calls before the first round (3)")
    add("--rounds", type=_count(1), default=5, help="rounds, in which backends take turns (5)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="compare every element (1)")
    add("-d", "--datatype", choices=DTYPES, default="float", help=f"{', '.join(DTYPES)} (float)")
    add("-o", "--op", choices=REDUCTIONS, default="sum", help=f"{', '.join(REDUCTIONS)} (sum)")
    add("-r", "--root", type=_count(0), default=0, help="of broadcast, reduce, gather, scatter (0)")
    add("-m", "--agg_iters", type=_count(1), default=1, help="calls that are timed as one (1)")
    add(
        "-u", "--unaligned", type=_count(0), default=0, help="bytes behind a cache line's begin (0)"
    )
    add(
        "--backend",
        default="pycomm",
        help=f"one or more of {', '.join(BACKENDS)}, with commas (pycomm)",
    )
    add(
        "--algorithm",
        default="",
        help=f"beside pycomm's own choice in all_reduce, one or more of {', '.join(ALGORITHMS)}",
    )
    add(
        "--compression",
        "--wire",
        default="",
        help=f"beside plain values, as what they travel in all_reduce and ddp, on pycomm and gloo; of compress, what "
        f"is measured (all): one or more of {', '.join(COMPRESSIONS)}",
    )
    add(
        "--tune",
        type=Path,
        metavar="FILE",
        help="measure pycomm's algorithms and write the table that PYCOMM_ALL_REDUCE=@FILE brings into use",
    )
    add("--ranks", type=_count(1), help="start so many here; none: join torchrun, mpirun or srun")
    add(
        "--no-bind",
        action="store_true",
        help="else ranks have a core each, where there are enough",
    )
    add(
        "--min-bw",
        type=float,
        default=0.0,
        help="GB/s: least busbw, of the largest size, of the first backend",
    )
    add("-J", "--json", type=Path, help="write everything")
    add("--csv", type=Path, help="write the table")
    add("--plot", type=Path, help="write a picture, PNG or SVG")
    add(
        "--compare",
        type=Path,
        help="an earlier --json: tell what has become slower than noise explains",
    )
    return made


def settings_of(words: argparse.Namespace) -> Settings:
    """Checked; raises InvalidArgument."""
    backends = tuple(words.backend.split(","))
    if set(backends) - set(BACKENDS) or len(set(backends)) < len(backends):
        raise InvalidArgument(f"--backend {words.backend}: each once, of {', '.join(BACKENDS)}")
    ways, compressions = _ways_of(words, backends)
    sizes = sizes_of(words.minbytes, words.maxbytes, words.stepfactor, words.stepbytes)
    if words.ranks is not None and words.root >= words.ranks:
        raise InvalidArgument(f"--root {words.root}: ranks are 0 to {words.ranks - 1}")
    if words.ranks == 1 and words.operation == "send_recv":
        raise InvalidArgument("send_recv needs two ranks or more")
    if words.plot and words.plot.suffix not in (".png", ".svg"):
        raise InvalidArgument(f"--plot {words.plot}: a name that ends in .png or .svg")
    return Settings(
        operation=words.operation,
        sizes=(0,) if words.operation == "barrier" else sizes,
        iterations=words.iters,
        warmup=words.warmup_iters,
        rounds=words.rounds,
        check=bool(words.check),
        dtype=words.datatype,
        op=words.op,
        root=words.root,
        together=words.agg_iters,
        offset=words.unaligned,
        backends=backends,
        ways=ways,
        compressions=compressions,
        ranks=words.ranks,
        bind=not words.no_bind,
        min_bandwidth=words.min_bw,
        json=words.json,
        csv=words.csv,
        plot=words.plot,
        compare=words.compare,
        tune=words.tune,
    )


def _ways_of(
    words: argparse.Namespace, backends: tuple[str, ...]
) -> tuple[tuple[Way, ...], tuple[str, ...]]:
    """What is set side by side; raises InvalidArgument where an option and an operation do not fit."""
    operation = words.operation
    algorithms = _names("--algorithm", words.algorithm, ALGORITHMS)
    compressions = _names("--compression", words.compression, COMPRESSIONS)
    if words.tune:
        algorithms = algorithms or ALGORITHMS
    if algorithms and (operation != "all_reduce" or "pycomm" not in backends):
        raise InvalidArgument("--algorithm and --tune are for all_reduce on backend pycomm")
    if compressions and operation not in ("all_reduce", *OTHERS):
        raise InvalidArgument(f"--compression is for all_reduce, ddp and compress, not {operation}")
    if (compressions or operation in OTHERS) and words.datatype != "float":
        raise InvalidArgument("what is compressed, and ddp, are of -d float")
    if compressions and words.op != "sum":
        raise InvalidArgument("--compression is for -o sum")
    if operation in OTHERS and words.unaligned:
        raise InvalidArgument(f"-u is not for {operation}")
    ways = [Way(backend) for backend in backends]
    ways += [Way("pycomm", algorithm=name) for name in algorithms]
    able = [backend for backend in backends if backend in ("pycomm", "gloo")]
    ways += [Way(backend, compression=name) for backend in able for name in compressions]
    return tuple(ways), compressions or DEFAULT_FORMATS


def _names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else ()
    if set(names) - set(known) or len(set(names)) < len(names):
        raise InvalidArgument(f"{option} {text}: each once, of {', '.join(known)}")
    return names
