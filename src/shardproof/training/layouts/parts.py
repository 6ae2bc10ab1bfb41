"""Parts of one dimension of a weight, their segments on each rank, and declarations of them on modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TypeAlias

import numpy as np
import torch

from shardproof.engine.geometry import Boxes, IndexMap
from shardproof.engine.state import LAYOUTS, Layout, declare, inside, is_dtensor
from shardproof.errors import StructureError

Segments: TypeAlias = Sequence[tuple[int, int]]
"""Start and size of each segment in the model's dimension, in memory order without gaps."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a fused dimension, and its division over tensor parallel ranks.

    Args:
        size: number of elements in the whole model.
        pieces: number of equal pieces. Default: the number of ranks. With fewer pieces, neighbouring ranks
            hold copies of a piece; with 1, all ranks hold the whole part.
        sizes: instead of `pieces`, the number of elements on each rank, for an uneven division.

    Raises:
        ValueError: the pieces do not divide the size, or the sizes do not add up to it.

    >>> Part(6).segment(1, 3), Part(6, pieces=2).segment(3, 4), Part(5, sizes=(3, 2)).segment(1, 2)
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
                f"a part of {self.size} elements: the sizes {list(self.sizes)} add up to {sum(self.sizes)}. "
                "Give sizes that add up to the size, without pieces"
            )

    def segment(self, rank: int, ranks: int) -> tuple[int, int]:
        """Start and size of a rank's segment of the part."""
        if self.sizes is not None:
            if len(self.sizes) != ranks:
                raise ValueError(f"a part has sizes for {len(self.sizes)} ranks, expected {ranks}")
            return sum(self.sizes[:rank]), self.sizes[rank]
        pieces = ranks if self.pieces is None else self.pieces
        if pieces < 1 or ranks % pieces:
            raise ValueError(f"{ranks} ranks cannot hold copies of {pieces} pieces evenly")
        if self.size % pieces:
            raise ValueError(f"a part of {self.size} cannot be cut into {pieces} equal pieces")
        size = self.size // pieces
        return rank * pieces // ranks * size, size


def blocks_of(parts: Sequence[int | Part], ranks: int) -> list[list[tuple[int, int]]]:
    """The segments of each rank, if the model's dimension is the concatenation of the parts.

    >>> blocks_of((4, 4), 2)
    [[(0, 2), (4, 2)], [(2, 2), (6, 2)]]
    """
    if ranks < 1:
        raise ValueError(f"expected at least 1 tensor parallel rank, found {ranks}")
    whole = [part if isinstance(part, Part) else Part(part) for part in parts]
    starts = [0, *accumulate(part.size for part in whole)]
    blocks = []
    for rank in range(ranks):
        segments = [part.segment(rank, ranks) for part in whole]
        blocks.append([(base + start, size) for base, (start, size) in zip(starts, segments, strict=False)])
    return blocks


def check_rank(rank: int, ranks: int) -> None:
    """Raises if there is no rank of this number."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks} tensor parallel ranks")


def index_map_of(axes: Sequence[tuple[Segments, int]], local_shape: Sequence[int]) -> IndexMap:
    """The index map of a local array whose dimensions consist of segments of the model's dimensions.

    Args:
        axes: for each dimension, its segments and the size of the model's dimension.
        local_shape: shape of the local array. Elements after the segments are padding.

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


class Owned:
    """A tensor and the module that owns it.

    Raises:
        StructureError: there is no such tensor.
    """

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        *path, self.name = name.split(".")
        self.where = f"{type(module).__name__}.{name}"
        self.module = inside(module)
        for segment in path:
            below = self.module._modules.get(segment)
            if below is None:
                raise StructureError(
                    f"{self.where}: there is no module {segment!r}. Expected one of {[*self.module._modules]}"
                )
            self.module = inside(below)
        tensor = self.module._parameters.get(self.name, self.module._buffers.get(self.name))
        if tensor is None:
            raise StructureError(
                f"{self.where}: there is no such parameter or buffer. Expected one of "
                f"{[*self.module._parameters, *self.module._buffers]}"
            )
        self.tensor = tensor

    @property
    def layout(self) -> Layout | None:
        """The declared layout; None if there is none."""
        layout: Layout | None = self.module.__dict__.get(LAYOUTS, {}).get(self.name)
        return layout

    def declare(self, layout: Layout) -> None:
        """Declares the layout. Raises StructureError if the tensor already has one."""
        if self.layout is not None and not self.layout.is_whole:
            raise StructureError(f"{self.where} already has a declared layout: {self.layout}")
        declare(self.module, self.name, layout)

    def axis(self, dim: int) -> int:
        """A dimension as a number from 0 on. Raises StructureError if the tensor does not have it."""
        shape = self.tensor.shape
        if not -len(shape) <= dim < len(shape):
            raise StructureError(f"{self.where} has shape {list(shape)} and no dimension {dim}")
        return dim % len(shape)

    def declare_axis(self, axis: int, segments: Segments, size: int) -> None:
        """Declares that an axis has segments of the model's axis of that size. Other axes are the model's."""
        axes: list[tuple[Segments, int]] = [([(0, length)], length) for length in self.tensor.shape]
        axes[axis] = (segments, size)
        self.declare(Layout.of(index_map_of(axes, self.tensor.shape)))

    def segments_of(self, length: int, blocks: Sequence[Segments], rank: int) -> Segments:
        """The segments of the model's dimension that a dimension of the tensor contains, in order.

        A plain tensor contains the block of its rank. So does a DTensor that only data parallelism shards. A
        DTensor that tensor parallelism also shards contains the blocks of all ranks. `blocks` has one block
        for each tensor parallel rank.
        """
        check_rank(rank, len(blocks))
        every = [segment for block in blocks for segment in block]
        of_rank, of_all = (sum(size for _, size in block) for block in (blocks[rank], every))
        if is_dtensor(self.tensor) and length == of_all:
            return every
        if length == of_rank:
            return blocks[rank]
        expected = f"{of_rank} for tensor parallel rank {rank} of {len(blocks)}"
        if is_dtensor(self.tensor):
            expected += f", or {of_all} for all ranks"
        raise StructureError(
            f"{self.where} has shape {list(self.tensor.shape)}, with {length} elements along the fused "
            f"dimension. Parts of these sizes need {expected}",
            key=self.where,
        )


def declare_along(
    module: torch.nn.Module, name: str, dim: int, blocks: Sequence[Segments], size: int, rank: int
) -> None:
    """Declares that dimension `dim` of a tensor has the block of its rank in the model's dimension of `size`.

    The other dimensions are equal to the model's.

    Raises:
        StructureError: there is no such tensor, its sizes differ, or its layout is already declared.
    """
    item = Owned(module, name)
    axis = item.axis(dim)
    item.declare_axis(axis, item.segments_of(item.tensor.shape[axis], blocks, rank), size)
