"""Compares the bits of one tensor in two checkpoints of any formats and layouts, a box at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardproof.geometry import Boxes, cut

if TYPE_CHECKING:
    import torch

    from shardproof.loading import Checkpoint

__all__ = ["BOX_BYTES", "Compared", "compare_tensors"]

BOX_BYTES = 32 << 20
"""Bytes of the boxes that are read, at most, unless a single row is larger. Two of them are in memory."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The progress of the comparison of a tensor."""

    elements: int
    """Elements compared."""
    different: int
    """Of these, how many differ in a bit."""
    bytes: int
    """Bytes compared, counted in both checkpoints."""


def compare_tensors(
    a: Checkpoint, b: Checkpoint, key: str, *, box_bytes: int = BOX_BYTES
) -> Iterator[Compared]:
    """Compares a tensor that both have with the same dtype and shape. Yields after each box.

    The last value is the result. For a tensor without elements it is the only value.

    Args:
        a: one checkpoint.
        b: the other.
        key: of the tensor.
        box_bytes: bytes of the boxes that are read, at most, unless a single row is larger.

    Raises:
        CorruptChunkError: stored bytes do not match their digest.
        TilingError: the chunks of one of the two do not cover the tensor exactly once.
    """
    one, other = a[key], b[key]
    itemsize = one.dtype.itemsize
    yield Compared(0, 0, 0)
    if 0 in one.shape:
        return
    boxes, _ = cut(Boxes.whole(one.shape), np.array([max(box_bytes // itemsize, 1)]))
    elements = different = 0
    for offsets, sizes in zip(boxes.offsets.tolist(), boxes.sizes.tolist(), strict=True):
        box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        left, right = one[box], other[box]
        different += _different(left, right)
        elements += left.numel()
        yield Compared(elements, different, 2 * elements * itemsize)


def _different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Number of elements that differ in a bit."""
    import torch

    left, right = (
        tensor.contiguous().reshape(-1, 1).view(torch.uint8).reshape(tensor.numel(), -1) for tensor in (a, b)
    )
    if torch.equal(left, right):
        return 0
    return int((left != right).any(dim=1).sum())
