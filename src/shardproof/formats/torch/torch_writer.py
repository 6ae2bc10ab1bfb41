"""Writes archives of ``torch.save``: a zip of stored records, streamed in bounded memory.

An archive holds one pickle, ``data.pkl``, and one record for each storage. The layout is that of torch 2.13:

- Records are stored without compression.
- The CRC-32 of a record is in the data descriptor and in the central directory.
- Data begins at multiples of 64 bytes of the archive.
- zip64 is used where sizes or offsets need it.

torch 2.2 and newer read it. The same values give the same bytes, because the serialization id is a digest of
the records. `TorchFile` is the reader. The format "torch" is one such file.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash

from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import crc32
from shardproof.engine.geometry import row_major_strides
from shardproof.engine.state import StreamBytes, as_bytes
from shardproof.engine.storage import FileWriter, Storage
from shardproof.errors import StructureError
from shardproof.formats.pickle_writer import Named, Persistent, PickledCall, write_pickle
from shardproof.formats.torch.torch_tensors import STORAGE_DTYPES
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

_ALIGNMENT = 64
_FLAGS, _EMPTY_FLAGS = 0x0808, 0x0800
"""General purpose flags: the name is UTF-8, and the sizes and the CRC-32 follow the data of a record that is
not empty."""
_MOST_32 = 0xFFFFFFFF
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END_64 = struct.Struct("<IQHHIIQQQQIIQI")
"""The end record of zip64 and its locator."""
_END = struct.Struct("<IHHHHIIH")
_STORAGE_CLASSES = {dtype: f"{name}Storage" for name, dtype in STORAGE_DTYPES.items()}
_PLAIN_CLASSES = (OrderedDict, Counter, defaultdict, np.ndarray, np.generic, np.dtype, enum.Enum)
"""Classes of plain data whose ``__reduce_ex__`` gives the call that makes an object."""


@dataclass(eq=False, slots=True)
class ArchiveTensor:
    """A dense tensor to write. All uses of one `ArchiveTensor` object in an archive share a storage."""

    dtype: str
    """Torch's name of the dtype, for example "bfloat16"."""
    shape: tuple[int, ...]
    data: Callable[[], Iterable[memoryview]]
    """Gives the bytes of the elements in row-major order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @staticmethod
    def of(tensor: torch.Tensor) -> ArchiveTensor:
        """The archive tensor of a tensor in memory."""
        data = as_bytes(tensor.detach().cpu()).numpy().data
        return ArchiveTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), lambda: [data])

    @staticmethod
    def box(
        source: BoxSource,
        key: str,
        dtype: str,
        offsets: Sequence[int],
        sizes: Sequence[int],
        piece_bytes: int,
    ) -> ArchiveTensor:
        """A box of a tensor, read from a source when it is written; see `box_bytes`."""
        data = partial(box_bytes, source, key, dtype, offsets, sizes, piece_bytes)
        return ArchiveTensor(dtype, tuple(sizes), data)


@dataclass(slots=True)
class _Record:
    name: bytes
    data: bytes | ArchiveTensor
    nbytes: int
    start: int
    """Byte of the archive where the local header begins."""
    crc: int = 0

    @property
    def is_large(self) -> bool:
        """True if a size or the offset does not fit into 32 bits."""
        return self.nbytes >= _MOST_32 or self.start >= _MOST_32

    @property
    def flags(self) -> int:
        """General purpose flags."""
        return _FLAGS if self.nbytes else _EMPTY_FLAGS

    def header(self) -> bytes:
        """The local header, with padding up to the data."""
        extra = self._zip64()
        begin = self.start + _LOCAL.size + len(self.name) + len(extra) + 4
        padding = -begin % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        fixed = _LOCAL.pack(0x04034B50, 0, self.flags, 0, 0, 0, 0, 0, 0, len(self.name), len(extra))
        return fixed + self.name + extra

    def descriptor(self) -> bytes:
        """The data descriptor, which follows the data."""
        if not self.nbytes:
            return b""
        code = "<IIQQ" if self.is_large else "<IIII"
        return struct.pack(code, 0x08074B50, self.crc, self.nbytes, self.nbytes)

    def central(self) -> bytes:
        """The entry of the central directory."""
        extra, size, start = self._zip64(), min(self.nbytes, _MOST_32), min(self.start, _MOST_32)
        fixed = _CENTRAL.pack(
            *(0x02014B50, 0, 0, self.flags, 0, 0, 0, self.crc, size, size),
            *(len(self.name), len(extra), 0, 0, 0, 0, start),
        )
        return fixed + self.name + extra

    def _zip64(self) -> bytes:
        """The extra field with the numbers that do not fit into 32 bits."""
        numbers = [self.nbytes, self.nbytes] if self.nbytes >= _MOST_32 else []
        numbers += [self.start] if self.start >= _MOST_32 else []
        return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


class TorchArchive:
    """An archive of ``torch.save`` to write.

    Args:
        value: plain data with tensors, each a `torch.Tensor` or an `ArchiveTensor`.

    Raises:
        TypeError: the value holds an object that is not plain data.
        ValueError: the value is nested deeper than 200 levels.

    Example:
        >>> import io, torch
        >>> data = TorchArchive({"weight": torch.arange(3.0), "step": 3}).to_bytes()
        >>> torch.load(io.BytesIO(data), weights_only=True)
        {'weight': tensor([0., 1., 2.]), 'step': 3}
    """

    def __init__(self, value: Any) -> None:
        self._tensors: list[ArchiveTensor] = []
        pickled = write_pickle(value, 2, describe=self._describe)
        contents: list[tuple[str, bytes | ArchiveTensor]] = [
            ("data.pkl", pickled),
            (".format_version", b"1"),
            (".storage_alignment", b"%d" % _ALIGNMENT),
            ("byteorder", sys.byteorder.encode()),
            *((f"data/{number}", tensor) for number, tensor in enumerate(self._tensors)),
            ("version", b"3\n"),
            (".data/serialization_id", bytes(40)),
        ]
        self._records: list[_Record] = []
        at = 0
        for name, data in contents:
            size = data.nbytes if isinstance(data, ArchiveTensor) else len(data)
            record = _Record(f"archive/{name}".encode(), data, size, at)
            at += len(record.header()) + size + len(record.descriptor())
            self._records.append(record)

    def write(self, file: FileWriter) -> None:
        """Appends the archive to a file.

        Raises:
            ShardproofError: a source of tensors, or the file, failed.
        """
        for part in self._parts():
            file.put(part)

    def to_bytes(self) -> bytes:
        """The archive in memory."""
        return b"".join(self._parts())

    def _parts(self) -> Iterator[bytes | memoryview]:
        *records, identifier = self._records
        for record in records:
            yield from self._record_parts(record)
        digest = xxhash.xxh3_128_intdigest(b"".join(record.central() for record in records))
        identifier.data = b"%040d" % digest
        yield from self._record_parts(identifier)
        directory = b"".join(record.central() for record in self._records)
        start, count, size = identifier.start, len(self._records), len(directory)
        start += len(identifier.header()) + identifier.nbytes + len(identifier.descriptor())
        yield directory
        yield _END_64.pack(
            *(0x06064B50, 44, 0x031E, 45, 0, 0, count, count, size, start),
            *(0x07064B50, 0, start + size, 1),
        )
        few = min(count, 0xFFFF)
        yield _END.pack(0x06054B50, 0, 0, few, few, min(size, _MOST_32), min(start, _MOST_32), 0)

    @staticmethod
    def _record_parts(record: _Record) -> Iterator[bytes | memoryview]:
        yield record.header()
        record.crc = 0
        for piece in record.data.data() if isinstance(record.data, ArchiveTensor) else [record.data]:
            record.crc = crc32(piece, record.crc)
            yield piece
        yield record.descriptor()

    def _describe(self, value: Any) -> Any:
        """Describes an object of another class than the builtins to the pickler; see `write_pickle`."""
        if isinstance(value, torch.Tensor):
            return self._rebuilt(ArchiveTensor.of(value))
        if isinstance(value, ArchiveTensor):
            return self._rebuilt(value)
        if isinstance(value, torch.dtype):
            return Named("torch", str(value).removeprefix("torch."))
        if isinstance(value, torch.Size):
            return PickledCall(Named("torch", "Size"), (tuple(value),))
        if isinstance(value, torch.device):
            index = () if value.index is None else (value.index,)
            return PickledCall(Named("torch", "device"), (value.type, *index))
        if isinstance(value, StreamBytes):
            content = bytes(value), value.position, None
            return PickledCall(Named("_io", "BytesIO"), state=content, is_new=True)
        if type(value) is complex:
            return PickledCall(Named("builtins", "complex"), (value.real, value.imag))
        is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
        return _reduced(value) if is_record or isinstance(value, _PLAIN_CLASSES) else None

    def _rebuilt(self, tensor: ArchiveTensor) -> PickledCall:
        """The call with which torch builds a tensor from its storage."""
        number = len(self._tensors)
        self._tensors.append(tensor)
        kind = _STORAGE_CLASSES.get(tensor.dtype)
        count = math.prod(tensor.shape) if kind else tensor.nbytes
        storage = Named("torch", kind) if kind else Named("torch.storage", "UntypedStorage")
        identifier = Persistent(("storage", storage, str(number), "cpu", count))
        strides = tuple(row_major_strides([max(size, 1) for size in tensor.shape]))
        args = (identifier, 0, tensor.shape, strides, False, PickledCall(Named("collections", "OrderedDict")))
        if kind:
            return PickledCall(Named("torch._utils", "_rebuild_tensor_v2"), args)
        return PickledCall(Named("torch._utils", "_rebuild_tensor_v3"), (*args, Named("torch", tensor.dtype)))


def archive_of(key: str, value: Any, format_name: str) -> TorchArchive:
    """The archive of an object of a checkpoint."""
    try:
        return TorchArchive(value)
    except (TypeError, ValueError) as error:
        raise StructureError(
            f"{format_name} cannot hold {key!r}: {error}. Leave it out (exclude=, or --exclude {key})",
            key=key,
        ) from error


def _reduced(value: Any) -> PickledCall | None:
    """The call that ``__reduce_ex__`` of a value gives; None if the value has list items."""
    reduced = value.__reduce_ex__(2)
    function, args, state, items, pairs = (*reduced, None, None, None)[:5]
    if items is not None:
        return None
    is_new = function.__name__ == "__newobj__"
    if is_new:
        function, *args = args
    named = tuple(_name(item) if isinstance(item, type) else item for item in args)
    return PickledCall(_name(function), named, state, pairs or (), is_new)


def _name(value: Any) -> Named:
    return Named(value.__module__, value.__qualname__)


_FILE = "checkpoint.pt"


class TorchWriter(FormatWriter):
    """Writes a dict of all tensors and objects by key, as one file of ``torch.save``; see `FormatWriter`.

    The dict is flat: its keys are those of the checkpoint, including their dots, like a module's state dict.
    Tied tensors share a storage. ``torch.load`` reads the file with ``weights_only=True``, unless an object
    needs classes that a state dict does not have. One process writes the file.
    """

    name = "torch"
    last_file = _FILE
    stores_state_dicts = True

    def __init__(self, contents: Contents, options: WriteOptions) -> None:
        self._contents = contents
        self._piece_bytes = options.piece_bytes
        boxes = [
            (key, (0,) * len(shape), shape) for key, (_, shape) in contents.tensors.items() if 0 not in shape
        ]
        nbytes = sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in contents.tensors.values())
        self.units = [Unit(_FILE, boxes, nbytes)]
        self.notes = notes_of(self.name, contents)
        for key, value in contents.objects.items():
            archive_of(key, value, self.name)

    def write(self, unit: Unit, source: BoxSource, target: Storage) -> dict[str, Any]:
        """Writes the file; see `FormatWriter.write`."""
        tensors = {
            key: ArchiveTensor.box(source, key, dtype, (0,) * len(shape), shape, self._piece_bytes)
            for key, (dtype, shape) in self._contents.tensors.items()
        }
        aliases = {key: tensors[other] for key, other in self._contents.aliases.items()}
        with new_file(target, unit.name) as file:
            TorchArchive({**tensors, **aliases, **self._contents.objects}).write(file)
            return {"size": file.finish()}

    def commit(self, records: Mapping[str, dict[str, Any]], target: Storage) -> None:
        """Checks the file, which is the whole checkpoint; see `FormatWriter.commit`.

        Raises:
            StructureError: the file was not written.
            StorageError: the file is missing, or was cut.
        """
        check_units(target, self.units, records, lambda name, record: [(name, record["size"])])
