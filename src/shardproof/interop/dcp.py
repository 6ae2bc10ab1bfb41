"""Reads checkpoints of ``torch.distributed.checkpoint`` (DCP), of torch 2.2 and newer.

A checkpoint is a folder. The file ``.metadata`` is a pickle that gives the shape and the chunks of each
tensor, and where the entry of each chunk and of each object lies. An entry is an archive of ``torch.save``
of its own, a range of a ``.distcp`` file.

torch's reader is silent if chunks overlap, or leave a hole in a tensor, and it does not check the CRC-32 of
entries. Reads through this description check both. Files that ``.metadata`` does not name are not read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import xxhash

from shardproof.dtypes import DTYPES
from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.interop.pickle_data import Opaque, read_pickle
from shardproof.interop.reader import Foreign, FormatReader, StoredBox, StoredView, TensorDescription
from shardproof.interop.torch_file import TorchFile, TorchTensor, unpickled, with_tensors

__all__ = ["DcpReader"]

_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A range of a file that holds one chunk or one object."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...]
    """Names of the stream transformations that the writer applied, for example "stream.zstd/1"."""


class DcpReader(FormatReader):
    """A DCP checkpoint, open for reading; see `FormatReader`.

    Example:
        >>> import tempfile, torch, torch.distributed.checkpoint as dcp
        >>> from shardproof.storage import LocalStorage
        >>> path = tempfile.mkdtemp()
        >>> state = {"weight": torch.arange(6.0).reshape(3, 2), "step": 3}
        >>> _ = dcp.save(state, checkpoint_id=path, no_dist=True)
        >>> reader = DcpReader(Foreign(LocalStorage(path)))
        >>> reader.tensors["weight"].shape, list(reader.object_keys()), reader.object("step")
        ((3, 2), ['step'], 3)
    """

    name = "dcp"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        try:
            data = self.storage.read(_METADATA)
        except StorageError as error:
            if not error.details.get("missing"):
                raise
            path = f"{self.location}/{_METADATA}"
            raise NotCommittedError(
                f"{self.location} has no {_METADATA}: it is no DCP checkpoint, or its save did not finish",
                file=path,
            ) from error
        self.identity = xxhash.xxh3_128_hexdigest(data)
        builders = {"torch.Size": lambda sizes=(): tuple(sizes)}
        self.metadata = read_pickle(data, builders, file=f"{self.location}/{_METADATA}").value
        """The pickled ``Metadata``, as `Opaque`."""
        self._objects: dict[str, _Entry] = {}
        try:
            self._describe(self.metadata.state)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.fault(
                _METADATA, f"it does not have the structure that DCP writes ({error!r})"
            ) from error

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True if the folder has the file ``.metadata``."""
        return foreign.has(_METADATA)

    def object_keys(self) -> Iterable[str]:
        """Keys of the objects."""
        return self._objects.keys()

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """An object as plain data; see `FormatReader.object`."""
        file = self._open(self._objects[key])
        if trust_pickle:
            return unpickled(file)
        return with_tensors(file)

    def verify_extra(self) -> int:
        """Verifies the entries of all objects; see `FormatReader.verify_extra`."""
        return sum(self._open(entry).verify() for entry in self._objects.values())

    def _describe(self, metadata: Mapping[str, Any]) -> None:
        """Takes keys, chunks and entries out of the state of the pickled ``Metadata``."""
        entries = {}
        for index, info in metadata["storage_data"].items():
            entries[index.state["fqn"], index.state.get("offset")] = self._entry(info.state)
        for key, described in metadata["state_dict_metadata"].items():
            if not isinstance(key, str):
                raise self.fault(_METADATA, f"the key {key!r} is no string")
            match described.name.rpartition(".")[2]:
                case "TensorStorageMetadata":
                    self.tensors[key] = self._tensor(key, described.state, entries)
                case "BytesStorageMetadata":
                    self._objects[key] = self._entry_of(entries, key, None)
                case kind:
                    raise self.fault(_METADATA, f"{key} is a {kind}, which is unknown")

    def _entry(self, state: Mapping[str, Any]) -> _Entry:
        name, offset, nbytes = state["relative_path"], state["offset"], state["length"]
        parts = PurePosixPath(name).parts
        if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\0" in name:
            raise self.fault(_METADATA, f"the file name {name!r} leads out of the checkpoint")
        if type(offset) is not int or type(nbytes) is not int or min(offset, nbytes) < 0:
            raise self.fault(
                _METADATA, f"an entry of {name} lies at byte {offset!r} and has {nbytes!r} bytes"
            )
        return _Entry("/".join(parts), offset, nbytes, tuple(state.get("transform_descriptors") or ()))

    def _entry_of(self, entries: Mapping[Any, _Entry], key: str, offsets: tuple[int, ...] | None) -> _Entry:
        entry = entries.get((key, offsets))
        if entry is None:
            chunk = "" if offsets is None else f" of the chunk at {offsets}"
            raise self.fault(_METADATA, f"the entry{chunk} of {key} is missing")
        return entry

    def _tensor(self, key: str, state: Mapping[str, Any], entries: Mapping[Any, _Entry]) -> TensorDescription:
        properties = state["properties"].state
        dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        name = dtype.name.removeprefix("torch.")
        if not isinstance(dtype, Opaque) or name not in DTYPES:
            raise self.fault(_METADATA, f"the dtype {name} of {key} is unknown")
        shape = _numbers(state["size"])
        boxes = []
        for chunk in state["chunks"]:
            offsets, sizes = _numbers(chunk.state["offsets"]), _numbers(chunk.state["sizes"])
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise self.fault(
                    _METADATA, f"a chunk of {key} has {len(sizes)} dimensions, expected {len(shape)}"
                )
            if 0 not in sizes:
                entry = self._entry_of(entries, key, offsets)
                view = partial(self._chunk, key, name, offsets, sizes, entry)
                boxes.append(StoredBox(offsets, sizes, entry.file, entry.offset, entry.nbytes, view))
        return TensorDescription(name, shape, sorted(boxes, key=operator.attrgetter("offsets")))

    def _open(self, entry: _Entry) -> TorchFile:
        if entry.transforms:
            raise FormatError(
                f"{entry.file}: an entry is stored through {', '.join(entry.transforms)}, which this version "
                "does not read",
                file=entry.file,
            )
        return TorchFile(self.storage, entry.file, start=entry.offset, size=entry.nbytes)

    def _chunk(
        self, key: str, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...], entry: _Entry
    ) -> StoredView:
        """The elements of a chunk, whose entry has the dtype and sizes that ``.metadata`` gives."""
        file = self._open(entry)
        found = file.value
        if not isinstance(found, TorchTensor) or (found.dtype, found.shape) != (dtype, sizes):
            raise FormatError(
                f"{file.path}: the entry of {key} at {offsets} is {found!r}, expected a tensor of "
                f"dtype {dtype} and shape {sizes}",
                file=file.path,
                key=key,
            )
        return file.view(found)


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{numbers} are no sizes")
    return numbers
