"""Tensors of a conversion as boxes of other tensors: renamed, fused, split, stacked and padded weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MappedTensor", "Move"]


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a written tensor that comes from a box of a stored one.

    The elements correspond in row-major order, so the two boxes have as many elements, and may differ in
    their number of dimensions (a layer of a stack, an expert of many). With `axes`, the dimensions of the
    stored box are permuted first.
    """

    offsets: tuple[int, ...]
    """First index of the box in the written tensor."""
    sizes: tuple[int, ...]
    key: str | None
    """Key of the stored tensor; None for zeros (padding)."""
    source_offsets: tuple[int, ...] = ()
    """First index of the box in the stored tensor."""
    source_sizes: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    """Order of the stored dimensions, as `torch.permute` takes it; empty to leave it."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A written tensor, and where its elements come from."""

    dtype: str
    """Torch's name of the dtype that is written."""
    shape: tuple[int, ...]
    moves: Sequence[Move]
    """Boxes that tile the shape."""
