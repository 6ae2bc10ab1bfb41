"""The chunk table: all stored chunks of a checkpoint, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardproof.engine.geometry import BoxTable, stable_order


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
    """(n, 2) high and low half of the chunk's digest (`shardproof.engine.format.ChunkHasher`)."""
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


def chunk_table(
    tensor: np.ndarray[Any, Any],
    file: np.ndarray[Any, Any],
    byte_start: np.ndarray[Any, Any],
    byte_count: np.ndarray[Any, Any],
    digest: np.ndarray[Any, Any],
    box_start: np.ndarray[Any, Any],
    box_offsets: np.ndarray[Any, Any],
    box_sizes: np.ndarray[Any, Any],
) -> ChunkTable:
    """Builds a `ChunkTable`. Sorts the rows by tensor; rows of one tensor keep their order."""
    order = stable_order(tensor)
    boxes = BoxTable(box_start, box_offsets, box_sizes).take(order)
    box = boxes.start, boxes.offsets, boxes.sizes
    return ChunkTable(tensor[order], file[order], byte_start[order], byte_count[order], digest[order], *box)
