"""Figures in words: sizes, times, ratios and placements, as tables and plots show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rows import Row

TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"


def format_bytes(size_bytes: int) -> str:
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


def three_digits(value: float) -> str:
    """Three significant digits, without exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def format_time(time_us: float) -> str:
    return f"{three_digits(time_us)} µs" if time_us < 1000 else f"{three_digits(time_us / 1000)} ms"


def format_ratio(ratio: float) -> str:
    return f"{three_digits(ratio)}{TIMES}"


def format_span(pair: Sequence[float], form: Callable[[float], str]) -> str:
    """Low and high with a dash between, and the unit once if both have the same one."""
    low, high = (form(value) for value in pair)
    unit = high.lstrip("0123456789.")
    return f"{low.removesuffix(unit)}{DASH}{high}"


def format_flags(row: Row) -> str:
    """Least and greatest flag latency around the repeats: 'near 34-36 ns', 'near/far 50-210 ns'."""
    word = "/".join(sorted(set(row.placement), reverse=True))
    low, high = min(row.flag_latency_ns), max(row.flag_latency_ns)
    return f"{word} {low:.0f}{DASH}{high:.0f} ns"
