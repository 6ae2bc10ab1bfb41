"""Whether ranks of one node read the same bytes, from a few samples that each rank posts.

What two ranks of a node read past the page cache is read from the storage twice; through the cache, once. As
when data parallel replicas share a node. A rank does not know what the others read, and to post all of it is
too much for thousands of ranks. So each posts at most `SAMPLES` of its chunks: those whose numbers, scrambled
in the same way on all ranks, are the smallest (a bottom-k sketch, Cohen and Kaplan, 2007). Of the chunks
below the least bound of the node's ranks all are posted that are read, so the part that is read twice can be
counted among them.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.planning import LARGE_BYTES

__all__ = ["SAMPLES", "Sketch", "reads_twice"]

SAMPLES = 32
_SHARE = 8
"""Ranks read the same if they read more than an eighth of what there is again."""
_SCRAMBLE = np.uint64(0x9E3779B97F4A7C15)
"""An odd number: the products of distinct numbers with it are distinct."""


class Sketch(msgspec.Struct, frozen=True, array_like=True):
    """What one rank reads, as samples."""

    node: str
    """Name of the machine."""
    samples: tuple[tuple[int, int, int], ...]
    """Scrambled number of a chunk, bytes of it that the rank reads, and all its bytes; ascending."""
    complete: bool
    """Whether these are all chunks that it reads."""

    @staticmethod
    def of(rows: NDArray[np.int64], read: NDArray[np.int64], count: NDArray[np.int64]) -> Sketch:
        """The sketch of this rank.

        Args:
            rows: (n,) distinct rows of the chunk table.
            read: (n,) bytes that are read of each.
            count: (n,) bytes of each.
        """
        if (large := count >= LARGE_BYTES).any():  # there may be many small ones, which take no time
            rows, read, count = rows[large], read[large], count[large]
        numbers = (rows.astype(np.uint64) + np.uint64(1)) * _SCRAMBLE
        least = np.argsort(numbers)[:SAMPLES]
        columns = (numbers[least].tolist(), read[least].tolist(), count[least].tolist())
        return Sketch(socket.gethostname(), tuple(zip(*columns, strict=True)), len(rows) <= SAMPLES)


def reads_twice(sketches: Iterable[Sketch]) -> bool:
    """Whether ranks of some node read much of the same.

    >>> rows, whole = np.arange(4), np.full(4, 8)
    >>> one, other = (Sketch.of(part, whole[part], whole[part]) for part in (rows[:2], rows[2:]))
    >>> reads_twice([one, other]), reads_twice([one, one])
    (False, True)
    """
    nodes: defaultdict[str, list[Sketch]] = defaultdict(list)
    for sketch in sketches:
        nodes[sketch.node].append(sketch)
    return any(map(_reads_twice, nodes.values()))


def _reads_twice(ranks: Sequence[Sketch]) -> bool:
    """Whether ranks of one node do."""
    bound = min((one.samples[-1][0] for one in ranks if not one.complete), default=1 << 64)
    read: defaultdict[int, int] = defaultdict(int)
    count: dict[int, int] = {}
    for one in ranks:
        for number, nbytes, whole in one.samples:
            if number <= bound:
                read[number] += nbytes
                count[number] = whole
    again = sum(max(0, nbytes - count[number]) for number, nbytes in read.items())
    return again * _SHARE > sum(count.values())
