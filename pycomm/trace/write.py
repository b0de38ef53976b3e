"""Writing dumps: of this process's groups, all that shared memory holds of their ranks."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pycomm.errors import InvalidArgument
from pycomm.trace import torch_format
from pycomm.trace.format import (
    FORMAT,
    NAME,
    SUFFIX,
    VERSION,
    BadDump,
    Failure,
    RankState,
    Record,
    Recorded,
)
from pycomm.trace.job import put_together
from pycomm.trace.read import parse_dump
from pycomm.trace.words import when

logger = logging.getLogger("pycomm.trace")

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
    text = json.dumps(content, separators=(",", ":"))
    _write(path, text.encode())
    logger.info("rank %d wrote %s (%s)", content["rank"], path, reason)
    try:
        _write_for_torch(text, folder)
    except (BadDump, OSError) as error:
        logger.warning("no dump for torch's analyser: %s", error)
    return path


# ---- what is written: see pycomm.trace.format


def describe(communicators: Sequence[Recorded], reason: str) -> dict[str, Any]:
    """The content of a dump."""
    first, now = communicators[0], time.time_ns()
    return {
        "format": FORMAT,
        "version": VERSION,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": first.global_ranks[first.rank],
        "reason": reason,
        "time": when(now),
        "time_ns": now,
        "torch": str(torch.__version__),
        "groups": [_describe_group(communicator) for communicator in communicators],
    }


def _describe_group(group: Recorded) -> dict[str, Any]:
    states, records = [], []
    for rank in range(group.world_size):
        state = _attempt(partial(group.rank_state, rank), {}, f"the state of rank {rank}")
        states.append(_chosen(RankState, state))
        found = _attempt(partial(group.records, rank), [], f"the records of rank {rank}")
        records.append([_chosen(Record, record) for record in found])
    failure = _attempt(group.failure_cause, None, "its failure")
    return {
        "name": group.name,
        "rank": group.rank,
        "ranks": list(group.global_ranks),
        "failure": failure and _chosen(Failure, failure),
        "states": states,
        "records": records,
    }


def _attempt(read: Callable[[], Any], otherwise: Any, what: str) -> Any:
    """What can be read; a group may end while it is looked at."""
    try:
        return read()
    except Exception as error:
        logger.warning("%s cannot be read: %s", what, error)
        return otherwise


def _chosen(kind: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in fields(kind)]
    return {name: found[name] for name in names if found.get(name) is not None}


# ---- files


def _write(path: Path, content: bytes, *, keep: bool = False) -> None:
    """Writes a file that is whole as soon as it is there. To be kept is one of this run that is there already."""
    temporary = path.with_name(f".being-written.{os.getpid()}.{next(_attempts)}.tmp")
    try:
        temporary.write_bytes(content)
        if keep and not (path.exists() and path.stat().st_mtime < _loaded):
            os.link(temporary, path)
        else:
            temporary.replace(path)
    except FileExistsError:
        pass  # kept
    finally:
        temporary.unlink(missing_ok=True)


def _write_for_torch(text: str, folder: Path) -> None:
    """This rank's pickle, and those of ranks that are gone or stand still."""
    own = parse_dump(json.loads(text), "this dump")
    job = put_together([own])
    states = [(rank, group.state(rank)) for group in job.groups for rank in group.ranks]
    silent = {rank for rank, state in states if not state.alive or state.left or state.stopped}
    for rank in sorted({own.rank} | silent):
        path = folder / torch_format.file_name(rank)
        _write(path, torch_format.pickled(job, rank), keep=rank != own.rank)
