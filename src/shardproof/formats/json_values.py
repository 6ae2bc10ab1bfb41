"""JSON of several formats: files of metadata, the index of Hugging Face, and values beside the tensors.

Formats without a place for plain values, step and metadata get them as JSON values under names that begin
with ``shardproof:``: attributes of a Zarr group, or texts of a safetensors header.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from shardproof.engine.foreign import Foreign, TensorDescription, Unreadable
from shardproof.engine.state import decode_plain, encode_plain
from shardproof.engine.storage import Storage, check_name
from shardproof.errors import FormatError, PlainDataError, StorageError, StructureError
from shardproof.formats.writer import Contents

_MOST_JSON_BYTES = 100_000_000
"""Bytes of a JSON file, at most: the limit of safetensors headers."""
PREFIX = "shardproof:"
OBJECTS, ALIASES = f"{PREFIX}objects", f"{PREFIX}aliases"
STEP, METADATA = f"{PREFIX}step", f"{PREFIX}metadata"
_MOST_STEP = 2**63 - 1


@dataclass(frozen=True, slots=True)
class HfIndex:
    """An index. `read` checks it without its files, and `check` compares it with a file."""

    path: str
    """Path of the index, for messages."""
    keys_of: Mapping[str, Collection[str]]
    """Name of each file to the keys that it holds."""
    total_size: int | None
    """Bytes of all tensors; None if the index does not give them."""
    digest: str

    @classmethod
    def read(cls, storage: Storage, name: str) -> HfIndex:
        """Reads an index.

        Raises:
            FormatError: the index is damaged, or names a file outside of the storage.
            StorageError: the index is missing or unreadable.
        """
        path = f"{storage.location}/{name}"
        data, value = read_json(storage, name)
        found = value.get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
            raise FormatError(f"{path}: it has no weight_map from keys to names of files", file=path)
        keys_of: dict[str, set[str]] = {}
        for key, file in found.items():
            keys_of.setdefault(file, set()).add(key)
        for file in keys_of:
            try:
                check_name(file, storage.location)
            except StorageError as error:
                raise FormatError(
                    f"{path}: the file name {file!r} leads out of the checkpoint", file=path
                ) from error
        metadata = value.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        return cls(path, keys_of, total if type(total) is int else None, xxhash.xxh3_128_hexdigest(data))

    def check(self, file: str, keys: Collection[str]) -> None:
        """Compares the keys of a file with the index."""
        expected = self.keys_of[file]
        missing, more = sorted(set(expected).difference(keys)), sorted(set(keys).difference(expected))
        if missing or more:
            key = (missing or more)[0]
            raise FormatError(
                f"{self.path}: it disagrees with {file}: {len(missing)} keys of the index are not in the "
                f"file, and {len(more)} keys of the file are not in the index, for example {key}. One of the "
                "two is from another checkpoint: restore it, or name the one file to read",
                file=self.path,
                key=key,
            )


def read_json(storage: Storage, name: str, most: int = _MOST_JSON_BYTES) -> tuple[bytes, dict[str, Any]]:
    """Reads a file of at most `most` bytes. Returns its bytes, and the JSON object in it.

    Raises:
        FormatError: the file is not a JSON object, has a name twice in one object, or is too large.
        StorageError: the file is missing or unreadable.
    """
    data = storage.read_at_most(name, most)
    return data, parse_json(data, f"{storage.location}/{name}")


def parse_json(data: bytes, path: str) -> dict[str, Any]:
    """Parses a JSON object."""
    try:
        found = json.loads(data, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else error
        raise FormatError(f"{path}: it is not valid JSON ({why})", file=path) from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: it is a JSON {type(found).__name__}, not an object", file=path)
    return found


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has one name twice")
    return found


def top_level_files(foreign: Foreign, suffix: str) -> list[str]:
    """Sorted names of the files directly in a folder that end with a suffix."""
    return [name for name in foreign.storage.list() if "/" not in name and name.endswith(suffix)]


def encode_embedded(contents: Contents) -> dict[str, Any]:
    """Returns plain values, step and metadata by name, as JSON values. Absent ones get no name.

    Raises:
        PlainDataError: a value is not plain data.

    >>> encode_embedded(Contents({}, objects={"betas": (0.9, 1)}, step=3))
    {'shardproof:objects': {'betas': {'$tuple': [0.9, 1]}}, 'shardproof:step': 3}
    """
    found: dict[str, Any] = {}
    if contents.objects:
        found[OBJECTS] = {key: encode_plain(value, key) for key, value in sorted(contents.objects.items())}
    if contents.step is not None:
        found[STEP] = contents.step
    if contents.metadata:
        found[METADATA] = encode_plain(dict(contents.metadata), "metadata")
    return found


def check_aliases(contents: Contents) -> None:
    """Checks that each alias names a tensor and is not the key of a tensor itself."""
    for alias, key in contents.aliases.items():
        if alias in contents.tensors or key not in contents.tensors:
            raise StructureError(f"{alias!r} cannot be tied to {key!r}", key=alias)


@dataclass(frozen=True, slots=True)
class EmbeddedValues:
    """What was stored beside the tensors."""

    objects: Mapping[str, Any]
    """Plain values, encoded."""
    aliases: Mapping[str, str]
    unreadable: Mapping[str, Unreadable]
    """Keys that are tied to a tensor that cannot be read."""
    step: int | None
    metadata: Mapping[str, Any]

    @staticmethod
    def of(
        members: Mapping[str, Any],
        tensors: Mapping[str, TensorDescription],
        unreadable: Mapping[str, Unreadable],
        fault: Callable[[str], FormatError],
    ) -> EmbeddedValues:
        """Checks and decodes the values that a file has under the names of `shardproof:`.

        Raises:
            FormatError: a value is damaged.
        """
        objects, aliases = members.get(OBJECTS, {}), members.get(ALIASES, {})
        step = members.get(STEP)
        if not isinstance(objects, dict) or not isinstance(aliases, dict):
            raise fault(f"{OBJECTS} and {ALIASES} are not JSON objects")
        known = tensors.keys() | unreadable.keys()
        for alias, key in aliases.items():
            if alias in known or not isinstance(key, str) or key not in known:
                raise fault(f"{ALIASES} ties {alias!r} to {key!r}")
        if clash := objects.keys() & (known | aliases.keys()):
            raise fault(f"{min(clash)!r} is a tensor and a value of {OBJECTS}")
        if step is not None and (type(step) is not int or not 0 <= step <= _MOST_STEP):
            raise fault(f"{STEP} is {step!r}")
        try:
            metadata = decode_plain(members.get(METADATA, {}), path=METADATA)
        except PlainDataError as error:
            raise fault(error.message) from error
        if not isinstance(metadata, dict):
            raise fault(f"{METADATA} is not a dict")
        readable = {alias: key for alias, key in aliases.items() if key in tensors}
        tied = {alias: unreadable[key] for alias, key in aliases.items() if key in unreadable}
        return EmbeddedValues(objects, readable, tied, step, metadata)

    def object(self, key: str) -> Any:
        """Decodes a plain value.

        Raises:
            KeyError: no value has this key.
            FormatError: the value is damaged.
        """
        try:
            return decode_plain(self.objects[key], path=key)
        except PlainDataError as error:
            raise FormatError(f"{OBJECTS}: {error.message}", key=key) from error
