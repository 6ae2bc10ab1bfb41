"""Decodes chunks of Zarr arrays: the codecs that map bytes to bytes.

A chunk passes through a sequence of codecs. The codec that the writer applied last comes first. A codec is
named by its identifier in the package numcodecs, which Zarr v2 metadata uses. Names of Zarr v3 are mapped to
these identifiers.

Memory is bounded. Each codec gets the largest size that its output may have, and a decoder of a chunk that
declares more stops there. Codecs that could run code (``pickle``) or that do not decode to numbers
(``vlen-utf8``) are refused.
"""

from __future__ import annotations

import bz2
import importlib
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardproof.engine.foreign import DecodedExtent, UnsupportedError
from shardproof.engine.storage import Storage
from shardproof.errors import CorruptChunkError, FormatError

Buffer = bytes | memoryview

_LARGEST_CHUNK = 1 << 36
"""Bytes of a chunk after decoding, at most. A chunk has to fit into memory, so a larger size is damage."""
_COMPRESSORS = frozenset({"gzip", "zlib", "bz2", "lzma", "zstd", "blosc", "lz4"})
_CHECKSUMS = frozenset({"crc32c", "crc32", "adler32", "fletcher32", "jenkins_lookup3"})
_PROVING = frozenset({"gzip", "zlib", "bz2"}) | _CHECKSUMS
"""Codecs that always store a checksum and whose decoders compare it."""
_FILTERS = frozenset({"shuffle", "delta", "fixedscaleoffset", "astype", "bitround", "quantize", "packbits"})
_NUMBERS = re.compile(r"[<>|=]?[biufc](1|2|4|8|16)|b|bool|u?int(8|16|32|64)|float(16|32|64)")
"""Dtypes that a filter may name. Other dtypes could need any amount of memory."""


def import_extra(package: str, extra: str, what: str) -> Any:
    """Imports an optional package on demand."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise FormatError(
            f"{what} needs the package {package}, which cannot be imported ({error}). Install it with: "
            f"pip install 'shardproof[{extra}]'"
        ) from error


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec that maps bytes to bytes."""

    name: str
    """Identifier in numcodecs, for example "zstd"."""
    config: tuple[tuple[str, Any], ...]
    """Sorted options."""

    @staticmethod
    def of(name: Any, config: Mapping[str, Any]) -> Codec:
        """Builds a codec from the metadata.

        Raises:
            UnsupportedError: the codec is unknown or unsafe.
        """
        if name not in _COMPRESSORS | _CHECKSUMS | _FILTERS:
            raise UnsupportedError(f"the codec {name!r} is unknown")
        for entry, value in config.items():
            if "dtype" in entry or entry == "astype":
                if not isinstance(value, str) or not _NUMBERS.fullmatch(value):
                    raise UnsupportedError(f"the codec {name} names the dtype {value!r}")
            elif isinstance(value, (list, dict)):
                raise UnsupportedError(f"the option {entry} of the codec {name} is {value!r}")
        return Codec(name, tuple(sorted(config.items())))

    @property
    def has_checksum(self) -> bool:
        """True if a damaged byte fails to decode."""
        return self.name in _PROVING or (self.name == "zstd" and bool(dict(self.config).get("checksum")))

    def encoded_size(self, size: int, *, exact: bool) -> tuple[int, bool]:
        """Bytes of the encoded form of `size` bytes, and True if the number is exact, False if a bound."""
        if self.name in _CHECKSUMS:
            return size + 4, exact
        if self.name == "shuffle":
            return size, exact
        return (16 * size + 4096 if self.name in _FILTERS else size + size // 16 + 4096), False

    def decode(self, data: Buffer, size: int, *, exact: bool, into: memoryview | None = None) -> Buffer:
        """Decodes bytes.

        Args:
            data: the encoded bytes.
            size: bytes of the decoded form, at most.
            exact: True if the decoded form has to have exactly `size` bytes.
            into: (size,) memory that a codec may decode to, which is then returned.

        Raises:
            Exception: the bytes are damaged. The codecs raise exceptions of any class.
        """
        if self.name == "crc32c" and dict(self.config).get("location", "end") == "end":
            return _without_crc32c(data)
        if self.name in _BOUNDED:
            return _inflated(_BOUNDED[self.name], data, size)
        numcodecs = import_extra("numcodecs", "zarr", f"the codec {self.name} of Zarr")
        # a compressed chunk declares how it was compressed
        options = () if self.name in _COMPRESSORS else self.config
        codec = numcodecs.get_codec({**dict(options), "id": self.name})
        if self.name == "zstd":
            return _unzstd(codec, data, size, exact=exact, into=into)
        if self.name == "lz4":
            _check_declared(int.from_bytes(data[:4], "little"), size)
        elif self.name == "blosc":
            declared, _, stored = struct.unpack_from("<4x3I", data)
            _check_declared(declared, size)
            if stored != len(data):
                raise ValueError(f"{len(data)} bytes, but its header says {stored}")
        decoded = codec.decode(_array(data))
        if isinstance(decoded, (bytes, bytearray)):
            return memoryview(decoded)
        return np.ascontiguousarray(decoded).reshape(-1).view(np.uint8).data


@dataclass(frozen=True)
class Codecs:
    """The codecs of the chunks of an array, in the order of decoding."""

    codecs: tuple[Codec, ...]
    nbytes: int
    """Bytes of a chunk after decoding."""

    def __post_init__(self) -> None:
        if self.codecs and self.nbytes > _LARGEST_CHUNK:
            raise ValueError(f"a chunk has {self.nbytes} bytes, expected at most {_LARGEST_CHUNK}")

    @property
    def has_checksum(self) -> bool:
        """True if a codec proves the bytes."""
        return any(codec.has_checksum for codec in self.codecs)

    @cached_property
    def sizes(self) -> list[tuple[int, bool]]:
        """(codecs + 1) sizes before, between and after the codecs. The flag is True for an exact size."""
        sizes = [(self.nbytes, True)]
        for codec in reversed(self.codecs):
            size, exact = sizes[0]
            sizes.insert(0, codec.encoded_size(size, exact=exact))
        return sizes

    def decode(self, data: bytes, path: str, start: int, into: memoryview | None = None) -> Buffer:
        """Decodes a chunk.

        Args:
            data: the stored bytes.
            path: path of the file, for messages.
            start: first byte in the file, for messages.
            into: (nbytes,) memory that the last codec may decode to, which is then returned.

        Raises:
            CorruptChunkError: a codec with a checksum finds damage.
            FormatError: another codec cannot decode the bytes, or numcodecs is not installed.
        """
        found: Buffer = data
        for codec, (size, exact) in zip(self.codecs, self.sizes[1:], strict=True):
            memory = into if codec is self.codecs[-1] else None
            try:
                found = codec.decode(found, size, exact=exact, into=memory)
                if len(found) > size or (exact and len(found) != size):
                    raise ValueError(f"it gives {len(found)} bytes, expected {size}")
            except FormatError:
                raise
            except MemoryError as error:
                raise FormatError(f"{path}: {size} bytes do not fit into memory", file=path) from error
            except Exception as error:
                kind = CorruptChunkError if codec.has_checksum else FormatError
                raise kind(
                    f"{path}: the {len(data)} bytes from byte {start} on cannot be decoded: {codec.name}: "
                    f"{error}. The file changed after it was written: restore it from a copy",
                    file=path,
                    byte_start=start,
                    byte_count=len(data),
                ) from error
        return found


@dataclass(frozen=True, slots=True)
class CodedExtent(DecodedExtent):
    """A chunk that is stored through codecs."""

    storage: Storage
    file: str
    start: int
    codecs: Codecs
    stored: int | None
    """Bytes in the file; None for all bytes up to its end."""
    swap: int = 1
    """Bytes of each number whose order is reversed; 1 if the order is that of this machine."""

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes after decoding."""
        return self.codecs.nbytes

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file."""
        return (self.storage.size(self.file) or 0) - self.start if self.stored is None else self.stored

    @property
    def has_checksum(self) -> bool:
        """True if a codec of the chunk proves its bytes."""
        return self.codecs.has_checksum

    def decode(self) -> Buffer:
        """The decoded bytes; see `DecodedExtent.decode`."""
        return self._decoded(None)

    def read_into(self, memory: memoryview) -> None:
        """Decodes all bytes, into the memory if the last codec can; see `Extent.read_into`."""
        found = self._decoded(memory)
        if found is not memory:
            memory[:] = memoryview(found).cast("B")

    def _decoded(self, into: memoryview | None) -> Buffer:
        path = f"{self.storage.location}/{self.file}"
        stored, (most, exact) = self.stored_bytes, self.codecs.sizes[0]
        if stored > most or (exact and stored != most):
            raise FormatError(
                f"{path}: a chunk has {stored} bytes, expected {'' if exact else 'at most '}{most}: the file "
                "was cut or replaced. Restore it from a copy",
                file=path,
                byte_start=self.start,
                byte_count=stored,
            )
        data = self.storage.read(self.file, self.start, None if self.stored is None else self.start + stored)
        found = self.codecs.decode(data, path, self.start, into)
        if self.swap > 1:
            return np.frombuffer(found, f"u{self.swap}").byteswap().view(np.uint8).data
        return found


def _array(data: Buffer) -> Any:
    return np.frombuffer(data, np.uint8)


def _check_declared(declared: int, size: int) -> None:
    if declared > size:
        raise ValueError(f"its header says {declared} bytes, expected {size} at most")


def _without_crc32c(data: Buffer) -> memoryview:
    google_crc32c = import_extra("google_crc32c", "zarr", "the codec crc32c of Zarr")
    if len(data) < 4:
        raise ValueError(f"only {len(data)} bytes, expected at least 4 of the checksum")
    content = memoryview(data)[:-4]
    expected, found = int.from_bytes(data[-4:], "little"), google_crc32c.value(_array(content))
    if found != expected:
        raise ValueError(f"expected {expected:08x}, found {found:08x}")
    return content


_MEMBER_BYTES = 16 << 10
_LZMA_BYTES = 1 << 30
"""Memory of a decompressor of LZMA, at most. The stream asks for it; the highest preset needs 65 MiB."""
_BOUNDED: Mapping[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(31),
    "zlib": zlib.decompressobj,
    "bz2": bz2.BZ2Decompressor,
    "lzma": lambda: lzma.LZMADecompressor(memlimit=_LZMA_BYTES),
}
"""Decompressors that stop at a given size. The decompressors of numcodecs do not."""


def _inflated(decompressor: Callable[[], Any], data: Buffer, size: int) -> bytes:
    """Decompresses all members of a stream, up to `size` + 1 bytes.

    The first member gets all bytes at once. Each later one gets them in pieces, because a decompressor copies
    the bytes after its member: a stream of many members would take quadratic time.
    """
    parts: list[bytes] = []
    left = size + 1
    view, at, piece = memoryview(data), 0, len(data)
    while True:
        stream = decompressor()
        while not stream.eof and left:
            given = view[at : at + piece]
            if not given:
                raise ValueError("the compressed bytes end early")
            part = stream.decompress(given, left)
            # a decompressor that neither ends nor gives `left` bytes has read all that it got
            at += len(given) - len(stream.unused_data)
            parts.append(part)
            left -= len(part)
        if at == len(view) or not left:
            return parts[0] if len(parts) == 1 else b"".join(parts)
        piece = _MEMBER_BYTES


def _unzstd(codec: Any, data: Buffer, size: int, *, exact: bool, into: memoryview | None) -> memoryview:
    """Decodes a zstd frame into the given memory, or into newly allocated memory."""
    declared = _zstd_content_size(data)
    if declared is None:
        if not exact:
            raise ValueError("its header does not give the decoded size")
        declared = size  # numcodecs refuses a frame that decodes to fewer bytes
    _check_declared(declared, size)
    memory = np.empty(declared, np.uint8).data if into is None or len(into) != declared else into
    if declared:
        codec.decode(_array(data), out=np.frombuffer(memory, np.uint8))
    return memory


def _zstd_content_size(data: Buffer) -> int | None:
    """The decoded size in the header of a zstd frame; None if the header has none. See RFC 8878, 3.1.1.1."""
    if bytes(data[:4]) != b"\x28\xb5\x2f\xfd" or len(data) < 6:
        raise ValueError("it is not a zstd frame")
    flags = data[4]
    is_single = flags >> 5 & 1
    width = (is_single, 2, 4, 8)[flags >> 6]
    begin = 5 + (1 - is_single) + (0, 1, 2, 4)[flags & 3]
    if not width:
        return None
    return int.from_bytes(data[begin : begin + width], "little") + (256 if width == 2 else 0)
