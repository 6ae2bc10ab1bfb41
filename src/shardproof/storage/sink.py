"""Writing one new file of a local storage."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

from shardproof.errors import StorageError
from shardproof.storage.buffers import ALIGNMENT, address
from shardproof.storage.durable import flush_folders, open_new, unlink_quietly, write_all
from shardproof.storage.failures import storage_error

__all__ = ["LocalSink"]


_FLUSH_EVERY = 1 << 30


class LocalSink:
    """A new file of a `LocalStorage`, written past the page cache where it can be.

    Note: two descriptors. Unbuffered writes (O_DIRECT) need offset, length and address to be multiples of
    `ALIGNMENT`. Whatever is not goes through a second, buffered descriptor of the same file. No page is
    written through both, because both cut at multiples of a page and callers write disjoint ranges: what
    the page cache holds is never older than what lies on the disk under it.
    """

    def __init__(self, path: Path, root: Path, *, direct: bool | None) -> None:
        self._path = path
        self._root = root
        self._direct: int | None = None
        self._must_be_direct = direct is True
        self._refused = False
        self._lock = threading.Lock()
        self._unflushed = 0
        self._open = True
        try:
            self._buffered, self._made = open_new(path, os.O_WRONLY)
        except OSError as error:
            raise storage_error(error, "create", str(path)) from error
        if direct is not False:
            try:
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if self._must_be_direct or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    self.abort()
                    raise storage_error(error, "open unbuffered", str(path)) from error

    @property
    def direct(self) -> bool:
        """Whether aligned writes go past the page cache."""
        return self._direct is not None and not self._refused

    def write_at(self, start: int, buffer: memoryview) -> None:
        """Write the bytes of `buffer` at byte `start`."""
        if not self._open:
            raise StorageError(f"cannot write {self._path}: it is closed", file=str(self._path))
        data = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        try:
            done = self._write_direct(start, data)
            write_all(self._buffered, data[done:], start + done)
            self._flush_early(len(data) - done)
        except OSError as error:
            raise storage_error(error, "write", str(self._path)) from error

    def _write_direct(self, start: int, data: memoryview) -> int:
        """Write what can be written unbuffered from the beginning of `data`; bytes written."""
        direct = self._direct
        done = 0
        aligned = len(data) - len(data) % ALIGNMENT
        if direct is None or self._refused or not aligned or start % ALIGNMENT or address(data) % ALIGNMENT:
            return 0
        while done < aligned:
            try:
                written = os.pwrite(direct, data[done:aligned], start + done)
            except OSError as error:
                if error.errno != errno.EINVAL or self._must_be_direct:
                    raise
                self._refused = True  # the file system takes the flag and not the writes
                return done
            done += written
            if written % ALIGNMENT:  # cut short, by a limit or a full disk: the rest is no longer aligned
                return done
        return done

    def _flush_early(self, written: int) -> None:
        """Flushes what went through the page cache bit by bit, so that no one flush is as long as the file.

        A rank shows that it moves by what it has written; it would seem silent while all of it is flushed.
        """
        with self._lock:
            self._unflushed += written
            if self._unflushed < _FLUSH_EVERY:
                return
            self._unflushed = 0
        os.fdatasync(self._buffered)

    def finish(self, size: int) -> None:
        """Give the file `size` bytes, flush it and its directory entry to stable storage, close it."""
        if not self._open:
            raise StorageError(f"cannot finish {self._path}: it is closed", file=str(self._path))
        try:
            try:
                os.ftruncate(self._buffered, size)
                os.fsync(self._buffered)
            finally:
                self._close()
            flush_folders(self._path.parent, self._topmost())
        except OSError as error:
            unlink_quietly(self._path)
            raise storage_error(error, "flush", str(self._path)) from error

    def abort(self) -> None:
        """Close and remove the file; nothing after `finish`."""
        if self._open:
            with contextlib.suppress(OSError):
                self._close()
            unlink_quietly(self._path)

    def _topmost(self) -> Path:
        """The highest folder that may have got a new entry (see "durable names")."""
        candidates = [self._root.parent, *(made.parent for made in self._made)]
        return min(candidates, key=lambda path: len(path.parts))

    def _close(self) -> None:
        self._open = False
        direct, self._direct = self._direct, None
        try:
            if direct is not None:
                os.close(direct)
        finally:
            os.close(self._buffered)
