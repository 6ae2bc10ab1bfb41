"""Where a local tensor lies in the model's space: one idea for weights, masters and optimizer slots.

A layout leads from the local tensor to the model's own tensor in three steps, any of which may do nothing:

1. boxes of the local tensor lie in a larger one (a data parallel shard, even or not);
2. axes of that one are seen as several (columns of all experts as experts by columns), and axes of size 1 are
   put before (one expert of many);
3. boxes of the axes so seen lie in the model's tensor, whose axes may be in another order.

Every box is carried through the steps by arithmetic on columns, and its memory is known all the way: a piece
is a strided view, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch

from shardproof.errors import StructureError
from shardproof.geometry import (
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
from shardproof.state.dtensor import dtensor_index_map, is_dtensor
from shardproof.state.local_shards import LocalShards

__all__ = ["LAYOUTS", "Layout", "declare", "declared", "local_layout"]

LAYOUTS = "_shardproof_layouts"
"""Attribute of a module: parameter name to layout. It outlives `fully_shard`, `to_empty` and `deepcopy`."""


_Placed: TypeAlias = list[tuple[list[int], list[int], list[int]]]
"""Boxes: offsets and sizes in the model's tensor, and the index of the first element in the local tensor."""

_KEPT = 256
"""Answers that a layout keeps; more are asked for only where they change all the time."""


def _keep(kept: dict[Any, Any], question: Any, answer: Any) -> None:
    if len(kept) >= _KEPT:
        kept.clear()
    kept[question] = answer


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Layout:
    """Where the elements of a local tensor lie in a tensor of the model.

    Made by `whole` and `of`. Local elements that lie nowhere (padding) are neither stored nor loaded.

    Rank 1 of 2 holds a gate and an up projection of 4 rows each in one weight:

    >>> rows = IndexMap((4,), (8,), Boxes.of(((0,), (2,)), ((2,), (2,))), np.array([[2], [6]]))
    >>> layout = Layout.of(rows)
    >>> layout.pieces(torch.arange(4)).pieces
    [(tensor([0, 1]), (2,)), (tensor([2, 3]), (6,))]
    >>> layout.range(torch.tensor([10, 20]), 1, 3).pieces
    [(tensor([10]), (3,)), (tensor([20]), (6,))]
    """

    shape: tuple[int, ...]
    """Of the model's tensor."""
    local_shape: tuple[int, ...]
    """Of the local tensor."""
    name: str | None
    """Key segments that stand for the parameter's own name, where it differs."""
    experts: bool
    """Whether the first axis of the model's tensor numbers experts, each of which has scalars of its own."""
    _inner: IndexMap
    _factors: tuple[tuple[int, ...], ...]
    _outer: IndexMap
    _order: tuple[int, ...]
    _known: dict[tuple[int, int], _Placed] = field(init=False, default_factory=dict)
    """What was asked before: a training saves the same ranges over and over."""
    _parts: dict[IndexMap, Layout] = field(init=False, default_factory=dict)

    @staticmethod
    def whole(shape: Sequence[int]) -> Layout:
        """The layout of a tensor that is the model's own.

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
        """The layout of a tensor whose axes, perhaps seen as several, are embedded in the model's.

        Args:
            index_map: in the axes as seen, before they are ordered.
            factors: for each axis of the local tensor, the sizes of the axes as which it is seen, slowest
                first. Without them every axis is one.
            order: for each axis of the model's tensor, which of the axes as seen it is.
            lead: axes of size 1 put before the local tensor's.
            name: key segments that stand for the parameter's own name.
            experts: whether the first axis of the model's tensor numbers experts.

        Raises:
            ValueError: the sizes do not fit together.

        The columns of experts 2 and 3 of four, of 2 rows and 3 columns each, side by side in one weight:

        >>> places = IndexMap((2, 2, 3), (2, 4, 3), Boxes.whole((2, 2, 3)), np.array([[0, 2, 0]]))
        >>> layout = Layout.of(places, factors=((2,), (2, 3)), order=(1, 0, 2), experts=True)
        >>> layout.shape, layout.local_shape
        ((4, 2, 3), (2, 6))
        """
        seen = index_map.local_shape[lead:]
        if factors is None:
            factors = tuple((size,) for size in seen)
        if index_map.local_shape[:lead] != (1,) * lead or tuple(f for axis in factors for f in axis) != seen:
            raise ValueError(
                f"{lead} leading axes of size 1 and axes {[list(axis) for axis in factors]} do not make the "
                f"index map's local shape {list(index_map.local_shape)}"
            )
        ndim = len(index_map.local_shape)
        order = tuple(range(ndim)) if order is None else tuple(order)
        if sorted(order) != list(range(ndim)):
            raise ValueError(f"{list(order)} is no order of {ndim} axes")
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
        """The layout of a tensor that lies by `inner` in the local tensor of this one.

        >>> lower = IndexMap((1, 3), (2, 3), Boxes.whole((1, 3)), np.array([[1, 0]]))
        >>> Layout.whole((2, 3)).part(lower).pieces(torch.ones(1, 3)).pieces
        [(tensor([[1., 1., 1.]]), (1, 0))]
        """
        found = self._parts.get(inner)
        if found is None:
            found = replace(self, local_shape=inner.local_shape, _inner=compose(self._inner, inner))
            _keep(self._parts, inner, found)
        return found

    def expert(self, number: int, total: int) -> Layout:
        """The layout of the same tensor as that of one expert of several, which the model's stacks.

        >>> Layout.whole((2, 3)).expert(5, 8).shape
        (8, 2, 3)
        """
        outer = self._outer
        ones, place = np.ones((len(outer.local), 1), np.int64), np.full((len(outer.local), 1), number)
        local = Boxes(np.hstack([0 * ones, outer.local.offsets]), np.hstack([ones, outer.local.sizes]))
        stacked = IndexMap(
            (1, *outer.local_shape), (total, *outer.global_shape), local, np.hstack([place, outer.offsets])
        )
        order = (0, *(axis + 1 for axis in self._order))
        return replace(self, shape=(total, *self.shape), experts=True, _outer=stacked, _order=order)

    @property
    def is_whole(self) -> bool:
        """Whether the local tensor is the model's own tensor, element by element."""
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
            local: plain, of `local_shape`, of any dtype and strides.

        Raises:
            StructureError: it has another shape.
        """
        if not (local.numel() or len(self._inner.local)):
            return LocalShards(self.shape, [], dtype=local.dtype)  # outside a mesh it has no shape of its own
        if tuple(local.shape) != self.local_shape:
            raise StructureError(
                f"a local tensor has shape {list(local.shape)}, its layout is of {list(self.local_shape)}"
            )
        return self._sharded(local, 0, prod(self.local_shape), local.stride(), 0, 1)

    def range(self, buffer: torch.Tensor, start: int, stop: int) -> LocalShards:
        """The pieces of a 1-D buffer that holds a range of the local tensor's row-major elements.

        Args:
            buffer: of ``stop - start`` elements; the pieces share its memory.
            start: first element of the local tensor that the buffer holds.
            stop: one past the last. An empty range has no pieces.

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
        """The pieces of a value that is kept once for the parameter, such as a step count.

        It has no axes in the model's space, but for experts: there it is one value for each, and the views
        of those that share this one are expanded.

        Args:
            value: of no dimensions.

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
        """The pieces of memory that holds a range of the local tensor's row-major elements.

        Args:
            memory: of which element ``(index @ strides - first) * step`` is the local tensor's at `index`.
            start: first element.
            stop: one past the last.
            strides: of the local tensor, in elements.
            first: position of the memory's first element.
            step: elements of the storage between neighbours.
        """
        known = self._known.get((start, stop))
        if known is None:
            known = self._placed(flat_range_boxes(self.local_shape, start, stop)[0])
            _keep(self._known, (start, stop), known)
        memory = memory.detach()
        base = int(memory.storage_offset()) - first * step
        seen = [1] * (len(self._order) - sum(map(len, self._factors)))
        for stride, axis in zip(strides, self._factors, strict=True):
            seen += [stride * step * prod(axis[place + 1 :]) for place in range(len(axis))]
        view_strides = [seen[axis] for axis in self._order]
        pieces = []
        for offsets, sizes, index in known:
            position = base + sum(at * stride for at, stride in zip(index, strides, strict=True)) * step
            pieces.append((memory.as_strided(sizes, view_strides, position), offsets))
        return LocalShards(self.shape, pieces, dtype=memory.dtype)

    def _placed(self, held: Boxes) -> _Placed:
        """Where boxes of the local tensor lie in the model's."""
        h, i = overlapping_pairs(held, self._inner.local)
        boxes = intersect(held.take(h), self._inner.local.take(i))
        back = self._inner.local.offsets[i] - self._inner.offsets[i]
        seen, source = split_axes(Boxes(boxes.offsets - back, boxes.sizes), self._factors)
        lead = len(self._order) - seen.ndim
        filled = np.zeros((len(seen), lead), np.int64)
        seen = Boxes(np.hstack([filled, seen.offsets]), np.hstack([filled + 1, seen.sizes]))
        s, o = overlapping_pairs(seen, self._outer.local)
        parts = intersect(seen.take(s), self._outer.local.take(o))
        offsets = parts.offsets - self._outer.local.offsets[o] + self._outer.offsets[o]
        order = list(self._order)
        firsts = parts.offsets[:, lead:] @ axis_weights(self._factors) + back[source[s]]
        columns = (offsets[:, order], parts.sizes[:, order], firsts)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def __repr__(self) -> str:
        return f"Layout(local_shape={self.local_shape}, shape={self.shape}, name={self.name!r})"


def declare(module: torch.nn.Module, name: str, layout: Layout) -> None:
    """Declares the layout of a module's own parameter or buffer: of the tensor below data parallelism.

    That is the tensor itself if it is plain, and the whole DTensor if it is one. The declaration stays with
    the module, whatever becomes of the parameter.

    Args:
        module: that owns the tensor.
        name: of the tensor in the module, without dots.
        layout: of the tensor.

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
            f"{type(module).__name__} has no parameter or buffer {name!r} of its own to declare a layout of. "
            f"It has {[*module._parameters, *module._buffers]}"
        )
    _check_shape(layout, tensor, f"{type(module).__name__}.{name}")
    module.__dict__.setdefault(LAYOUTS, {})[name] = layout


def declared(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, Layout]:
    """The layouts that modules declare of their own tensors, by path of the module and name of the tensor."""
    layouts: dict[str, Layout] = {}
    for path, part in modules:
        for name, layout in part.__dict__.get(LAYOUTS, {}).items():
            layouts[f"{path}.{name}" if path else name] = layout
    return layouts


def local_layout(parameter: torch.Tensor, declared: Layout | None, key: str) -> Layout:
    """The layout of the plain tensor that this rank holds of a parameter.

    Args:
        parameter: plain or a DTensor. A DTensor with an attribute ``_shardproof_local``, the index_map of its
            local tensor in the whole one, is described by that; any other by mesh and placements.
        declared: layout of the parameter as `declare` has it; without it, it is the model's own.
        key: of the parameter, for errors.

    Raises:
        StructureError: the parameter has another shape than was declared, or its placements say no layout.

    >>> local_layout(torch.ones(2, 3), None, "w")
    Layout(local_shape=(2, 3), shape=(2, 3), name=None)
    """
    if declared is None:
        declared = _own(tuple(parameter.shape))
    _check_shape(declared, parameter, key)
    return declared.part(dtensor_index_map(parameter, key)) if is_dtensor(parameter) else declared


@lru_cache(maxsize=4096)
def _own(shape: tuple[int, ...]) -> Layout:
    """The layout of the model's own tensors of a shape: one for all, with what it was asked before."""
    return Layout.whole(shape)


def _check_shape(layout: Layout, tensor: Any, where: str) -> None:
    if tuple(tensor.shape) != layout.local_shape:
        raise StructureError(
            f"{where} has shape {list(tensor.shape)}, but its layout is declared for "
            f"{list(layout.local_shape)}. Declare the layout of the tensor as it is, after it has its shape",
            key=where,
        )
