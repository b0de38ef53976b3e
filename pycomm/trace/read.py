"""Reading a directory of dumps: what cannot be read is said, not raised."""

from __future__ import annotations

import json
from pathlib import Path

from pycomm.trace.format import BadDump, Dump, parse_dump
from pycomm.trace.job import Job, put_together
from pycomm.trace.write import NAME, SUFFIX


def read_dump(path: Path) -> Dump:
    """One dump; raises BadDump with what is wrong with the file."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise BadDump(f"it cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise BadDump("it is nested too deeply to be a dump") from error
    except ValueError as error:  # of JSON or of its encoding
        raise BadDump(f"it is no JSON, or was cut off: {error}") from error
    return parse_dump(content, path.name)


def read_job(directory: Path) -> Job:
    """All dumps of a directory, as one job. The notes tell which files could not be read, and why."""
    dumps, notes = [], []
    for path in sorted(directory.glob(f"{NAME}*{SUFFIX}")):
        try:
            dumps.append(read_dump(path))
        except BadDump as error:
            notes.append(f"{path.name} is left out: {error}")
    job = put_together(dumps)
    return Job(job.groups, job.dumps, notes + job.notes)
