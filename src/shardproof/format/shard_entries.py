"""The entries of a shard file's header: its chunks, padding and tables of digests, in file order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.format.blocks import block_counts
from shardproof.format.file_names import chunk_name
from shardproof.format.shards import BLOCKS, DIGESTS, PADDING, PAGE_BYTES, encode_entries
from shardproof.planning import LARGE_BYTES

__all__ = ["LARGE_IN_PAGE", "Entries", "chunk_entries", "encode_chunks", "start_in_page"]

LARGE_IN_PAGE = 1856
"""Byte of a page near which large chunks begin: half a page from the byte where allocators place large
tensors (0 or 64). A copy between addresses that differ by nearly a multiple of 4096 bytes is slow: processors
compare the low 12 bits of a load with those of earlier stores (4K aliasing: Intel 64 and IA-32 Architectures
Optimization Reference Manual). Most large chunks have whole pages, so all of one alignment begin at the same
byte of a page."""

_STEP = 64
"""Bytes; data begin at a multiple of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The entries of a shard's header, `@padding`, `@blocks` and `@digests` included."""

    encoded: bytes
    padding: int
    """Zero bytes after the chunks."""
    in_page: int
    """Byte of a page at which the data begin."""


def encode_chunks(
    names: Sequence[str], codes: Sequence[str], shapes: Sequence[Sequence[int]], byte_count: NDArray[Any]
) -> Entries:
    """The entries of a shard file with these chunks, in this order and without gaps.

    Args:
        names: names of n chunks.
        codes: safetensors' codes of their types.
        shapes: their shapes, in elements of those types.
        byte_count: (n,) int64, bytes.

    >>> encode_chunks(["w[0:3]"], ["U8"], [(3,)], np.array([3])).padding
    5
    """
    data_bytes = int(byte_count.sum())
    padding = -data_bytes % 8
    names, codes, shapes, counts = list(names), list(codes), list(shapes), byte_count.tolist()
    if padding:
        names.append(PADDING)
        codes.append("U8")
        shapes.append((padding,))
        counts.append(padding)
    for name, digests in ((BLOCKS, int(block_counts(byte_count).sum())), (DIGESTS, len(byte_count))):
        if digests or name == DIGESTS:
            names.append(name)
            codes.append("U64")
            shapes.append((digests, 2))
            counts.append(16 * digests)
    ends = np.cumsum(counts, dtype=np.int64)
    encoded = encode_entries(names, codes, shapes, ends - counts, np.array(counts, np.int64))
    return Entries(encoded, padding, start_in_page(byte_count))


def chunk_entries(
    chunks: Sequence[tuple[str, str, tuple[int, ...], tuple[int, ...]]], byte_count: NDArray[Any]
) -> Entries:
    """The entries of a shard file with these boxes of tensors, in this order.

    Args:
        chunks: key, torch's name of the dtype, offsets and sizes of n boxes.
        byte_count: (n,) int64, bytes.

    >>> chunk_entries([("w", "bool", (4,), (3,))], np.array([3])).encoded[:50]
    b'"w[4:7]":{"dtype":"BOOL","shape":[3],"data_offsets'
    """
    dtypes = [DTYPES[name] for _, name, _, _ in chunks]
    return encode_chunks(
        [chunk_name(key, offsets, sizes) for key, _, offsets, sizes in chunks],
        [dtype.code for dtype in dtypes],
        [
            (*sizes, dtype.parts) if dtype.parts > 1 else sizes
            for dtype, (_, _, _, sizes) in zip(dtypes, chunks, strict=True)
        ],
        byte_count,
    )


def start_in_page(byte_count: NDArray[np.int64]) -> int:
    """The byte of a page at which data begin, so that most large chunks begin near `LARGE_IN_PAGE`.

    Args:
        byte_count: (n,) bytes of the chunks, in file order.

    Returns:
        A multiple of 64; 0 if no chunk is large.

    >>> start_in_page(np.array([512, 1 << 20])) + 512
    1856
    """
    is_large = byte_count >= LARGE_BYTES
    starts = (np.cumsum(byte_count) - byte_count)[is_large]
    steps = PAGE_BYTES // _STEP
    weights = np.bincount(starts // _STEP % steps, byte_count[is_large], steps)
    shifts, places = np.ogrid[:steps, :steps]
    away = np.abs((shifts + places - LARGE_IN_PAGE // _STEP + steps // 2) % steps - steps // 2)
    return int(np.argmax(np.maximum(steps // 3 - away, 0) @ weights)) * _STEP
