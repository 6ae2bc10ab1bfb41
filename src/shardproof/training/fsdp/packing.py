"""Packs the parameters of a unit into flat buffers: pure arithmetic, the same on every rank.

A flat buffer is cut into equal ranges, one for each rank. No cut may fall inside a row of a parameter (an
index of its first dimension). This holds if the parameter starts at a multiple of its row size, and the
ranges are multiples of it, too. So each buffer has a *row unit*, the least common multiple of the row sizes
in it. A parameter whose row size would make the row unit too large gets another buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod

WASTE = 16
"""Row sizes share a buffer if the padding for their common multiple is below 1 / WASTE of all elements."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A flat buffer of `ranks` ranges of `shard` elements, and the parameters in it.

    >>> packing = pack([(5, 4), (3,)], 2, 4)[0]
    >>> packing
    Packing(ranks=2, shard=12, members=(0, 1), shapes=((5, 4), (3,)), starts=(0, 20))
    >>> packing.rows(0, 0), packing.rows(0, 1), packing.rows(1, 0)
    ((0, 3), (3, 5), (0, 0))
    """

    ranks: int
    shard: int
    members: tuple[int, ...]
    """Indices of the packed parameters in the argument of `pack`."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each member."""
    starts: tuple[int, ...]
    """Element of the buffer at which each member starts."""

    @property
    def size(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.ranks * self.shard

    def rows(self, member: int, rank: int) -> tuple[int, int]:
        """The rows [first, stop) of a member in a rank's range; (0, 0) if none."""
        row = prod(self.shapes[member][1:])
        count, start = self.shapes[member][0], self.starts[member]
        if not row or not count:
            return 0, 0
        first = min(max(rank * self.shard - start, 0) // row, count)
        stop = min(max((rank + 1) * self.shard - start, 0) // row, count)
        return (first, stop) if first < stop else (0, 0)

    def elements(self, member: int, rank: int) -> tuple[int, int]:
        """The same rows as a range of elements, counted from the start of the rank's range."""
        first, stop = self.rows(member, rank)
        if first == stop:
            return 0, 0
        row, start = prod(self.shapes[member][1:]), self.starts[member] - rank * self.shard
        return start + first * row, start + stop * row


def pack(shapes: Sequence[tuple[int, ...]], ranks: int, alignment: int = 16) -> list[Packing]:
    """Packs parameters into flat buffers whose ranges, one for each rank, cut no row.

    Args:
        shapes: shapes of the parameters, each of at least one dimension.
        ranks: number of ranges of each buffer.
        alignment: a parameter starts at a multiple of so many elements, unless that costs too much padding.

    Returns:
        The buffers. At the end of a buffer, the padding is below `ranks` times its row unit. Before each
        member, it is below the greatest of the member's row size, 64 times the alignment, and a sixteenth of
        its elements.

    >>> [packing.members for packing in pack([(3, 7), (3, 5), (6, 14)], 4)]
    [(2, 0), (1,)]
    """
    by_row: dict[int, list[int]] = {}
    for index, shape in enumerate(shapes):
        by_row.setdefault(prod(shape[1:]) or 1, []).append(index)
    total = sum(map(prod, shapes))
    classes: list[tuple[int, list[int]]] = []
    for row in sorted(by_row, reverse=True):
        for index, (unit, members) in enumerate(classes):
            joint = lcm(unit, row)
            if joint == unit or ranks * joint * WASTE <= total:
                classes[index] = (joint, members + by_row[row])
                break
        else:
            classes.append((row, by_row[row]))
    return [_place(shapes, members, unit, ranks, alignment) for unit, members in classes]


def _place(
    shapes: Sequence[tuple[int, ...]], members: list[int], unit: int, ranks: int, alignment: int
) -> Packing:
    starts: list[int] = []
    end = 0
    for index in members:
        row, size = prod(shapes[index][1:]) or 1, prod(shapes[index])
        step = lcm(row, alignment)
        if step > max(row, 64 * alignment, size // 16):
            step = row
        starts.append(-(-end // step) * step)
        end = starts[-1] + size
    shard = max(-(-end // (ranks * unit)), 1) * unit
    return Packing(ranks, shard, tuple(members), tuple(shapes[index] for index in members), tuple(starts))
