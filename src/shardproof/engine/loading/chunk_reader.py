"""The chunks that one rank reads: in file order, in ranges, verified while they are in the processor's cache.

Note: The range of one read
    Neighbouring chunks share a read. The gap between two of them has at most `GAP` bytes, and all gaps of a
    read together at most a sixteenth of the wanted bytes. A call costs as much as copying some 30 KiB, and a
    seek far more. So a load reads at most 6 % beyond its chunks. If a rank wants a part of a chunk, it reads
    all blocks from the first wanted byte to the last. It never reads less than a block, because a digest
    covers a block. A rank that wants some columns of a chunk reads all its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof.engine.format import (
    BLOCK_BYTES,
    BlockDigests,
    ChunkVerifier,
    Extents,
    Files,
    Manifest,
    block_digests,
    digest_of_blocks,
)
from shardproof.engine.planning import ChunkTable
from shardproof.engine.storage import Storage

Fetch: TypeAlias = Callable[[Storage, str, int, int], memoryview]
"""Reads a range of a file: storage, name, first byte, count."""

GAP = 64 << 10
"""Unwanted bytes between two chunks of one read, at most."""
_GAP_SHARE = 16
_SAMPLES = 16
"""Batches whose pages a load looks for in the page cache before it reads."""
_SPAN_BYTES = 2 * BLOCK_BYTES
"""Bytes of one read of a chunk, at most: the processor's cache has them when they are hashed."""
COLD_BYTES = 4 << 20
"""The same if the page cache lacks them: the disk serves large requests faster."""


class Chunks:
    """Distinct chunks of a checkpoint, numbered by position: sorted by file, then by byte."""

    def __init__(self, files: Files, manifest: Manifest, table: ChunkTable, rows: NDArray[np.int64]) -> None:
        order = np.lexsort((table.byte_count[rows], table.byte_start[rows], table.file[rows]))
        self._files = files
        self.rows: list[int] = rows[order].tolist()
        """Row of the table, by position."""
        ordered = rows[order]
        self.file: list[int] = table.file[ordered].tolist()
        self.start: list[int] = table.byte_start[ordered].tolist()
        self.count: list[int] = table.byte_count[ordered].tolist()
        self._verifier = ChunkVerifier.of_table(manifest, table, ordered)
        self._blocks: BlockDigests | None = None
        self.is_cold = False
        """True to read in large requests, because the page cache lacks the bytes."""
        self.extents: dict[int, tuple[int, int]] = {}
        """By position, the range in the chunk that is read, for chunks that are not read whole."""

    def __len__(self) -> int:
        return len(self.rows)

    def narrow(self, wanted: Callable[[NDArray[np.int64]], Extents], blocks: BlockDigests) -> None:
        """Restricts the reads to the blocks from the first wanted byte of each chunk to the last.

        `wanted` gives the wanted ranges for rows of the chunk table.
        """
        self._blocks = blocks
        large = np.array([at for at, count in enumerate(self.count) if count > BLOCK_BYTES], np.int64)
        if len(large):
            rows = np.array(self.rows, np.int64)[large]
            begin, end = blocks.covering(rows, wanted(rows))
            columns = (large.tolist(), begin.tolist(), end.tolist())
            self.extents = {
                at: (first, last)
                for at, first, last in zip(*columns, strict=True)
                if last - first < self.count[at]
            }

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks that are read."""
        spared = sum(self.count[at] - (end - begin) for at, (begin, end) in self.extents.items())
        return sum(self.count) - spared

    def span(self, batch: range) -> int:
        """Bytes from the first of neighbouring chunks to the end of the last."""
        return self.start[batch[-1]] + self.count[batch[-1]] - self.start[batch[0]]

    def batches(self, alone: Sequence[bool], most: int) -> list[range]:
        """Groups positions into reads.

        Args:
            alone: by position, true for a chunk that has a read of its own.
            most: largest size of a read in bytes, unless a single chunk has more.
        """
        if not self.file:
            return []
        file, start, count = map(np.array, (self.file, self.start, self.count))
        is_alone = np.array(alone)
        gap = start[1:] - (start + count)[:-1]
        joined = (file[1:] == file[:-1]) & (gap <= GAP) & ~(is_alone[1:] | is_alone[:-1])
        gaps = np.append(0, np.cumsum(np.where(joined, gap, 0))).tolist()
        ends = (start + count).tolist()
        batches: list[range] = []
        begin = 0
        for at, is_joined in enumerate(joined.tolist(), 1):
            extent, unwanted = ends[at] - self.start[begin], gaps[at] - gaps[begin]
            if not is_joined or extent > most or unwanted * _GAP_SHARE > extent - unwanted:
                batches.append(range(begin, at))
                begin = at
        return [*batches, range(begin, len(ends))]

    def place(self, batch: range) -> tuple[Storage, str, int, int]:
        """The range that a batch is read from: storage, file, first byte and count.

        A chunk that is not read whole is a batch of its own.
        """
        at = batch.start
        begin, end = self.extents.get(at, (0, self.span(batch)))
        return (*self._files[self.file[at]], self.start[at] + begin, end - begin)

    def pieces(self, at: int, request: int, fetch: Fetch) -> Iterator[tuple[int, memoryview]]:
        """Reads the wanted blocks of a chunk, in requests of several blocks.

        Yields the first byte of a piece in the chunk, and its bytes, in order. If the block digests are
        known, each piece is verified before it is yielded. Otherwise the chunk is verified after its last
        piece.

        Args:
            at: position of the chunk.
            request: bytes of one request: a multiple of `BLOCK_BYTES`, or at least the bytes of the chunk.
            fetch: reads a range.

        Raises:
            CorruptChunkError, StorageError: as `read`.
        """
        storage, name = self._files[self.file[at]]
        known = self._known_blocks(at)
        first, last = (0, self.count[at]) if known is None else self.extents[at]
        found: list[bytes] = []
        for begin in range(first, last, request):
            piece = fetch(storage, name, self.start[at] + begin, min(request, last - begin))
            digests = block_digests(piece)
            if known is None:
                found += digests
            else:
                self._verifier.check_blocks(at, begin, digests, known[begin // BLOCK_BYTES :][: len(digests)])
            yield begin, piece
        if known is None:
            self._verifier.check(at, digest_of_blocks(found))

    def read(self, batch: range, memory: memoryview, *, is_filled: bool = False) -> int:
        """Reads whole neighbouring chunks of one file into memory, and verifies them. Returns the bytes read.

        Cold chunks are read in one request.

        Args:
            batch: positions in one file.
            memory: `span` bytes, from the first byte of the first chunk on.
            is_filled: True if the memory already has the bytes, which are then only verified.

        Raises:
            CorruptChunkError: bytes do not match their digest.
            StorageError: the file is missing, short or unreadable.
        """
        storage, name = self._files[self.file[batch[0]]]
        start, count, base, nbytes = self.start, self.count, self.start[batch[0]], 0
        if self.is_cold and not is_filled:
            storage.read_into(name, base, memory[: self.span(batch)])
            is_filled = True
        at, end = batch.start, batch.stop
        while at < end:
            if count[at] > BLOCK_BYTES:
                chunk = memory[start[at] - base :][: count[at]]
                if is_filled:
                    self._verifier.check(at, digest_of_blocks(block_digests(chunk)))
                    nbytes += count[at]
                else:
                    nbytes += self._read_blocks(at, 0, chunk, chunk, None)
                at += 1
                continue
            last = at + 1
            while last < end and start[last] + count[last] - start[at] <= BLOCK_BYTES:
                last += 1
            span = memory[start[at] - base : start[last - 1] + count[last - 1] - base]
            if not is_filled:
                storage.read_into(name, start[at], span)
            nbytes += len(span)
            self._verifier.check_data(range(at, last), span)
            at = last
        return nbytes

    @property
    def is_remote(self) -> bool:
        """True if requests of a storage take long, so that small chunks should share large requests.

        Copies of some files may be in a bucket, and others on a disk.
        """
        return any(self._files[file][0].is_remote for file in set(self.file))

    def look_for_pages(self, batches: Sequence[range]) -> None:
        """Sets `is_cold` if the page cache lacks one of `_SAMPLES` batches, spread evenly over all."""
        for batch in batches[:: max(1, len(batches) // _SAMPLES)]:
            storage, name, start, count = self.place(batch)
            if count and not storage.is_cached(name, start, count):
                self.is_cold = True
                return

    def read_run(self, at: int, begin: int, run: memoryview, scratch: memoryview) -> int:
        """Reads a contiguous range of a chunk, and the other bytes that are needed to verify it.

        Returns the bytes read.

        Args:
            at: position of the chunk.
            begin: first byte of the range in the chunk.
            run: memory for the range.
            scratch: memory for the other bytes, at least `BLOCK_BYTES`.

        Raises:
            CorruptChunkError, StorageError: as `read`.
        """
        return self._read_blocks(at, begin, run, scratch, self._known_blocks(at))

    def _known_blocks(self, at: int) -> list[bytes] | None:
        """The block digests of a chunk; None if the whole chunk must be read to verify it."""
        if self._blocks is None or at not in self.extents:
            return None
        return self._blocks.of(self.rows[at], self._verifier.digests[at])

    def _read_blocks(
        self, at: int, begin: int, run: memoryview, scratch: memoryview, known: list[bytes] | None
    ) -> int:
        """Reads the blocks that contain a range, or the whole chunk if the block digests are not known."""
        storage, name = self._files[self.file[at]]
        start, count, stop = self.start[at], self.count[at], begin + len(run)
        first, last = (0, count) if known is None else (begin // BLOCK_BYTES * BLOCK_BYTES, stop)
        whole = stop if stop == count else stop // BLOCK_BYTES * BLOCK_BYTES
        found: list[bytes] = []
        longest = COLD_BYTES if self.is_cold else _SPAN_BYTES
        end = first
        while end < last:
            block = end
            if begin <= block < whole:
                end = min(block + longest, whole)
                span = run[block - begin : end - begin]
                storage.read_into(name, start + block, span)
                found += block_digests(span)
            else:
                end = min(block + BLOCK_BYTES, count)
                found.append(self._read_block(at, range(block, end), begin, run, scratch))
        if known is None:
            self._verifier.check(at, digest_of_blocks(found))
        else:
            self._verifier.check_blocks(at, first, found, known[first // BLOCK_BYTES :][: len(found)])
        return end - first

    def _read_block(self, at: int, block: range, begin: int, run: memoryview, scratch: memoryview) -> bytes:
        """Reads a block that is not completely in the range, and returns its digest."""
        storage, name = self._files[self.file[at]]
        low = min(max(block.start, begin), block.stop)
        high = max(low, min(block.stop, begin + len(run)))
        hasher = xxhash.xxh3_128()
        for part, size, into in (
            (block.start, low - block.start, scratch),
            (low, high - low, run[low - begin :]),
            (high, block.stop - high, scratch),
        ):
            if size:
                storage.read_into(name, self.start[at] + part, into[:size])
                hasher.update(into[:size])
        return hasher.digest()
