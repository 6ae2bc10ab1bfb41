"""Writes checkpoints of Megatron-Core in the format ``torch_dist``, which 0.16 to 0.19 load.

It is a DCP checkpoint with three differences:

- ``metadata.json`` names the format.
- Objects whose keys end in ``/shard_<offset>_<shape>`` are ShardedObjects, each stored in a list of one.
- All other objects are the common state, a nested dict in ``common.pt``. Megatron-Core 0.16 reads it only
  from there, and 0.19 also from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from shardproof.engine.foreign import state_paths
from shardproof.engine.storage import Storage
from shardproof.errors import StructureError
from shardproof.formats.dcp_writer import DcpWriter
from shardproof.formats.pickle_writer import Named, PickledCall
from shardproof.formats.torch.torch_writer import archive_of
from shardproof.formats.writer import Contents, WriteOptions

_SHARDED_OBJECT = re.compile(r".+/shard_[\d.]+_[\d.]+", re.DOTALL)
_COMMON, _COMMON_ENTRY = "common", "common_state/shard_0_1"
"""Keys of the common state in the readers: the one of ``common.pt``, and the one of the entry in 0.19."""
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class TorchDistWriter(DcpWriter):
    """Writes a ``torch_dist`` checkpoint; see `FormatWriter`.

    Keys are those of Megatron's ShardedTensors. The object ``common`` is the common state, and each object
    ``common.<name>`` is an entry of it. ``common.args`` is stored as an ``argparse.Namespace``. The training
    step becomes the entry ``iteration``, unless the common state has that entry. The caller writes
    ``latest_checkpointed_iteration.txt`` in the folder above.
    """

    name = "torch_dist"
    _keeps_step = True

    def __init__(self, contents: Contents, options: WriteOptions) -> None:
        super().__init__(contents, options)
        self._common = archive_of(_COMMON, _common_state(contents), self.name)
        empty = [key for key, (_, shape) in contents.tensors.items() if 0 in shape]
        if empty:
            note = (
                "Megatron-Core loads tensors without elements only with validate_access_integrity=False. "
                f"There are {len(empty)} of them; the first is {empty[0]!r}."
            )
            self.notes = [*self.notes, note]

    def commit(self, records: Mapping[str, dict[str, Any]], target: Storage) -> None:
        """Writes ``common.pt``, ``.metadata`` and ``metadata.json``; see `FormatWriter.commit`."""
        target.publish("common.pt", self._common.to_bytes(), replace=True)
        super().commit(records, target)
        target.publish("metadata.json", json.dumps(_CONFIG).encode(), replace=True)

    def _entries(self, contents: Contents) -> Mapping[str, Any]:
        return {key: [value] for key, value in contents.objects.items() if _is_sharded(key)}

    def _paths(self) -> None:
        return None


def _is_sharded(key: str) -> bool:
    return key != _COMMON_ENTRY and _SHARDED_OBJECT.fullmatch(key) is not None


def _common_state(contents: Contents) -> dict[str, Any]:
    """The common state: a nested dict of all objects that are not ShardedObjects.

    Raises:
        StructureError: two objects have the same path.
    """
    values = {key: value for key, value in contents.objects.items() if not _is_sharded(key)}
    common = _Container()
    entry = values.pop(_COMMON_ENTRY, None)
    for whole in (values.pop(_COMMON, None), entry[0] if isinstance(entry, list) and entry else entry):
        for name, value in whole.items() if isinstance(whole, dict) else ():
            _put(common, f"{_COMMON}.{name}", (name,), value)
    paths = state_paths(contents.tensors, values, contents.paths)
    for key, value in values.items():
        path = tuple(key.split(".")[1:]) if key.startswith(f"{_COMMON}.") else paths[key]
        _put(common, key, path, value)
    state: dict[str, Any] = _plain(common) if common else {}
    if contents.step is not None:
        state.setdefault("iteration", contents.step)
    if isinstance(state.get("args"), dict):
        state["args"] = PickledCall(Named("argparse", "Namespace"), state=state["args"], is_new=True)
    return state


class _Container(dict[str | int, Any]):
    """A dict or a list that is being built."""


def _put(root: _Container, key: str, path: tuple[str | int, ...], value: Any) -> None:
    node: Any = root
    for step in path[:-1]:
        node = node.setdefault(step, _Container()) if isinstance(node, _Container) else None
    if not isinstance(node, _Container) or path[-1] in node:
        raise StructureError(
            f"torch_dist cannot hold {key!r}: the common state has another value at this path. Leave one of "
            f"them out (exclude=, or --exclude {key})",
            key=key,
        )
    node[path[-1]] = value


def _plain(value: Any) -> Any:
    """Converts a node to a list if its keys are numbers, otherwise to a dict."""
    if not isinstance(value, _Container):
        return value
    if all(isinstance(step, int) for step in value):
        return [_plain(value[step]) for step in sorted(value)]
    return {step: _plain(item) for step, item in value.items()}
