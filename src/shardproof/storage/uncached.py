"""A storage that goes past the page cache: it reads the bytes of the device, and writes to the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from shardproof.storage.base import Storage
from shardproof.storage.direct_io import aligned_buffer, memory_for
from shardproof.storage.local import LocalStorage, fill
from shardproof.storage.paths import StrOrBytesPath, storage_error

__all__ = ["UncachedStorage", "past_cache"]

PIECE = 4 << 20
"""The most bytes of one read."""


class UncachedStorage(LocalStorage):
    """Files in a folder and below it, read from the device and not from the page cache.

    Reads and aligned writes go past the page cache (O_DIRECT). Where the file system refuses that, they go
    through it, and a read asks the kernel to drop the file's pages first. Two limits: a file system in memory
    has no bytes but its pages, and the server of a network file system may answer from its own memory.

    Args:
        root: the folder.
        before_read: called before each read, with the number of its bytes. If it raises, the read ends.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     storage = UncachedStorage(folder)
    ...     storage.publish("manifest.json", b"bytes")
    ...     storage.read("manifest.json", 1, 3)
    b'yt'
    """

    _is_past_cache = True

    def __init__(self, root: StrOrBytesPath, *, before_read: Callable[[int], None] | None = None) -> None:
        super().__init__(root)
        self._before_read = before_read
        self._local = threading.local()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of the file; see `Storage.read`."""
        size = self.size(name)
        if size is None or not 0 <= start <= (size if stop is None else stop) <= size:
            return super().read(name, start, stop)  # raises the error
        data = bytearray((size if stop is None else stop) - start)
        self.read_into(name, start, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on; see `Storage.read_into`."""
        data = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        needed = memory_for(min(PIECE, len(data)))
        memory: memoryview | None = getattr(self._local, "memory", None)
        if memory is None or len(memory) < needed:
            memory = self._local.memory = aligned_buffer(needed)
        file = self._descriptor(name)
        for done in range(0, len(data), PIECE):
            part = data[done : done + PIECE]
            if self._before_read is not None:
                self._before_read(len(part))
            try:
                begin, count = file.uncached().read(start + done, len(part), memory)
            except OSError as error:
                raise storage_error(error, "read", file.path) from error
            part[:count] = memory[begin : begin + count]
            if count < len(part):
                self.drop_cached(name)
                fill(file, start + done, part, count)

    def is_cached(self, name: str, start: int, count: int) -> bool:
        """False: every read goes to the device."""
        return False

    def _at(self, path: Path) -> UncachedStorage:
        return UncachedStorage(path, before_read=self._before_read)


def past_cache(storage: Storage) -> Storage:
    """The same files, read and written past the page cache.

    Returns `storage` itself if it is no plain `LocalStorage`.
    """
    if type(storage) is not LocalStorage:
        return storage
    found = UncachedStorage(storage.path)
    found.direct = storage.direct
    found._base, found._open_files = storage._base, storage._open_files
    return found
