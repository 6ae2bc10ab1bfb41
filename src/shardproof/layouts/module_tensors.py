"""Finds tensors of modules by dotted name, and declares layouts of one of their dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardproof.errors import StructureError
from shardproof.layouts.parts import Segments, check_rank, index_map_of
from shardproof.state import LAYOUTS, Layout, declare, inside, is_dtensor

__all__ = ["Owned", "declare_along"]


class Owned:
    """A tensor and the module that owns it.

    Args:
        module: the module that owns the tensor, or one above it.
        name: dotted name of the tensor in `module`.

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
        DTensor that tensor parallelism also shards contains the blocks of all ranks.

        Args:
            length: size of the dimension.
            blocks: the block of each tensor parallel rank.
            rank: tensor parallel rank.

        Raises:
            StructureError: the length is neither that of the rank's block nor that of all blocks.
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
    """Declares that one dimension of a tensor consists of blocks. The others are equal to the model's.

    Args:
        module: the module that owns the tensor, or one above it.
        name: dotted name of the tensor in `module`.
        dim: the dimension; from the end if negative.
        blocks: the block of each tensor parallel rank.
        size: size of the dimension in the model.
        rank: tensor parallel rank.

    Raises:
        StructureError: there is no such tensor, its sizes differ, or its layout is already declared.
    """
    item = Owned(module, name)
    axis = item.axis(dim)
    item.declare_axis(axis, item.segments_of(item.tensor.shape[axis], blocks, rank), size)
