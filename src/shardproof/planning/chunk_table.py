"""The chunk table: every stored box of every tensor, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardproof.geometry import BoxTable

__all__ = ["ChunkTable"]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """Columns of one row a chunk, sorted by `tensor`.

    The boxes are ragged, since tensors differ in dimension: row ``i`` has its offsets in
    ``box_offsets[box_start[i]:box_start[i + 1]]`` and its sizes at the same place of ``box_sizes``.
    """

    tensor: NDArray[np.int64]
    """(n,) row of the manifest's tensor table."""
    file: NDArray[np.int64]
    """(n,) row of the manifest's file table."""
    byte_start: NDArray[np.int64]
    """(n,) first byte in the file, counted from the file's beginning."""
    byte_count: NDArray[np.int64]
    """(n,) bytes."""
    digest: NDArray[np.uint64]
    """(n, 2) high and low half of `shardproof.format.ChunkHasher` of the bytes."""
    box_start: NDArray[np.int64]
    """(n + 1,) row pointers."""
    box_offsets: NDArray[np.int64]
    """(m,) global offsets, elements."""
    box_sizes: NDArray[np.int64]
    """(m,) sizes, elements."""

    @property
    def boxes(self) -> BoxTable:
        """The box of each chunk."""
        return BoxTable(self.box_start, self.box_offsets, self.box_sizes)

    def __len__(self) -> int:
        return len(self.tensor)
