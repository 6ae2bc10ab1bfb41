"""Numbers and names as people read them."""

from __future__ import annotations

import re

from shardproof._utils.humanize import gigabytes, gigabytes_per_second, printable

__all__ = ["age", "counted", "gigabytes", "gigabytes_per_second", "printable", "seconds_of"]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "rank"), counted(1200, "chunk"), counted(0, "file")
    ('1 rank', '1,200 chunks', '0 files')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def age(seconds: float) -> str:
    """How long ago, to one unit.

    >>> age(5), age(7300), age(1e6), age(-3)
    ('5 s', '2 h', '11 d', 'in the future')
    """
    if seconds < 0:
        return "in the future"
    for unit, length, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < limit:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds // 86400:.0f} d"


def seconds_of(text: str) -> float:
    """A span of time: a number with s, m, h, d or w; a bare number is in seconds.

    Raises:
        ValueError: it is not of that form.

    >>> seconds_of("90"), seconds_of("1.5h"), seconds_of("2d")
    (90.0, 5400.0, 172800.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a span of time; write 90s, 30m, 1h, 2d or 1w")
    return float(match[1]) * _UNITS[match[2] or "s"]
