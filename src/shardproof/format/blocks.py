"""Chunk digests, which are built from blocks so that a part of a chunk can be verified without the rest.

The digest of a chunk of one block is the digest of its bytes. The digest of a larger chunk is the digest of
its blocks' digests: a hash tree of two levels (Merkle, "A Digital Signature Based on a Conventional
Encryption Function", 1987). The index holds the digests of chunks, and each shard file those of its blocks.
The digest of a chunk proves the digests of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["BLOCK_BYTES", "ChunkHasher", "block_counts", "digest_of_blocks"]

BLOCK_BYTES = 256 << 10
"""Bytes of a block, a multiple of every item size; the last block of a chunk may have fewer. A block is
hashed while it is in the processor's cache, and digests take 64 MiB for each TiB."""


def block_counts(byte_count: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of block digests that a shard file holds for each chunk.

    Args:
        byte_count: (n,) bytes of each chunk.

    Returns:
        (n,) number of blocks of each chunk; 0 for a chunk of one block, whose digest is the chunk's.

    >>> block_counts(np.array([0, BLOCK_BYTES, BLOCK_BYTES + 1])).tolist()
    [0, 0, 2]
    """
    counts = -(-byte_count // BLOCK_BYTES)
    return np.where(counts > 1, counts, 0)


def digest_of_blocks(digests: Sequence[bytes]) -> bytes:
    """The digest of a chunk, 16 bytes, from the digests of all its blocks, at least one."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))


class ChunkHasher:
    """Computes the digest of a chunk whose bytes come in order.

    Args:
        data: the first bytes of the chunk.

    >>> ChunkHasher(b"ab").digest() == xxhash.xxh3_128_digest(b"ab")
    True
    >>> hasher = ChunkHasher(bytes(BLOCK_BYTES))
    >>> hasher.update(b"and more")
    >>> blocks = hasher.blocks()
    >>> len(blocks), hasher.digest() == digest_of_blocks(blocks)
    (2, True)
    """

    __slots__ = ("_ended", "_filled", "_open")

    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._ended: list[bytes] = []
        self._open = xxhash.xxh3_128()
        self._filled = 0
        """Bytes in the open block, which is not full yet."""
        self.update(data)

    def update(self, data: bytes | memoryview) -> None:
        """Hashes the next bytes."""
        begin = 0
        while begin < len(data):
            span = data[begin : begin + BLOCK_BYTES - self._filled]
            begin += len(span)
            if len(span) == BLOCK_BYTES:
                self._ended.append(xxhash.xxh3_128_digest(span))
                continue
            self._open.update(span)
            self._filled += len(span)
            if self._filled == BLOCK_BYTES:
                self._ended.append(self._open.digest())
                self._open, self._filled = xxhash.xxh3_128(), 0

    def digest(self) -> bytes:
        """The digest of the bytes so far, 16 bytes."""
        return digest_of_blocks(self._digests())

    def blocks(self) -> list[bytes]:
        """Digests of the blocks so far, 16 bytes each; none if there is only one block."""
        digests = self._digests()
        return digests if len(digests) > 1 else []

    def _digests(self) -> list[bytes]:
        opened = [self._open.digest()] if self._filled or not self._ended else []
        return [*self._ended, *opened]
