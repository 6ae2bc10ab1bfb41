"""Compares one tensor in two checkpoints with different chunks, a chunk at a time.

`compare_chunks` reads each chunk of the first checkpoint once, and the chunks of the second that overlap it.
A bounded cache holds the chunks of the second. So any tensor needs memory for that cache and one chunk.
Chunks are read whole, so every byte is checked against its digest.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.errors import TilingError
from shardproof.format import ChunkVerifier, Manifest, locate_files
from shardproof.geometry import Boxes, intersect, overlapping_pairs
from shardproof.planning import ChunkTable
from shardproof.report.detail import rows_of
from shardproof.storage import Storage

__all__ = ["CHUNK_CACHE_BYTES", "ChunkReader", "Compared", "compare_chunks"]

CHUNK_CACHE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Compared:
    """The progress of the comparison of a tensor."""

    elements: int
    """Elements compared."""
    different: int
    """Of these, how many differ in a bit."""
    bytes: int
    """Bytes compared, counted in both checkpoints."""


class ChunkReader:
    """Verified chunks of one checkpoint as arrays of their bits, with a cache of the latest.

    Args:
        storage: of the checkpoint.
        manifest: its manifest.
        table: its chunk table.
        cache_bytes: size of the cache.
    """

    def __init__(self, storage: Storage, manifest: Manifest, table: ChunkTable, cache_bytes: int = 0) -> None:
        self.manifest = manifest
        self.location = storage.location
        self.bytes_read = 0
        self._files = locate_files(storage, manifest)
        self._table = table
        self._advice = (
            f"The checkpoint is {storage.location}. `shardproof verify` lists all damage. Restore another "
            "step, or copy the file again"
        )
        self.cached: OrderedDict[int, NDArray[Any]] = OrderedDict()
        """Chunks in the cache, by row of the chunk table; the latest use is the last."""
        self._cached_bytes = 0
        self._cache_bytes = cache_bytes

    def boxes(self, tensor: int) -> tuple[NDArray[np.int64], Boxes]:
        """Rows of a tensor's chunks, in the order of their offsets, and their boxes."""
        chosen = rows_of(self._table, tensor)
        rows, ndim = np.arange(chosen.start, chosen.stop), len(self.manifest.tensors[tensor].shape)
        boxes = self._table.boxes.boxes(rows, ndim)
        order = np.lexsort(boxes.offsets.T[::-1]) if ndim else np.arange(len(rows))
        return rows[order], boxes.take(order)

    def bits(self, row: int, sizes: tuple[int, ...], itemsize: int) -> NDArray[Any]:
        """The chunk in this row as unsigned integers of its elements' width, shaped `sizes`.

        Elements of 16 bytes are two integers each, in one more dimension.

        Raises:
            CorruptChunkError: the chunk does not match its digest.
        """
        cached = self.cached.get(row)
        if cached is not None:
            self.cached.move_to_end(row)
            return cached
        data = self._read(row)
        word = min(itemsize, 8)
        bits = data.view(f"u{word}").reshape(*sizes, *((2,) if itemsize > 8 else ()))
        if data.nbytes <= self._cache_bytes:
            self.cached[row] = bits
            self._cached_bytes += data.nbytes
            while self._cached_bytes > self._cache_bytes:
                self._cached_bytes -= self.cached.popitem(last=False)[1].nbytes
        return bits

    def _read(self, row: int) -> NDArray[np.uint8]:
        table = self._table
        storage, name = self._files[int(table.file[row])]
        start, count = int(table.byte_start[row]), int(table.byte_count[row])
        data = np.empty(count, np.uint8)
        storage.read_into(name, start, data.data)
        self.bytes_read += count
        verifier = ChunkVerifier.of_table(self.manifest, table, np.array([row]), advice=self._advice)
        verifier.check_pieces(0, [data.data])
        return data


def compare_chunks(a: ChunkReader, row_a: int, b: ChunkReader, row_b: int) -> Iterator[Compared]:
    """Compares a tensor of equal dtype and shape in two checkpoints; yields after each chunk of `a`.

    The last value is the result; for a tensor without elements it is the only one.

    Raises:
        CorruptChunkError: a chunk does not match its digest.
        TilingError: the chunks of one of the two do not cover the tensor exactly once.
    """
    record = a.manifest.tensors[row_a]
    itemsize = DTYPES[record.dtype].itemsize
    rows_a, boxes_a = a.boxes(row_a)
    rows_b, boxes_b = b.boxes(row_b)
    pairs_a, pairs_b = overlapping_pairs(boxes_a, boxes_b)
    shared = intersect(boxes_a.take(pairs_a), boxes_b.take(pairs_b))
    total = math.prod(record.shape)
    for boxes, reader in ((boxes_a, a), (boxes_b, b)):
        _check_cover(record.key, int(boxes.volumes().sum()), total, reader)
    _check_cover(record.key, int(shared.volumes().sum()), total, a)
    elements = different = 0
    yield Compared(0, 0, 0)
    # The pairs are sorted by the chunk of `a`, so those of one chunk are adjacent.
    borders = [0, *(np.flatnonzero(np.diff(pairs_a)) + 1).tolist(), len(pairs_a)]
    for start, stop in pairwise(borders) if len(pairs_a) else ():
        chunk_a = int(pairs_a[start])
        bits_a = a.bits(int(rows_a[chunk_a]), tuple(boxes_a.sizes[chunk_a].tolist()), itemsize)
        for pair in range(start, stop):
            chunk_b = int(pairs_b[pair])
            bits_b = b.bits(int(rows_b[chunk_b]), tuple(boxes_b.sizes[chunk_b].tolist()), itemsize)
            first, sizes = shared.offsets[pair], shared.sizes[pair]
            part_a = bits_a[_within(first - boxes_a.offsets[chunk_a], sizes)]
            part_b = bits_b[_within(first - boxes_b.offsets[chunk_b], sizes)]
            unequal = part_a != part_b
            if itemsize > 8:
                unequal = unequal.any(axis=-1)
            different += int(np.count_nonzero(unequal))
            elements += math.prod(sizes.tolist())
        yield Compared(elements, different, 2 * elements * itemsize)


def _within(offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[slice, ...]:
    return tuple(
        slice(first, first + size) for first, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
    )


def _check_cover(key: str, found: int, expected: int, reader: ChunkReader) -> None:
    if found != expected:
        raise TilingError(
            f"{reader.location}: the chunks of {key!r} hold {found} elements, but the tensor has {expected}. "
            "The chunk index is wrong: `shardproof verify` lists the faults.",
            key=key,
        )
