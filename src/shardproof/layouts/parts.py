"""One dimension of a weight as parts, each cut over the tensor parallel ranks: which rows are where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TypeAlias

import numpy as np

from shardproof.geometry import Boxes, IndexMap

__all__ = ["Part", "Segments", "blocks_of", "check_rank", "index_map_of", "length_of"]

Segments: TypeAlias = Sequence[tuple[int, int]]
"""Start and size in the model's dimension, in the order in which they lie in memory, without gaps."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a fused dimension, and how tensor parallel ranks share it.

    Args:
        size: in the whole model, in elements.
        pieces: into how many equal pieces it is cut, as many as ranks by default. With fewer, neighbouring
            ranks hold copies of a piece; with 1, all hold the whole part.
        sizes: instead of pieces, what each rank holds, where that is uneven.

    Raises:
        ValueError: the pieces do not divide the size, or the sizes do not make it.

    >>> Part(6).held(1, 3), Part(6, pieces=2).held(3, 4), Part(5, sizes=(3, 2)).held(1, 2)
    ((2, 2), (3, 3), (3, 2))
    """

    size: int
    pieces: int | None = None
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"a part has a size of {self.size}")
        if self.sizes is not None and (self.pieces is not None or sum(self.sizes) != self.size):
            raise ValueError(
                f"a part of {self.size} is shared by ranks as {list(self.sizes)}, which makes "
                f"{sum(self.sizes)}; sizes say it all, without pieces"
            )

    def held(self, rank: int, ranks: int) -> tuple[int, int]:
        """Start and size of what a rank holds."""
        if self.sizes is not None:
            if len(self.sizes) != ranks:
                raise ValueError(f"a part says the sizes of {len(self.sizes)} ranks, there are {ranks}")
            return sum(self.sizes[:rank]), self.sizes[rank]
        pieces = ranks if self.pieces is None else self.pieces
        if pieces < 1 or ranks % pieces:
            raise ValueError(f"{ranks} ranks cannot hold copies of {pieces} pieces evenly")
        if self.size % pieces:
            raise ValueError(f"a part of {self.size} cannot be cut into {pieces} equal pieces")
        size = self.size // pieces
        return rank * pieces // ranks * size, size


def blocks_of(parts: Sequence[int | Part], ranks: int) -> list[list[tuple[int, int]]]:
    """What each rank holds of parts that follow each other in the model, part after part.

    >>> blocks_of((4, 4), 2)
    [[(0, 2), (4, 2)], [(2, 2), (6, 2)]]
    """
    if ranks < 1:
        raise ValueError(f"there are {ranks} tensor parallel ranks")
    whole = [part if isinstance(part, Part) else Part(part) for part in parts]
    starts = [0, *accumulate(part.size for part in whole)]
    blocks = []
    for rank in range(ranks):
        held = [part.held(rank, ranks) for part in whole]
        blocks.append([(base + start, size) for base, (start, size) in zip(starts, held, strict=False)])
    return blocks


def check_rank(rank: int, ranks: int) -> None:
    """Refuses a rank that is none of `ranks`."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is none of {ranks} tensor parallel ranks")


def length_of(segments: Segments) -> int:
    """Elements that segments take in memory."""
    return sum(size for _, size in segments)


def index_map_of(axes: Sequence[tuple[Segments, int]], local_shape: Sequence[int]) -> IndexMap:
    """A local array whose every dimension is made of segments of the model's.

    Args:
        axes: for each dimension, its segments and the size of the model's.
        local_shape: of the local array. What follows the segments is padding.

    >>> index_map_of([([(0, 2), (4, 2)], 8), ([(0, 3)], 3)], (4, 3)).placed
    Boxes([0:2, 0:3] [4:6, 0:3])
    """
    columns = []
    for segments, _ in axes:
        ends = accumulate(size for _, size in segments)
        columns.append([(end - size, start, size) for (start, size), end in zip(segments, ends, strict=True)])
    boxes = np.array(list(product(*columns)), np.int64).reshape(-1, len(axes), 3)
    boxes = boxes[(boxes[:, :, 2] > 0).all(axis=1)]
    return IndexMap(
        tuple(local_shape),
        tuple(size for _, size in axes),
        Boxes(boxes[:, :, 0].copy(), boxes[:, :, 2].copy()),
        boxes[:, :, 1].copy(),
    )
