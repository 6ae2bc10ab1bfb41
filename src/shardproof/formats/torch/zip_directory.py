"""Reads the directory of a zip archive as torch.save writes it: without a comment, and with zip64.

Python's zipfile reads the same directory. For an archive of one small tensor, it takes ten times as long as
all other work.

Reference: the ZIP application note of PKWARE, sections 4.3.12 to 4.3.16 and 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

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
