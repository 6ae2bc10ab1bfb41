"""Reads checkpoints of Meta's torch_checkpointing.

A checkpoint is a folder. Each rank writes one file of ``torch.save`` for each item, ``model_0.pt``, with its
local parts of DTensors. ``metadata.pkl`` has the mesh and the placements of tensors, and the ranks that have
them. DTensors are merged into whole tensors.

Keys are the item and the path of the value in it, joined by dots. What is equal on all ranks is there once.
What differs, such as the state of random generators, begins with its rank: ``1.rng.torch``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from shardproof.errors import StorageError
from shardproof.geometry import IndexMap
from shardproof.interop.extents import FileRange
from shardproof.interop.pickle_data import Opaque, read_pickle
from shardproof.interop.pickled_dtensors import (
    PickledDTensor,
    local_index_maps,
    pickled_dtensor,
)
from shardproof.interop.reader import Foreign, StoredBox, StoredView, TensorDescription
from shardproof.interop.torch_checkpointing_metadata import HeldTensor, held_tensors
from shardproof.interop.torch_file import leaves
from shardproof.interop.torch_folder import TorchFolderReader
from shardproof.interop.torch_save import TorchObject
from shardproof.interop.torch_tensors import TorchTensor
from shardproof.storage import check_name

__all__ = ["TorchCheckpointingReader"]

_METADATA = "metadata.pkl"
_MARK = b"nested_path_to_metadata"
_MARK_BYTES = 4096
_RANK_FILE = re.compile(r"(.+)_(0|[1-9][0-9]{0,8})\.pt")
_TORCH, _JSON, _RAW = "TorchSerialization", "JsonSerialization", "RawSerialization"


class TorchCheckpointingReader(TorchFolderReader):
    """A checkpoint of torch_checkpointing, open for reading; see `FormatReader`."""

    name = "torch_checkpointing"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        data = self.read_commit(_METADATA, "checkpoint of torch_checkpointing")
        metadata = read_pickle(data, {}, file=f"{self.location}/{_METADATA}").value
        self._plain: dict[str, tuple[str, str]] = {}
        """By key, the file of an item that is JSON or bytes, and which of them."""
        try:
            if metadata["version"] != "2.0":
                raise ValueError(f"the version {metadata['version']!r:.100} is unknown, expected '2.0'")
            self.world_size = metadata["world_size"]
            if type(self.world_size) is not int or self.world_size < 1:
                raise ValueError(f"world_size is {self.world_size!r:.100}")
            described = metadata["metadata"]
            for item, files in self._items(described).items():
                self._add_item(item, files, held_tensors(described.get(item)))
        except ValueError as error:
            raise self.fault(_METADATA, f"{error}: it is damaged, or does not fit to the files") from error
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
            raise self.fault(
                _METADATA, f"it does not have the structure that torch_checkpointing writes ({error!r:.300})"
            ) from error
        self.conclude(xxhash.xxh3_128_hexdigest(data))

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True if the folder has a file ``metadata.pkl`` as torch_checkpointing writes it."""
        size = (foreign.storage.size(_METADATA) if foreign.file is None else None) or 0
        return _MARK in foreign.storage.read(_METADATA, 0, min(size, _MARK_BYTES)) if size else False

    def object_keys(self) -> Iterable[str]:
        """Keys of the values that are no tensors."""
        return [*super().object_keys(), *self._plain]

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """A value as plain data; see `FormatReader.object`."""
        if key not in self._plain:
            return super().object(key, trust_pickle=trust_pickle)
        file, kind = self._plain[key]
        data = self.storage.read(file)
        if kind == _RAW:
            return data
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.fault(file, f"it is no JSON, or damaged ({error!r:.300})", key=key) from error

    def files(self) -> Mapping[str, int | None]:
        """All files; the format records no sizes."""
        return {**super().files(), **{file: None for file, _ in self._plain.values()}}

    def verify_extra(self) -> int:
        """Verifies all objects; see `FormatReader.verify_extra`."""
        for key in self._plain:
            self.object(key)
        return super().verify_extra()

    def _items(self, described: Mapping[str, Any]) -> dict[str, dict[int, str]]:
        """By item and rank, the name of a file of torch.save. Other files become objects.

        Raises:
            StorageError: the file of a rank that has tensors is missing.
        """
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
                    raise ValueError(f"{file} is stored as {kind!r:.100}, which is not read")
        for file in sorted(present):
            found = _RANK_FILE.fullmatch(file)
            if found and found[1] not in described and int(found[2]) < self.world_size:
                items.setdefault(found[1], {})[int(found[2])] = file
        return items

    def _checked(self, file: Any) -> str:
        try:
            return check_name(file, self.location)
        except (StorageError, TypeError) as error:
            raise self.fault(_METADATA, f"the file name {file!r:.100} leads out of the checkpoint") from error

    def _add_item(
        self, item: str, files: Mapping[int, str], shardings: Mapping[tuple[str, ...], HeldTensor]
    ) -> None:
        """Describes the values of an item, from the files of all ranks."""
        by_path: dict[tuple[str, ...], dict[int, tuple[tuple[Any, ...], Any]]] = {}
        """By path and rank, the path with its own types and the value."""
        for rank, name in files.items():
            for path, leaf in leaves(self.open_file(name).value):
                by_path.setdefault(tuple(map(str, path)), {})[rank] = path, pickled_dtensor(leaf) or leaf
        for path, described in shardings.items():
            for rank in described.ranks:
                if rank not in by_path.get(path, {}):
                    key = ".".join((item, *path))
                    raise self.fault(files[rank], f"it has no {key}, which the metadata gives to it", key=key)
        ties: dict[Any, str] = {}
        for path, values in by_path.items():
            key = ".".join((item, *path))
            places = {rank: (files[rank], value) for rank, (_, value) in values.items()}
            sharding = shardings.get(path) or _by_dtensors(places)
            tie = (
                tuple((rank, value) for rank, (_, value) in places.items()) if _are_tensors(places) else None
            )
            if tie in ties and sharding is not None:
                self.check_new(key, files[min(files)])
                self.aliases[key] = ties[tie]
            elif sharding is not None:
                self._add_merged(key, places, sharding)
                ties[tie] = key
            else:
                self._add_ranks(key, places, {rank: found for rank, (found, _) in values.items()})

    def _add_merged(self, key: str, places: Mapping[int, tuple[str, Any]], sharding: HeldTensor) -> None:
        """Describes a tensor that ranks hold parts or copies of."""
        ranks = sorted(sharding.ranks)
        tensors = {}
        for rank in ranks:
            name, value = places[rank]
            local = value.local if isinstance(value, PickledDTensor) else value
            if not isinstance(local, TorchTensor):
                raise self.fault(name, f"{key} is {value!r:.100}, expected a tensor", key=key)
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
                    self._note_difference(key)
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

    def _note_difference(self, key: str) -> None:
        note = f"The copies of {key} differ between ranks: that of the first rank is read."
        if note not in self.notes:
            self.notes.append(note)

    def _add_ranks(
        self, key: str, places: Mapping[int, tuple[str, Any]], paths: Mapping[int, tuple[Any, ...]]
    ) -> None:
        """Adds a value that each rank has: once if all are equal, otherwise for each rank."""
        are_equal = all(self._are_equal(one, other, set()) for one, other in pairwise(places.values()))
        for rank, (name, value) in places.items():
            rank_key = key if are_equal else f"{rank}.{key}"
            if isinstance(value, TorchTensor):
                self.add_tensor(rank_key, name, value)
            else:
                self.check_new(rank_key, name)
                self._objects[rank_key] = TorchObject(name, paths[rank], value)
            if are_equal:
                break

    def _are_equal(self, one: tuple[str, Any], other: tuple[str, Any], above: set[tuple[int, int]]) -> bool:
        """True if two values of two files are surely equal.

        Args:
            one: name of a file, and a value of it.
            other: as `one`.
            above: pairs of containers that were compared before, so that shared ones are compared once.
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


def _are_tensors(places: Mapping[int, tuple[str, Any]]) -> bool:
    return all(isinstance(value, (TorchTensor, PickledDTensor)) for _, value in places.values())


def _crc(view: StoredView) -> Any:
    """CRC-32 and size of the storage behind a view; None if the file has no checksums."""
    extent = view.extent
    crc = extent.crc if isinstance(extent, FileRange) else None
    return None if crc is None else (crc, extent.nbytes)


def _by_dtensors(places: Mapping[int, tuple[str, Any]]) -> HeldTensor | None:
    """How ranks hold a DTensor that is not in the metadata, by what the DTensor says."""
    dtensors = {rank: value for rank, (_, value) in places.items() if isinstance(value, PickledDTensor)}
    if len(dtensors) < len(places) or not dtensors:
        return None
    shape = next(iter(dtensors.values())).shape
    return HeldTensor(shape, {rank: value.placements() for rank, value in dtensors.items()}, {})
