"""Writes the shard file of an incremental save: only chunks that differ from the base.

The header lists the chunks of the file, so it is written last, into space that is reserved for it. A chunk
that the base stores is copied and hashed before it is known whether it has to be written.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from shardproof._utils.memcpy import address
from shardproof.engine.format import (
    BLOCK_BYTES,
    ChunkHasher,
    digests_as_bytes,
    digests_from_bytes,
    encode_chunks,
    file_digest,
    shard_tail,
    start_in_page,
)
from shardproof.engine.saving.incremental.base_chunks import BaseDigests
from shardproof.engine.saving.shard_writer import Output, PreparedShard, ShardStream, WrittenShard
from shardproof.engine.saving.snapshot import Snapshot
from shardproof.engine.storage import ALIGNMENT

_PADDING_ENTRY = 128
"""Upper bound for the bytes of a padding entry in a header."""


def write_changed(
    shard: PreparedShard,
    header: Callable[..., bytes],
    snapshot: Snapshot,
    base: BaseDigests,
    output: Output,
    scratch: Callable[[int], memoryview],
) -> tuple[WrittenShard, NDArray[np.bool_]]:
    """Writes the chunks that differ from the base; no file if no chunk differs and the rank has no objects.

    Args:
        shard: shard of this rank.
        header: as for `write_shard`.
        snapshot: all chunks of the plan, in its order.
        output: the file.
        base: digests of the same chunks in the base.
        scratch: returns memory for one chunk.

    Returns:
        The file, and (chunks,) True for the chunks that it stores.

    Raises:
        StorageError, StructureError: as `write_shard`.
    """
    # A header that lists only some of the chunks exceeds the header of all by at most one entry of padding.
    longest = len(header(shard.entries)) + _PADDING_ENTRY
    reserved = -(-longest // ALIGNMENT) * ALIGNMENT
    with ShardStream(output, start=reserved) as stream:
        changed = _ChangedChunks(shard, snapshot, base, stream)
        changed.write(scratch)
        written, digests = changed.written, digests_from_bytes(changed.digests)
        if not stream.is_open and not shard.plan.objects:
            return WrittenShard(0, 0, "", digests), written
        changed.open(len(written))
        entries = shard.entries
        if not written.all():
            chosen = written.tolist()
            columns = (shard.names, shard.codes, shard.shapes)
            names, codes, shapes = (list(compress(column, chosen)) for column in columns)
            entries = encode_chunks(names, codes, shapes, shard.plan.byte_count[written])  # type: ignore[arg-type]
        stream.put(shard_tail(entries.padding, stream.blocks, digests[written]))
        length = reserved + changed.spaces
        head = header(entries, size=length)
        if len(head) != length or not head.endswith(b" " * changed.spaces):
            raise AssertionError(f"the header takes {len(head)} bytes, {length} are reserved")
        size = stream.finish(head[:reserved])
    return WrittenShard(size, len(head), file_digest(head, digests[written]), digests), written


class _ChangedChunks:
    """Puts the chunks that differ from the base into a stream, in the order of the plan."""

    def __init__(
        self, shard: PreparedShard, snapshot: Snapshot, base: BaseDigests, stream: ShardStream
    ) -> None:
        pairs = zip(digests_as_bytes(base.digest), base.known.tolist(), strict=True)
        self._in_base = [digest if known else b"" for digest, known in pairs]
        self._byte_count = shard.plan.byte_count
        self._snapshot = snapshot
        self._stream = stream
        self.spaces = 0
        """Bytes of the header that the stream has: spaces before the first chunk."""
        self.digests: list[bytes] = []
        self.written = np.zeros(len(self._in_base), bool)

    def open(self, row: int) -> None:
        """Begins the file once. Its first chunk is `row`, and chunks begin at their place in a page."""
        if not self._stream.is_open:
            self.spaces = start_in_page(self._byte_count[row:])
            self._stream.open()
            self._stream.put(b" " * self.spaces)

    def write(self, scratch: Callable[[int], memoryview]) -> None:
        """Puts all changed chunks. `scratch` as in `write_changed`."""
        in_base, counts, row = self._in_base, self._snapshot.byte_counts, 0
        compared = [count for count, old in zip(counts, in_base, strict=True) if old]
        memory = scratch(max(compared, default=0))
        while row < len(in_base):
            if in_base[row]:
                self._put_if_changed(row, memory[: counts[row]])
                row += 1
                continue
            end = row + 1
            while end < len(in_base) and not in_base[end]:
                end += 1
            self.open(row)
            self.digests += self._stream.put_chunks(self._snapshot, range(row, end))
            self.written[row:end] = True
            row = end

    def _put_if_changed(self, row: int, memory: memoryview) -> None:
        """Copies a chunk once, and hashes the copy: later writes do not change it."""
        hasher, count, to = ChunkHasher(), len(memory), address(memory)
        for start in range(0, max(count, 1), BLOCK_BYTES):
            size = min(BLOCK_BYTES, count - start)
            self._snapshot.copy(row, start, size, to + start)
            hasher.update(memory[start : start + size])
        self.digests.append(hasher.digest())
        if self.digests[-1] == self._in_base[row]:
            self._stream.count(count)
            return
        self.open(row)
        self._stream.put(memory)
        self._stream.blocks += hasher.blocks()
        self.written[row] = True
