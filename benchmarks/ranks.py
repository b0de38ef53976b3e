"""The ranks of a script that needs no launcher: processes of this machine, and what they answer."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any


def answers_of(worker: Callable[..., None], world_size: int, *args: Any) -> Iterator[Any]:
    """Runs ``worker(rank, path, *args, answers)`` on every rank; what is put into the queue, until a None is.

    ``path`` is a file for their rendezvous.
    """
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        ranks = [
            context.Process(target=worker, args=(rank, path, *args, answers))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        while (answer := _next(answers, ranks)) is not None:
            yield answer
        for process in ranks:
            process.join()


def _next(answers: Any, ranks: Sequence[Any]) -> Any:
    """The next answer; RuntimeError if a rank has failed, whose own words stand above."""
    while True:
        try:
            return answers.get(timeout=1)
        except queue.Empty:
            failed = {rank: p.exitcode for rank, p in enumerate(ranks) if p.exitcode}
            if failed:
                for process in ranks:
                    process.kill()
                raise RuntimeError(f"ranks that failed, and their exit codes: {failed}") from None


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The lower one, the median and the upper one; between the values, be they only two."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high
