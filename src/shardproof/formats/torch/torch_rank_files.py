"""The common part of formats in which each rank writes a file of ``torch.save`` with its part of an item.

DTensors are merged into whole tensors. A value that is equal on all ranks has one key. A value that differs,
such as the state of random generators, has a key for each rank that begins with the rank: ``1.rng.torch``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import FileRange, Opaque, StoredBox, StoredView, TensorDescription, Unreadable
from shardproof.engine.geometry import IndexMap
from shardproof.formats.torch.pickled_dtensors import (
    MeshPlacements,
    PickledDTensor,
    local_index_maps,
    pickled_dtensor,
)
from shardproof.formats.torch.torch_save import TorchFilesReader, TorchObject
from shardproof.formats.torch.torch_tensors import TorchTensor


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

        Args:
            item: the first part of the keys.
            files: name of the file of each rank.

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
            rank_key = key if are_equal else f"{rank}.{key}"
            if isinstance(value, TorchTensor):
                self.add_tensor(rank_key, name, value)
            elif isinstance(value, Unreadable):
                self.check_new(rank_key, name)
                self.unreadable[rank_key] = value
            else:
                self.check_new(rank_key, name)
                self._objects[rank_key] = TorchObject(name, paths[rank], value)
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
