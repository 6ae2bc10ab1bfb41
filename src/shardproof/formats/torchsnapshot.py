"""Reads snapshots of TorchSnapshot.

A snapshot is a folder. The file ``.snapshot_metadata``, JSON or YAML, has an entry for each value of each
rank. An entry gives the position of the bytes, or the value itself. Tensors are raw bytes, several in one
file if they are small, or files of ``torch.save``.

Keys are the paths of entries with dots between their parts: ``model.layer.weight``. The key of an entry that
ranks do not share begins with the rank, ``1.rng.rng_state``, unless one rank saved the snapshot. A list
without tensors and dicts in it is one object.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from typing import Any
from urllib.parse import unquote

import xxhash

from shardproof._utils.humanize import brief
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import (
    FileRange,
    Foreign,
    FormatReader,
    StoredBox,
    StoredView,
    TensorDescription,
    Unreadable,
    shape_of,
)
from shardproof.engine.storage import check_name
from shardproof.errors import StorageError
from shardproof.formats.torch.torch_file import TorchFile, unpickled, with_tensors
from shardproof.formats.torch.torch_tensors import CONVERT, TorchTensor

_DICTS = ("dict", "OrderedDict")
PRIMITIVES = ("int", "str", "bool", "bytes", "float")
"""Types of values that the metadata itself holds."""


@dataclass(frozen=True, slots=True)
class ListOfEntries:
    """A list without tensors and dicts."""

    items: list[Any]
    """Entries of the metadata, or lists of them."""


def collapsed(entries: Mapping[str, Any], filled: set[str]) -> Iterator[tuple[str, Any]]:
    """Yields the leaves: tensors, values, empty dicts, and lists without tensors and dicts.

    Args:
        entries: entries of a rank, by path.
        filled: paths of the containers that are not empty on some rank.
    """
    descended = {
        above
        for path, entry in entries.items()
        if entry["type"] not in ("list", "object", *PRIMITIVES)
        for above in containers_of(path)
    }
    whole: dict[str, list[tuple[str, Any]]] = {
        path: [] for path, entry in entries.items() if entry["type"] == "list" and path not in descended
    }
    """Lists without tensors and dicts, and the entries in each."""
    for path, entry in entries.items():
        outer = [name for name in (*containers_of(path), path) if name in whole]
        if outer:
            whole[min(outer, key=len)].append((path, entry))
        elif entry["type"] in _DICTS:
            if path not in filled and not entry["keys"]:
                yield path, {}
        elif entry["type"] != "list":
            yield path, entry
    for path, inside in whole.items():
        if len(inside) > 1 or (inside and path not in filled):
            below: dict[str, list[tuple[int, str]]] = {}  # by list: its items' numbers and paths
            for name, _ in inside:
                parent, _, number = name.rpartition("/")
                if name != path:
                    below.setdefault(parent, []).append((int(number), name))
            yield path, _list_of(path, dict(inside), below)


def _list_of(
    path: str, inside: Mapping[str, Any], below: Mapping[str, list[tuple[int, str]]]
) -> ListOfEntries:
    rows = sorted(below.get(path, []))
    if [number for number, _ in rows] != list(range(len(rows))):
        raise ValueError(f"elements of the list {path} are missing: it has {[number for number, _ in rows]}")
    return ListOfEntries(
        [
            _list_of(name, inside, below) if inside[name]["type"] == "list" else inside[name]
            for _, name in rows
        ]
    )


def containers_of(path: str) -> Iterator[str]:
    """Paths of the containers of an entry, the innermost first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def is_replicated(entry: Any) -> bool:
    """True if all ranks share the entry."""
    if isinstance(entry, ListOfEntries):
        return bool(entry.items) and all(map(is_replicated, entry.items))
    return entry.get("replicated") is True


def unique_keys(places: Iterable[tuple[int | None, str]]) -> dict[tuple[int | None, str], str]:
    """The key of each rank and path: the unescaped parts joined by dots, or the path if keys would clash."""
    keys = {}
    taken: dict[str, int] = {}
    for rank, path in places:
        parts = [unquote(part) for part in path.split("/")]
        keys[rank, path] = ".".join(parts if rank is None else [str(rank), *parts])
        taken[keys[rank, path]] = taken.get(keys[rank, path], 0) + 1
    return {
        (rank, path): key if taken[key] == 1 else path if rank is None else f"{rank}/{path}"
        for (rank, path), key in keys.items()
    }


def primitive(kind: str, text: str) -> Any:
    """The value of an entry that has no file."""
    if kind == "str":
        return text
    if kind == "int":
        return int(text)
    if kind == "bool":
        return {"True": True, "False": False}[text]
    raw = base64.b64decode(text, validate=True)
    return raw if kind == "bytes" else struct.unpack("<d", raw)[0]


_METADATA = ".snapshot_metadata"
_MOST_LEVELS = 200
_SHARDED = ("ShardedTensor", "DTensor")
_LOST_ELEMENT = "TorchSnapshot does not write the last element of bfloat16 tensors of odd size: it is lost"


@dataclass(frozen=True, slots=True)
class _StoredBox:
    """A box of a tensor, and the position of its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    file: str
    start: int
    nbytes: int | None
    """Number of bytes; None for all bytes of the file from `start` on."""
    is_raw: bool
    """True for raw bytes, False for a file of torch.save."""


class TorchSnapshotReader(FormatReader):
    """A snapshot of TorchSnapshot, open for reading; see `FormatReader`.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> entry = {"type": "int", "serialized_value": "7", "replicated": True, "readable": None}
        >>> metadata = {"version": "0.1.0", "world_size": 2, "manifest": {"0/progress/step": entry}}
        >>> storage.publish(".snapshot_metadata", json.dumps(metadata).encode())
        >>> reader = TorchSnapshotReader(Foreign(storage))
        >>> reader.object("progress.step")
        7
    """

    name = "torchsnapshot"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        data = self.read_commit(_METADATA, "snapshot")
        self.identity = xxhash.xxh3_128_hexdigest(data)
        self._objects: dict[str, Any] = {}
        self._sizes: dict[str, int | None] = {}
        try:
            metadata = self._parsed(data)
            self.world_size = metadata["world_size"]
            if type(self.world_size) is not int or self.world_size < 1:
                raise ValueError(f"world_size is {brief(self.world_size)}")
            self._describe(metadata["manifest"])
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise self.fault(
                _METADATA, f"it does not have the structure that TorchSnapshot writes ({brief(error)})"
            ) from error

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True if the folder has the file ``.snapshot_metadata``."""
        return foreign.has(_METADATA)

    def object_keys(self) -> Iterable[str]:
        """Keys of the values that are not tensors."""
        return self._objects.keys()

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """A value as plain data; see `FormatReader.object`."""
        return self._value(self._objects[key], trust_pickle)

    def files(self) -> Mapping[str, int | None]:
        """Files of tensors and objects, with the sizes of those that hold one raw tensor."""
        return self._sizes

    def _parsed(self, data: bytes) -> Any:
        """The metadata as JSON, or as YAML, which versions before 0.1 wrote."""
        try:
            return json.loads(data)
        except RecursionError as error:
            raise self.fault(_METADATA, "it is nested too deep") from error
        except ValueError as error:
            if data.lstrip()[:1] == b"{":
                raise self.fault(_METADATA, f"it is damaged or cut ({error})") from error
        try:
            yaml = import_module("yaml")
        except ImportError as error:
            raise self.fault(
                _METADATA, "it is not JSON. If it is YAML, as old versions write it, run: pip install pyyaml"
            ) from error

        class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
            def compose_node(self, parent: Any, index: Any) -> Any:
                if self.check_event(yaml.AliasEvent):
                    raise ValueError("the YAML has aliases, which TorchSnapshot does not write")
                return super().compose_node(parent, index)

        try:
            return yaml.load(data, Loader)
        except (yaml.YAMLError, RecursionError) as error:
            raise self.fault(_METADATA, f"it is neither JSON nor YAML ({brief(error)})") from error

    def _describe(self, manifest: Mapping[str, Any]) -> None:
        """Describes the tensors and objects in the entries of all ranks."""
        found: dict[tuple[int | None, str], Any] = {}
        """By rank (None for all) and path, an entry, a list of sharded entries, or `ListOfEntries`."""
        ranks = self._entries(manifest)
        filled = {above for entries in ranks.values() for path in entries for above in containers_of(path)}
        for rank, entries in ranks.items():
            for path, entry in collapsed(entries, filled):
                is_empty = (isinstance(entry, ListOfEntries) and not entry.items) or entry == {}
                if isinstance(entry, dict) and entry.get("type") in _SHARDED:
                    found.setdefault((None, path), []).append(entry)
                elif is_replicated(entry) or (is_empty and all(path in e for e in ranks.values())):
                    found.setdefault((None, path), entry)
                else:
                    found[None if self.world_size == 1 else rank, path] = entry
        names = unique_keys(found)
        for place, entry in found.items():
            self._add(names[place], entry)
        if any(isinstance(entry, list) for entry in found.values()):
            self.notes.append(
                "TorchSnapshot does not store the shapes of sharded tensors: if the metadata lacks the last "
                "shards, the tensors look shorter than they were saved."
            )
        if self.tensors:
            self.notes.append("TorchSnapshot has no checksums: changed bytes of tensors are not found.")

    def _entries(self, manifest: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """By rank and path, the entries."""
        ranks: dict[int, dict[str, Any]] = {}
        for name, entry in manifest.items():
            rank, _, path = name.partition("/")
            if not rank.isascii() or not rank.isdigit() or int(rank) >= self.world_size:
                raise ValueError(f"the entry {name} has no rank")
            if not isinstance(entry.get("type"), str):
                raise ValueError(f"the entry {name} has no type")
            if path.count("/") > _MOST_LEVELS:
                raise ValueError(f"the entry {name:.100} is nested deeper than {_MOST_LEVELS} levels")
            ranks.setdefault(int(rank), {})[path] = entry
        return ranks

    def _add(self, key: str, entry: Any) -> None:
        if isinstance(entry, list):
            shards = [shard for item in entry for shard in item["shards"]]
            boxes_of = {(part.offsets, part.sizes): part for part in map(self._part, shards)}
            parts = list(boxes_of.values())
            ends = [[at + size for at, size in zip(p.offsets, p.sizes, strict=True)] for p in parts]
            shape = tuple(map(max, zip(*ends, strict=True)))
            dtypes = {part.dtype for part in parts}
        elif isinstance(entry, ListOfEntries) or entry.get("type") not in ("Tensor", "ChunkedTensor"):
            self._objects[key] = entry
            self._note_files(entry)
            return
        elif entry["type"] == "ChunkedTensor":
            parts = [self._part(chunk) for chunk in entry["chunks"]]
            shape, dtypes = shape_of(entry["shape"]), {_dtype(entry), *(part.dtype for part in parts)}
        else:
            shape = shape_of(entry["shape"])
            parts = [self._part({"offsets": [0] * len(shape), "sizes": shape, "tensor": entry})]
            dtypes = {parts[0].dtype}
        if len(dtypes) != 1:
            raise ValueError(f"{key} has the dtypes {sorted(dtypes)}")
        (dtype,) = dtypes
        if dtype not in DTYPES:
            self.unreadable[key] = Unreadable(f"a tensor of {dtype} and shape {list(shape)}", CONVERT)
            return
        boxes = []
        for part in sorted(parts, key=lambda part: part.offsets):
            if nbytes := prod(part.sizes) * DTYPES[part.dtype].itemsize:
                view = partial(self._view, key, part, nbytes)
                stored = part.nbytes or nbytes
                boxes.append(StoredBox(part.offsets, part.sizes, part.file, part.start, stored, view))
        self.tensors[key] = TensorDescription(dtype, shape, boxes)

    def _part(self, shard: Mapping[str, Any]) -> _StoredBox:
        tensor = shard["tensor"]
        offsets, sizes = shape_of(shard["offsets"]), shape_of(shard["sizes"])
        if len(offsets) != len(sizes) or shape_of(tensor["shape"]) != sizes:
            raise ValueError(f"a shard of sizes {sizes} at {offsets} has the shape {tensor['shape']}")
        file = self._file(tensor["location"])
        limits = tensor.get("byte_range")
        start, end = (0, None) if limits is None else shape_of(limits)
        if end is not None and end < start:
            raise ValueError(f"the bytes {limits} of {file} end before they begin")
        nbytes = None if end is None else end - start
        dtype, is_raw = _dtype(tensor), tensor["serializer"] == "buffer_protocol"
        if not is_raw and tensor["serializer"] != "torch_save":
            dtype = f"{dtype} ({tensor['serializer']})"
        if limits is not None or not is_raw or _loses_element(dtype, sizes) or dtype not in DTYPES:
            self._sizes.setdefault(file, None)
        else:
            self._sizes[file] = prod(sizes) * DTYPES[dtype].itemsize
        return _StoredBox(offsets, sizes, dtype, file, start, nbytes, is_raw)

    def _view(self, key: str, part: _StoredBox, nbytes: int) -> StoredView:
        """The elements of a box. It raises the errors of `Extent.read_into`."""
        if not part.is_raw:
            file = TorchFile(self.storage, part.file, start=part.start, size=part.nbytes)
            tensor = file.value
            if isinstance(tensor, TorchTensor) and (tensor.dtype, tensor.shape) == (part.dtype, part.sizes):
                return file.view(tensor)
            raise self.fault(
                part.file,
                f"{key} is {brief(tensor)}, expected a tensor of dtype {part.dtype} and shape "
                f"{list(part.sizes)}",
                key=key,
            )
        size = self.storage.size(part.file)
        found = part.nbytes if part.nbytes is not None else size
        if size is not None and found != nbytes:
            is_lost = _loses_element(part.dtype, part.sizes) and found == nbytes - 2
            why = (
                f"{_LOST_ELEMENT}. Load {key} from another source; exclude= leaves it out"
                if is_lost
                else "The file was cut or replaced: restore it from a copy"
            )
            raise self.fault(
                part.file,
                f"{key} has {found} bytes, expected {nbytes} for the dtype {part.dtype} and the shape "
                f"{list(part.sizes)}. {why}",
                key=key,
            )
        return StoredView.dense(part.sizes, FileRange(self.storage, part.file, part.start, nbytes))

    def _file(self, location: Any) -> str:
        if not isinstance(location, str):
            raise ValueError(f"the location {brief(location)} is not a file name")
        try:
            return check_name(location, self.location)
        except StorageError as error:
            raise self.fault(
                _METADATA, f"the location {brief(location)} leads out of the snapshot: {error.message}"
            ) from error

    def _note_files(self, entry: Any) -> None:
        """Notes the files of an object, and checks that its entry has a value."""
        if isinstance(entry, ListOfEntries):
            for item in entry.items:
                self._note_files(item)
        elif entry and entry["type"] == "object":
            if entry["serializer"] != "torch_save":
                raise ValueError(f"an object is stored by {brief(entry['serializer'])}, expected torch_save")
            self._sizes.setdefault(self._file(entry["location"]), None)
        else:
            self._value(entry, False)

    def _value(self, entry: Any, trust_pickle: bool) -> Any:
        if entry == {}:
            return {}
        if isinstance(entry, ListOfEntries):
            return [self._value(item, trust_pickle) for item in entry.items]
        kind = entry["type"]
        if kind == "object":
            file = TorchFile(self.storage, self._file(entry["location"]))
            return unpickled(file) if trust_pickle else with_tensors(file, file.value)
        if kind not in PRIMITIVES or not isinstance(entry["serialized_value"], str):
            raise ValueError(f"an entry has the type {brief(kind)}, which is unknown")
        return primitive(kind, entry["serialized_value"])


def _dtype(tensor: Mapping[str, Any]) -> str:
    return str(tensor["dtype"]).removeprefix("torch.")


def _loses_element(dtype: str, sizes: Sequence[int]) -> bool:
    return dtype == "bfloat16" and prod(sizes) % 2 == 1
