"""What a dump holds, and how it is read back: types, and checks that say in words what is wrong with a file.

A dump is one process's view: of each of its groups the states and the last operations of all ranks, since these lie in
shared memory. Times are nanoseconds of the Unix epoch. Ranks, roots and peers are the group's, as the recorder gives
them; `pycomm.trace.job` turns them into those of the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Protocol

FORMAT = "pycomm-trace"
VERSION = 1

SCHEDULED, STARTED, COMPLETED, FAILED = "scheduled", "started", "completed", "failed"
#: In the order in which an operation goes through them.
STATES = (SCHEDULED, STARTED, COMPLETED, FAILED)
ANY_SOURCE = -1

_MOST_INTEGER = 2**63 - 1
_MOST_TEXT = 4000
_MOST_RANKS = 100_000


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

    def failure_report(self) -> str | None:
        """The first error of the group, as all ranks report it."""


class BadDump(ValueError):
    """A file is not a dump, or a broken one; the message says where."""


@dataclass(frozen=True, slots=True)
class Record:
    """One operation or message of one rank."""

    record_id: int
    sequence: int  # of the collective in the group, or of the message of this rank; 0: still queued
    operation: str
    dtype: str
    count: int
    bytes: int
    state: str
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
        return max(
            filter(None, (self.created_ns, self.started_ns, self.met_ns, self.finished_ns)),
            default=0,
        )


@dataclass(frozen=True, slots=True)
class RankState:
    """What can be told of a rank's process, at the time of the dump."""

    pid: int = 0
    alive: bool = True
    left: bool = False  # the group
    stopped: bool = False  # by a signal or a debugger
    sequence: int = 0  # the last collective that it entered
    farewell: str = ""  # the exception that it left with


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group, as one of its ranks sees it."""

    name: str
    rank: int
    ranks: tuple[int, ...]  # in the job
    failure: str
    states: tuple[RankState, ...]
    records: tuple[tuple[Record, ...], ...]


@dataclass(frozen=True, slots=True)
class Dump:
    """One process's view of all its groups."""

    file: str
    host: str
    pid: int
    rank: int  # in the job
    reason: str
    time_ns: int
    torch: str
    groups: tuple[GroupView, ...]


# ---- reading --------------------------------------------------------------------------------------------------------


def parse_dump(content: Any, file: str) -> Dump:
    """A dump from what json.loads has made of a file; raises BadDump."""
    fields_ = _Fields(content, "the file")
    if fields_.text("format", "") != FORMAT:
        raise BadDump(f"it is no dump of pycomm: its 'format' is not {FORMAT!r}")
    version = fields_.integer("version")
    if version != VERSION:
        raise BadDump(
            f"it has version {version}, but this pycomm reads version {VERSION}; use the pycomm that wrote it"
        )
    groups = [
        _parse_group(group, f"group {index}") for index, group in enumerate(fields_.list("groups"))
    ]
    return Dump(
        file=file,
        host=fields_.text("host", "?"),
        pid=fields_.integer("pid", 0),
        rank=fields_.integer("rank"),
        reason=fields_.text("reason", ""),
        time_ns=fields_.integer("time_ns"),
        torch=fields_.text("torch", "?"),
        groups=tuple(groups),
    )


def _parse_group(content: Any, where: str) -> GroupView:
    group = _Fields(content, where)
    ranks = tuple(_integer(rank, f"{where}: a rank") for rank in group.list("ranks"))
    if not ranks or len(set(ranks)) != len(ranks) or len(ranks) > _MOST_RANKS:
        raise BadDump(f"{where}: 'ranks' is empty or names a rank twice")
    states, records = group.list("states"), group.list("records")
    if len(states) != len(ranks) or len(records) != len(ranks):
        raise BadDump(
            f"{where}: it has {len(ranks)} ranks, but {len(states)} 'states' and {len(records)} lists of 'records'"
        )
    return GroupView(
        name=group.text("name", ""),
        rank=group.integer("rank", most=len(ranks) - 1),
        ranks=ranks,
        failure=group.text("failure", ""),
        states=tuple(_parse_state(state, f"{where}, state {r}") for r, state in enumerate(states)),
        records=tuple(
            _parse_records(of_rank, len(ranks), f"{where}, rank {r}")
            for r, of_rank in enumerate(records)
        ),
    )


def _parse_state(content: Any, where: str) -> RankState:
    if content is None:  # it could not be read
        return RankState()
    state = _Fields(content, where)
    return RankState(
        pid=state.integer("pid", 0),
        alive=state.flag("alive", True),
        left=state.flag("left", False),
        stopped=state.flag("stopped", False),
        sequence=state.integer("sequence", 0),
        farewell=state.text("farewell", ""),
    )


def _parse_records(content: Any, world_size: int, where: str) -> tuple[Record, ...]:
    if not isinstance(content, list):
        raise BadDump(f"{where}: its records are no list")
    records = tuple(
        parse_record(record, world_size, f"{where}, record {index}")
        for index, record in enumerate(content)
    )
    numbers = [record.record_id for record in records]
    if any(later <= earlier for earlier, later in pairwise(numbers)):
        raise BadDump(f"{where}: its records are not in the order of 'record_id'")
    return records


def parse_record(content: Any, world_size: int, where: str) -> Record:
    """One record of a group of that many ranks; raises BadDump."""
    record = _Fields(content, where)
    operation, state = record.text("operation"), record.text("state")
    if state not in STATES:
        raise BadDump(f"{where}: 'state' is {state!r}, not one of {', '.join(STATES)}")
    is_message = operation in ("send", "recv")
    shape = record.list("shape", None)
    last = world_size - 1
    return Record(
        record_id=record.integer("record_id"),
        sequence=record.integer("sequence"),
        operation=operation,
        dtype=record.text("dtype", "?"),
        count=record.integer("count", 0),
        bytes=record.integer("bytes", 0),
        state=state,
        op=record.text("op", "") or None,
        shape=None if shape is None else tuple(_integer(n, f"{where}: 'shape'") for n in shape),
        root=None if is_message else record.maybe("root", 0, last),
        peer=record.integer("peer", least=ANY_SOURCE, most=last) if is_message else None,
        tag=record.maybe("tag", -_MOST_INTEGER) if is_message else None,
        created_ns=record.maybe("created_ns"),
        started_ns=record.maybe("started_ns"),
        met_ns=record.maybe("met_ns"),
        finished_ns=record.maybe("finished_ns"),
        line=record.text("line", ""),
        timeout_ms=record.integer("timeout_ms", 0),
    )


class _Fields:
    """The entries of a JSON object, checked as they are taken out. None counts as absent."""

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, dict):
            raise BadDump(f"{where}: it is no object but {_kind(content)}")
        self._content = content
        self._where = where

    def _get(self, name: str, default: Any) -> Any:
        value = self._content.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise BadDump(f"{self._where}: {name!r} is missing")
        return default

    def text(self, name: str, default: Any = ...) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise BadDump(f"{self._where}: {name!r} is no text but {_kind(value)}")
        return clean(value)

    def integer(
        self, name: str, default: Any = ..., least: int = 0, most: int = _MOST_INTEGER
    ) -> int:
        return _integer(self._get(name, default), f"{self._where}: {name!r}", least, most)

    def maybe(self, name: str, least: int = 0, most: int = _MOST_INTEGER) -> int | None:
        value = self._get(name, None)
        return None if value is None else _integer(value, f"{self._where}: {name!r}", least, most)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise BadDump(f"{self._where}: {name!r} is neither true nor false but {_kind(value)}")
        return value

    def list(self, name: str, default: Any = ...) -> Any:
        value = self._get(name, default)
        if value is not None and not isinstance(value, list):
            raise BadDump(f"{self._where}: {name!r} is no list but {_kind(value)}")
        return value


_REQUIRED = ...


def _integer(value: Any, what: str, least: int = 0, most: int = _MOST_INTEGER) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadDump(f"{what} is no integer but {_kind(value)}")
    if not least <= value <= most:
        raise BadDump(f"{what} is out of range")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
    return names.get(type(value), f"of type {type(value).__name__}")


def clean(text: str) -> str:
    """Text that can be printed anywhere: one line, without control characters and of bounded length."""
    shown = "".join(
        c if c.isprintable() else " " if c.isspace() else "?" for c in text[:_MOST_TEXT]
    )
    return shown + ("..." if len(text) > _MOST_TEXT else "")


RECORD_FIELDS = tuple(field.name for field in fields(Record))
STATE_FIELDS = tuple(field.name for field in fields(RankState))
