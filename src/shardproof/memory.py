"""Host memory, by address."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable

__all__ = ["copy_runs"]

_copy = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)


def copy_runs(into: Iterable[int], out_of: Iterable[int], counts: Iterable[int]) -> None:
    """Copies many short runs of bytes.

    No other thread of Python runs meanwhile: to let them takes longer than to copy a few KiB. Of copies that
    overlap, the later one wins.

    Args:
        into: addresses, one a run.
        out_of: addresses, one a run.
        counts: bytes, one a run.

    >>> one, two = bytearray(b"ab"), bytearray(2)
    >>> source, target = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (one, two))
    >>> copy_runs([target, target + 1], [source + 1, source], [1, 1])
    >>> two
    bytearray(b'ba')
    """
    deque(map(_copy, into, out_of, counts), maxlen=0)
