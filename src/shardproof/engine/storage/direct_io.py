"""Reads of local files: past the page cache, which pages the cache has, and the files that stay open.

Note: O_DIRECT and the page cache
    A direct read (O_DIRECT) needs offset, length and address to be multiples of `ALIGNMENT`. So it begins at
    the page of its first byte and ends with the page of its last. The kernel first writes dirty pages of the
    range to the disk, so direct and buffered reads return the same bytes. Some file systems refuse the flag
    or the read (tmpfs before Linux 6.6, some overlays and network file systems). Then the read goes through
    the cache. So does the rest of a read that the kernel cuts short at an unaligned byte.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from shardproof._utils import forks, libc
from shardproof._utils.libc import address

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Bytes. Offset, length and address of a direct read or write are multiples of it.

It is at least a page, so no page is written both through the page cache and past it.
"""

_MADV_POPULATE_WRITE = 23

_F = TypeVar("_F")
_MOST = 64
_SHARE = 8
"""One of this many descriptors may be an open file. A file has up to three: for reads through the page cache,
past it, and for its mapping."""


def aligned_buffer(nbytes: int) -> memoryview:
    """New writable memory of `nbytes` bytes, aligned for direct I/O, with its pages already allocated.

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
            pass  # the kernel has no huge pages, and uses small ones
    whole = memoryview(memory)
    _populate(whole)
    return whole[:nbytes]


def _populate(memory: memoryview) -> None:
    """Allocate the pages of `memory`, with one call where the kernel has it (Linux 5.14).

    Python's own `madvise` holds the interpreter's lock during the call, which would stop training.
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


O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""0 where the system has no such flag."""
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_SAMPLES = 4
"""Pages of a range that `PageCache.has` checks: the first, the last and evenly spaced ones."""


def memory_for(count: int) -> int:
    """Bytes of aligned memory that a direct read of `count` bytes at any offset needs.

    >>> memory_for(10) == 10 + 2 * ALIGNMENT
    True
    """
    return count + 2 * ALIGNMENT


class PageCache:
    """The pages of one file that are in memory.

    `mincore` answers without a read. Since Linux 5.2, only owners and writers of the file get the answer.
    For other users, all pages look cached.
    """

    def __init__(self, descriptor: int) -> None:
        self._size = self._address = 0
        self._map: mmap.mmap | None = None
        if libc.has("mincore"):
            with contextlib.suppress(OSError, ValueError):  # it is empty, or its file system has no mappings
                self._size = os.fstat(descriptor).st_size
                self._map = mmap.mmap(descriptor, self._size, prot=mmap.PROT_READ)
                self._address = int(np.frombuffer(self._map, np.uint8).__array_interface__["data"][0])

    def has(self, start: int, count: int) -> bool:
        """True if most of the checked pages of a range, of at least a byte, are in memory.

        False where the system cannot tell.
        """
        stop = min(start + count, self._size)
        if self._map is None or start >= stop:
            return False
        first, last = start // mmap.PAGESIZE, (stop - 1) // mmap.PAGESIZE
        pages = {first + (last - first) * number // (_SAMPLES - 1) for number in range(_SAMPLES)}
        try:
            return 2 * sum(map(self._has_page, pages)) > len(pages)
        except OSError:
            return False

    def _has_page(self, page: int) -> bool:
        found = ctypes.c_ubyte(0)
        libc.call(
            "mincore",
            ctypes.c_void_p(self._address + page * mmap.PAGESIZE),
            ctypes.c_size_t(mmap.PAGESIZE),
            ctypes.byref(found),
        )
        return bool(found.value & 1)


class UncachedReader:
    """One file, open for reads past the page cache if its file system has them."""

    def __init__(self, path: Path) -> None:
        self._number = -1
        if O_DIRECT:
            with contextlib.suppress(OSError):  # the read through the cache reports it, if the file is gone
                self._number = os.open(path, os.O_RDONLY | O_DIRECT | os.O_CLOEXEC | os.O_NONBLOCK)

    def read(self, start: int, count: int, memory: memoryview) -> tuple[int, int]:
        """Read as much of a range as the file system reads past the cache.

        Args:
            start: first byte in the file.
            count: bytes wanted.
            memory: aligned, at least `memory_for(count)` bytes.

        Returns:
            The index of byte `start` in `memory`, and the number of bytes read from there, at most `count`.

        Raises:
            OSError: the device failed.
        """
        lead = start % ALIGNMENT
        stop = -(-(lead + count) // ALIGNMENT) * ALIGNMENT
        done = 0
        while self._number >= 0 and done < lead + count:
            try:
                found = os.preadv(self._number, [memory[done:stop]], start - lead + done)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                break
            done += found
            if found == 0 or found % ALIGNMENT:  # the file ends, or a limit: what is left is not aligned
                break
        return lead, max(0, min(done - lead, count))

    def __del__(self) -> None:
        if self._number >= 0:
            os.close(self._number)


class OpenFiles(Generic[_F]):
    """The open files of some folders. A file closes with the last reference to it.

    >>> files = OpenFiles[str]()
    >>> files.get(("folder", "name"), lambda: "opened"), files.get(("folder", "name"), lambda: "again")
    ('opened', 'opened')
    """

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], _F] = {}
        self._lock = forks.lock()
        forks.close_in_child(self)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = _MOST if limit < 0 else max(1, min(_MOST, limit // _SHARE))

    def get(self, key: tuple[str, str], open_file: Callable[[], _F]) -> _F:
        """The open file under a key: its folder and name. Opens it if it is not open.

        If the process has no descriptor left, closes the other files and tries once more.
        """
        found = self._files.get(key)
        if found is not None:
            return found
        try:
            opened = open_file()
        except Exception as error:
            if getattr(error.__cause__, "errno", None) not in (errno.EMFILE, errno.ENFILE):
                raise
            self.close()
            opened = open_file()
        with self._lock:
            self._files[key] = opened
            while len(self._files) > self._most:
                del self._files[next(iter(self._files))]  # the oldest
        return opened

    def forget(self, key: tuple[str, str]) -> None:
        """Removes a file, which was replaced or deleted."""
        with self._lock:
            self._files.pop(key, None)

    def close(self) -> None:
        """Closes all files that no thread is reading."""
        with self._lock:
            self._files.clear()
