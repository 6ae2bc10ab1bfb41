"""Reads files of ``torch.save``, in the zip format and in the format before it, without unpickling them.

A zip file holds one pickle, ``data.pkl``, and one record for each storage. The pickle refers to storages by
persistent identifiers. Several tensors may be views of one storage. Each record has a CRC-32. This reader
checks it; ``torch.load`` does not. If all CRCs of a file are 0, the writer switched them off
(``torch.serialization.set_crc32_options(False)``) and the file has no checksums.

The format before zip is a sequence of pickles, followed by the storages. The pickles are the magic number,
the protocol, the byte order, the object and the keys of the storages. The format has no checksums. Its
pickles are read in pieces.
"""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from shardproof._utils.humanize import brief, printable
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import (
    DecodedExtent,
    Extent,
    FileRange,
    Opaque,
    ReadBudget,
    StoredView,
    Unreadable,
    crc32,
    key_units,
)
from shardproof.engine.state import as_bytes
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError, StorageError
from shardproof.formats.pickle_data import Pickle, read_pickle
from shardproof.formats.torch.archive_bytes import FileWindow, WindowBytes, read_zip_directory
from shardproof.formats.torch.torch_tensors import TorchStorage, read_torch_pickle, torch_storage
from shardproof.formats.torch.torch_tensors import TorchTensor as TorchTensor

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Lengths of the name and of the extra field that follow a zip file's local header."""
_METADATA_RECORDS = ("data.pkl", "byteorder")
_MOST_LEVELS = 200
_PIECE_BYTES = 1 << 20
_REPEATED_BYTES = 64 << 20
"""Bytes of the tensors of an object that may come from storages of any size."""
_MOST_REPEATS = 4
"""Bytes of the tensors of an object for each byte of their storages, at most."""
_MOST_SMALL_PICKLES = 10_000
"""Entries of a `SmallPickles`, at most."""
_MOST_PICKLE_BYTES = 1 << 30
"""Bytes of the pickles of a file, at most. Storages do not count."""


SmallPickles = dict[bytes, tuple[TorchTensor, dict[str, TorchStorage]]]
"""A cache: pickles of archives of one tensor to their tensors and storages. A checkpoint has few different
pickles."""


@dataclass(frozen=True, slots=True)
class _ResolvedExtent(DecodedExtent):
    """A tensor that was saved as a lazy conjugate or negative of its storage, in row-major order."""

    storage: Storage
    file: str
    start: int
    nbytes: int
    view: StoredView
    tensor: TorchTensor

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
        found = found.conj() if self.tensor.is_conjugated else found
        found = -found if self.tensor.is_negated else found
        return as_bytes(found).numpy().data


class TorchFile:
    """A file of ``torch.save``, or a range of one. Nothing that its pickle names is imported or called.

    Args:
        storage: the storage that holds the file.
        file: name of the file in the storage.
        start: first byte, if the archive is a part of the file.
        size: bytes of the archive; None for all bytes up to the end of the file.
        tensors: cache of the pickles of archives of one tensor; changed in place.
        may_be_cut: True to open a file that lacks its last storages; see `cut_from`.

    Raises:
        StorageError: the file is missing, short or unreadable.
        FormatError: the file is not a whole file of ``torch.save``.
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
    """The saved object as plain data. Dicts, lists, tuples and scalars are unchanged, tensors are
    `TorchTensor`, and other objects are `Opaque`."""
    has_checksums: bool
    """True if reads prove the bytes of tensors."""
    is_zip: bool
    """True for the zip format, False for the format before it."""
    pickled_bytes: int
    """Bytes of the pickles."""
    size: int
    """Bytes of the file, or of the range of it."""
    cut_from: int | None
    """Bytes that the file needs for all storages, if it has fewer; otherwise None. Tensors whose storages lie
    before the cut can be read. Only the format before zip has its index before the storages."""
    digest: str
    """Digest of the pickles. Two files with equal tensors but other names of classes differ in it."""

    def __init__(
        self,
        storage: Storage,
        file: str,
        *,
        start: int = 0,
        size: int | None = None,
        tensors: SmallPickles | None = None,
        may_be_cut: bool = False,
    ) -> None:
        self._may_be_cut = may_be_cut
        self.path = f"{storage.location}/{file}"
        self._storage = storage
        self._name = file
        whole = storage.size(file)
        if whole is None:
            raise StorageError(f"{self.path} is missing", file=self.path, missing=True)
        self._start = start
        self.size = whole - start if size is None else size
        if start < 0 or self.size < 0 or start + self.size > whole:
            raise StorageError(
                f"{self.path} has {whole} bytes, expected {self.size} from byte {start} on: it was cut or "
                "replaced. Restore it from a copy",
                file=self.path,
                missing=False,
            )
        self._records: dict[str, FileRange] = {}
        self._storages: dict[str, TorchStorage] = {}
        self._last_extent: tuple[Extent, bytearray] | None = None
        """The extent that was read last, and its bytes."""
        self._swapped = False
        self.cut_from = None
        self._file = FileWindow(storage, file, start, self.size)
        self.is_zip = self._bytes(0, 4) == b"PK\x03\x04"
        if self.is_zip:
            self._open_zip(tensors)
        else:
            self._open_legacy()
        for key, stored in self._storages.items():
            record = self._records.get(key)
            if record is None:
                raise self._fault(f"the storage {key} is missing")
            if stored.nbytes is not None and record.nbytes != stored.nbytes:
                raise self._fault(f"the storage {key} has {record.nbytes} bytes, expected {stored.nbytes}")

    def view(self, tensor: TorchTensor) -> StoredView:
        """The view of the file that holds the elements of a tensor.

        A tensor that was saved as a lazy conjugate or negative of its storage is decoded when it is read.
        """
        record = self._records[tensor.storage]
        width = DTYPES[tensor.dtype].itemsize
        if self._swapped:
            swap = width // 2 if tensor.dtype.startswith("complex") else width
            record = FileRange(record.storage, record.file, record.start, record.nbytes, record.crc, swap)
        view = StoredView(record, tensor.offset, tensor.stride)
        if tensor.is_conjugated or tensor.is_negated:
            place = record.storage, record.file, record.start
            return StoredView.dense(tensor.shape, _ResolvedExtent(*place, tensor.nbytes, view, tensor))
        return view

    def read(self, tensor: TorchTensor) -> torch.Tensor:
        """Reads a tensor. It is a view of its storage, with the stored shape and strides.

        A tensor that was saved as a lazy conjugate or negative of its storage is a copy.

        Raises:
            CorruptChunkError: the bytes of the storage do not match their CRC-32.
            StorageError: the file cannot be read.
        """
        view = self.view(tensor)
        if self._last_extent is None or self._last_extent[0] != view.extent:
            self._last_extent = None  # frees its memory before the next storage is allocated
            data = bytearray(view.extent.nbytes)
            view.extent.read_into(memoryview(data))
            self._last_extent = view.extent, data
        return _strided(self._last_extent[1], tensor.dtype, tensor.shape, view)

    def stream(self) -> io.BufferedReader:
        """The archive as a file object."""
        return io.BufferedReader(FileWindow(self._storage, self._name, self._start, self.size))

    @property
    def storages(self) -> Iterable[str]:
        """Keys of all storages."""
        return self._records.keys()

    def storages_behind(self, size: int) -> list[str]:
        """Keys of the storages that need bytes behind the first `size` bytes of the archive."""
        end = self._start + size
        return [key for key, record in self._records.items() if record.start + record.nbytes > end]

    def verify(self, storages: Iterable[str] | None = None) -> int:
        """Reads storages and checks their CRC-32.

        Args:
            storages: their keys; None for all.

        Returns:
            The number of bytes that checksums proved; 0 if the file has no checksums.

        Raises:
            CorruptChunkError: the bytes of a storage do not match.
        """
        records = [self._records[key] for key in (self._records if storages is None else storages)]
        for record in records:
            record.verify()
        return sum(record.nbytes for record in records if record.has_checksum)

    def _fault(self, text: str) -> FormatError:
        return FormatError(printable(f"{self.path}: {text}"), file=self.path)

    def _bytes(self, offset: int, count: int) -> bytes:
        """Bytes of the file; fewer at its end."""
        return bytes(self._file.bytes_at(offset, count))

    def _open_zip(self, tensors: SmallPickles | None) -> None:
        try:
            records = read_zip_directory(self._bytes, self.size)
        except (ValueError, struct.error) as error:
            raise self._fault(f"the zip archive is damaged or cut ({error})") from error
        entries = {record.name.partition("/")[2]: record for record in records}
        if "data.pkl" not in entries:
            raise self._fault("the zip archive has no data.pkl, so torch.save did not write it")
        if len(entries) < len(records):
            raise self._fault("two records of the zip archive have the same name")
        self.has_checksums = any(record.crc for record in records)
        for name, (_, method, crc, stored, nbytes, header) in entries.items():
            if method or stored != nbytes:
                raise self._fault(f"the record {name} is compressed, which torch.save never does")
            if not (name in _METADATA_RECORDS or name.startswith("data/")):
                continue
            local = self._bytes(header, _LOCAL_HEADER.size)
            if len(local) < _LOCAL_HEADER.size or local[:4] != b"PK\x03\x04":
                raise self._fault(f"the record {name} does not begin at byte {header} of the archive")
            offset = header + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(local))
            if offset + nbytes > self.size:
                raise self._fault(f"the record {name} ends past the end of the file")
            self._records[name] = self._range(offset, nbytes, crc if self.has_checksums else None)
        order = bytes(self._verified("byteorder")) if "byteorder" in self._records else b"little"
        if order not in (b"little", b"big"):
            raise self._fault(f"the byte order {order[:16]!r} is unknown")
        self._swapped = order.decode() != sys.byteorder
        if self._records["data.pkl"].nbytes > _MOST_PICKLE_BYTES:
            raise self._fault(f"data.pkl has more than {_MOST_PICKLE_BYTES} bytes, which no state dict needs")
        pickled = memoryview(self._verified("data.pkl"))
        self.digest = xxhash.xxh3_128_hexdigest(pickled)
        self.pickled_bytes = len(pickled)
        self.value = self._unpickled(bytes(pickled), tensors)
        self._records = {
            name.removeprefix("data/"): record
            for name, record in self._records.items()
            if name.startswith("data/")
        }

    def _unpickled(self, pickled: bytes, tensors: SmallPickles | None) -> Any:
        known = None if tensors is None else tensors.get(pickled)
        if known is not None:
            value, self._storages = known
            return value
        value = read_torch_pickle(pickled, self._persistent, file=f"{self.path}/data.pkl").value
        if tensors is not None and isinstance(value, TorchTensor) and len(tensors) < _MOST_SMALL_PICKLES:
            tensors[pickled] = value, self._storages
        return value

    def _open_legacy(self) -> None:
        self.has_checksums = False
        pieces = WindowBytes(self._file, min(self.size, _MOST_PICKLE_BYTES))
        head = []
        at = 0
        for _ in range(3):
            found = read_pickle(pieces, {}, file=self.path, start=at)
            head.append(found.value)
            at = found.end
            if head[0] != _MAGIC:
                raise self._fault("the file does not begin as torch.save writes it")
        if head[1] != _PROTOCOL or not isinstance(head[2], dict):
            raise self._fault(f"the protocol {brief(head[1])} of torch.save is unknown")
        self._swapped = head[2].get("little_endian") is not (sys.byteorder == "little")
        pickled = read_torch_pickle(pieces, self._persistent, file=self.path, start=at)
        self.value = pickled.value
        keys = read_pickle(pieces, {}, file=self.path, start=pickled.end)
        if not isinstance(keys.value, list):
            raise self._fault("the keys of the storages are not a list")
        self._take_storages(keys)
        digest = xxhash.xxh3_128()
        for begin in range(0, keys.end, _PIECE_BYTES):
            digest.update(self._bytes(begin, min(_PIECE_BYTES, keys.end - begin)))
        self.digest = digest.hexdigest()
        self.pickled_bytes = keys.end

    def _take_storages(self, keys: Pickle) -> None:
        """Finds the storages of the format before zip. Each storage follows its number of elements.

        Storages past the end of a file that was cut have the places that they had.
        """
        at = keys.end
        for key in keys.value:
            storage = self._storages.get(key) if isinstance(key, str) else None
            if storage is None:
                raise self._fault(f"the storage {brief(key)} is unknown")
            counted = self._bytes(at, 8)
            numel = struct.unpack("<q", counted)[0] if len(counted) == 8 else storage.numel
            if numel != storage.numel:
                raise self._fault(f"the storage {key} has {numel} elements, expected {storage.numel}")
            if storage.nbytes is None:
                raise self._fault(
                    f"the storage {key} is of {storage.dtype}, whose size is unknown, so that the storages "
                    "after it cannot be found. Load the file with torch.load and save it again"
                )
            self._records[key] = self._range(at + 8, storage.nbytes, None)
            at += 8 + storage.nbytes
        if at > self.size:
            if not self._may_be_cut:
                raise self._fault(
                    f"it needs {at} bytes and has {self.size}: it was cut. Restore it from a copy"
                )
            self.cut_from = at

    def _persistent(self, identifier: Any) -> TorchStorage:
        storage = torch_storage(self.path, identifier)
        if self._storages.setdefault(storage.key, storage).nbytes != storage.nbytes:
            raise self._fault(f"the storage {storage.key} has two sizes")
        return storage

    def _range(self, offset: int, nbytes: int, crc: int | None) -> FileRange:
        return FileRange(self._storage, self._name, self._start + offset, nbytes, crc)

    def _verified(self, name: str) -> bytearray:
        """Reads a small record and checks its CRC-32."""
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


def with_tensors(file: TorchFile, value: Any) -> Any:
    """A saved object, or a part of it, with its tensors read.

    Raises:
        FormatError: the object is nested deeper than 200 levels, or a tensor in it repeats its elements so
            often that it needs far more memory than the file.
        CorruptChunkError: the bytes of a tensor do not match their CRC-32.
    """
    return _Materializer(file).made(value, 0)


class _Materializer:
    """Reads the tensors of an object. Values that are one object in the file are one object in the result."""

    def __init__(self, file: TorchFile) -> None:
        self._file = file
        self._made: dict[int, Any] = {}
        self._tensors: dict[TorchTensor, torch.Tensor] = {}
        self._stored: dict[str, int] = {}
        """By storage, its bytes."""
        self._copied = 0

    def made(self, value: Any, depth: int) -> Any:
        if isinstance(value, TorchTensor):
            if value not in self._tensors:
                self._tensors[value] = self._tensor(value)
            return self._tensors[value]
        if not (isinstance(value, dict) or type(value) in (list, tuple)):
            return value
        if depth > _MOST_LEVELS:
            raise self._fault(f"an object is nested deeper than {_MOST_LEVELS} levels")
        if id(value) not in self._made:
            if isinstance(value, dict):
                made = value.copy()  # preserves the class: OrderedDict, Counter or defaultdict
                for key, item in value.items():
                    made[key] = self.made(item, depth + 1)
            else:
                made = type(value)(self.made(item, depth + 1) for item in value)
            self._made[id(value)] = made
        return self._made[id(value)]

    def _tensor(self, tensor: TorchTensor) -> torch.Tensor:
        found = self._file.read(tensor)
        self._stored[tensor.storage] = found.untyped_storage().nbytes()
        self._copied += tensor.nbytes
        if self._copied > max(_REPEATED_BYTES, _MOST_REPEATS * sum(self._stored.values())):
            raise self._fault(
                f"a tensor of shape {tensor.shape} repeats the elements of a smaller one, or of others"
            )
        return found.clone()

    def _fault(self, text: str) -> FormatError:
        return FormatError(f"{self._file.path}: {text}", file=self._file.path)


def unpickled(file: TorchFile) -> Any:
    """The saved object as torch unpickles it. This may run code that the file names.

    Call it only if the caller passed ``trust_pickle=True``.
    """
    with file.stream() as stream:
        return torch.load(stream, map_location="cpu", weights_only=False)  # noqa: TID251 the user trusts it


def leaves(
    value: Any, budget: ReadBudget | None = None, prefix: int = 0
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of a saved object, with the keys that lead to each.

    The rules are those by which ``torch.distributed.checkpoint`` names its keys:

    - A dict is descended, unless it is empty or two of its keys are equal as strings.
    - A list is descended only if a tensor or a dict is somewhere in it.
    - A tuple is a leaf.
    - The leaves of a pickled ``torch.nn.Module`` are those of its ``state_dict``.

    Args:
        value: the saved object, or a part of it.
        budget: counts the leaves and the text of their keys; None for one of this value alone.
        prefix: characters of the key of the value itself.

    Raises:
        ValueError: the object is nested deeper than 200 levels, for example because it holds itself, or the
            budget is used up.

    Example:
        >>> value = {"groups": [{"lr": 0.1}], "betas": (0.9, 0.99), "ids": [1]}
        >>> for path, leaf in leaves(value):
        ...     print(path, leaf)
        ('groups', 0, 'lr') 0.1
        ('betas',) (0.9, 0.99)
        ('ids',) [1]
    """
    pending: list[Iterator[tuple[tuple[Any, ...], Any]]] = [iter([((), value)])]
    budget = budget or ReadBudget()
    texts = [prefix]
    """Characters of the key of the value whose items each iterator of `pending` gives."""
    lists: dict[int, bool] = {}
    while pending:
        found = next(pending[-1], None)
        if found is None:
            pending.pop()
            texts.pop()
            continue
        path, item = found
        text = texts[-1] + (key_units(path[-1]) + 1 if path else 0)
        budget.charge_values(1)
        budget.charge_text(text + len(path))
        inside = _inside(item, len(path), lists, budget)
        if isinstance(item, TorchStorage):
            yield path, Unreadable("a storage without a tensor", "Save a tensor of it instead")
        elif inside is None:
            yield found
        else:
            pending.append(_below(path, inside))
            texts.append(text)


def _below(path: tuple[Any, ...], items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    return (((*path, key), item) for key, item in items)


def _inside(
    value: Any, depth: int, lists: dict[int, bool], budget: ReadBudget
) -> Iterable[tuple[Any, Any]] | None:
    """Keys and values in a value that `leaves` descends; None for a leaf."""
    if depth > _MOST_LEVELS:
        raise ValueError(f"the object is nested deeper than {_MOST_LEVELS} levels")
    if isinstance(value, Mapping):
        budget.charge(sum(map(key_units, value)))
        is_plain = not depth or len({str(key) for key in value}) == len(value) > 0
        return value.items() if is_plain else None
    if isinstance(value, list):
        return enumerate(value) if _holds_tensors(value, depth, lists) else None
    return _module_items(value, budget) if isinstance(value, Opaque) else None


def _holds_tensors(items: list[Any], depth: int, known: dict[int, bool]) -> bool:
    """True if a tensor or a dict is in a list or in the lists inside it.

    Args:
        items: the list.
        depth: level of the list.
        known: cached results by the id of the list. A pickle may refer to one list many times.
    """
    if depth > _MOST_LEVELS:
        raise ValueError(f"the object is nested deeper than {_MOST_LEVELS} levels")
    if id(items) not in known:
        known[id(items)] = any(
            isinstance(item, (TorchTensor, Unreadable, Mapping))
            or (isinstance(item, list) and _holds_tensors(item, depth + 1, known))
            for item in items
        )
    return known[id(items)]


def _module_items(module: Opaque, budget: ReadBudget) -> list[tuple[str, Any]] | None:
    """Parameters, persistent buffers and submodules of a pickled ``torch.nn.Module``; None for others."""
    state = module.state
    if not isinstance(state, dict):
        return None
    parts = [state.get(name) for name in ("_parameters", "_buffers", "_modules")]
    if not all(isinstance(part, dict) for part in parts):
        return None
    budget.charge_values(sum(len(part) for part in parts if isinstance(part, dict)))
    hidden = state.get("_non_persistent_buffers_set")
    skipped = hidden if isinstance(hidden, set) else set()
    return [
        (name, item)
        for part in parts
        if isinstance(part, dict)
        for name, item in part.items()
        if item is not None and name not in skipped
    ]
