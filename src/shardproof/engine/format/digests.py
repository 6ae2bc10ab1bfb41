"""Digests of files and chunks: XXH3 with 128 bits (https://xxhash.com).

Digests find damage, not forgery: a program that can write the files can write matching digests.

Note: Digests of chunks
-----------------------
A chunk is built from blocks, so that a part of it can be verified without the rest. The digest of a chunk of
one block is the digest of its bytes. The digest of a larger chunk is the digest of its blocks' digests: a
hash tree of two levels (Merkle, "A Digital Signature Based on a Conventional Encryption Function", 1987). The
index holds the digests of chunks, and each shard file those of its blocks. The digest of a chunk proves the
digests of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

BLOCK_BYTES = 256 << 10
"""Bytes of a block, a multiple of every item size; the last block of a chunk may have fewer. A block is
hashed while it is in the processor's cache, and digests take 64 MiB for each TiB."""


def block_counts(byte_count: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of block digests that a shard file holds for each chunk, from the (n,) bytes of the chunks.

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


def bytes_digest(data: bytes | bytearray | memoryview) -> str:
    """XXH3-128 of `data`, 32 hexadecimal digits.

    >>> bytes_digest(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(data)


def digests_as_bytes(digests: NDArray[np.uint64]) -> list[bytes]:
    r"""Each digest as the 16 bytes of its canonical form.

    Args:
        digests: (n, 2) uint64, high and low half of each.

    >>> digests_as_bytes(np.array([[1, 2]], np.uint64)) == [bytes(7) + b"\x01" + bytes(7) + b"\x02"]
    True
    """
    raw = digests.astype(">u8").tobytes()
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]


def digests_from_bytes(digests: Sequence[bytes]) -> NDArray[np.uint64]:
    r"""The inverse of `digests_as_bytes`. Returns (n, 2) uint64, high and low half of each.

    >>> digests_from_bytes([bytes(7) + b"\x01" + bytes(7) + b"\x02"]).tolist()
    [[1, 2]]
    """
    return np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype(np.uint64)


def digests_as_table(digests: NDArray[np.uint64]) -> bytes:
    """Digests, (n, 2), as a shard file holds them: high and low half of each, little-endian.

    >>> digests_as_table(np.array([[1, 2]], np.uint64)).hex()
    '01000000000000000200000000000000'
    """
    return digests.astype("<u8").tobytes()


def digests_from_table(table: bytes) -> NDArray[np.uint64]:
    """The inverse of `digests_as_table`.

    >>> digests_from_table(digests_as_table(np.array([[1, 2]], np.uint64))).tolist()
    [[1, 2]]
    """
    return np.frombuffer(table, "<u8").reshape(-1, 2).astype(np.uint64, copy=False)


def file_digest(header: bytes, digests: NDArray[Any]) -> str:
    """The digest of a shard file: over its header and the digests of its chunks in byte order.

    It has 32 hexadecimal digits.

    Together with verified chunks it covers every byte of the file but the padding, which is zero. The writer
    needs no second pass over the data.

    Args:
        header: bytes of the file before the data.
        digests: (n, 2) uint64, high and low half of each chunk's digest.

    >>> file_digest(b"", np.empty((0, 2), np.uint64)) == bytes_digest(b"")
    True
    """
    state = xxhash.xxh3_128(header)
    state.update(np.ascontiguousarray(digests, dtype=">u8").tobytes())
    return state.hexdigest()
