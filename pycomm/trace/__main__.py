"""``python -m pycomm.trace DIR``: says what went wrong in a job that has left its dumps in a directory."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

from pycomm.trace import torch_format
from pycomm.trace.chrome import chrome_trace
from pycomm.trace.diagnosis import diagnose
from pycomm.trace.format import NAME, SUFFIX
from pycomm.trace.job import Job
from pycomm.trace.read import read_job
from pycomm.trace.table import print_tables

EXAMPLES = """\
examples:
  python -m pycomm.trace dumps                    what went wrong, in one paragraph
  python -m pycomm.trace dumps -v --last 20       and the last 20 operations of every group, rank by rank
  python -m pycomm.trace dumps --chrome out.json  a timeline for https://ui.perfetto.dev or chrome://tracing
  python -m pycomm.trace dumps --torch out        files for torch's own analyser:
                                                  python -m torch.distributed.flight_recorder.fr_trace out

Some ranks' dumps may be missing: every dump shows all ranks of its groups.
exit status: 0 nothing went wrong, 1 something did, 2 bad arguments, or no dumps that can be read
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if not options.directory.is_dir():
        return _refuse(f"{options.directory} is no directory")
    job = read_job(options.directory)
    for note in job.notes:
        print(f"pycomm.trace: {note}", file=sys.stderr)
    if not job.groups:
        return _refuse(
            f"there are no dumps ({NAME}*{SUFFIX}) that can be read in {options.directory}"
        )
    verdict = diagnose(job)
    print(verdict.text)
    if options.verbose:
        print_tables(job, options.last, sys.stdout)
    try:
        _write(job, options)
    except OSError as error:
        return _refuse(f"{error.filename} cannot be written: {error.strerror}")
    return int(verdict.wrong)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.trace",
        description="Says what went wrong in a job that has left its dumps in a directory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the dumps are")
    parser.add_argument("-v", "--verbose", action="store_true", help="also print a table per group")
    parser.add_argument(
        "--last", type=_positive, default=10, metavar="N", help="rows of a table (default: 10)"
    )
    parser.add_argument("--chrome", type=Path, metavar="OUT.json", help="write a timeline")
    parser.add_argument(
        "--torch", type=Path, metavar="OUT", help="write what torch's analyser reads"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _write(job: Job, options: argparse.Namespace) -> None:
    if options.chrome:
        options.chrome.write_text(json.dumps(chrome_trace(job)))
    if options.torch:
        options.torch.mkdir(parents=True, exist_ok=True)
        for rank in job.ranks:
            path = options.torch / torch_format.file_name(rank)
            path.write_bytes(torch_format.pickled(job, rank))


def _refuse(why: str) -> int:
    print(f"pycomm.trace: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
