"""DTensors in pickles of ``torch.save``: shape and placements, and the boxes that a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import Opaque, shape_of
from shardproof.engine.geometry import IndexMap
from shardproof.engine.state import index_map_of, local_segments, sizes_of
from shardproof.formats.torch.torch_tensors import TorchTensor

_SPLITS = {"Shard": False, "ShardSpec": False, "StridedShard": True, "_StridedShard": True}
"""Names of placements that shard, and whether they are strided."""


@dataclass(frozen=True, slots=True)
class MeshPlacements:
    """How a tensor is cut over a device mesh."""

    mesh_shape: tuple[int, ...]
    sharding: tuple[tuple[int, int, int], ...]
    """For each mesh dimension that shards: its number, tensor dimension, split factor (0 if not strided)."""

    @staticmethod
    def of(mesh_shape: tuple[int, ...], placements: Sequence[Mapping[str, Any]], ndim: int) -> MeshPlacements:
        """Reads the placement of each mesh dimension.

        Args:
            mesh_shape: ranks along each mesh dimension.
            placements: for each mesh dimension, ``type``, ``dim`` and ``split_factor``.
            ndim: dimensions of the tensor.

        Raises:
            ValueError: a placement is a partial sum or unknown, or does not fit the tensor.

        Example:
            >>> MeshPlacements.of((2, 3), [{"type": "Replicate"}, {"type": "Shard", "dim": 0}], 1).sharding
            ((1, 0, 0),)
        """
        if len(placements) != len(mesh_shape) or 0 in mesh_shape:
            raise ValueError(f"there are {len(placements)} placements for a mesh of shape {mesh_shape}")
        sharding = []
        for row, placement in enumerate(placements):
            kind = placement["type"]
            if kind == "Replicate":
                continue
            if kind not in _SPLITS:
                raise ValueError(
                    f"the placement {brief(kind)} is not supported: its parts do not tile the tensor"
                )
            dim, split = placement["dim"], placement["split_factor"] if _SPLITS[kind] else 0
            if type(dim) is not int or not -ndim <= dim < ndim or type(split) is not int or split < 0:
                raise ValueError(f"the placement {brief(dim)} does not fit {ndim} dimensions")
            sharding.append((row, dim % ndim, split))
        return MeshPlacements(mesh_shape, tuple(sharding))


@dataclass(frozen=True, slots=True)
class PickledDTensor:
    """A DTensor that a rank saved."""

    shape: tuple[int, ...]
    """Global shape."""
    local: TorchTensor
    spec: Opaque
    """The pickled ``DTensorSpec``."""

    def placements(self) -> tuple[MeshPlacements, tuple[int, ...]]:
        """How the tensor is cut, and the coordinate of the rank in the mesh.

        Raises:
            ValueError: the spec does not have the structure that torch writes.
        """
        try:
            mesh = self.spec.state["mesh"].state
            mesh_shape = _mesh_shape(mesh)
            coordinate = shape_of(mesh["_coordinate_on_dim"])
            described = [
                {"type": item.name.rpartition(".")[2], **(item.state or {})}
                for item in self.spec.state["placements"]
            ]
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"a DTensor does not have the structure that torch writes ({brief(error)})"
            ) from error
        if len(coordinate) != len(mesh_shape) or any(
            at >= size for at, size in zip(coordinate, mesh_shape, strict=True)
        ):
            raise ValueError(f"the coordinate {coordinate} is not in a mesh of shape {mesh_shape}")
        return MeshPlacements.of(mesh_shape, described, len(self.shape)), coordinate


def pickled_dtensor(value: Any) -> PickledDTensor | None:
    """A value of a file as a DTensor; None for any other value.

    Raises:
        ValueError: the DTensor has no local tensor.
    """
    match value:
        case Opaque(
            name="torch._tensor._rebuild_from_type_v2",
            args=(Opaque(), Opaque(name=kind), (_, _, shape, *_), state),
        ) if kind.rpartition(".")[2] == "DTensor":
            slots = state[1] if isinstance(state, tuple) and len(state) == 2 else state
            local = slots.get("_local_tensor") if isinstance(slots, dict) else None
            spec = slots.get("_spec") if isinstance(slots, dict) else None
            if not isinstance(local, TorchTensor) or not isinstance(spec, Opaque):
                raise ValueError("a DTensor has no local tensor")
            return PickledDTensor(shape_of(shape), local, spec)
    return None


def local_index_maps(
    shape: tuple[int, ...],
    cuts: Sequence[tuple[MeshPlacements, tuple[int, ...]]],
    local_shapes: Sequence[tuple[int, ...]],
) -> list[IndexMap]:
    """The boxes that each rank holds.

    Strided shards are read as an order of sharding, which is what FSDP means by them. They are read literally
    only if the local shapes show that (see "the order of sharding" in `shardproof.engine.state.placements`).

    Args:
        shape: global shape.
        cuts: for each rank, the placements and its coordinate in the mesh.
        local_shapes: for each rank, the shape of its local tensor.

    Raises:
        ValueError: the shape of a local tensor does not match its placements.
    """
    for ordered in (True, False):
        found = [
            local_segments(shape, cut.mesh_shape, coordinate, cut.sharding, ordered)
            for cut, coordinate in cuts
        ]
        segments = [item for item in found if item is not None]
        if len(segments) == len(found) and [*map(sizes_of, segments)] == list(local_shapes):
            return [index_map_of(sizes_of(item), shape, item) for item in segments]
    expected = [sizes_of(item) if item is not None else None for item in found]
    row = next(row for row, sizes in enumerate(expected) if sizes != local_shapes[row])
    raise ValueError(
        f"the local tensor at {cuts[row][1]} of the mesh {cuts[row][0].mesh_shape} has the shape "
        f"{local_shapes[row]}, expected {expected[row]} for the shape {shape} and its placements"
    )


def _mesh_shape(mesh: Mapping[str, Any]) -> tuple[int, ...]:
    """Ranks along each dimension, from the layout in torch 2.10 and newer, else from the tensor of ranks."""
    if "_layout" not in mesh:
        return shape_of(mesh["mesh"].shape)
    layout = mesh["_layout"].state
    if "axes" not in layout:
        return _flat_sizes(layout["shape"])
    return tuple(int(np.prod(_flat_sizes(axis.state["shape"]))) for axis in layout["axes"])


def _flat_sizes(shape: Any) -> tuple[int, ...]:
    """Sizes of a layout. Nested tuples may split a dimension."""
    sizes = shape if isinstance(shape, tuple) else (shape,)
    return tuple(
        prod(_flat_sizes(size)) if isinstance(size, tuple) else shape_of((size,))[0] for size in sizes
    )
