"""The flight recorder's reader: dumps of what every rank did last, and what they say about a failure.

``dump`` writes what a process knows of its groups, ``install_signal_dump`` does so when the process is sent a signal,
and ``python -m pycomm.trace DIR`` says in one paragraph what went wrong. Messages go to the logger ``pycomm.trace``.
"""

from pycomm.trace.diagnosis import Verdict, diagnose
from pycomm.trace.format import BadDump, Recorded
from pycomm.trace.on_signal import install_signal_dump
from pycomm.trace.read import read_job
from pycomm.trace.write import dump

__all__ = [
    "BadDump",
    "Recorded",
    "Verdict",
    "diagnose",
    "dump",
    "install_signal_dump",
    "read_job",
]
