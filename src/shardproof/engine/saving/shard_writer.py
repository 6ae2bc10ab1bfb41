"""The shard file of a rank: its header, which is prepared once for a plan, and the write of the file.

One thread copies and hashes, other threads write:

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
from types import TracebackType
from typing import Any, Self, cast

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof._utils.libc import address
from shardproof.dtypes import DTYPES
from shardproof.engine.format import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    REFERENCES_VERSION,
    ChunkHasher,
    Declared,
    Entries,
    ShardFileWriter,
    box_name,
    declared_header,
    encode_chunks,
)
from shardproof.engine.planning import RankPlan, Structure
from shardproof.engine.saving.background import Workers
from shardproof.engine.saving.messages import Attempt
from shardproof.engine.saving.snapshot import Snapshot
from shardproof.engine.storage import Sink, aligned_buffer


@dataclass(frozen=True, slots=True, eq=False)
class PreparedShard:
    """The parts of a rank's shard that depend only on the plan."""

    plan: RankPlan
    names: tuple[str, ...]
    """Names of the chunks' entries, in the order of `codes` and `shapes`."""
    codes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    entries: Entries
    """Entries of a file with all chunks."""
    tensors: msgspec.Raw
    """Encoded mapping of key to dtype and global shape, for the tensors of the file and the empty tensors
    that it declares."""
    data_bytes: int

    @property
    def is_written(self) -> bool:
        """True if the plan gives this rank a file."""
        return len(self.plan.piece) > 0 or len(self.plan.objects) > 0

    def header(
        self, attempt: Attempt, rank: int, objects: dict[str, bytes], entries: Entries, *, size: int = 0
    ) -> bytes:
        """The whole header of the shard of one attempt, padded to at least `size` bytes.

        `objects` are those of the file, as JSON.
        """
        declared = Declared(
            version=FORMAT_VERSION if attempt.is_full else REFERENCES_VERSION,
            attempt=attempt.id,
            step=attempt.step,
            time=attempt.time,
            rank=rank,
            world_size=attempt.world_size,
            files=self.plan.files,
            tensors=cast(Any, self.tensors),
            aliases=self.plan.aliases,
            objects={key: msgspec.Raw(value) for key, value in objects.items()},
            metadata=attempt.metadata,
            base=attempt.base,
        )
        return declared_header(declared, entries, size=size)


def prepare_shard(structure: Structure, plan: RankPlan) -> PreparedShard:
    """Names the chunks of a plan and encodes their entries."""
    table = structure.tensors()
    rows = structure.box_tensor[plan.piece].tolist()
    dtypes = {name: DTYPES[name] for name in set(table.dtypes)}
    boxes: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {}  # few, because most cuts are alike
    names: list[str] = []
    codes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    offsets, sizes = plan.box_offsets.tolist(), plan.box_sizes.tolist()
    at = 0
    for row in rows:
        dtype, ndim = dtypes[table.dtypes[row]], len(table.shapes[row])
        box = *offsets[at : at + ndim], *sizes[at : at + ndim], dtype.parts
        named = boxes.get(box)
        if named is None:
            shape = box[ndim:] if dtype.parts > 1 else box[ndim:-1]
            named = boxes[box] = box_name(box[:ndim], box[ndim:-1]), shape
        names.append(table.keys[row] + named[0])
        codes.append(dtype.code)
        shapes.append(named[1])
        at += ndim
    declared = {table.keys[row]: (table.dtypes[row], table.shapes[row]) for row in np.unique(rows).tolist()}
    return PreparedShard(
        plan,
        tuple(names),
        tuple(codes),
        tuple(shapes),
        encode_chunks(names, codes, shapes, plan.byte_count),
        msgspec.Raw(msgspec.json.encode(declared | plan.empty)),
        int(plan.byte_count.sum()),
    )


class BufferPool:
    """Page-aligned buffers of one size. The first touch of memory is slow, so saves reuse the pool.

    Args:
        nbytes: size of each buffer, a multiple of 4,096 as direct I/O requires.
        count: number of buffers. One is filled while the others are written.
    """

    def __init__(self, nbytes: int = 8 << 20, count: int = 3) -> None:
        self.nbytes = nbytes
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(aligned_buffer(nbytes))

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
    """`shardproof.engine.format.file_digest` of its header and chunk digests."""
    digests: NDArray[np.uint64]
    """(n, 2) digests of all chunks of the plan, in its order."""

    @staticmethod
    def nothing() -> WrittenShard:
        """The shard of a rank that the plan gives no file."""
        return WrittenShard(0, 0, "", np.zeros((0, 2), np.uint64))


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The file that a rank writes, and what writes it."""

    create: Callable[[], Sink]
    """Begins the file."""
    buffers: BufferPool
    """Buffers for the bytes to write."""
    writers: Workers
    """Threads that write buffers."""
    on_progress: Callable[[int], None]
    """Called with the bytes of chunks so far that need no more work."""


WriteShard = Callable[[PreparedShard, Callable[..., bytes], Snapshot, Output], WrittenShard]
"""The type of `write_shard`."""


def write_shard(
    shard: PreparedShard, header: Callable[..., bytes], snapshot: Snapshot, output: Output
) -> WrittenShard:
    """Writes header, all chunks, padding and the tables of digests, and flushes them.

    Raises:
        StorageError: the error of the first write that failed.
        StructureError: memory was changed during the save (see `Snapshot.copy`).
    """
    head = header(shard.entries)
    with ShardStream(output) as stream:
        stream.open()
        file = ShardFileWriter(stream, head, shard.entries.padding)
        file.note_chunks(stream.put_chunks(snapshot, range(len(snapshot.byte_counts))), stream.blocks)
        digests = file.digests
        record = file.finish("", 0)
    return WrittenShard(record.size, record.data_start, record.digest, digests)


class ShardStream:
    """Bytes in file order, gathered into buffers.

    An error that leaves the context aborts the file.

    Args:
        output: the file.
        start: place of the first bytes; a multiple of the alignment of direct writes.
    """

    def __init__(self, output: Output, *, start: int = 0) -> None:
        self.position = start
        """The byte after the last that was put."""
        self.blocks: list[bytes] = []
        """Block digests of the chunks that have several blocks."""
        self._output = output
        self._buffers = output.buffers
        self._sink: Sink | None = None
        self._pending: list[Future[None]] = []
        self._buffer: memoryview | None = None
        self._address = 0
        self._filled = 0
        self._lock = threading.Lock()
        self._done = 0
        """Bytes that `count` counted."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._sink is not None:
            try:
                self._drain()
            finally:
                self._sink.abort()

    @property
    def is_open(self) -> bool:
        """True if `open` was called."""
        return self._sink is not None

    def open(self) -> None:
        """Begins the file; called before the first bytes are put."""
        self._sink = self._output.create()

    def count(self, nbytes: int) -> None:
        """Reports bytes that are written or need no write. Any thread may call it."""
        with self._lock:
            self._done += nbytes
            done = self._done
        self._output.on_progress(done)

    def finish(self, head: bytes = b"") -> int:
        """Writes the last buffer, then `head` at the start of the file, and flushes the file.

        Returns its size.

        Raises:
            StorageError: the error of the first write that failed.
        """
        assert self._sink is not None
        self._drain()
        for write in self._pending:
            write.result()
        if head:
            self._sink.write_at(0, memoryview(head))
        self._sink.finish(self.position)
        return self.position

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

    def _drain(self) -> None:
        """Writes the last buffer and waits for all writes, failed ones too."""
        if self._buffer is not None:
            self._write_buffer(self._buffer)
        for write in self._pending:
            write.exception()

    def _room(self) -> memoryview:
        """The free part of the current buffer; takes a new buffer if there is none."""
        if self._buffer is None:
            left: list[Future[None]] = []
            for write in self._pending:
                if write.done():  # called once, because the write may fail during the loop
                    write.result()
                else:
                    left.append(write)
            self._pending = left
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
        self._pending.append(self._output.writers.submit(partial(self._write, start, buffer, count)))

    def _write(self, start: int, buffer: memoryview, count: int) -> None:
        try:
            assert self._sink is not None
            self._sink.write_at(start, buffer[:count])
            self.count(count)
        finally:
            self._buffers.give(buffer)
