"""Memory that a disk can write from without a copy."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from shardproof.storage import libc

__all__ = ["ALIGNMENT", "address", "aligned_buffer"]

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Bytes. Offset, length and address of an unbuffered write are multiples of it.

Never less than a page: a page is then written either through the page cache or past it, never both.
"""

_MADV_POPULATE_WRITE = 23


def aligned_buffer(nbytes: int) -> memoryview:
    """New writable memory of `nbytes` bytes that starts on a page, with its pages already in place.

    >>> buffer = aligned_buffer(10_000)
    >>> len(buffer), buffer.readonly, address(buffer) % ALIGNMENT
    (10000, False, 0)
    """
    if nbytes < 0:
        raise ValueError(f"a buffer cannot have {nbytes} bytes")
    length = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # the kernel has no huge pages: small ones do
    whole = memoryview(memory)
    _populate(whole)
    return whole[:nbytes]


def _populate(memory: memoryview) -> None:
    """Put the pages of `memory` in place, a third faster than by touching them where the kernel can (5.14).

    Python's own `madvise` would hold the interpreter's lock meanwhile, and with it the training.
    """
    try:
        libc.call(
            "madvise",
            ctypes.c_void_p(address(memory)),
            ctypes.c_size_t(len(memory)),
            ctypes.c_int(_MADV_POPULATE_WRITE),
        )
    except OSError:  # an older kernel, or another system
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0


def address(buffer: memoryview) -> int:
    """Where the bytes of `buffer` lie in memory."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]) if len(buffer) else 0
