"""Reads files of ``torch.save``: ``.pt``, ``.pth``, ``.bin``, and the ``.ckpt`` of Lightning.

Keys are those of nested dicts and lists, joined by dots. Tensors that are the same view of one storage are
tied: the first key has the tensor, the others are aliases. All other values are objects.

`TorchFilesReader` is the common part of all formats with files of torch.save.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import (
    Foreign,
    FormatReader,
    ReadBudget,
    StoredBox,
    StoredView,
    TensorDescription,
    Unreadable,
    opaque_names,
    parts_of,
)
from shardproof.errors import FormatError
from shardproof.formats.torch.torch_file import TorchFile, TorchTensor, leaves, unpickled, with_tensors

_MAGIC = re.compile(
    rb"(\x80[\x02-\x05](\x95.{8})?)?(\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19|L119547037146038801333356L\n)\.",
    re.DOTALL,
)
"""First bytes of files in the format before zip: the pickle of one number, with any protocol."""
_WRITTEN = "checkpoint.pt"
"""The file in a folder that `shardproof convert --to torch` wrote."""
_FIRST_BYTES = 512
"""Bytes that `is_torch_file` reads. They hold the name of the first record of a zip file."""


def is_torch_file(foreign: Foreign, name: str) -> bool:
    """True if the first bytes of a file are those that torch.save writes."""
    size = foreign.storage.size(name)
    if not size:
        return False
    begin = foreign.storage.read(name, 0, min(size, _FIRST_BYTES))
    if begin[:4] == b"PK\x03\x04":
        length = int.from_bytes(begin[26:28], "little")
        return begin[30 : 30 + length].endswith(b"/data.pkl")
    return _MAGIC.match(begin) is not None


@dataclass(frozen=True, slots=True)
class TorchObject:
    """A value of a file that is not a tensor."""

    file: str
    path: tuple[Any, ...]
    """Keys that lead to the value in the saved object."""
    value: Any


class TorchFilesReader(FormatReader):
    """A checkpoint that has files of ``torch.save``; see `FormatReader`. A subclass adds the files."""

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        self._files: dict[str, TorchFile] = {}
        self._budget = ReadBudget()
        """Of all files together."""
        self._objects: dict[str, TorchObject] = {}
        self._used: dict[str, set[str]] = {}
        """By file, the keys of the storages that tensors use."""
        self._unpickled: tuple[str, Any] | None = None
        """The file that was unpickled last, and its object."""

    def open_file(self, name: str) -> TorchFile:
        """Opens a file once.

        Raises:
            StorageError: the file is missing or unreadable.
            FormatError: the file is damaged.
        """
        if name not in self._files:
            self._files[name] = TorchFile(self.storage, name, may_be_cut=True)
            self._used[name] = set()
            self._budget.grant(self._files[name].pickled_bytes)
        return self._files[name]

    def opened_dict(self, name: str) -> dict[Any, Any]:
        """The object of a file, which has to be a dict.

        Raises:
            StorageError, FormatError: see `open_file`; or the object is not a dict.
        """
        value = self.open_file(name).value
        if not isinstance(value, dict):
            raise self.fault(name, f"it holds {brief(value)}, expected a dict")
        return value

    def add_torch_file(self, name: str, prefix: str = "") -> TorchFile:
        """Describes the leaves of a file.

        Args:
            name: name of the file in the storage.
            prefix: prefix of the keys. The rest is the path of the leaf in the file, joined by dots.

        Raises:
            FormatError: the file is damaged, or two values have the same key.
            StorageError: the file is missing or unreadable.
        """
        file = self.open_file(name)
        ties: dict[TorchTensor, str] = {}
        for path, leaf in self.leaves_of(name, file.value):
            key = prefix + (".".join(map(str, path)) or "value")
            if isinstance(leaf, TorchTensor) and leaf in ties and 0 not in leaf.shape:
                self.check_new(key, name)
                self.aliases[key] = ties[leaf]
            else:
                self._add_leaf(key, name, path, leaf)
                if isinstance(leaf, TorchTensor):
                    ties[leaf] = key
        return file

    def add_leaves(self, key: str, name: str, path: tuple[Any, ...], value: Any) -> None:
        """Adds the leaves of a value of a file, with keys joined by dots.

        Raises:
            FormatError: another value has one of the keys, or the value is nested too deep.
        """
        for below, leaf in self.leaves_of(name, value, f"{key}: "):
            self._add_leaf(".".join((key, *map(str, below))), name, (*path, *below), leaf)

    def add_tensor(self, key: str, name: str, tensor: TorchTensor) -> None:
        """Describes a whole tensor of a file.

        Raises:
            FormatError: another value has this key.
        """
        self.check_new(key, name)
        self._used[name].add(tensor.storage)
        boxes = StoredBox.whole(tensor.shape, self._files[name].view(tensor))
        self.tensors[key] = TensorDescription(tensor.dtype, tensor.shape, boxes)

    def check_new(self, key: str, name: str) -> None:
        """Checks that no other value has a key."""
        if any(key in known for known in (self.tensors, self.aliases, self._objects, self.unreadable)):
            raise self.fault(name, f"two values have the key {key}", key=key)

    def flat_view(self, name: str, tensor: Any, what: str) -> StoredView:
        """The view of the file that holds the elements of a tensor, which has to be dense."""
        if not isinstance(tensor, TorchTensor):
            raise self.fault(name, f"{what} is {brief(tensor)}, expected a tensor")
        view = self._files[name].view(tensor)
        if view.stride != StoredView.dense(tensor.shape, view.extent).stride and 0 not in tensor.shape:
            raise self.fault(name, f"the elements of {what} do not lie one after the other")
        self._used[name].add(tensor.storage)
        return view

    def keys(self) -> set[str]:
        """All keys so far, of tensors, aliases and objects."""
        return {*self.tensors, *self.aliases, *self._objects, *self.unreadable}

    def conclude(self, *digests: str) -> None:
        """Sets the identity and the notes on checksums, once all files are added.

        Args:
            digests: digests of the metadata that is not in files of torch.save.
        """
        digest = xxhash.xxh3_128("\0".join(digests).encode())
        for name, file in self._files.items():
            self.note_cut(name, file.size, file.cut_from or 0)
            digest.update(f"{name}\0{file.digest}\0".encode())
        self.identity = digest.hexdigest()
        legacy = [name for name, file in self._files.items() if not file.is_zip]
        without = [name for name, file in self._files.items() if file.is_zip and not file.has_checksums]
        if legacy:
            self.notes.append(
                f"{_have(legacy)} the format before zip, which has no checksums: changed bytes of tensors "
                "are not found."
            )
        if without:
            self.notes.append(
                f"{_have(without)} no CRC-32, because the writer switched them off: changed bytes of tensors "
                "are not found."
            )

    def object_keys(self) -> Iterable[str]:
        """Keys of the values that are not tensors."""
        return self._objects.keys()

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """A value as plain data; see `FormatReader.object`.

        With `trust_pickle`, torch unpickles the whole file of a value that is not plain data.
        """
        found = self._objects[key]
        if trust_pickle and opaque_names(found.value):
            return self._trusted(found)
        return with_tensors(self._files[found.file], found.value)

    def files(self) -> Mapping[str, int | None]:
        """All files. torch.save records no sizes, so that only a file that was cut has one."""
        return dict(super().files()) | {name: file.cut_from for name, file in self._files.items()}

    def keys_behind(self, file: str, size: int) -> set[str]:
        """See `FormatReader.keys_behind`. The values are tensors, and objects that hold tensors."""
        behind = set(self._files[file].storages_behind(size)) if file in self._files else set()
        return super().keys_behind(file, size) | {
            key
            for key, found in self._objects.items()
            if found.file == file
            and any(tensor.storage in behind for tensor in parts_of(found.value, TorchTensor))
        }

    def verify_extra(self) -> int:
        """Verifies the storages of tensors in objects, and those that no tensor uses.

        Of a file that was cut, it verifies the storages before the cut. The size of the file shows the rest.
        """
        proved = 0
        for name, file in self._files.items():
            skipped = self._used[name].union(file.storages_behind(file.size))
            proved += file.verify(key for key in file.storages if key not in skipped)
        return proved

    def leaves_of(self, name: str, value: Any, what: str = "") -> list[tuple[tuple[Any, ...], Any]]:
        """All leaves of a value of a file, with the keys that lead to each."""
        try:
            return list(leaves(value, self._budget, len(what)))
        except ValueError as error:
            raise self.fault(name, f"{what}{error}") from error

    def _add_leaf(self, key: str, name: str, path: tuple[Any, ...], leaf: Any) -> None:
        if isinstance(leaf, TorchTensor):
            self.add_tensor(key, name, leaf)
        elif isinstance(leaf, Unreadable):
            self.check_new(key, name)
            self.unreadable[key] = leaf
        else:
            self.check_new(key, name)
            self._objects[key] = TorchObject(name, path, leaf)

    def _trusted(self, found: TorchObject) -> Any:
        if self._unpickled is None or self._unpickled[0] != found.file:
            self._unpickled = None  # frees its memory before the next object is loaded
            self._unpickled = found.file, unpickled(self._files[found.file])
        value = self._unpickled[1]
        try:
            for step in found.path:
                value = value[step] if isinstance(value, (dict, list)) else getattr(value, step)
        except (AttributeError, LookupError, TypeError) as error:
            raise self.fault(found.file, f"the unpickled object has no {found.path}") from error
        return value


def _have(names: list[str]) -> str:
    return f"{names[0]} has" if len(names) == 1 else f"{len(names)} files ({names[0]} and others) have"


class TorchSaveReader(TorchFilesReader):
    """A file of ``torch.save``, open for reading; see `FormatReader`.

    Example:
        >>> import tempfile, torch
        >>> from shardproof.storage import LocalStorage
        >>> folder = tempfile.mkdtemp()
        >>> weight = torch.arange(6.0).reshape(3, 2)
        >>> torch.save({"model": {"a": weight, "b": weight}, "step": 3}, f"{folder}/last.pt")
        >>> reader = TorchSaveReader(Foreign(LocalStorage(folder), "last.pt"))
        >>> reader.tensors["model.a"].shape, reader.aliases, reader.object("step")
        ((3, 2), {'model.b': 'model.a'}, 3)
    """

    name = "torch"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        name = foreign.file or _WRITTEN
        if foreign.file is None and not foreign.has(_WRITTEN):
            raise FormatError(
                f"{self.location} is not a file: name the file of torch.save", file=self.location
            )
        file = self.add_torch_file(name)
        self.conclude()
        if isinstance(file.value, dict) and "pytorch-lightning_version" in file.value:
            step = file.value.get("global_step")
            self.step = step if type(step) is int else None

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True for a file whose first bytes torch.save writes, and for a folder that `convert` wrote."""
        return is_torch_file(foreign, foreign.file or _WRITTEN)
