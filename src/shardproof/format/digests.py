"""Digests of files, and their forms: XXH3 with 128 bits (https://xxhash.com). For chunks see `blocks`.

Digests find damage, not forgery: a program that can write the files can write matching digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = [
    "bytes_digest",
    "digests_as_bytes",
    "digests_as_table",
    "digests_from_bytes",
    "digests_from_table",
    "file_digest",
]


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
    r"""The inverse of `digests_as_bytes`.

    Args:
        digests: n digests of 16 bytes.

    Returns:
        (n, 2) uint64, high and low half of each.

    >>> digests_from_bytes([bytes(7) + b"\x01" + bytes(7) + b"\x02"]).tolist()
    [[1, 2]]
    """
    return np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype(np.uint64)


def digests_as_table(digests: NDArray[np.uint64]) -> bytes:
    """Digests as a shard file holds them: high and low half of each, little-endian.

    Args:
        digests: (n, 2) uint64, high and low half of each.

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

    Together with verified chunks it covers every byte of the file but the padding, which is zero. The writer
    needs no second pass over the data.

    Args:
        header: bytes of the file before the data.
        digests: (n, 2) uint64, high and low half of each chunk's digest.

    Returns:
        32 hexadecimal digits.

    >>> file_digest(b"", np.empty((0, 2), np.uint64)) == bytes_digest(b"")
    True
    """
    state = xxhash.xxh3_128(header)
    state.update(np.ascontiguousarray(digests, dtype=">u8").tobytes())
    return state.hexdigest()
