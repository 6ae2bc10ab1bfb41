"""Numbers and names as text for people."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

_USER = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://)[^/@\s\"']*:[^/@\s\"']*@")
_SIGNATURE = re.compile(
    r"([?&][A-Za-z-]*(?:sig|signature|token|key|secret|password|credential)=)[^&\s\"']+", re.I
)
"""The parts of a URL that give access: user and password, and parameters that sign the request."""
_MOST_BITS = 200
_FEW = 10


def gigabytes(count: float) -> str:
    """A number of bytes with three significant digits, in B, kB, MB, GB or TB (powers of 1000).

    >>> gigabytes(12_345_678_901), gigabytes(5_123_456), gigabytes(20_480), gigabytes(12), gigabytes(999_999)
    ('12.3 GB', '5.12 MB', '20.5 kB', '12 B', '1.00 MB')
    """
    if count < 1000:
        return f"{count:.0f} B"
    # The exponent of the number as it is shown: 999,999 is shown as 1.00e+06.
    exponent = int(f"{count:.2e}".partition("e")[2])
    unit = min(exponent // 3, 4)
    return f"{count / 1000**unit:,.{max(2 - exponent + 3 * unit, 0)}f} {'kMGT'[unit - 1]}B"


def gigabytes_per_second(count: float, seconds: float) -> str:
    """A speed.

    >>> gigabytes_per_second(3e9, 2.0), gigabytes_per_second(12, 0.001)
    ('1.50 GB/s', '12.0 kB/s')
    """
    return f"{gigabytes(count / max(seconds, 1e-9))}/s"


def span(seconds: float) -> str:
    """A duration in a unit of suitable size.

    >>> span(0.0042), span(0.5), span(42.3), span(5000), span(1e6)
    ('4.2 ms', '0.50 s', '42.3 s', '83 min', '278 h')
    """
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.{2 if seconds < 10 else 1}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def brief(value: Any, most: int = 100) -> str:
    """A value from a file as a short text, whatever the file has put there.

    The text of a list that holds the one before it twice is endless, and Python refuses the text of integers
    of more than 4,300 digits. So only the text of small values is made.

    Args:
        value: any value, or an error, whose text may repeat such a value.
        most: characters of the text, at most, beside the name of a class.

    >>> brief("weight"), brief(1 << 20_000), brief(ValueError("too short")), brief([1, "a", [2]])
    ("'weight'", 'an int of 20001 bits', 'ValueError: too short', "[1, 'a', a list of 1]")
    """
    if isinstance(value, BaseException):
        argument = value.args[0] if len(value.args) == 1 else None
        try:
            text = brief(argument, most) if isinstance(value, KeyError) else str(value)[:most]
        except Exception:  # the arguments of an error are of any class
            text = "an error without a text"
        return f"{type(value).__name__}: {text}"
    if isinstance(value, (list, tuple)) and len(value) <= _FEW:
        text = ", ".join(
            f"a {type(item).__name__} of {len(item)}"
            if isinstance(item, (list, tuple))
            else brief(item, most)
            for item in value
        )
        return f"[{text}]" if isinstance(value, list) else f"({text}{',' * (len(value) == 1)})"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        return repr(value[:most])
    if isinstance(value, (int, float, complex, type(None))):
        return repr(value)
    if isinstance(value, (list, tuple, dict, set, frozenset, bytearray)):
        return f"a {type(value).__name__} of {len(value)}"
    name = getattr(value, "name", None)  # of a class that a pickle names
    return f"{type(value).__name__} {name[:most]}" if isinstance(name, str) else f"a {type(value).__name__}"


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text with every character escaped that a terminal interprets or does not print.

    Keys and file names come from a checkpoint. They may contain control sequences for the terminal, line
    feeds that begin a false line of output, and marks that reverse the direction of the text.

    Args:
        text: text for people, or a key or path in it.
        lines: True for a text of several lines. Keys in it have to be escaped before.

    >>> printable("a\x1b[2Jb"), printable("a\nb"), printable("a\nb", lines=True), printable("\u202ea")
    ('a\\x1b[2Jb', 'a\\nb', 'a\nb', '\\u202ea')
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode() for c in text
    )


def without_credentials(text: str) -> str:
    """A URL, or a text with URLs, with passwords, keys and signatures replaced by asterisks.

    >>> without_credentials("https://me:secret@host/a?Signature=x&b=1 and s3://bucket/a")
    'https://***@host/a?Signature=***&b=1 and s3://bucket/a'
    """
    return _SIGNATURE.sub(r"\1***", _USER.sub(r"\1***@", text))


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "rank"), counted(1200, "chunk"), counted(0, "file")
    ('1 rank', '1,200 chunks', '0 files')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first names in order, and the number of the others.

    >>> listed({"b", "a"}), listed("edcba", 3)
    ('a, b', 'a, b, c and 2 more')
    """
    shown = sorted(names)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def nearest(name: str, keys: Iterable[str]) -> list[str]:
    """The keys, and the parts of the tree above them, that are spelled most like a name: at most three.

    >>> nearest("optimiser", ["optimizer.0.weight.exp_avg", "model.0.weight"])
    ['optimizer', 'optimizer.0']
    """
    words = {".".join(key.split(".")[:depth]) for key in keys for depth in range(1, key.count(".") + 2)}
    return difflib.get_close_matches(name, words)


def age(seconds: float) -> str:
    """An age, in one unit.

    >>> age(5), age(7300), age(1e6), age(-3)
    ('5 s', '2 h', '11 d', 'in the future')
    """
    if seconds < 0:
        return "in the future"
    for unit, length, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < limit:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds // 86400:.0f} d"
