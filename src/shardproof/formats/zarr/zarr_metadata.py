"""The metadata of Zarr arrays, of format 2 (``.zarray``) and 3 (``zarr.json``).

Both formats are parsed to one description: dtype, shape, names of the chunk files, and the layout of the
elements in a chunk. A transposition becomes strides, so transposed chunks are read as they are stored. A
shard is a chunk that holds smaller chunks, with layouts of their own.

References: https://zarr-specs.readthedocs.io, versions 2 and 3.
"""

from __future__ import annotations

import base64
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import Unreadable, UnsupportedError, shape_of
from shardproof.engine.geometry import row_major_strides
from shardproof.errors import FormatError
from shardproof.formats.zarr.zarr_codecs import Codec, Codecs

DTYPE_ATTRIBUTE = "shardproof:dtype"
"""Attribute of an array of unsigned integers that holds the bits of another dtype: torch's name of that
dtype."""
KEY_ATTRIBUTE = "shardproof:key"
"""Attribute of an array with the key of its tensor, if the folder cannot have that name."""
EVERY_CHUNK_ATTRIBUTE = "shardproof:every_chunk"
"""Attribute of a group: every chunk is stored, so a missing chunk is damage and not the fill value."""

MOST_METADATA_BYTES = 256 << 20
"""Bytes of a metadata file, at most. Consolidated metadata of 100,000 arrays has about 60 MB."""
_MEMBERS = {
    "attributes",
    "chunk_grid",
    "chunk_key_encoding",
    "codecs",
    "consolidated_metadata",
    "data_type",
    "dimension_names",
    "fill_value",
    "node_type",
    "shape",
    "storage_transformers",
    "zarr_format",
}
_V2_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
_REMEDY = "Write the array again with a dtype, a chunk grid and codecs that docs/formats.md names"
_NOT_IN_ZARR = {"complex32", "float4_e2m1fn_x2"}
_PADDING_BYTES, _MOST_PADDING = 64 << 20, 16
"""Bytes of a chunk, at most: the first number, and the second for each byte of the array."""
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """How the index of a shard is stored: (chunks, 2) unsigned 64-bit numbers, offset and bytes of each."""

    order: str
    """Byte order: "<" or ">"."""
    has_checksum: bool
    """True if a CRC-32C of 4 bytes follows."""
    is_at_end: bool
    """True if the index is at the end of the shard, False if at the start."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """How the elements of a chunk are stored."""

    sizes: tuple[int, ...]
    """(d,) of the chunk, in the array's order of dimensions."""
    axes: tuple[int, ...]
    """(d,) dimensions of the array in the order in which the chunk stores them, the slowest first."""
    swap: int
    """Bytes of each number whose order is not that of this machine; 1 if it is."""
    codecs: Codecs
    index: ShardIndex | None = None
    """Set if the chunk is a shard."""
    inner: ChunkLayout | None = None
    """Layout of the chunks in a shard."""

    @property
    def stride(self) -> tuple[int, ...]:
        """(d,) elements from one index to the next in each dimension."""
        stored = row_major_strides([self.sizes[axis] for axis in self.axes])
        steps = dict(zip(self.axes, stored, strict=True))
        return tuple(steps[axis] for axis in range(len(self.axes)))

    @property
    def grid(self) -> tuple[int, ...]:
        """(d,) chunks in a shard, in the order in which its index lists them."""
        assert self.inner is not None
        return tuple(self.sizes[axis] // self.inner.sizes[axis] for axis in self.axes)


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """The parsed metadata of an array."""

    dtype: str
    """Torch's name of the dtype."""
    shape: tuple[int, ...]
    fill: bytes | None
    """The fill value of absent chunks, in the byte order of this machine; None if the array has none."""
    prefix: tuple[str, ...]
    """Prefix of the names of chunks."""
    separator: str
    """Separator of the numbers in the names of chunks: "." or "/"."""
    layout: ChunkLayout

    @property
    def grid(self) -> tuple[int, ...]:
        """(d,) chunks in each dimension."""
        return tuple(-(-n // size) if n else 0 for n, size in zip(self.shape, self.layout.sizes, strict=True))

    def chunk_name(self, at: Sequence[int]) -> str:
        """Name of a chunk's file in the folder of the array.

        Args:
            at: (d,) indices of the chunk in the grid.
        """
        parts = [*self.prefix, *map(str, at)]
        return self.separator.join(parts) if parts else "0"


def parse_array(
    document: Mapping[str, Any], attributes: Mapping[str, Any], path: str, key: str
) -> ArrayMetadata | Unreadable:
    """Describes an array.

    Returns:
        The description; or an `Unreadable`, if the array needs a feature that this reader does not have.

    Example:
        >>> document = {"zarr_format": 2, "shape": [5], "chunks": [2], "dtype": ">f4", "compressor": None,
        ...             "fill_value": 0, "filters": None, "order": "C"}
        >>> array = parse_array(document, {}, "weight/.zarray", "weight")
        >>> array.dtype, array.grid, array.chunk_name([2]), array.layout.swap
        ('float32', (3,), '2', 4)
    """
    try:
        version = document["zarr_format"]
        if version not in (2, 3):
            raise ValueError(f"the format {version!r} of Zarr is unknown")
        return _checked_chunks((_parse_v2 if version == 2 else _parse_v3)(document, attributes))
    except UnsupportedError as error:
        return Unreadable(f"a Zarr array with an unsupported feature ({error})", _REMEDY)
    except KeyError as error:
        raise FormatError(f"{path}: the metadata of {key} lacks {error}", file=path, key=key) from error
    except (AttributeError, TypeError, ValueError, OverflowError, struct.error, RecursionError) as error:
        raise FormatError(
            f"{path}: the metadata of {key} is damaged: {error}",
            file=path,
            key=key,
        ) from error


def _checked_chunks(array: ArrayMetadata) -> ArrayMetadata:
    """Refuses chunks that are far larger than the array: a read decodes a whole chunk.

    An array without elements has no chunk to decode. It may have large ones, so that a
    program can append to it.
    """
    layout = array.layout
    while layout.inner is not None:
        layout = layout.inner
    itemsize = DTYPES[array.dtype].itemsize
    chunk, whole = (math.prod(sizes) * itemsize for sizes in (layout.sizes, array.shape))
    if whole and chunk > _PADDING_BYTES + _MOST_PADDING * whole:
        raise UnsupportedError(
            f"a chunk of {layout.sizes} has {chunk} bytes, but the array of {array.shape} has {whole}"
        )
    return array


def _parse_v2(document: Mapping[str, Any], attributes: Mapping[str, Any]) -> ArrayMetadata:
    stored, order = _v2_dtype(document["dtype"])
    dtype = _dtype(stored, attributes)
    shape, sizes = _shape(document["shape"], dtype), _chunk_sizes(document["chunks"], document["shape"])
    if document["order"] not in ("C", "F"):
        raise ValueError(f"the order {document['order']!r} is neither C nor F")
    axes = tuple(range(len(sizes)))[:: 1 if document["order"] == "C" else -1]
    found = [document["compressor"], *reversed(document["filters"] or ())]
    codecs = tuple(
        Codec.of(codec["id"], {key: value for key, value in codec.items() if key != "id"})
        for codec in found
        if codec is not None
    )
    nbytes = math.prod(sizes) * DTYPES[dtype].itemsize
    separator = document.get("dimension_separator", ".")
    return ArrayMetadata(
        dtype,
        shape,
        _fill(document["fill_value"], stored),
        (),
        _separator(separator),
        ChunkLayout(sizes, axes, _swap(stored, order), Codecs(codecs, nbytes)),
    )


def _v2_dtype(text: Any) -> tuple[str, str]:
    """Torch's name of the dtype of Zarr v2, and the byte order."""
    if not isinstance(text, str):
        raise UnsupportedError(f"the dtype {text!r} has fields")
    if text in ("<V2", "|V2"):  # Megatron-Core's bfloat16, as NumPy names it
        return "bfloat16", "<"
    if text in DTYPES:
        return text, "<"
    kind, size = text[1:2], text[2:]
    name = f"{_V2_KINDS.get(kind, '?')}{int(size) * 8 if size.isdigit() else size}"
    name = "bool" if name == "bool8" else name
    if name not in DTYPES or text[0] not in "<>|":
        raise UnsupportedError(f"the dtype {text!r} is unknown")
    return name, text[0] if text[0] != "|" else "<"


def _parse_v3(document: Mapping[str, Any], attributes: Mapping[str, Any]) -> ArrayMetadata:
    if document["node_type"] != "array":
        raise ValueError(f"it is a {document['node_type']!r}, not an array")
    for name in document.keys() - _MEMBERS:
        value = document[name]
        if not (isinstance(value, dict) and value.get("must_understand") is False):
            raise UnsupportedError(f"the member {name!r} is unknown")
    if document.get("storage_transformers"):
        raise UnsupportedError(f"the storage transformers {document['storage_transformers']!r} are unknown")
    stored, config = _named(document["data_type"])
    if stored not in DTYPES or stored in _NOT_IN_ZARR or config:
        raise UnsupportedError(f"the data type {document['data_type']!r} is unknown")
    dtype = _dtype(stored, attributes)
    shape = _shape(document["shape"], dtype)
    grid, options = _named(document["chunk_grid"])
    if grid != "regular":
        raise UnsupportedError(f"the chunk grid {grid!r} is unknown")
    sizes = _chunk_sizes(options["chunk_shape"], shape)
    encoding, options = _named(document["chunk_key_encoding"])
    if encoding not in ("default", "v2"):
        raise UnsupportedError(f"the chunk key encoding {encoding!r} is unknown")
    is_default = encoding == "default"
    return ArrayMetadata(
        dtype,
        shape,
        _fill(document["fill_value"], stored),
        ("c",) if is_default else (),
        _separator(options.get("separator", "/" if is_default else ".")),
        _v3_layout(document["codecs"], sizes, tuple(range(len(sizes))), stored),
    )


def _v3_layout(documents: Any, sizes: tuple[int, ...], axes: tuple[int, ...], dtype: str) -> ChunkLayout:
    """The layout that a sequence of codecs gives.

    Args:
        documents: the codecs, in the order in which the writer applies them.
        sizes: (d,) sizes of the chunk, in the array's order of dimensions.
        axes: (d,) dimensions of the array in the order in which the codecs get them.
        dtype: dtype of the stored elements.
    """
    rest = [_named(document) for document in documents]
    while rest and rest[0][0] == "transpose":
        axes = _transposed(axes, rest.pop(0)[1]["order"])
    if not rest:
        raise ValueError("no codec encodes the elements to bytes")
    (name, options), *after = rest
    codecs = tuple(Codec.of(name.removeprefix("numcodecs."), options) for name, options in reversed(after))
    nbytes = math.prod(sizes) * DTYPES[dtype].itemsize
    if name == "sharding_indexed":
        if codecs:
            raise UnsupportedError(f"the codec {codecs[-1].name} encodes a shard, which is not supported")
        stored = _chunk_sizes(options["chunk_shape"], sizes)
        by_axis = dict(zip(axes, stored, strict=True))
        inner_sizes = tuple(by_axis[axis] for axis in range(len(axes)))
        if any(outer % size for outer, size in zip(sizes, inner_sizes, strict=True)):
            raise ValueError(f"chunks of {inner_sizes} do not divide a shard of {sizes}")
        location = options.get("index_location", "end")
        if location not in ("start", "end"):
            raise ValueError(f"the location {location!r} of a shard's index is unknown")
        index = _shard_index(options["index_codecs"], is_at_end=location == "end")
        inner = _v3_layout(options["codecs"], inner_sizes, axes, dtype)
        return ChunkLayout(sizes, axes, 1, Codecs((), nbytes), index, inner)
    if name not in ("bytes", "endian"):
        raise UnsupportedError(f"the codec {name!r} is unknown")
    return ChunkLayout(sizes, axes, _swap(dtype, _order(options)), Codecs(codecs, nbytes))


def _shard_index(documents: Any, *, is_at_end: bool) -> ShardIndex:
    match [_named(document) for document in documents]:
        case [("bytes" | "endian", options)]:
            return ShardIndex(_order(options), False, is_at_end)
        case [("bytes" | "endian", options), ("crc32c", _)]:
            return ShardIndex(_order(options), True, is_at_end)
    raise ValueError(f"the index of a shard has the codecs {documents!r}")


def _named(document: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and configuration of an extension point of Zarr v3."""
    if isinstance(document, str):
        return document, {}
    name, config = document["name"], document.get("configuration") or {}
    if not isinstance(name, str) or not isinstance(config, dict):
        raise ValueError(f"{document!r} has no name and configuration")
    return name, config


def _transposed(axes: tuple[int, ...], order: Any) -> tuple[int, ...]:
    if order in ("C", "F"):
        return axes[:: 1 if order == "C" else -1]
    if sorted(order) != list(range(len(axes))):
        raise ValueError(f"{order!r} is not an order of {len(axes)} dimensions")
    return tuple(axes[at] for at in order)


def _order(options: Mapping[str, Any]) -> str:
    order = options.get("endian", "little")
    if order not in ("little", "big"):
        raise ValueError(f"the byte order {order!r} is neither little nor big")
    return "<" if order == "little" else ">"


def _swap(dtype: str, order: str) -> int:
    """Bytes of each number to reverse, for a byte order of "<" or ">"."""
    if order == ("<" if sys.byteorder == "little" else ">"):
        return 1
    return DTYPES[dtype].itemsize // (2 if dtype.startswith("complex") else 1)


def _separator(separator: Any) -> str:
    if separator not in (".", "/"):
        raise ValueError(f"the separator {separator!r} of chunk names is neither . nor /")
    return str(separator)


def _dtype(stored: str, attributes: Mapping[str, Any]) -> str:
    """The dtype of the elements. For unsigned integers, an attribute may give it."""
    named = attributes.get(DTYPE_ATTRIBUTE)
    if named is None:
        return stored
    if named not in DTYPES or DTYPES[named].itemsize != DTYPES[stored].itemsize or stored[0] != "u":
        raise ValueError(f"the attribute {DTYPE_ATTRIBUTE} is {named!r}, but the elements are {stored}")
    return str(named)


def _shape(values: Any, dtype: str) -> tuple[int, ...]:
    shape = shape_of(values)
    if len(shape) > 64 or math.prod(max(size, 1) for size in shape) * DTYPES[dtype].itemsize >= 1 << 63:
        raise ValueError(f"no array has the shape {shape}")
    return shape


def _chunk_sizes(values: Any, shape: Sequence[int]) -> tuple[int, ...]:
    sizes = shape_of(values)
    if len(sizes) != len(shape) or any(not size and n for size, n in zip(sizes, shape, strict=True)):
        raise ValueError(f"chunks of {sizes} do not cut the shape {tuple(shape)}")
    if math.prod(sizes) >= 1 << 58:
        raise ValueError(f"no chunk has the sizes {sizes}")
    return sizes


def _fill(value: Any, dtype: str) -> bytes | None:
    """The bytes of a fill value."""
    itemsize = DTYPES[dtype].itemsize
    if value is None:
        return None
    if dtype.startswith("complex") and isinstance(value, list):
        part = "float32" if itemsize == 8 else "float64"
        real, imaginary = (_fill(item, part) for item in value)
        return (real or b"") + (imaginary or b"")
    if isinstance(value, str) and value not in _SPECIAL:
        if value[:2].lower() == "0x":
            return int(value, 16).to_bytes(itemsize, sys.byteorder)
        raw = base64.b64decode(value, validate=True)
        if len(raw) != itemsize:
            raise ValueError(f"the fill value {value!r} has {len(raw)} bytes, expected {itemsize}")
        return raw
    if dtype.startswith(("int", "uint")):
        number = int(value)
        if number != value:
            raise ValueError(f"the fill value {value!r} is not an integer")
        return number.to_bytes(itemsize, sys.byteorder, signed=dtype.startswith("int"))
    if not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"the fill value {value!r} is not a number")
    real_number = _SPECIAL[value] if isinstance(value, str) else value
    element = torch.tensor([real_number], dtype=torch.float64, device="cpu").to(getattr(torch, dtype))
    return bytes(element.view(torch.uint8).numpy())
