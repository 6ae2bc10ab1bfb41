"""Writes archives of ``torch.save``: a zip of stored records, streamed in bounded memory.

An archive holds one pickle, ``data.pkl``, and one record for each storage. The layout is that of torch 2.13:

- Records are stored without compression.
- The CRC-32 of a record is in the data descriptor and in the central directory.
- Data begins at multiples of 64 bytes of the archive.
- zip64 is used where sizes or offsets need it.

torch 2.2 and newer read it. The same values give the same bytes, because the serialization id is a digest of
the records.

`TorchFile` is the reader.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from shardproof.dtypes import DTYPES
from shardproof.errors import StructureError
from shardproof.geometry import Boxes, cut, row_major_strides
from shardproof.interop.extents import crc32
from shardproof.interop.pickle_writer import Named, Persistent, PickledCall, write_pickle
from shardproof.interop.torch_tensors import STORAGE_DTYPES
from shardproof.interop.writer import BoxSource

__all__ = ["ArchiveTensor", "TorchArchive", "archive_of"]

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


class _Output(Protocol):
    """The method of `shardproof.storage.FileWriter` that an archive uses."""

    def put(self, data: bytes | memoryview, /) -> None: ...


@dataclass(eq=False, slots=True)
class ArchiveTensor:
    """A dense tensor to write. All uses of one `ArchiveTensor` object in an archive share a storage."""

    dtype: str
    """Torch's name of the dtype, for example "bfloat16"."""
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[torch.Tensor]]
    """Gives the elements in row-major order: dense tensors of the dtype, in host memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @staticmethod
    def of(tensor: torch.Tensor) -> ArchiveTensor:
        """The archive tensor of a tensor in memory."""
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return ArchiveTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), lambda: [dense])

    @staticmethod
    def box(
        source: BoxSource,
        key: str,
        dtype: str,
        offsets: Sequence[int],
        sizes: Sequence[int],
        piece_bytes: int,
    ) -> ArchiveTensor:
        """A box of a tensor, read from a source when it is written.

        Args:
            source: gives the values.
            key: key of the tensor.
            dtype: torch's name of its dtype.
            offsets: (d,) first index of the box.
            sizes: (d,) sizes of the box.
            piece_bytes: bytes of one read, at most, unless a single element is larger.
        """

        def pieces() -> Iterator[torch.Tensor]:
            limit = max(piece_bytes // DTYPES[dtype].itemsize, 1)
            parts, _ = cut(Boxes.of((offsets, sizes)), limit)
            for row in range(len(parts)):
                yield source.read(key, *parts.pair(row))

        return ArchiveTensor(dtype, tuple(sizes), pieces)

    def data(self) -> Iterator[memoryview]:
        """The bytes of the elements.

        Raises:
            StructureError: the pieces do not match the dtype and shape.
        """
        found = 0
        for piece in self.pieces():
            found += piece.nbytes
            if piece.dtype != getattr(torch, self.dtype):
                break
            if piece.numel():
                yield memoryview(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            if found == self.nbytes:
                return
        raise StructureError(
            f"the source gave {piece.dtype} of {found} bytes in all for a tensor of {self.dtype} and shape "
            f"{list(self.shape)}, which has {self.nbytes} bytes"
        )


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

    def write(self, file: _Output) -> None:
        """Appends the archive to a file.

        Raises:
            ShardproofError: a source of tensors, or the file, failed.
        """
        *records, identifier = self._records
        for record in records:
            self._write_record(file, record)
        digest = xxhash.xxh3_128_intdigest(b"".join(record.central() for record in records))
        identifier.data = b"%040d" % digest
        self._write_record(file, identifier)
        directory = b"".join(record.central() for record in self._records)
        start, count, size = identifier.start, len(self._records), len(directory)
        start += len(identifier.header()) + identifier.nbytes + len(identifier.descriptor())
        file.put(directory)
        file.put(
            _END_64.pack(
                *(0x06064B50, 44, 0x031E, 45, 0, 0, count, count, size, start),
                *(0x07064B50, 0, start + size, 1),
            )
        )
        few = min(count, 0xFFFF)
        file.put(_END.pack(0x06054B50, 0, 0, few, few, min(size, _MOST_32), min(start, _MOST_32), 0))

    def to_bytes(self) -> bytes:
        """The archive in memory."""
        parts = _Parts()
        self.write(parts)
        return b"".join(parts)

    @staticmethod
    def _write_record(file: _Output, record: _Record) -> None:
        file.put(record.header())
        record.crc = 0
        pieces = record.data.data() if isinstance(record.data, ArchiveTensor) else [record.data]
        for piece in pieces:
            record.crc = crc32(piece, record.crc)
            file.put(piece)
        file.put(record.descriptor())

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
    """The archive of an object of a checkpoint.

    Args:
        key: key of the object, for errors.
        value: plain data, with tensors in memory.
        format_name: name of the written format, for errors.

    Raises:
        StructureError: the object is not plain data.
    """
    try:
        return TorchArchive(value)
    except (TypeError, ValueError) as error:
        raise StructureError(
            f"{format_name} cannot hold {key!r}: {error}. Leave it out (exclude=, or --exclude {key})",
            key=key,
        ) from error


class _Parts(list[bytes]):
    """An output in memory."""

    def put(self, data: bytes | memoryview, /) -> None:
        self.append(bytes(data))


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
