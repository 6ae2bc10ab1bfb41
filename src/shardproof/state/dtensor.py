"""What this rank holds of a DTensor, by arithmetic on mesh coordinate and placements.

How placements are read is said in `shardproof.state.placements`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch

from shardproof.errors import StructureError
from shardproof.geometry import Boxes, IndexMap
from shardproof.state.placements import (
    Segments,
    Sharding,
    confusable,
    index_map_of,
    local_segments,
    sizes_of,
)

__all__ = [
    "LOCAL",
    "Layouts",
    "Where",
    "dtensor_index_map",
    "is_dtensor",
    "local_tensor",
    "shard_order",
]

LOCAL = "_shardproof_local"
"""Attribute of a DTensor whose shards are not those of its placements: the index map of the local tensor."""


_dtensor: Any = ()
"""The class, or as long as nobody has imported it, none."""


def is_dtensor(value: Any) -> TypeGuard[Any]:
    """Whether the value is a DTensor. Imports nothing: where nobody did, there is none."""
    return isinstance(value, _dtensor or _known_dtensor())


def _known_dtensor() -> Any:
    global _dtensor
    _dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return _dtensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: of a DTensor the local tensor, which may be empty.

    >>> local_tensor(torch.ones(2))
    tensor([1., 1.])
    """
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def shard_order(tensor: Any) -> Any:
    """For each dimension of a DTensor, the mesh dimensions that shard it, in that order, as torch keeps it.

    None where torch does not say: older ones know no order, and strided shards tell it themselves.
    """
    return getattr(tensor._spec, "shard_order", None)


class Where(NamedTuple):
    """Which part of a tensor a rank holds."""

    shape: tuple[int, ...]
    """Global shape."""
    offsets: tuple[int, ...] | None
    """Of what is held, where that is one box; None if it is several, or nothing."""
    sizes: tuple[int, ...]
    """Of what is held."""
    index_map: IndexMap | None = None
    """Where the boxes lie if they are several; None if there are none."""


_SPEC = attrgetter("_spec.mesh", "_spec.placements", "_spec.tensor_meta.shape")


class Layouts:
    """Where the tensors and DTensors of one walk over a state lie, each layout worked out once.

    DTensors that are asked for together are often all placed alike, and else in a few ways. To compare their
    placements with these takes less time than to hash them.
    """

    def __init__(self) -> None:
        self._whole: dict[torch.Size, Where] = {}
        """Of plain tensors, by shape."""
        self._placed: dict[int, list[_Placed]] = {}
        """By the identity of a mesh, the ways in which DTensors are placed on it."""

    def of(
        self, keys: Sequence[str], tensors: Sequence[torch.Tensor], local_shapes: Sequence[torch.Size]
    ) -> list[Where]:
        """Which parts of tensors the rank holds.

        A DTensor with an attribute ``_shardproof_local`` is described by that index map alone.

        Args:
            keys: for messages.
            tensors: plain ones, held whole, and DTensors.
            local_shapes: of the memory that the rank holds of each.

        Raises:
            StructureError: a placement is a partial sum or unknown, mesh dimensions shard in another order
                than their own, or the local tensor is not what mesh and placements say.
        """
        placed = list(map(is_dtensor, tensors))
        if all(placed):
            return self._of_dtensors(keys, tensors, local_shapes)
        rows = list(compress(range(len(placed)), placed))
        found = iter(
            self._of_dtensors(
                [keys[row] for row in rows],
                [tensors[row] for row in rows],
                [local_shapes[row] for row in rows],
            )
        )
        return [
            next(found) if is_placed else self._whole.get(shape) or self._of_plain(shape)
            for is_placed, shape in zip(placed, local_shapes, strict=True)
        ]

    def _of_plain(self, shape: torch.Size) -> Where:
        sizes = tuple(shape)
        where = Where(sizes, None if 0 in sizes else (0,) * len(sizes), sizes)
        return self._whole.setdefault(shape, where)

    def _of_dtensors(
        self, keys: Sequence[str], tensors: Sequence[Any], local_shapes: Sequence[torch.Size]
    ) -> list[Where]:
        if not tensors:
            return []
        given = [getattr(tensor, LOCAL, None) for tensor in tensors]
        # The shape is the DTensor's own, which takes 0.2 µs longer to say it.
        meshes, placements, shapes = zip(*map(_SPEC, tensors), strict=True)
        orders = list(map(shard_order, tensors))
        if _are_alike(meshes, placements, orders):
            known = [self._known(meshes[0], placements[0], orders[0])] * len(tensors)
        else:
            known = list(map(self._known, meshes, placements, orders))
        both = list(zip(shapes, local_shapes, strict=True))
        found = [where for where in map(dict.get, known, both) if where is not None]
        if len(found) == len(tensors) == given.count(None):
            return found
        return list(map(_where_anew, known, both, tensors, keys))

    def _known(self, mesh: Any, placements: Sequence[Any], order: Any) -> _ByShapes:
        """Where DTensors lie that are placed so, by their global and local shapes."""
        ways = self._placed.get(id(mesh))
        if ways is None:
            ways = self._placed[id(mesh)] = []
        kinds = [*map(type, placements)]
        for way in ways:
            if way.kinds == kinds and way.placements == placements and way.order == order:
                return way.where
        ways.append(_Placed(mesh, placements, kinds, order, {}))
        return ways[-1].where


_ByShapes: TypeAlias = dict[tuple[torch.Size, torch.Size], Where]


class _Placed(NamedTuple):
    """One way in which DTensors are placed."""

    mesh: Any
    """Kept, so that its id stays its own."""
    placements: Sequence[Any]
    kinds: list[type]
    """Types of the placements. They are compared first: a shard and a strided shard may be equal, and to find
    that placements of two types are not takes 3.5 µs."""
    order: Any
    """See `shard_order`."""
    where: _ByShapes


def _are_alike(meshes: Sequence[Any], placements: Sequence[Sequence[Any]], orders: Sequence[Any]) -> bool:
    """Whether all are placed as the first is."""
    return (
        all(map(is_, meshes, repeat(meshes[0])))
        and all(len(set(map(type, kinds))) == 1 for kinds in zip(*placements, strict=True))
        and placements.count(placements[0]) == len(placements)
        and orders.count(orders[0]) == len(orders)
    )


def _where_anew(known: _ByShapes, shapes: tuple[torch.Size, torch.Size], tensor: Any, key: str) -> Where:
    """Which part of a DTensor the rank holds, noted among what is known of its placements."""
    if getattr(tensor, LOCAL, None) is not None:
        return Where(tuple(tensor.shape), None, (), dtensor_index_map(tensor, key))
    return known.get(shapes) or known.setdefault(shapes, _where(tensor, key))


def _where(tensor: Any, key: str) -> Where:
    """Which part of a DTensor mesh and placements put on this rank."""
    shape, held = tuple(tensor.shape), _held_by(tensor, key)
    if held is None:
        return Where(shape, None, ())
    if held.offsets is not None or 0 in held.sizes:
        return Where(shape, held.offsets, held.sizes)
    return Where(shape, None, held.sizes, index_map_of(held.sizes, shape, held.segments))


def dtensor_index_map(tensor: Any, path: str) -> IndexMap:
    """Where the local tensor of a DTensor lies in the whole one.

    Raises:
        StructureError: as `Layouts.of`, or the attribute ``_shardproof_local`` does not fit the
            tensor.
    """
    shape, local_shape = tuple(tensor.shape), tuple(tensor._local_tensor.shape)
    given: IndexMap | None = getattr(tensor, LOCAL, None)
    if given is not None:
        if (given.local_shape, given.global_shape) != (local_shape, shape):
            raise StructureError(
                f"{path}: a local tensor of shape {list(local_shape)} in a DTensor of {list(shape)} is "
                f"described as one of {list(given.local_shape)} in {list(given.global_shape)}",
                key=path,
            )
        return given
    held = _held_by(tensor, path)
    if held is None:
        nowhere = (0,) * len(shape)
        return IndexMap(nowhere, shape, Boxes.empty(len(shape)), np.zeros((0, len(shape)), np.int64))
    return index_map_of(local_shape, shape, held.segments)


def _held_by(tensor: Any, path: str) -> _Held | None:
    """What mesh and placements put on this rank; None where it is not in the mesh."""
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in shard_order(tensor) or ()):
        raise StructureError(
            f"{path}: a dimension of the DTensor is sharded by mesh dimensions in another order than that of "
            f"its mesh ({shard_order(tensor)}). Redistribute it to Replicate() and then to the placements "
            f"{placements}, which gives them their own order, or describe it with shardproof.LocalShards",
            key=path,
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        _sharding(placements, tensor.dim(), path)
        return None
    where = (tuple(mesh.shape), tuple(coordinate), placements, tuple(map(type, placements)))
    held = _held(tensor.shape, tensor._local_tensor.shape, *where)
    if held is None:
        raise _not_held(tensor, path, *where[:3])
    return held


class _Held(NamedTuple):
    sizes: tuple[int, ...]
    """Of the local tensor."""
    segments: tuple[Segments, ...]
    offsets: tuple[int, ...] | None
    """Of the one piece, where it is one and has elements."""


@lru_cache(maxsize=4096)
def _held(
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Any, ...],
    kinds: tuple[type, ...],
) -> _Held | None:
    """What a local tensor of this shape holds; None where that is refused (see `_not_held`).

    `kinds` are the types of the placements, since a shard and a strided shard may compare equal.
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
        return _Held(sizes_of(segments), segments, None)
    return _Held(sizes_of(segments), segments, tuple(dim[0][0] for dim in segments))


def _is_ambiguous(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    sharding: Sharding,
    ordered: tuple[Segments, ...] | None,
    literal: tuple[Segments, ...] | None,
    fitting: list[tuple[Segments, ...]],
) -> bool:
    """Whether the readings of the placements differ, and local shapes cannot tell which one is meant."""
    if ordered is None or ordered == literal:
        return False
    alike_somewhere, alike_everywhere = confusable(shape, mesh_shape, sharding)
    return alike_everywhere or (alike_somewhere and fitting[0] != ordered)


def _not_held(
    tensor: Any,
    path: str,
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Any, ...],
) -> StructureError:
    """Why a DTensor is refused; raises where a placement alone is the reason."""
    shape, local_shape = tuple(tensor.shape), tuple(tensor._local_tensor.shape)
    sharding = _sharding(placements, len(shape), path)
    ordered = local_segments(shape, mesh_shape, coordinate, sharding)
    literal = local_segments(shape, mesh_shape, coordinate, sharding, False)
    assert literal is not None
    if local_shape in (sizes_of(literal), sizes_of(ordered or literal)):
        return StructureError(
            f"{path}: placements {placements} of a {list(shape)} tensor on a mesh of shape "
            f"{list(mesh_shape)} can mean two layouts, and there are ranks whose local shapes fit both. "
            "Use sizes that the mesh divides, or describe the layout with shardproof.LocalShards",
            key=path,
        )
    return StructureError(
        f"{path}: the local tensor of this DTensor has shape {list(local_shape)}, but placements "
        f"{placements} on a mesh of shape {list(mesh_shape)} put {list(sizes_of(literal))} of "
        f"{list(shape)} at coordinate {list(coordinate)}. Describe an irregular layout with "
        "shardproof.LocalShards",
        key=path,
    )


def _sharding(placements: tuple[Any, ...], ndim: int, path: str) -> Sharding:
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
            raise StructureError(f"{path}: the placement {placement} of a DTensor is not known", key=path)
        sharding.append((mesh_dim, placement.dim % ndim, int(getattr(placement, "split_factor", 0))))
    return tuple(sharding)
