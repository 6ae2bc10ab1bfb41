"""Writing one shard file: copy and hash in this thread, write in another.

    memory --copy, hash--> aligned buffer --write_at--> storage

Copying into an aligned buffer lets the storage write past the page cache, and small tensors share one system
call. A chunk is hashed in the buffer, so the digest is of the very bytes that are written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof.format import file_digest
from shardproof.saving.buffers import BufferPool
from shardproof.saving.source import Chunk, digests_as_array
from shardproof.storage import Sink

__all__ = ["WrittenShard", "write_shard"]

_SPAN = 256 << 10
"""Bytes copied, then hashed while they are still in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class WrittenShard:
    """A shard file on stable storage."""

    size: int
    data_start: int
    digest: str
    """`shardproof.format.file_digest` of its header and chunk digests."""
    digests: NDArray[np.uint64]
    """(n, 2) of its chunks, in file order."""


def write_shard(
    sink: Sink,
    header: bytes,
    chunks: Iterable[Chunk],
    padding: int,
    pool: BufferPool,
    progress: Callable[[int], None],
) -> WrittenShard:
    """Writes header, chunks, `padding` zero bytes and the table of digests, and flushes them.

    Args:
        sink: an empty file; finished on return, aborted on error.
        header: the whole safetensors header.
        chunks: in file order, without gaps.
        padding: zero bytes between the last chunk and the digests.
        pool: buffers to pass bytes through.
        progress: called with the bytes written so far.

    Raises:
        StorageError: of the first write that failed.
    """
    try:
        with ThreadPoolExecutor(max_workers=2, thread_name_prefix="shardproof-write") as writers:
            stream = _Stream(sink, pool, writers, progress)
            try:
                stream.put(header)
                digests = digests_as_array([stream.put_chunk(chunk) for chunk in chunks])
                stream.put(bytes(padding))
                stream.put(digests.astype("<u8").tobytes())
            finally:
                stream.drain()
            stream.check()
        sink.finish(stream.position)
    except BaseException:
        sink.abort()
        raise
    return WrittenShard(stream.position, len(header), file_digest(header, digests), digests)


class _Stream:
    """Bytes in file order, gathered into buffers."""

    def __init__(
        self, sink: Sink, pool: BufferPool, writers: ThreadPoolExecutor, progress: Callable[[int], None]
    ) -> None:
        self.position = 0
        """Bytes put so far."""
        self._sink = sink
        self._pool = pool
        self._writers = writers
        self._progress = progress
        self._pending: list[Future[None]] = []
        self._buffer: memoryview | None = None
        self._address = 0
        self._filled = 0

    def put(self, data: bytes) -> None:
        """Appends bytes."""
        done = 0
        while done < len(data):
            room = self._room()
            count = min(room, len(data) - done)
            assert self._buffer is not None
            self._buffer[self._filled : self._filled + count] = data[done : done + count]
            self._advance(count)
            done += count

    def put_chunk(self, chunk: Chunk) -> bytes:
        """Appends a chunk and returns its digest."""
        count = chunk.byte_count
        if count <= _SPAN and count <= self._room():
            view = self._copy(chunk.address, count)
            digest = xxhash.xxh3_128_digest(view)
            self._advance(count)
            return digest
        hasher = xxhash.xxh3_128()
        done = 0
        while done < count:
            span = min(self._room(), count - done, _SPAN)
            hasher.update(self._copy(chunk.address + done, span))
            self._advance(span)
            done += span
        return hasher.digest()

    def drain(self) -> None:
        """Hands over what is gathered and waits for all writes, whether they fail or not."""
        if self._buffer is not None:
            self._hand_over(self._buffer)
        for write in self._pending:
            write.exception()

    def check(self) -> None:
        """Raises the error of the first write that failed."""
        for write in self._pending:
            write.result()

    def _room(self) -> int:
        """Bytes that fit into the current buffer; takes one if there is none."""
        if self._buffer is None:
            self._stop_if_failed()
            self._buffer = self._pool.take()
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
            self._filled = 0
        return self._pool.nbytes - self._filled

    def _copy(self, address: int, count: int) -> memoryview:
        assert self._buffer is not None
        ctypes.memmove(self._address + self._filled, address, count)
        return self._buffer[self._filled : self._filled + count]

    def _advance(self, count: int) -> None:
        self._filled += count
        self.position += count
        if self._filled == self._pool.nbytes:
            assert self._buffer is not None
            self._hand_over(self._buffer)

    def _hand_over(self, buffer: memoryview) -> None:
        start, count = self.position - self._filled, self._filled
        self._buffer = None
        self._pending.append(self._writers.submit(self._write, start, buffer, count))

    def _write(self, start: int, buffer: memoryview, count: int) -> None:
        try:
            self._sink.write_at(start, buffer[:count])
            self._progress(start + count)
        finally:
            self._pool.give(buffer)

    def _stop_if_failed(self) -> None:
        for write in self._pending:
            if write.done():
                write.result()
        self._pending = [write for write in self._pending if not write.done()]
