"""Reads checkpoints of Orbax, the checkpointing library of JAX.

``_METADATA`` lists the leaves of the tree. Each array is a Zarr array of format 2 or 3, either in a folder of
its own or in an OCDBT database. A key is the path of the leaf with dots between its parts, which is also the
name of the folder. Python numbers are stored as arrays without dimensions, and strings in ``_strings.json``.
Empty containers and None are only in the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import xxhash

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import Foreign, FormatReader, TensorDescription
from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.formats.json_values import read_json
from shardproof.formats.ocdbt import MANIFEST, OcdbtArrays
from shardproof.formats.zarr.zarr import ZarrArrays
from shardproof.formats.zarr.zarr_metadata import ArrayMetadata

_METADATA = "_METADATA"
_ROOT_METADATA = "_CHECKPOINT_METADATA"
_STRINGS = "_strings.json"
_UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of the name of a folder whose save did not finish."""
_EMPTY: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "Dict": dict,
    "List": list,
    "Tuple": tuple,
    "NamedTuple": tuple,
}
"""Values that are only in the metadata, by their type."""


class OrbaxReader(FormatReader):
    """An Orbax checkpoint of a tree, open for reading; see `FormatReader`.

    The path is the folder of the tree, or the folder of a step that holds one tree among its items.

    Example:
        >>> import json, tempfile
        >>> from shardproof.storage import LocalStorage
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> array = {"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "|i1", "compressor": None,
        ...          "fill_value": None, "filters": None, "order": "C"}
        >>> storage.publish("params.bias/.zarray", json.dumps(array).encode())
        >>> storage.publish("params.bias/0", bytes(2))
        >>> path = [{"key": "params", "key_type": 2}, {"key": "bias", "key_type": 2}]
        >>> leaf = {"key_metadata": path, "value_metadata": {"value_type": "jax.Array"}}
        >>> storage.publish("_METADATA", json.dumps({"tree_metadata": {"('params', 'bias')": leaf}}).encode())
        >>> OrbaxReader(Foreign(storage)).tensors["params.bias"].shape
        (2,)
    """

    name = "orbax"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        if _UNFINISHED in self.storage.folder:
            raise NotCommittedError(
                f"{self.location} is a temporary folder of Orbax: its save did not finish", path=self.location
            )
        self.step = int(self.storage.folder) if self.storage.folder.isdecimal() else None
        self._enter_item(foreign)
        data, metadata = read_json(self.storage, _METADATA)
        is_database = self.storage.size(MANIFEST) is not None
        if metadata.get("use_ocdbt") and not is_database:
            raise StorageError(
                f"{self.location}/{MANIFEST} is missing. It holds the arrays, as {_METADATA} shows: restore "
                "it from a copy",
                file=f"{self.location}/{MANIFEST}",
                missing=True,
            )
        arrays = OcdbtArrays(self.storage) if is_database else ZarrArrays(self.storage)
        stores_all = metadata.get("store_array_data_equal_to_fill_value") is True
        self._stores_every_chunk: Callable[[ArrayMetadata], bool] = (
            lambda array: stores_all or array.fill is None  # TensorStore skips chunks of the fill value only
        )
        self._objects: dict[str, Callable[[], Any]] = {}
        try:
            for leaf in metadata["tree_metadata"].values():
                key = ".".join(str(part["key"]) for part in leaf["key_metadata"])
                self._add(key, leaf["value_metadata"]["value_type"], arrays)
        except (AttributeError, KeyError, TypeError) as error:
            raise self.fault(
                _METADATA, f"it does not have the structure that Orbax writes ({brief(error)})"
            ) from error
        self._files = {_METADATA: None, **arrays.files}
        self.notes += arrays.notes
        self.identity = f"{xxhash.xxh3_128_hexdigest(data)}-{arrays.identity}"

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True if the folder has ``_METADATA``, or is a step with a folder that has ``_METADATA``."""
        if foreign.has(_METADATA):
            return True
        return foreign.has(_ROOT_METADATA) and bool(_items(foreign))

    def object_keys(self) -> Iterable[str]:
        """Keys of numbers, strings, None and empty containers."""
        return self._objects.keys()

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """A value that is not an array; see `FormatReader.object`."""
        return self._objects[key]()

    def files(self) -> Mapping[str, int | None]:
        """Files of metadata and chunks; see `FormatReader.files`."""
        return self._files

    def _enter_item(self, foreign: Foreign) -> None:
        """Enters the only item of a step."""
        if foreign.has(_METADATA):
            return
        items = _items(foreign)
        if len(items) > 1:
            raise FormatError(
                f"{self.location} holds the items {', '.join(items)}: open the folder of one of them",
                file=self.location,
            )
        if not items:
            raise NotCommittedError(
                f"{self.location} has no {_METADATA}: it is not an Orbax checkpoint of a tree, or its save "
                "did not finish",
                file=f"{self.location}/{_METADATA}",
            )
        self.storage = foreign.storage.within(items[0])
        self.location = self.storage.location

    def _add(self, key: str, kind: str, arrays: ZarrArrays) -> None:
        """Adds a leaf of the tree."""
        if key in self.tensors or key in self._objects or key in self.unreadable:
            raise self.fault(_METADATA, f"two leaves have the key {key}")
        if kind in _EMPTY:
            self._objects[key] = _EMPTY[kind]
        elif kind == "string":
            self._objects[key] = partial(self._string, key)
        else:
            if key not in arrays.metadata:
                path = f"{self.location}/{key}"
                raise StorageError(
                    f"{path}: the array of {key} is missing, but {_METADATA} lists it (as {kind}): restore "
                    "it from a copy",
                    file=path,
                    key=key,
                    missing=True,
                )
            tensor = arrays.describe(key, key, every_chunk=self._stores_every_chunk)
            if kind == "scalar" and isinstance(tensor, TensorDescription) and not tensor.shape:
                self._objects[key] = partial(self._number, tensor)
            else:
                self.add(key, tensor)

    def _number(self, tensor: TensorDescription) -> Any:
        """The Python number in an array without dimensions."""
        (box,) = tensor.boxes
        view = box.located()
        data = bytearray(view.extent.nbytes)
        view.extent.read_into(memoryview(data))
        return torch.frombuffer(data, dtype=getattr(torch, tensor.dtype))[view.offset].item()

    def _string(self, key: str) -> str:
        found = read_json(self.storage, _STRINGS)[1].get(key)
        if not isinstance(found, str):
            raise self.fault(_STRINGS, f"the string of {key} is missing, but {_METADATA} lists it")
        return found


def _items(foreign: Foreign) -> list[str]:
    """Folders of a step that hold trees."""
    return [name for name in foreign.storage.folders() if foreign.has(f"{name}/{_METADATA}")]
