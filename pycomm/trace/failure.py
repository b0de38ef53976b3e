"""What kind of failure a group's report tells of.

The report is the sentence that all ranks raise, so its words are known; one in other words is of kind OTHER, and is
quoted as it stands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto


class Kind(Enum):
    """Why a group ended."""

    INTERRUPTED = auto()  # Ctrl-C, or another signal whose handler raised
    ABORTED = auto()  # abort() was called
    CROSSING = auto()  # two groups entered in different order
    LEFT = auto()  # a rank destroyed the group, while others needed it
    MESSAGE_MISMATCH = auto()
    MISMATCH = auto()
    STOPPED = auto()  # a rank's process stands still
    DIED = auto()
    EXITED = auto()  # a rank's process ended, or left because of an exception
    TIMEOUT = auto()
    OTHER = auto()


#: Searched in this order. `culprit` is a rank of the group, `pid` its process; `why` what follows.
_WORDS = (
    (Kind.INTERRUPTED, r"^rank (?P<culprit>\d+)\b.* was interrupted"),
    (Kind.ABORTED, r"^rank (?P<culprit>\d+) aborted: (?P<why>.*)"),
    (
        Kind.CROSSING,
        r"waits for rank (?P<culprit>\d+) .*which waits for this rank in another group",
    ),
    (Kind.LEFT, r"waits for rank (?P<culprit>\d+) .*which has destroyed the group"),
    (Kind.MESSAGE_MISMATCH, r"the message for it is rank (?P<culprit>\d+)'s"),
    (Kind.MISMATCH, r"ranks disagree on operation \d+"),
    (Kind.STOPPED, r"process \(pid (?P<pid>\d+)\) stands still"),
    (Kind.DIED, r"lost rank (?P<culprit>\d+) .*which died"),
    (Kind.EXITED, r"lost rank (?P<culprit>\d+) .*which left the group because of (?P<why>[^;]*)"),
    (Kind.EXITED, r"lost rank (?P<culprit>\d+) .*which ended without"),
    (Kind.LEFT, r"lost rank (?P<culprit>\d+) .*which left the group"),
    (Kind.TIMEOUT, r"exceeded its timeout|failed to pass monitoredBarrier"),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A group's first error."""

    text: str
    kind: Kind
    culprit: int | None = None  # rank of the group
    why: str = ""


def classify(text: str, pids: list[int]) -> Failure:
    """What a report means; `pids` are those of the group's ranks."""
    for kind, words in _WORDS:
        if not (found := re.search(words, text)):
            continue
        told = found.groupdict()
        culprit = int(told["culprit"]) if told.get("culprit") else None
        if told.get("pid") and int(told["pid"]) in pids:
            culprit = pids.index(int(told["pid"]))
        if culprit is not None and culprit >= len(pids):
            culprit = None
        return Failure(text, kind, culprit, (told.get("why") or "").strip())
    return Failure(text, Kind.OTHER)
