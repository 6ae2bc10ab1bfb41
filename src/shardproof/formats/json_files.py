"""Reads JSON files: metadata of several formats, and the index of Hugging Face with the file of each key."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from shardproof.engine.foreign import Foreign
from shardproof.engine.storage import Storage, check_name
from shardproof.errors import FormatError, StorageError

_MOST_JSON_BYTES = 100_000_000
"""Bytes of a JSON file, at most: the limit of safetensors headers."""


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
        raise FormatError(f"{path}: it is not valid JSON ({error})", file=path) from error
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
