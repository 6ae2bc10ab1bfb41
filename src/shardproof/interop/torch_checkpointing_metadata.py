"""The file ``metadata.pkl`` of torch_checkpointing: how ranks hold each tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from shardproof.geometry import Boxes, IndexMap
from shardproof.interop.pickled_dtensors import MeshPlacements
from shardproof.interop.reader import shape_of
from shardproof.interop.torch_rank_files import ShardedTensorParts

__all__ = ["sharded_tensors"]

Path = tuple[str, ...]


def sharded_tensors(described: Mapping[str, Any] | None) -> dict[Path, ShardedTensorParts]:
    """By path, how ranks hold the tensors of an item.

    Raises:
        ValueError, KeyError, TypeError: the metadata does not have the structure of the format.
    """
    found = {}
    for text, groups in (described or {}).get("nested_path_to_metadata", {}).items():
        path = tuple(map(str, json.loads(text)))
        cuts: dict[int, tuple[MeshPlacements, tuple[int, ...]]] = {}
        maps: dict[int, IndexMap] = {}
        shapes = set()
        for group in groups:
            kind, data = group["sharding_metadata"]["type"], group["sharding_metadata"]["data"]
            shape = shape_of(data["global_shape"])
            shapes.add(shape)
            if kind == "DTensorShardingMetadata":
                cuts |= _cuts(shape, data, group["ranks"])
            elif kind == "default_tensor_v1":
                maps |= dict.fromkeys(group["ranks"], _own_map(shape, data))
            else:
                raise ValueError(f"the sharding {kind!r:.100} of {'.'.join(path)} is not supported")
        if len(shapes) != 1 or (cuts and maps):
            raise ValueError(f"{'.'.join(path)} has several shapes: {sorted(shapes)}")
        found[path] = ShardedTensorParts(shapes.pop(), cuts, maps)
    return found


def _cuts(
    shape: tuple[int, ...], data: Mapping[str, Any], ranks: Iterable[int]
) -> dict[int, tuple[MeshPlacements, tuple[int, ...]]]:
    mesh_shape, mesh = shape_of(data["mesh_spec"]["mesh_shape"]), shape_of(data["mesh_spec"]["mesh_data"])
    if prod(mesh_shape) != len(mesh):
        raise ValueError(f"a mesh of shape {mesh_shape} has {len(mesh)} ranks")
    places = {rank: at for at, rank in enumerate(mesh)}
    placements = MeshPlacements.of(mesh_shape, data["placements"], len(shape))
    return {rank: (placements, tuple(map(int, np.unravel_index(places[rank], mesh_shape)))) for rank in ranks}


def _own_map(shape: tuple[int, ...], data: Mapping[str, Any]) -> IndexMap:
    """The boxes of a tensor whose metadata lists them."""
    offsets, local, sizes = (
        np.array([shape_of(row) for row in data[name]], np.int64).reshape(-1, len(shape))
        for name in ("global_offsets", "local_offsets", "local_sizes")
    )
    local_shape = tuple((local + sizes).max(0).tolist()) if len(sizes) else (0,) * len(shape)
    return IndexMap(local_shape, shape, Boxes(local, sizes), offsets)
