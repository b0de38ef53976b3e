"""One rank's part: for each size all backends take turns, in rounds; then what they have left is checked."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median, pstdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pycomm.bench import codecs, steps
from pycomm.bench.operations import (
    IN_PLACE,
    OUT_OF_PLACE,
    Call,
    Case,
    bus_factor,
    count_for,
    prepare,
)
from pycomm.bench.settings import Settings
from pycomm.errors import Error, InvalidArgument


@dataclass
class Side:
    """In place or out of place, with one backend: microseconds of every call, by the slowest rank."""

    backend: str
    in_place: bool
    times: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)  # of the rounds
    wrong: int = 0
    first_wrong: str = ""
    refused: str = ""

    @property
    def median(self) -> float:
        """Of all calls."""
        return median(self.times)

    @property
    def least(self) -> float:
        """Of all calls."""
        return min(self.times)

    @property
    def p99(self) -> float:
        """The time that one call in a hundred exceeds."""
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]

    @property
    def variation(self) -> float:
        """Standard deviation over mean."""
        return pstdev(self.times) / mean(self.times)


@dataclass
class Row:
    """All that was measured of one size."""

    case: Case
    sides: list[Side]

    def bandwidths(self, side: Side) -> tuple[float, float]:
        """algbw and busbw in GB/s, of the median."""
        if not side.times:
            return 0.0, 0.0
        algorithm = self.case.bytes / side.median / 1e3
        return algorithm, algorithm * bus_factor(self.case.operation, self.case.ranks)


def measure(
    settings: Settings, groups: dict[str, dist.ProcessGroup], control: dist.ProcessGroup
) -> Iterator[Row]:
    """Collective: a row for each size."""
    chance = random.Random(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for size in settings.sizes:
        count = count_for(settings.operation, size, settings.dtype, ranks)
        if settings.operation == "ddp":
            count = steps.count_of(size)
        case = Case(
            settings.operation, count, settings.dtype, settings.op, settings.root, rank, ranks
        )
        sides, calls = _prepared(case, settings, groups, control)
        for _ in range(settings.rounds):
            order = list(range(len(sides)))
            chance.shuffle(order)
            for index in order:
                if not sides[index].refused:
                    _round(sides[index], calls[index], settings, control)
        if settings.check:
            for side, call in zip(sides, calls, strict=True):
                if not side.refused:
                    _check(side, call, case, control)
        yield Row(case, sides)


def _prepared(
    case: Case,
    settings: Settings,
    groups: dict[str, dist.ProcessGroup],
    control: dist.ProcessGroup,
) -> tuple[list[Side], list[Call]]:
    """Warmed up. What a backend cannot do is noted, on all ranks, and left out."""
    sides, calls = [], []
    for side, make in _sides(case, settings, groups):
        call = make()
        call.fill()
        try:
            for _ in range(max(1, settings.warmup)):
                call.run()
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, Error) and not isinstance(error, InvalidArgument):
                raise  # it can, but something went wrong
            side.refused = _reason(error)
        told: list[Any] = [None] * case.ranks
        dist.all_gather_object(told, side.refused, group=control)
        side.refused = next(filter(None, told), "")
        sides.append(side)
        calls.append(call)
    return sides, calls


def _sides(
    case: Case, settings: Settings, groups: dict[str, dist.ProcessGroup]
) -> Iterator[tuple[Side, Callable[[], Call]]]:
    if case.operation == "compress":
        for name, make in codecs.sides(case, settings.compressions):
            yield Side(name, False), make
    elif case.operation == "ddp":
        for name, make in steps.sides(case, groups, settings.ways):
            yield Side(name, False), make
    else:
        for way in settings.ways:
            for in_place, known in ((False, OUT_OF_PLACE), (True, IN_PLACE)):
                if case.operation in known:
                    made = partial(
                        prepare, case, groups[way.backend], in_place, settings.offset, way
                    )
                    yield Side(str(way), in_place), made


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def _round(side: Side, call: Call, settings: Settings, control: dist.ProcessGroup) -> None:
    """So many calls, each by the slowest rank."""
    clock, run, together = time.perf_counter, call.run, settings.together
    times = []
    dist.barrier(control)
    for _ in range(settings.iterations):
        began = clock()
        for _ in range(together):
            run()
        times.append((clock() - began) / together * 1e6)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
    side.times += slowest.tolist()
    side.medians.append(median(slowest.tolist()))


def _check(side: Side, call: Call, case: Case, control: dist.ProcessGroup) -> None:
    """Collective: one more call on fresh contents, whose every element is compared."""
    wanted = call.wanted()
    call.fill()
    call.run()
    if call.finish:
        call.finish()
    wrong, first = 0, ""
    if wanted is not None:
        wrong, first = _differences(call.result, wanted, case.rank, call.tolerance)
    told: list[Any] = [None] * case.ranks
    dist.all_gather_object(told, (wrong, first), group=control)
    side.wrong = sum(number for number, _ in told)
    side.first_wrong = next((words for _, words in told if words), "")


def _differences(
    found: Tensor, wanted: Tensor, rank: int, tolerance: float = 0.0
) -> tuple[int, str]:
    is_right = (found - wanted).abs() <= tolerance if tolerance else found == wanted
    places = (~is_right).nonzero()
    if not len(places):
        return 0, ""
    at = int(places[0])
    words = f"rank {rank}, element {at}: expected {wanted[at].item()}, got {found[at].item()}"
    return len(places), words


def copy_bandwidth(bytes: int = 64 << 20, repeats: int = 5) -> float:
    """GB/s of a copy in memory by one thread: bytes copied per second, not read and written together."""
    source, target = torch.ones(bytes // 4), torch.empty(bytes // 4)
    return max(bytes / _seconds(lambda: target.copy_(source)) / 1e9 for _ in range(repeats))


def clock_noise(repeats: int = 200) -> float:
    """Of a fixed piece of work: the slowest tenth's time over the fastest one's; 1 on a quiet machine."""
    values = torch.ones(1 << 14)
    times = sorted(_seconds(lambda: values.sum()) for _ in range(repeats))
    return times[repeats * 9 // 10] / times[repeats // 10]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
