"""How fast the codec kernels are: against a plain copy of as many bytes, and against torch's unfused way.

    python benchmarks/codecs.py
    python benchmarks/codecs.py --codecs fp16,fp16:0 --layouts large --instruction-sets avx512,avx2,generic --stream

One process, one thread, all of it taking turns within every repeat. GB/s count what a call has to read and write: 4
bytes of a value, of its residual and of its result, and what travels. The number behind it is the time of `copy_`,
moving as many bytes right before or after in the same repeat, by the call's: median [quartiles]. Behind a
codec's name may stand for how many values it has a scale: `int8:64`; `fp16:0` has none.

torch's way is what its fp16 hook does: gradients are copied into a bucket, cast and divided, into memory that is there
or that is fresh; it knows no residual, so what keeping one would take is measured beside it; and, for sums, halves are
widened, added and copied out of the bucket.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from machine import cpu_model

from pycomm.compression import BF16, FP8, FP16, FP8Wide, Int8
from pycomm.extension import core

ENCODE_RESIDUAL, ENCODE, DECODE, REDUCE = OPERATIONS = (
    "encode with residual",
    "encode",
    "sum of 2",
    "reduce",
)
#: torch's ways by name: (with fresh memory for the bucket, for halves).
CASTS = {
    "bucket and halves kept": (False, False),
    "bucket kept, fresh halves": (False, True),
    "both fresh": (True, True),
}
FEEDBACK = "kept, with a residual"
SUM = "sum of 2 halves, kept"
CODECS = {
    codec.format: codec.block for codec in (FP16(), BF16(), FP8(), FP8Wide(), Int8())
}  # as compression has them
SETS = ("avx512", "avx2", "generic")
TENSORS = 30
SHARE_BAR, TORCH_BAR = 0.85, 2.5

Call = Callable[[], object]


@dataclass(frozen=True)
class Layout:
    """Gradients."""

    words: str
    lengths: list[int]


def list_lengths(count: int) -> list[int]:
    """Each a quarter longer than the one before."""
    shares = [1.25**i for i in range(TENSORS)]
    lengths = [int(count * share / sum(shares)) for share in shares]
    return [*lengths[:-1], count - sum(lengths[:-1])]


def layouts(quick: bool) -> dict[str, Layout]:
    """By the names of the command line."""
    large, small = (64 << 10, 16 << 10) if quick else (16 << 20, 256 << 10)
    return {
        "large": Layout(f"{large / 2**18:g} MB", [large]),
        "small": Layout(f"{small / 2**18:g} MB", [small]),
        "list": Layout(f"{TENSORS} tensors, {large / 2**18:g} MB", list_lengths(large)),
    }


class Bench:
    """Memory for a layout, and everything that is timed on it."""

    def __init__(self, layout: Layout, stream: bool) -> None:
        self.count, self.stream = sum(layout.lengths), stream
        chance = torch.Generator().manual_seed(0)
        self.gradients = [torch.randn(n, generator=chance) * 1e-3 for n in layout.lengths]
        self.results = [torch.zeros(n) for n in layout.lengths]
        self.residual = torch.zeros(self.count)
        self.bucket = torch.zeros(self.count)
        self.widened = torch.zeros(self.count)
        self.halves = torch.zeros(2, self.count, dtype=torch.float16)
        self.copied = torch.zeros(2, 3 * self.count)  # bytes of a value are about 20 at most

    def copy(self, count_bytes: int) -> Call:
        """A copy that reads and writes so many bytes in all."""
        source, target = self.copied[:, : count_bytes // 8]
        return lambda: target.copy_(source)

    def operations(self, codec: Any) -> dict[str, tuple[int, Call]]:
        """Bytes moved and the call, by operation."""
        wire, values = codec.wire_bytes(self.count), 4 * self.count
        wires = [self.wire(codec) for _ in range(3)]
        encoding = {"inputs": self.gradients, "factor": 0.5, "stream": self.stream}
        for each in wires:  # numbers to decode
            core.transcode(codec, self.count, **encoding, encoded=each)

        def call(**arguments: Any) -> Call:
            return lambda: core.transcode(codec, self.count, **arguments)

        kept = {**encoding, "residual": self.residual}
        return {
            ENCODE_RESIDUAL: (3 * values + wire, call(**kept, encoded=wires[0])),
            ENCODE: (values + wire, call(**encoding, encoded=wires[0])),
            DECODE: (2 * wire + values, call(wires=wires[1:], outputs=self.results)),
            REDUCE: (
                4 * values + 2 * wire,
                call(**kept, wires=wires[1:2], encoded=wires[0], outputs=self.results),
            ),
        }

    def wire(self, codec: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What values travel in."""
        elements = torch.zeros(self.count * codec.value_bytes, dtype=torch.uint8)
        return elements, torch.zeros(codec.scales(self.count))

    def torch_ways(self) -> dict[str, Call]:
        """By name."""

        def cast(fresh_bucket: bool, fresh_halves: bool) -> None:
            bucket = torch.empty_like(self.bucket) if fresh_bucket else self.bucket
            for part, gradient in zip(self.parts(bucket), self.gradients, strict=True):
                part.copy_(gradient)
            halves = bucket.to(torch.float16) if fresh_halves else self.halves[0].copy_(bucket)
            halves.div_(2)

        def feed_back() -> None:
            for part, gradient in zip(self.parts(self.bucket), self.gradients, strict=True):
                part.copy_(gradient)
            self.bucket.div_(2).add_(self.residual)
            self.residual.copy_(self.halves[0].copy_(self.bucket))
            torch.sub(self.bucket, self.residual, out=self.residual)

        def add() -> None:
            # Adding halves to floats would take fresh memory inside torch.
            self.bucket.copy_(self.halves[0]).add_(self.widened.copy_(self.halves[1]))
            for part, result in zip(self.parts(self.bucket), self.results, strict=True):
                result.copy_(part)

        ways: dict[str, Call] = {
            name: lambda fresh=fresh: cast(*fresh)  # type: ignore[misc]
            for name, fresh in CASTS.items()
        }
        return {**ways, FEEDBACK: feed_back, SUM: add}

    def parts(self, bucket: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A bucket's views of single gradients."""
        return bucket.split([gradient.numel() for gradient in self.gradients])


# ---- measuring ------------------------------------------------------------------------------------------------------


def seconds(call: Call, calls: int) -> float:
    """Of one call, after one that is not timed."""
    call()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


@dataclass(frozen=True)
class Sample:
    """One repeat's of an operation."""

    instruction_set: str
    codec: str
    operation: str
    moved: int  # bytes
    seconds: float
    copy_seconds: float
    torch_seconds: dict[str, float]


def measure(layout: Layout, arguments: argparse.Namespace) -> list[Sample]:
    """All repeats of a layout; the first one warms up."""
    bench, chance = Bench(layout, arguments.stream), random.Random(1)
    calls = max(1, arguments.most_bytes // (8 * bench.count))
    ways = bench.torch_ways()
    work = [
        (name, operation, moved, call, bench.copy(moved))
        for name, codec in arguments.codecs.items()
        for operation, (moved, call) in bench.operations(codec).items()
    ]
    samples = []
    for repeat in range(arguments.repeats + 1):
        for instruction_set in chance.sample(arguments.sets, len(arguments.sets)):
            assert core.set_instruction_set(instruction_set)
            by_torch = {way: seconds(call, calls) for way, call in ways.items()}
            for name, operation, moved, call, copy in chance.sample(work, len(work)):
                pair = [call, copy]
                order = chance.sample((0, 1), 2)
                times = {i: seconds(pair[i], calls) for i in order}
                if repeat > 0:
                    samples.append(
                        Sample(
                            instruction_set, name, operation, moved, times[0], times[1], by_torch
                        )
                    )
    codecs = list(arguments.codecs)
    return sorted(samples, key=lambda sample: codecs.index(sample.codec))


# ---- results --------------------------------------------------------------------------------------------------------


def quartiles(values: list[float]) -> str:
    """Median [quartiles]."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} [{low:.2f}-{high:.2f}]"


def chosen(samples: list[Sample], **which: str) -> list[Sample]:
    """Those that have these values."""
    return [s for s in samples if all(getattr(s, name) == value for name, value in which.items())]


def shares(samples: list[Sample]) -> list[float]:
    """Of a copy's bandwidth."""
    return [s.copy_seconds / s.seconds for s in samples]


def times_of_torch(samples: list[Sample], way: str) -> list[float]:
    """How many times torch's way takes an operation's time."""
    return [s.torch_seconds[way] / s.seconds for s in samples]


def bandwidth_table(title: str, samples: list[Sample]) -> str:
    """Of one layout and instruction set: a row per codec."""
    lines = [f"| {title} | {' | '.join(OPERATIONS)} |", "|---|" + "---:|" * len(OPERATIONS)]
    for codec in dict.fromkeys(s.codec for s in samples):
        cells = []
        for operation in OPERATIONS:
            mine = chosen(samples, codec=codec, operation=operation)
            speed = median(s.moved / s.seconds for s in mine) / 1e9
            cells.append(f"{speed:.1f} GB/s, {quartiles(shares(mine))}")
        lines.append(f"| {codec} | {' | '.join(cells)} |")
    return "\n".join(lines)


def torch_table(title: str, samples: list[Sample], codec: str) -> str:
    """Of one layout and instruction set: a row per way of torch."""
    columns = (ENCODE_RESIDUAL, ENCODE, DECODE)
    heads = " | ".join(f"by {codec} {operation}" for operation in columns)
    lines = [f"| torch's way, {title} | ms | {heads} |", "|---|" + "---:|" * (1 + len(columns))]
    for way in samples[0].torch_seconds:
        cells = [f"{median(s.torch_seconds[way] for s in samples) * 1e3:.3g}"]
        for operation in columns:
            mine = chosen(samples, codec=codec, operation=operation)
            alike = way in CASTS or operation == {FEEDBACK: ENCODE_RESIDUAL, SUM: DECODE}[way]
            cells.append(quartiles(times_of_torch(mine, way)) if alike else "")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(title: str, samples: list[Sample], codec: str) -> list[str]:
    """The bars, for encoding with residual and for sums: a line each."""

    def judged(values: list[float], least: float, words: str) -> str:
        missed = "" if min(values) >= least else ", MISSED"
        numbers = ", ".join(f"{value:.2f}" for value in values)
        return f"{numbers} {words} (at least {least}{missed})"

    lines = []
    for operation in (ENCODE_RESIDUAL, DECODE):
        mine = chosen(samples, codec=codec, operation=operation)
        share = judged([median(shares(mine))], SHARE_BAR, "of a copy's bandwidth")
        ways = [median(times_of_torch(mine, way)) for way in CASTS]
        times = judged(ways, TORCH_BAR, "times as fast as torch's ways")
        lines.append(f"{title}, {codec} {operation}: {share}; {times}")
    return lines


def plot(found: dict[str, list[Sample]], path: Path) -> None:
    """Bars of the share of a copy, a group per codec; a picture per layout and instruction set."""
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(
        len(found), 1, figsize=(9, 3 * len(found)), squeeze=False, layout="constrained"
    )
    for axes, (title, samples) in zip(rows[:, 0], found.items(), strict=True):
        codecs = list(dict.fromkeys(s.codec for s in samples))
        for number, operation in enumerate(OPERATIONS):
            spread = [
                quantiles(
                    shares(chosen(samples, codec=codec, operation=operation)),
                    n=4,
                    method="inclusive",
                )
                for codec in codecs
            ]
            middle = [m for _, m, _ in spread]
            error = [[m - low for low, m, _ in spread], [high - m for _, m, high in spread]]
            places = [i + (number - 1.5) * 0.2 for i in range(len(codecs))]
            axes.bar(places, middle, 0.2, yerr=error, label=operation)
        axes.axhline(SHARE_BAR, color="k", lw=0.8, ls="--")
        axes.set_xticks(range(len(codecs)), codecs)
        axes.set(title=title, ylabel="of a copy's bandwidth")
        axes.spines[["top", "right"]].set_visible(False)
    rows[0][0].legend(frameon=False, ncols=4, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


# ---- the command line -----------------------------------------------------------------------------------------------


def codecs_of(text: str) -> dict[str, Any]:
    """Codecs by name, each with its usual block or the one behind a colon."""
    found = {}
    for word in text.split(","):
        name, _, block = word.partition(":")
        found[word] = core.Codec(name, int(block) if block else CODECS.get(name, 0))
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", default=",".join(CODECS), help="(%(default)s)")
    parser.add_argument(
        "--layouts", type=lambda text: text.split(","), default=["large", "small", "list"]
    )
    parser.add_argument(
        "--instruction-sets",
        type=lambda text: text.split(","),
        default=[core.instruction_set()],
        dest="sets",
        help=f"of {', '.join(SETS)}; those that the processor lacks are left out (its best)",
    )
    parser.add_argument("--stream", action="store_true", help="write what travels past the caches")
    parser.add_argument("--repeats", type=int, default=15, help="repeats, at least 2 (15)")
    parser.add_argument("--quick", action="store_true", help="small sizes, 2 repeats")
    parser.add_argument("--plot", type=Path, help="write a picture")
    parser.add_argument("--json", type=Path, help="write every sample")
    arguments = parser.parse_args()
    for kind, given, known in (
        ("layouts", arguments.layouts, layouts(False)),
        ("instruction sets", arguments.sets, SETS),
    ):
        if unknown := set(given) - set(known):
            parser.error(f"unknown {kind} {', '.join(unknown)}; known are {', '.join(known)}")
    if arguments.repeats < 2:
        parser.error("at least 2 repeats")
    try:
        arguments.codecs = codecs_of(arguments.codecs)
    except ValueError as error:
        parser.error(str(error))
    arguments.sets = [name for name in arguments.sets if core.set_instruction_set(name)]
    if not arguments.sets:
        parser.error("this processor has none of these instruction sets")
    arguments.most_bytes = 32 << 20
    if arguments.quick:
        arguments.repeats, arguments.most_bytes = 2, 1 << 20
    return arguments


def main() -> int:
    """Prints tables per layout and instruction set, and whether the first codec keeps to the bars."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    found: dict[str, list[Sample]] = {}
    for name in arguments.layouts:
        layout = layouts(arguments.quick)[name]
        samples = measure(layout, arguments)
        for instruction_set in arguments.sets:
            found[f"{layout.words}, {instruction_set}"] = chosen(
                samples, instruction_set=instruction_set
            )
    streaming = ", past the caches" if arguments.stream else ""
    print(
        f"1 thread, {cpu_model()}, torch {torch.__version__}, {arguments.repeats} repeats"
        f"{streaming}\n"
    )
    first, best = next(iter(arguments.codecs)), arguments.sets[0]
    of_best = {title: samples for title, samples in found.items() if title.endswith(f", {best}")}
    for title, samples in found.items():
        print(bandwidth_table(title, samples) + "\n")
    for title, samples in of_best.items():
        print(torch_table(title, samples, first) + "\n")
    if not arguments.quick:  # sizes that nobody asks of
        for title, samples in of_best.items():
            print("\n".join(verdicts(title, samples, first)))
    if arguments.plot:
        plot(found, arguments.plot)
    if arguments.json:
        rows = {title: [vars(s) for s in samples] for title, samples in found.items()}
        arguments.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
