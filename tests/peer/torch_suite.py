"""Runs torch's own tests of torch.distributed and DistributedDataParallel with pycomm in Gloo's place.

The tests come with the torch wheel (torch.testing._internal.distributed.distributed_test); the list beside
this file names those that Gloo passes on CPU tensors. Each must pass with pycomm too, except the few in
EXPECTED.md. The status is 1 if a test fails, skips itself, or passes although EXPECTED.md says that it fails.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import forked
import judged
import suite
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

EXAMPLES = """\
examples:
  python tests/peer/torch_suite.py --world 4
  python tests/peer/torch_suite.py -k 'send|recv' --jobs 1
  python tests/peer/torch_suite.py --backend gloo --out runs/peer/gloo.jsonl
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--world", type=int, default=2, choices=(2, 3, 4), help="ranks (default: 2)"
    )
    parser.add_argument("--backend", default="pycomm", choices=("pycomm", "gloo"))
    parser.add_argument("-k", metavar="REGEX", default="", help="only tests whose name has a match")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time (default: 2)")
    parser.add_argument(
        "--timeout", type=float, default=180, help="seconds for one test (default: 180)"
    )
    parser.add_argument("--out", type=Path, help="file of JSON lines, one a test")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    return parser.parse_args(arguments)


class Report:
    """Says on the terminal how the tests end, and writes them to a file."""

    def __init__(self, options: argparse.Namespace, total: int) -> None:
        self.options = options
        self.counts: Counter[str] = Counter()
        self.console = Console(soft_wrap=True, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        # Without a refreshing thread: the tests are forked from this process.
        self.progress = Progress(
            *columns, console=self.console, auto_refresh=False, disable=not self.console.is_terminal
        )
        self.task = self.progress.add_task("", total=total)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text("")

    def add(self, test: str, outcome: forked.Outcome) -> None:
        """Takes in one test."""
        seen = judged.verdict(test, self.options.backend, outcome.status)
        self.counts[seen] += 1
        row: dict[str, Any] = {"test": test, "verdict": seen, "seconds": outcome.seconds}
        row |= {"backend": self.options.backend, "world": self.options.world}
        row |= {"torch": torch.__version__, "detail": outcome.detail}
        if self.options.out:
            with self.options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if seen not in judged.GOOD:
            self.console.print(f"{seen}: {test}\n{outcome.detail}", markup=False)
        self.progress.update(self.task, advance=1, description=test, refresh=True)

    def summary(self, absent: Sequence[str]) -> str:
        """The counts in words."""
        counts = ", ".join(f"{n} {word}" for word, n in sorted(self.counts.items()))
        lacking = f"; torch {torch.__version__} has no {', '.join(absent)}" if absent else ""
        return f"{self.options.backend}, {self.options.world} ranks: {counts or 'nothing to run'}{lacking}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    names = [name for name in judged.listed(options.world) if re.search(options.k, name)]
    if options.list:
        print("\n".join(names))
        return 0
    case = suite.load(options.backend, options.world, options.timeout)
    absent = [name for name in names if not hasattr(case, name)]
    tests: list[unittest.TestCase] = [case(name) for name in names if hasattr(case, name)]
    report = Report(options, len(tests))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pycomm-peer-"))
        tempfile.tempdir = folder  # what a killed test leaves goes with it
        stack.callback(setattr, tempfile, "tempdir", None)
        stack.enter_context(report.progress)
        for test, outcome in forked.run(tests, options.jobs, options.timeout, Path(folder)):
            report.add(test.id().rpartition(".")[2], outcome)
    print(report.summary(absent))
    return 0 if all(word in judged.GOOD for word in report.counts) else 1


if __name__ == "__main__":
    sys.exit(main())
