"""A range of a file, read on demand."""

from __future__ import annotations

import io
import os
from typing import Any, overload

from shardproof.engine.storage import Storage

_EDGE_BYTES = 4096
"""Bytes that one read fetches at the start of an archive, and another at its end. The metadata of an archive
of one tensor lies in them."""
_SMALL_BYTES = 4 * _EDGE_BYTES
"""Bytes of an archive that one read fetches whole, at most."""
_PIECE_BYTES = 1 << 18
"""Bytes that one read of `WindowBytes` fetches, at least."""


class FileWindow(io.RawIOBase):
    """A range of a file, as a file object. It reads the first and the last bytes once and caches them."""

    def __init__(self, storage: Storage, file: str, start: int, size: int) -> None:
        self._storage = storage
        self._file = file
        self._start = start
        self._size = size
        self._at = 0
        edge = size if size <= _SMALL_BYTES else _EDGE_BYTES
        self._edges = {at: self._fetched(at, edge) for at in {0, size - edge}}

    def readable(self) -> bool:
        """Always True."""
        return True

    def seekable(self) -> bool:
        """Always True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a byte of the range; see `io.IOBase.seek`."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"byte {base + offset} lies before the range")
        self._at = base + offset
        return self._at

    def readinto(self, into: Any) -> int:
        """Reads from the current byte on; see `io.RawIOBase.readinto`."""
        view = memoryview(into)[: max(self._size - self._at, 0)]
        view[:] = self.bytes_at(self._at, len(view))
        self._at += len(view)
        return len(view)

    def bytes_at(self, offset: int, count: int) -> bytes | bytearray:
        """Bytes of the range; fewer at its end."""
        count = min(count, max(self._size - offset, 0))
        for begin, data in self._edges.items():
            if begin <= offset and offset + count <= begin + len(data):
                return data[offset - begin : offset - begin + count]
        return self._fetched(offset, count)

    def _fetched(self, offset: int, count: int) -> bytearray:
        data = bytearray(count)
        if count:
            self._storage.read_into(self._file, self._start + offset, memoryview(data))
        return data


class WindowBytes:
    """The first bytes of a window, as `Bytes`. It caches the piece that it read last.

    Args:
        window: the window.
        count: number of the bytes.
    """

    def __init__(self, window: FileWindow, count: int) -> None:
        self._window = window
        self._count = count
        self._begin = 0
        self._piece = memoryview(b"")

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: slice, /) -> memoryview: ...

    @overload
    def __getitem__(self, index: int, /) -> int: ...

    def __getitem__(self, index: slice | int, /) -> memoryview | int:
        if isinstance(index, int):
            at = index - self._begin
            return self._piece[at] if 0 <= at < len(self._piece) else self[index : index + 1][0]
        start, stop, _ = index.indices(self._count)
        if not self._begin <= start <= stop <= self._begin + len(self._piece):
            self._piece = memoryview(b"")  # frees its memory before the next piece is allocated
            self._piece = memoryview(self._window.bytes_at(start, max(stop - start, _PIECE_BYTES)))
            self._begin = start
        return self._piece[start - self._begin : stop - self._begin]
