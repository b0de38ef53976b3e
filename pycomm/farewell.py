"""What a rank that leaves its group, or ends, tells those who come to wait for it; called by the extension modules."""

from __future__ import annotations

import sys

from pycomm.flight import report_all_failures

_interrupt = ""


def note_interrupt(error: BaseException | None) -> None:
    """Keeps what a signal ended a call with, since a rank that goes on often leaves where others do not; None: none."""
    global _interrupt
    _interrupt = "" if error is None else _in_words(error)


def farewell() -> str:
    """What peers should hear if this rank leaves its group now: the exception that makes it leave, or nothing."""
    report_all_failures()
    error = sys.exc_info()[1]
    return _interrupt if error is None else _in_words(error)


def last_words() -> str:
    """The same at the process's exit: the exception that nobody caught."""
    report_all_failures()
    error = getattr(sys, "last_value", None)
    return "" if error is None else _in_words(error)


def _in_words(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
