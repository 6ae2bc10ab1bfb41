"""The protocol of a writer of a format: plan units, write them anywhere and in any order, commit.

A writer cuts a checkpoint into units. One process writes a unit, usually as one file, and no two units share
a file. So processes write units in parallel, and complete units survive an interrupted conversion. The commit
writes the metadata, last.

    units (same on every process) -> write each unit, in any process -> commit, in one process
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from shardproof.dtypes import DTYPES
from shardproof.engine.format import FileRecord, check_sizes
from shardproof.engine.geometry import Boxes, cut
from shardproof.engine.state import as_bytes
from shardproof.engine.storage import FileWriter, Storage
from shardproof.errors import StructureError

if TYPE_CHECKING:
    import torch

WRITERS: Mapping[str, str] = {
    "shardproof": "shardproof_writer:NativeWriter",
    "safetensors": "safetensors_writer:SafetensorsWriter",
    "hf": "safetensors_writer:HuggingFaceWriter",
    "dcp": "dcp_writer:DcpWriter",
    "fsdp_dtensor": "dcp_writer:FsdpDTensorWriter",
    "torch_dist": "megatron.megatron_writer:TorchDistWriter",
    "torch": "torch.torch_writer:TorchWriter",
    "zarr": "zarr.zarr_writer:ZarrWriter",
}
"""Name of each format that can be written to the module and class of its writer."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a checkpoint to write."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Key to torch's name of the dtype, and shape."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Key of a tied tensor to the key in `tensors` that it equals."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """Key to plain data."""
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's metadata, as plain data."""
    time: float = 0.0
    """Date of the checkpoint in seconds since 1970, for formats that store it. Equal in all processes."""
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Recorded paths in the nested state dict by key; see `state_paths`."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """The origin of the save, as JSON; only shardproof's own format stores it."""


class BoxSource(Protocol):
    """Gives the values of the tensors of a `Contents`."""

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Reads a box of a tensor.

        Args:
            key: key of a tensor.
            offsets: (d,) first index of the box.
            sizes: (d,) sizes of the box.

        Returns:
            A dense tensor in host memory, of the shape `sizes` and the dtype that the contents give.

        Raises:
            ShardproofError: the source is damaged or cannot be read.
        """
        ...

    def note(self, key: str, offsets: Sequence[int], sizes: Sequence[int], values: torch.Tensor) -> None:
        """Notes a box of a tensor that the writer made of a plain value. It is verified like the others.

        Args:
            key: key of the tensor in the written checkpoint.
            offsets: (d,) first index of the box.
            sizes: (d,) sizes of the box.
            values: the elements, dense and in host memory.
        """
        ...


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write a checkpoint."""

    max_file_bytes: int | None = None
    """Bytes of tensors in one file, at most, where the format allows several files. None: the default of the
    format."""
    piece_bytes: int = 64 << 20
    """Bytes of one `BoxSource.read`, at most, unless a single row is larger. It bounds the memory."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a checkpoint that one process writes."""

    name: str
    """Unique in the checkpoint, and a valid file name."""
    boxes: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
    """Key, offsets and sizes of the boxes that the unit holds."""
    nbytes: int
    """Bytes of the boxes."""


class FormatWriter(ABC):
    """Writes a checkpoint of one format.

    The constructor plans the units. It depends only on its arguments, so all processes plan the same units.

    Raises:
        StructureError: the format cannot hold a tensor or an object; the message names the key and says what
            to do.
    """

    name: ClassVar[str]
    """Name of the format, as ``--to`` takes it."""
    stores_state_dicts: ClassVar[bool] = False
    """True if programs that load the format expect an optimizer as the state dict of a torch optimizer."""
    units: Sequence[Unit]
    last_file: str
    """Name of the file without which no reader takes the folder for a checkpoint. It has to appear last."""
    notes: Sequence[str] = ()
    """Losses of the conversion, because the format cannot hold a value, a sentence each."""

    @abstractmethod
    def __init__(self, contents: Contents, options: WriteOptions) -> None: ...

    @abstractmethod
    def write(self, unit: Unit, source: BoxSource, target: Storage) -> dict[str, Any]:
        """Writes a unit durably, to files that no other unit writes.

        It replaces an existing file of the unit, which an interrupted attempt left.

        Args:
            unit: one of `units`.
            source: gives the boxes. One read has at most `WriteOptions.piece_bytes`.
            target: a new folder that becomes the checkpoint.

        Returns:
            The record of the unit for `commit`, as JSON values.

        Raises:
            ShardproofError: the source is damaged, or the target fails.
        """

    @abstractmethod
    def commit(self, records: Mapping[str, dict[str, Any]], target: Storage) -> None:
        """Writes the metadata, once all units are written.

        Args:
            records: the result of `write` for each unit, by name of the unit.
            target: the folder with the units.
        """


def notes_of(name: str, contents: Contents, *, keeps_step: bool = False) -> list[str]:
    """The notes of a format without a place for the step and the metadata of the user."""
    lost = [] if keeps_step or contents.step is None else [f"the step ({contents.step})"]
    if contents.metadata:
        lost.append(f"the metadata ({', '.join(sorted(map(str, contents.metadata)))})")
    it = "it" if len(lost) == 1 else "them"
    return [f"{name} has no place for {' and '.join(lost)}, and leaves {it} out."] if lost else []


def new_file(target: Storage, name: str, buffer: memoryview | None = None) -> FileWriter:
    """Begins a file of a unit. It replaces an existing file, which an interrupted attempt left.

    Raises:
        StorageError: the storage failed.
    """
    target.delete(name)
    return FileWriter(target.create(name), buffer)


def check_units(
    target: Storage,
    units: Sequence[Unit],
    records: Mapping[str, dict[str, Any]],
    files: Callable[[str, dict[str, Any]], Iterable[tuple[str, int]]],
) -> None:
    """Checks, before a commit, that all units were written and that their files still have the same sizes.

    Args:
        target: the folder with the units.
        units: all units of the checkpoint.
        records: the result of `FormatWriter.write` for each unit, by name of the unit.
        files: returns name and expected bytes of each file, for the name of a unit and its record.

    Raises:
        StructureError: a unit was not written.
        StorageError: a file is missing or has another size, or the storage failed.
    """
    written: list[tuple[Storage, FileRecord]] = []
    for unit in units:
        if unit.name not in records:
            raise StructureError(f"the unit {unit.name} was not written, so nothing is committed")
        written += [
            (target, FileRecord(name, size, "")) for name, size in files(unit.name, records[unit.name])
        ]
    advice = (
        "It was changed after it was written, or the place is not shared by all nodes. Remove the new "
        "checkpoint and write it again"
    )
    check_sizes(written, lambda _: advice)


def writer_of(name: str) -> type[FormatWriter]:
    """The writer of a format."""
    if name not in WRITERS:
        raise ValueError(f"a checkpoint is written as one of {', '.join(WRITERS)}, not {name!r}")
    module, _, attribute = WRITERS[name].partition(":")
    writer: type[FormatWriter] = getattr(import_module(f"shardproof.formats.{module}"), attribute)
    return writer


def box_bytes(
    source: BoxSource, key: str, dtype: str, offsets: Sequence[int], sizes: Sequence[int], piece_bytes: int
) -> Iterator[memoryview]:
    r"""Yields the bytes of a box in row-major order.

    Args:
        source: gives the values.
        key: key of a tensor.
        dtype: torch's name of its dtype.
        offsets: (d,) first index of the box.
        sizes: (d,) sizes of the box.
        piece_bytes: bytes of one read, at most, unless a single element is larger.

    Yields:
        Pieces of at least one byte; none for an empty box.

    Raises:
        StructureError: the source gives another dtype or shape.
        ShardproofError: the source is damaged or cannot be read.

    Example:
        >>> import torch
        >>> values = torch.arange(6, dtype=torch.uint8).reshape(3, 2)
        >>> class Source:
        ...     def read(self, key, offsets, sizes):
        ...         return values[offsets[0] : offsets[0] + sizes[0]]
        >>> [bytes(piece) for piece in box_bytes(Source(), "w", "uint8", (1, 0), (2, 2), 3)]
        [b'\x02\x03', b'\x04\x05']
    """
    limit = max(piece_bytes // DTYPES[dtype].itemsize, 1)
    pieces, _ = cut(Boxes.of((offsets, sizes)), limit)
    for start, extent in zip(pieces.offsets.tolist(), pieces.sizes.tolist(), strict=True):
        values = source.read(key, tuple(start), tuple(extent))
        found = str(values.dtype).removeprefix("torch."), list(values.shape)
        if found != (dtype, extent):
            raise StructureError(
                f"{key!r}: the source gives {found[0]} of shape {found[1]}, expected {dtype} of {extent}",
                key=key,
            )
        yield as_bytes(values).numpy().data
