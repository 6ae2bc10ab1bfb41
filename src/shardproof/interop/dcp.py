"""Reads checkpoints of ``torch.distributed.checkpoint`` (DCP), of torch 2.2 and newer.

A checkpoint is a folder. The file ``.metadata`` is a pickle that gives the shape and the chunks of each
tensor, and where the entry of each chunk and of each object lies. An entry is an archive of ``torch.save``
of its own, a range of a ``.distcp`` file.

torch's reader is silent if chunks overlap, or leave a hole in a tensor, and it does not check the CRC-32 of
entries. This reader checks both. Files that ``.metadata`` does not name are not read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from shardproof.dtypes import DTYPES
from shardproof.errors import FormatError, NotCommittedError, StorageError, TilingError
from shardproof.geometry import Boxes, tiling_faults
from shardproof.interop.pickle_data import Opaque, read_pickle
from shardproof.interop.torch_file import TorchFile, TorchTensor

__all__ = ["DcpCheckpoint", "DcpChunk", "DcpTensor"]

_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A range of a file that holds one chunk or one object."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...]
    """Names of the stream transformations that the writer applied, for example "stream.zstd/1"."""


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A stored box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    entry: _Entry | None
    """Where the bytes lie; None for an empty box."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of a DCP checkpoint, not read yet."""

    dtype: str
    """Torch's name of the dtype, for example "bfloat16"."""
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


class DcpCheckpoint:
    """A DCP checkpoint, open for reading. Nothing that its pickles name is imported or called.

    Args:
        path: the folder that holds ``.metadata``.

    Raises:
        NotCommittedError: there is no ``.metadata``, so the save did not finish.
        FormatError: ``.metadata`` is damaged, or an entry that it needs is not in it.
        TilingError: the chunks of a tensor overlap or leave a hole.

    Example:
        >>> import tempfile, torch, torch.distributed.checkpoint as dcp
        >>> path = tempfile.mkdtemp()
        >>> state = {"weight": torch.arange(6.0).reshape(3, 2), "step": 3}
        >>> _ = dcp.save(state, checkpoint_id=path, no_dist=True)
        >>> checkpoint = DcpCheckpoint(path)
        >>> checkpoint.keys()
        ['step', 'weight']
        >>> checkpoint.read("weight", (1, 0), (2, 1)).tolist(), checkpoint.object("step")
        ([[2.0], [4.0]], 3)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = str(self.path / _METADATA)
        try:
            data = Path(self._file).read_bytes()
        except FileNotFoundError as error:
            raise NotCommittedError(
                f"{self.path} has no {_METADATA}: it is no DCP checkpoint, or its save did not finish",
                file=self._file,
            ) from error
        except OSError as error:
            raise StorageError(f"{self._file} cannot be read: {error.strerror}", file=self._file) from error
        metadata = read_pickle(data, {"torch.Size": lambda sizes=(): tuple(sizes)}, file=self._file).value
        self.tensors: dict[str, DcpTensor] = {}
        """The tensors by key."""
        self._objects: dict[str, _Entry] = {}
        try:
            self._take(metadata.state)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._fault(f"it does not have the structure that DCP writes ({error!r})") from error

    def keys(self) -> list[str]:
        """The keys of all tensors and objects, sorted."""
        return sorted([*self.tensors, *self._objects])

    def read(
        self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Reads a box of a tensor. It reads each chunk that the box intersects once, and whole.

        Args:
            key: key of the tensor.
            offsets: (d,) first element of the box; None for the begin of the tensor.
            sizes: (d,) sizes of the box; None for all up to the end of the tensor.

        Raises:
            KeyError: no tensor has this key.
            ValueError: the box lies outside of the tensor.
            CorruptChunkError: bytes do not match their CRC-32.
            FormatError, StorageError: an entry is damaged, or its file is missing or short.
        """
        tensor = self.tensors[key]
        begin = tuple(offsets) if offsets is not None else (0,) * len(tensor.shape)
        size = tuple(sizes) if sizes is not None else _minus(tensor.shape, begin)
        if len(begin) != len(tensor.shape) or len(size) != len(begin):
            raise ValueError(f"{key}: a box of {len(begin)} dimensions, expected {len(tensor.shape)}")
        end = _plus(begin, size)
        if any(at < 0 for at in (*begin, *size, *_minus(tensor.shape, end))):
            raise ValueError(f"{key}: the box at {begin} of sizes {size} is outside of {tensor.shape}")
        result = torch.empty(size, dtype=getattr(torch, tensor.dtype), device="cpu")
        for chunk in tensor.chunks:
            low = tuple(map(max, begin, chunk.offsets))
            high = tuple(map(min, end, _plus(chunk.offsets, chunk.sizes)))
            if chunk.entry is not None and all(a < b for a, b in zip(low, high, strict=True)):
                stored = self._read_chunk(key, tensor, chunk)
                _part(result, begin, low, high).copy_(_part(stored, chunk.offsets, low, high))
        return result

    def object(self, key: str) -> Any:
        """Reads an object as plain data. Objects of classes become `Opaque`, tensors in it `torch.Tensor`.

        Raises:
            KeyError: no object has this key.
            CorruptChunkError, FormatError, StorageError: the entry is damaged, or its file missing or short.
        """
        with self._open(self._objects[key]) as file:
            return _with_tensors(file, file.value, 0)

    def verify(self) -> int:
        """Reads all entries and checks their CRC-32.

        Returns:
            The bytes of tensor data that were proved.

        Raises:
            CorruptChunkError, FormatError, StorageError: the first damage.
        """
        proved = 0
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                if chunk.entry is not None:
                    with self._open(chunk.entry) as file:
                        self._check_chunk(key, tensor, chunk, file)
                        proved += file.verify()
        for entry in self._objects.values():
            with self._open(entry) as file:
                proved += file.verify()
        return proved

    def _fault(self, text: str) -> FormatError:
        return FormatError(f"{self._file}: {text}", file=self._file)

    def _take(self, metadata: dict[str, Any]) -> None:
        """Takes keys, chunks and entries out of the state of the pickled ``Metadata``."""
        entries = {}
        for index, info in metadata["storage_data"].items():
            entries[index.state["fqn"], index.state.get("offset")] = self._entry(info.state)
        for key, described in metadata["state_dict_metadata"].items():
            if not isinstance(key, str):
                raise self._fault(f"the key {key!r} is no string")
            match described.name.rpartition(".")[2]:
                case "TensorStorageMetadata":
                    self.tensors[key] = self._tensor(key, described.state, entries)
                case "BytesStorageMetadata":
                    self._objects[key] = self._entry_of(entries, key, None)
                case kind:
                    raise self._fault(f"{key} is a {kind}, which is unknown")

    def _entry(self, state: dict[str, Any]) -> _Entry:
        name, offset, nbytes = state["relative_path"], state["offset"], state["length"]
        parts = PurePosixPath(name).parts
        if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\0" in name:
            raise self._fault(f"the file name {name!r} leads out of the checkpoint")
        if type(offset) is not int or type(nbytes) is not int or min(offset, nbytes) < 0:
            raise self._fault(f"an entry of {name} lies at byte {offset!r} and has {nbytes!r} bytes")
        return _Entry(name, offset, nbytes, tuple(state.get("transform_descriptors") or ()))

    def _entry_of(self, entries: dict[Any, _Entry], key: str, offsets: tuple[int, ...] | None) -> _Entry:
        entry = entries.get((key, offsets))
        if entry is None:
            place = "" if offsets is None else f" of the chunk at {offsets}"
            raise self._fault(f"the entry{place} of {key} is missing")
        return entry

    def _tensor(self, key: str, state: dict[str, Any], entries: dict[Any, _Entry]) -> DcpTensor:
        properties = state["properties"].state
        dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        name = dtype.name.removeprefix("torch.")
        if not isinstance(dtype, Opaque) or name not in DTYPES:
            raise self._fault(f"the dtype {name} of {key} is unknown")
        shape = _numbers(state["size"])
        chunks = []
        for chunk in state["chunks"]:
            offsets, sizes = _numbers(chunk.state["offsets"]), _numbers(chunk.state["sizes"])
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise self._fault(f"a chunk of {key} has {len(sizes)} dimensions, expected {len(shape)}")
            entry = None if 0 in sizes else self._entry_of(entries, key, offsets)
            chunks.append(DcpChunk(offsets, sizes, entry))
        self._check_tiling(key, shape, [chunk for chunk in chunks if chunk.entry is not None])
        return DcpTensor(name, shape, tuple(chunks))

    def _check_tiling(self, key: str, shape: tuple[int, ...], chunks: Sequence[DcpChunk]) -> None:
        boxes = Boxes(
            np.array([chunk.offsets for chunk in chunks], np.int64).reshape(len(chunks), len(shape)),
            np.array([chunk.sizes for chunk in chunks], np.int64).reshape(len(chunks), len(shape)),
        )
        faults = tiling_faults(np.array([shape], np.int64), np.zeros(len(chunks), np.int64), boxes)
        if faults:
            fault = faults[0]
            raise TilingError(
                f"{self._file}: the chunks of {key} do not tile its shape {shape}: {fault.kind} at "
                f"{fault.offsets} of sizes {fault.sizes}",
                key=key,
            )

    def _open(self, entry: _Entry) -> TorchFile:
        if entry.transforms:
            raise FormatError(
                f"{entry.file}: an entry is stored through {', '.join(entry.transforms)}, which this version "
                "does not read",
                file=entry.file,
            )
        return TorchFile(self.path / entry.file, start=entry.offset, size=entry.nbytes)

    def _read_chunk(self, key: str, tensor: DcpTensor, chunk: DcpChunk) -> torch.Tensor:
        assert chunk.entry is not None
        with self._open(chunk.entry) as file:
            return file.read(self._check_chunk(key, tensor, chunk, file))

    def _check_chunk(self, key: str, tensor: DcpTensor, chunk: DcpChunk, file: TorchFile) -> TorchTensor:
        """The tensor of an entry, which has the dtype and sizes that ``.metadata`` gives."""
        found = file.value
        if not isinstance(found, TorchTensor) or (found.dtype, found.shape) != (tensor.dtype, chunk.sizes):
            raise FormatError(
                f"{file.path}: the entry of {key} at {chunk.offsets} is {found!r}, expected a tensor of "
                f"dtype {tensor.dtype} and shape {chunk.sizes}",
                file=file.path,
                key=key,
            )
        return found


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{numbers} are no sizes")
    return numbers


def _plus(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _minus(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _part(
    tensor: torch.Tensor, origin: Sequence[int], low: Sequence[int], high: Sequence[int]
) -> torch.Tensor:
    """The part of a tensor from the global offsets `low` up to `high`; the tensor begins at `origin`."""
    return tensor[tuple(slice(a - o, b - o) for o, a, b in zip(origin, low, high, strict=True))]


def _with_tensors(file: TorchFile, value: Any, depth: int) -> Any:
    """A value with its tensors read."""
    if depth > 200:
        raise FormatError(f"{file.path}: an object is nested deeper than 200 levels", file=file.path)
    if isinstance(value, TorchTensor):
        return file.read(value).clone()
    if isinstance(value, dict):
        return {key: _with_tensors(file, item, depth + 1) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(file, item, depth + 1) for item in value)
    return value
