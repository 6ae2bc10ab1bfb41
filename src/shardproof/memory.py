"""Host memory, by address."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

__all__ = ["copy_runs"]

_SHORT = 16 << 10
_copy_short = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)


def copy_runs(into: Sequence[int], out_of: Sequence[int], counts: Sequence[int]) -> None:
    """Copies many short runs of bytes, in their order.

    Where none has more than 16 KiB, no other thread of Python runs meanwhile: to let them takes longer than
    to copy so much.

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
    assert len(into) == len(out_of) == len(counts)
    copy = _copy_short if max(counts, default=0) <= _SHORT else ctypes.memmove
    deque(map(copy, into, out_of, counts), maxlen=0)
