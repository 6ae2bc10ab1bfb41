"""The common part of formats whose files of ``torch.save`` hold parts of tensors."""

from __future__ import annotations

from typing import Any

from shardproof.interop.reader import StoredView, TensorDescription
from shardproof.interop.torch_file import TorchFile, TorchTensor, leaves
from shardproof.interop.torch_save import TorchFilesReader, TorchObject

__all__ = ["TorchFolderReader", "shape_of"]


class TorchFolderReader(TorchFilesReader):
    """Reads files of ``torch.save``. A subclass adds their values one by one; see `FormatReader`."""

    def open_file(self, name: str) -> TorchFile:
        """Opens a file once.

        Raises:
            StorageError: the file is missing or unreadable.
            FormatError: the file is damaged.
        """
        if name not in self._files:
            self._files[name] = TorchFile(self.storage, name)
            self._used[name] = set()
        return self._files[name]

    def opened_dict(self, name: str) -> dict[Any, Any]:
        """The object of a file, which has to be a dict.

        Raises:
            StorageError, FormatError: see `open_file`; or the object is not a dict.
        """
        value = self.open_file(name).value
        if not isinstance(value, dict):
            raise self.fault(name, f"it holds {value!r:.100}, expected a dict")
        return value

    def check_new(self, key: str, name: str) -> None:
        """Checks that no other value has a key.

        Raises:
            FormatError: another value has this key.
        """
        if key in self.tensors or key in self.aliases or key in self._objects:
            raise self.fault(name, f"two values have the key {key}", key=key)

    def add_tensor(self, key: str, name: str, tensor: TorchTensor) -> None:
        """Describes a whole tensor of a file.

        Raises:
            FormatError: another value has this key.
        """
        self.check_new(key, name)
        self._used[name].add(tensor.storage)
        self.tensors[key] = TensorDescription(tensor.dtype, tensor.shape, self._files[name].boxes(tensor))

    def add_leaves(self, key: str, name: str, path: tuple[Any, ...], value: Any) -> None:
        """Adds the leaves of a value of a file, with keys joined by dots.

        Args:
            key: key of the value.
            name: name of the file.
            path: keys that lead to the value in the object of the file.
            value: tensors and plain data.

        Raises:
            FormatError: another value has one of the keys, or the value is nested too deep.
        """
        try:
            found = list(leaves(value))
        except ValueError as error:
            raise self.fault(name, f"{key}: {error}") from error
        for below, leaf in found:
            leaf_key = ".".join((key, *map(str, below)))
            if isinstance(leaf, TorchTensor):
                self.add_tensor(leaf_key, name, leaf)
            else:
                self.check_new(leaf_key, name)
                self._objects[leaf_key] = TorchObject(name, (*path, *below), leaf)

    def flat_view(self, name: str, tensor: Any, what: str) -> StoredView:
        """The view of the file that holds the elements of a tensor, which has to be dense.

        Args:
            name: name of the file.
            tensor: a value of the file.
            what: role of the tensor, for messages.

        Raises:
            FormatError: the value is not a tensor, or its elements do not lie one after the other.
        """
        if not isinstance(tensor, TorchTensor):
            raise self.fault(name, f"{what} is {tensor!r:.100}, expected a tensor")
        view = self._files[name].view(tensor)
        if view.stride != StoredView.dense(tensor.shape, view.extent).stride and 0 not in tensor.shape:
            raise self.fault(name, f"the elements of {what} do not lie one after the other")
        self._used[name].add(tensor.storage)
        return view


def shape_of(value: Any) -> tuple[int, ...]:
    """Checks a shape that a pickle gives.

    Raises:
        ValueError: the value is not a sequence of sizes.
    """
    sizes = tuple(value)
    if any(type(size) is not int or not 0 <= size < 1 << 62 for size in sizes):
        raise ValueError(f"{sizes} is not a shape")
    return sizes
