"""Figures with units, as people type and read them."""

from __future__ import annotations

import math
import re

from pycomm.errors import InvalidArgument
from pycomm.plan.cluster import LINKS, Link

_NUMBER = re.compile(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)\s*([^\d\s]*)\s*")
_BYTES = {"": 1.0, "B": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30}
_BYTES |= {"KB": 2.0**10, "MB": 2.0**20, "GB": 2.0**30}
_PER_SECOND = {"": 1.0, "B": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_PER_SECOND |= {f"{unit}B": _PER_SECOND[unit] for unit in "KMGT"}
_PER_SECOND |= {f"{unit}bit": _PER_SECOND[unit] / 8 for unit in "KMGT"}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def _read(text: str, units: dict[str, float], what: str) -> float:
    found = _NUMBER.fullmatch(text)
    if not found or found[2] not in units:
        known = " ".join(unit for unit in units if unit)
        raise InvalidArgument(f"{text!r} is no {what}: a number of 0 or more and one of {known}")
    value = float(found[1]) * units[found[2]]
    if not value < math.inf:
        raise InvalidArgument(f"{text!r} is too large")
    return value


def read_bytes(text: str) -> float:
    """``64M``: K, M and G are powers of 1024."""
    return _read(text, _BYTES, "number of bytes")


def read_rate(text: str) -> float:
    """Bytes per second: ``25e9``, ``25GB``, ``200Gbit``; K, M, G and T are powers of 1000."""
    return _read(text, _PER_SECOND, "rate")


def read_seconds(text: str) -> float:
    """``5us``."""
    return _read(text, _SECONDS, "time")


def read_link(text: str) -> Link:
    """A link of LINKS by name, or ``BANDWIDTH,LATENCY[,GAP][,half]``."""
    if text in LINKS:
        return LINKS[text]
    words = text.split(",")
    duplex = words[-1].strip() != "half"
    figures = words if duplex else words[:-1]
    if not 2 <= len(figures) <= 3:
        raise InvalidArgument(
            f"{text!r} is no link: one of {' '.join(LINKS)}, or BANDWIDTH,LATENCY[,GAP][,half], as 25GB,5us"
        )
    gap = read_seconds(figures[2]) if len(figures) == 3 else None
    return Link(read_rate(figures[0]), read_seconds(figures[1]), gap, duplex)


def say_seconds(seconds: float) -> str:
    """With three digits, and the unit that suits."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
