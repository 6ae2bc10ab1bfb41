"""Reading the bytes that the device has, whatever the page cache has of them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from shardproof.errors import StorageError
from shardproof.storage.buffers import ALIGNMENT, aligned_buffer
from shardproof.storage.failures import printable, storage_error
from shardproof.storage.local import LocalStorage
from shardproof.storage.names import check_folder
from shardproof.storage.paths import StrOrBytesPath

__all__ = ["UncachedStorage"]

PIECE = 4 << 20
"""Bytes of one read at most."""

_DIRECT = getattr(os, "O_DIRECT", 0)


class UncachedStorage(LocalStorage):
    """Files in a folder and below it, read from the device and not from the page cache.

    A file is read past the page cache (O_DIRECT). Where the file system refuses that, the kernel is asked to
    drop the file's pages first. A file system in memory has no other bytes than its pages, and the server of
    a network file system may answer from its own memory.

    Args:
        root: the folder.
        before_read: called before each read, with its bytes. Its error ends the read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     storage = UncachedStorage(folder)
    ...     storage.publish("manifest.json", b"bytes")
    ...     storage.read("manifest.json", 1, 3)
    b'yt'
    """

    def __init__(self, root: StrOrBytesPath, *, before_read: Callable[[int], None] | None = None) -> None:
        super().__init__(root)
        self._before_read = before_read

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of the file; see `Storage.read`."""
        size = self.size(name)
        if size is None or not 0 <= start <= (size if stop is None else stop) <= size:
            return super().read(name, start, stop)  # which raises the error
        data = bytearray((size if stop is None else stop) - start)
        self.read_into(name, start, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on; see `Storage.read_into`."""
        data = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        with _File(self._path(name), min(PIECE, len(data))) as file:
            done = 0
            while done < len(data):
                part = data[done : done + PIECE]
                if self._before_read is not None:
                    self._before_read(len(part))
                file.read(start + done, part)
                done += len(part)

    def within(self, prefix: str) -> UncachedStorage:
        """The storage in the folder `prefix` of this one."""
        return UncachedStorage(self._path(prefix), before_read=self._before_read)

    def sibling(self, folder: str) -> UncachedStorage:
        """The storage in the folder of this name beside this one's root; see `Storage.sibling`."""
        above = self.path.parent
        return UncachedStorage(above / check_folder(folder, printable(above)), before_read=self._before_read)


class _File:
    """A file open for reading from the device, as a context.

    Args:
        path: of the file.
        most: bytes of one read.
    """

    def __init__(self, path: Path, most: int) -> None:
        self._path = path
        self._buffer = aligned_buffer(most + 2 * ALIGNMENT)
        self._is_direct = bool(_DIRECT)
        self._number = self._open()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._number)

    def read(self, start: int, to: memoryview) -> None:
        """Fill `to` from byte `start` on."""
        begin = start // ALIGNMENT * ALIGNMENT
        end = start + len(to)
        pages = self._buffer[: -(-end // ALIGNMENT) * ALIGNMENT - begin]
        filled = 0
        while filled < end - begin:
            count = self._read_some(begin + filled, pages[filled:])
            if count == 0:
                raise StorageError(
                    f"{printable(self._path)} is too short: expected {len(to)} bytes from byte {start} "
                    f"on, found {max(0, begin + filled - start)}. The file was cut, or is not the one that "
                    "was written.",
                    file=printable(self._path),
                    missing=False,
                    byte_start=start,
                    byte_count=len(to),
                )
            filled += count
        to[:] = pages[start - begin : end - begin]

    def _read_some(self, start: int, to: memoryview) -> int:
        """Bytes that one system call reads; 0 at the end of the file."""
        try:
            return os.preadv(self._number, [to], start)
        except OSError as error:
            if self._is_direct and error.errno == errno.EINVAL:
                if start >= os.fstat(self._number).st_size:  # some file systems refuse to read beyond the end
                    return 0
                self._is_direct, refused = False, self._number
                self._number = self._open()
                os.close(refused)
                return self._read_some(start, to)
            raise storage_error(error, "read", printable(self._path)) from error

    def _open(self) -> int:
        # O_NONBLOCK: opening a pipe that somebody left there must not wait for its writer
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            number = -1
            if self._is_direct:
                try:
                    number = os.open(self._path, flags | _DIRECT)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._is_direct = False
            if number < 0:
                number = os.open(self._path, flags)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            if stat.S_ISREG(os.fstat(number).st_mode):
                return number
        except OSError as error:
            raise storage_error(error, "read", printable(self._path)) from error
        os.close(number)
        raise StorageError(
            f"cannot read {printable(self._path)}: it is not a regular file",
            file=printable(self._path),
            missing=False,
        )
