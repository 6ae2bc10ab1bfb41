"""Shard files: header, chunks, padding and tables of digests; writing them, and reading the digests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.engine.format.digests import (
    ChunkHasher,
    block_counts,
    digests_as_table,
    digests_from_bytes,
    digests_from_table,
    file_digest,
)
from shardproof.engine.format.file_names import chunk_name
from shardproof.engine.format.header import MAX_HEADER, HeaderEntry, ShardHeader
from shardproof.engine.format.manifest import FileRecord
from shardproof.engine.planning import LARGE_BYTES
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError

PAGE_BYTES = 4096
"""Bytes of a memory page on most machines."""

PADDING = "@padding"
"""Name of the entry of zero bytes that aligns the entries after it."""

BLOCKS = "@blocks"
"""Name of the entry before the last: U64 [n, 2], high and low half of the block digests of all chunks of
several blocks, in byte order. It is absent if no chunk has several blocks."""

DIGESTS = "@digests"
"""Name of the last entry: U64 [n, 2], high and low half of the digests of all chunks, in byte order."""


class _WrittenEntry(msgspec.Struct, gc=False):
    dtype: str
    shape: Sequence[int]
    data_offsets: tuple[int, int]


_ENCODER = msgspec.json.Encoder()
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def encode_entries(
    names: Sequence[str],
    codes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    starts: NDArray[Any],
    counts: NDArray[Any],
) -> bytes:
    """Encodes the entries of a safetensors header, without the braces of the JSON object.

    Equal plans give equal bytes.

    Args:
        names: names of n entries.
        codes: safetensors' code of the dtype of each.
        shapes: shape of each.
        starts: (n,) int64, first byte of each, counted from the first byte of the data.
        counts: (n,) int64, bytes of each.

    Raises:
        FormatError: two entries have one name, or a name is not valid Unicode.

    >>> encode_entries(["w[0:2]"], ["F32"], [(2,)], np.array([0]), np.array([8]))
    b'"w[0:2]":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    """
    starts = np.asarray(starts, np.int64)
    stops = (starts + counts).tolist()
    offsets = zip(starts.tolist(), stops, strict=True)
    entries = dict(zip(names, map(_WrittenEntry, codes, shapes, offsets), strict=True))
    if len(entries) != len(names):
        raise FormatError("a shard file would have two entries of one name.")
    try:
        return _ENCODER.encode(entries)[1:-1]
    except UnicodeEncodeError as error:
        raise FormatError(f"a key is not valid Unicode: {error}.") from error


def shard_header(entries: bytes, metadata: dict[str, str], *, in_page: int = 0, size: int = 0) -> bytes:
    """All bytes of a shard file before its data.

    Args:
        entries: result of `encode_entries`.
        metadata: texts of the file's ``__metadata__``.
        in_page: byte of a page of `PAGE_BYTES` at which the data begin, a multiple of 8. Spaces fill the
            header up to there.
        size: bytes that the header gets instead, if they are enough; a multiple of 8.

    Raises:
        FormatError: the header is longer than safetensors readers accept.

    >>> header = shard_header(b"", {"shardproof": "{}"})
    >>> len(header), header[8:46]
    (4096, b'{"__metadata__":{"shardproof":"{}"}}  ')
    """
    try:
        head = b'{"__metadata__":' + _ENCODER.encode(metadata)
    except UnicodeEncodeError as error:
        raise FormatError(f"the metadata of a shard file is not valid Unicode: {error}.") from error
    used = 8 + len(head) + bool(entries) + len(entries) + 1
    length = (size if used <= size else used + (in_page - used) % PAGE_BYTES) - 8
    if length > MAX_HEADER:
        part, count = _largest_part(entries, metadata)
        raise FormatError(
            f"the header of a shard file would have {length} bytes, but safetensors allows {MAX_HEADER}. "
            f"Most of it, {count} bytes, is {part}. Keep large values as tensors or arrays, tensors in fewer "
            "and larger pieces, and large metadata in a file of your own."
        )
    parts = (length.to_bytes(8, "little"), head, b"," if entries else b"", entries, b"}")
    return b"".join(parts) + b" " * (length + 8 - used)


def shard_tail(padding: int, blocks: Sequence[bytes], digests: NDArray[np.uint64]) -> bytes:
    """All bytes of a shard file after its chunks.

    Args:
        padding: number of zero bytes, fewer than 8.
        blocks: block digests of all chunks of several blocks, in byte order, 16 bytes each.
        digests: (n, 2) uint64, digests of the chunks in byte order.

    >>> len(shard_tail(4, [bytes(16)] * 2, np.zeros((3, 2), np.uint64)))
    84
    """
    tables = (digests_from_bytes(blocks), digests)
    return bytes(padding) + b"".join(map(digests_as_table, tables))


def _largest_part(entries: bytes, metadata: dict[str, str]) -> tuple[str, int]:
    """The largest part of a header, in words, and its bytes: one object or metadata value if possible."""
    sizes = {"the list of its chunks": len(entries)}
    for name, text in metadata.items():
        sizes[f"the metadata {name!r:.200}"] = len(text)
        try:
            members = _MEMBERS.decode(text)
            inner = {group: _MEMBERS.decode(members.pop(group)) for group in ("objects", "metadata")}
        except (msgspec.MsgspecError, KeyError):
            continue  # not of a shard
        del sizes[f"the metadata {name!r:.200}"]
        sizes |= {f"the list of its {group}": len(bytes(raw)) for group, raw in members.items()}
        sizes |= {f"the value of {key!r:.200}": len(bytes(raw)) for key, raw in inner["objects"].items()}
        sizes |= {f"the metadata {key!r:.200}": len(bytes(raw)) for key, raw in inner["metadata"].items()}
    return max(sizes.items(), key=lambda part: part[1])


def read_chunk_digests(storage: Storage, name: str, header: ShardHeader) -> NDArray[np.uint64]:
    """Reads the digests of its chunks from a shard file, which is not trusted.

    Returns:
        (n, 2) uint64, the digests of the first n entries of `header`: all but `PADDING`, `BLOCKS`, `DIGESTS`.

    Raises:
        FormatError: the file has no digests or a wrong number of them, or its padding is not zero.
        StorageError: the file is missing, short or unreadable.
    """
    chunks = list(header.entries)
    if not chunks or chunks[-1][0] != DIGESTS:
        raise FormatError(
            f"{name}: the last entry is not {DIGESTS!r}, so this is not a shard file.", file=name
        )
    digests = chunks.pop()
    blocks = chunks.pop() if chunks and chunks[-1][0] == BLOCKS else None
    if chunks and chunks[-1][0] == PADDING:
        _, _, _, first, after = chunks.pop()
        if after - first >= 8 or any(storage.read(name, first, after)):
            raise FormatError(f"{name}: the padding at bytes {first} to {after} is not zero.", file=name)
    _check_digests(name, digests, len(chunks))
    counts = np.array([stop - start for _, _, _, start, stop in chunks], np.int64)
    expected = int(block_counts(counts).sum())
    if blocks is not None:
        _check_digests(name, blocks, expected)
    elif expected:
        raise FormatError(f"{name}: the entry {BLOCKS!r} before the last is missing.", file=name)
    return digests_from_table(storage.read(name, *digests[3:]))


def _check_digests(name: str, entry: HeaderEntry, count: int) -> None:
    title, code, shape, _, _ = entry
    if code != "U64" or shape != (count, 2):
        raise FormatError(
            f"{name}: {title!r} is of type {code} and shape {list(shape)}, expected U64 and {[count, 2]}.",
            file=name,
        )


LARGE_IN_PAGE = 1856
"""Byte of a page near which large chunks begin: half a page from the byte where allocators place large
tensors (0 or 64). A copy between addresses that differ by nearly a multiple of 4096 bytes is slow: processors
compare the low 12 bits of a load with those of earlier stores (4K aliasing: Intel 64 and IA-32 Architectures
Optimization Reference Manual). Most large chunks have whole pages, so all of one alignment begin at the same
byte of a page."""

_STEP = 64
"""Bytes; data begin at a multiple of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The entries of a shard's header, `@padding`, `@blocks` and `@digests` included."""

    encoded: bytes
    padding: int
    """Zero bytes after the chunks."""
    in_page: int
    """Byte of a page at which the data begin."""


def encode_chunks(
    names: Sequence[str], codes: Sequence[str], shapes: Sequence[Sequence[int]], byte_count: NDArray[Any]
) -> Entries:
    """The entries of a shard file with these chunks, in this order and without gaps.

    Args:
        names: names of n chunks.
        codes: safetensors' codes of their types.
        shapes: their shapes, in elements of those types.
        byte_count: (n,) int64, bytes.

    >>> encode_chunks(["w[0:3]"], ["U8"], [(3,)], np.array([3])).padding
    5
    """
    data_bytes = int(byte_count.sum())
    padding = -data_bytes % 8
    names, codes, shapes, counts = list(names), list(codes), list(shapes), byte_count.tolist()
    if padding:
        names.append(PADDING)
        codes.append("U8")
        shapes.append((padding,))
        counts.append(padding)
    for name, digests in ((BLOCKS, int(block_counts(byte_count).sum())), (DIGESTS, len(byte_count))):
        if digests or name == DIGESTS:
            names.append(name)
            codes.append("U64")
            shapes.append((digests, 2))
            counts.append(16 * digests)
    ends = np.cumsum(counts, dtype=np.int64)
    encoded = encode_entries(names, codes, shapes, ends - counts, np.array(counts, np.int64))
    return Entries(encoded, padding, start_in_page(byte_count))


def chunk_entries(
    chunks: Sequence[tuple[str, str, tuple[int, ...], tuple[int, ...]]], byte_count: NDArray[Any]
) -> Entries:
    """The entries of a shard file with these boxes of tensors, in this order.

    Args:
        chunks: key, torch's name of the dtype, offsets and sizes of n boxes.
        byte_count: (n,) int64, bytes.

    >>> chunk_entries([("w", "bool", (4,), (3,))], np.array([3])).encoded[:50]
    b'"w[4:7]":{"dtype":"BOOL","shape":[3],"data_offsets'
    """
    dtypes = [DTYPES[name] for _, name, _, _ in chunks]
    return encode_chunks(
        [chunk_name(key, offsets, sizes) for key, _, offsets, sizes in chunks],
        [dtype.code for dtype in dtypes],
        [
            (*sizes, dtype.parts) if dtype.parts > 1 else sizes
            for dtype, (_, _, _, sizes) in zip(dtypes, chunks, strict=True)
        ],
        byte_count,
    )


def start_in_page(byte_count: NDArray[np.int64]) -> int:
    """The byte of a page at which data begin, so that most large chunks begin near `LARGE_IN_PAGE`.

    It is a multiple of 64; 0 if no chunk is large.

    Args:
        byte_count: (n,) bytes of the chunks, in file order.

    >>> start_in_page(np.array([512, 1 << 20])) + 512
    1856
    """
    is_large = byte_count >= LARGE_BYTES
    starts = (np.cumsum(byte_count) - byte_count)[is_large]
    steps = PAGE_BYTES // _STEP
    weights = np.bincount(starts // _STEP % steps, byte_count[is_large], steps)
    shifts, places = np.ogrid[:steps, :steps]
    away = np.abs((shifts + places - LARGE_IN_PAGE // _STEP + steps // 2) % steps - steps // 2)
    return int(np.argmax(np.maximum(steps // 3 - away, 0) @ weights)) * _STEP


_HASHED_BYTES = 1 << 20
"""Bytes that are hashed and copied together, while the processor's cache holds them."""


class OrderedFile(Protocol):
    """A new file that takes bytes in order, such as `shardproof.engine.storage.FileWriter`."""

    def put(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        ...

    def finish(self) -> int:
        """Write the rest, flush the file to stable storage, and return its size."""
        ...


class ShardFileWriter:
    """A shard file under construction. The caller removes the file if it is not finished.

    Args:
        file: takes the bytes.
        header: all bytes before the data, of `declared_header` or `header_of_chunks`.
        padding: zero bytes after the chunks, as the header describes them.

    Example:
        >>> import tempfile
        >>> from shardproof.engine.format import chunk_entries, shard_header
        >>> from shardproof.engine.storage import FileWriter, LocalStorage
        >>> entries = chunk_entries([("w", "uint8", (0,), (3,))], np.array([3]))
        >>> header = shard_header(entries.encoded, {})
        >>> with FileWriter(LocalStorage(tempfile.mkdtemp()).create("a")) as file:
        ...     shard = ShardFileWriter(file, header, entries.padding)
        ...     shard.put_chunks([memoryview(b"ab"), memoryview(b"c")], [3])
        ...     record = shard.finish("a", rank=0)
        >>> record.size - len(header), record.data_start == len(header)
        (24, True)
    """

    def __init__(self, file: OrderedFile, header: bytes, padding: int) -> None:
        self._file = file
        self._header = header
        self._padding = padding
        self._digests: list[bytes] = []
        self._blocks: list[bytes] = []
        file.put(header)

    def put_chunks(self, pieces: Iterable[memoryview], byte_count: Iterable[int]) -> None:
        """Appends and hashes the next chunks.

        Args:
            pieces: the bytes of the chunks. A piece may have parts of several chunks.
            byte_count: bytes of each chunk, at least one.
        """
        counts = iter(byte_count)
        hasher, left = ChunkHasher(), 0
        for piece in pieces:
            done = 0
            while done < len(piece):
                if not left:
                    hasher, left = ChunkHasher(), next(counts)
                part = piece[done : done + min(left, _HASHED_BYTES)]
                hasher.update(part)
                self._file.put(part)
                done += len(part)
                left -= len(part)
                if not left:
                    self.note_chunks([hasher.digest()], hasher.blocks())

    def note_chunks(self, digests: Iterable[bytes], blocks: Iterable[bytes]) -> None:
        """Records the next chunks, whose bytes the caller has appended to the file and hashed.

        Args:
            digests: 16 bytes for each chunk.
            blocks: digests of the blocks of those that have several (`ChunkHasher.blocks`).
        """
        self._digests += digests
        self._blocks += blocks

    def finish(self, name: str, rank: int) -> FileRecord:
        """Appends padding and tables, and flushes the file."""
        digests = self.digests
        self._file.put(shard_tail(self._padding, self._blocks, digests))
        size = self._file.finish()
        return FileRecord(name, size, file_digest(self._header, digests), len(self._header), rank)

    @property
    def digests(self) -> NDArray[np.uint64]:
        """(n, 2) digests of the chunks so far."""
        return digests_from_bytes(self._digests)
