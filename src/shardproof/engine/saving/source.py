"""Slices of a rank's pieces: the addresses of their bytes, or copies of them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from shardproof.engine.geometry import row_pointers
from shardproof.engine.saving.device_copy import DeviceCopies
from shardproof.engine.saving.staging import SLOT_BYTES
from shardproof.engine.state import Piece

_Ints = NDArray[np.int64]

_SMALL_BYTES = 64 << 10
"""Slices in device memory of at most this size are copied together."""
_TOGETHER_BYTES = 1 << 20
"""Bytes of such a copy, at most."""


class _SmallCopies:
    """Small slices of one device that are copied together to neighbouring memory of one allocation."""

    def __init__(self, copies: DeviceCopies, to: int, segment: object) -> None:
        self.copies = copies
        self.segment = segment
        self.first = self.end = to
        self.rows: list[int] = []
        self.parts: list[torch.Tensor] = []
        self.starts: list[int] = []

    def accepts(self, copies: DeviceCopies, to: int, count: int, segment: object) -> bool:
        """True if a slice can be copied together with these."""
        is_next = 0 <= to - self.end < SLOT_BYTES and to + count - self.first <= _TOGETHER_BYTES
        return is_next and copies is self.copies and segment is self.segment

    def add(self, row: int, part: torch.Tensor, to: int, count: int) -> None:
        """Adds a slice that `accepts` allows."""
        self.rows.append(row)
        self.parts.append(part)
        self.starts.append(to - self.first)
        self.end = to + count


class SliceSource:
    """n slices, each a box within one piece.

    Args:
        pieces: pieces of the rank.
        piece: (n,) row of the piece of each slice.
        start: (n,) first element of the slice in the row-major order of the piece.
        byte_count: (n,) bytes of the slice.
        offsets: flat global offsets of the slice's box, one for each dimension of its piece.
        sizes: flat sizes of the slice's box.
        copies: copies of device memory, by device.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        piece: _Ints,
        start: _Ints,
        byte_count: _Ints,
        offsets: _Ints,
        sizes: _Ints,
        copies: Mapping[torch.device, DeviceCopies],
    ) -> None:
        self.piece: list[int] = piece.tolist()
        self.byte_counts: list[int] = byte_count.tolist()
        self._pieces = pieces
        # `Piece.address` may be stale: a later visit of the walk may have moved the tensor.
        self._pointers = [each.view.data_ptr() for each in pieces]
        is_plain = np.array([each.is_plain for each in pieces], bool)
        base = np.where(is_plain, np.array(self._pointers, np.uint64), np.uint64(0))[piece]
        if start.any():
            itemsize = np.array([each.view.element_size() for each in pieces], np.int64)
            base = np.where(base != 0, base + (start * itemsize[piece]).astype(np.uint64), base)
        self.addresses: list[int] = base.tolist()
        """Address of each slice in host memory; 0 if `read` has to gather its bytes."""
        self._columns = piece, offsets, sizes
        self.copies = copies
        self._small: _SmallCopies | None = None
        """Slices of `read` without `wait` whose copies are not enqueued yet."""
        self._freed: list[int] = []
        """Rows to return from `wait`."""

    def is_in_place(self, row: int) -> bool:
        """True if the piece of a slice still has its memory.

        A freed storage (`resize_(0)`) must not be read.
        """
        view, pointer = self._pieces[at := self.piece[row]].view, self._pointers[at]
        return view.data_ptr() == pointer and (pointer != 0 or view.numel() == 0)

    def read(self, row: int, to: int, *, wait: bool = True, segment: object = None) -> None:
        """Copies a whole slice.

        Args:
            row: row of the slice.
            to: address of the destination.
            wait: False if the caller calls `wait` before it uses the copy. Each destination then begins at a
                multiple of `SLOT_BYTES`, because small slices of a device that are next to each other are
                copied together, with the bytes between them.
            segment: the allocation of the destination; only slices of one allocation are copied together.
        """
        if (address := self.addresses[row]) != 0:
            ctypes.memmove(to, address, self.byte_counts[row])
        else:
            self._gather(row, to, wait, segment)

    def wait(self) -> list[int]:
        """Waits for all copies of device memory.

        Returns:
            Rows of slices whose memory was freed before their copy. These and others were not copied.
        """
        try:
            self._copy_small()
        finally:
            for copies in self.copies.values():
                copies.wait()
        freed, self._freed = self._freed, []
        return freed

    @cached_property
    def _boxes(self) -> tuple[list[int], list[int], list[int]]:
        """The row of each slice's box in the flat columns of offsets and sizes, and these columns."""
        piece, offsets, sizes = self._columns
        ndims = np.array([len(each.offsets) for each in self._pieces], np.int64)[piece]
        return row_pointers(ndims).tolist(), offsets.tolist(), sizes.tolist()

    @torch.no_grad()
    def _gather(self, row: int, to: int, wait: bool, segment: object) -> None:
        """Copies a slice that is in device memory, or in another order than row-major."""
        count = self.byte_counts[row]
        piece = self._pieces[self.piece[row]]
        part = piece.view
        begins, offsets, sizes = self._boxes
        box = slice(begins[row], begins[row + 1])
        for dim, (offset, size, first) in enumerate(
            zip(offsets[box], sizes[box], piece.offsets, strict=True)
        ):
            if size != part.shape[dim]:
                part = part.narrow(dim, offset - first, size)
        copies = self.copies.get(part.device)
        if copies is None:
            gathered = part.resolve_conj().resolve_neg().contiguous()
            ctypes.memmove(to, gathered.data_ptr(), count)
        elif not wait and 0 < count <= _SMALL_BYTES:
            if self._small is None or not self._small.accepts(copies, to, count, segment):
                self._copy_small()
                self._small = _SmallCopies(copies, to, segment)
            self._small.add(row, part, to, count)
        else:
            into = memoryview((ctypes.c_char * count).from_address(to)).cast("B")
            if wait:
                copies.copy(part, into)
            else:
                copies.enqueue(part, into)

    def _copy_small(self) -> None:
        """Enqueues one copy of the small slices that were collected."""
        small, self._small = self._small, None
        if small is None:
            return
        # A kernel that reads freed memory would end the use of the device by this process.
        freed = [row for row in small.rows if not self.is_in_place(row)]
        if freed:
            self._freed += freed
            return
        memory = (ctypes.c_char * (small.end - small.first)).from_address(small.first)
        small.copies.enqueue_together(small.parts, small.starts, memoryview(memory).cast("B"))

    def finish(self) -> None:
        """Waits for all copies, and releases the pieces."""
        self._small = None
        self.wait()
        self._pieces = ()
