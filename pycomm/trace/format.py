"""What a dump holds.

A dump is one process's view: of each of its groups the states and the last operations of all ranks, since these lie in
shared memory. Times are nanoseconds of the Unix epoch. Ranks, roots and peers are the group's, as the recorder gives
them; `pycomm.trace.job` turns them into those of the job. `pycomm.trace.read` checks a file against the fields here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

FORMAT = "pycomm-trace"
VERSION = 2
#: Names of files do not end in digits and do not contain torch_format.PREFIX, so that torch's analyser steps over them.
NAME, SUFFIX = "pycomm-trace.", ".json"

SCHEDULED, STARTED, COMPLETED, FAILED = "scheduled", "started", "completed", "failed"
#: In the order in which an operation goes through them.
STATES = (SCHEDULED, STARTED, COMPLETED, FAILED)
ANY_SOURCE = -1


class Cause(StrEnum):
    """Why a group ended, as the core has it (csrc/error.h); and what else a verdict may be."""

    OTHER = "other"
    INTERRUPTED = "interrupted"
    ABORTED = "aborted"
    CROSSING = "crossing"
    LEFT = "left"
    MISMATCH = "mismatch"
    PARTS_MISMATCH = "parts_mismatch"
    MESSAGE_MISMATCH = "message_mismatch"
    STOPPED = "stopped"
    DIED = "died"
    EXITED = "exited"
    TIMEOUT = "timeout"
    # What the ranks' waits show:
    CIRCLE = "circle"  # ranks wait for each other
    ABSENT = "absent"  # a rank is alive, and in no operation that waits
    STUCK = "stuck"  # all are there, and it does not end
    FINE = "fine"


#: Those that a group can fail of.
CORE_CAUSES = tuple(Cause)[: tuple(Cause).index(Cause.CIRCLE)]


class Recorded(Protocol):
    """What a dump needs of a communicator."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""

    @property
    def name(self) -> str:
        """The process group's name."""

    @property
    def global_ranks(self) -> Sequence[int]:
        """The rank in the job of every rank of the group."""

    def records(self, rank: int, /) -> Sequence[Mapping[str, Any]]:
        """The last operations of any rank, oldest first: the fields of Record."""

    def rank_state(self, rank: int, /) -> Mapping[str, Any]:
        """The fields of RankState, of any rank."""

    def failure_cause(self) -> Mapping[str, Any] | None:
        """The first failure of the group, as all ranks report it: the fields of Failure."""


class BadDump(ValueError):
    """A file is not a dump, or a broken one; the message says where."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A group's first error."""

    text: str
    cause: str = Cause.OTHER
    culprit: int = -1  # rank of the group; -1: unknown


@dataclass(frozen=True, slots=True)
class Record:
    """One operation or message of one rank."""

    record_id: int
    sequence: int  # of the collective in the group, or of the message of this rank; 0: still queued
    operation: str
    state: str
    dtype: str = "?"
    count: int = 0
    bytes: int = 0
    op: str | None = None
    shape: tuple[int, ...] | None = None
    root: int | None = None
    peer: int | None = None  # of messages; ANY_SOURCE
    tag: int | None = None
    created_ns: int | None = None
    started_ns: int | None = None
    met_ns: int | None = None  # when all ranks had arrived
    finished_ns: int | None = None
    line: str = ""  # "train.py:88 in step"
    timeout_ms: int = 0

    @property
    def is_message(self) -> bool:
        """Whether this is a send or recv."""
        return self.peer is not None

    @property
    def moved_ns(self) -> int:
        """When it was last heard of."""
        times = (self.created_ns, self.started_ns, self.met_ns, self.finished_ns)
        return max(ns or 0 for ns in times)


@dataclass(frozen=True, slots=True)
class RankState:
    """What can be told of a rank's process, at the time of the dump."""

    pid: int = 0  # 0: unknown
    alive: bool = True
    left: bool = False  # the group
    stopped: bool = False  # by a signal or a debugger
    sequence: int = 0  # the last collective that it entered
    farewell: str = ""  # the exception that it left with


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group, as one of its ranks sees it."""

    rank: int
    ranks: tuple[int, ...]  # in the job
    states: tuple[RankState, ...]
    records: tuple[tuple[Record, ...], ...]
    name: str = ""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Dump:
    """One process's view of all its groups."""

    rank: int  # in the job
    time_ns: int
    groups: tuple[GroupView, ...]
    host: str = "?"
    pid: int = 0
    reason: str = ""
    torch: str = "?"
    file: str = ""
