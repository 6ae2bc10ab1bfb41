"""Runs of elements of a rank's pieces: where their bytes are, or copies of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shardproof.saving.device import DeviceCopies
from shardproof.state import Piece, is_plain_memory

__all__ = ["Source"]

_Ints = NDArray[np.int64]


class Source:
    """n runs of elements, each a box within one piece.

    Of a device, the values are read that the piece had when this was made (see `DeviceCopies`).

    Args:
        pieces: of the rank.
        piece: (n,) row of the piece of each run.
        start: (n,) first element of the run in the row-major order of the piece.
        byte_count: (n,) bytes of the run.
        offsets: flat global offsets of the run's box, as many as its piece has dimensions.
        sizes: of the box.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        piece: _Ints,
        start: _Ints,
        byte_count: _Ints,
        offsets: _Ints,
        sizes: _Ints,
    ) -> None:
        self.piece: list[int] = piece.tolist()
        self.byte_counts: list[int] = byte_count.tolist()
        self._pieces = pieces
        self._start = start.tolist()
        ndims = np.array([held.view.dim() for held in pieces], np.int64)[piece]
        self._box = np.append(0, np.cumsum(ndims)).tolist()
        self._offsets, self._sizes = offsets.tolist(), sizes.tolist()
        self._address = [held.view.data_ptr() if is_plain_memory(held.view) else 0 for held in pieces]
        self._itemsize = [held.view.element_size() for held in pieces]
        self._devices = {
            device: DeviceCopies(device)
            for device in {held.view.device for held in pieces}
            if device.type != "cpu"
        }

    def address(self, row: int) -> int:
        """Where the bytes of a run are in host memory; 0 if they have to be read from there."""
        at = self.piece[row]
        return self._address[at] and int(self._address[at] + self._start[row] * self._itemsize[at])

    @torch.no_grad()
    def read(self, row: int, to: int) -> None:
        """Copies a whole run.

        Args:
            row: of the run.
            to: address.
        """
        count = self.byte_counts[row]
        if (address := self.address(row)) != 0:
            ctypes.memmove(to, address, count)
            return
        piece = self._pieces[self.piece[row]]
        part = piece.view
        box = slice(self._box[row], self._box[row + 1])
        for dim, (offset, size, first) in enumerate(
            zip(self._offsets[box], self._sizes[box], piece.offsets, strict=True)
        ):
            part = part.narrow(dim, offset - first, size)
        copies = self._devices.get(part.device)
        if copies is None:
            gathered = part.resolve_conj().resolve_neg().contiguous()
            ctypes.memmove(to, gathered.data_ptr(), count)
        else:
            copies.copy(part, memoryview((ctypes.c_char * count).from_address(to)).cast("B"))

    def finish(self) -> None:
        """Nothing is read any more."""
        for copies in self._devices.values():
            copies.finish()
        self._pieces = ()
