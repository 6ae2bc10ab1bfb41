"""Finds tensors of modules by dotted name, and declares layouts of one of their dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardproof.errors import StructureError
from shardproof.layouts.parts import Segments, check_rank, index_map_of, length_of
from shardproof.state import LAYOUTS, Layout, declare, inside, is_dtensor

__all__ = ["Owned", "declare_along", "segments_of"]


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


def segments_of(
    tensor: torch.Tensor, length: int, blocks: Sequence[Segments], rank: int, where: str
) -> Segments:
    """The segments of the model's dimension that a dimension of a tensor contains, in order.

    A plain tensor contains the block of its rank. So does a DTensor that only data parallelism shards. A
    DTensor that tensor parallelism also shards contains the blocks of all ranks.

    Args:
        tensor: a plain tensor or a DTensor.
        length: size of the dimension.
        blocks: the block of each tensor parallel rank.
        rank: tensor parallel rank.
        where: name of the tensor, for errors.

    Raises:
        StructureError: the length is neither that of the rank's block nor that of all blocks.
    """
    check_rank(rank, len(blocks))
    every = [segment for block in blocks for segment in block]
    if is_dtensor(tensor) and length == length_of(every):
        return every
    if length == length_of(blocks[rank]):
        return blocks[rank]
    expected = f"{length_of(blocks[rank])} for tensor parallel rank {rank} of {len(blocks)}"
    if is_dtensor(tensor):
        expected += f", or {length_of(every)} for all ranks"
    raise StructureError(
        f"{where} has shape {list(tensor.shape)}, with {length} elements along the fused dimension. Parts of "
        f"these sizes need {expected}",
        key=where,
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
    tensor = item.tensor
    if not -tensor.dim() <= dim < tensor.dim():
        raise StructureError(f"{item.where} has shape {list(tensor.shape)} and no dimension {dim}")
    dim %= tensor.dim()
    axes: list[tuple[Segments, int]] = [([(0, length)], length) for length in tensor.shape]
    axes[dim] = (segments_of(tensor, tensor.shape[dim], blocks, rank, item.where), size)
    item.declare(Layout.of(index_map_of(axes, tensor.shape)))
