"""``python -m pycomm.plan``: how long a collective or a training step would take on a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pycomm.command_line import Parser, run_command
from pycomm.compression.codecs import NAMED
from pycomm.errors import InvalidArgument
from pycomm.plan.algorithms import ALGORITHMS
from pycomm.plan.cluster import LINKS, Cluster
from pycomm.plan.operation import predictions
from pycomm.plan.scale import curve, plot, table
from pycomm.plan.step import Job, Step, predict_step
from pycomm.plan.words import read_bytes, read_link, read_rate, say_seconds

UNITS = f"""\
units:
  bytes       64M: K, M and G are powers of 1024
  rates       bytes per second, 25GB; or bits, 200Gbit; K, M, G and T are powers of 1000
  times       5us, 1.5ms, 2s
  links       {" ".join(LINKS)}
              or BANDWIDTH,LATENCY[,GAP][,half] as 25GB,5us,1us; what one end sends in a second; inside: of a rank,
              between: of a host, whose ranks share it. GAP: of each further message that is sent at once (LATENCY).
              half: sending and receiving share the bandwidth. Names but shm are data sheets' figures, not measured.

examples:
  python -m pycomm.plan collective --bytes 64M --hosts 4 --between 1Gbit,100us
  python -m pycomm.plan collective --bytes 1G --hosts 16 --ranks-per-host 8 --inside nvlink4 --between 8xib400
  python -m pycomm.plan step --hosts 16 --ranks-per-host 8 --inside nvlink4 --between 8xib400 --tensor 8
  python -m pycomm.plan scale --ranks 10000 --ranks-per-host 8 --inside nvlink4 --between 8xib400 --plot plan.png

exit status: 0, or 2 for bad arguments
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)

    def work() -> None:
        found = options.run(options)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))

    return run_command(parser, work)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m pycomm.plan",
        description="How long a collective or a training step would take on a cluster, by an alpha-beta model.",
        epilog=UNITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for name, run, words in (
        ("collective", _collective, "one collective, by every algorithm"),
        ("step", _step, "one step of training"),
        ("scale", _scale, "both, on more and more hosts"),
    ):
        command = commands.add_parser(
            name,
            help=words,
            description=words,
            epilog=UNITS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        _add_cluster(command, scale=name == "scale")
        if name != "step":
            command.add_argument(
                "--bytes", type=_typed(read_bytes), default=64 * 2.0**20, help="of a tensor (64M)"
            )
        if name == "collective":
            command.add_argument(
                "--operation", choices=list(ALGORITHMS), default="all_reduce", help="(all_reduce)"
            )
        else:
            _add_job(command)
    return parser


def _typed(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """With errors that argparse shows."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except InvalidArgument as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value


def _add_cluster(command: argparse.ArgumentParser, scale: bool) -> None:
    link = _typed(read_link)
    if scale:
        command.add_argument("--ranks", type=_count, default=10_000, help="the most (10000)")
        command.add_argument("--plot", type=Path, metavar="OUT.png", help="draw it")
    else:
        command.add_argument("--hosts", type=_count, default=1, help="(1)")
    command.add_argument("--ranks-per-host", type=_count, default=1, help="(1)")
    for name, default in (("inside", "shm"), ("between", "eth25")):
        command.add_argument(
            f"--{name}",
            type=link,
            metavar="LINK",
            default=LINKS[default],
            help=f"{name} hosts: a link, see below ({default})",
        )
    command.add_argument(
        "--memory",
        type=_typed(read_rate),
        default=float("inf"),
        metavar="RATE",
        help="at which a rank's kernels read and write, for sums and codecs (they cost nothing)",
    )
    command.add_argument(
        "--compression", choices=["none", *NAMED], default="none", help="of gradients (none)"
    )
    command.add_argument("--json", type=Path, metavar="OUT.json", help="write the figures")


def _add_job(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("the model, a transformer; figures are a 7 G parameter one")
    for name, default, words in (
        ("layers", 32, "of it"),
        ("hidden", 4096, "values per token"),
        ("sequence", 4096, "tokens"),
        ("sequences", 1, "of a microbatch"),
        ("microbatches", 1, "of a step, on each replica"),
        ("tensor", 1, "ranks that share every layer"),
        ("pipeline", 1, "ranks that share out the layers"),
    ):
        group.add_argument(f"--{name}", type=_count, default=default, help=f"{words} ({default})")
    group.add_argument("--parameters", type=_positive, default=7e9, help="(7e9)")
    group.add_argument(
        "--flops", type=_positive, default=4e14, help="per second, that a rank reaches (4e14)"
    )
    group.add_argument(
        "--bucket", type=_typed(read_bytes), default=25 * 2.0**20, help="bytes (25M)"
    )
    group.add_argument("--no-overlap", action="store_true", help="buckets travel after backward")


def _cluster(options: argparse.Namespace, hosts: int) -> Cluster:
    return Cluster(hosts, options.ranks_per_host, options.inside, options.between, options.memory)


def _job(options: argparse.Namespace, compression: str) -> Job:
    return Job(
        options.parameters,
        options.layers,
        options.hidden,
        options.sequence,
        options.sequences,
        options.microbatches,
        options.tensor,
        options.pipeline,
        options.flops,
        compression,
        options.bucket,
        not options.no_overlap,
    )


def _collective(options: argparse.Namespace) -> Any:
    cluster = _cluster(options, options.hosts)
    found = predictions(
        cluster.everybody, options.bytes, options.operation, options.compression, options.memory
    )
    found.sort(key=lambda one: one.seconds)
    print(f"{options.operation} of {options.bytes:.0f} bytes, {cluster.world_size} ranks:\n")
    print("| algorithm | time | latencies | wire | kernels | busbw, GB/s |")
    print("|---|---:|---:|---:|---:|---:|")
    for one in found:
        parts = (one.seconds, one.cost.latency, one.cost.wire, one.cost.kernels)
        cells = [one.algorithm, *map(say_seconds, parts), f"{one.busbw / 1e9:.3g}"]
        print(f"| {' | '.join(cells)} |")
    return [{**asdict(one), "seconds": one.seconds, "busbw": one.busbw} for one in found]


def _of_step(step: Step) -> dict[str, Any]:
    return {**asdict(step), "seconds": step.seconds, "efficiency": step.efficiency}


def _step(options: argparse.Namespace) -> Any:
    cluster = _cluster(options, options.hosts)
    step = predict_step(_job(options, options.compression), cluster)
    print(
        f"{cluster.world_size} ranks: data {step.data} x tensor {options.tensor} x pipeline "
        f"{options.pipeline}; gradients by {step.gradients.algorithm} in buckets of "
        f"{step.gradients.bytes / 2**20:.3g} M, {say_seconds(step.gradients.seconds)} each\n"
    )
    print("| of a step | time | part |")
    print("|---|---:|---:|")
    for name, seconds in (
        ("computation", step.compute),
        ("tensor parallel all-reduces", step.tensor),
        ("messages between stages", step.pipeline),
        ("pipeline bubble", step.bubble),
        ("gradients, not hidden", step.exposed),
        ("all", step.seconds),
    ):
        part = f"{seconds / step.seconds * 100:.1f} %"
        print(f"| {name} | {say_seconds(seconds)} | {part} |")
    print(f"\n{step.tokens / step.seconds:.4g} tokens/s; {say_seconds(step.hidden)} are hidden")
    return _of_step(step)


def _scale(options: argparse.Namespace) -> Any:
    jobs = {"plain": _job(options, "none")}
    if options.compression != "none":
        jobs[options.compression] = _job(options, options.compression)
    points = curve(_cluster(options, 1), options.ranks, options.bytes, options.compression, jobs)
    print(table(points))
    if options.plot:
        size = options.bytes / 2**20
        plot(points, f"all-reduce of {size:.4g} MiB, {options.ranks_per_host} a host", options.plot)
    return [
        {
            "ranks": point.ranks,
            "hosts": point.hosts,
            "best": point.best.algorithm,
            "seconds": {name: one.seconds for name, one in point.ways.items()},
            "steps": {name: _of_step(step) for name, step in point.steps.items()},
        }
        for point in points
    ]


if __name__ == "__main__":
    sys.exit(main())
