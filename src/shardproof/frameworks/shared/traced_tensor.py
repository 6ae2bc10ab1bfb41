"""Tensors without memory that record the boxes of other tensors they consist of.

A conversion of weights, such as "stack the experts, then join gate and up projection", is written as calls of
torch functions. If these calls run on `TracedTensor`, the result is the conversion as boxes. A rank applies
the boxes to its own part of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

import shardproof as sp


@dataclass(frozen=True, slots=True)
class TracedBox:
    """A box of a traced tensor, and the box of the source that has the same elements.

    The two boxes share some axes. Every other axis of a box has size 1.
    """

    source: str
    """Key of the source."""
    source_offsets: tuple[int, ...]
    source_axes: tuple[int, ...]
    """For each shared axis, its number in the source."""
    offsets: tuple[int, ...]
    axes: tuple[int, ...]
    """For each shared axis, its number in the traced tensor."""
    sizes: tuple[int, ...]
    """Sizes of the shared axes."""

    def size(self, axis: int) -> int:
        """The size of the box along an axis of the traced tensor."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1


def inverse(key: str, box: TracedBox) -> TracedBox:
    """The same elements, as a box of a tensor that has `key` as its source."""
    return TracedBox(key, box.offsets, box.axes, box.source_offsets, box.source_axes, box.sizes)


class TracedTensor:
    """A tensor of boxes of other tensors. Torch functions on it return traced tensors.

    `chunk`, `split`, `cat`, `stack`, `transpose`, `squeeze`, `unsqueeze` and `contiguous` are supported.

    Raises:
        StructureError: a called torch function does more than move boxes.

    Example:
        >>> gate, up = TracedTensor.of("gate", (4, 3)), TracedTensor.of("up", (4, 3))
        >>> joined = torch.cat([gate, up], dim=0)
        >>> joined.shape, [(box.source, box.offsets) for box in joined.boxes]
        ((8, 3), [('gate', (0, 0)), ('up', (4, 0))])
    """

    def __init__(self, shape: Sequence[int], boxes: Iterable[TracedBox]) -> None:
        self.shape = tuple(shape)
        self.boxes = tuple(boxes)

    @staticmethod
    def of(key: str, shape: Sequence[int]) -> TracedTensor:
        """The whole tensor with this key."""
        start, axes = (0,) * len(shape), tuple(range(len(shape)))
        return TracedTensor(shape, [TracedBox(key, start, axes, start, axes, tuple(shape))])

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        traced = _FUNCTIONS.get(function)
        if traced is None:
            name = getattr(function, "__name__", repr(function))
            raise sp.StructureError(f"the torch function {name} does more than move boxes of a tensor")
        return traced(*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return self.ndim

    def size(self, dim: int) -> int:
        """Size along one dimension."""
        return self.shape[dim]

    def contiguous(self) -> TracedTensor:
        """The tensor itself: it has no strides."""
        return self

    def narrow(self, dim: int, start: int, length: int) -> TracedTensor:
        """The elements [start, start + length) along one dimension."""
        dim %= self.ndim
        boxes = []
        for box in self.boxes:
            first = box.offsets[dim]
            low, high = max(first, start), min(first + box.size(dim), start + length)
            if low >= high:
                continue
            source, sizes = list(box.source_offsets), list(box.sizes)
            if dim in box.axes:
                at = box.axes.index(dim)
                source[box.source_axes[at]] += low - first
                sizes[at] = high - low
            offsets = (*box.offsets[:dim], low - start, *box.offsets[dim + 1 :])
            boxes.append(replace(box, source_offsets=tuple(source), offsets=offsets, sizes=tuple(sizes)))
        return TracedTensor((*self.shape[:dim], length, *self.shape[dim + 1 :]), boxes)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[TracedTensor, ...]:
        """See `torch.chunk`."""
        return self.split(max(-(-self.shape[dim] // chunks), 1), dim)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[TracedTensor, ...]:
        """See `torch.split`."""
        if isinstance(split_size, int):
            total = self.shape[dim]
            split_size = [min(split_size, total - start) for start in range(0, total, split_size)]
        ends = accumulate(split_size)
        return tuple(self.narrow(dim, end - size, size) for end, size in zip(ends, split_size, strict=True))

    def transpose(self, dim0: int, dim1: int) -> TracedTensor:
        """See `torch.transpose`."""
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        boxes = [
            replace(
                box,
                offsets=tuple(box.offsets[axis] for axis in order),
                axes=tuple(order.index(axis) for axis in box.axes),
            )
            for box in self.boxes
        ]
        return TracedTensor([self.shape[axis] for axis in order], boxes)

    def unsqueeze(self, dim: int) -> TracedTensor:
        """See `torch.unsqueeze`."""
        dim %= self.ndim + 1
        boxes = [
            replace(
                box,
                offsets=(*box.offsets[:dim], 0, *box.offsets[dim:]),
                axes=tuple(axis + (axis >= dim) for axis in box.axes),
            )
            for box in self.boxes
        ]
        return TracedTensor((*self.shape[:dim], 1, *self.shape[dim:]), boxes)

    def squeeze(self, dim: int) -> TracedTensor:
        """See `torch.squeeze`."""
        dim %= self.ndim
        if self.shape[dim] != 1:
            return self
        boxes = []
        for box in self.boxes:
            kept = [at for at, axis in enumerate(box.axes) if axis != dim]
            boxes.append(
                replace(
                    box,
                    source_axes=tuple(box.source_axes[at] for at in kept),
                    offsets=(*box.offsets[:dim], *box.offsets[dim + 1 :]),
                    axes=tuple(box.axes[at] - (box.axes[at] > dim) for at in kept),
                    sizes=tuple(box.sizes[at] for at in kept),
                )
            )
        return TracedTensor((*self.shape[:dim], *self.shape[dim + 1 :]), boxes)


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    dim %= tensors[0].ndim
    rests = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(rests) > 1:
        raise sp.StructureError(
            f"tensors to join along axis {dim} have shapes {sorted({tensor.shape for tensor in tensors})}"
        )
    boxes, end = list[TracedBox](), 0
    for tensor in tensors:
        for box in tensor.boxes:
            offsets = (*box.offsets[:dim], box.offsets[dim] + end, *box.offsets[dim + 1 :])
            boxes.append(replace(box, offsets=offsets))
        end += tensor.shape[dim]
    shape = tensors[0].shape
    return TracedTensor((*shape[:dim], end, *shape[dim + 1 :]), boxes)


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.chunk: TracedTensor.chunk,
    torch.split: TracedTensor.split,
    torch.squeeze: TracedTensor.squeeze,
    torch.stack: _stack,
    torch.transpose: TracedTensor.transpose,
    torch.unsqueeze: TracedTensor.unsqueeze,
}


def local_parts(box: TracedBox, local: sp.LocalShards) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """The parts of a rank's tensor inside one of its boxes, as pieces of the box's source.

    Yields:
        A view of the rank's memory with the axes of the source, and its offsets in the source.
    """
    shared = sorted(range(len(box.axes)), key=lambda at: box.source_axes[at])
    kept = sorted(box.axes)
    dropped = tuple(axis for axis in range(len(box.offsets)) if axis not in kept)
    added = [axis for axis in range(len(box.source_offsets)) if axis not in box.source_axes]
    for view, offsets in local.pieces:
        lows = [max(start, first) for start, first in zip(offsets, box.offsets, strict=True)]
        highs = [
            min(start + length, first + box.size(axis))
            for axis, (start, length, first) in enumerate(zip(offsets, view.shape, box.offsets, strict=True))
        ]
        if any(low >= high for low, high in zip(lows, highs, strict=True)):
            continue
        inside = (slice(low - at, high - at) for low, high, at in zip(lows, highs, offsets, strict=True))
        part = view[tuple(inside)].squeeze(dropped).permute([kept.index(box.axes[at]) for at in shared])
        for axis in added:
            part = part.unsqueeze(axis)
        source = list(box.source_offsets)
        for own, axis in zip(box.axes, box.source_axes, strict=True):
            source[axis] += lows[own] - box.offsets[own]
        yield part, tuple(source)
