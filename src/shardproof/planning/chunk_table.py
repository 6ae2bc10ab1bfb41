"""The chunk table: all stored chunks of a checkpoint, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardproof.geometry import BoxTable

__all__ = ["ChunkTable"]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """A row for each chunk, sorted by `tensor`. The last three columns form `boxes`."""

    tensor: NDArray[np.int64]
    """(n,) row of the chunk's tensor in the manifest."""
    file: NDArray[np.int64]
    """(n,) row of the chunk's file in the manifest."""
    byte_start: NDArray[np.int64]
    """(n,) first byte of the chunk, counted from the start of the file."""
    byte_count: NDArray[np.int64]
    """(n,) size of the chunk in bytes."""
    digest: NDArray[np.uint64]
    """(n, 2) high and low half of the chunk's digest (`shardproof.format.ChunkHasher`)."""
    box_start: NDArray[np.int64]
    """(n + 1,) row pointers."""
    box_offsets: NDArray[np.int64]
    """(m,) global offsets of the chunks, elements."""
    box_sizes: NDArray[np.int64]
    """(m,) sizes of the chunks, elements."""

    @property
    def boxes(self) -> BoxTable:
        """The box of each chunk."""
        return BoxTable(self.box_start, self.box_offsets, self.box_sizes)

    def __len__(self) -> int:
        return len(self.tensor)
