"""Boxes of different numbers of dimensions: ragged rows in flat columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardproof.engine.geometry.boxes import Boxes, Int64s, cut, stable_order


def row_pointers(counts: Int64s | Sequence[int]) -> Int64s:
    """(n + 1,) start of each of n ragged rows in its flat column, then the column's length.

    >>> row_pointers([2, 0, 3]).tolist()
    [0, 2, 2, 5]
    """
    pointers = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=pointers[1:])
    return pointers


def consecutive(first: Int64s, count: Int64s) -> Int64s:
    """The integers ``first[i]`` to ``first[i] + count[i]`` of all rows, one row after the other.

    >>> consecutive(np.array([7, 0]), np.array([2, 3])).tolist()
    [7, 8, 0, 1, 2]
    """
    pointers = row_pointers(count)
    return np.repeat(first - pointers[:-1], count) + np.arange(int(pointers[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class BoxTable:
    """``n`` boxes, each with its own number of dimensions.

    Box ``i`` has the offsets ``offsets[start[i]:start[i + 1]]`` and the same range of ``sizes``.
    `groups` and `of_groups` convert to and from `Boxes`.

    Example:
        >>> table = BoxTable.of([1, 0, 2], np.array([4, 0, 8]), np.array([9, 2, 3]))
        >>> len(table), table.ndim.tolist(), table.pair(2), table.volumes().tolist()
        (3, [1, 0, 2], ((0, 8), (2, 3)), [9, 1, 6])
    """

    start: Int64s
    """(n + 1,) row pointers."""
    offsets: Int64s
    """(m,) first index of each box along each of its dimensions, elements."""
    sizes: Int64s
    """(m,) size of each box along each of its dimensions, elements."""

    @staticmethod
    def of(ndim: Int64s | Sequence[int], offsets: Int64s, sizes: Int64s) -> BoxTable:
        """A table from the number of dimensions of each box.

        Args:
            ndim: (n,) dimensions of each box.
            offsets: flat offsets, box after box.
            sizes: flat sizes, box after box.
        """
        return BoxTable(row_pointers(ndim), offsets, sizes)

    @staticmethod
    def of_groups(ndim: Int64s | Sequence[int], groups: Iterable[tuple[Int64s, Boxes]]) -> BoxTable:
        """A table from groups of boxes, each group of one number of dimensions.

        Args:
            ndim: (n,) dimensions of each row.
            groups: rows, and the boxes of those rows. Each row is in exactly one group.

        >>> groups = [(np.array([1]), Boxes.whole((5,))), (np.array([0, 2]), Boxes.of(((), ()), ((), ())))]
        >>> BoxTable.of_groups([0, 1, 0], groups).volumes().tolist()
        [1, 5, 1]
        """
        start = row_pointers(ndim)
        offsets, sizes = np.empty((2, int(start[-1])), np.int64)
        for rows, boxes in groups:
            at = start[rows]
            for k in range(boxes.ndim):
                offsets[at], sizes[at] = boxes.offsets[:, k], boxes.sizes[:, k]
                at += 1
        return BoxTable(start, offsets, sizes)

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def ndim(self) -> Int64s:
        """(n,) dimensions of each box."""
        return self.start[1:] - self.start[:-1]

    def pair(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of one box, as tuples."""
        at = slice(int(self.start[row]), int(self.start[row + 1]))
        return tuple(self.offsets[at].tolist()), tuple(self.sizes[at].tolist())

    def boxes(self, rows: Int64s, ndim: int) -> Boxes:
        """Some rows as `Boxes`.

        `rows` are in any order, and have `ndim` dimensions each.

        >>> BoxTable.of([0, 1, 1], np.array([4, 6]), np.array([1, 2])).boxes(np.array([2, 1]), 1)
        Boxes([6:8] [4:5])
        """
        at = self.start[rows, None] + np.arange(ndim)
        return Boxes(self.offsets[at], self.sizes[at])

    def groups(self) -> Iterator[tuple[Int64s, Boxes]]:
        """Yields rows and their boxes, by ascending number of dimensions."""
        ndim = self.ndim
        for dimensions in np.unique(ndim).tolist():
            rows = np.flatnonzero(ndim == dimensions)
            yield rows, self.boxes(rows, dimensions)

    def take(self, rows: Int64s) -> BoxTable:
        """The boxes of these rows, in the order of the argument.

        >>> boxes = BoxTable.of([1, 2], np.array([0, 4, 5]), np.array([9, 1, 2]))
        >>> boxes.take(np.array([1, 0])).offsets.tolist()
        [4, 5, 0]
        """
        ndim = self.ndim[rows]
        at = consecutive(self.start[rows], ndim)
        return BoxTable.of(ndim, self.offsets[at], self.sizes[at])

    def between(self, first: int, stop: int) -> BoxTable:
        """The boxes of the rows `first` to `stop`. The columns are views, not copies.

        >>> boxes = BoxTable.of([1, 2], np.array([0, 4, 5]), np.array([9, 1, 2]))
        >>> boxes.between(1, 2).pair(0)
        ((4, 5), (1, 2))
        """
        begin, end = int(self.start[first]), int(self.start[stop])
        return BoxTable(self.start[first : stop + 1] - begin, self.offsets[begin:end], self.sizes[begin:end])

    def volumes(self) -> Int64s:
        """(n,) elements of each box; 1 for a box of no dimensions.

        Raises:
            OverflowError: a box has 2**63 - 1 elements or more.
        """
        volumes = np.empty(len(self), np.int64)
        for rows, boxes in self.groups():
            volumes[rows] = boxes.volumes()
        return volumes

    def cut(self, max_elements: Int64s) -> tuple[BoxTable, Int64s, Int64s]:
        """Cuts each box into parts of limited size, as `geometry.cut` does.

        Args:
            max_elements: (n,) maximum number of elements of a part of each box.

        Returns:
            The parts, by box, then in row-major order of the box; (k,) row of each part's box; (k,) first
            element of each part in the row-major order of its box.

        >>> boxes = BoxTable.of([0, 2], np.array([4, 0]), np.array([2, 3]))
        >>> parts, box, first = boxes.cut(np.array([9, 3]))
        >>> parts.offsets.tolist(), box.tolist(), first.tolist()
        ([4, 0, 5, 0], [0, 1, 1], [0, 0, 3])
        """
        if bool((self.volumes() <= max_elements).all()):
            return self, np.arange(len(self)), np.zeros(len(self), np.int64)
        none = np.zeros(0, np.int64)
        offsets, sizes, parents = [none], [none], [none]
        for rows, boxes in self.groups():
            parts, parent = cut(boxes, max_elements[rows])
            offsets.append(parts.offsets.reshape(-1))
            sizes.append(parts.sizes.reshape(-1))
            parents.append(rows[parent])
        of = np.concatenate(parents)
        table = BoxTable.of(self.ndim[of], np.concatenate(offsets), np.concatenate(sizes))
        order = stable_order(of)
        table, of = table.take(order), of[order]
        before = row_pointers(table.volumes())
        return table, of, (before[:-1] - before[np.searchsorted(of, of)])
