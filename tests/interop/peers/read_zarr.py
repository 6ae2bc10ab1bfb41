"""Reads Zarr arrays with zarr-python: `read_zarr.py PATH`.

Every folder below PATH with the metadata of an array is opened: through the group if PATH is one, by itself
otherwise, as in the checkpoints of Megatron-Core. A key is the array's path, its parts joined by dots. What
the group lists as its members must be what is there.

zarr-python 3.1 opens no bfloat16, nor a group that has consolidated metadata with one. The fact `refused`
has the error for each array that it does not open, and for the group as ".".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import zarr
from peer_result import Result

REFUSALS = (TypeError, ValueError, KeyError)

root = Path(sys.argv[1])
result = Result()
refused: dict[str, str] = {}


def array_folders(folder: Path) -> list[Path]:
    """Folders with the metadata of an array, but for the lock folders of Megatron-Core."""
    found = [file.parent for file in folder.rglob(".zarray") if not file.parent.name.endswith(".sync")]
    nodes = [(file, json.loads(file.read_text())) for file in folder.rglob("zarr.json")]
    found += [file.parent for file, node in nodes if node["node_type"] == "array"]
    return sorted(found)


def open_group() -> Any:
    """The group at the root, or None."""
    if not (root / "zarr.json").exists() and not (root / ".zgroup").exists():
        return None
    try:
        group = zarr.open_group(root, mode="r")
        result.facts["group_attributes"] = dict(group.attrs)
        result.facts["consolidated"] = group.metadata.consolidated_metadata is not None
        arrays = [path for path, member in group.members(max_depth=None) if isinstance(member, zarr.Array)]
    except REFUSALS as error:
        refused["."] = f"{type(error).__name__}: {error}"
        return None
    there = [folder.relative_to(root).as_posix() for folder in array_folders(root)]
    if sorted(arrays) != sorted(there):
        raise ValueError(f"the group lists {sorted(arrays)}, the folder has {sorted(there)}")
    return group


group = open_group()
for folder in array_folders(root):
    path = folder.relative_to(root)
    key = ".".join(path.parts)
    try:
        array = zarr.open_array(folder, mode="r") if group is None else group[path.as_posix()]
        values = array[...]
    except REFUSALS as error:
        refused[key] = f"{type(error).__name__}: {error}"
        continue
    result.add_tensor(key, values)
    result.facts.setdefault("formats", {})[key] = array.metadata.zarr_format
    if array.attrs:
        result.facts.setdefault("attributes", {})[key] = dict(array.attrs)
result.facts["refused"] = refused
result.facts["zarr"] = zarr.__version__
result.write()
