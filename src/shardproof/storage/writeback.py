"""Write-back of a file that goes through the page cache, begun while it is still being written.

Note: early write-back
    Bytes written through the page cache lie in memory until somebody flushes them. Left to the end, the flush
    takes as long as the writing did, the disk idles before it, and meanwhile the rank seems silent, because
    it shows that it moves by what it has written. So every few MiB are handed to the disk as soon as they are
    written (`sync_file_range`), and a writer waits for what was handed over some 64 MiB ago: the disk always
    has work, and little more than that is left for the last flush.
    An error of the disk is told once: by whichever call comes first, here or in the last flush. Both raise.
    None of this makes bytes durable; the flush at the end does (`fsync`).
    The pages stay in the cache. Giving them up (`posix_fadvise`) made writing neither faster nor slower, and
    a restart reads them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import deque

from shardproof.storage import libc

__all__ = ["WriteBack"]

_SPAN = 4 << 20
"""Bytes that are handed to the disk together."""

_UNDERWAY = 64 << 20
"""Bytes that may be on their way to the disk before a writer waits."""

_FLUSH_EVERY = 256 << 20
"""Bytes between flushes where ranges cannot be written back by themselves."""

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_NO_RANGES = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.ENOTSUP, errno.EPERM)


class WriteBack:
    """The bytes of one file on their way from the page cache to the disk. Threads may share it.

    Args:
        descriptor: of the file, open for writing as long as this is used.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ranges = libc.has("sync_file_range")
        self._lock = threading.Lock()
        self._start, self._stop, self._gathered = 0, 0, 0
        self._underway: deque[tuple[int, int, int]] = deque()
        self._underway_bytes = 0

    def wrote(self, start: int, count: int) -> None:
        """Take note of `count` bytes written at byte `start`; see "early write-back".

        Raises:
            OSError: the disk refused bytes, these or earlier ones.
        """
        if count == 0:
            return
        with self._lock:
            self._start = min(self._start, start) if self._gathered else start
            self._stop = max(self._stop, start + count) if self._gathered else start + count
            self._gathered += count
            if self._gathered < (_SPAN if self._ranges else _FLUSH_EVERY):
                return
            span, self._gathered = (self._start, self._stop, self._gathered), 0
        self._hand_over(*span)
        self._wait(_UNDERWAY)

    def wait(self) -> None:
        """Wait until the disk has taken all bytes noted so far. They are not durable by that.

        Raises:
            OSError: the disk refused bytes.
        """
        with self._lock:
            span, self._gathered = (self._start, self._stop, self._gathered), 0
        if span[2]:
            self._hand_over(*span)
        self._wait(0)

    def _hand_over(self, start: int, stop: int, count: int) -> None:
        if not self._sync(start, stop, _WRITE):
            os.fdatasync(self._descriptor)
            return
        with self._lock:
            self._underway.append((start, stop, count))
            self._underway_bytes += count

    def _wait(self, allowed: int) -> None:
        """Wait for the oldest ranges until no more than `allowed` bytes are underway."""
        while True:
            with self._lock:
                if self._underway_bytes <= allowed:
                    return
                start, stop, count = self._underway.popleft()
                self._underway_bytes -= count
            self._sync(start, stop, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)

    def _sync(self, start: int, stop: int, how: int) -> bool:
        """Whether the system could do this for a range; False from then on if it could not."""
        if not self._ranges:
            return False
        try:
            libc.call(
                "sync_file_range",
                ctypes.c_int(self._descriptor),
                ctypes.c_int64(start),
                ctypes.c_int64(stop - start),
                ctypes.c_uint(how),
            )
        except OSError as error:
            if error.errno not in _NO_RANGES:
                raise
            self._ranges = False
        return self._ranges
