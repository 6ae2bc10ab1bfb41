"""Disk access that yields to that of others."""

from __future__ import annotations

import ctypes
import platform
import sys

from shardproof.storage import libc

__all__ = ["lower_io_priority"]

_SET_NUMBERS = {
    "x86_64": 251,
    "aarch64": 30,
    "riscv64": 30,
    "loongarch64": 30,
    "ppc64le": 273,
    "s390x": 282,
}
"""Of the system call `ioprio_set` in 64-bit programs on Linux, by machine; the C library has no function."""

_WHO_THREAD = 1
_BEST_EFFORT = 2 << 13
_LOWEST = 7


def lower_io_priority() -> bool:
    """Give the calling thread the lowest I/O priority that still promises progress; whether that took effect.

    On Linux: the best-effort class, level 7 of 0 to 7 (`ioprio_set(2)`); threads that the calling one
    starts later inherit it. The kernel keeps it for every thread, and only schedulers that know of priorities
    (BFQ, mq-deadline) heed it. Elsewhere, and where a sandbox forbids it, nothing changes. Never raises.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor(1, initializer=lower_io_priority) as writers:
    ...     writers.submit(len, b"written in the background").result()
    25
    """
    number = _SET_NUMBERS.get(platform.machine())
    if sys.platform != "linux" or number is None or sys.maxsize < 1 << 32:
        return False
    try:
        libc.call(
            "syscall",
            ctypes.c_long(number),
            ctypes.c_int(_WHO_THREAD),
            ctypes.c_int(0),
            ctypes.c_int(_BEST_EFFORT | _LOWEST),
        )
    except OSError:
        return False
    return True
