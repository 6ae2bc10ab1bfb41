"""The bytes of an archive of ``torch.save``, read on demand, and the directory of its zip.

torch.save writes the directory without a comment, and with zip64. Python's zipfile reads the same directory.
For an archive of one small tensor, it takes ten times as long as all other work.

Reference: the ZIP application note of PKWARE, sections 4.3.12 to 4.3.16 and 4.5.3.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, overload

from shardproof.engine.storage import Storage

_END = struct.Struct("<4s4H2LH")
"""Signature, two disk numbers, records on this disk and in all, bytes and start of the directory, bytes of
the comment."""
_LOCATOR = struct.Struct("<4sLQL")
"""Signature, disk of the zip64 end record, its start, number of disks."""
_END_64 = struct.Struct("<4sQ2H2L4Q")
_RECORD = struct.Struct("<4s6H3L5H2L")
_EXTRA = struct.Struct("<2H")
_ENCRYPTED = 1
_UTF_8 = 0x800
_MOST_32 = 0xFFFFFFFF


class ZipRecord(NamedTuple):
    """One record of a zip archive."""

    name: str
    """The whole name, with the folder that torch puts before it."""
    method: int
    """Compression method; 0 if the record is not compressed."""
    crc: int
    stored: int
    """Bytes in the archive."""
    nbytes: int
    """Bytes after decompression."""
    header: int
    """First byte of the local header."""


def read_zip_directory(bytes_at: Callable[[int, int], bytes], size: int) -> list[ZipRecord]:
    """Reads the directory at the end of an archive.

    Args:
        bytes_at: returns a number of bytes of the archive from an offset on, and fewer at its end.
        size: bytes of the archive.

    Raises:
        ValueError: the directory is damaged or cut, or the archive is of a kind that torch never writes.

    Example:
        >>> import io, zipfile
        >>> file = io.BytesIO()
        >>> with zipfile.ZipFile(file, "w") as archive:
        ...     archive.writestr("archive/version", "3")
        >>> data = file.getvalue()
        >>> [(found.name, found.nbytes) for found in
        ...  read_zip_directory(lambda at, count: data[at : at + count], len(data))]
        [('archive/version', 1)]
    """
    end = size - _END.size
    tail = bytes_at(end, _END.size) if end >= 0 else b""
    if len(tail) < _END.size or tail[:4] != b"PK\x05\x06":
        raise ValueError("it does not end with an end record")
    _, disk, first_disk, here, count, nbytes, begin, comment = _END.unpack(tail)
    if comment:
        raise ValueError("it ends with a comment")
    locator = bytes_at(end - _LOCATOR.size, _LOCATOR.size) if end >= _LOCATOR.size else b""
    if locator[:4] == b"PK\x06\x07":  # torch always writes it
        end -= _LOCATOR.size + _END_64.size
        if end < 0 or _LOCATOR.unpack(locator)[2] != end:
            raise ValueError("the end record of zip64 is not where its locator says")
        signature, *_, disk, first_disk, here, count, nbytes, begin = _END_64.unpack(
            bytes_at(end, _END_64.size)
        )
        if signature != b"PK\x06\x06":
            raise ValueError("it has no end record of zip64")
    if disk or first_disk or here != count:
        raise ValueError("it is split")
    if begin + nbytes != end or count * _RECORD.size > nbytes:
        raise ValueError(f"its directory of {count} records has {nbytes} bytes from byte {begin} on")
    return _records(bytes_at(begin, nbytes), count)


def _records(data: bytes, count: int) -> list[ZipRecord]:
    found = []
    at = 0
    for _ in range(count):
        if data[at : at + 4] != b"PK\x01\x02" or at + _RECORD.size > len(data):
            raise ValueError(f"no record begins at byte {at} of its directory")
        (_, _, _, flags, method, _, _, crc, stored, nbytes, named, extra, comment, _, _, _, header) = (
            _RECORD.unpack_from(data, at)
        )
        at += _RECORD.size
        end = at + named + extra + comment
        if end > len(data) or flags & _ENCRYPTED:
            raise ValueError("a record is encrypted, or longer than the directory")
        name = data[at : at + named].decode("utf-8" if flags & _UTF_8 else "cp437")
        if _MOST_32 in (stored, nbytes, header):
            large = _zip64_numbers(data[at + named : at + named + extra])
            nbytes, stored, header = (
                next(large) if number == _MOST_32 else number for number in (nbytes, stored, header)
            )
        found.append(ZipRecord(name, method, crc, stored, nbytes, header))
        at = end
    if at != len(data):
        raise ValueError("its directory has more bytes than its records")
    return found


def _zip64_numbers(extra: bytes) -> Iterator[int]:
    """Yields the numbers of the zip64 field, then raises `ValueError`."""
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, count = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == 1:
            field = extra[at : at + count]
            yield from (int(number) for (number,) in struct.iter_unpack("<Q", field[: len(field) // 8 * 8]))
            break
        at += count
    raise ValueError("a record of more than 4 GiB has no sizes")


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
    """The first bytes of a window, as `Bytes`. It caches the piece that it read last."""

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
