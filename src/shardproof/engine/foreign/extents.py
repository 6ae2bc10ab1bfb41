"""Extents: ranges of foreign files, read and verified as a whole, that hold elements of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from shardproof.engine.storage import Storage
from shardproof.errors import CorruptChunkError, FormatError

try:  # the extra "interop" brings a faster implementation
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

_PIECE_BYTES = 1 << 20
"""Bytes that are read and then hashed at once, while they are in the processor's cache."""


class Extent(ABC):
    """Bytes that are read, decoded and verified together. Boxes of tensors are strided views of them.

    Equal extents have the same bytes, so a reader reads them once.
    """

    __slots__ = ()

    storage: Storage
    file: str
    """Name of the file in the storage."""
    start: int
    """First byte in the file."""
    nbytes: int
    """Bytes in memory, after decoding."""

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file."""
        return self.nbytes

    @property
    def has_checksum(self) -> bool:
        """True if a read proves the bytes."""
        return False

    @property
    def is_seekable(self) -> bool:
        """True if `read_range` reads a part without the rest."""
        return False

    @property
    def is_raw(self) -> bool:
        """True if the bytes in memory are those of the file, so that neighbours can share a read."""
        return False

    @abstractmethod
    def read_into(self, memory: memoryview) -> None:
        """Reads all `nbytes` bytes into writable memory of that size, and verifies them.

        Raises:
            CorruptChunkError: the bytes do not match their checksum.
            FormatError: the bytes cannot be decoded.
            StorageError: the file is missing, short or unreadable.
        """

    def read_range(self, begin: int, memory: memoryview) -> None:
        """Reads a part and verifies nothing. Only for an extent with `is_seekable`.

        Args:
            begin: first byte of the part, a multiple of the item size.
            memory: filled with the bytes from `begin` on.

        Raises:
            StorageError: the file is missing, short or unreadable.
        """
        raise NotImplementedError

    def check(self, memory: memoryview) -> None:
        """Verifies bytes that one read fetched with those of neighbours. Only for an extent with `is_raw`.

        Raises:
            CorruptChunkError: the bytes do not match their checksum.
        """
        raise NotImplementedError

    def verify(self) -> None:
        """Reads all bytes, in bounded memory where the extent is seekable, and verifies them.

        Raises:
            CorruptChunkError, FormatError, StorageError: as `read_into`.
        """
        self.read_into(memoryview(bytearray(self.nbytes)))


@dataclass(frozen=True, slots=True)
class FileRange(Extent):
    """Bytes of a file as they are, with a CRC-32 or without a checksum.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> storage.publish("a", b"..abcd")
        >>> memory = bytearray(4)
        >>> FileRange(storage, "a", 2, 4, crc=crc32(b"abcd")).read_into(memoryview(memory))
        >>> memory
        bytearray(b'abcd')
        >>> FileRange(storage, "a", 2, 4, crc=0).verify()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        shardproof.errors.CorruptChunkError: ...
    """

    storage: Storage
    file: str
    start: int
    nbytes: int
    crc: int | None = None
    """CRC-32 of the bytes; None if the format has no checksum."""
    swap: int = 1
    """Bytes of each number whose order is reversed; 1 if the order is that of this machine."""

    @property
    def has_checksum(self) -> bool:
        """True if the format has a CRC-32 of these bytes."""
        return self.crc is not None

    @property
    def is_seekable(self) -> bool:
        """Always True."""
        return True

    @property
    def is_raw(self) -> bool:
        """True unless numbers are reversed."""
        return self.swap == 1

    def read_into(self, memory: memoryview) -> None:
        """Reads all bytes and compares their CRC-32; see `Extent.read_into`."""
        if self.crc is None:
            self.storage.read_into(self.file, self.start, memory)
        else:
            self._check_crc(self._pieces(memory))
        self._swap(memory)

    def check(self, memory: memoryview) -> None:
        """Compares the CRC-32 of bytes; see `Extent.check`."""
        self._check_crc([memory])

    def read_range(self, begin: int, memory: memoryview) -> None:
        """Reads a part; see `Extent.read_range`."""
        self.storage.read_into(self.file, self.start + begin, memory)
        self._swap(memory)

    def verify(self) -> None:
        """Reads all bytes through one buffer and compares their CRC-32."""
        buffer = memoryview(bytearray(min(self.nbytes, _PIECE_BYTES)))
        self._check_crc(self._pieces(buffer))

    def _pieces(self, memory: memoryview) -> Iterator[memoryview]:
        """All bytes in order. A buffer that is smaller than the extent is filled repeatedly."""
        reuse = len(memory) < self.nbytes
        for begin in range(0, self.nbytes, _PIECE_BYTES):
            count = min(_PIECE_BYTES, self.nbytes - begin)
            piece = memory[:count] if reuse else memory[begin : begin + count]
            self.storage.read_into(self.file, self.start + begin, piece)
            yield piece

    def _check_crc(self, pieces: Iterable[memoryview]) -> None:
        found = 0
        for piece in pieces:
            if self.crc is not None:
                found = crc32(piece, found)
        if self.crc is not None and found != self.crc:
            path = f"{self.storage.location}/{self.file}"
            raise CorruptChunkError(
                f"{path}: {self.nbytes} bytes from byte {self.start} on do not match their CRC-32: expected "
                f"{self.crc:08x}, found {found:08x}. The file changed after it was written: restore it from "
                "a copy",
                file=path,
                byte_start=self.start,
                byte_count=self.nbytes,
            )

    def _swap(self, memory: memoryview) -> None:
        if self.swap > 1 and len(memory):
            np.frombuffer(memory, f"u{self.swap}").byteswap(inplace=True)


class DecodedExtent(Extent):
    """Bytes that are compressed or encoded in the file. A subclass implements `decode`."""

    __slots__ = ()

    @abstractmethod
    def decode(self) -> bytes | bytearray | memoryview:
        """The decoded bytes. If their number is not `nbytes`, `read_into` raises.

        Raises:
            CorruptChunkError, FormatError, StorageError: as `Extent.read_into`.
        """

    def read_into(self, memory: memoryview) -> None:
        """Decodes all bytes; see `Extent.read_into`."""
        data = memoryview(self.decode()).cast("B")
        if len(data) != self.nbytes:
            path = f"{self.storage.location}/{self.file}"
            raise FormatError(f"{path}: {len(data)} bytes after decoding, expected {self.nbytes}", file=path)
        memory[:] = data
