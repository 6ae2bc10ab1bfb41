"""Chunks that one rank reads: in the order of their files, in ranges, verified while they are in cache.

Note: What one read takes in
    Neighbouring chunks share a read, across a gap of at most `GAP` bytes where gaps stay below a sixteenth of
    what is wanted: a call costs as much as copying some 30 KiB, and a seek far more. So a load reads at most
    6 % beyond its chunks, and never less than a whole chunk: a digest speaks of all of a chunk's bytes and
    can be checked against nothing less. A rank that wants some columns of a chunk reads all its rows.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof.errors import CorruptChunkError
from shardproof.format import Manifest, digests_as_bytes
from shardproof.planning import ChunkTable
from shardproof.storage import Storage

__all__ = ["Chunks", "Files", "corrupt_chunk"]

Files = Sequence[tuple[Storage, str]]
"""Storage and name of each shard file, in the order of the manifest's table."""

SPAN = 256 << 10
"""Bytes read, then hashed while they are still in the processor's cache."""
GAP = 64 << 10
"""Bytes that nobody wants between two chunks of one read, at most."""
_GAP_SHARE = 16


class Chunks:
    """Some chunks of a checkpoint, by their position: the order of file, then byte.

    Args:
        files: of the checkpoint.
        manifest: of the checkpoint.
        table: all its chunks.
        rows: distinct rows of the table.
    """

    def __init__(self, files: Files, manifest: Manifest, table: ChunkTable, rows: NDArray[np.int64]) -> None:
        order = np.lexsort((table.byte_start[rows], table.file[rows]))
        self._files = files
        self._manifest = manifest
        self.rows: list[int] = rows[order].tolist()
        """Row of the table, by position."""
        ordered = rows[order]
        self.file: list[int] = table.file[ordered].tolist()
        self.start: list[int] = table.byte_start[ordered].tolist()
        self.count: list[int] = table.byte_count[ordered].tolist()
        self._tensor: list[int] = table.tensor[ordered].tolist()
        self._digest = digests_as_bytes(table.digest[ordered])

    def __len__(self) -> int:
        return len(self.rows)

    def span(self, batch: range) -> int:
        """Bytes from the first of neighbouring chunks to the end of the last."""
        return self.start[batch[-1]] + self.count[batch[-1]] - self.start[batch[0]]

    def batches(self, alone: Sequence[bool], most: int) -> list[range]:
        """Positions that are read together.

        Args:
            alone: by position, chunks that are read on their own.
            most: bytes of one read, unless a single chunk has more.
        """
        file, start, count = self.file, self.start, self.count
        batches: list[range] = []
        begin = wanted = 0
        for at in range(1, len(file) + 1):
            if at < len(file) and not alone[at] and not alone[at - 1] and file[at] == file[at - 1]:
                gap = start[at] - start[at - 1] - count[at - 1]
                together = wanted + count[at - 1]
                extent = start[at] + count[at] - start[begin]
                gaps = extent - together - count[at]
                if gap <= GAP and extent <= most and gaps * _GAP_SHARE <= extent - gaps:
                    wanted = together
                    continue
            batches.append(range(begin, at))
            begin, wanted = at, 0
        return batches if file else []

    def read(self, batch: range, memory: memoryview) -> None:
        """Reads neighbouring chunks into memory, and checks every digest.

        Args:
            batch: positions in one file.
            memory: as many bytes as `span` says; the first byte is the first of the first chunk.

        Raises:
            CorruptChunkError: bytes do not match their digest.
            StorageError: the file is missing, short or unreadable.
        """
        storage, name = self._files[self.file[batch[0]]]
        start, count, base = self.start, self.count, self.start[batch[0]]
        at, end = batch.start, batch.stop
        while at < end:
            if count[at] > SPAN:
                self.read_run(at, 0, memory[start[at] - base :][: count[at]], memory)
                at += 1
                continue
            last = at + 1
            while last < end and start[last] + count[last] - start[at] <= SPAN:
                last += 1
            span = memory[start[at] - base : start[last - 1] + count[last - 1] - base]
            storage.read_into(name, start[at], span)
            inside = [begin - start[at] for begin in start[at:last]]
            found = [
                xxhash.xxh3_128_digest(span[begin : begin + size])
                for begin, size in zip(inside, count[at:last], strict=True)
            ]
            if found != self._digest[at:last]:
                for small, digest in enumerate(found, at):
                    self._check(small, digest)
            at = last

    def read_run(self, at: int, begin: int, run: memoryview, scratch: memoryview) -> None:
        """Reads a chunk and checks its digest, but keeps a run of it only.

        Args:
            at: position of the chunk.
            begin: first byte of the run in the chunk.
            run: memory for the run.
            scratch: memory that the rest passes through, at least `SPAN` bytes.

        Raises:
            CorruptChunkError, StorageError: as `read`.
        """
        storage, name = self._files[self.file[at]]
        start, end, hasher = self.start[at], begin + len(run), xxhash.xxh3_128()
        for first, last in ((0, begin), (begin, end), (end, self.count[at])):
            for done in range(first, last, SPAN):
                count = min(SPAN, last - done)
                span = run[done - begin :][:count] if first == begin else scratch[:count]
                storage.read_into(name, start + done, span)
                hasher.update(span)
        self._check(at, hasher.digest())

    def sample(self, at: int, memory: memoryview) -> int:
        """Reads from a chunk on, beyond its end too, without verifying, and returns how many bytes."""
        last = bisect.bisect_right(self.file, self.file[at]) - 1
        count = min(len(memory), self.start[last] + self.count[last] - self.start[at])
        storage, name = self._files[self.file[at]]
        storage.read_into(name, self.start[at], memory[:count])
        return count

    def _check(self, at: int, found: bytes) -> None:
        expected = self._digest[at]
        if found != expected:
            raise corrupt_chunk(
                self._manifest,
                self.file[at],
                self._tensor[at],
                self.start[at],
                self.count[at],
                expected.hex(),
                found.hex(),
            )


def corrupt_chunk(
    manifest: Manifest, file: int, tensor: int, byte_start: int, byte_count: int, expected: str, found: str
) -> CorruptChunkError:
    """The error for bytes that do not match their digest."""
    key, name = manifest.tensors[tensor].key, manifest.files[file].place
    return CorruptChunkError(
        f"{name}: bytes {byte_start} to {byte_start + byte_count} of tensor {key!r} have digest {found}, "
        f"expected {expected}: they changed after they were written. Restore an older step; `shardproof "
        "verify` lists all damage",
        file=name,
        key=key,
        byte_start=byte_start,
        byte_count=byte_count,
    )
