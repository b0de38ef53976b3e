"""``python -m pycomm.pipeline``: draws pipeline schedules, and compares them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pycomm.command_line import Parser, run_command
from pycomm.errors import InvalidArgument
from pycomm.pipeline.schedules import (
    NAMES,
    Costs,
    Schedule,
    Simulation,
    build,
    draw,
    lower,
    plot,
    simulate,
    validate,
)

EXAMPLES = """\
Times have any unit. F, I, W and B are those of a whole rank for one microbatch, which its stages share evenly.
F forward, B full backward, I gradient of the input, W gradient of the weights; 3F5: stage 3, microbatch 5.

examples:
  python -m pycomm.pipeline draw 1f1b zbv --ranks 4 --microbatches 8
  python -m pycomm.pipeline draw auto --costs 1,2,0.5 --memory 6 --plot auto.svg
  python -m pycomm.pipeline draw zb_h1 --chunks 2 --programs
  python -m pycomm.pipeline compare --ranks 8 --microbatches 32 --costs 1,1.2,0.8 --transfer 0.1

exit status: 0, or 2 for bad arguments
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)

    def work() -> None:
        played = options.run(options)
        if options.plot:
            plot(played, options.plot)

    return run_command(parser, work)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m pycomm.pipeline",
        description="Draws pipeline schedules, and compares them, on a clock of given costs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for name, run, words in (
        ("draw", _draw, "timelines, as text and as a picture"),
        ("compare", _compare, "a table of all schedules, or of those named"),
    ):
        command = commands.add_parser(
            name,
            help=words,
            description=words,
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        command.add_argument(
            "names", nargs="+" if name == "draw" else "*", metavar="NAME", help=" ".join(NAMES)
        )
        _add_options(command)
        if name == "draw":
            command.add_argument(
                "--programs", action="store_true", help="also print ranks' actions and messages"
            )
    return parser


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ranks", type=_count, default=4, help="(4)")
    command.add_argument("--microbatches", type=_count, default=8, help="(8)")
    command.add_argument("--chunks", type=_count, help="stages of each rank (as the schedule does)")
    command.add_argument(
        "--costs", type=_times, default=[1.0, 1.0, 1.0], metavar="F,I,W[,B]", help="(1,1,1,I+W)"
    )
    command.add_argument("--transfer", type=float, default=0.0, help="time of a message (0)")
    command.add_argument(
        "--memory",
        type=float,
        help="for auto: activations that a rank may hold; a microbatch in a whole rank is 1",
    )
    command.add_argument("--plot", type=Path, metavar="OUT.svg", help="draw it; or OUT.png")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def _times(text: str) -> list[float]:
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = []
    if len(found) not in (3, 4):
        raise argparse.ArgumentTypeError(f"{text!r} is not three or four times, as 1,1.2,0.8")
    return found


def _costs(options: argparse.Namespace) -> Costs:
    forward, input_, weight, *full = options.costs
    return Costs(forward, input_, weight, full[0] if full else None, options.transfer)


def _built(name: str, chunks: int | None, options: argparse.Namespace) -> Schedule:
    if name != "auto":
        return build(name, options.ranks, options.microbatches, chunks)
    costs, memory = _costs(options), options.memory
    return build(name, options.ranks, options.microbatches, chunks, costs=costs, memory=memory)


def _draw(options: argparse.Namespace) -> list[Simulation]:
    costs = _costs(options)
    found = []
    for name in options.names:
        schedule = _built(name, options.chunks, options)
        played = simulate(schedule, costs)
        print(f"{schedule.name}: {_say(played)}\n{draw(schedule, costs)}\n")
        if options.programs:
            lowered = lower(schedule)
            validate(lowered)
            for rank, program in enumerate(lowered.programs):
                print(f"rank {rank}: {' '.join(map(str, program))}\n")
        found.append(played)
    return found


def _say(played: Simulation) -> str:
    return (
        f"makespan {played.makespan:.5g}, bubble {played.bubble:.4g}, by span "
        f"{played.span_bubble:.4g}; activations {' '.join(map(str, played.peak_activations))}"
    )


def _compare(options: argparse.Namespace) -> list[Simulation]:
    """With chunks: without schedules that do not take so many."""
    costs = _costs(options)
    found = []
    for name in options.names or NAMES:
        try:
            found.append(simulate(_built(name, options.chunks, options), costs))
        except InvalidArgument:
            if options.names or options.chunks is None:
                raise
    print("| schedule | chunks | makespan | bubble | by span | busy | memory of a rank | W due |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for played in sorted(found, key=lambda one: (one.makespan, max(one.peak_memory))):
        cells = [
            played.schedule.name,
            str(played.schedule.chunks),
            f"{played.makespan:.5g}",
            f"{played.bubble:.4g}",
            f"{played.span_bubble:.4g}",
            f"{played.efficiency * 100:.1f} %",
            f"{max(played.peak_memory):.4g}",
            str(max(played.peak_weights)),
        ]
        print(f"| {' | '.join(cells)} |")
    return found


if __name__ == "__main__":
    sys.exit(main())
