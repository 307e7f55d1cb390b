"""Formats for counts, sizes, durations, times of day, and text from the log."""

from __future__ import annotations

import datetime

from .._common.text import plain as plain


def counted(number: int, noun: str, plural: str = "") -> str:
    """For example `1 block`, `2,000 blocks`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def share(part: float, whole: float) -> str:
    """Whole percent."""
    return f"{part / whole:.0%}" if whole else "0%"


def duration(seconds: float) -> str:
    """Three digits and a suitable unit."""
    if seconds >= 119.5:
        return f"{int(seconds + 0.5) // 60} min {int(seconds + 0.5) % 60:02} s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * factor
        if value >= 0.9995 or unit == "µs":
            return f"{_three_digits(value)} {unit}"
    raise AssertionError


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def size(num_bytes: float) -> str:
    """Size in powers of a thousand, like copy rates."""
    if num_bytes < 999.5:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.5:
            return f"{_three_digits(num_bytes)} {unit}"
    num_bytes /= 1000
    return f"{_three_digits(num_bytes)} TB"


def date_and_time(at_s: float) -> str:
    """Date and time in UTC, to the second."""
    return f"{_moment(at_s):%Y-%m-%d %H:%M:%S}"


def time_of_day(at_s: float) -> str:
    """Time of day in UTC, to the millisecond."""
    return f"{_moment(at_s):%H:%M:%S.%f}"[:-3]


def _moment(at_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC)
