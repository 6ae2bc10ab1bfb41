"""Writes one new file: of a local storage at any place, and of any storage in order."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path
from types import TracebackType

from shardproof._utils import forks
from shardproof._utils.libc import address
from shardproof.engine.storage.base import Sink
from shardproof.engine.storage.direct_io import ALIGNMENT, O_DIRECT, aligned_buffer
from shardproof.engine.storage.durable import WriteBack, flush_folders, open_new, unlink_quietly, write_all
from shardproof.engine.storage.paths import printable, storage_error, system_errors
from shardproof.errors import StorageError


class LocalSink:
    """A new file of a `LocalStorage`, written past the page cache (direct) or through it (buffered).

    Args:
        path: path of the file.
        root: root of the storage.
        direct: True if aligned writes go direct where the file system has direct writes.
        required: True if a file system without direct writes is an error.
        replace: True to write a draft, which takes the name `path` when it is finished.
        base: the folder below which no link is followed; None: `root`.

    Note: two descriptors
        Direct writes (O_DIRECT) need offset, length and address to be multiples of `ALIGNMENT`. All other
        writes go through a second, buffered descriptor of the same file. No page is written through both:
        both cut at multiples of a page, and callers write disjoint ranges. So a page in the cache is never
        older than the disk below it.
    """

    def __init__(
        self,
        path: Path,
        root: Path,
        *,
        direct: bool = False,
        required: bool = False,
        replace: bool = False,
        base: Path | None = None,
    ) -> None:
        self._name = path
        self._path = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp") if replace else path
        self._root = root
        self._direct: int | None = None
        self._refused = False
        self._required = required
        self._open = True
        with system_errors("create", self._path):
            self._buffered, self._folder = open_new(root if base is None else base, self._path, os.O_WRONLY)
        self._write_back = WriteBack(self._buffered)
        forks.close_in_child(self)
        try:
            if direct:
                self._direct = self._open_direct()
        except OSError as error:
            self.abort()
            raise storage_error(error, "open unbuffered", self._path) from error

    def _open_direct(self) -> int | None:
        """A descriptor for direct writes; None if the file system has none and may do without."""
        try:
            if not O_DIRECT:
                raise OSError(errno.ENOTSUP, "this system has no direct writes (O_DIRECT)")
            flags = os.O_WRONLY | O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW
            return os.open(self._path.name, flags, dir_fd=self._folder.number)
        except OSError as error:
            if self._required or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            return None

    @property
    def direct(self) -> bool:
        """True if aligned writes go past the page cache."""
        return self._direct is not None and not self._refused

    def write_at(self, start: int, buffer: memoryview) -> None:
        """Write the bytes of `buffer` at byte `start`."""
        if not self._open:
            raise self._closed("write")
        data = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        is_aligned = start % ALIGNMENT == 0 and len(data) >= ALIGNMENT and address(data) % ALIGNMENT == 0
        with system_errors("write", self._path):
            done = self._write_direct(start, data) if is_aligned and self.direct else 0
            write_all(self._buffered, data[done:], start + done)
            self._write_back.wrote(start + done, len(data) - done)

    def _write_direct(self, start: int, data: memoryview) -> int:
        """Write the aligned beginning of `data` direct; return the number of bytes written."""
        assert self._direct is not None
        done = 0
        aligned = len(data) - len(data) % ALIGNMENT
        while done < aligned:
            try:
                written = os.pwrite(self._direct, data[done:aligned], start + done)
            except OSError as error:
                if error.errno != errno.EINVAL or self._required:
                    raise
                self._refused = True  # the file system accepts the flag and refuses the writes
                return done
            done += written
            if written % ALIGNMENT:  # cut short by a limit or a full disk: the rest is not aligned
                return done
        return done

    def finish(self, size: int) -> None:
        """Give the file `size` bytes, flush it and its directory entry to stable storage, close it."""
        if not self._open:
            raise self._closed("finish")
        try:
            try:
                os.ftruncate(self._buffered, size)
                os.fsync(self._buffered)
            finally:
                self._close()
            if self._path != self._name:
                at = self._folder.number
                os.replace(self._path.name, self._name.name, src_dir_fd=at, dst_dir_fd=at)
            flush_folders(self._path.parent, self._topmost())
        except OSError as error:
            unlink_quietly(self._path.name, self._folder.number)
            raise storage_error(error, "flush", self._path) from error
        finally:
            self._folder.close()

    def abort(self) -> None:
        """Close and remove the file. Does nothing after `finish`."""
        if self._open:
            with contextlib.suppress(OSError):
                self._close()
            unlink_quietly(self._path.name, self._folder.number)
            self._folder.close()

    def close(self) -> None:
        """Close the descriptors without an effect on the file, which another process writes."""
        if self._open:
            with contextlib.suppress(OSError):
                self._close()

    def _topmost(self) -> Path:
        """The highest folder that may have got a new entry (see "durable names")."""
        candidates = [self._root.parent, *(made.parent for made in self._folder.made)]
        return min(candidates, key=lambda path: len(path.parts))

    def _closed(self, doing: str) -> StorageError:
        path = printable(self._path)
        return StorageError(f"cannot {doing} {path}: the file is already finished or aborted", file=path)

    def _close(self) -> None:
        self._open = False
        direct, self._direct = self._direct, None
        try:
            if direct is not None:
                os.close(direct)
        finally:
            os.close(self._buffered)


WRITE_BUFFER_BYTES = 8 << 20
"""Bytes of the buffer of a `FileWriter` that brings its own."""


class FileWriter:
    """A new file under construction, written in order. A context manager that removes an unfinished file.

    The buffer is aligned for direct I/O, so that the storage may write past the page cache.

    Args:
        sink: the file.
        buffer: from `aligned_buffer`, at least one byte; None for one of `WRITE_BUFFER_BYTES`. Several files
            that are written one after the other may share it.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> with FileWriter(storage.create("a")) as file:
        ...     file.put(b"head")
        ...     file.room()[:5] = b", end"
        ...     file.advance(5)
        ...     file.finish()
        9
        >>> storage.read("a")
        b'head, end'
    """

    def __init__(self, sink: Sink, buffer: memoryview | None = None) -> None:
        self._sink = sink
        self._buffer = aligned_buffer(WRITE_BUFFER_BYTES) if buffer is None else buffer
        self._filled = 0
        self._written = 0

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sink.abort()  # does nothing after `finish`

    def room(self) -> memoryview:
        """The free part of the buffer, at least one byte."""
        if self._filled == len(self._buffer):
            self._flush()
        return self._buffer[self._filled :]

    def advance(self, count: int) -> None:
        """Marks the first `count` bytes of `room` as filled."""
        self._filled += count

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._written + self._filled

    def put(self, data: bytes | bytearray | memoryview) -> None:
        """Appends bytes."""
        data = memoryview(data)
        while len(data):
            room = self.room()[: len(data)]
            room[:] = data[: len(room)]
            self.advance(len(room))
            data = data[len(room) :]

    def finish(self) -> int:
        """Writes the rest and flushes the file to stable storage. Returns the size of the file."""
        self._flush()
        self._sink.finish(self._written)
        return self._written

    def _flush(self) -> None:
        if self._filled:
            self._sink.write_at(self._written, self._buffer[: self._filled])
            self._written += self._filled
            self._filled = 0
