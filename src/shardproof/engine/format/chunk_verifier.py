"""The comparison of stored bytes with their digests, for every reader of chunks and of parts of chunks.

A shard file has a table of block digests before its last entry, in the order of its chunks. For a file of the
checkpoint itself, the index gives the position of a chunk's digests. For a file of another step the index has
only some of the chunks, so the header of the file gives the position.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof.engine.format.digests import (
    BLOCK_BYTES,
    ChunkHasher,
    block_counts,
    digest_of_blocks,
    digests_as_bytes,
    digests_from_table,
)
from shardproof.engine.format.header import read_shard_header
from shardproof.engine.format.manifest import Manifest
from shardproof.engine.format.shards import BLOCKS
from shardproof.engine.planning import ChunkTable
from shardproof.engine.storage import Storage
from shardproof.errors import CorruptChunkError, FormatError, StorageError

_Ints: TypeAlias = NDArray[np.int64]

Extents: TypeAlias = tuple[_Ints, _Ints]
"""A byte range in each of some chunks: first byte and end (exclusive), from the start of the chunk."""

Files = Sequence[tuple[Storage, str]]
"""Storage and name of each shard file, in the order of the manifest's table."""


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Positions of block digests in a file, for chunks of several blocks."""

    byte_start: _Ints
    """(n,) ascending first bytes of the chunks."""
    blocks: _Ints
    """(n,) number of blocks of each chunk."""
    digests: _Ints
    """(n,) first byte of the digests of each chunk in the file."""

    @staticmethod
    def of(byte_start: _Ints, byte_count: _Ints, start: int) -> _Places:
        """The positions for all chunks of a file whose table begins at byte `start`."""
        order = np.argsort(byte_start, kind="stable")
        blocks = block_counts(byte_count[order])
        digests = start + 16 * (np.cumsum(blocks) - blocks)
        several = blocks > 0
        return _Places(byte_start[order][several], blocks[several], digests[several])


class BlockDigests:
    """The block digests of the chunks of a checkpoint, read on demand."""

    def __init__(self, files: Files, manifest: Manifest, table: ChunkTable) -> None:
        self._files = files
        self._manifest = manifest
        self._table = table
        self._known: dict[int, _Places | None] = {}
        self._lock = threading.Lock()

    def of(self, row: int, digest: bytes) -> list[bytes] | None:
        """Returns the digests of all blocks of a chunk of several, verified with the digest of the chunk.

        Each has 16 bytes. The result is None if they are damaged, unreadable or missing.
        """
        file, first = int(self._table.file[row]), int(self._table.byte_start[row])
        with self._lock:
            if file not in self._known:
                self._known[file] = self._places(file)
            places = self._known[file]
        if places is None:
            return None
        at = int(np.searchsorted(places.byte_start, first))
        if at == len(places.byte_start) or places.byte_start[at] != first:
            return None
        storage, name = self._files[file]
        start, count = int(places.digests[at]), int(places.blocks[at])
        try:
            table = storage.read(name, start, start + 16 * count)
        except StorageError:  # the read of the whole chunk reports the fault
            return None
        digests = digests_as_bytes(digests_from_table(table))
        return digests if digest_of_blocks(digests) == digest else None

    def covering(self, rows: _Ints, wanted: Extents) -> Extents:
        """For each chunk the range of whole blocks from the first wanted byte to the last."""
        begin, end = wanted
        end = np.minimum(-(-end // BLOCK_BYTES) * BLOCK_BYTES, self._table.byte_count[rows])
        return begin // BLOCK_BYTES * BLOCK_BYTES, end

    def _places(self, file: int) -> _Places | None:
        """The positions in a file; None if it has no table of block digests."""
        record = self._manifest.files[file]
        if record.folder:
            return self._places_in_header(file)
        rows = np.flatnonzero(self._table.file == file)
        byte_start, byte_count = self._table.byte_start[rows], self._table.byte_count[rows]
        start = record.size - 16 * len(rows) - 16 * int(block_counts(byte_count).sum())
        if start < int((byte_start + byte_count).max()):
            return None
        return _Places.of(byte_start, byte_count, start)

    def _places_in_header(self, file: int) -> _Places | None:
        storage, name = self._files[file]
        try:
            entries = read_shard_header(storage, name).entries
        except (FormatError, StorageError):  # no chunk is lost: chunks are read whole and verified
            return None
        tables = [at for at, entry in enumerate(entries) if entry[0] == BLOCKS]
        if not tables:
            return None
        _, _, _, start, stop = entries[tables[0]]
        byte_start, ends = (
            np.array([entry[at] for entry in entries[: tables[0]]], np.int64) for at in (3, 4)
        )
        byte_count = ends - byte_start
        if stop - start != 16 * int(block_counts(byte_count).sum()):
            return None
        return _Places.of(byte_start, byte_count, start)


_ADVICE = "Restore an older step; `shardproof verify` lists all damage"


class ChunkVerifier:
    """Compares the bytes of some chunks with their digests. A method names a chunk by its position.

    Args:
        files: for each chunk the name of its file, for error messages.
        keys: for each chunk the key of its tensor, for error messages.
        byte_start: first byte of each chunk in its file.
        byte_count: bytes of each chunk.
        digests: expected digest of each chunk, 16 bytes.
        advice: what the user can do about a damaged chunk, for error messages.

    Example:
        >>> data = memoryview(b"abcdef")
        >>> digests = [xxhash.xxh3_128_digest(b"abcd"), xxhash.xxh3_128_digest(b"ef")]
        >>> chunks = ChunkVerifier(["a", "a"], ["v", "w"], [8, 12], [4, 2], digests)
        >>> chunks.check_data(range(2), data)
        >>> chunks.check_pieces(1, [data[4:5], data[:1]])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        shardproof.errors.CorruptChunkError: a: bytes 12 to 14 of tensor 'w' have digest 10da..., ...
    """

    def __init__(
        self,
        files: Sequence[str],
        keys: Sequence[str],
        byte_start: Sequence[int],
        byte_count: Sequence[int],
        digests: Sequence[bytes],
        *,
        advice: str = _ADVICE,
    ) -> None:
        self._files = files
        self._keys = keys
        self._start = byte_start
        self._count = byte_count
        self._advice = advice
        self.digests = digests
        """Expected digest of each chunk, 16 bytes."""

    @staticmethod
    def of_table(
        manifest: Manifest, table: ChunkTable, rows: NDArray[np.int64], *, advice: str = _ADVICE
    ) -> ChunkVerifier:
        """The verifier of some rows of a checkpoint's chunk table; position ``i`` is ``rows[i]``."""
        places = [record.place for record in manifest.files]
        return ChunkVerifier(
            [places[file] for file in table.file[rows].tolist()],
            [manifest.tensors[tensor].key for tensor in table.tensor[rows].tolist()],
            table.byte_start[rows].tolist(),
            table.byte_count[rows].tolist(),
            digests_as_bytes(table.digest[rows]),
            advice=advice,
        )

    def check(self, at: int, digest: bytes) -> None:
        """Compares the digest of all bytes of a chunk with the expected one.

        Raises:
            CorruptChunkError: the digests differ.
        """
        if digest != self.digests[at]:
            raise self._error(at, 0, self._count[at], self.digests[at], digest)

    def check_data(self, chunks: range, data: memoryview) -> None:
        """Verifies neighbouring chunks of one file, each of one block at most, that are in memory.

        `data` begins with the first byte of the first chunk.

        Raises:
            CorruptChunkError: the first chunk whose digest differs.
        """
        base, one, end = self._start[chunks.start], chunks.start, chunks.stop
        found = [
            xxhash.xxh3_128_digest(data[start - base : start - base + count])
            for start, count in zip(self._start[one:end], self._count[one:end], strict=True)
        ]
        if found != self.digests[one:end]:
            for at, digest in zip(chunks, found, strict=True):
                self.check(at, digest)

    def check_blocks(self, at: int, begin: int, found: Sequence[bytes], expected: Sequence[bytes]) -> None:
        """Compares the digests of neighbouring blocks of a chunk with the expected ones.

        Args:
            at: position of the chunk.
            begin: first byte of the first block, counted from the chunk's first.
            found: digests of the blocks that were read, 16 bytes each.
            expected: digests of the same blocks, proved by the chunk's digest.

        Raises:
            CorruptChunkError: the first block whose digest differs.
        """
        for number, (want, have) in enumerate(zip(expected, found, strict=True)):
            if want != have:
                first = begin + number * BLOCK_BYTES
                raise self._error(at, first, min(first + BLOCK_BYTES, self._count[at]), want, have)

    def check_pieces(self, at: int, pieces: Iterable[memoryview]) -> list[bytes]:
        """Verifies a chunk whose bytes come piece by piece.

        Returns the digests of its blocks; none if it has only one (see `ChunkHasher.blocks`). A piece is
        hashed before the next is asked for.

        Raises:
            CorruptChunkError: the digest differs.
        """
        hasher = ChunkHasher()
        for piece in pieces:
            hasher.update(piece)
        self.check(at, hasher.digest())
        return hasher.blocks()

    def _error(self, at: int, begin: int, end: int, expected: bytes, found: bytes) -> CorruptChunkError:
        file, key, start = self._files[at], self._keys[at], self._start[at] + begin
        return CorruptChunkError(
            f"{file}: bytes {start} to {start + end - begin} of tensor {key!r} have digest {found.hex()}, "
            f"expected {expected.hex()}: they changed after they were written. {self._advice}",
            file=file,
            key=key,
            byte_start=start,
            byte_count=end - begin,
        )


def block_digests(data: memoryview) -> list[bytes]:
    """Digests of the blocks of bytes that begin with a block.

    The last block is hashed first: bytes that were just read are best cached at their end.

    >>> len(block_digests(memoryview(bytes(BLOCK_BYTES + 1)))), block_digests(memoryview(b""))
    (2, [])
    """
    begins = range(0, len(data), BLOCK_BYTES)
    digests = [xxhash.xxh3_128_digest(data[begin : begin + BLOCK_BYTES]) for begin in reversed(begins)]
    digests.reverse()
    return digests


def read_pieces(
    storage: Storage, name: str, start: int, count: int, buffer: memoryview
) -> Iterator[memoryview]:
    """Reads a range of a file through one buffer of at least a byte. Each piece replaces the one before it.

    Raises:
        StorageError: the file is missing, short or unreadable.
    """
    done = 0
    while done < count:
        piece = buffer[: count - done]
        storage.read_into(name, start + done, piece)
        yield piece
        done += len(piece)
