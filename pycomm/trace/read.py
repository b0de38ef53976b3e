"""Reading a directory of dumps: what cannot be read is said, not raised."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pycomm.trace.format import (
    ANY_SOURCE,
    CORE_CAUSES,
    FORMAT,
    NAME,
    STATES,
    SUFFIX,
    VERSION,
    BadDump,
    Dump,
    GroupView,
)
from pycomm.trace.job import Job, put_together

_MOST_INTEGER = 2**63 - 1
_MOST_TEXT = 4000
_KINDS = {
    int: "an integer",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def read_job(directory: Path) -> Job:
    """All dumps of a directory, as one job. The notes tell which files could not be read, and why."""
    dumps, notes = [], []
    for path in sorted(directory.glob(f"{NAME}*{SUFFIX}")):
        try:
            dumps.append(read_dump(path))
        except BadDump as error:
            notes.append(f"{path.name} is left out: {error}")
    job = put_together(dumps)
    return replace(job, notes=notes + job.notes)


def read_dump(path: Path) -> Dump:
    """One dump; raises BadDump with what is wrong with the file."""
    try:
        return parse_dump(json.loads(path.read_bytes()), path.name)
    except OSError as error:
        raise BadDump(f"it cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise BadDump("it is nested too deeply to be a dump") from error
    except BadDump:
        raise
    except ValueError as error:  # of JSON or of its encoding
        raise BadDump(f"it is no JSON, or was cut off: {error}") from error


def parse_dump(content: Any, file: str) -> Dump:
    """A dump from what json.loads has made of a file; raises BadDump."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadDump(f"it is no dump of pycomm: its 'format' is not {FORMAT!r}")
    if (version := content.get("version")) != VERSION:
        raise BadDump(
            f"it has version {version!r}, but this pycomm reads version {VERSION}; use the pycomm that wrote it"
        )
    dump: Dump = _parse(Dump, content, "the file")
    for number, group in enumerate(dump.groups):
        _check(group, f"group {number}")
    return replace(dump, file=file)


def _parse(kind: Any, value: Any, where: str) -> Any:
    """A value of an annotated type, from JSON. Null stands for what is missing."""
    if is_dataclass(kind):
        return _parse_object(kind, value, where)
    if arguments := get_args(kind):
        if type(None) in arguments:
            return None if value is None else _parse(arguments[0], value, where)
        items = enumerate(_expect(list, value, where))
        return tuple(_parse(arguments[0], item, f"{where}, {i}") for i, item in items)
    _expect(kind, value, where)
    if kind is int and abs(value) > _MOST_INTEGER:
        raise BadDump(f"{where} is out of range")
    return clean(value) if kind is str else value


def _parse_object(kind: Any, value: Any, where: str) -> Any:
    given, known = _expect(dict, value, where), {}
    for name, of, is_needed in _fields(kind):
        if given.get(name) is not None:
            known[name] = _parse(of, given[name], f"{where}: {name!r}")
        elif is_needed:
            raise BadDump(f"{where}: {name!r} is missing")
    return kind(**known)


@cache
def _fields(kind: Any) -> list[tuple[str, Any, bool]]:
    """Name and type of what a dataclass holds, and whether it must be given."""
    types = get_type_hints(kind)
    return [(field.name, types[field.name], field.default is MISSING) for field in fields(kind)]


def _expect(kind: Any, value: Any, where: str) -> Any:
    if type(value) is not kind:
        found = _KINDS.get(type(value), repr(value))
        raise BadDump(f"{where} is {found}, not {_KINDS[kind]}")
    return value


def _check(group: GroupView, where: str) -> None:
    """What the types do not say."""
    size = len(group.ranks)
    if len(set(group.ranks)) != size or not 0 <= group.rank < size:
        raise BadDump(f"{where}: 'ranks' names a rank twice, or not the one that wrote it")
    if not size == len(group.states) == len(group.records):
        raise BadDump(f"{where}: 'ranks', 'states' and 'records' are not of one length")
    failure = group.failure
    if failure and (failure.cause not in CORE_CAUSES or not -1 <= failure.culprit < size):
        raise BadDump(f"{where}: the failure's 'cause' is unknown, or its 'culprit' out of range")
    for rank, records in enumerate(group.records):
        if any(later.record_id <= earlier.record_id for earlier, later in pairwise(records)):
            raise BadDump(
                f"{where}: the records of rank {rank} are not in the order of 'record_id'"
            )
        for record in records:
            if record.state not in STATES:
                raise BadDump(
                    f"{where}: 'state' is {record.state!r}, not one of {', '.join(STATES)}"
                )
            if record.is_message != (record.operation in ("send", "recv")):
                raise BadDump(f"{where}: 'peer' of {record.operation} is missing, or too much")
            if not 0 <= (record.root or 0) < size or not ANY_SOURCE <= (record.peer or 0) < size:
                raise BadDump(f"{where}: 'root' or 'peer' is out of range")


def clean(text: str) -> str:
    """Text that can be printed anywhere: one line, without control characters and of bounded length."""
    shown = "".join(
        c if c.isprintable() else " " if c.isspace() else "?" for c in text[:_MOST_TEXT]
    )
    return shown + ("..." if len(text) > _MOST_TEXT else "")
