"""The common part of formats in which each rank writes a file of ``torch.save`` with its part of an item.

DTensors are merged into whole tensors. A value that is equal on all ranks has one key. A value that differs,
such as the state of random generators, has a key for each rank that begins with the rank: ``1.rng.torch``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import (
    FileRange,
    Opaque,
    StoredBox,
    StoredView,
    TensorDescription,
    shape_of,
)
from shardproof.engine.geometry import IndexMap
from shardproof.engine.state import index_map_of, local_segments, sizes_of
from shardproof.formats.torch.torch_save import TorchFilesReader
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
    only if the local shapes show that (see "the order of sharding" in `shardproof.engine.state.dtensor`).

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


@dataclass(frozen=True, slots=True)
class ShardedTensorParts:
    """The parts of a tensor on each rank: either `cuts` of DTensors, or `maps`."""

    shape: tuple[int, ...]
    cuts: Mapping[int, tuple[MeshPlacements, tuple[int, ...]]]
    """By rank, the placements of a DTensor and the coordinate of the rank in the mesh."""
    maps: Mapping[int, IndexMap]
    """By rank, the boxes of a tensor whose metadata lists them."""

    @property
    def ranks(self) -> Iterable[int]:
        """Ranks that hold a part."""
        return self.cuts or self.maps


class RankFilesReader(TorchFilesReader):
    """Files of ``torch.save``, one for each rank and item; see `FormatReader`."""

    def add_item(
        self, item: str, files: Mapping[int, str], shardings: Mapping[tuple[str, ...], ShardedTensorParts]
    ) -> None:
        """Describes the values of an item, from the files of all ranks.

        Args:
            item: the first part of the keys.
            files: name of the file of each rank.
            shardings: by path, the parts of a tensor on each rank. For other tensors, the DTensors in the
                files give the parts.

        Raises:
            StorageError, FormatError: a file is missing or damaged, or the files contradict each other.
        """
        by_path: dict[tuple[str, ...], dict[int, tuple[tuple[Any, ...], Any]]] = {}
        """By path as strings and by rank, the original path and the value."""
        for rank, name in files.items():
            for path, leaf in self.leaves_of(name, self.open_file(name).value):
                by_path.setdefault(tuple(map(str, path)), {})[rank] = path, pickled_dtensor(leaf) or leaf
        for path, described in shardings.items():
            for rank in described.ranks:
                if rank not in by_path.get(path, {}):
                    key = ".".join((item, *path))
                    raise self.fault(files[rank], f"it has no {key}, but the metadata lists it here", key=key)
        ties: dict[Any, str] = {}
        for path, values in by_path.items():
            key = ".".join((item, *path))
            places = {rank: (files[rank], value) for rank, (_, value) in values.items()}
            sharding = shardings.get(path) or _by_dtensors(places)
            parts = tuple((rank, value) for rank, (_, value) in places.items())
            tie = parts if all(isinstance(v, TorchTensor | PickledDTensor) for _, v in parts) else None
            if tie in ties and sharding is not None:
                self.check_new(key, files[min(files)])
                self.aliases[key] = ties[tie]
            elif sharding is not None:
                self._add_merged(key, places, sharding)
                ties[tie] = key
            else:
                self._add_ranks(key, places, {rank: found for rank, (found, _) in values.items()})

    def add_objects(self, item: str, files: Mapping[int, str]) -> None:
        """Describes each value of the dicts in the files of all ranks as one object, with its tensors.

        Raises:
            StorageError, FormatError: a file is missing, damaged or does not hold a dict, or two values have
                the same key.
        """
        values: dict[Any, dict[int, tuple[str, Any]]] = {}
        for rank, name in files.items():
            for key, value in self.opened_dict(name).items():
                values.setdefault(key, {})[rank] = name, value
        for key, places in values.items():
            self._add_ranks(f"{item}.{key}", places, dict.fromkeys(places, (key,)))

    def _add_merged(
        self, key: str, places: Mapping[int, tuple[str, Any]], sharding: ShardedTensorParts
    ) -> None:
        """Describes a tensor from the parts or copies on the ranks."""
        ranks = sorted(sharding.ranks)
        tensors = {}
        for rank in ranks:
            name, value = places[rank]
            local = value.local if isinstance(value, PickledDTensor) else value
            if not isinstance(local, TorchTensor):
                raise self.fault(name, f"{key} is {brief(value)}, expected a tensor", key=key)
            if isinstance(value, PickledDTensor) and value.shape != sharding.shape:
                raise self.fault(
                    name, f"{key} has the shape {list(value.shape)}, expected {list(sharding.shape)}", key=key
                )
            tensors[rank] = local
        try:
            maps = dict(sharding.maps) or dict(
                zip(
                    ranks,
                    local_index_maps(
                        sharding.shape,
                        [sharding.cuts[rank] for rank in ranks],
                        [tensors[rank].shape for rank in ranks],
                    ),
                    strict=True,
                )
            )
        except ValueError as error:
            raise self.fault(places[ranks[0]][0], f"{key}: {error}", key=key) from error
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) != 1:
            raise self.fault(places[ranks[0]][0], f"{key} has the dtypes {sorted(dtypes)}", key=key)
        boxes: dict[tuple[Any, Any], StoredBox] = {}
        for rank in ranks:
            if maps[rank].local_shape != tensors[rank].shape:
                raise self.fault(
                    places[rank][0],
                    f"{key} has the local shape {list(tensors[rank].shape)}, expected "
                    f"{list(maps[rank].local_shape)}",
                    key=key,
                )
            for box in self._boxes(places[rank][0], tensors[rank], maps[rank]):
                known = boxes.setdefault((box.offsets, box.sizes), box)
                if known is not box and _crc(known.located()) != _crc(box.located()):
                    note = f"The copies of {key} differ between ranks: the copy of the first rank is read."
                    if note not in self.notes:
                        self.notes.append(note)
        self.check_new(key, places[ranks[0]][0])
        self.tensors[key] = TensorDescription(dtypes.pop(), sharding.shape, list(boxes.values()))

    def _boxes(self, name: str, tensor: TorchTensor, index_map: IndexMap) -> list[StoredBox]:
        view = self._files[name].view(tensor)
        self._used[name].add(tensor.storage)
        boxes = []
        for local, offsets, sizes in zip(
            index_map.local.offsets.tolist(),
            index_map.offsets.tolist(),
            index_map.local.sizes.tolist(),
            strict=True,
        ):
            if 0 not in sizes:
                first = view.offset + sum(at * step for at, step in zip(local, view.stride, strict=True))
                boxes.append(StoredBox.of(offsets, sizes, StoredView(view.extent, first, view.stride)))
        return boxes

    def _add_ranks(
        self, key: str, places: Mapping[int, tuple[str, Any]], paths: Mapping[int, tuple[Any, ...]]
    ) -> None:
        """Adds a value that each rank has, under one key if all are equal, otherwise under a key a rank."""
        are_equal = all(self._are_equal(one, other, set()) for one, other in pairwise(places.values()))
        for rank, (name, value) in places.items():
            self._add_leaf(key if are_equal else f"{rank}.{key}", name, paths[rank], value)
            if are_equal:
                break

    def _are_equal(self, one: tuple[str, Any], other: tuple[str, Any], above: set[tuple[int, int]]) -> bool:
        """True if two values of two files are proved equal.

        Args:
            one: name of a file, and a value in it.
            other: name of another file, and a value in it.
            above: ids of the pairs of containers that were compared before; changed in place. So shared
                containers are compared once.
        """
        (name, a), (other_name, b) = one, other
        if type(a) is not type(b):
            return False
        if isinstance(a, (Opaque, dict, list, tuple)):
            if (id(a), id(b)) in above:
                return True
            above.add((id(a), id(b)))
        if isinstance(a, TorchTensor):
            crcs = [_crc(self._files[file].view(item)) for file, item in ((name, a), (other_name, b))]
            parts = [(item.dtype, item.shape, item.stride, item.offset) for item in (a, b)]
            return crcs[0] is not None and crcs[0] == crcs[1] and parts[0] == parts[1]
        if isinstance(a, Opaque):
            pairs = [(a.name, b.name), (a.args, b.args), (a.state, b.state), (a.items, b.items)]
        elif isinstance(a, dict):
            if list(a) != list(b):
                return False
            pairs = list(zip(a.values(), b.values(), strict=True))
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                return False
            pairs = list(zip(a, b, strict=True))
        elif isinstance(a, np.ndarray):
            return a.dtype == b.dtype and np.array_equal(a, b)
        else:
            return bool(a == b)
        return all(self._are_equal((name, x), (other_name, y), above) for x, y in pairs)


def _crc(view: StoredView) -> Any:
    """CRC-32 and size of the storage behind a view; None if the file has no checksums."""
    extent = view.extent
    crc = extent.crc if isinstance(extent, FileRange) else None
    return None if crc is None else (crc, extent.nbytes)


def _by_dtensors(places: Mapping[int, tuple[str, Any]]) -> ShardedTensorParts | None:
    """The parts of a DTensor on each rank, from the DTensors; None if a rank has no DTensor."""
    dtensors = {rank: value for rank, (_, value) in places.items() if isinstance(value, PickledDTensor)}
    if len(dtensors) < len(places) or not dtensors:
        return None
    shape = next(iter(dtensors.values())).shape
    return ShardedTensorParts(shape, {rank: value.placements() for rank, value in dtensors.items()}, {})
