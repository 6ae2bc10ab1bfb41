"""Reads Zarr groups and arrays in a folder, of format 2 and 3.

Each array is a folder with its metadata, ``zarr.json`` or ``.zarray``, and a file for each chunk or shard. A
key is the path of the array with dots instead of slashes. The reader uses the arrays' own metadata.
Consolidated metadata is a copy of it, and must agree.

Zarr stores no list of chunks: an absent chunk reads as the fill value, whether it was lost or never written.
A note gives the number of absent chunks and an example. Groups that shardproof wrote have an attribute that
every chunk is stored. An absent chunk in such a group is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import xxhash

from shardproof.engine.foreign import Foreign, FormatReader, TensorDescription, Unreadable
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.formats.json_values import EmbeddedValues, read_json
from shardproof.formats.zarr.zarr_chunks import ZarrChunks
from shardproof.formats.zarr.zarr_metadata import (
    EVERY_CHUNK_ATTRIBUTE,
    KEY_ATTRIBUTE,
    MOST_METADATA_BYTES,
    ArrayMetadata,
    parse_array,
)

_V2, _V3 = ".zarray", "zarr.json"
_GROUP_FILES = (_V3, ".zgroup", _V2, ".zmetadata")


class ZarrArrays:
    """The arrays below a folder: their metadata, and where their chunks lie.

    Args:
        storage: the folder.
        is_skipped: returns True for the folder of an array to skip, for example a leftover.

    Raises:
        FormatError: metadata is damaged.
        StorageError: a file is missing or unreadable.
    """

    names: frozenset[str]
    """All files below the folder."""
    metadata: dict[str, tuple[str, ArrayMetadata | Unreadable]]
    """By folder of the array: name of the metadata file, and the parsed metadata."""
    groups: dict[str, dict[str, Any]]
    """By folder of a group of Zarr v3, its metadata."""

    def __init__(self, storage: Storage, is_skipped: Callable[[str], bool] = lambda _: False) -> None:
        self.storage = storage
        self.names = self.listed()
        self.metadata = {}
        self.groups = {}
        self.keys: dict[str, str] = {}
        """By folder of an array, the key in its attributes."""
        self.chunks = self.chunks_of(self.names)
        self._digest = xxhash.xxh3_128()
        for name in sorted(self.names):  # ".zarray" is before "zarr.json", which is used if both exist
            folder, _, last = name.rpartition("/")
            if last in (_V2, _V3) and not is_skipped(folder):
                self._add(folder, name)

    def listed(self) -> frozenset[str]:
        """All files below the folder."""
        return frozenset(self.storage.list())

    def read(self, name: str) -> tuple[bytes, dict[str, Any]]:
        """The bytes of a metadata file, and its object; see `read_json`."""
        return read_json(self.storage, name, MOST_METADATA_BYTES)

    def chunks_of(self, names: frozenset[str]) -> ZarrChunks:
        """Describes the chunks among some files."""
        return ZarrChunks(self.storage, names)

    def describe(
        self, folder: str, key: str, *, every_chunk: Callable[[ArrayMetadata], bool] = lambda _: False
    ) -> TensorDescription | Unreadable:
        """Describes an array as a tensor, if it can be read.

        Args:
            folder: folder of the array; "" for the root.
            key: key of the tensor.
            every_chunk: returns True for an array of which the writer stores every chunk. An absent chunk of
                it is an error.

        Raises:
            FormatError: the array has more chunks than any checkpoint.
        """
        name, array = self.metadata[folder]
        if isinstance(array, Unreadable):
            return array
        prefix = f"{folder}/" if folder else ""
        boxes = self.chunks.boxes(key, array, prefix, name, every_chunk=every_chunk(array))
        return TensorDescription(array.dtype, array.shape, boxes)

    @property
    def identity(self) -> str:
        """A digest of the metadata and of the chunks that are absent."""
        return f"{self._digest.hexdigest()}-{self.chunks.absent}"

    @property
    def notes(self) -> list[str]:
        """Notes on absent chunks of the described arrays; see `FormatReader.notes`."""
        if not self.chunks.filled:
            return []
        return [
            f"{self.chunks.absent} absent chunks, such as {self.chunks.filled[0]}, read as the fill value; "
            "Zarr cannot tell a lost chunk from an empty one"
        ]

    @property
    def files(self) -> dict[str, int | None]:
        """Files of metadata and chunks: name to expected bytes, None if they are not known."""
        return {**dict.fromkeys(name for name, _ in self.metadata.values()), **self.chunks.sizes}

    def _add(self, folder: str, name: str) -> None:
        document = self._read(name)
        if name.endswith(_V3) and document.get("node_type") == "group":
            self.groups[folder] = document
            return
        array = self.parsed(document, folder, name)
        if folder in self.metadata:
            other = self.metadata[folder][1]
            if _kind(array) != _kind(other):
                path = f"{self.storage.location}/{name}"
                raise FormatError(
                    f"{path}: it says that {folder} is {_kind(array)}, {_V2} says {_kind(other)}", file=path
                )
        self.metadata[folder] = name, array
        attributes = document.get("attributes")
        key = attributes.get(KEY_ATTRIBUTE) if isinstance(attributes, dict) else None
        if isinstance(key, str) and key:
            self.keys[folder] = key

    def parsed(self, document: Mapping[str, Any], folder: str, name: str) -> ArrayMetadata | Unreadable:
        """Parses the metadata of an array; see `parse_array`."""
        attributes = document.get("attributes")
        if document.get("zarr_format") == 2:
            attributes = None
            prefix = f"{folder}/" if folder else ""
            if str(document.get("dtype"))[1:2] == "u" and f"{prefix}.zattrs" in self.names:
                attributes = self._read(f"{prefix}.zattrs")
        attributes = attributes if isinstance(attributes, dict) else {}
        return parse_array(document, attributes, f"{self.storage.location}/{name}", folder or "the root")

    def _read(self, name: str) -> dict[str, Any]:
        """Reads a metadata file and adds it to the digest."""
        data, document = self.read(name)
        self._digest.update(f"{name}\0{len(data)}\0".encode("utf-8", "surrogateescape"))
        self._digest.update(data)
        return document


def _kind(array: ArrayMetadata | Unreadable) -> str:
    return array.kind if isinstance(array, Unreadable) else f"{array.dtype}{list(array.shape)}"


class ZarrReader(FormatReader):
    """A Zarr group or array in a folder, open for reading; see `FormatReader`.

    Example:
        >>> import json, tempfile
        >>> from shardproof.storage import LocalStorage
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> array = {"zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "|u1", "compressor": None,
        ...          "fill_value": 7, "filters": None, "order": "C"}
        >>> storage.publish("ids/.zarray", json.dumps(array).encode())
        >>> storage.publish("ids/0", bytes([1, 2]))
        >>> reader = ZarrReader(Foreign(storage))
        >>> reader.tensors["ids"].shape, len(reader.tensors["ids"].boxes)
        ((4,), 2)
        >>> print(*reader.notes)  # doctest: +ELLIPSIS
        1 absent chunks, such as ids/1, read as the fill value; Zarr cannot tell ...
    """

    name = "zarr"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        arrays = ZarrArrays(self.storage)
        if not arrays.metadata and not arrays.names.intersection(_GROUP_FILES):
            raise NotCommittedError(
                f"{self.location} has neither {_V3} nor .zgroup, and no array: it is not a Zarr group",
                path=self.location,
            )
        self._check_consolidated(arrays)
        attributes = arrays.groups.get("", {}).get("attributes")
        attributes = attributes if isinstance(attributes, dict) else {}
        is_whole = attributes.get(EVERY_CHUNK_ATTRIBUTE) is True
        folders: dict[str, str] = {}
        for folder in arrays.metadata:
            key = arrays.keys.get(folder) or folder.replace("/", ".") or self.storage.folder
            if key in folders:
                raise self.fault(
                    arrays.metadata[folder][0], f"{folder} and {folders[key]} have the same key {key}"
                )
            folders[key] = folder
            self.add(key, arrays.describe(folder, key, every_chunk=lambda _: is_whole))
        self._embedded = EmbeddedValues.of(
            attributes, self.tensors, self.unreadable, lambda text: self.fault(_V3, text)
        )
        self.aliases = dict(self._embedded.aliases)
        self.unreadable |= self._embedded.unreadable
        self.step, self.user_metadata = self._embedded.step, dict(self._embedded.metadata)
        self.notes += arrays.notes
        self.identity = arrays.identity
        self._files = arrays.files

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True if the folder is a Zarr group or array; False for a folder of arrays without a group."""
        return any(foreign.has(name) for name in _GROUP_FILES)

    def object_keys(self) -> Iterable[str]:
        """Keys of the values that a conversion of shardproof stored. Other writers store no values."""
        return self._embedded.objects

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """A value that a conversion of shardproof stored; see `FormatReader.object`."""
        return self._embedded.object(key)

    def files(self) -> Mapping[str, int | None]:
        """Files of metadata and chunks; see `FormatReader.files`."""
        return self._files

    def _check_consolidated(self, arrays: ZarrArrays) -> None:
        """Compares consolidated metadata, of the root and of groups, with that of the arrays."""
        if ".zmetadata" in arrays.names:
            _, found = arrays.read(".zmetadata")
            self._compare(arrays, ".zmetadata", "", found.get("metadata"))
        for folder, document in arrays.groups.items():
            consolidated = document.get("consolidated_metadata")
            if consolidated is not None:
                documents = consolidated.get("metadata") if isinstance(consolidated, dict) else None
                self._compare(arrays, f"{folder}/{_V3}".lstrip("/"), folder, documents)

    def _compare(self, arrays: ZarrArrays, name: str, folder: str, documents: Any) -> None:
        """Compares the consolidated metadata of a group."""
        if not isinstance(documents, dict) or not all(isinstance(item, dict) for item in documents.values()):
            raise self.fault(name, "the consolidated metadata is damaged")
        listed = set()
        for path, document in documents.items():
            if name == ".zmetadata":
                path, _, last = f"/{path}".rpartition("/")
                if last != _V2:
                    continue
            elif document.get("node_type") != "array":
                continue
            where = "/".join(filter(None, (folder, path.strip("/"))))
            listed.add(where)
            found = arrays.metadata.get(where)
            if found is None:
                file = f"{where}/{_V2 if name == '.zmetadata' else _V3}"
                raise StorageError(
                    f"{self.location}/{file} is missing: {name} lists the array. Restore the array from a "
                    "copy, or remove it from the consolidated metadata",
                    file=f"{self.location}/{file}",
                    missing=True,
                )
            if arrays.parsed(document, where, name) != found[1]:
                raise self.fault(
                    name,
                    f"the consolidated metadata of {where} differs from {found[0]}: one of them is stale or "
                    "damaged. Consolidate again if the array is right",
                )
        inside = {where for where in arrays.metadata if not folder or where.startswith(f"{folder}/")}
        for where in sorted(inside - listed)[:1]:
            self.notes.append(
                f"the consolidated metadata in {name} does not list {where}, which is read nevertheless"
            )
