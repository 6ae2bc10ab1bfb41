"""Writes a Zarr group of format 3: an array for each tensor, with a CRC-32C of each chunk.

    zarr.json              the group, with the metadata of all arrays (consolidated); written last
    <key>/zarr.json        the metadata of an array
    <key>/c/0/0            a chunk

A chunk has whole rows, so its elements are one range of the tensor in row-major order. A unit is a set of
chunks, and no two units share a chunk.

Zarr has no bfloat16, no floats of 8 bits and no complex32. Such tensors are stored as unsigned integers that
hold their bits, and the attribute ``shardproof:dtype`` has torch's name of the dtype. Nothing is compressed.

Reference: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from math import prod
from typing import Any, ClassVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof._utils.humanize import listed
from shardproof.dtypes import DTYPES
from shardproof.engine.storage import Storage, aligned_buffer
from shardproof.errors import StructureError
from shardproof.formats.json_values import ALIASES, check_aliases, encode_embedded
from shardproof.formats.writer import (
    BoxSource,
    Contents,
    FormatWriter,
    Unit,
    WriteOptions,
    box_bytes,
    check_units,
    new_file,
)
from shardproof.formats.zarr.zarr_metadata import DTYPE_ATTRIBUTE, EVERY_CHUNK_ATTRIBUTE, KEY_ATTRIBUTE

_CHUNK_BYTES = 32 << 20
"""Bytes of a chunk, at most, unless one row of the innermost dimensions has more."""
_UNIT_BYTES = 256 << 20
"""Approximate bytes of a unit. Units are only for parallel writing; a checkpoint does not record them."""
_UNIT_CHUNKS = 256
"""Chunks of a unit, at most. For small tensors, the number of files takes the time, not their bytes."""
_BUFFER_BYTES = 8 << 20
_GROUP = "zarr.json"
"""Name of the metadata of the group."""
_CRC_BYTES = 4
_NATIVE = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
"""Torch's dtypes that Zarr has under the same names."""
_MOST_NAME_BYTES = 255
"""Bytes of a file name on most file systems, at most."""
_NAME_START_BYTES = 200
"""Bytes of a longer name that the file name starts with; a digest replaces the rest."""


class ZarrWriter(FormatWriter):
    """Writes a Zarr group of format 3 that zarr-python and TensorStore read.

    Plain values, the step and the user's metadata become attributes of the group: ``shardproof:objects``,
    ``shardproof:step`` and ``shardproof:metadata``, encoded as in docs/format.md. Zarr has no ties: a tied
    tensor is stored once, and the attribute ``shardproof:aliases`` has its other keys. The attribute
    ``shardproof:every_chunk`` states that every chunk is stored, so readers can tell a lost chunk from zeros.
    ``max_file_bytes`` bounds the bytes of a chunk further.

    Raises:
        StructureError: the format cannot hold a dtype or a key, or google-crc32c is not installed.
        PlainDataError: a value is not plain data.
    """

    name: ClassVar[str] = "zarr"
    last_file = _GROUP

    def __init__(self, contents: Contents, options: WriteOptions) -> None:
        self._extend_crc = _crc32c()
        self._piece_bytes = options.piece_bytes
        limit = min(options.max_file_bytes or _CHUNK_BYTES, _CHUNK_BYTES)
        self._arrays = {key: _PlannedArray.of(key, *kind, limit) for key, kind in contents.tensors.items()}
        check_aliases(contents)
        self._attributes = {EVERY_CHUNK_ATTRIBUTE: True, **encode_embedded(contents)}
        self.notes: list[str] = []
        if contents.aliases:
            self._attributes[ALIASES] = dict(sorted(contents.aliases.items()))
            self.notes.append(
                "Zarr cannot record ties, so tied tensors are stored once, and an attribute of the group "
                f"names them: {listed(contents.aliases)}"
            )
        self._chunks: dict[str, Sequence[_PlannedChunk]] = {
            f"chunks-{at:06d}": chunks for at, chunks in enumerate(self._grouped())
        }
        self.units = [
            Unit(
                name,
                [(chunk.array.key, chunk.offsets, chunk.sizes) for chunk in chunks],
                sum(chunk.nbytes for chunk in chunks),
            )
            for name, chunks in self._chunks.items()
        ]

    def write(self, unit: Unit, source: BoxSource, target: Storage) -> dict[str, Any]:
        """Writes some chunks and flushes them; see `FormatWriter.write`."""
        chunks = self._chunks[unit.name]
        buffer = aligned_buffer(min(_BUFFER_BYTES, max(chunk.stored_bytes for chunk in chunks)))
        for chunk in chunks:
            with new_file(target, chunk.file, buffer) as file:
                crc = 0
                for piece in self._pieces(chunk, source):
                    crc = self._extend_crc(crc, np.frombuffer(piece, np.uint8))
                    file.put(piece)
                file.put(crc.to_bytes(_CRC_BYTES, "little"))
                file.finish()
        return {"chunks": len(chunks)}

    def commit(self, records: Mapping[str, dict[str, Any]], target: Storage) -> None:
        """Checks that all chunks were written, then writes the metadata of arrays and, last, of the group.

        Raises:
            StructureError: a unit was not written.
            StorageError: a chunk is missing or has another size, or the storage failed.
        """
        check_units(
            target,
            self.units,
            records,
            lambda name, _: [(chunk.file, chunk.stored_bytes) for chunk in self._chunks[name]],
        )
        documents = {array.name: array.document() for array in self._arrays.values()}
        for name, document in documents.items():
            target.publish(f"{name}/zarr.json", _json(document), replace=True)
        group = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": self._attributes,
            "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": documents},
        }
        target.publish(_GROUP, _json(group), replace=True)

    def _grouped(self) -> Iterator[list[_PlannedChunk]]:
        """The chunks of each unit."""
        chunks: list[_PlannedChunk] = []
        filled = 0
        for array in self._arrays.values():
            for chunk in array.chunks():
                if chunks and (filled + chunk.nbytes > _UNIT_BYTES or len(chunks) == _UNIT_CHUNKS):
                    yield chunks
                    chunks, filled = [], 0
                chunks.append(chunk)
                filled += chunk.nbytes
        if chunks:
            yield chunks

    def _pieces(self, chunk: _PlannedChunk, source: BoxSource) -> Iterator[memoryview]:
        """The bytes of a chunk. A chunk at the end of its array is padded with zeros to the common size."""
        array = chunk.array
        yield from box_bytes(source, array.key, array.dtype, chunk.offsets, chunk.sizes, self._piece_bytes)
        left = chunk.stored_bytes - _CRC_BYTES - chunk.nbytes
        zeros = memoryview(bytes(min(left, 1 << 20)))
        while left:
            yield zeros[:left]
            left -= len(zeros[:left])


@dataclass(frozen=True, slots=True)
class _PlannedArray:
    """The plan of an array."""

    key: str
    name: str
    """Name of the folder of the array."""
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @staticmethod
    def of(key: str, dtype: str, shape: Sequence[int], limit: int) -> _PlannedArray:
        """Plans the array of a tensor, in chunks of at most `limit` bytes where a row fits."""
        if dtype not in DTYPES:
            raise StructureError(f"{key!r}: Zarr cannot store tensors of dtype {dtype}", key=key)
        cut = _chunk_shape(shape, DTYPES[dtype].itemsize, limit)
        return _PlannedArray(key, _array_name(key), dtype, tuple(shape), cut)

    @property
    def stored_dtype(self) -> str:
        """Zarr's name of the dtype of the elements."""
        return self.dtype if self.dtype in _NATIVE else f"uint{8 * DTYPES[self.dtype].itemsize}"

    def chunks(self) -> Iterator[_PlannedChunk]:
        """All chunks, in row-major order; none if the array has no elements."""
        counts = [-(-size // step) for size, step in zip(self.shape, self.chunk_shape, strict=True)]
        for at in product(*map(range, counts)):
            offsets = tuple(index * step for index, step in zip(at, self.chunk_shape, strict=True))
            ends = zip(offsets, self.chunk_shape, self.shape, strict=True)
            sizes = tuple(min(step, size - offset) for offset, step, size in ends)
            yield _PlannedChunk(self, "/".join([self.name, "c", *map(str, at)]), offsets, sizes)

    def document(self) -> dict[str, Any]:
        """The metadata of the array."""
        stored = self.stored_dtype
        zeros: dict[str, Any] = {"bool": False, "complex": [0.0, 0.0], "float": 0.0}
        attributes = {DTYPE_ATTRIBUTE: self.dtype} if stored != self.dtype else {}
        if self.name != self.key:
            attributes[KEY_ATTRIBUTE] = self.key
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": self.shape,
            "data_type": stored,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.chunk_shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": zeros.get(stored.rstrip("0123456789"), 0),
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "attributes": attributes,
        }


@dataclass(frozen=True, slots=True)
class _PlannedChunk:
    """A chunk of an array, and its part inside the array."""

    array: _PlannedArray
    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements inside the array."""
        return prod(self.sizes) * DTYPES[self.array.dtype].itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file: all chunks of an array have the same size."""
        return prod(self.array.chunk_shape) * DTYPES[self.array.dtype].itemsize + _CRC_BYTES


def _chunk_shape(shape: Sequence[int], itemsize: int, limit: int) -> tuple[int, ...]:
    """The shape of chunks that have whole rows and about equal sizes.

    Args:
        shape: (d,) shape of the array.
        itemsize: bytes of an element.
        limit: bytes of a chunk, at most, unless a single element is larger.

    Returns:
        (d,) positive sizes: 1 in the first dimensions, a block in the next one, and the whole size in the
        last ones.

    >>> _chunk_shape((100, 8), 4, 2048), _chunk_shape((3, 100, 8), 4, 2048), _chunk_shape((), 4, 2048)
    ((50, 8), (1, 50, 8), ())
    """
    sizes, inner = [max(size, 1) for size in shape], itemsize
    for axis in reversed(range(len(sizes))):
        rows = max(limit // inner, 1)
        if sizes[axis] > rows:
            sizes[axis] = -(-sizes[axis] // -(-sizes[axis] // rows))
            return (*(1 for _ in range(axis)), *sizes[axis:])
        inner *= sizes[axis]
    return tuple(sizes)


def _array_name(key: str) -> str:
    """The name of the array of a tensor. Characters that a name cannot have are escaped as in URLs.

    The end of a long name is replaced by its digest.

    >>> _array_name("model.layers.0.weight"), _array_name("a/b%"), _array_name(".."), _array_name("__x")
    ('model.layers.0.weight', 'a%2Fb%25', '%2E.', '%5F_x')
    """
    name = key.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    if not name.strip(".") or name.startswith("__") or name == "zarr.json":
        name = f"%{ord(name[0]):02X}{name[1:]}" if name else ""
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise StructureError(f"{key!r} is not valid Unicode: rename it", key=ascii(key)) from error
    if not name:
        raise StructureError("a tensor with an empty key has no name in Zarr: rename it", key=key)
    if len(encoded) <= _MOST_NAME_BYTES:
        return name
    beginning = encoded[:_NAME_START_BYTES].decode(errors="ignore")
    return f"{beginning}%~{xxhash.xxh3_128_hexdigest(encoded)}"  # no escaped character starts with "%~"


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1).encode()


def _crc32c() -> Callable[[int, NDArray[np.uint8]], int]:
    """The function that extends a CRC-32C by an array. It does not accept a memoryview."""
    try:
        extend: Callable[[int, NDArray[np.uint8]], int] = import_module("google_crc32c").extend
    except ImportError as error:
        raise StructureError(
            "writing Zarr needs the package google-crc32c. Install it with: pip install 'shardproof[zarr]'"
        ) from error
    return extend
