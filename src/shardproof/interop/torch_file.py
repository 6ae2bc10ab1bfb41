"""Reads files of ``torch.save``, in the zip format and in the format before it, without unpickling them.

A zip file holds one pickle, ``data.pkl``, and one record for each storage. The pickle refers to storages by
persistent identifiers. Several tensors may be views of one storage. Each record has a CRC-32, which
``torch.load`` does not check and this reader does. If all CRCs of a file are 0, the writer switched them off
(``torch.serialization.set_crc32_options(False)``) and the file has no checksums.

The format before zip is a row of pickles (magic number, protocol, byte order, the object, the keys of the
storages), then the storages. It has no checksums.
"""

from __future__ import annotations

import io
import math
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.dtypes import DTYPES
from shardproof.errors import FormatError, StorageError
from shardproof.interop.extents import DecodedExtent, Extent, FileRange, crc32
from shardproof.interop.pickle_builders import CONSTANTS, plain_builders
from shardproof.interop.pickle_data import Opaque, read_pickle
from shardproof.interop.reader import StoredBox, StoredView
from shardproof.storage import Storage

__all__ = ["STORAGE_DTYPES", "TorchFile", "TorchTensor", "flatten", "unpickled", "with_tensors"]

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Lengths of the name and of the extra field that follow a zip file's local header."""
_METADATA_RECORDS = ("data.pkl", "byteorder")
_MOST_LEVELS = 200
_EDGE_BYTES = 4096
"""Bytes at the begin and at the end of an archive that one read fetches. The metadata of an archive of one
tensor lies in them."""
STORAGE_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
"""Dtype of the elements of a typed storage, by the name of its class without `Storage`."""


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str
    """Dtype of the elements; "uint8" for an untyped storage."""
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor in a file of ``torch.save``, not read yet."""

    storage: str
    """Key of the storage; tensors with one key share memory."""
    dtype: str
    """Torch's name of the dtype, for example "bfloat16"."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    offset: int
    """First element, counted from the begin of the storage in elements of this dtype."""
    is_conjugated: bool = False
    """True if the storage holds the complex conjugates."""
    is_negated: bool = False
    """True if the storage holds the negative values."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class _Window(io.RawIOBase):
    """A range of a file, as a file of its own. It reads the first and the last bytes once."""

    def __init__(self, storage: Storage, file: str, start: int, size: int) -> None:
        self._storage = storage
        self._file = file
        self._start = start
        self._size = size
        self._at = 0
        edge = min(size, _EDGE_BYTES)
        self._edges = {at: self._fetched(at, edge) for at in {0, size - edge}}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"byte {base + offset} lies before the range")
        self._at = base + offset
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into)[: max(self._size - self._at, 0)]
        view[:] = self.bytes_at(self._at, len(view))
        self._at += len(view)
        return len(view)

    def bytes_at(self, offset: int, count: int) -> bytes | bytearray:
        """Bytes of the range; fewer at its end."""
        count = min(count, max(self._size - offset, 0))
        for begin, data in self._edges.items():
            if begin <= offset and offset + count <= begin + len(data):
                return data[offset - begin : offset - begin + count]
        return self._fetched(offset, count)

    def _fetched(self, offset: int, count: int) -> bytearray:
        data = bytearray(count)
        if count:
            self._storage.read_into(self._file, self._start + offset, memoryview(data))
        return data


@dataclass(frozen=True, slots=True)
class _ResolvedExtent(DecodedExtent):
    """A tensor that was saved as a lazy conjugate or negative of its storage, in row-major order."""

    view: StoredView
    tensor: TorchTensor

    @property
    def storage(self) -> Storage:  # type: ignore[override]
        return self.view.extent.storage

    @property
    def file(self) -> str:  # type: ignore[override]
        return self.view.extent.file

    @property
    def start(self) -> int:  # type: ignore[override]
        return self.view.extent.start

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.tensor.nbytes

    @property
    def stored_bytes(self) -> int:
        return self.view.extent.stored_bytes

    @property
    def has_checksum(self) -> bool:
        return self.view.extent.has_checksum

    def decode(self) -> memoryview:
        data = bytearray(self.view.extent.nbytes)
        self.view.extent.read_into(memoryview(data))
        found = _strided(data, self.tensor.dtype, self.tensor.shape, self.view)
        found = found.conj().resolve_conj() if self.tensor.is_conjugated else found
        found = -found if self.tensor.is_negated else found
        return memoryview(found.contiguous().reshape(-1).view(torch.uint8).numpy().data)


class TorchFile:
    """A file of ``torch.save``, or a range of one. Nothing that its pickle names is imported or called.

    Args:
        storage: holds the file.
        file: name of the file in the storage.
        start: first byte, if the archive is a part of the file.
        size: bytes of the archive; None for all up to the end of the file.

    Raises:
        StorageError: the file is missing, short or unreadable.
        FormatError: the file is no whole file of ``torch.save``.
        CorruptChunkError: the pickle does not match its CRC-32.

    Example:
        >>> import tempfile, torch
        >>> from shardproof.storage import LocalStorage
        >>> folder = tempfile.mkdtemp()
        >>> torch.save({"weight": torch.arange(4.0).reshape(2, 2), "step": 3}, f"{folder}/model.pt")
        >>> file = TorchFile(LocalStorage(folder), "model.pt")
        >>> weight, step = file.value["weight"], file.value["step"]
        >>> weight.shape, step, file.read(weight).tolist()
        ((2, 2), 3, [[0.0, 1.0], [2.0, 3.0]])
    """

    value: Any
    """The saved object as plain data: dicts, lists, tuples and scalars as they are, tensors as `TorchTensor`,
    other objects as `Opaque`."""
    has_checksums: bool
    """True if reads prove the bytes of tensors."""

    def __init__(self, storage: Storage, file: str, *, start: int = 0, size: int | None = None) -> None:
        self.path = f"{storage.location}/{file}"
        self._storage = storage
        self._name = file
        whole = storage.size(file)
        if whole is None:
            raise StorageError(f"{self.path} is missing", file=self.path, missing=True)
        self._start = start
        self._size = whole - start if size is None else size
        if start < 0 or self._size < 0 or start + self._size > whole:
            raise StorageError(
                f"{self.path} has {whole} bytes, expected {self._size} from byte {start} on: it was cut or "
                "replaced. Restore it from a copy",
                file=self.path,
                missing=False,
            )
        self._records: dict[str, FileRange] = {}
        self._storages: dict[str, _Storage] = {}
        self._last_extent: tuple[Extent, bytearray] | None = None
        """The extent that was read last, and its bytes."""
        self._swapped = False
        self._file = _Window(storage, file, start, self._size)
        if self._bytes(0, 4) == b"PK\x03\x04":
            self._open_zip()
        else:
            self._open_legacy()
        self._check_storages()

    def view(self, tensor: TorchTensor) -> StoredView:
        """Where the elements of a tensor lie.

        A tensor that was saved as a lazy conjugate or negative of its storage is decoded when it is read.
        """
        record = self._records[tensor.storage]
        width = DTYPES[tensor.dtype].itemsize
        if self._swapped:
            swap = width // 2 if tensor.dtype.startswith("complex") else width
            record = FileRange(record.storage, record.file, record.start, record.nbytes, record.crc, swap)
        view = StoredView(record, tensor.offset, tensor.stride)
        if tensor.is_conjugated or tensor.is_negated:
            return StoredView.dense(tensor.shape, _ResolvedExtent(view, tensor))
        return view

    def boxes(self, tensor: TorchTensor) -> list[StoredBox]:
        """The only box of a tensor; none for a tensor of size 0."""
        if 0 in tensor.shape:
            return []
        return [StoredBox.of((0,) * len(tensor.shape), tensor.shape, self.view(tensor))]

    def read(self, tensor: TorchTensor) -> torch.Tensor:
        """Reads a tensor. It is a view of its storage, with the stored shape and strides.

        A tensor that was saved as a lazy conjugate or negative of its storage is a copy.

        Raises:
            CorruptChunkError: the bytes of the storage do not match their CRC-32.
            StorageError: the file cannot be read.
        """
        view = self.view(tensor)
        if self._last_extent is None or self._last_extent[0] != view.extent:
            self._last_extent = None  # frees its memory before the next storage takes some
            data = bytearray(view.extent.nbytes)
            view.extent.read_into(memoryview(data))
            self._last_extent = view.extent, data
        return _strided(self._last_extent[1], tensor.dtype, tensor.shape, view)

    def archive(self) -> bytes:
        """All bytes of the archive."""
        return self._storage.read(self._name, self._start, self._start + self._size)

    def verify(self) -> int:
        """Reads all storages and checks their CRC-32.

        Returns:
            The bytes that were proved; 0 if the file has no checksums.

        Raises:
            CorruptChunkError: the bytes of a storage do not match.
        """
        for record in self._records.values():
            record.verify()
        return sum(record.nbytes for record in self._records.values() if record.has_checksum)

    def _fault(self, text: str) -> FormatError:
        return FormatError(f"{self.path}: {text}", file=self.path)

    def _bytes(self, offset: int, count: int) -> bytes:
        """Bytes of the file; fewer at its end."""
        return bytes(self._file.bytes_at(offset, count))

    def _open_zip(self) -> None:
        try:
            archive = zipfile.ZipFile(self._file)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:
            raise self._fault(f"the zip archive is damaged or cut ({error})") from error
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if "data.pkl" not in entries:
            raise self._fault("the zip archive has no data.pkl, so torch.save did not write it")
        if len(entries) < len(archive.infolist()):
            raise self._fault("two records of the zip archive have one name")
        self.has_checksums = any(entry.CRC for entry in entries.values())
        for name, entry in entries.items():
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise self._fault(f"the record {name} is compressed, which torch.save never does")
            if not (name in _METADATA_RECORDS or name.startswith("data/")):
                continue
            local = self._bytes(entry.header_offset, _LOCAL_HEADER.size) if entry.header_offset >= 0 else b""
            if len(local) < _LOCAL_HEADER.size:
                raise self._fault(f"the record {name} does not begin within the file")
            offset = entry.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(local))
            if offset + entry.file_size > self._size:
                raise self._fault(f"the record {name} ends behind the end of the file")
            crc = entry.CRC if self.has_checksums else None
            self._records[name] = self._range(offset, entry.file_size, crc)
        order = bytes(self._verified("byteorder")) if "byteorder" in self._records else b"little"
        if order not in (b"little", b"big"):
            raise self._fault(f"the byte order {order[:16]!r} is unknown")
        self._swapped = order.decode() != sys.byteorder
        pickled = memoryview(self._verified("data.pkl"))
        self.value = read_pickle(
            pickled,
            _builders(),
            file=f"{self.path}/data.pkl",
            persistent=self._persistent,
            constants=CONSTANTS,
        ).value
        self._records = {
            name.removeprefix("data/"): record
            for name, record in self._records.items()
            if name.startswith("data/")
        }

    def _open_legacy(self) -> None:
        self.has_checksums = False
        data = self._bytes(0, self._size)
        file, at = self.path, 0
        head = []
        for _ in range(3):
            found = read_pickle(data, {}, file=file, start=at)
            head.append(found.value)
            at = found.end
            if head[0] != _MAGIC:
                raise self._fault("the file does not begin as torch.save writes it")
        if head[1] != _PROTOCOL or not isinstance(head[2], dict):
            raise self._fault(f"the protocol {head[1]!r} of torch.save is unknown")
        self._swapped = head[2].get("little_endian") is not (sys.byteorder == "little")
        found = read_pickle(
            data, _builders(), file=file, start=at, persistent=self._persistent, constants=CONSTANTS
        )
        self.value = found.value
        keys = read_pickle(data, {}, file=file, start=found.end)
        at = keys.end
        if not isinstance(keys.value, list):
            raise self._fault("the keys of the storages are no list")
        for key in keys.value:
            storage = self._storages.get(key) if isinstance(key, str) else None
            if storage is None or at + 8 > self._size:
                raise self._fault(f"the storage {key!r} is unknown or behind the end of the file")
            (numel,) = struct.unpack("<q", data[at : at + 8])
            if numel != storage.numel:
                raise self._fault(f"the storage {key} has {numel} elements, expected {storage.numel}")
            self._records[key] = self._range(at + 8, storage.nbytes, None)
            at += 8 + storage.nbytes
            if at > self._size:
                raise self._fault(f"the storage {key} ends behind the end of the file")

    def _persistent(self, identifier: Any) -> _Storage:
        """The storage of a persistent identifier: ("storage", class, key, device, number of elements)."""
        match identifier:
            case ("storage", Opaque(name=name), str(key), str(), int(numel), *_) if numel >= 0:
                dtype = _storage_dtype(name)
            case _:
                raise self._fault("a persistent identifier is no storage")
        if dtype is None:
            raise self._fault(f"the storage class {name} is unknown")
        storage = _Storage(key, dtype, numel)
        if self._storages.setdefault(key, storage).nbytes != storage.nbytes:
            raise self._fault(f"the storage {key} has two sizes")
        return storage

    def _check_storages(self) -> None:
        for key, storage in self._storages.items():
            record = self._records.get(key)
            if record is None:
                raise self._fault(f"the storage {key} is missing")
            if record.nbytes != storage.nbytes:
                raise self._fault(f"the storage {key} has {record.nbytes} bytes, expected {storage.nbytes}")

    def _range(self, offset: int, nbytes: int, crc: int | None) -> FileRange:
        return FileRange(self._storage, self._name, self._start + offset, nbytes, crc)

    def _verified(self, name: str) -> bytearray:
        """The bytes of a small record, checked."""
        record = self._records[name]
        data = self._file.bytes_at(record.start - self._start, record.nbytes)
        if record.crc is not None and crc32(data) != record.crc:
            record.verify()  # raises the error, with expected and found
        return bytearray(data)


def _strided(data: bytearray, dtype: str, shape: Sequence[int], view: StoredView) -> torch.Tensor:
    """A strided view of bytes in memory."""
    stored: torch.dtype = getattr(torch, dtype)
    if not data:
        return torch.empty(tuple(shape), dtype=stored, device="cpu")
    raw = torch.frombuffer(data, dtype=torch.uint8)
    whole = raw[: raw.numel() // stored.itemsize * stored.itemsize].view(stored)
    return whole.as_strided(tuple(shape), view.stride, view.offset)


def with_tensors(file: TorchFile) -> Any:
    """The saved object with its tensors read.

    Raises:
        FormatError: the object is nested deeper than 200 levels.
        CorruptChunkError: the bytes of a tensor do not match their CRC-32.
    """
    return _with_tensors(file, file.value, 0)


def _with_tensors(file: TorchFile, value: Any, depth: int) -> Any:
    if depth > _MOST_LEVELS:
        raise FormatError(
            f"{file.path}: an object is nested deeper than {_MOST_LEVELS} levels", file=file.path
        )
    if isinstance(value, TorchTensor):
        return file.read(value).clone()
    if isinstance(value, dict):
        return {key: _with_tensors(file, item, depth + 1) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(file, item, depth + 1) for item in value)
    return value


def unpickled(file: TorchFile) -> Any:
    """The saved object as torch unpickles it. This may run code that the file names.

    Call it only if the caller passed ``trust_pickle=True``.
    """
    data = io.BytesIO(file.archive())
    return torch.load(data, map_location="cpu", weights_only=False)  # noqa: TID251 the user trusts the file


def flatten(value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a saved object, with keys joined by dots.

    Dicts are always descended, lists only if a tensor or a dict is in them, tuples never, as
    ``torch.distributed.checkpoint`` names its keys.

    Raises:
        ValueError: the object is nested deeper than 200 levels, as one that holds itself is.

    Example:
        >>> dict(flatten({"model": {"step": 3}, "groups": [{"lr": 0.1}], "betas": (0.9, 0.99), "ids": [1]}))
        {'model.step': 3, 'groups.0.lr': 0.1, 'betas': (0.9, 0.99), 'ids': [1]}
    """
    return _leaves(value, "", 0)


def _leaves(value: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _MOST_LEVELS:
        raise ValueError(f"the object is nested deeper than {_MOST_LEVELS} levels")
    items: Sequence[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, (TorchTensor, Mapping)) for item in value):
        items = list(enumerate(value))
    if items is None:
        yield prefix, value
        return
    for key, item in items:
        yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key), depth + 1)


def _storage_dtype(name: str) -> str | None:
    if name in ("torch.storage.UntypedStorage", "torch.UntypedStorage"):
        return "uint8"
    kind = name.removeprefix("torch.").removeprefix("cuda.").removesuffix("Storage")
    return STORAGE_DTYPES.get(kind)


def _tensor(
    storage: _Storage,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: str,
    metadata: Mapping[str, bool] | None,
) -> TorchTensor:
    """A tensor whose elements all lie in its storage."""
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("shape, strides or offset of a tensor are not valid")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if 0 not in shape and (last + 1) * DTYPES[dtype].itemsize > storage.nbytes:
        raise ValueError(f"a tensor of shape {tuple(shape)} does not fit into its storage {storage.key}")
    flags = metadata or {}
    if not flags.keys() <= {"conj", "neg"}:
        raise ValueError(f"the tensor flags {sorted(flags)} are unknown")
    is_conjugated, is_negated = bool(flags.get("conj")), bool(flags.get("neg"))
    return TorchTensor(storage.key, dtype, tuple(shape), tuple(stride), offset, is_conjugated, is_negated)


def _rebuild_v2(
    storage: _Storage,
    offset: int,
    shape: Any,
    stride: Any,
    grad: Any = None,
    hooks: Any = None,
    metadata: Any = None,
) -> TorchTensor:
    return _tensor(storage, offset, shape, stride, storage.dtype, metadata)


def _rebuild_v3(
    storage: _Storage,
    offset: int,
    shape: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: torch.dtype,
    metadata: Any = None,
) -> TorchTensor:
    return _tensor(storage, offset, shape, stride, str(dtype).removeprefix("torch."), metadata)


def _builders() -> dict[str, Callable[..., Any]]:
    """Builders of what a state dict holds. None of them makes more than it is given."""
    return plain_builders() | {
        "torch._utils._rebuild_tensor": _rebuild_v2,
        "torch._utils._rebuild_tensor_v2": _rebuild_v2,
        "torch._utils._rebuild_tensor_v3": _rebuild_v3,
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    }
