"""Entries of TorchSnapshot's metadata: containers, lists, values without a file, and keys.

An entry has a path and a dict with its ``type``. The parts of the path are escaped and joined by slashes.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

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
            yield path, _items(path, dict(inside))


def _items(path: str, inside: Mapping[str, Any]) -> ListOfEntries:
    """Builds a list from its own entry and all entries below it."""
    below: dict[str, list[tuple[int, str]]] = {}
    for name in inside:
        parent, _, number = name.rpartition("/")
        if name != path:
            below.setdefault(parent, []).append((int(number), name))
    return _list_of(path, inside, below)


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
