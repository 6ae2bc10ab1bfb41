"""Reads the header of a foreign safetensors file, with torch's names of the dtypes.

A file of another project passes the same checks as a shard file of shardproof (`read_shard_header`). The
header has at most 100 MB, no entry overlaps another, and the entries fill the file without a hole. A file
may be cut: then the tensors before the cut are whole. A tensor of a dtype that torch does not have is listed,
and cannot be read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import FileRange, Unreadable
from shardproof.engine.format import read_shard_header
from shardproof.engine.storage import Storage

_PAIR = "float4_e2m1fn_x2"
_DTYPES = {
    dtype.code: dtype.name
    for dtype in DTYPES.values()
    if dtype.parts == 1 and dtype.name != _PAIR and hasattr(torch, dtype.name)
}
"""Code in a safetensors header to torch's name of the dtype."""
_REMEDY = "This torch has no such dtype. Its writer can store the same bytes as U8"
_PAIRS_OF_FLOATS = "F4"
"""The code of 4-bit numbers. A header counts them one by one, and torch has one element for two of them."""


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """A tensor of a safetensors file, in row-major order and little-endian."""

    dtype: str
    """Torch's name of the dtype, for example "bfloat16"."""
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""
    end: int
    """One past the last byte in the file."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of a safetensors file."""

    storage: Storage
    file: str
    """Name of the file in the storage."""
    metadata: dict[str, str]
    """The texts under ``__metadata__``."""
    tensors: dict[str, SafetensorsTensor]
    """Tensors by key, in the order of their bytes."""
    unreadable: dict[str, Unreadable]
    """Tensors of dtypes that torch does not have, by key."""
    data_start: int
    """First byte after the header."""
    data_end: int
    """One past the last byte of the last tensor. The tensors fill the file from `data_start` to here."""
    size: int
    """Bytes of the file; fewer than `data_end` if it was cut."""
    raw: bytes
    """All bytes before the data, as input of digests."""

    def extent(self, key: str) -> FileRange:
        """The bytes of a tensor. The format has no checksum.

        Raises:
            KeyError: the file has no such tensor.
        """
        tensor = self.tensors[key]
        return FileRange(self.storage, self.file, tensor.begin, tensor.end - tensor.begin)


def dtype_of_code(code: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Torch's dtype and shape for a code and a shape of a header; None if this torch has no such dtype.

    Example:
        >>> dtype_of_code("F8_E4M3", (2, 3))
        ('float8_e4m3fn', (2, 3))
        >>> dtype_of_code("F4", (2, 4))
        ('float4_e2m1fn_x2', (2, 2))
        >>> dtype_of_code("F6_E2M3", (4,))
    """
    if code == _PAIRS_OF_FLOATS and shape and shape[-1] % 2 == 0 and hasattr(torch, _PAIR):
        return _PAIR, (*shape[:-1], shape[-1] // 2)
    name = _DTYPES.get(code)
    return None if name is None else (name, shape)


def read_safetensors_header(storage: Storage, file: str, *, may_be_cut: bool = False) -> SafetensorsHeader:
    """Reads and checks the header of a safetensors file.

    It reads and allocates no more than the header, whatever sizes the file declares.

    Args:
        storage: the storage that holds the file.
        file: name of the file.
        may_be_cut: True to accept a file that ends before its last tensor does.

    Raises:
        FormatError: the header breaks a rule of safetensors, or does not fit the size of the file.
        StorageError: the file is missing or unreadable.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save
        >>> from shardproof.storage import LocalStorage
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> storage.publish("a.safetensors", save({"weight": torch.zeros(2, 3, dtype=torch.bfloat16)}))
        >>> header = read_safetensors_header(storage, "a.safetensors")
        >>> tensor = header.tensors["weight"]
        >>> tensor.dtype, tensor.shape, tensor.end - tensor.begin
        ('bfloat16', (2, 3), 12)
    """
    header = read_shard_header(storage, file, any_dtype=True, may_be_cut=may_be_cut)
    tensors, unreadable = {}, {}
    for key, code, shape, begin, end in header.entries:
        found = dtype_of_code(code, shape)
        if found is None:
            unreadable[key] = Unreadable(f"a tensor of dtype {code} and shape {list(shape)}", _REMEDY)
        else:
            tensors[key] = SafetensorsTensor(*found, begin, end)
    data_end = header.entries[-1][4] if header.entries else header.data_start
    return SafetensorsHeader(
        storage,
        file,
        header.metadata,
        tensors,
        unreadable,
        header.data_start,
        data_end,
        header.size,
        header.raw,
    )
