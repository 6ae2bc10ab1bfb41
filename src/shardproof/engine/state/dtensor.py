"""The boxes of a DTensor on this rank, computed from mesh coordinate and placements.

A dimension of the local tensor is a list of segments ``(start, size)`` of the global dimension, in local
order. Every placement maps a list of segments to a shorter one. So the cost does not depend on the size of
the tensor, and the ranks need not communicate.

Note: the order of sharding
    Placements apply from the left, with one exception. FSDP over tensor parallelism shards a dimension that
    is already sharded, and writes ``_StridedShard(dim, split_factor)`` to the left of ``Shard(dim)``. The
    true order is then from the right, and ``split_factor`` is the number of earlier shards. In the literal
    reading, a strided shard cuts into `split_factor` parts and takes its share of each.

    Both readings are equal for sizes that the mesh divides. For others (9 rows, 2 tensor parallel ranks, 4
    data parallel ranks) they differ: FSDP uses the true order, and `distribute_tensor` the literal reading.
    The local shape decides between them, but not on every rank: some ranks have the same number of rows in
    both readings. Such a rank uses the true order. A rank with a shape that contradicts this order raises,
    and so the save fails on all ranks. If the local shapes are equal in both readings on all ranks, all ranks
    raise.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress, product, repeat
from math import prod
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch

from shardproof.engine.geometry import Boxes, IndexMap
from shardproof.errors import StructureError

LOCAL = "_shardproof_local"
"""Attribute of a DTensor whose shards differ from its placements: the index map of the local tensor."""

LIKE = "_shardproof_like"
"""Method of a subclass of DTensor: the tensor of the same class and layout with another local tensor."""

_dtensor: Any = ()
"""The class `DTensor`; an empty tuple until the program has imported it."""


def is_dtensor(value: Any) -> TypeGuard[Any]:
    """True if the value is a DTensor.

    Does not import `torch.distributed.tensor`: until the program imports it, no DTensor exists.
    """
    global _dtensor
    if not _dtensor:
        _dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return isinstance(value, _dtensor)


def is_sharded(tensor: Any) -> bool:
    """True if ranks of the mesh have different parts of a DTensor. False for a plain tensor."""
    if not is_dtensor(tensor):
        return False
    dims = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return any(ranks > 1 and not placement.is_replicate() for ranks, placement in dims)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, which may be empty; otherwise the tensor itself.

    >>> local_tensor(torch.ones(2))
    tensor([1., 1.])
    """
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def shard_order(tensor: Any) -> Any:
    """For each dimension of a DTensor, the mesh dimensions that shard it, in order.

    None if torch has no such attribute. Older versions express the order by strided shards.
    """
    return getattr(tensor._spec, "shard_order", None)


class LocalBoxes(NamedTuple):
    """The boxes of a tensor on one rank."""

    shape: tuple[int, ...]
    """Global shape."""
    offsets: tuple[int, ...] | None
    """Global offsets of the local tensor if it is one box; None if there are several boxes, or none."""
    sizes: tuple[int, ...]
    """Shape of the local tensor."""
    index_map: IndexMap | None = None
    """Positions of the boxes if there are several; None if there are none."""


_SPEC = attrgetter("_spec.mesh", "_spec.placements", "_spec.tensor_meta.shape")


class LocalBoxesCache:
    """The local boxes of the tensors and DTensors of one walk. Equal layouts are computed once.

    The DTensors of one call often have equal placements, or a few different ones. Comparing placements takes
    less time than hashing them.
    """

    def __init__(self) -> None:
        self._plain: dict[torch.Size, LocalBoxes] = {}
        """Boxes of plain tensors, by shape."""
        self._by_mesh: dict[int, list[_PlacementCache]] = {}
        """Caches of the different placements on each mesh, by the mesh's id."""

    def of(
        self, keys: Sequence[str], tensors: Sequence[torch.Tensor], local_shapes: Sequence[torch.Size]
    ) -> list[LocalBoxes]:
        """The local boxes of tensors.

        The attribute ``_shardproof_local`` of a DTensor takes precedence over its placements.

        Raises:
            StructureError: a placement is a partial sum or unknown, mesh dimensions shard out of order, or
                the shape of a local tensor contradicts mesh and placements.
        """
        are_dtensors = list(map(is_dtensor, tensors))
        if all(are_dtensors):
            return self._of_dtensors(keys, tensors, local_shapes)
        rows = list(compress(range(len(are_dtensors)), are_dtensors))
        found = iter(
            self._of_dtensors(
                [keys[row] for row in rows],
                [tensors[row] for row in rows],
                [local_shapes[row] for row in rows],
            )
        )
        return [
            next(found) if sharded else self._plain.get(shape) or self._of_plain(shape)
            for sharded, shape in zip(are_dtensors, local_shapes, strict=True)
        ]

    def meshes(self) -> list[Any]:
        """The device meshes of the DTensors, each once."""
        return [caches[0].mesh for caches in self._by_mesh.values()]

    def _of_plain(self, shape: torch.Size) -> LocalBoxes:
        sizes = tuple(shape)
        boxes = LocalBoxes(sizes, None if 0 in sizes else (0,) * len(sizes), sizes)
        return self._plain.setdefault(shape, boxes)

    def _of_dtensors(
        self, keys: Sequence[str], tensors: Sequence[Any], local_shapes: Sequence[torch.Size]
    ) -> list[LocalBoxes]:
        if not tensors:
            return []
        index_maps = [getattr(tensor, LOCAL, None) for tensor in tensors]
        # Reading the global shape from the spec is faster than `DTensor.shape`.
        meshes, placements, shapes = zip(*map(_SPEC, tensors), strict=True)
        orders = list(map(shard_order, tensors))
        if _are_alike(meshes, placements, orders):
            caches = [self._cache_of(meshes[0], placements[0], orders[0])] * len(tensors)
        else:
            caches = list(map(self._cache_of, meshes, placements, orders))
        both = list(zip(shapes, local_shapes, strict=True))
        found = [boxes for boxes in map(dict.get, caches, both) if boxes is not None]
        if len(found) == len(tensors) == index_maps.count(None):
            return found
        return list(map(_cached_local_boxes, caches, both, tensors, keys))

    def _cache_of(self, mesh: Any, placements: Sequence[Any], order: Any) -> _ByShapes:
        """The cached local boxes of DTensors with these placements, by global and local shape."""
        caches = self._by_mesh.get(id(mesh))
        if caches is None:
            caches = self._by_mesh[id(mesh)] = []
        kinds = [*map(type, placements)]
        for cache in caches:
            if cache.kinds == kinds and cache.placements == placements and cache.order == order:
                return cache.boxes
        caches.append(_PlacementCache(mesh, placements, kinds, order, {}))
        return caches[-1].boxes


_ByShapes: TypeAlias = dict[tuple[torch.Size, torch.Size], LocalBoxes]


class _PlacementCache(NamedTuple):
    """The cached local boxes of DTensors with the same mesh and placements."""

    mesh: Any
    """The reference ensures that no other mesh gets the same id."""
    placements: Sequence[Any]
    kinds: list[type]
    """Types of the placements. They are compared first, because a shard and a strided shard may be equal, and
    because comparing placements of different types is slow."""
    order: Any
    """See `shard_order`."""
    boxes: _ByShapes


def _are_alike(meshes: Sequence[Any], placements: Sequence[Sequence[Any]], orders: Sequence[Any]) -> bool:
    """True if all DTensors have the mesh, placements and order of the first."""
    return (
        all(map(is_, meshes, repeat(meshes[0])))
        and all(len(set(map(type, kinds))) == 1 for kinds in zip(*placements, strict=True))
        and placements.count(placements[0]) == len(placements)
        and orders.count(orders[0]) == len(orders)
    )


def _cached_local_boxes(
    cache: _ByShapes, shapes: tuple[torch.Size, torch.Size], tensor: Any, key: str
) -> LocalBoxes:
    """The local boxes of a DTensor, from the cache of its placements, or from mesh and placements."""
    if getattr(tensor, LOCAL, None) is not None:
        return LocalBoxes(tuple(tensor.shape), None, (), dtensor_index_map(tensor, key))
    found = cache.get(shapes)
    if found is not None:
        return found
    shape, part = tuple(tensor.shape), _local_part_of(tensor, key)
    if part is None:
        boxes = LocalBoxes(shape, None, ())
    elif part.offsets is not None or 0 in part.sizes:
        boxes = LocalBoxes(shape, part.offsets, part.sizes)
    else:
        boxes = LocalBoxes(shape, None, part.sizes, index_map_of(part.sizes, shape, part.segments))
    return cache.setdefault(shapes, boxes)


def dtensor_index_map(tensor: Any, path: str) -> IndexMap:
    """The index map from the local tensor of a DTensor to the global tensor.

    Raises:
        StructureError: as for `LocalBoxesCache.of`, or the shapes of the attribute ``_shardproof_local`` are
            not those of the tensor.
    """
    shape, local_shape = tuple(tensor.shape), tuple(tensor._local_tensor.shape)
    index_map: IndexMap | None = getattr(tensor, LOCAL, None)
    if index_map is not None:
        if (index_map.local_shape, index_map.global_shape) != (local_shape, shape):
            raise StructureError(
                f"{path}: the index map ({LOCAL}) of this DTensor maps shape {list(index_map.local_shape)} "
                f"into {list(index_map.global_shape)}, but the local tensor has shape {list(local_shape)} "
                f"and the DTensor {list(shape)}",
                key=path,
            )
        return index_map
    part = _local_part_of(tensor, path)
    if part is None:
        empty = (0,) * len(shape)
        return IndexMap(empty, shape, Boxes.empty(len(shape)), np.zeros((0, len(shape)), np.int64))
    return index_map_of(local_shape, shape, part.segments)


def _local_part_of(tensor: Any, path: str) -> _LocalPart | None:
    """The local part of a DTensor; None if this rank is not in the mesh."""
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in shard_order(tensor) or ()):
        raise StructureError(
            f"{path}: mesh dimensions shard a dimension of this DTensor in another order than that of its "
            f"mesh ({shard_order(tensor)}). Redistribute it to Replicate() and then to the placements "
            f"{placements}, which restores the order, or describe it with shardproof.LocalShards",
            key=path,
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        _sharding(placements, tensor.dim(), path)
        return None
    position = (tuple(mesh.shape), tuple(coordinate), placements, tuple(map(type, placements)))
    part = _local_part(tensor.shape, tensor._local_tensor.shape, *position)
    if part is None:
        raise _refusal(tensor, path, *position[:3])
    return part


class _LocalPart(NamedTuple):
    """The segments of each dimension in the local tensor."""

    sizes: tuple[int, ...]
    """Shape of the local tensor."""
    segments: tuple[Segments, ...]
    offsets: tuple[int, ...] | None
    """Global offsets of the local tensor if it is one non-empty box."""


@lru_cache(maxsize=4096)
def _local_part(
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Any, ...],
    kinds: tuple[type, ...],
) -> _LocalPart | None:
    """The local part of a tensor; None if it cannot be determined (see `_refusal`).

    `kinds` are the types of the placements, which distinguish a shard from an equal strided shard.
    """
    try:
        sharding = _sharding(placements, len(shape), "")
    except StructureError:
        return None
    ordered = local_segments(shape, mesh_shape, coordinate, sharding)
    literal = local_segments(shape, mesh_shape, coordinate, sharding, False)
    readings = [ordered, literal] if ordered is not None else [literal]
    fitting = [reading for reading in readings if reading is not None and sizes_of(reading) == local_shape]
    if not fitting or _is_ambiguous(shape, mesh_shape, sharding, ordered, literal, fitting):
        return None
    segments = fitting[0]
    if 0 in local_shape or any(len(dim) > 1 for dim in segments):
        return _LocalPart(sizes_of(segments), segments, None)
    return _LocalPart(sizes_of(segments), segments, tuple(dim[0][0] for dim in segments))


def _is_ambiguous(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    sharding: _Sharding,
    ordered: tuple[Segments, ...] | None,
    literal: tuple[Segments, ...] | None,
    fitting: list[tuple[Segments, ...]],
) -> bool:
    """True if the readings of the placements differ, and local shapes do not decide between them."""
    if ordered is None or ordered == literal:
        return False
    alike_somewhere, alike_everywhere = _confusable(shape, mesh_shape, sharding)
    return alike_everywhere or (alike_somewhere and fitting[0] != ordered)


def _refusal(
    tensor: Any,
    path: str,
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Any, ...],
) -> StructureError:
    """The error for a DTensor without a local part. Raises it if one placement is the reason."""
    shape, local_shape = tuple(tensor.shape), tuple(tensor._local_tensor.shape)
    sharding = _sharding(placements, len(shape), path)
    ordered = local_segments(shape, mesh_shape, coordinate, sharding)
    literal = local_segments(shape, mesh_shape, coordinate, sharding, False)
    assert literal is not None
    if local_shape in (sizes_of(literal), sizes_of(ordered or literal)):
        return StructureError(
            f"{path}: placements {placements} of a {list(shape)} tensor on a mesh of shape "
            f"{list(mesh_shape)} can mean two layouts, and the local shapes of some ranks fit both. "
            "Use sizes that the mesh divides, or describe the layout with shardproof.LocalShards",
            key=path,
        )
    remedy = "Describe an irregular layout with shardproof.LocalShards"
    if hasattr(tensor._local_tensor, "__create_chunk_list__"):
        remedy = (
            "Megatron-FSDP has such tensors: save `module_state(model)` and `optimizer_state(optimizer, "
            "model)` of shardproof.frameworks.megatron_fsdp by shardproof.save"
        )
    return StructureError(
        f"{path}: the local tensor of this DTensor has shape {list(local_shape)}, but placements "
        f"{placements} on a mesh of shape {list(mesh_shape)} put {list(sizes_of(literal))} of "
        f"{list(shape)} at coordinate {list(coordinate)}. {remedy}",
        key=path,
    )


def _sharding(placements: tuple[Any, ...], ndim: int, path: str) -> _Sharding:
    sharding: list[tuple[int, int, int]] = []
    for mesh_dim, placement in enumerate(placements):
        if placement.is_partial():
            raise StructureError(
                f"{path}: the DTensor holds partial sums ({placement}) over mesh dimension {mesh_dim}. "
                "Reduce it first: tensor.redistribute(placements=[...]) with Replicate() or Shard(dim)",
                key=path,
            )
        if placement.is_replicate():
            continue
        if type(placement).__name__ not in ("Shard", "_StridedShard") or not ndim:
            raise StructureError(f"{path}: the placement {placement} of a DTensor is not supported", key=path)
        sharding.append((mesh_dim, placement.dim % ndim, int(getattr(placement, "split_factor", 0))))
    return tuple(sharding)


Segments = tuple[tuple[int, int], ...]
"""Parts ``(start, size)`` of one global dimension, in the order in which they lie in the local tensor."""

_Sharding = tuple[tuple[int, int, int], ...]
"""For each mesh dimension that shards: mesh dimension, tensor dimension, split factor (0 if not strided)."""


@lru_cache(maxsize=4096)
def local_segments(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    sharding: _Sharding,
    ordered: bool = True,
) -> tuple[Segments, ...] | None:
    """The segments of each dimension on the rank at `coordinate`.

    Args:
        shape: global shape.
        mesh_shape: ranks along each mesh dimension.
        coordinate: this rank's coordinate in the mesh.
        sharding: the placements, without those that replicate.
        ordered: True to read strided shards as an order of sharding; the result is None if there is no such
            order. False to read them literally (see "the order of sharding" above).

    >>> local_segments((5, 3), (2,), (1,), ((0, 0, 0),))
    (((3, 2),), ((0, 3),))
    >>> local_segments((8,), (2,), (1,), ((0, 0, 2),), False)
    (((2, 2), (6, 2)),)
    """
    steps: list[tuple[int, int, int]] | None = list(sharding)
    if ordered:
        steps = order_of_sharding(mesh_shape, sharding)
        if steps is None:
            return None
    assert steps is not None
    dims: list[Segments] = [((0, size),) for size in shape]
    for mesh_dim, dim, split in steps:
        count, index = mesh_shape[mesh_dim], coordinate[mesh_dim]
        parts = [_chunk(dims[dim], split, part) for part in range(split)] if split > 1 else [dims[dim]]
        dims[dim] = _join([segment for part in parts for segment in _chunk(part, count, index)])
    return tuple(dims)


def order_of_sharding(mesh_shape: tuple[int, ...], sharding: _Sharding) -> list[tuple[int, int, int]] | None:
    """The same sharding in its true order, without strides; None if there is no such order.

    >>> order_of_sharding((4, 2), ((0, 0, 2), (1, 0, 0)))
    [(1, 0, 0), (0, 0, 0)]
    """
    order: dict[int, list[int]] = {}
    for mesh_dim, dim, split in reversed(sharding):
        done = order.setdefault(dim, [])
        shards, position = 1, 0
        while shards < split and position < len(done):
            shards *= mesh_shape[done[position]]
            position += 1
        if shards != max(split, 1):
            return None
        done.insert(position, mesh_dim)
    return [(mesh_dim, dim, 0) for dim, done in order.items() for mesh_dim in done]


@lru_cache(maxsize=4096)
def _confusable(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], sharding: _Sharding
) -> tuple[bool, bool]:
    """True if both readings give equal local shapes but different content: on some rank; on all ranks."""
    sharded = {mesh_dim for mesh_dim, _, _ in sharding}
    somewhere, everywhere = False, True
    for coordinate in product(*(range(n if dim in sharded else 1) for dim, n in enumerate(mesh_shape))):
        ordered = local_segments(shape, mesh_shape, coordinate, sharding)
        literal = local_segments(shape, mesh_shape, coordinate, sharding, False)
        assert ordered is not None and literal is not None
        if sizes_of(ordered) != sizes_of(literal):
            everywhere = False
        elif ordered != literal:
            somewhere = True
    return somewhere, everywhere


def sizes_of(segments: tuple[Segments, ...]) -> tuple[int, ...]:
    """The shape of the local tensor with these segments."""
    return tuple(sum(size for _, size in dim) for dim in segments)


@lru_cache(maxsize=4096)
def index_map_of(
    local_shape: tuple[int, ...], shape: tuple[int, ...], segments: tuple[Segments, ...]
) -> IndexMap:
    """The index map of a local tensor. Each combination of one segment per dimension is a box."""
    if 0 in local_shape:
        return IndexMap(local_shape, shape, Boxes.empty(len(shape)), np.zeros((0, len(shape)), np.int64))
    columns = []
    for dim in segments:
        starts, sizes = np.array(dim, np.int64).T
        columns.append(np.stack([np.cumsum(sizes) - sizes, starts, sizes]))
    counts = [len(dim) for dim in segments]
    picked = np.indices(counts).reshape(len(segments), prod(counts))
    local, placed, sizes = (
        np.stack([column[row][at] for column, at in zip(columns, picked, strict=True)], axis=1)
        if columns
        else np.zeros((1, 0), np.int64)
        for row in range(3)
    )
    return IndexMap(local_shape, shape, Boxes(local, sizes), placed)


def _chunk(segments: Segments, count: int, index: int) -> Segments:
    """Part `index` of `count`, cut as by `torch.chunk`: equal parts, the last ones smaller or empty."""
    total = sum(size for _, size in segments)
    step = -(-total // count)
    low, high = min(index * step, total), min((index + 1) * step, total)
    part = []
    position = 0
    for start, size in segments:
        first, last = max(low, position), min(high, position + size)
        if first < last:
            part.append((start + first - position, last - first))
        position += size
    return tuple(part)


def _join(segments: list[tuple[int, int]]) -> Segments:
    """Merges adjacent segments, so that contiguous rows give one piece."""
    joined: list[tuple[int, int]] = []
    for start, size in segments:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return tuple(joined)
