"""Writing dumps: of this process's groups, all that shared memory holds of their ranks."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from pycomm.errors import InvalidArgument
from pycomm.trace import torch_format
from pycomm.trace.format import (
    FORMAT,
    RECORD_FIELDS,
    STATE_FIELDS,
    VERSION,
    BadDump,
    Recorded,
    parse_dump,
)
from pycomm.trace.job import put_together

logger = logging.getLogger("pycomm.trace")

#: Names do not end in digits and do not contain torch_format.PREFIX, so that torch's analyser steps over them.
NAME, SUFFIX = "pycomm-trace.", ".json"

_loaded = time.time()
_attempts = itertools.count()


def dump(communicators: Iterable[Recorded], directory: str | os.PathLike[str], reason: str) -> Path:
    """Writes what this process can tell of its groups into a directory, which is made if need be; returns the file.

    The file carries this process's rank and replaces an older one. Beside it lies a pickle for torch's own analyser,
    and one for each rank that cannot write its own any more, unless it has. Whatever of a group cannot be read is left
    out and logged. Raises InvalidArgument without any group, OSError if the directory cannot be written to.
    """
    known = list(communicators)
    if not known:
        raise InvalidArgument("there is nothing to dump: this process is in no group of pycomm")
    content = describe(known, reason)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}{content['rank']}{SUFFIX}"
    _replace(path, json.dumps(content, separators=(",", ":")).encode())
    logger.info("rank %d wrote %s (%s)", content["rank"], path, reason)
    try:
        _write_for_torch(content, folder)
    except (BadDump, OSError) as error:
        logger.warning("no dump for torch's analyser: %s", error)
    return path


def describe(communicators: Sequence[Recorded], reason: str) -> dict[str, Any]:
    """The content of a dump; see pycomm.trace.format."""
    first, now = communicators[0], time.time_ns()
    return {
        "format": FORMAT,
        "version": VERSION,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": first.global_ranks[first.rank],
        "reason": reason,
        "time": datetime.fromtimestamp(now / 1e9).astimezone().isoformat(),
        "time_ns": now,
        "torch": str(torch.__version__),
        "groups": [_describe_group(communicator) for communicator in communicators],
    }


def _describe_group(communicator: Recorded) -> dict[str, Any]:
    ranks = range(communicator.world_size)
    return {
        "name": communicator.name,
        "rank": communicator.rank,
        "ranks": list(communicator.global_ranks),
        "failure": _attempt(communicator.failure_report, None, "its failure"),
        "states": [_state(communicator, rank) for rank in ranks],
        "records": [_records(communicator, rank) for rank in ranks],
    }


def _state(communicator: Recorded, rank: int) -> dict[str, Any] | None:
    state = _attempt(lambda: communicator.rank_state(rank), None, f"the state of rank {rank}")
    return state and {name: state[name] for name in STATE_FIELDS if name in state}


def _records(communicator: Recorded, rank: int) -> list[dict[str, Any]]:
    records = _attempt(lambda: communicator.records(rank), [], f"the records of rank {rank}")
    return [
        {name: _plain(record[name]) for name in RECORD_FIELDS if record.get(name) is not None}
        for record in records
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _attempt(read: Any, otherwise: Any, what: str) -> Any:
    """What can be read; a group may end while it is looked at."""
    try:
        return read()
    except Exception as error:
        logger.warning("%s cannot be read: %s", what, error)
        return otherwise


# ---- files


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that is whole as soon as it is there."""
    temporary = _temporary(path, content)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _create(path: Path, content: bytes) -> None:
    """The same, but a file of this run that is there already is left alone."""
    if path.exists() and path.stat().st_mtime < _loaded:
        return _replace(path, content)  # of an earlier run
    temporary = _temporary(path, content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)
    return None


def _temporary(path: Path, content: bytes) -> Path:
    name = f".being-written.{os.getpid()}.{next(_attempts)}.tmp"
    temporary = path.with_name(name)
    try:
        with temporary.open("xb") as file:
            file.write(content)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _write_for_torch(content: dict[str, Any], folder: Path) -> None:
    """This rank's pickle, and those of ranks that are gone or stand still."""
    view = parse_dump(content, "this dump")
    job = put_together([view])
    _replace(folder / torch_format.file_name(view.rank), torch_format.pickled(job, view.rank))
    silent = {
        rank
        for group in job.groups
        for rank in group.ranks
        if not (state := group.state(rank)).alive or state.left or state.stopped
    }
    for rank in sorted(silent - {view.rank}):
        _create(folder / torch_format.file_name(rank), torch_format.pickled(job, rank))
