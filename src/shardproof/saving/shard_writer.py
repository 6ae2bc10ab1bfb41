"""Writes one shard file: one thread copies and hashes, other threads write.

    memory --copy, hash--> aligned buffer --write_at--> storage

An aligned buffer lets the storage write past the page cache, and many small tensors share one system call. A
chunk is hashed in the buffer, so its digest is that of the bytes that are written.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof._utils.memcpy import address
from shardproof.format import (
    BLOCK_BYTES,
    ChunkHasher,
    digests_as_bytes,
    digests_from_bytes,
    file_digest,
    shard_tail,
    start_in_page,
)
from shardproof.saving.background import Workers
from shardproof.saving.incremental import BaseDigests
from shardproof.saving.prepared_shard import PreparedShard
from shardproof.saving.snapshot import Snapshot
from shardproof.storage import ALIGNMENT, Sink, aligned_buffer

__all__ = ["BufferPool", "WrittenShard", "write_shard"]

_PADDING_ENTRY = 128
"""Upper bound for the bytes of a padding entry in a header."""


class BufferPool:
    """Page-aligned buffers of one size. The first touch of memory is slow, so saves reuse the pool.

    Args:
        nbytes: size of each buffer, a multiple of 4,096 as direct I/O requires.
        count: number of buffers. One is filled while the others are written.
    """

    def __init__(self, nbytes: int = 8 << 20, count: int = 3) -> None:
        self.nbytes = nbytes
        self._scratch = memoryview(b"")
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(aligned_buffer(nbytes))

    def scratch(self, nbytes: int) -> memoryview:
        """Memory for one chunk that is compared with the base; the same memory at every call."""
        if len(self._scratch) < nbytes:
            self._scratch = aligned_buffer(nbytes)
        return self._scratch

    def take(self) -> memoryview:
        """A free buffer; waits until a writer thread returns one."""
        return self._free.get()

    def give(self, buffer: memoryview) -> None:
        """Returns a buffer whose bytes are written."""
        self._free.put(buffer)


@dataclass(frozen=True, slots=True, eq=False)
class WrittenShard:
    """A shard file on stable storage; of size 0 if no chunk had to be written."""

    size: int
    data_start: int
    digest: str
    """`shardproof.format.file_digest` of its header and chunk digests."""
    digests: NDArray[np.uint64]
    """(n, 2) digests of all chunks of the plan, in its order, written or not."""
    written: NDArray[np.bool_]
    """(n,) True if the file stores the chunk."""

    @staticmethod
    def nothing() -> WrittenShard:
        """The shard of a rank that the plan gives no file."""
        return WrittenShard(0, 0, "", np.zeros((0, 2), np.uint64), np.zeros(0, bool))


def write_shard(
    create: Callable[[], Sink],
    shard: PreparedShard,
    header: Callable[..., bytes],
    snapshot: Snapshot,
    base: BaseDigests | None,
    buffers: BufferPool,
    writers: Workers,
    on_progress: Callable[[int], None],
) -> WrittenShard:
    """Writes header, chunks, padding and the tables of digests, and flushes them.

    Without a base, all chunks are written after the header. With a base, only chunks that differ from the
    base are written, and no file if no chunk differs. Then the header is written last, into reserved space,
    because it lists the chunks of the file.

    Args:
        create: begins the file.
        shard: shard of this rank.
        header: `PreparedShard.header` without its first arguments.
        snapshot: all chunks of the plan, in its order.
        base: digests of the same chunks in the base.
        buffers: buffers for the bytes to write.
        writers: threads that write buffers.
        on_progress: called with the bytes so far that are written, or equal to the base.

    Raises:
        StorageError: the error of the first write that failed.
        StructureError: memory was changed during the save (see `Snapshot.copy`).
    """
    counts = snapshot.byte_counts
    in_base = [b""] * len(counts)  # digest of each chunk that the base stores
    if base is not None:
        pairs = zip(digests_as_bytes(base.digest), base.known.tolist(), strict=True)
        in_base = [digest if known else b"" for digest, known in pairs]
    compared = [count for count, old in zip(counts, in_base, strict=True) if old]
    scratch = buffers.scratch(max(compared, default=0))
    head, spaces = header(shard.entries), b""
    # A header that lists only some of the chunks exceeds `head` by at most one entry of padding.
    reserved = -(-(len(head) + _PADDING_ENTRY) // ALIGNMENT) * ALIGNMENT
    digests: list[bytes] = []
    written = np.zeros(len(counts), bool)
    byte_count = _ByteCount(on_progress)
    sink: Sink | None = None
    stream: _Stream | None = None

    def begin(row: int) -> tuple[Sink, _Stream]:
        """Opens the file, whose first chunk is `row`. Chunks begin at their place in a page."""
        nonlocal spaces
        if base is not None:
            spaces = b" " * start_in_page(shard.plan.byte_count[row:])
        file = create()
        chunks = _Stream(file, buffers, writers, byte_count.add, start=0 if base is None else reserved)
        return file, chunks

    try:
        try:
            row = 0
            while row < len(counts):
                end = row + 1
                hasher = _hash_into(scratch, snapshot, row) if in_base[row] else None
                if hasher is not None and hasher.digest() == in_base[row]:
                    digests.append(in_base[row])
                    byte_count.add(counts[row])
                    row = end
                    continue
                if sink is None or stream is None:
                    sink, stream = begin(row)
                    stream.put(head if base is None else spaces)
                if hasher is not None:
                    stream.put(scratch[: counts[row]])
                    stream.blocks += hasher.blocks()
                    digests.append(hasher.digest())
                else:
                    if base is None:
                        end = len(counts)
                    while end < len(counts) and not in_base[end]:
                        end += 1
                    digests += stream.put_chunks(snapshot, range(row, end))
                written[row:end] = True
                row = end
            columns = digests_from_bytes(digests)
            if sink is None or stream is None:
                if base is not None and not shard.plan.objects:
                    return WrittenShard(0, 0, "", columns, written)
                sink, stream = begin(len(counts))
                stream.put(head if base is None else spaces)
            entries = shard.entries_of(written)
            stream.put(shard_tail(entries.padding, stream.blocks, columns[written]))
        finally:
            if stream is not None:
                stream.drain()
        stream.check()
        if base is not None:
            head = header(entries, size=reserved + len(spaces))
            if len(head) != reserved + len(spaces) or not head.endswith(spaces):
                raise AssertionError(
                    f"the header takes {len(head)} bytes, {reserved + len(spaces)} are reserved"
                )
            sink.write_at(0, memoryview(head)[:reserved])
        sink.finish(stream.position)
    except BaseException:
        if sink is not None:
            sink.abort()
        raise
    return WrittenShard(stream.position, len(head), file_digest(head, columns[written]), columns, written)


def _hash_into(scratch: memoryview, snapshot: Snapshot, row: int) -> ChunkHasher:
    """Copies a chunk into scratch memory once, and hashes the copy: later writes do not change it."""
    count, to = snapshot.byte_counts[row], address(scratch)
    hasher = ChunkHasher()
    for start in range(0, max(count, 1), BLOCK_BYTES):
        size = min(BLOCK_BYTES, count - start)
        snapshot.copy(row, start, size, to + start)
        hasher.update(scratch[start : start + size])
    return hasher


class _ByteCount:
    """Sums the bytes that several threads report."""

    def __init__(self, on_progress: Callable[[int], None]) -> None:
        self._lock = threading.Lock()
        self._on_progress = on_progress
        self._done = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            done = self._done
        self._on_progress(done)


class _Stream:
    """Bytes in file order, gathered into buffers."""

    def __init__(
        self,
        sink: Sink,
        buffers: BufferPool,
        writers: Workers,
        on_bytes: Callable[[int], None],
        *,
        start: int,
    ) -> None:
        self.position = start
        """The byte after the last that was put."""
        self.blocks: list[bytes] = []
        """Block digests of the chunks that have several blocks."""
        self._sink = sink
        self._buffers = buffers
        self._writers = writers
        self._on_bytes = on_bytes
        self._pending: list[Future[None]] = []
        self._buffer: memoryview | None = None
        self._address = 0
        self._filled = 0

    def put(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        done = 0
        while done < len(data):
            room = self._room()[: len(data) - done]
            count = len(room)
            room[:] = data[done : done + count]
            self._advance(count)
            done += count

    def put_chunks(self, snapshot: Snapshot, rows: range) -> list[bytes]:
        """Appends chunks and returns their digests; copies small chunks together, up to a block."""
        counts, digests = snapshot.byte_counts, list[bytes]()
        row, end = rows.start, rows.stop
        while row < end:
            room = self._room()[:BLOCK_BYTES]
            last, total = row, 0
            while last < end and total + counts[last] <= len(room):
                total += counts[last]
                last += 1
            if last == row:
                digests.append(self._put_chunk(snapshot, row))
                row += 1
                continue
            snapshot.copy_whole(range(row, last), self._address + self._filled)
            at = 0
            for count in counts[row:last]:
                digests.append(xxhash.xxh3_128_digest(room[at : at + count]))
                at += count
            self._advance(total)
            row = last
        return digests

    def _put_chunk(self, snapshot: Snapshot, row: int) -> bytes:
        """Appends a chunk and returns its digest; hashes each block while the processor's cache holds it."""
        count = snapshot.byte_counts[row]
        hasher = ChunkHasher()
        done = 0
        while done < count:
            room = self._room()
            size = min(len(room), count - done, BLOCK_BYTES - done % BLOCK_BYTES)
            snapshot.copy(row, done, size, self._address + self._filled)
            hasher.update(room[:size])
            self._advance(size)
            done += size
        self.blocks += hasher.blocks()
        return hasher.digest()

    def drain(self) -> None:
        """Writes the last buffer and waits for all writes, failed ones too."""
        if self._buffer is not None:
            self._write_buffer(self._buffer)
        for write in self._pending:
            write.exception()

    def check(self) -> None:
        """Raises the error of the first write that failed."""
        for write in self._pending:
            write.result()

    def _room(self) -> memoryview:
        """The free part of the current buffer; takes a new buffer if there is none."""
        if self._buffer is None:
            self._stop_if_failed()
            self._buffer = self._buffers.take()
            self._address = address(self._buffer)
            self._filled = 0
        return self._buffer[self._filled :]

    def _advance(self, count: int) -> None:
        self._filled += count
        self.position += count
        if self._filled == self._buffers.nbytes:
            assert self._buffer is not None
            self._write_buffer(self._buffer)

    def _write_buffer(self, buffer: memoryview) -> None:
        start, count = self.position - self._filled, self._filled
        self._buffer = None
        self._pending.append(self._writers.submit(partial(self._write, start, buffer, count)))

    def _write(self, start: int, buffer: memoryview, count: int) -> None:
        try:
            self._sink.write_at(start, buffer[:count])
            self._on_bytes(count)
        finally:
            self._buffers.give(buffer)

    def _stop_if_failed(self) -> None:
        left: list[Future[None]] = []
        for write in self._pending:
            if write.done():  # called once, because the write may fail during the loop
                write.result()
            else:
                left.append(write)
        self._pending = left
