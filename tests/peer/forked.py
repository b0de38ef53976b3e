"""Runs unittest tests each in a forked process, some at a time, none longer than its time limit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
import unittest
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final

_FORK: Final = multiprocessing.get_context("fork")
#: Characters kept of a failure's text and of a log: together less than a pipe's buffer takes at once.
MOST_TEXT: Final = 8000


@dataclass(frozen=True)
class Outcome:
    """How a test ended."""

    status: str  # pass, skip, fail or timeout
    detail: str = ""  # traceback or reason of the skip
    seconds: float = 0


@dataclass(eq=False)
class _Child:
    """One test in its process, from the parent's side."""

    test: unittest.TestCase
    log: Path
    timeout: float
    started: float = field(default_factory=time.monotonic)
    receiver: connection.Connection = field(init=False)
    process: Any = field(init=False)

    def __post_init__(self) -> None:
        self.receiver, sender = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(target=_child_main, args=(self.test, self.log, sender))
        self.process.start()
        sender.close()

    def left(self) -> float:
        """Seconds until this test's time is up."""
        return self.started + self.timeout - time.monotonic()

    def outcome(self) -> Outcome | None:
        """The outcome, if there is one; the process and all of its group are then gone."""
        ended = connection.wait([self.receiver, self.process.sentinel], 0)
        if not ended and self.left() > 0:
            return None
        status, detail = "timeout", f"not done after {self.timeout:g} s"
        if ended:
            try:
                status, detail = self.receiver.recv()
            except EOFError:
                status, detail = "fail", "the process of the test died"
        self._end()
        if status in ("fail", "timeout"):
            detail = f"{detail}\n--- output\n{self.log.read_text(errors='replace')[-MOST_TEXT:]}"
        return Outcome(status, detail, round(time.monotonic() - self.started, 2))

    def _end(self) -> None:
        """Ends the test's process and the ranks it may have left: all are of the session it leads."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not yet have led a session
        self.process.join()
        self.receiver.close()


def _child_main(test: unittest.TestCase, log: Path, sender: connection.Connection) -> None:
    os.setsid()
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    result = unittest.TestResult()
    try:
        unittest.TestSuite([test]).run(result)  # with setUpClass
        answer = _answer(result)
    except BaseException:
        answer = ("fail", traceback.format_exc())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    sender.send((answer[0], answer[1][-MOST_TEXT:]))


def _answer(result: unittest.TestResult) -> tuple[str, str]:
    for _, text in result.errors + result.failures:
        return "fail", text
    if result.unexpectedSuccesses:
        return "fail", "unexpected success"
    for _, reason in result.skipped:
        return "skip", reason
    return "pass", ""


def run(
    tests: Sequence[unittest.TestCase], jobs: int, timeout: float, folder: Path
) -> Iterator[tuple[unittest.TestCase, Outcome]]:
    """Yields each test with its outcome as it ends: at most `jobs` at a time, `timeout` seconds for each.

    The caller must have no other threads. Tests write their output to files in `folder`.
    """
    waiting = list(reversed(tests))
    running: list[_Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                test = waiting.pop()
                running.append(_Child(test, folder / f"{test.id()}.log", timeout))
            handles = [h for child in running for h in (child.receiver, child.process.sentinel)]
            connection.wait(handles, max(0, min(child.left() for child in running)))
            for child in list(running):
                outcome = child.outcome()
                if outcome is not None:
                    running.remove(child)
                    yield child.test, outcome
    finally:
        for child in running:
            child._end()
