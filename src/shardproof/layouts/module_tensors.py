"""Tensors of modules by dotted name, and declaring a layout of one of their dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardproof.errors import StructureError
from shardproof.layouts.parts import Segments, check_rank, index_map_of, length_of
from shardproof.state import LAYOUTS, Layout, declare, inside, is_dtensor

__all__ = ["Owned", "declare_along", "segments_held"]


class Owned:
    """A tensor and the module that owns it.

    Args:
        module: that owns the tensor, or has below it the one that does.
        name: of the tensor in `module`, with dots.

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
                    f"{self.where}: there is no module {segment!r}; there are {[*self.module._modules]}"
                )
            self.module = inside(below)
        tensor = self.module._parameters.get(self.name, self.module._buffers.get(self.name))
        if tensor is None:
            raise StructureError(
                f"{self.where}: there is no such parameter or buffer; there are "
                f"{[*self.module._parameters, *self.module._buffers]}"
            )
        self.tensor = tensor

    @property
    def layout(self) -> Layout | None:
        """What is declared already."""
        layout: Layout | None = self.module.__dict__.get(LAYOUTS, {}).get(self.name)
        return layout

    def declare(self, layout: Layout) -> None:
        """Declares a layout of a tensor that is the model's own so far."""
        if self.layout is not None and not self.layout.is_whole:
            raise StructureError(f"{self.where} has a declared layout already: {self.layout}")
        declare(self.module, self.name, layout)


def segments_held(
    tensor: torch.Tensor, length: int, blocks: Sequence[Segments], rank: int, where: str
) -> Segments:
    """Which segments a dimension of a tensor is made of.

    A plain tensor holds the block of its rank. So does a DTensor that is sharded by data parallelism alone;
    one that is sharded by tensor parallelism too is the blocks of all ranks, one after the other.

    Args:
        tensor: plain or a DTensor.
        length: of the dimension.
        blocks: what each tensor parallel rank holds.
        rank: tensor parallel rank.
        where: name of the tensor, for errors.

    Raises:
        StructureError: the length is neither.
    """
    check_rank(rank, len(blocks))
    everything = [segment for block in blocks for segment in block]
    if is_dtensor(tensor) and length == length_of(everything):
        return everything
    if length == length_of(blocks[rank]):
        return blocks[rank]
    expected = f"{length_of(blocks[rank])} for tensor parallel rank {rank} of {len(blocks)}"
    if is_dtensor(tensor):
        expected += f", or {length_of(everything)} for all"
    raise StructureError(
        f"{where} has shape {list(tensor.shape)}; of its {length} elements along the fused dimension, parts "
        f"of these sizes make {expected}",
        key=where,
    )


def declare_along(
    module: torch.nn.Module, name: str, dim: int, blocks: Sequence[Segments], size: int, rank: int
) -> None:
    """Declares that one dimension of a tensor is made of blocks, and the others are the model's own.

    Args:
        module: that owns the tensor, or has below it the one that does.
        name: of the tensor, with dots.
        dim: the dimension; from the end if negative.
        blocks: what each tensor parallel rank holds.
        size: of the dimension in the model.
        rank: tensor parallel rank.

    Raises:
        StructureError: there is no such tensor, it has other sizes, or its layout is declared already.
    """
    item = Owned(module, name)
    tensor = item.tensor
    if not -tensor.dim() <= dim < tensor.dim():
        raise StructureError(f"{item.where} has shape {list(tensor.shape)} and no dimension {dim}")
    dim %= tensor.dim()
    held = segments_held(tensor, tensor.shape[dim], blocks, rank, item.where)
    axes: list[tuple[Segments, int]] = [([(0, length)], length) for length in tensor.shape]
    axes[dim] = (held, size)
    item.declare(Layout.of(index_map_of(axes, tensor.shape)))
