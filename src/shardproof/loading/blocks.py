"""Digests of blocks, as shard files carry them: what a part of a chunk is verified against.

A file's table of them lies before its last entry, in the order of its chunks, so where those of a chunk are
follows from the index, which has all chunks of a checkpoint's own files. Of a file of another step it has
some only: its chunks are read whole.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardproof.format import BLOCK_BYTES, Manifest, block_counts, digest_of_blocks, digests_as_bytes
from shardproof.planning import ChunkTable
from shardproof.storage import Storage

__all__ = ["BlockDigests", "Extents", "Files"]

Extents: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Of some chunks the first byte of something, counted from the chunk's first, and the byte after its last."""

Files = Sequence[tuple[Storage, str]]
"""Storage and name of each shard file, in the order of the manifest's table."""


class BlockDigests:
    """The digests of the blocks of chunks. The table of a file is read when it is first asked for.

    Args:
        files: of the checkpoint.
        manifest: of the checkpoint.
        table: all its chunks.
    """

    def __init__(self, files: Files, manifest: Manifest, table: ChunkTable) -> None:
        self._files = files
        self._manifest = manifest
        self._table = table
        self._read: dict[int, dict[int, list[bytes]]] = {}
        self._lock = threading.Lock()

    def of(self, row: int, digest: bytes) -> list[bytes] | None:
        """Digests of all blocks of a chunk, proved by its own.

        Args:
            row: of the chunk table; a chunk of more than one block in one of the checkpoint's own files.
            digest: of the chunk.

        Returns:
            16 bytes each; None if they are damaged or not there.

        Raises:
            StorageError: the file is missing, short or unreadable.
        """
        file = int(self._table.file[row])
        with self._lock:
            of_file = self._read.get(file)
            if of_file is None:
                of_file = self._read[file] = self._read_all(file)
        digests = of_file.get(row)
        return digests if digests is not None and digest_of_blocks(digests) == digest else None

    def covering(self, rows: NDArray[np.int64], wanted: Extents) -> Extents:
        """The bytes of chunks that have to be read so that those that are wanted can be verified.

        Args:
            rows: (n,) of the chunk table.
            wanted: of each.

        Returns:
            Whole blocks, or the whole chunk where the digests of its blocks are not at hand.
        """
        count = self._table.byte_count[rows]
        own = np.array([not record.folder for record in self._manifest.files], np.bool_)
        parted = own[self._table.file[rows]] if len(rows) else np.zeros(0, np.bool_)
        begin, end = wanted
        end = np.minimum(-(-end // BLOCK_BYTES) * BLOCK_BYTES, count)
        return np.where(parted, begin // BLOCK_BYTES * BLOCK_BYTES, 0), np.where(parted, end, count)

    def _read_all(self, file: int) -> dict[int, list[bytes]]:
        """By row, the digests of all blocks in a file; nothing if it is too short to have them."""
        table = self._table
        rows = np.flatnonzero(table.file == file)
        counts = block_counts(table.byte_count[rows])
        stop = self._manifest.files[file].size - 16 * len(rows)
        start = stop - 16 * int(counts.sum())
        if start < int((table.byte_start[rows] + table.byte_count[rows]).max()):
            return {}
        rows, counts = rows[counts > 0], counts[counts > 0]
        order = np.argsort(table.byte_start[rows], kind="stable")
        storage, name = self._files[file]
        data = storage.read(name, start, stop)
        digests = digests_as_bytes(np.frombuffer(data, "<u8").reshape(-1, 2))
        ends = np.cumsum(counts[order])
        return {
            row: digests[end - count : end]
            for row, end, count in zip(
                rows[order].tolist(), ends.tolist(), counts[order].tolist(), strict=True
            )
        }
