"""What a run found: its rows, and how they are derived from the samples.

Definitions are those of nccl-tests: S is the whole buffer in bytes (all_gather, gather: the output;
reduce_scatter, scatter: the input; all_to_all: each rank's input), algbw = S / time, busbw = algbw *
f(op, ranks), GB = 1e9 bytes. Sizes K, M, G are powers of 1024. Times are in microseconds.

A sample is a row of short batches of calls. A batch's time per call is its slowest rank's; p99 is
the 99th percentile of those over all batches of all repeats, so it is of means of a few calls where
calls are short, and close to the maximum where a sample holds only a few calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cases import Case, bus_factor, calls_per_round, memory_bytes
from names import BOUND, GLOO, VARIANTS, engine_of

NEAR_NS = 175.0  # one-way flag latency below which the ranks' cores count as "near" (a shared L3)
BUSY_NS = 2000.0  # above, it is not the distance that was measured but waiting for a core


@dataclass(frozen=True)
class Ratio:
    """Another time / this variant's time in the same repeat, over the repeats: 2 is twice as fast."""

    median: float
    low: float  # quartiles
    high: float
    min: float
    max: float


@dataclass(frozen=True)
class Row(Case):
    """One variant of one case. Times are the slowest rank's, per call."""

    variant: str
    calls: list[int]  # in each sample
    samples_us: list[float]  # one per repeat, in the order taken
    time_us: float  # median of the samples, as are the derived figures below
    time_us_min: float
    time_us_max: float
    time_us_quartiles: list[float]
    time_us_p99: float  # over batches
    variation: float  # of the samples: standard deviation / mean
    algbw_GBps: float  # noqa: N815  (the unit's spelling)
    busbw_GBps: float  # noqa: N815
    ratio_to_gloo: Ratio
    ratio_to_best: Ratio | None  # to the fastest other engine of each repeat
    best_other: str | None  # the one that was it most often
    memory_bytes: int  # at least, of all ranks together
    bound_fraction: Ratio | None  # time that memory_bytes take at the memory bound / this time
    flag_latency_ns: list[float]  # before the first repeat and after each
    placement: list[str]  # the same, in words


@dataclass(frozen=True)
class Run:
    """A finished run: where and how it was made, and its rows."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    notes: list[str]  # what is missing, and why
    rows: list[Row]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Run:
        data = json.loads(path.read_text())
        rows = [row_from_json(row) for row in data["rows"]]
        return cls(data["machine"], data["settings"], data["notes"], rows)

    def ops(self) -> list[str]:
        return list(dict.fromkeys(row.op for row in self.rows))

    def sizes(self, op: str) -> list[int]:
        return sorted({row.size_bytes for row in self.rows if row.op == op})

    def variants(self, op: str) -> list[str]:
        present = {row.variant for row in self.rows if row.op == op}
        return [variant for variant in VARIANTS if variant in present]

    def line(self, op: str, variant: str) -> list[Row]:
        """The rows of one variant, smallest size first."""
        rows = [row for row in self.rows if (row.op, row.variant) == (op, variant)]
        return sorted(rows, key=lambda row: row.size_bytes)

    def find(self, op: str, size_bytes: int, variant: str) -> Row | None:
        return next((row for row in self.line(op, variant) if row.size_bytes == size_bytes), None)


def row_from_json(data: dict[str, Any]) -> Row:
    ratios = ("ratio_to_gloo", "ratio_to_best", "bound_fraction")
    found: dict[str, Any] = {key: Ratio(**data[key]) for key in ratios if data[key]}
    return Row(**{**data, **found})


# ----------------------------------------------------------------------------------------- deriving


@dataclass
class Samples:
    """One variant's samples of a case: times in us per call."""

    times: list[float]  # one per repeat
    batches: list[float]  # of all repeats
    calls: list[int]


def placement(flag_latency_ns: float) -> str:
    if flag_latency_ns > BUSY_NS:
        return "busy"
    return "near" if flag_latency_ns < NEAR_NS else "far"


def quartiles(values: Sequence[float]) -> list[float]:
    return [float(q) for q in np.percentile(values, (25, 75))]


def ratio(others: Sequence[float], own: Sequence[float]) -> Ratio:
    values = [other / mine for other, mine in zip(others, own, strict=True)]
    low, high = quartiles(values)
    return Ratio(float(np.median(values)), low, high, min(values), max(values))


def best_others(variant: str, samples: dict[str, Samples]) -> tuple[list[float], str] | None:
    """Each repeat's fastest time of the other engines, and which engine it most often was."""
    own = engine_of(variant)
    others = {name: it.times for name, it in samples.items() if engine_of(name) not in (None, own)}
    if own is None or not others:
        return None
    names, repeats = list(others), list(zip(*others.values(), strict=True))
    winners = [names[int(np.argmin(times))] for times in repeats]
    return [min(times) for times in repeats], max(names, key=winners.count)


def bound_times(case: Case, samples: dict[str, Samples]) -> list[float] | None:
    """Time of the case's least traffic at the memory bound: the kernel's is an all_reduce's."""
    if BOUND not in samples:
        return None
    own, measured = (
        memory_bytes(op, case.size_bytes, case.world_size) for op in (case.op, "all_reduce")
    )
    return [time_us * own / measured for time_us in samples[BOUND].times]


def make_row(
    case: Case, variant: str, samples: dict[str, Samples], flag_latency_ns: list[float]
) -> Row:
    """Derive a row from the samples of all variants, of the same repeats."""
    bounds, best = bound_times(case, samples), best_others(variant, samples)
    times = bounds if bounds and variant == BOUND else samples[variant].times
    scale = times[0] / samples[variant].times[0]
    time_us = float(np.median(times))
    algbw = case.size_bytes / (time_us * 1e-6) / 1e9
    return Row(
        **asdict(case),
        variant=variant,
        calls=samples[variant].calls,
        samples_us=times,
        time_us=time_us,
        time_us_min=min(times),
        time_us_max=max(times),
        time_us_quartiles=quartiles(times),
        time_us_p99=float(np.percentile(samples[variant].batches, 99)) * scale,
        variation=float(np.std(times) / np.mean(times)),
        algbw_GBps=algbw,
        busbw_GBps=algbw * bus_factor(case.op, case.world_size),
        ratio_to_gloo=ratio(samples[GLOO].times, times),
        ratio_to_best=ratio(best[0], times) if best else None,
        best_other=best[1] if best else None,
        memory_bytes=memory_bytes(case.op, case.size_bytes, case.world_size),
        bound_fraction=ratio(bounds, times) if bounds else None,
        flag_latency_ns=flag_latency_ns,
        placement=[placement(latency) for latency in flag_latency_ns],
    )


def make_samples(replies: Sequence[Sequence[Sequence[int]]], calls: list[int], op: str) -> Samples:
    """From nanoseconds by repeat, rank and batch, and the calls in a batch of each repeat."""
    times, batches, totals = [], [], []
    for repeat, in_batch in zip(replies, calls, strict=True):
        per_call = np.asarray(repeat, dtype=np.float64) / in_batch / calls_per_round(op) / 1e3
        times.append(float(per_call.mean(axis=1).max()))
        batches += [float(time_us) for time_us in per_call.max(axis=0)]
        totals.append(in_batch * per_call.shape[1])
    return Samples(times, batches, totals)
