"""Writes a file from its beginning to its end through one aligned buffer."""

from __future__ import annotations

from types import TracebackType

from shardproof.engine.storage.base import Sink
from shardproof.engine.storage.direct_io import aligned_buffer

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
        """Writes the rest and flushes the file to stable storage.

        Returns:
            The bytes of the file.
        """
        self._flush()
        self._sink.finish(self._written)
        return self._written

    def _flush(self) -> None:
        if self._filled:
            self._sink.write_at(self._written, self._buffer[: self._filled])
            self._written += self._filled
            self._filled = 0
