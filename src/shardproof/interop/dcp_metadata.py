"""Pickles the ``.metadata`` of ``torch.distributed.checkpoint``.

Classes have the names of torch 2.2. Later versions moved ``TensorProperties`` and renamed its memory format,
but also read the old names. Fields that torch 2.2 lacks are left out, so readers use their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.interop.pickle_writer import Named, PickledCall, write_pickle

__all__ = ["EntryPosition", "StoredChunk", "metadata_pickle"]

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"


@dataclass(frozen=True, slots=True)
class EntryPosition:
    """The position of an entry in a file."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk of a tensor, and its entry."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: EntryPosition


def metadata_pickle(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Sequence[StoredChunk]]],
    aliases: Mapping[str, str],
    objects: Mapping[str, EntryPosition],
    paths: Mapping[str, tuple[str | int, ...]] | None,
) -> bytes:
    """The bytes of a ``.metadata`` file.

    Args:
        tensors: key to torch's name of the dtype, shape and chunks.
        aliases: key to the key in `tensors` whose entries it shares.
        objects: key to the entry.
        paths: key to the path in the nested state dict, which torch calls ``planner_data``.
    """
    return _Metadata().pickled(tensors, aliases, objects, paths)


class _Metadata:
    """Builds the objects. Equal sizes and properties are one object, so that the pickle is short."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, ...], PickledCall] = {}
        self._properties: dict[str, PickledCall] = {}

    def pickled(
        self,
        tensors: Mapping[str, tuple[str, tuple[int, ...], Sequence[StoredChunk]]],
        aliases: Mapping[str, str],
        objects: Mapping[str, EntryPosition],
        paths: Mapping[str, tuple[str | int, ...]] | None,
    ) -> bytes:
        described: dict[str, PickledCall] = {}
        stored: dict[PickledCall, PickledCall] = {}
        for key, place in objects.items():
            described[key] = _made(_METADATA, "BytesStorageMetadata", None)
            stored[_made(_METADATA, "MetadataIndex", {"fqn": key, "index": None})] = _info(place)
        for key, (dtype, shape, chunks) in tensors.items():
            described[key] = self._tensor(dtype, shape, chunks)
        for key, other in {**{key: key for key in tensors}, **aliases}.items():
            described[key] = described[other]
            for number, chunk in enumerate(tensors[other][2]):
                index = {"fqn": key, "index": number, "offset": self._size(chunk.offsets)}
                stored[_made(_METADATA, "MetadataIndex", index)] = _info(chunk.place)
        metadata = {
            "state_dict_metadata": described,
            "planner_data": None if paths is None else dict(paths),
            "storage_data": stored,
            "storage_meta": None,  # readers take a missing field for a torch that drops other ranks' objects
        }
        return write_pickle(_made(_METADATA, "Metadata", metadata), 4)

    def _tensor(self, dtype: str, shape: tuple[int, ...], chunks: Sequence[StoredChunk]) -> PickledCall:
        boxes = [{"offsets": self._size(item.offsets), "sizes": self._size(item.sizes)} for item in chunks]
        if dtype not in self._properties:
            layout = PickledCall(Named("torch.serialization", "_get_layout"), ("torch.strided",))
            contiguous = PickledCall(Named(_PROPERTIES, "MEM_FORMAT_ENCODING"), (0,))
            fields = (Named("torch", dtype), layout, False, contiguous, False)
            self._properties[dtype] = _made(_PROPERTIES, "TensorProperties", fields)
        state = {
            "properties": self._properties[dtype],
            "size": self._size(shape),
            "chunks": [_made(_METADATA, "ChunkStorageMetadata", box) for box in boxes],
        }
        return _made(_METADATA, "TensorStorageMetadata", state)

    def _size(self, sizes: tuple[int, ...]) -> PickledCall:
        return self._sizes.setdefault(sizes, PickledCall(Named("torch", "Size"), (sizes,)))


def _info(place: EntryPosition) -> PickledCall:
    state = {"relative_path": place.file, "offset": place.start, "length": place.nbytes}
    return _made(_FILESYSTEM, "_StorageInfo", state)


def _made(module: str, name: str, state: Any) -> PickledCall:
    return PickledCall(Named(module, name), state=state, is_new=True)
