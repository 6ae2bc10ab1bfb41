"""Writes checkpoints of ``torch.distributed.checkpoint`` (DCP), which torch 2.2 and newer load.

A unit is one ``.distcp`` file: entries back to back, each an archive of ``torch.save`` of one chunk or one
object. The commit writes ``.metadata``. `DcpReader` is the reader.

Classes in the pickle of ``.metadata`` have the names of torch 2.2. Later versions moved ``TensorProperties``
and renamed its memory format, but also read the old names. Fields that torch 2.2 lacks are left out, so
readers use their defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from shardproof._utils.humanize import listed
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import state_paths
from shardproof.engine.geometry import Boxes, cut
from shardproof.engine.storage import Storage
from shardproof.formats.pickle_writer import Named, PickledCall, write_pickle
from shardproof.formats.torch.torch_writer import ArchiveTensor, TorchArchive, archive_of
from shardproof.formats.writer import (
    BoxSource,
    Contents,
    FormatWriter,
    Unit,
    WriteOptions,
    check_units,
    new_file,
    notes_of,
)

_METADATA = ".metadata"
_PROPERTIES_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
_FILE_BYTES = 4 << 30
"""Bytes of tensors in one file, if the caller sets no limit."""
_CHUNK_BYTES = 512 << 20
"""Bytes of a chunk, at most: torch reads a whole chunk for any part of it, on each rank that needs one."""
_CHUNKS_IN_FILE = 4
"""Chunks of a large tensor that fill one file. Smaller chunks make the files more equal in size."""

_Chunk = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, offsets and sizes."""
_Place = tuple[str, int, int]
"""File, first byte and number of bytes of an entry."""


class DcpWriter(FormatWriter):
    """Writes a DCP checkpoint; see `FormatWriter`.

    A tied tensor is stored once, and both keys lead to the same entries. The paths of keys in the nested
    state dict (``planner_data``) are those of `state_paths`.

    Objects keep their keys. For a dict or a list of dicts, torch 2.4 and newer look for the leaves
    (``optim.param_groups.0.lr``). If the leaves are missing, they look for the whole value
    (``optim.param_groups``). torch 2.2 and 2.3 look only for the whole value.
    """

    name = "dcp"
    last_file = _METADATA
    stores_state_dicts = True

    _keeps_step: ClassVar[bool] = False
    """True if a subclass stores the step."""

    def __init__(self, contents: Contents, options: WriteOptions) -> None:
        self._contents = contents
        self._piece_bytes = options.piece_bytes
        self._objects = {
            key: archive_of(key, value, self.name) for key, value in self._entries(contents).items()
        }
        """The entries of objects. The first file holds them."""
        files = _files(contents.tensors, options.max_file_bytes or _FILE_BYTES)
        if self._objects and not files:
            files.append([])
        self._files = {f"__{number}_0.distcp": chunks for number, chunks in enumerate(files)}
        itemsize = {key: DTYPES[dtype].itemsize for key, (dtype, _) in contents.tensors.items()}
        self.units = []
        for name, chunks in self._files.items():
            boxes = [chunk for chunk in chunks if 0 not in chunk[2]]
            nbytes = sum(math.prod(sizes) * itemsize[key] for key, _, sizes in boxes)
            self.units.append(Unit(name, boxes, nbytes))
        self.notes: list[str] = notes_of(self.name, contents, keeps_step=self._keeps_step)
        if contents.aliases:
            self.notes.append(
                f"{self.name} cannot record ties: tied tensors are stored once, and programs that load them "
                "get tensors of equal values, unless their own modules are tied: "
                f"{listed(contents.aliases)}."
            )

    def write(self, unit: Unit, source: BoxSource, target: Storage) -> dict[str, Any]:
        """Writes a ``.distcp`` file; see `FormatWriter.write`. It returns where each entry lies."""
        entries = []
        objects = self._objects.values() if unit.name == self.units[0].name else ()
        tensors = (
            TorchArchive(
                ArchiveTensor.box(
                    source, key, self._contents.tensors[key][0], offsets, sizes, self._piece_bytes
                )
            )
            for key, offsets, sizes in self._files[unit.name]
        )
        with new_file(target, unit.name) as file:
            for archive in chain(objects, tensors):
                start = file.size
                archive.write(file)
                entries.append([start, file.size - start])
            file.finish()
        return {"entries": entries}

    def commit(self, records: Mapping[str, dict[str, Any]], target: Storage) -> None:
        """Writes ``.metadata``; see `FormatWriter.commit`.

        Raises:
            StructureError: a unit was not written.
            StorageError: a file of a unit is missing, or was cut.
        """
        check_units(
            target,
            self.units,
            records,
            lambda name, record: [(name, sum(nbytes for _, nbytes in record["entries"]))],
        )
        objects: dict[str, _Place] = {}
        chunks: dict[str, list[tuple[_Chunk, _Place]]] = {key: [] for key in self._contents.tensors}
        for name, in_file in self._files.items():
            places = ((name, start, nbytes) for start, nbytes in records[name]["entries"])
            if name == self.units[0].name:
                objects = dict(zip(self._objects, places, strict=False))
            for chunk, place in zip(in_file, places, strict=True):
                chunks[chunk[0]].append((chunk, place))
        data = _Metadata().pickled(self._contents, chunks, objects, self._paths())
        target.publish(_METADATA, data, replace=True)

    def _entries(self, contents: Contents) -> Mapping[str, Any]:
        """The objects that get entries of their own."""
        return contents.objects

    def _paths(self) -> Mapping[str, tuple[str | int, ...]] | None:
        """The paths of the keys in the nested state dict; None if the format stores none."""
        tensors = [*self._contents.tensors, *self._contents.aliases]
        return state_paths(tensors, self._objects, self._contents.paths)


class FsdpDTensorWriter(DcpWriter):
    """Writes the ``fsdp_dtensor`` format of Megatron-FSDP: a DCP checkpoint with the keys as given.

    Megatron-FSDP names the tensors ``model.module.<name>`` and ``optimizer.state.<name or number>.<slot>``.
    """

    name = "fsdp_dtensor"


def _files(tensors: Mapping[str, tuple[str, tuple[int, ...]]], most_bytes: int) -> list[list[_Chunk]]:
    """The chunks of each file, in the order of the tensors.

    A file has at most `most_bytes`, unless a single element is larger, and the files are about equal.
    """
    left = sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in tensors.values())
    count = -(-left // most_bytes)
    most_chunk = min(_CHUNK_BYTES, left if count <= 1 else max(left // count // _CHUNKS_IN_FILE, 1))
    files: list[list[_Chunk]] = []
    used = 0
    for key, (dtype, shape) in tensors.items():
        itemsize = DTYPES[dtype].itemsize
        most = max(most_chunk // itemsize, 1)
        parts = Boxes.whole(shape)
        if math.prod(shape) > most:
            parts, _ = cut(parts, most)
        for offsets, sizes in map(parts.pair, range(len(parts))):
            nbytes = math.prod(sizes) * itemsize
            fair = left / max(count - len(files) + 1, 1)  # if the open file and all later ones were equal
            if not files or used + nbytes > most_bytes or used + nbytes / 2 > fair:
                left -= used
                files.append([])
                used = 0
            files[-1].append((key, offsets, sizes))
            used += nbytes
    return files


class _Metadata:
    """Builds the objects of ``.metadata``. Equal sizes and properties are one, so the pickle is short."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, ...], PickledCall] = {}
        self._properties: dict[str, PickledCall] = {}

    def pickled(
        self,
        contents: Contents,
        chunks: Mapping[str, Sequence[tuple[_Chunk, _Place]]],
        objects: Mapping[str, _Place],
        paths: Mapping[str, tuple[str | int, ...]] | None,
    ) -> bytes:
        """The bytes of the file.

        Args:
            contents: the written tensors.
            chunks: by key of a tensor, its chunks and their entries.
            objects: key to the entry.
            paths: key to the path in the nested state dict, which torch calls ``planner_data``.
        """
        described: dict[str, PickledCall] = {}
        stored: dict[PickledCall, PickledCall] = {}
        for key, place in objects.items():
            described[key] = _made("BytesStorageMetadata", None)
            stored[_made("MetadataIndex", {"fqn": key, "index": None})] = _info(*place)
        for key, (dtype, shape) in contents.tensors.items():
            described[key] = self._tensor(dtype, shape, [chunk for chunk, _ in chunks[key]])
        for key, other in {**{key: key for key in contents.tensors}, **contents.aliases}.items():
            described[key] = described[other]
            for number, ((_, offsets, _), place) in enumerate(chunks[other]):
                index = {"fqn": key, "index": number, "offset": self._size(offsets)}
                stored[_made("MetadataIndex", index)] = _info(*place)
        metadata = {
            "state_dict_metadata": described,
            "planner_data": None if paths is None else dict(paths),
            "storage_data": stored,
            "storage_meta": None,  # readers take a missing field for a torch that drops other ranks' objects
        }
        return write_pickle(_made("Metadata", metadata), 4)

    def _tensor(self, dtype: str, shape: tuple[int, ...], chunks: Sequence[_Chunk]) -> PickledCall:
        boxes = [{"offsets": self._size(at), "sizes": self._size(sizes)} for _, at, sizes in chunks]
        if dtype not in self._properties:
            layout = PickledCall(Named("torch.serialization", "_get_layout"), ("torch.strided",))
            contiguous = PickledCall(Named(_PROPERTIES_MODULE, "MEM_FORMAT_ENCODING"), (0,))
            fields = (Named("torch", dtype), layout, False, contiguous, False)
            self._properties[dtype] = _made("TensorProperties", fields, _PROPERTIES_MODULE)
        state = {
            "properties": self._properties[dtype],
            "size": self._size(shape),
            "chunks": [_made("ChunkStorageMetadata", box) for box in boxes],
        }
        return _made("TensorStorageMetadata", state)

    def _size(self, sizes: tuple[int, ...]) -> PickledCall:
        return self._sizes.setdefault(sizes, PickledCall(Named("torch", "Size"), (sizes,)))


def _info(file: str, start: int, nbytes: int) -> PickledCall:
    state = {"relative_path": file, "offset": start, "length": nbytes}
    return _made("_StorageInfo", state, "torch.distributed.checkpoint.filesystem")


def _made(name: str, state: Any, module: str = "torch.distributed.checkpoint.metadata") -> PickledCall:
    return PickledCall(Named(module, name), state=state, is_new=True)
