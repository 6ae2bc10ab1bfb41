"""The protocol of a reader of a foreign format, and the tensors that it describes.

A reader opens a checkpoint and describes it: keys, dtypes, shapes, and where each stored box of a tensor
lies. It reads no tensor data. Loading, verification, comparison and conversion read boxes from these
descriptions, so that they know nothing about formats.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from shardproof._utils.humanize import brief, listed, printable
from shardproof.engine.foreign.extents import Extent
from shardproof.engine.geometry import flat_range_pairs, row_major_strides
from shardproof.engine.storage import LocalStorage, Location, Storage, is_url, storage_at
from shardproof.errors import CorruptChunkError, FormatError, NotCommittedError, StorageError

_MOST_METADATA = 1 << 30
"""Bytes of a file of metadata, at most."""
_MOST_DIMENSIONS = 64
"""Dimensions of a tensor, at most: the limit of numpy and of torch's operators."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A path that may hold a foreign checkpoint."""

    storage: Storage
    """The folder, or the folder of the file."""
    file: str | None = None
    """Name of the file in the storage; None if the path is a folder."""

    @property
    def location(self) -> str:
        """The path, for messages."""
        return self.storage.location if self.file is None else f"{self.storage.location}/{self.file}"

    def has(self, name: str) -> bool:
        """True if the path is a folder that has a file of this name."""
        return self.file is None and self.storage.size(name) is not None


def foreign_of(path: Location, storage_options: Mapping[str, Any] | None = None) -> Foreign:
    """A path or URL as a folder, or as a file in its folder."""
    if isinstance(path, str) and is_url(path):
        folder, _, name = path.rstrip("/").rpartition("/")
        if os.path.splitext(name)[1] and is_url(folder):
            storage = storage_at(folder, storage_options)
            if storage.size(name) is not None:
                return Foreign(storage, name)
    elif isinstance(path, (str, bytes, os.PathLike)) and os.path.isfile(path):
        folder, name = os.path.split(os.fsdecode(path))
        return Foreign(LocalStorage(folder or "."), name)
    return Foreign(storage_at(path, storage_options))


@dataclass(frozen=True, slots=True)
class StoredView:
    """Elements of an extent, as a strided array."""

    extent: Extent
    offset: int
    """First element, counted in elements of the tensor's dtype from the start of the extent."""
    stride: tuple[int, ...]
    """(d,) elements from one index to the next in each dimension."""

    @staticmethod
    def dense(sizes: Sequence[int], extent: Extent, offset: int = 0) -> StoredView:
        """Elements that lie in row-major order, one after the other."""
        return StoredView(extent, offset, tuple(row_major_strides(sizes)))


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor that a checkpoint stores."""

    offsets: tuple[int, ...]
    """(d,) first index of the box in the tensor."""
    sizes: tuple[int, ...]
    """(d,) sizes of the box; none is 0."""
    file: str
    """Name of the file in the storage, for the order of reads and for messages."""
    start: int
    """First byte in the file of the box, or of the entry that holds it."""
    nbytes: int
    """Bytes of the file that a read of the box needs, at most."""
    view: StoredView | Callable[[], StoredView]
    """The elements, or a function that opens the file and finds them. The function may raise the errors of
    `Extent.read_into`."""

    @staticmethod
    def of(offsets: Sequence[int], sizes: Sequence[int], view: StoredView) -> StoredBox:
        """A box whose elements are known without opening the file."""
        extent = view.extent
        return StoredBox(tuple(offsets), tuple(sizes), extent.file, extent.start, extent.stored_bytes, view)

    @staticmethod
    def whole(shape: Sequence[int], view: StoredView) -> list[StoredBox]:
        """The one box of a tensor whose elements lie in one extent; none for a tensor of size 0."""
        return [] if 0 in shape else [StoredBox.of((0,) * len(shape), shape, view)]

    def located(self) -> StoredView:
        """The elements of the box. It may open the file, and raise the errors of `Extent.read_into`."""
        if isinstance(self.view, StoredView):
            return self.view
        with foreign_faults(self.file):
            return self.view()


@dataclass(frozen=True, slots=True)
class ZeroRule:
    """Where the tensor `key` is 0, the tensor `other` of the same shape is not above a bound."""

    key: str
    other: str
    bound: float
    """Largest absolute value of `other`."""
    reason: str
    """Why, for the message."""


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """A tensor of a foreign checkpoint, not read yet."""

    dtype: str
    """Torch's name of the dtype, for example "bfloat16"."""
    shape: tuple[int, ...]
    """Global shape."""
    boxes: Sequence[StoredBox]
    """The stored boxes, without empty ones. They tile the shape, unless the checkpoint is damaged."""
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """Remarks to the user about this tensor, a sentence each."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A stored value that neither a tensor of torch nor plain data can hold. Only its key is an error."""

    kind: str
    """What it is, for messages, for example "a quantised tensor (qint8)"."""
    remedy: str
    """What the user can do, a sentence without its full stop."""

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class UnsupportedError(ValueError):
    """Part of a checkpoint has a feature that this version does not read, and is not damaged."""


def flat_boxes(
    shape: Sequence[int], start: int, stop: int, extent: Extent, offset: int = 0
) -> list[StoredBox]:
    """The boxes of a flat range of a tensor that lies contiguously in an extent. There are at most 2·d − 1.

    Args:
        shape: (d,) shape of the tensor.
        start: first element of the range, in the row-major order of the tensor.
        stop: end of the range, exclusive.
        extent: the extent that holds the elements in order.
        offset: element of the extent where the range begins.
    """
    if start >= stop:
        return []
    pairs, first = flat_range_pairs(shape, start, stop)
    return [
        StoredBox.of(offsets, sizes, StoredView.dense(sizes, extent, offset + at))
        for (offsets, sizes), at in zip(pairs, first, strict=True)
    ]


def shape_of(values: Any) -> tuple[int, ...]:
    """Checks a shape, or the sizes or offsets of a box, that metadata gives.

    Raises:
        ValueError: the value is not a sequence of at most 64 sizes.
    """
    if len(values) > _MOST_DIMENSIONS:
        raise ValueError(f"a shape has {len(values)} dimensions, expected at most {_MOST_DIMENSIONS}")
    sizes = tuple(values)
    if any(type(size) is not int or not 0 <= size < 1 << 62 for size in sizes):
        raise ValueError(f"{brief(sizes)} is not a shape")
    return sizes


@contextmanager
def foreign_faults(location: str, key: str | None = None) -> Iterator[None]:
    """Turns errors that the content of a checkpoint causes in Python, numpy or torch into a `FormatError`.

    A reader refuses what it knows to be wrong. This covers what remains: memory that does not suffice,
    numbers that are too large, values that are nested too deep. Errors of shardproof get the key.

    Args:
        location: path of the checkpoint.
        key: key of the value that is read; None for the metadata.

    Raises:
        FormatError: instead of a `MemoryError`, `ValueError`, `ArithmeticError` or `RuntimeError`.
    """
    try:
        yield
    except (CorruptChunkError, FormatError, StorageError) as error:
        if key is None or "key" in error.details:
            raise
        raise type(error)(f"{brief(key)}: {error.message}", **error.details, key=key) from error
    except (MemoryError, ValueError, ArithmeticError, RuntimeError) as error:
        of, details = ("", {}) if key is None else (f"{brief(key)}: ", {"key": key})
        raise FormatError(
            f"{location}: {of}it cannot be read ({brief(error)}). The file is damaged or made to fail, or "
            "needs more memory than there is",
            file=location,
            **details,
        ) from error


def missing_file(path: str, key: str, offsets: Sequence[int]) -> StorageError:
    """The error of a missing file that holds a box of a tensor."""
    return StorageError(
        f"{path} is missing: it holds the part of {key} that begins at {tuple(offsets)}. Restore it from a "
        "copy",
        file=path,
        key=key,
        missing=True,
    )


class FormatReader(ABC):
    """A foreign checkpoint, open for reading. Nothing that its pickles name is imported or called.

    A subclass reads the metadata in its constructor and sets the attributes. It stores no tensor data.

    Raises:
        NotCommittedError: there is no checkpoint, or its save did not finish.
        FormatError: the metadata is damaged.
        StorageError: a file of the metadata is missing or unreadable.
    """

    name: ClassVar[str]
    """Name of the format, as ``format=`` and ``--to`` take it."""

    def __init__(self, foreign: Foreign) -> None:
        self.storage = foreign.storage
        self.location = foreign.location
        self.tensors: dict[str, TensorDescription] = {}
        """Tensors by key."""
        self.aliases: dict[str, str] = {}
        """Key of a tied tensor to the key in `tensors` that it equals."""
        self.unreadable: dict[str, Unreadable] = {}
        """Values that cannot be read, by key. Their keys are neither in `tensors` nor in `object_keys`."""
        self.world_size = 1
        """Number of ranks that saved; 1 if the format does not store it."""
        self.step: int | None = None
        """Training step; None if the format does not store it."""
        self.paths: dict[str, tuple[str | int, ...]] = {}
        """Paths of keys in the nested state dict, where the format stores them."""
        self.user_metadata: dict[str, Any] = {}
        """The user's metadata, as plain data, if the format has a place for it."""
        self.notes: list[str] = []
        """Limits of the format, such as missing checksums, a sentence each. Users see them once, as a
        warning."""
        self.identity = ""
        """A digest of the metadata. It is equal on all ranks that see the same checkpoint."""

    @classmethod
    @abstractmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True if the path looks like this format. It looks at names and a few bytes of small files only.

        Raises:
            FormatError: such a file is damaged, so the path is not of this format.
        """

    @abstractmethod
    def object_keys(self) -> Iterable[str]:
        """Keys of the values that are not tensors."""

    @abstractmethod
    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """A value that is not a tensor, as plain data: None, numbers, strings, bytes, containers, tensors.

        Args:
            key: one of `object_keys`.
            trust_pickle: True to unpickle the value with torch, which may run code of the file. Otherwise
                objects of classes become `Opaque`.

        Raises:
            KeyError: no value has this key.
            CorruptChunkError, FormatError, StorageError: the value is damaged, or its file is missing or
                short.
        """

    def add(self, key: str, found: TensorDescription | Unreadable) -> None:
        """Adds a tensor, or the reason why it cannot be read."""
        if isinstance(found, Unreadable):
            self.unreadable[key] = found
        else:
            self.tensors[key] = found

    def files(self) -> Mapping[str, int | None]:
        """Files that the checkpoint needs: name to expected size; None if the format does not record it."""
        return dict.fromkeys(box.file for tensor in self.tensors.values() for box in tensor.boxes)

    def keys_behind(self, file: str, size: int) -> set[str]:
        """Keys of the values that need bytes of a file behind its first `size` bytes."""
        return {
            key
            for key, tensor in self.tensors.items()
            for box in tensor.boxes
            if box.file == file and box.start + box.nbytes > size
        }

    def note_cut(self, file: str, size: int, needed: int) -> None:
        """Notes a file that was cut, so that only the values before the cut can be read.

        Args:
            file: name of the file, whose values are described.
            size: its bytes.
            needed: the bytes that it had, or fewer if it was not cut.
        """
        if size < needed:
            lost = self.keys_behind(file, size)
            lacks = f"it was cut. It lacks bytes of {listed(lost)}" if lost else "it was cut"
            self.notes.append(
                f"{file} has {size} bytes, expected {needed}: {lacks}. The other values can be read."
            )

    def missing(self, file: str) -> StorageError:
        """The error of a missing file of `files`. It names the tensor that needs the file."""
        path = f"{self.storage.location}/{file}"
        for key, tensor in self.tensors.items():
            for box in tensor.boxes:
                if box.file == file:
                    return missing_file(path, key, box.offsets)
        return StorageError(
            f"{path} is missing. {self.location} needs it: restore it from a copy", file=path, missing=True
        )

    def verify_extra(self) -> int:
        """Verifies all values except tensors and the metadata: objects, and files with digests.

        Returns the number of bytes that checksums proved.

        Raises:
            CorruptChunkError, FormatError, StorageError: the first damage found.
        """
        for key in self.object_keys():
            self.object(key)
        return 0

    def zero_rules(self) -> Sequence[ZeroRule]:
        """Rules that name ranges which a writer lost as zeros; none for most formats."""
        return ()

    def close(self) -> None:
        """Closes the files that reading opened."""
        self.storage.close()

    def read_small(self, file: str) -> bytes:
        """Reads a whole file of metadata, or one that holds a plain value.

        Raises:
            FormatError: the file has more than 1 GiB. Nothing is read.
            StorageError: the file is missing, or the storage failed.
        """
        return self.storage.read_at_most(file, _MOST_METADATA)

    def read_commit(self, file: str, what: str) -> bytes:
        """Reads the file that the writer writes last.

        `what` is the kind of the checkpoint, for the message, such as "DCP checkpoint".

        Raises:
            NotCommittedError: the file is missing.
            FormatError: the file has more than 1 GiB.
            StorageError: the storage failed.
        """
        try:
            return self.read_small(file)
        except StorageError as error:
            if not error.details.get("missing"):
                raise
            raise NotCommittedError(
                f"{self.location} has no {file}: it is not a {what}, or its save did not finish",
                file=f"{self.location}/{file}",
            ) from error

    def fault(self, file: str, text: str, **details: Any) -> FormatError:
        """A `FormatError` that names a file of this checkpoint."""
        path = f"{self.storage.location}/{file}"
        return FormatError(printable(f"{path}: {text}"), file=path, **details)


Part = TypeVar("Part")

_CLASS_IN_ARGS = {"torch._tensor._rebuild_from_type_v2": 1, "torch._utils._rebuild_wrapper_subclass": 0}
"""Functions that make a tensor of a subclass, and which argument is the class."""


@dataclass(eq=False, slots=True)
class Opaque:
    """An object of a class that the reader does not know, or a reference to such a class.

    Two references to the same class are equal only if they are the same object.
    """

    name: str
    """Module and qualified name, for example "argparse.Namespace"."""
    args: tuple[Any, ...] | None = None
    """Arguments of the constructor; None for a reference to the class itself."""
    state: Any = None
    """The state that the pickle sets, usually a dict of attributes."""
    items: list[Any] = field(default_factory=list)
    """Elements that the pickle appends, or pairs of key and value that it sets."""

    def __repr__(self) -> str:
        return f"<{self.name}, not imported>"


def opaque_names(value: Any) -> list[str]:
    """Sorted names of the classes and functions in a value that are not plain data.

    Example:
        >>> opaque_names({"a": [Opaque("argparse.Namespace", ()), 3]})
        ['argparse.Namespace']
    """
    return sorted({_class_name(item) for item in parts_of(value, Opaque)})


def _class_name(value: Opaque) -> str:
    """Name of the class of a value. A tensor of a subclass is pickled as the call of a function of torch."""
    row = _CLASS_IN_ARGS.get(value.name)
    kind = value.args[row] if row is not None and value.args is not None and len(value.args) > row else None
    return kind.name if isinstance(kind, Opaque) else value.name


def parts_of(value: Any, kind: type[Part]) -> Iterator[Part]:
    """The objects of a class in a value and in the containers in it.

    Example:
        >>> list(parts_of({"a": [1.5, "text"]}, float))
        [1.5]
    """
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, kind):
            yield item
        elif isinstance(item, (dict, list, tuple, set, frozenset)) and id(item) not in seen:
            seen.add(id(item))
            pending.extend([*item.keys(), *item.values()] if isinstance(item, dict) else item)
