"""Numbers and names as people read them."""

from __future__ import annotations

import math
import re

__all__ = ["age", "counted", "gigabytes", "gigabytes_per_second", "printable", "seconds_of"]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def gigabytes(count: float) -> str:
    """A number of bytes in GB (10^9 bytes), with three digits that mean something; small ones in kB.

    >>> gigabytes(12_345_678_901), gigabytes(5_123_456), gigabytes(20_480), gigabytes(12)
    ('12.3 GB', '0.00512 GB', '20.5 kB', '12 B')
    """
    if count < 1000:
        return f"{count:.0f} B"
    if count < 1_000_000:
        return f"{count / 1e3:.1f} kB"
    digits = max(2 - math.floor(math.log10(count / 1e9)), 0)
    return f"{count / 1e9:,.{digits}f} GB"


def gigabytes_per_second(count: float, seconds: float) -> str:
    """A speed.

    >>> gigabytes_per_second(3e9, 2.0)
    '1.50 GB/s'
    """
    return f"{count / 1e9 / max(seconds, 1e-9):.2f} GB/s"


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


def printable(text: str) -> str:
    r"""The text with every character that a terminal would act on, or not show, written as an escape.

    Keys and file names come from the checkpoint, and a hostile one may try to steer the reader's terminal.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
