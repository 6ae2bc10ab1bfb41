"""Functions of the C library that Python lacks, and copies of host memory by address."""

from __future__ import annotations

import ctypes
import functools
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHORT = 16 << 10
_copy_short = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)


@functools.cache
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def has(name: str) -> bool:
    """True if the C library has a function of this name.

    >>> has("getpid"), has("no_such_function")
    (True, False)
    """
    return hasattr(_library(), name)


def call(name: str, *arguments: Any) -> None:
    """Call a function that returns -1 and sets errno when it fails.

    Args:
        name: name of a function that the library has (see `has`).
        arguments: ctypes values, so that each has the width that the function expects.

    Raises:
        OSError: the function failed.

    >>> call("close", ctypes.c_int(-1))
    Traceback (most recent call last):
    OSError: [Errno 9] close: Bad file descriptor
    """
    if getattr(_library(), name)(*arguments) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def address(buffer: memoryview) -> int:
    """The address of the first byte of `buffer`; 0 for an empty buffer."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]) if len(buffer) else 0


def copy_runs(into: Sequence[int], out_of: Sequence[int], counts: Sequence[int]) -> None:
    """Copies many short runs of bytes, in the given order.

    If every run has at most 16 KiB, the call holds the GIL, because releasing it takes longer than such a
    copy.

    Args:
        into: destination address of each run.
        out_of: source address of each run.
        counts: bytes of each run.

    >>> one, two = bytearray(b"ab"), bytearray(2)
    >>> source, target = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (one, two))
    >>> copy_runs([target, target + 1], [source + 1, source], [1, 1])
    >>> two
    bytearray(b'ba')
    """
    assert len(into) == len(out_of) == len(counts)
    copy = _copy_short if max(counts, default=0) <= _SHORT else ctypes.memmove
    deque(map(copy, into, out_of, counts), maxlen=0)


def read_words(addresses: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Reads the 8-byte word at each address, in native byte order. The result has the shape of `addresses`.

    Args:
        addresses: multiples of 8, in memory that this process may read. Any shape.

    >>> values = np.array([3, 5, 7], np.uint64)
    >>> read_words(values.ctypes.data + np.array([16, 0]))
    array([7, 3], dtype=uint64)
    """
    if not addresses.size:
        return np.zeros(addresses.shape, np.uint64)
    first, last = int(addresses.min()), int(addresses.max())
    span = memoryview((ctypes.c_char * (last + 8 - first)).from_address(first)).cast("B")
    words: NDArray[np.uint64] = np.frombuffer(span, np.uint64)[(addresses - first) >> 3]
    return words
