"""Writes safetensors files: one, or several with an index, as Hugging Face does.

A unit is one file, which one process writes from start to end. To write in parallel, bound the bytes of a
file (``max_file_bytes``), so that there are several files.

    model.safetensors                                            all tensors in one file; or
    model-00001-of-00002.safetensors, model-00002-of-..., and
    model.safetensors.index.json                                 the file of each tensor
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import numpy as np

from shardproof._utils.humanize import listed
from shardproof.dtypes import DTYPES
from shardproof.engine.format import PAGE_BYTES, encode_entries, shard_header
from shardproof.engine.geometry import row_pointers
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError, StructureError
from shardproof.formats.json_values import PREFIX, check_aliases, encode_embedded
from shardproof.formats.writer import (
    BoxSource,
    Contents,
    FormatWriter,
    Unit,
    WriteOptions,
    box_bytes,
    check_units,
    new_file,
    notes_of,
)

_INDEX_NAME = "model.safetensors.index.json"
_PAIRS_OF_FLOATS = "float4_e2m1fn_x2"
"""Torch's dtype whose element is two 4-bit numbers. The shape in a header counts them one by one."""


@dataclass(frozen=True, slots=True)
class _PlannedTensor:
    """An entry of a file."""

    name: str
    key: str
    """Key of the tensor in the contents. It differs from `name` for a tied tensor."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def stored_kind(self) -> tuple[str, tuple[int, ...]]:
        """Code of the dtype and shape in the header."""
        if self.dtype == _PAIRS_OF_FLOATS:
            return "F4", (*self.shape[:-1], 2 * self.shape[-1])
        return DTYPES[self.dtype].code, self.shape


class SafetensorsWriter(FormatWriter):
    """Writes safetensors files. The format has no ties: a tied tensor is stored under each of its names.

    Texts of the user's metadata are stored in ``__metadata__`` under their names. Plain values, the step and
    the other metadata are stored there as JSON under ``shardproof:objects``, ``shardproof:step`` and
    ``shardproof:metadata``, encoded as in docs/format.md. Without ``max_file_bytes``, there is one file. A
    tensor with more bytes gets a file of its own.

    Raises:
        StructureError: the format cannot hold a dtype or a key, or a header would be too large.
        PlainDataError: a value is not plain data.
    """

    name: ClassVar[str] = "safetensors"
    _default_file_bytes: ClassVar[int | None] = None

    def __init__(self, contents: Contents, options: WriteOptions) -> None:
        self._piece_bytes = options.piece_bytes
        self.notes: list[str] = []
        check_aliases(contents)
        tensors = [_entry(key, *kind) for key, kind in contents.tensors.items()] + self._tied(contents)
        files = _filled(tensors, options.max_file_bytes or self._default_file_bytes)
        metadata: list[dict[str, str]] = [{} for _ in files]
        metadata[0] = self._metadata(contents)
        self._files = {
            _file_name(at, len(files)): _PlannedFile.of(tensors, texts | {"format": "pt"})
            for at, (tensors, texts) in enumerate(zip(files, metadata, strict=True))
        }
        self.units = [
            Unit(
                name,
                [(tensor.key, (0,) * len(tensor.shape), tensor.shape) for tensor in file.tensors],
                file.nbytes,
            )
            for name, file in self._files.items()
        ]
        self.last_file = _INDEX_NAME if len(files) > 1 else self.units[0].name

    def write(self, unit: Unit, source: BoxSource, target: Storage) -> dict[str, Any]:
        """Writes a file and flushes it; see `FormatWriter.write`."""
        planned = self._files[unit.name]
        with new_file(target, unit.name) as file:
            file.put(planned.header)
            for tensor, (key, offsets, sizes) in zip(planned.tensors, unit.boxes, strict=True):
                for piece in box_bytes(source, key, tensor.dtype, offsets, sizes, self._piece_bytes):
                    file.put(piece)
            return {"size": file.finish()}

    def commit(self, records: Mapping[str, dict[str, Any]], target: Storage) -> None:
        """Checks that all planned files were written, then writes the index, if there are several.

        Raises:
            StructureError: a unit was not written.
            StorageError: a file is missing or has another size, or the storage failed.
        """
        sizes = {name: len(file.header) + file.nbytes for name, file in self._files.items()}
        check_units(target, self.units, records, lambda name, _: [(name, sizes[name])])
        if len(self._files) == 1:
            return
        index = {
            "metadata": {"total_size": sum(file.nbytes for file in self._files.values())},
            "weight_map": {
                tensor.name: name for name, file in self._files.items() for tensor in file.tensors
            },
        }
        text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        target.publish(_INDEX_NAME, text.encode(), replace=True)

    def _tied(self, contents: Contents) -> list[_PlannedTensor]:
        """The entries of tied tensors. Adds a note about them."""
        if contents.aliases:
            self.notes.append(
                "safetensors has no ties, so tied tensors are stored under each of their names: "
                f"{listed(contents.aliases)}"
            )
        return [
            replace(_entry(alias, *contents.tensors[key]), key=key)
            for alias, key in sorted(contents.aliases.items())
        ]

    def _metadata(self, contents: Contents) -> dict[str, str]:
        """The texts beside the tensors."""
        texts, others = _texts(contents.metadata)
        embedded = encode_embedded(replace(contents, metadata=others))
        return texts | {name: json.dumps(value, allow_nan=False) for name, value in embedded.items()}


class HuggingFaceWriter(SafetensorsWriter):
    """Writes the weights of a model as Hugging Face's libraries do.

    A tied tensor is stored once, under the name that has its bytes in the source checkpoint. Plain values
    other than texts are left out. Notes name both. The format's other files (``config.json``, the tokenizer)
    are not part of a checkpoint. Without ``max_file_bytes``, files have 5 GB, for several processes to write.

    Raises:
        StructureError: see `SafetensorsWriter`.
    """

    name: ClassVar[str] = "hf"
    _default_file_bytes: ClassVar[int | None] = 5 * 10**9

    def _tied(self, contents: Contents) -> list[_PlannedTensor]:
        if contents.aliases:
            pairs = [f"{alias} (as {key})" for alias, key in sorted(contents.aliases.items())]
            self.notes.append(
                f"tied tensors are stored once, and config.json has to tie them again: {listed(pairs)}"
            )
        return []

    def _metadata(self, contents: Contents) -> dict[str, str]:
        metadata, lost = _texts(contents.metadata)
        self.notes += notes_of(self.name, replace(contents, metadata=lost))
        texts, others = _texts(contents.objects)
        if others:
            self.notes.append(
                "Hugging Face's format holds only tensors and texts, so these values are left out: "
                f"{listed(others)}"
            )
        return metadata | texts


@dataclass(frozen=True, slots=True)
class _PlannedFile:
    """The plan of a file."""

    header: bytes
    tensors: Sequence[_PlannedTensor]
    """In the order of the file."""
    nbytes: int
    """Bytes of the tensors."""

    @staticmethod
    def of(tensors: Sequence[_PlannedTensor], metadata: dict[str, str]) -> _PlannedFile:
        """Plans a file. Tensors of the largest alignment are first, so that all are aligned."""
        ordered = sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].alignment)
        counts = np.array([tensor.nbytes for tensor in ordered], np.int64)
        try:
            entries = encode_entries(
                [tensor.name for tensor in ordered],
                [tensor.stored_kind[0] for tensor in ordered],
                [tensor.stored_kind[1] for tensor in ordered],
                row_pointers(counts)[:-1],
                counts,
            )
            header = shard_header(entries, metadata)
        except FormatError as error:
            raise StructureError(f"safetensors cannot hold the checkpoint: {error.message}") from error
        assert len(header) % PAGE_BYTES == 0
        return _PlannedFile(header, ordered, int(counts.sum()))


def _entry(name: str, dtype: str, shape: tuple[int, ...]) -> _PlannedTensor:
    """The entry of a tensor. Raises `StructureError` if the format cannot hold it."""
    if dtype not in DTYPES or DTYPES[dtype].parts > 1 or (dtype == _PAIRS_OF_FLOATS and not shape):
        raise StructureError(
            f"{name!r}: safetensors has no type for {dtype} of shape {list(shape)}. Leave it out (--exclude "
            f"{name}), or write another format",
            key=name,
        )
    if name == "__metadata__":
        raise StructureError(f"{name!r} is reserved by safetensors: give the tensor another name", key=name)
    return _PlannedTensor(name, name, dtype, shape)


def _filled(tensors: Sequence[_PlannedTensor], limit: int | None) -> list[list[_PlannedTensor]]:
    """The tensors of each file, at least one file. Tensors fill files one after the other."""
    files: list[list[_PlannedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if limit is not None and files[-1] and filled + tensor.nbytes > limit:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.nbytes
    return files


def _file_name(at: int, count: int) -> str:
    """The name of a file among several.

    >>> _file_name(0, 1), _file_name(1, 12)
    ('model.safetensors', 'model-00002-of-00012.safetensors')
    """
    return "model.safetensors" if count == 1 else f"model-{at + 1:05d}-of-{count:05d}.safetensors"


def _texts(values: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Texts that a header can hold under their own names, and all other values except "format": "pt"."""
    texts, others = dict[str, str](), dict[str, Any]()
    for key, value in values.items():
        if type(value) is not str or key.startswith(PREFIX) or (key == "format" and value != "pt"):
            others[key] = value
        elif key != "format":
            texts[key] = value
    return texts, others
