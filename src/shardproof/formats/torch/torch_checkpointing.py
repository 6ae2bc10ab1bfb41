"""Reads checkpoints of Meta's torch_checkpointing.

A checkpoint is a folder. Each rank writes one file of ``torch.save`` for each item, such as ``model_0.pt``,
with its local parts of DTensors. ``metadata.pkl`` has the mesh and the placements of tensors, and the ranks
that have them. The reader merges DTensors into whole tensors.

A key is the item and the path of the value in it, joined by dots. A value that is equal on all ranks has one
key. A value that differs, such as the state of random generators, has a key for each rank that begins with
the rank: ``1.rng.torch``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
import xxhash

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import Foreign, shape_of
from shardproof.engine.geometry import Boxes, IndexMap
from shardproof.engine.storage import check_name
from shardproof.errors import StorageError
from shardproof.formats.pickle_data import read_pickle
from shardproof.formats.torch.torch_rank_files import MeshPlacements, RankFilesReader, ShardedTensorParts

_METADATA = "metadata.pkl"
_MARK = b"nested_path_to_metadata"
_MARK_BYTES = 4096
_RANK_FILE = re.compile(r"(.+)_(0|[1-9][0-9]{0,8})\.pt")
_TORCH, _JSON, _RAW = "TorchSerialization", "JsonSerialization", "RawSerialization"


class TorchCheckpointingReader(RankFilesReader):
    """A checkpoint of torch_checkpointing, open for reading; see `FormatReader`."""

    name = "torch_checkpointing"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        data = self.read_commit(_METADATA, "checkpoint of torch_checkpointing")
        metadata = read_pickle(data, {}, file=f"{self.location}/{_METADATA}").value
        self._plain: dict[str, tuple[str, str]] = {}
        """By key, the file of an item that is JSON or bytes, and which of the two it is."""
        try:
            if metadata["version"] != "2.0":
                raise ValueError(f"the version {brief(metadata['version'])} is unknown, expected '2.0'")
            self.world_size = metadata["world_size"]
            if type(self.world_size) is not int or self.world_size < 1:
                raise ValueError(f"world_size is {brief(self.world_size)}")
            described = metadata["metadata"]
            for item, files in self._items(described).items():
                self.add_item(item, files, _sharded_tensors(described.get(item)))
        except ValueError as error:
            raise self.fault(_METADATA, f"{error}: it is damaged, or does not fit the files") from error
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
            raise self.fault(
                _METADATA, f"it does not have the structure that torch_checkpointing writes ({brief(error)})"
            ) from error
        self.conclude(xxhash.xxh3_128_hexdigest(data))

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True if the folder has a file ``metadata.pkl`` as torch_checkpointing writes it."""
        size = (foreign.storage.size(_METADATA) if foreign.file is None else None) or 0
        return _MARK in foreign.storage.read(_METADATA, 0, min(size, _MARK_BYTES)) if size else False

    def object_keys(self) -> Iterable[str]:
        """Keys of the values that are not tensors."""
        return [*super().object_keys(), *self._plain]

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """A value as plain data; see `FormatReader.object`."""
        if key not in self._plain:
            return super().object(key, trust_pickle=trust_pickle)
        file, kind = self._plain[key]
        data = self.read_small(file)
        if kind == _RAW:
            return data
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.fault(file, f"it is not JSON, or damaged ({brief(error)})", key=key) from error

    def files(self) -> Mapping[str, int | None]:
        """All files; the format records no sizes."""
        return {**super().files(), **{file: None for file, _ in self._plain.values()}}

    def verify_extra(self) -> int:
        """Verifies all objects; see `FormatReader.verify_extra`."""
        for key in self._plain:
            self.object(key)
        return super().verify_extra()

    def _items(self, described: Mapping[str, Any]) -> dict[str, dict[int, str]]:
        """By item and rank, the name of a file of torch.save. Other files become objects."""
        present = set(self.storage.list())
        items: dict[str, dict[int, str]] = {}
        for item, value in described.items():
            needed = {
                rank
                for groups in value["nested_path_to_metadata"].values()
                for group in groups
                for rank in group["ranks"]
            }
            layouts = value["rank_to_layout_info"]
            for rank in sorted({*needed, *layouts}):
                file, kind = f"{item}_{rank}.pt", _TORCH
                if layouts.get(rank) is not None:
                    file, kind = layouts[rank]["file_path"], layouts[rank]["serialization_format"]["type"]
                file = self._checked(file)
                if file not in present:
                    if rank not in needed:
                        continue
                    path = f"{self.location}/{file}"
                    raise StorageError(
                        f"{path} is missing: rank {rank} has parts of {item} in it. Restore it from a copy",
                        file=path,
                        missing=True,
                    )
                present.discard(file)
                if kind == _TORCH:
                    items.setdefault(item, {})[rank] = file
                elif kind in (_JSON, _RAW):
                    self._plain[item if rank == 0 else f"{rank}.{item}"] = file, kind
                else:
                    raise ValueError(f"{file} is stored as {brief(kind)}, which is not supported")
        for file in sorted(present):
            found = _RANK_FILE.fullmatch(file)
            if found and found[1] not in described and int(found[2]) < self.world_size:
                items.setdefault(found[1], {})[int(found[2])] = file
        return items

    def _checked(self, file: Any) -> str:
        try:
            return check_name(file, self.location)
        except (StorageError, TypeError) as error:
            raise self.fault(_METADATA, f"the file name {brief(file)} leads out of the checkpoint") from error


def _sharded_tensors(described: Mapping[str, Any] | None) -> dict[tuple[str, ...], ShardedTensorParts]:
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
                raise ValueError(f"the sharding {brief(kind)} of {'.'.join(path)} is not supported")
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
