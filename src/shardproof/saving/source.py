"""Slices of a rank's pieces: the addresses of their bytes, or copies of them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from shardproof.geometry import row_pointers
from shardproof.saving.device_copy import DeviceCopies
from shardproof.state import Piece

__all__ = ["SliceSource"]

_Ints = NDArray[np.int64]


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
        self._pointers = [each.view.data_ptr() if each.is_plain else 0 for each in pieces]
        base = np.array(self._pointers, np.uint64)[piece]
        if start.any():
            itemsize = np.array([each.view.element_size() for each in pieces], np.int64)
            base = np.where(base != 0, base + (start * itemsize[piece]).astype(np.uint64), base)
        self.addresses: list[int] = base.tolist()
        """Address of each slice in host memory; 0 if `read` has to gather its bytes."""
        self._columns = piece, offsets, sizes
        self._devices = copies

    def is_in_place(self, row: int) -> bool:
        """True if the piece of a slice still has its memory.

        A freed storage (`resize_(0)`) must not be read.
        """
        pointer = self._pointers[at := self.piece[row]]
        return not pointer or self._pieces[at].view.data_ptr() == pointer

    def read(self, row: int, to: int, *, wait: bool = True) -> None:
        """Copies a whole slice.

        Args:
            row: row of the slice.
            to: address of the destination.
            wait: False if the caller calls `wait` before it uses the copy.
        """
        if (address := self.addresses[row]) != 0:
            ctypes.memmove(to, address, self.byte_counts[row])
        else:
            self._gather(row, to, wait)

    def wait(self) -> None:
        """Waits for all copies of device memory."""
        for copies in self._devices.values():
            copies.wait()

    @cached_property
    def _boxes(self) -> tuple[list[int], list[int], list[int]]:
        """The row of each slice's box in the flat columns of offsets and sizes, and these columns."""
        piece, offsets, sizes = self._columns
        ndims = np.array([len(each.offsets) for each in self._pieces], np.int64)[piece]
        return row_pointers(ndims).tolist(), offsets.tolist(), sizes.tolist()

    @torch.no_grad()
    def _gather(self, row: int, to: int, wait: bool) -> None:
        """Copies a slice that is in device memory, or in another order than row-major."""
        count = self.byte_counts[row]
        piece = self._pieces[self.piece[row]]
        part = piece.view
        begins, offsets, sizes = self._boxes
        box = slice(begins[row], begins[row + 1])
        for dim, (offset, size, first) in enumerate(
            zip(offsets[box], sizes[box], piece.offsets, strict=True)
        ):
            part = part.narrow(dim, offset - first, size)
        copies = self._devices.get(part.device)
        if copies is None:
            gathered = part.resolve_conj().resolve_neg().contiguous()
            ctypes.memmove(to, gathered.data_ptr(), count)
        else:
            into = memoryview((ctypes.c_char * count).from_address(to)).cast("B")
            if wait:
                copies.copy(part, into)
            else:
                copies.enqueue(part, into)

    def finish(self) -> None:
        """Waits for all copies, and releases the pieces."""
        self.wait()
        self._pieces = ()
