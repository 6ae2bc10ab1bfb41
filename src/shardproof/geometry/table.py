"""Boxes of tensors that differ in their number of dimensions, in flat columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardproof.geometry.boxes import Boxes, stable_order
from shardproof.geometry.cut import cut

__all__ = ["BoxTable"]

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BoxTable:
    """n boxes, none of them empty; box i has its entries at ``start[i]`` to ``start[i + 1]``."""

    start: _Ints
    """(n + 1,) row pointers."""
    offsets: _Ints
    sizes: _Ints

    @staticmethod
    def of(ndim: _Ints, offsets: _Ints, sizes: _Ints) -> BoxTable:
        """From the number of dimensions of each."""
        return BoxTable(np.append(0, np.cumsum(ndim)), offsets, sizes)

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def ndim(self) -> _Ints:
        """(n,) dimensions of each."""
        return self.start[1:] - self.start[:-1]

    def pair(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of one box.

        >>> BoxTable.of(np.array([0, 2]), np.array([4, 5]), np.array([1, 2])).pair(1)
        ((4, 5), (1, 2))
        """
        at = slice(int(self.start[row]), int(self.start[row + 1]))
        return tuple(self.offsets[at].tolist()), tuple(self.sizes[at].tolist())

    def take(self, rows: _Ints) -> BoxTable:
        """The boxes of these rows, in their order.

        >>> boxes = BoxTable.of(np.array([1, 2]), np.array([0, 4, 5]), np.array([9, 1, 2]))
        >>> boxes.take(np.array([1, 0])).offsets.tolist()
        [4, 5, 0]
        """
        ndim = self.ndim[rows]
        start = np.append(0, np.cumsum(ndim))
        at = np.repeat(self.start[rows] - start[:-1], ndim) + np.arange(int(start[-1]))
        return BoxTable(start, self.offsets[at], self.sizes[at])

    def volumes(self) -> _Ints:
        """(n,) elements of each.

        >>> BoxTable.of(np.array([0, 2]), np.array([4, 5]), np.array([3, 2])).volumes().tolist()
        [1, 6]
        """
        volumes = np.empty(len(self), np.int64)
        for rows, boxes in self._by_ndim():
            volumes[rows] = boxes.volumes()
        return volumes

    def cut(self, max_elements: _Ints) -> tuple[BoxTable, _Ints, _Ints]:
        """Cuts them as `geometry.cut` does.

        Args:
            max_elements: (n,) the limit of each.

        Returns:
            The parts, by box and in row-major order within it; of each part the row of the box; and its first
            element in the row-major order of the box.

        >>> boxes = BoxTable.of(np.array([0, 2]), np.array([4, 0]), np.array([2, 3]))
        >>> parts, box, first = boxes.cut(np.array([9, 3]))
        >>> parts.offsets.tolist(), box.tolist(), first.tolist()
        ([4, 0, 5, 0], [0, 1, 1], [0, 0, 3])
        """
        if bool((self.volumes() <= max_elements).all()):
            return self, np.arange(len(self)), np.zeros(len(self), np.int64)
        none = np.zeros(0, np.int64)
        offsets, sizes, parents = [none], [none], [none]
        for rows, boxes in self._by_ndim():
            parts, parent = cut(boxes, max_elements[rows])
            offsets.append(parts.offsets.reshape(-1))
            sizes.append(parts.sizes.reshape(-1))
            parents.append(rows[parent])
        of = np.concatenate(parents)
        mixed = BoxTable.of(self.ndim[of], np.concatenate(offsets), np.concatenate(sizes))
        order = stable_order(of)
        mixed, of = mixed.take(order), of[order]
        volume = mixed.volumes()
        before = np.cumsum(volume) - volume
        return mixed, of, before - before[np.searchsorted(of, of)]

    def _by_ndim(self) -> Iterator[tuple[_Ints, Boxes]]:
        ndim = self.ndim
        for dimensions in np.unique(ndim).tolist():
            rows = np.flatnonzero(ndim == dimensions)
            at = self.start[rows, None] + np.arange(dimensions)
            yield rows, Boxes(self.offsets[at], self.sizes[at])
