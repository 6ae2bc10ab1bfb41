"""The position of a local tensor in the model's tensor, for weights, masters and optimizer slots alike.

A layout maps the local tensor to the model's tensor in three steps. Each step may be the identity:

1. An index map places boxes of the local tensor in a larger tensor (a data parallel shard, even or not).
2. Axes of that tensor are split (columns of all experts into experts by columns), and axes of size 1 are
   added in front (one expert of many).
3. An index map places boxes of the split axes in the model's tensor, whose axes may be in another order.

The steps compute on columns of boxes. A piece of the result is a strided view of the local memory, without a
copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch

from shardproof.engine.geometry import (
    Boxes,
    IndexMap,
    axis_weights,
    compose,
    flat_range_boxes,
    intersect,
    overlapping_pairs,
    row_major_strides,
    split_axes,
)
from shardproof.engine.state.dtensor import dtensor_index_map, is_dtensor
from shardproof.engine.state.local_shards import LocalShards
from shardproof.errors import StructureError

LAYOUTS = "_shardproof_layouts"
"""Attribute of a module: parameter name to layout. It outlives `fully_shard`, `to_empty` and `deepcopy`."""

_has_parts = False
"""True once a part of a model's tensor, or a number in the model, is declared; see `note_part`."""


_PlacedBoxes: TypeAlias = list[tuple[list[int], list[int], list[int]]]
"""For each box, offsets and sizes in the model's tensor, and its first element's index in the local one."""

_MAX_CACHED = 256
"""Maximum number of entries in a cache of a layout. Only states that change in every save need more."""


def _cache(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = value


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Layout:
    """The position of a local tensor's elements in a tensor of the model.

    Use `whole` and `of` to make one. Local elements without a position (padding) are neither stored nor
    loaded.

    Rank 1 of 2 holds a gate and an up projection of 4 rows each in one weight:

    >>> rows = IndexMap((4,), (8,), Boxes.of(((0,), (2,)), ((2,), (2,))), np.array([[2], [6]]))
    >>> layout = Layout.of(rows)
    >>> layout.pieces(torch.arange(4)).pieces
    [(tensor([0, 1]), (2,)), (tensor([2, 3]), (6,))]
    >>> layout.range(torch.tensor([10, 20]), 1, 3).pieces
    [(tensor([10]), (3,)), (tensor([20]), (6,))]
    """

    shape: tuple[int, ...]
    """Shape of the model's tensor."""
    local_shape: tuple[int, ...]
    """Shape of the local tensor."""
    name: str | None
    """Name of the parameter in keys; None if it is the parameter's own name."""
    experts: bool
    """True if the first axis of the model's tensor indexes experts. Each expert has its own scalars."""
    _inner: IndexMap
    _factors: tuple[tuple[int, ...], ...]
    _outer: IndexMap
    _order: tuple[int, ...]
    _ranges: dict[tuple[int, int], _PlacedBoxes] = field(init=False, default_factory=dict)
    """Cache of the boxes of ranges. Each save of a training run needs the same ranges."""
    _parts: dict[IndexMap, Layout] = field(init=False, default_factory=dict)
    """Cache of `part`."""

    @staticmethod
    def whole(shape: Sequence[int]) -> Layout:
        """The layout of a local tensor that equals the model's tensor.

        >>> Layout.whole((2, 3)).is_whole
        True
        """
        return Layout.of(IndexMap.whole(shape))

    @staticmethod
    def of(
        index_map: IndexMap,
        *,
        factors: Sequence[Sequence[int]] | None = None,
        order: Sequence[int] | None = None,
        lead: int = 0,
        name: str | None = None,
        experts: bool = False,
    ) -> Layout:
        """The layout of a tensor from an index map of its split axes.

        Args:
            index_map: maps the split axes into the model's tensor, before `order` applies.
            factors: for each axis of the local tensor, the sizes of the axes that it is split into, slowest
                first. Default: no axis is split.
            order: for each axis of the model's tensor, the split axis that it is.
            lead: number of axes of size 1 in front of the local tensor's axes.
            name: name of the parameter in keys, if it differs from its own name.
            experts: True if the first axis of the model's tensor indexes experts.

        Raises:
            ValueError: the sizes contradict each other.

        The columns of experts 2 and 3 of four, of 2 rows and 3 columns each, side by side in one weight:

        >>> places = IndexMap((2, 2, 3), (2, 4, 3), Boxes.whole((2, 2, 3)), np.array([[0, 2, 0]]))
        >>> layout = Layout.of(places, factors=((2,), (2, 3)), order=(1, 0, 2), experts=True)
        >>> layout.shape, layout.local_shape
        ((4, 2, 3), (2, 6))
        """
        split = index_map.local_shape[lead:]
        if factors is None:
            factors = tuple((size,) for size in split)
        if index_map.local_shape[:lead] != (1,) * lead or tuple(f for axis in factors for f in axis) != split:
            raise ValueError(
                f"{lead} leading axes of size 1 and axes {[list(axis) for axis in factors]} do not make the "
                f"index map's local shape {list(index_map.local_shape)}"
            )
        ndim = len(index_map.local_shape)
        order = tuple(range(ndim)) if order is None else tuple(order)
        if sorted(order) != list(range(ndim)):
            raise ValueError(f"{list(order)} is not an order of {ndim} axes")
        local_shape = tuple(prod(axis) for axis in factors)
        return Layout(
            shape=tuple(index_map.global_shape[axis] for axis in order),
            local_shape=local_shape,
            name=name,
            experts=experts,
            _inner=IndexMap.whole(local_shape),
            _factors=tuple(tuple(axis) for axis in factors),
            _outer=index_map,
            _order=order,
        )

    def part(self, inner: IndexMap) -> Layout:
        """The layout of a tensor that `inner` maps into the local tensor of this layout.

        >>> lower = IndexMap((1, 3), (2, 3), Boxes.whole((1, 3)), np.array([[1, 0]]))
        >>> Layout.whole((2, 3)).part(lower).pieces(torch.ones(1, 3)).pieces
        [(tensor([[1., 1., 1.]]), (1, 0))]
        """
        found = self._parts.get(inner)
        if found is None:
            found = replace(self, local_shape=inner.local_shape, _inner=compose(self._inner, inner))
            _cache(self._parts, inner, found)
        return found

    def expert(self, number: int, total: int) -> Layout:
        """The layout of the same tensor as one expert of the model's stack of experts.

        >>> Layout.whole((2, 3)).expert(5, 8).shape
        (8, 2, 3)
        """
        outer = self._outer
        ones, expert = np.ones((len(outer.local), 1), np.int64), np.full((len(outer.local), 1), number)
        local = Boxes(np.hstack([0 * ones, outer.local.offsets]), np.hstack([ones, outer.local.sizes]))
        stacked = IndexMap(
            (1, *outer.local_shape), (total, *outer.global_shape), local, np.hstack([expert, outer.offsets])
        )
        order = (0, *(axis + 1 for axis in self._order))
        return replace(self, shape=(total, *self.shape), experts=True, _outer=stacked, _order=order)

    @property
    def is_whole(self) -> bool:
        """True if the local tensor equals the model's tensor, element by element."""
        return (
            self.shape == self.local_shape
            and self._order == tuple(range(len(self.shape)))
            and all(
                len(index_map.local) == 1
                and index_map.local.pair(0) == index_map.placed.pair(0) == ((0,) * len(shape), shape)
                for index_map, shape in ((self._inner, self.local_shape), (self._outer, self.shape))
            )
        )

    def pieces(self, local: torch.Tensor) -> LocalShards:
        """The pieces of a local tensor, which share its memory.

        Args:
            local: plain tensor of `local_shape`, with any dtype and strides.

        Raises:
            StructureError: `local` has another shape.
        """
        if not (local.numel() or len(self._inner.local)):
            return LocalShards(self.shape, [], dtype=local.dtype)  # a rank outside the mesh has no shape
        if tuple(local.shape) != self.local_shape:
            raise StructureError(
                f"a local tensor has shape {list(local.shape)}, but its layout has {list(self.local_shape)}"
            )
        return self._sharded(local, 0, prod(self.local_shape), local.stride(), 0, 1)

    def range(self, buffer: torch.Tensor, start: int, stop: int) -> LocalShards:
        """The pieces of a 1-D buffer that holds a range of the local tensor's row-major elements.

        Args:
            buffer: ``stop - start`` elements. The pieces share its memory.
            start: first element of the local tensor in the buffer.
            stop: element after the last. An empty range has no pieces.

        Raises:
            StructureError: the buffer has another length, or the range is not within the local tensor.
        """
        if buffer.dim() != 1 or buffer.numel() != stop - start:
            raise StructureError(f"a buffer for elements {start} to {stop} has shape {list(buffer.shape)}")
        strides = row_major_strides(self.local_shape)
        try:
            return self._sharded(buffer, start, stop, strides, start, buffer.stride(0))
        except ValueError as error:
            raise StructureError(f"a range of a local tensor: {error}") from error

    def scalar(self, value: torch.Tensor) -> LocalShards:
        """The pieces of a scalar of the parameter, such as a step count.

        In the model it is a scalar, or one value per expert. The pieces of experts that share this value are
        expanded views.

        Args:
            value: tensor of no dimensions.

        >>> Layout.whole((2, 3)).expert(5, 8).scalar(torch.tensor(7.0))
        LocalShards(shape=(8,), dtype=torch.float32, pieces=1)
        """
        value = value.detach()
        if not self.experts:
            return LocalShards((), [(value, ())])
        placed, axis = self._outer.placed, self._order[0]
        spans = set(zip(placed.offsets[:, axis].tolist(), placed.sizes[:, axis].tolist(), strict=True))
        pieces = [(value.expand(size), (start,)) for start, size in sorted(spans) if size]
        return LocalShards(self.shape[:1], pieces, dtype=value.dtype)

    def _sharded(
        self, memory: torch.Tensor, start: int, stop: int, strides: Sequence[int], first: int, step: int
    ) -> LocalShards:
        """The pieces of memory that contains a range of the local tensor's row-major elements.

        Args:
            memory: its element ``(index @ strides - first) * step`` is the local tensor's element at `index`.
            start: first element of the range.
            stop: element after the last.
            strides: strides of the local tensor, in elements.
            first: position of the memory's first element.
            step: elements of the storage between neighbours.
        """
        boxes = self._ranges.get((start, stop))
        if boxes is None:
            boxes = self._placed(flat_range_boxes(self.local_shape, start, stop)[0])
            _cache(self._ranges, (start, stop), boxes)
        memory = memory.detach()
        base = int(memory.storage_offset()) - first * step
        split_strides = [1] * (len(self._order) - sum(map(len, self._factors)))
        for stride, axis in zip(strides, self._factors, strict=True):
            split_strides += [stride * step * prod(axis[at + 1 :]) for at in range(len(axis))]
        view_strides = [split_strides[axis] for axis in self._order]
        pieces = []
        for offsets, sizes, index in boxes:
            position = base + sum(at * stride for at, stride in zip(index, strides, strict=True)) * step
            pieces.append((memory.as_strided(sizes, view_strides, position), offsets))
        return LocalShards(self.shape, pieces, dtype=memory.dtype)

    def _placed(self, local: Boxes) -> _PlacedBoxes:
        """Maps boxes of the local tensor into the model's tensor."""
        k, i = overlapping_pairs(local, self._inner.local)
        boxes = intersect(local.take(k), self._inner.local.take(i))
        back = self._inner.local.offsets[i] - self._inner.offsets[i]
        split, source = split_axes(Boxes(boxes.offsets - back, boxes.sizes), self._factors)
        lead = len(self._order) - split.ndim
        zeros = np.zeros((len(split), lead), np.int64)
        split = Boxes(np.hstack([zeros, split.offsets]), np.hstack([zeros + 1, split.sizes]))
        s, o = overlapping_pairs(split, self._outer.local)
        parts = intersect(split.take(s), self._outer.local.take(o))
        offsets = parts.offsets - self._outer.local.offsets[o] + self._outer.offsets[o]
        order = list(self._order)
        firsts = parts.offsets[:, lead:] @ axis_weights(self._factors) + back[source[s]]
        columns = (offsets[:, order], parts.sizes[:, order], firsts)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Sets the fields of a copy, or of a layout of an unpickled module, for which no `declare` runs."""
        for item, value in zip(fields(self), state, strict=True):
            object.__setattr__(self, item.name, value)
        note_part()

    def __repr__(self) -> str:
        return f"Layout(local_shape={self.local_shape}, shape={self.shape}, name={self.name!r})"


def declare(module: torch.nn.Module, name: str, layout: Layout) -> None:
    """Declares the layout of a module's own parameter or buffer, before data parallelism shards it.

    For a DTensor, it is the layout of the global tensor. The module holds the declaration, so it outlives the
    parameter.

    Args:
        module: the module that owns the tensor.
        name: name of the tensor in the module, without dots.
        layout: layout of the tensor.

    Raises:
        StructureError: the module has no such tensor, or it has another shape.

    >>> linear = torch.nn.Linear(3, 2)
    >>> declare(linear, "weight", Layout.whole((2, 3)).expert(0, 4))
    >>> declared(torch.nn.Sequential(linear).named_modules())
    {'0.weight': Layout(local_shape=(2, 3), shape=(4, 2, 3), name=None)}
    """
    tensor = module._parameters.get(name, module._buffers.get(name))
    if tensor is None:
        raise StructureError(
            f"cannot declare a layout: {type(module).__name__} has no parameter or buffer {name!r} of its "
            f"own. It has {[*module._parameters, *module._buffers]}"
        )
    _check_shape(layout, tensor, f"{type(module).__name__}.{name}")
    module.__dict__.setdefault(LAYOUTS, {})[name] = layout
    if is_divided(layout) or expert_of(layout) is not None:
        note_part()


def note_part() -> None:
    """Notes that this process declares a part, so that saves and loads look for it; see `model_parts`."""
    global _has_parts
    _has_parts = True


def has_parts() -> bool:
    """True if this process may have declared a part."""
    return _has_parts


def expert_of(layout: Layout) -> int | None:
    """The number of the expert that the local tensor belongs to; None if it is no tensor of one expert.

    >>> expert_of(Layout.whole((2, 3)).expert(5, 8)), expert_of(Layout.whole((2, 3)))
    (5, None)
    """
    is_one = len(layout._order) > sum(map(len, layout._factors)) and len(layout._outer.local)
    return int(layout._outer.offsets[0, 0]) if is_one else None


def is_divided(layout: Layout) -> bool:
    """True if ranks have parts of the model's tensor, or of one expert's.

    Padding, and the shards of data parallelism (`Layout.part`), make no difference.

    >>> rows = IndexMap((2, 3), (4, 3), Boxes.whole((2, 3)), np.array([[2, 0]]))
    >>> is_divided(Layout.of(rows)), is_divided(Layout.whole((2, 3)).expert(5, 8))
    (True, False)
    """
    shape = layout.shape if expert_of(layout) is None else layout.shape[1:]
    return int(layout._outer.local.volumes().sum()) < prod(shape)


def declared(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, Layout]:
    """The declared layouts of modules, by dotted name of the tensor."""
    layouts: dict[str, Layout] = {}
    for path, part in modules:
        for name, layout in part.__dict__.get(LAYOUTS, {}).items():
            layouts[f"{path}.{name}" if path else name] = layout
    return layouts


def local_layout(parameter: torch.Tensor, declared: Layout | None, key: str) -> Layout:
    """The layout of a parameter's local tensor.

    Args:
        parameter: a plain tensor or a DTensor. The attribute ``_shardproof_local`` of a DTensor, the index
            map of its local tensor, takes precedence over mesh and placements.
        declared: the declared layout of the parameter; None if it equals the model's tensor.
        key: key of the parameter, for errors.

    Raises:
        StructureError: the parameter and the declared layout differ in shape, or its placements determine no
            layout.

    >>> local_layout(torch.ones(2, 3), None, "w")
    Layout(local_shape=(2, 3), shape=(2, 3), name=None)
    """
    if declared is None:
        declared = _own(tuple(parameter.shape))
    _check_shape(declared, parameter, key)
    return declared.part(dtensor_index_map(parameter, key)) if is_dtensor(parameter) else declared


@lru_cache(maxsize=4096)
def _own(shape: tuple[int, ...]) -> Layout:
    """The layout of tensors of a shape that equal the model's. They share it, with its caches."""
    return Layout.whole(shape)


def _check_shape(layout: Layout, tensor: Any, where: str) -> None:
    if tuple(tensor.shape) != layout.local_shape:
        raise StructureError(
            f"{where} has shape {list(tensor.shape)}, but its declared layout has "
            f"{list(layout.local_shape)}. Declare the layout after the tensor has its final shape",
            key=where,
        )
