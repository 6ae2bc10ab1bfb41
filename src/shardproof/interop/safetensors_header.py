"""Reads the header of a foreign safetensors file, with torch's names of the dtypes.

A file of another project passes the same checks as a shard file of shardproof (`read_shard_header`). The
header has at most 100 MB, no entry lies outside of the file or overlaps another, and the entries fill the
file without a hole.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.dtypes import DTYPES
from shardproof.errors import FormatError
from shardproof.format import read_shard_header
from shardproof.interop.extents import FileRange
from shardproof.storage import Storage

__all__ = ["SafetensorsHeader", "SafetensorsTensor", "dtype_of_code", "read_safetensors_header"]

_DTYPES = {
    dtype.code: dtype.name
    for dtype in DTYPES.values()
    if dtype.parts == 1 and dtype.name != "float4_e2m1fn_x2"
}
"""Code in a safetensors header to torch's name of the dtype."""
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
    """Tensors by key, in the order of their bytes. They fill the file from `data_start` to its end."""
    data_start: int
    """First byte after the header."""
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
    """Torch's dtype and shape for a code and a shape of a header; None if torch has no such dtype.

    Example:
        >>> dtype_of_code("F8_E4M3", (2, 3))
        ('float8_e4m3fn', (2, 3))
        >>> dtype_of_code("F4", (2, 4))
        ('float4_e2m1fn_x2', (2, 2))
        >>> dtype_of_code("F6_E2M3", (4,))
    """
    if code == _PAIRS_OF_FLOATS and shape and shape[-1] % 2 == 0:
        return "float4_e2m1fn_x2", (*shape[:-1], shape[-1] // 2)
    name = _DTYPES.get(code)
    return None if name is None else (name, shape)


def read_safetensors_header(storage: Storage, file: str) -> SafetensorsHeader:
    """Reads and checks the header of a safetensors file.

    It reads and allocates no more than the header, whatever sizes the file declares.

    Args:
        storage: the storage that holds the file.
        file: name of the file.

    Raises:
        FormatError: the header breaks a rule of safetensors, does not fit the size of the file, or declares a
            dtype that torch does not have.
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
    header = read_shard_header(storage, file)
    tensors = {}
    for key, code, shape, begin, end in header.entries:
        found = dtype_of_code(code, shape)
        if found is None:
            path = f"{storage.location}/{file}"
            raise FormatError(
                f"{path}: {key} has the dtype {code} and shape {shape}, which torch cannot hold. "
                "Write the file again without it",
                file=path,
                key=key,
            )
        tensors[key] = SafetensorsTensor(*found, begin, end)
    return SafetensorsHeader(storage, file, header.metadata, tensors, header.data_start, header.raw)
