"""Stored boxes of the chunks of Zarr arrays. A chunk lies in a file of its own or in a shard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import Extent, FileRange, StoredBox, StoredView, missing_file
from shardproof.engine.geometry import row_major_strides
from shardproof.engine.storage import Storage
from shardproof.errors import CorruptChunkError, FormatError
from shardproof.formats.zarr.zarr_codecs import CodedExtent, import_extra
from shardproof.formats.zarr.zarr_metadata import ArrayMetadata, ChunkLayout

_MOST_CHUNKS = 1 << 22
"""Chunks of a checkpoint, at most. Each one takes about 0.5 KB while the checkpoint is open."""
_MOST_ABSENT = 1 << 18
"""Absent files of chunks, at most. Metadata with a larger grid is damaged."""
_MOST_UNSEEN = 1 << 16
"""Chunks of a shard that are described without a check of the file's size, at most."""
_ABSENT = np.uint64(2**64 - 1)
"""Offset and bytes of a chunk that a shard does not hold."""


@dataclass(frozen=True, slots=True)
class FillExtent(Extent):
    """Elements of a chunk that was never written, so no file holds them. All equal the fill value."""

    storage: Storage
    file: str
    """Name of the metadata file that gives the fill value."""
    nbytes: int
    fill: bytes
    """One element."""
    start: int = 0

    @property
    def stored_bytes(self) -> int:
        """Always 0."""
        return 0

    @property
    def is_seekable(self) -> bool:
        """Always True."""
        return True

    def read_into(self, memory: memoryview) -> None:
        """Repeats the fill value; see `Extent.read_into`."""
        self.read_range(0, memory)

    def read_range(self, begin: int, memory: memoryview) -> None:
        """Repeats the fill value; see `Extent.read_range`."""
        filled = np.frombuffer(memory, np.uint8).reshape(-1, len(self.fill))
        filled[:] = np.frombuffer(self.fill, np.uint8)

    def verify(self) -> None:
        """Does nothing: there are no bytes."""


class ZarrChunks:
    """Describes the chunks of the arrays of one checkpoint."""

    absent: int
    """Number of absent files of chunks."""
    filled: list[str]
    """Name of an absent file of each array whose absent chunks read as the fill value."""
    sizes: dict[str, int | None]
    """Files of chunks, present or lost: name to expected bytes, None if they are not known."""

    def __init__(self, storage: Storage, names: Collection[str]) -> None:
        self.absent = 0
        self.filled = []
        self.sizes = {}
        self._storage = storage
        self._names = names
        self._left = _MOST_CHUNKS
        self._index = lru_cache(maxsize=64)(self._read_index)

    def boxes(
        self, key: str, array: ArrayMetadata, folder: str, metadata: str, *, every_chunk: bool = False
    ) -> list[StoredBox]:
        """The stored boxes of an array.

        Args:
            key: key of the array.
            array: its metadata.
            folder: the array's folder with a "/" at the end; "" for the root.
            metadata: name of the file of the metadata.
            every_chunk: True if the writer stores every chunk, so that an absent chunk is lost. Reading its
                box raises an error.

        Raises:
            FormatError: the array has more chunks than any checkpoint.
        """
        files = math.prod(array.grid)
        chunks = files * _leaves(array.layout)
        if chunks > self._left or files > len(self._names) + _MOST_ABSENT - self.absent:
            path, sizes = f"{self._storage.location}/{metadata}", leaf(array.layout).sizes
            raise FormatError(
                f"{path}: {key} has the shape {array.shape} in {chunks} chunks of {sizes}. "
                f"The folder has {len(self._names)} files, and a checkpoint has {_MOST_CHUNKS} chunks at "
                "most: the metadata is damaged, or the chunks are too small for a checkpoint",
                file=path,
                key=key,
            )
        self._left -= chunks
        found = [
            (tuple(map(int.__mul__, at, array.layout.sizes)), folder + array.chunk_name(at))
            for at in itertools.product(*map(range, array.grid))
        ]
        if every_chunk:
            lost = {name for _, name in found if name not in self._names}
            self.sizes.update(dict.fromkeys(lost))
            self.absent += len(lost)
        else:
            lost = set()
            absent = [name for _, name in found if name not in self._names]
            self.absent += len(absent)
            self.filled += absent[:1]
            if absent and len(absent) == len(found):
                return StoredBox.whole(array.shape, self.filled_view(array, array.shape, metadata))
        return [
            box
            for offsets, name in found
            for box in (
                self.chunk_boxes(key, array, offsets, name, metadata)
                if name not in lost
                else [self.lost_box(key, array, offsets, name)]
            )
        ]

    def lost_box(self, key: str, array: ArrayMetadata, offsets: tuple[int, ...], name: str) -> StoredBox:
        """The box of a lost chunk. Reading it raises an error."""
        sizes = clipped(offsets, array.layout.sizes, array.shape)
        return StoredBox(offsets, sizes, name, 0, 0, partial(self._lost, name, key, offsets))

    def chunk_boxes(
        self, key: str, array: ArrayMetadata, offsets: tuple[int, ...], name: str, metadata: str
    ) -> Iterator[StoredBox]:
        """The boxes of a chunk that is stored, or that reads as the fill value."""
        layout = array.layout
        sizes = clipped(offsets, layout.sizes, array.shape)
        if name not in self._names:
            yield StoredBox.of(offsets, sizes, self.filled_view(array, sizes, metadata))
        elif layout.inner is None:
            self.sizes[name] = None if layout.codecs.codecs else layout.codecs.nbytes
            view = self.located(array, layout, sizes, name, 0, None)
            yield StoredBox(offsets, sizes, name, 0, layout.codecs.nbytes, view)
        else:
            self.sizes[name] = None
            if math.prod(layout.grid) > _MOST_UNSEEN:
                self._check_index_size(layout, name, 0, self._storage.size(name) or 0)
            for begin, places in chunks_in_shard(layout, offsets):
                sizes = clipped(begin, leaf(layout).sizes, array.shape)
                if all(size > 0 for size in sizes):
                    found = partial(self.find, array, key, sizes, name, places, metadata)
                    yield StoredBox(begin, sizes, name, 0, layout.codecs.nbytes, found)

    def _lost(self, name: str, key: str, offsets: tuple[int, ...]) -> StoredView:
        raise missing_file(f"{self._storage.location}/{name}", key, offsets)

    def filled_view(self, array: ArrayMetadata, sizes: Sequence[int], metadata: str) -> StoredView:
        """Elements that all equal the fill value of an array."""
        itemsize = DTYPES[array.dtype].itemsize
        fill = bytes(itemsize) if array.fill is None else array.fill
        return StoredView.dense(sizes, FillExtent(self._storage, metadata, math.prod(sizes) * itemsize, fill))

    def located(
        self,
        array: ArrayMetadata,
        layout: ChunkLayout,
        sizes: tuple[int, ...],
        name: str,
        start: int,
        stored: int | None,
    ) -> StoredView:
        """The view of the part of a chunk that lies in the array."""
        codecs, stride = layout.codecs, layout.stride
        extent: Extent
        if codecs.codecs:
            extent = CodedExtent(self._storage, name, start, codecs, stored, layout.swap)
        else:
            is_dense = stride == tuple(row_major_strides(sizes))
            nbytes = math.prod(sizes) * DTYPES[array.dtype].itemsize if is_dense else codecs.nbytes
            extent = FileRange(self._storage, name, start, nbytes, swap=layout.swap)
        return StoredView(extent, 0, stride)

    def find(
        self,
        array: ArrayMetadata,
        key: str,
        sizes: tuple[int, ...],
        name: str,
        places: Sequence[int],
        metadata: str,
        start: int = 0,
        stop: int | None = None,
    ) -> StoredView:
        """The view of the part of a chunk in a shard that lies in the array.

        Args:
            array: the array.
            key: key of the array.
            sizes: sizes of the part.
            name: name of the file.
            places: row of the chunk in the index of the shard, and of each shard inside it.
            metadata: name of the file of the metadata.
            start: first byte of the outermost shard in the file.
            stop: end of that shard; None for that of the file.
        """
        layout = array.layout
        for row in places:
            assert layout.inner is not None
            index = self._index(layout, name, start, stop)
            offset, nbytes = index[row]
            if offset == _ABSENT and nbytes == _ABSENT:
                return self.filled_view(array, sizes, metadata)
            layout, start = layout.inner, start + int(offset)
            stop = start + int(nbytes)
        assert stop is not None
        if not layout.codecs.codecs and stop - start != layout.codecs.nbytes:
            path = f"{self._storage.location}/{name}"
            raise FormatError(
                f"{path}: the index gives a chunk of {key} {stop - start} bytes, expected "
                f"{layout.codecs.nbytes}",
                file=path,
                key=key,
            )
        return self.located(array, layout, sizes, name, start, stop - start)

    def _read_index(self, layout: ChunkLayout, name: str, start: int, stop: int | None) -> NDArray[np.uint64]:
        """(chunks, 2) offset and bytes of the chunks of a shard; checked to lie in the shard."""
        index, path = layout.index, f"{self._storage.location}/{name}"
        assert index is not None
        if stop is None:
            stop = self._storage.size(name) or 0
        rows = math.prod(layout.grid)
        nbytes = self._check_index_size(layout, name, start, stop)
        begin = stop - nbytes if index.is_at_end else start
        data = self._storage.read(name, begin, begin + nbytes)
        if index.has_checksum:
            google_crc32c = import_extra("google_crc32c", "zarr", "the index of a Zarr shard")
            expected, found = int.from_bytes(data[-4:], "little"), google_crc32c.value(data[:-4])
            if found != expected:
                raise CorruptChunkError(
                    f"{path}: the index of a shard, {nbytes} bytes from byte {begin} on, does not match its "
                    f"CRC-32C: expected {expected:08x}, found {found:08x}. Restore the file from a copy",
                    file=path,
                    byte_start=begin,
                    byte_count=nbytes,
                )
        entries = np.frombuffer(data, f"{index.order}u8", 2 * rows).reshape(rows, 2).astype(np.uint64)
        size = np.uint64(stop - start)
        inside = (entries[:, 0] <= size) & (entries[:, 1] <= size - np.minimum(entries[:, 0], size))
        inside |= (entries == _ABSENT).all(1)
        if not inside.all():
            offset, count = entries[np.flatnonzero(~inside)[0]].tolist()
            raise FormatError(
                f"{path}: the index of a shard of {size} bytes gives a chunk of {count} bytes from byte "
                f"{offset} on: the file was cut, or its index is damaged. Restore it from a copy",
                file=path,
                byte_start=begin,
                byte_count=nbytes,
            )
        return entries

    def _check_index_size(self, layout: ChunkLayout, name: str, start: int, stop: int) -> int:
        """Bytes of the index of a shard. Checks that the shard is large enough for its index."""
        assert layout.index is not None
        nbytes = 16 * math.prod(layout.grid) + 4 * layout.index.has_checksum
        if nbytes > stop - start:
            path = f"{self._storage.location}/{name}"
            raise FormatError(
                f"{path}: a shard has {stop - start} bytes, expected at least {nbytes} for its index: the "
                "file was cut. Restore it from a copy",
                file=path,
                byte_start=start,
                byte_count=stop - start,
            )
        return nbytes


def leaf(layout: ChunkLayout) -> ChunkLayout:
    """The layout of the chunks that no shard divides further."""
    return layout if layout.inner is None else leaf(layout.inner)


def _leaves(layout: ChunkLayout) -> int:
    """Number of chunks in a chunk that no shard divides further."""
    return 1 if layout.inner is None else math.prod(layout.grid) * _leaves(layout.inner)


def clipped(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the part of a chunk that lies in the array."""
    return tuple(min(size, n - at) for at, size, n in zip(offsets, sizes, shape, strict=True))


def chunks_in_shard(
    layout: ChunkLayout, offsets: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """First index of each chunk in a shard, and its row in the index of each shard around it."""
    inner = layout.inner
    if inner is None:
        yield offsets, ()
        return
    for row, at in enumerate(itertools.product(*map(range, layout.grid))):
        steps = dict(zip(layout.axes, at, strict=True))
        begin = tuple(offset + steps[axis] * inner.sizes[axis] for axis, offset in enumerate(offsets))
        for found, places in chunks_in_shard(inner, begin):
            yield found, (row, *places)
