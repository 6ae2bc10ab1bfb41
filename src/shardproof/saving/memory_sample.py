"""A sample of the memory of each tensor: four words, compared to detect writes.

torch counts only writes by its own operations on the tensor itself. It does not count writes through
``.data``, through another tensor of the same storage, from numpy, from another process, or by a replayed CUDA
graph. Most of these writes change a word of the sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from shardproof._utils.memcpy import read_words
from shardproof.saving.device_copy import DeviceCopies
from shardproof.state import Piece

__all__ = ["MemorySample"]

_WORDS = 4
"""Samples of a tensor: words of 8 bytes in contiguous host memory, elements in other memory."""

_NBYTES = attrgetter("nbytes")
_Ints = NDArray[np.int64]


class MemorySample:
    """Samples of the memory of n pieces, from the time of construction.

    The samples have equal distances, from the first byte of a piece to its last. A write that misses all
    samples is not detected, for example a write to a few rows of an embedding.

    Args:
        pieces: pieces with at least one element each, on any device.
        pointers: address of each piece.

    >>> one, two = torch.zeros(100), torch.zeros(100)
    >>> pieces = [Piece.of(tensor, (0,), (100,)) for tensor in (one, two)]
    >>> sample = MemorySample(pieces, [piece.address for piece in pieces])
    >>> sample.changed({})
    []
    >>> _ = two.data.add_(1)
    >>> sample.changed({})
    [1]
    """

    def __init__(self, pieces: Sequence[Piece], pointers: Sequence[int]) -> None:
        rows = range(len(pieces))
        scattered = [row for row in rows if not pieces[row].is_plain]
        on_device = defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
        for row in scattered:
            if not (view := pieces[row].view).is_cpu:
                on_device[view.device, view.dtype].append(row)
        self._device = [_DeviceSample.of(of_kind, pieces) for of_kind in on_device.values()]
        host = [row for row in rows if pieces[row].view.is_cpu] if on_device else rows
        self._host = _HostSample([pieces[row] for row in host], [pointers[row] for row in host])
        self._host_rows = np.array(host, np.int64)

    def changed(self, copies: Mapping[torch.device, DeviceCopies]) -> list[int]:
        """Reads the samples again.

        Args:
            copies: copies for each device of the tensors.

        Returns:
            Rows of the pieces whose samples or addresses differ, ascending.
        """
        rows = self._host_rows[self._host.changed()].tolist()
        for sample in self._device:
            rows += sample.changed(copies[sample.parts[0].device])
        return sorted(rows)


class _HostSample:
    """Samples of tensors in host memory."""

    def __init__(self, pieces: Sequence[Piece], pointers: Sequence[int]) -> None:
        self._views = views = [piece.view for piece in pieces]
        self._pointers = pointers
        starts = np.array(pointers, np.int64)
        stops = starts + np.fromiter(map(_NBYTES, views), np.int64, len(views))
        row = np.arange(len(views))
        scattered = np.flatnonzero([not piece.is_plain for piece in pieces])
        if len(scattered):
            starts, stops, row = _with_elements(views, starts, stops, scattered)
        self._row = row
        """(m,) row of the piece of each byte range."""
        first, last = starts & ~7, (stops - 1) & ~7
        self._addresses = np.linspace(first, last, _WORDS, axis=1, dtype=np.int64) & ~7
        """(m, _WORDS) addresses of the sampled words."""
        self._partial = np.flatnonzero((starts | stops) & 7)
        """The ranges whose first or last word is only partly in the tensor."""
        self._mask = _mask(self._addresses[self._partial], starts[self._partial], stops[self._partial])
        """Masks for the words of these ranges: the bits that belong to the tensor."""
        self._words = self._read()

    def changed(self) -> NDArray[np.bool_]:
        """(n,) True for each piece whose address or sampled words differ.

        If an address differs, no words are read.
        """
        pointers = list(map(torch.Tensor.data_ptr, self._views))
        moved: NDArray[np.bool_] = np.array(pointers, np.int64) != np.array(self._pointers, np.int64)
        if not moved.any():  # memory of a moved tensor may be freed
            differ = np.any(self._read() != self._words, axis=1)
            moved[self._row[differ]] = True
        return moved

    def _read(self) -> NDArray[np.uint64]:
        words = read_words(self._addresses)
        words[self._partial] &= self._mask
        return words


def _mask(addresses: _Ints, starts: _Ints, stops: _Ints) -> NDArray[np.uint64]:
    """Masks of the bytes in [start, stop) of little-endian words."""
    ones = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
    before = np.clip(starts[:, None] - addresses, 0, 8).astype(np.uint64) * np.uint64(8)
    behind = np.clip(addresses + 8 - stops[:, None], 0, 8).astype(np.uint64) * np.uint64(8)
    mask: NDArray[np.uint64] = (ones << before) & (ones >> behind)
    return mask


def _with_elements(
    views: Sequence[torch.Tensor], starts: _Ints, stops: _Ints, scattered: _Ints
) -> tuple[_Ints, _Ints, _Ints]:
    """Byte ranges; a scattered tensor has one range for each of its sampled elements."""
    single = np.ones(len(views), bool)
    single[scattered] = False
    begins, sizes, rows = [starts[single]], [(stops - starts)[single]], [np.flatnonzero(single)]
    for row in scattered.tolist():
        view = views[row]
        count, step = _diagonal(view)
        at = starts[row] + np.arange(count) * step * view.element_size()
        begins.append(at)
        sizes.append(np.full(count, view.element_size()))
        rows.append(np.full(count, row))
    starts = np.concatenate(begins)
    return starts, starts + np.concatenate(sizes), np.concatenate(rows)


def _diagonal(view: torch.Tensor) -> tuple[int, int]:
    """The number of elements to sample and their distance in memory, in elements.

    The samples lie on a diagonal of the box, so they are within the tensor for any strides.
    """
    count = min(_WORDS, max(view.shape, default=1))
    between = max(count - 1, 1)
    steps = zip(view.shape, view.stride(), strict=True)
    return count, sum((size - 1) // between * stride for size, stride in steps)


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceSample:
    """Samples of tensors of one dtype on one device; they stay on the device until `changed`."""

    rows: Sequence[int]
    parts: Sequence[torch.Tensor]
    """1-D, views of the tensors' memory."""
    words: torch.Tensor

    @staticmethod
    def of(rows: Sequence[int], pieces: Sequence[Piece]) -> _DeviceSample:
        parts = []
        for row in rows:
            view = pieces[row].view.detach()
            count, step = _diagonal(view)
            if view.is_contiguous():
                count = min(_WORDS, view.numel())
                step = (view.numel() - 1) // max(count - 1, 1)
            parts.append(view.as_strided((count,), (step,), view.storage_offset()))
        return _DeviceSample(rows, parts, torch.cat(parts))

    def changed(self, copies: DeviceCopies) -> list[int]:
        now, before = (copies.gathered(parts).view(torch.uint8) for parts in (self.parts, [self.words]))
        differ = (now != before).view(-1, self.words.element_size()).any(dim=1).numpy()
        row = np.repeat(np.array(self.rows), [len(part) for part in self.parts])
        return sorted(set(row[differ].tolist()))
