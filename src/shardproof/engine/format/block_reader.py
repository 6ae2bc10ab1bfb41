"""Digests of blocks in shard files, which verify parts of chunks.

A shard file has a table of block digests before its last entry, in the order of its chunks. For a file of the
checkpoint itself, the index gives the position of a chunk's digests. For a file of another step the index has
only some of the chunks, so the header of the file gives the position.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardproof.engine.format.digests import (
    BLOCK_BYTES,
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
from shardproof.errors import FormatError, StorageError

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

        Returns:
            16 bytes each; None if they are damaged, unreadable or missing.
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
        """For each chunk the range of whole blocks from the first wanted byte to the last.

        Args:
            rows: (n,) rows of the chunk table.
            wanted: wanted range of each.
        """
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
