"""Writes a shard file: header, chunks, padding, and the tables of digests, in this order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardproof.engine.format.digests import ChunkHasher, digests_from_bytes, file_digest
from shardproof.engine.format.manifest import FileRecord
from shardproof.engine.format.shards import shard_tail

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
        """Appends padding and tables, and flushes the file.

        Args:
            name: name of the file in the folder of its step.
            rank: rank of the file.
        """
        digests = self.digests
        self._file.put(shard_tail(self._padding, self._blocks, digests))
        size = self._file.finish()
        return FileRecord(name, size, file_digest(self._header, digests), len(self._header), rank)

    @property
    def digests(self) -> NDArray[np.uint64]:
        """(n, 2) digests of the chunks so far."""
        return digests_from_bytes(self._digests)
