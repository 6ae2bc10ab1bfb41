"""Reads of the stored boxes of a foreign checkpoint, in batches of neighbours.

    sort boxes by file and byte -> cut into batches -> each thread: locate, read, verify, fill

A large part is read straight into its destination if it is contiguous in both, and no checksum covers other
bytes, too. All other bytes pass through scratch memory of the thread. There, neighbours in a file share one
read, and extents are verified.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shardproof._utils.libc import copy_runs
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import Extent, StoredBox, StoredView
from shardproof.engine.format import TensorRecord
from shardproof.engine.geometry import row_major_strides
from shardproof.engine.loading.destinations import DestinationWriter, can_view
from shardproof.engine.loading.read_executor import Scratch, in_threads, reading_threads
from shardproof.engine.planning import LARGE_BYTES, ChunkTable

_BATCH_BYTES = 1 << 20
"""Bytes of one read of neighbours, at most, unless a single box needs more."""
_GAP_BYTES = 32 << 10
"""Unwanted bytes between two neighbours of one read, at most: a call takes as long as copying these."""
_WANTED_PER_UNWANTED = 8
"""Wanted bytes of a read for each unwanted byte, at least: ranks read little of each other's parts."""
_WHOLE_BYTES = 64 << 20
"""A larger seekable extent is not read whole for a part of it. This bounds the memory of a read."""


class BoxReads:
    """Reads of distinct stored boxes; see `Reads`. There is a box for each row of the table.

    `proved` are the extents whose checksum was compared with all their bytes. Reads add to it.
    """

    def __init__(
        self,
        boxes: Sequence[StoredBox],
        tensors: Sequence[TensorRecord],
        table: ChunkTable,
        writer: DestinationWriter,
        rows: NDArray[np.int64],
        proved: set[Extent],
    ) -> None:
        nbytes = np.array([boxes[row].nbytes for row in rows.tolist()], np.int64)
        order = np.lexsort((nbytes, table.byte_start[rows], table.file[rows]))
        rows, nbytes = rows[order], nbytes[order]
        file, start = table.file[rows], table.byte_start[rows]
        is_new = (np.diff(file, prepend=-1) != 0) | (np.diff(start, prepend=-1) != 0)
        is_new |= np.diff(nbytes, prepend=-1) != 0
        first = np.flatnonzero(is_new)
        """Position of the first box of each group. The boxes of a group are in one range of a file."""
        self.nbytes = int(nbytes[first].sum())
        """Bytes to read, at most."""
        self._batches = _batches(first.tolist(), file[first].tolist(), nbytes[first].tolist(), len(rows))
        self._rows: list[int] = rows.tolist()
        self._boxes = [boxes[row] for row in self._rows]
        self._dtypes = [tensors[tensor].dtype for tensor in table.tensor[rows].tolist()]
        self._begin, self._end = (column.tolist() for column in writer.wanted(rows))
        self._direct = writer.straight(self._rows)
        self._writer = writer
        self._proved = proved
        self._lock = threading.Lock()
        self._scratch = Scratch()
        self._on_bytes: Callable[[int], None] | None = None
        self._read = 0

    def run(self, *, threads: int | None, on_bytes: Callable[[int], None] | None) -> int:
        """Reads all; see `Reads.run`. Bytes go through the page cache."""
        self._on_bytes = on_bytes
        threads = reading_threads() if threads is None else threads
        in_threads(self._read_batch, self._batches, threads, self._writer.streams.entered)
        return self._read

    def _read_batch(self, positions: range) -> None:
        places = {at: self._located(at) for at in positions}
        extents: dict[Extent, list[int]] = {}
        for at, place in places.items():
            extents.setdefault(place.view.extent, []).append(at)
        read = 0
        ranges: list[_Range] = []
        for extent, boxes in extents.items():
            read += self._read_extent(places, extent, boxes, ranges)
        for together in _neighbours(ranges):
            read += self._read_ranges(places, together)
        with self._lock:
            self._read += read
        if self._on_bytes is not None:
            self._on_bytes(read)

    def _located(self, at: int) -> _BoxBytes:
        """Finds the elements of a box, and which bytes of its extent the parts need."""
        box = self._boxes[at]
        view, itemsize = box.located(), DTYPES[self._dtypes[at]].itemsize
        first = view.offset * itemsize
        if view.stride == _row_major(box.sizes):
            return _BoxBytes(view, first, first + self._begin[at], first + self._end[at], True)
        reach = 1 + sum((size - 1) * step for size, step in zip(box.sizes, view.stride, strict=True))
        return _BoxBytes(view, first, first, first + reach * itemsize, False)

    def _read_extent(
        self, places: _Places, extent: Extent, boxes: Sequence[int], ranges: list[_Range]
    ) -> int:
        """Fills the boxes of an extent, or appends the ranges to read for them to `ranges`.

        Returns the bytes that were read.
        """
        is_pending = extent.has_checksum and extent not in self._proved
        if is_pending and extent.is_raw and extent.nbytes <= _BATCH_BYTES:
            ranges.append(_Range(extent, extent.start, extent.start + extent.nbytes, boxes, True))
            return 0
        read = 0
        if is_pending or not extent.is_seekable:
            at, place = boxes[0], places[boxes[0]]
            is_all = len(boxes) == 1 and not place.first and self._direct.nbytes[at] == extent.nbytes
            if is_all and self._is_contiguous(at, place) and not self._direct.begin[at]:
                extent.read_into(self._destination(at))
                self._note_proved(extent)
                return extent.stored_bytes
            wanted = sum(places[at].end - places[at].begin for at in boxes)
            if not extent.is_seekable or (extent.nbytes <= _WHOLE_BYTES and 2 * wanted > extent.nbytes):
                scratch, memory = self._scratch.take(extent.nbytes)
                extent.read_into(memory[: extent.nbytes])
                self._note_proved(extent)
                self._fill(places, [(0, boxes)], scratch)
                return extent.stored_bytes
            extent.verify()
            self._note_proved(extent)
            read += extent.stored_bytes
        origin = extent.start if extent.is_raw else 0
        for at in boxes:
            place = places[at]
            if self._is_contiguous(at, place) and self._direct.nbytes[at] >= LARGE_BYTES:
                extent.read_range(place.first + self._direct.begin[at], self._destination(at))
                read += self._direct.nbytes[at]
            else:
                ranges.append(_Range(extent, origin + place.begin, origin + place.end, [at], False))
        return read

    def _read_ranges(self, places: _Places, ranges: Sequence[_Range]) -> int:
        """Reads neighbouring ranges at once, verifies those that are whole extents, and fills their boxes."""
        extent, begin, end = ranges[0].extent, ranges[0].begin, max(one.end for one in ranges)
        scratch, memory = self._scratch.take(end - begin)
        memory = memory[: end - begin]
        if extent.is_raw:
            extent.storage.read_into(extent.file, begin, memory)
        else:
            extent.read_range(begin, memory)
        filled = []
        for one in ranges:
            if one.is_pending:
                one.extent.check(memory[one.begin - begin : one.end - begin])
                self._note_proved(one.extent)
            filled.append(((one.extent.start if extent.is_raw else 0) - begin, one.boxes))
        self._fill(places, filled, scratch)
        return end - begin

    def _fill(
        self, places: _Places, filled: Sequence[tuple[int, Sequence[int]]], scratch: torch.Tensor
    ) -> None:
        """Fills the destinations of boxes.

        Args:
            places: positions of the boxes in their extents.
            filled: first byte of an extent in the scratch memory (below 0 if only a later part of it is
                there), and boxes of the extent.
            scratch: has the bytes that the boxes need.
        """
        into, out_of, counts = [], [], []
        addresses, begins, sizes = self._direct
        for origin, boxes in filled:
            base = scratch.data_ptr() + origin
            for at in boxes:
                place = places[at]
                if place.is_dense and addresses[at]:
                    into.append(addresses[at])
                    out_of.append(base + place.first + begins[at])
                    counts.append(sizes[at])
                else:
                    self._put(at, place, scratch, -origin)
        copy_runs(into, out_of, counts)

    def _put(self, at: int, place: _BoxBytes, memory: torch.Tensor, begin: int) -> None:
        """Copies or converts the parts of a box from memory that begins with byte `begin` of the extent."""
        row, name, sizes = self._rows[at], self._dtypes[at], self._boxes[at].sizes
        (parts,) = self._writer.parts_of([row])
        itemsize = DTYPES[name].itemsize
        if place.is_dense:
            skipped = max(begin - place.first, 0)
            stored = memory[max(place.first - begin, 0) :][: prod(sizes) * itemsize - skipped]
            self._writer.put(row, parts, stored, skipped)
            return
        stored = memory[place.first - begin :][: (place.end - place.first) // itemsize * itemsize]
        dtype = getattr(torch, name)
        if not can_view(stored, dtype):  # neighbours in a file begin anywhere
            stored = stored.clone()
        strided = stored.view(dtype).as_strided(sizes, place.view.stride)
        # `contiguous` keeps odd strides of size 1
        dense = strided.clone(memory_format=torch.contiguous_format)
        self._writer.put(row, parts, dense.reshape(-1).view(torch.uint8), 0)

    def _is_contiguous(self, at: int, place: _BoxBytes) -> bool:
        """True if the only part of a box is contiguous in the file and in its destination."""
        return place.is_dense and self._direct.address[at] != 0

    def _destination(self, at: int) -> memoryview:
        """The memory that the part of a box is read into."""
        count = self._direct.nbytes[at]
        return memoryview((ctypes.c_char * count).from_address(self._direct.address[at])).cast("B")

    def _note_proved(self, extent: Extent) -> None:
        if extent.has_checksum:
            self._proved.add(extent)


class _BoxBytes(NamedTuple):
    """The position of a box in its extent."""

    view: StoredView
    first: int
    """First byte of the box in the extent."""
    begin: int
    """First byte in the extent that the parts of the box need."""
    end: int
    """End of the last byte, exclusive."""
    is_dense: bool
    """True if the elements are in row-major order, one after the other."""


_Places = dict[int, _BoxBytes]
"""The boxes that one thread reads at once, by position."""


class _Range(NamedTuple):
    """Bytes to read for some boxes of an extent."""

    extent: Extent
    begin: int
    """First byte, in the file if the extent is raw, else in the extent."""
    end: int
    boxes: Sequence[int]
    is_pending: bool
    """True if the range is the whole extent, whose checksum was not compared yet."""


def _batches(first: Sequence[int], file: Sequence[int], nbytes: Sequence[int], count: int) -> list[range]:
    """Cuts boxes into batches: a group that is large, or neighbouring groups of one file.

    Args:
        first: position of the first box of each group.
        file: file of each group.
        nbytes: bytes of each group.
        count: boxes in all groups.

    >>> _batches([0, 2, 3, 4], [0, 0, 0, 1], [9, 9, 1 << 20, 9], 5)
    [range(0, 3), range(3, 4), range(4, 5)]
    """
    cuts, total = [], 0
    for group, (name, size) in enumerate(zip(file, nbytes, strict=True)):
        if not group or name != file[group - 1] or total + size > _BATCH_BYTES:
            cuts.append(first[group])
            total = 0
        total += size
    return [range(start, stop) for start, stop in pairwise([*cuts, count])]


def _neighbours(ranges: list[_Range]) -> Iterator[list[_Range]]:
    """Ranges that one read fetches: of one file, or of one extent that is not raw."""
    ranges.sort(key=lambda one: one.begin)
    groups: dict[object, list[_Range]] = {}
    for one in ranges:
        extent = one.extent
        groups.setdefault((id(extent.storage), extent.file) if extent.is_raw else extent, []).append(one)
    for group in groups.values():
        together, end, wanted = [group[0]], group[0].end, group[0].end - group[0].begin
        for one in group[1:]:
            gap = max(one.begin - end, 0)
            new = max(one.end - max(end, one.begin), 0)
            begin = together[0].begin
            unwanted = end - begin - wanted + gap
            is_far = gap > _GAP_BYTES or unwanted * _WANTED_PER_UNWANTED > wanted + new
            if is_far or max(end, one.end) - begin > _BATCH_BYTES:
                yield together
                together, end, wanted = [], one.begin, 0
                new = one.end - one.begin
            together.append(one)
            end = max(end, one.end)
            wanted += new
        yield together


@lru_cache(maxsize=4096)
def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(row_major_strides(sizes))
