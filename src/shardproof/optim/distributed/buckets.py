"""Where parameters lie in flat buffers: arithmetic only, the same on every rank.

Parameters follow each other in a bucket. A bucket is cut into as many equal ranges as there are ranks,
without regard for where parameters begin or rows end (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Bucket", "Span", "pack"]


@dataclass(frozen=True, slots=True)
class Span:
    """The elements [offset, offset + size) of a bucket: one parameter, in row-major order."""

    parameter: int
    offset: int
    size: int

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Bucket:
    """Spans in rising order, with padding between and behind, cut into one range for each rank.

    >>> (bucket,) = pack([(0, 5), (1, 6)], limit=100, ranks=3, align=2)
    >>> bucket.size, bucket.shard, bucket.spans[1]
    (12, 4, Span(parameter=1, offset=6, size=6))
    >>> [bucket.part(bucket.spans[1], rank) for rank in range(3)]
    [(0, 0), (0, 2), (2, 6)]
    """

    spans: tuple[Span, ...]
    size: int
    """Elements, padding included: a multiple of the number of ranks."""
    ranks: int

    @property
    def shard(self) -> int:
        """Elements of one rank's range."""
        return self.size // self.ranks

    def part(self, span: Span, rank: int) -> tuple[int, int]:
        """The range [start, stop) of a parameter's elements that a rank owns; (0, 0) where it owns none."""
        start = max(span.offset, rank * self.shard) - span.offset
        stop = min(span.stop, (rank + 1) * self.shard) - span.offset
        return (start, stop) if start < stop else (0, 0)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The ranges [start, stop) that belong to no parameter."""
        at = 0
        for span in self.spans:
            if at < span.offset:
                yield at, span.offset
            at = span.stop
        if at < self.size:
            yield at, self.size


def pack(sizes: Iterable[tuple[int, int]], *, limit: int, ranks: int, align: int) -> list[Bucket]:
    """Parameters in buckets, in the order given.

    Args:
        sizes: parameter and its number of elements.
        limit: elements from which on a bucket takes no more; one larger parameter has a bucket to itself.
        ranks: ranges that each bucket is cut into.
        align: elements that every parameter and every range begin at a multiple of.
    """
    buckets: list[Bucket] = []
    spans: list[Span] = []
    end = 0

    def close() -> None:
        unit = ranks * align
        buckets.append(Bucket(tuple(spans), -(-end // unit) * unit, ranks))

    for parameter, size in sizes:
        start = -(-end // align) * align
        if spans and start + size > limit:
            close()
            spans, start = [], 0
        spans.append(Span(parameter, start, size))
        end = start + size
    if spans:
        close()
    return buckets
