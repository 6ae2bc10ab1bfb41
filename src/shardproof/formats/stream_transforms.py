"""Decodes compressed entries of DCP files in memory, up to a limit.

torch calls the compression a stream extension. ``.metadata`` names the extensions of each entry. The only one
that torch has is ``stream.zstd/1``. A decoded entry is an archive of ``torch.save`` like any other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from shardproof.engine.foreign import DecodedExtent, Extent
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError

_ZSTD = "stream.zstd"
_PIECE_BYTES = 1 << 20
"""Compressed bytes that one read fetches."""
_SLICE_BYTES = 1024
"""Compressed bytes that are decoded at once. A block of zstd has at least 4 bytes and at most 128 KiB of
content, so a slice decodes to at most 32 MiB."""


def decoded_storage(
    storage: Storage, file: str, start: int, size: int, transforms: tuple[str, ...], most: int
) -> Storage:
    """A decoded entry, as a storage that has one file with the name of the real file.

    Args:
        storage: the storage that holds the file.
        file: name of the file.
        start: first byte of the entry.
        size: bytes of the entry in the file.
        transforms: names of the extensions, for example ``("stream.zstd/1",)``.
        most: bytes of the decoded entry, at most.

    Raises:
        FormatError: an extension is unknown, the compressed bytes are damaged or cut, they decode to more
            than `most` bytes, or the package zstandard is not installed.
        StorageError: the file is missing, short or unreadable.
    """
    path = f"{storage.location}/{file}"
    data = bytearray()
    read: Callable[[int, int], bytes] = lambda begin, end: storage.read(file, start + begin, start + end)  # noqa: E731
    count = size
    for transform in transforms:
        name, _, version = transform.partition("/")
        if name != _ZSTD or version.partition(".")[0] != "1":
            raise FormatError(
                f"{path}: the entry at byte {start} has the stream extension {transform!r}; only {_ZSTD}/1 "
                "is known. Read it with torch and the extension that wrote it, and save it without "
                "extensions",
                file=path,
            )
        data = _decompressed(read, count, most, path, start)
        read, count = _reader_of(data), len(data)
    return cast(Storage, MemoryFile(storage.location, file, data))


def _reader_of(data: bytearray) -> Callable[[int, int], bytes]:
    return lambda begin, end: bytes(data[begin:end])


def _decompressed(
    read: Callable[[int, int], bytes], count: int, most: int, path: str, start: int
) -> bytearray:
    """The content of the zstd frames that `count` bytes hold; torch writes one."""
    where = f"{path}: the zstd frame of the entry at byte {start}"
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError as error:
        raise FormatError(
            f"{path}: an entry is compressed with zstd: pip install 'shardproof[interop]'", file=path
        ) from error
    frame: Any = None
    data = bytearray()
    for begin in range(0, count, _PIECE_BYTES):
        piece = read(begin, min(begin + _PIECE_BYTES, count))
        try:
            for at in range(0, len(piece), _SLICE_BYTES):
                rest = piece[at : at + _SLICE_BYTES]
                while rest:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    data += frame.decompress(rest)
                    rest, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
                    if len(data) > most:
                        raise FormatError(
                            f"{where} decodes to more than {most} bytes, the limit by its description. The "
                            "entry is damaged, or it was made to use up memory",
                            file=path,
                        )
        except zstandard.ZstdError as error:
            raise FormatError(f"{where} is damaged ({error}). Restore it from a copy", file=path) from error
    if frame is not None or not count:
        raise FormatError(f"{where} is cut: it has no end within {count} bytes", file=path)
    return data


class MemoryFile:
    """Bytes in memory as one file. It has the methods of `Storage` that reads of an extent use."""

    def __init__(self, location: str, file: str, data: bytearray) -> None:
        self.location = location
        self._file = file
        self._data = data

    def size(self, name: str) -> int | None:
        """Bytes of the decoded entry."""
        return len(self._data) if name == self._file else None

    def read(self, name: str, start: int, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop` of the file."""
        return bytes(memoryview(self._data)[start:stop])

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `start` on."""
        piece = memoryview(self._data)[start : start + len(buffer)]
        if len(piece) != len(buffer):
            path = f"{self.location}/{name}"
            raise FormatError(
                f"{path}: a decoded entry has {len(self._data)} bytes, expected {start + len(buffer)}",
                file=path,
            )
        buffer[:] = piece


@dataclass(frozen=True, slots=True)
class DecodedPart(DecodedExtent):
    """A part of an entry that has to be decoded as a whole.

    It holds the decoded entry until the first read, so that opening and reading decode it once. Two parts are
    equal if they are the same part of the same entry.
    """

    storage: Storage
    file: str
    start: int
    """First byte of the entry in the file."""
    stored: int
    """Bytes of the entry in the file."""
    offset: int
    """First byte of the part in the decoded entry."""
    nbytes: int
    is_proved: bool
    """True if the decoded entry has a CRC-32 of the part."""
    open: Callable[[], Extent] = field(compare=False)
    """Decodes the entry again, and returns the part in it."""
    decoded: list[Extent] = field(compare=False)
    """The part in the decoded entry. The first read empties the list."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of the whole entry in the file."""
        return self.stored

    @property
    def has_checksum(self) -> bool:
        """True if a read proves the bytes."""
        return self.is_proved

    def decode(self) -> bytearray:
        """The bytes of the part, checked; see `DecodedExtent.decode`."""
        data = bytearray(self.nbytes)
        self.read_into(memoryview(data))
        return data

    def read_into(self, memory: memoryview) -> None:
        """Decodes the entry and checks the CRC-32 of the part; see `Extent.read_into`."""
        try:
            extent = self.decoded.pop()
        except IndexError:
            extent = self.open()
        extent.read_into(memory)
