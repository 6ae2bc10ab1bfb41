"""Strict JSON, and the headers of safetensors files. Both trust nothing in the text.

JSON is strict if it has no duplicate names, bounded nesting, and only one way to read it.

Note: How duplicates are found
------------------------------
A JSON parser that keeps the last of two equal names hides the first. In a valid text every member has exactly
one colon outside strings. So a text with a duplicate has more such colons than the encoding of the value that
was parsed from it. Counting colons, and brackets for the nesting, is one pass over bytes without a parser. It
is fast on hundreds of megabytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from shardproof.engine.storage import Storage
from shardproof.errors import FormatError, StorageError

MAX_HEADER = 100_000_000
"""Bytes of JSON in a header, at most: the limit of the safetensors library."""

MAX_NDIM = 64
"""Dimensions that a tensor may have."""

_LENGTH = 8
_MAX_ENTRY = 8192
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]

HeaderEntry = tuple[str, str, tuple[int, ...], int, int]
"""Name, safetensors' code of the dtype, shape, first byte in the file, and one past the last byte."""


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The header of a safetensors file."""

    metadata: dict[str, str]
    entries: list[HeaderEntry]
    """Entries in byte order. They fill the file from `data_start` to its end without a gap."""
    data_start: int
    """First byte of the data."""
    raw: bytes
    """All bytes before the data."""
    size: int
    """Bytes of the file."""


class _ReadEntry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA = msgspec.json.Decoder(dict[str, str])
_ENTRIES = msgspec.json.Decoder(dict[str, _ReadEntry])


def read_shard_header(
    storage: Storage, name: str, *, any_dtype: bool = False, may_be_cut: bool = False
) -> ShardHeader:
    """Reads and checks the header of a safetensors file.

    Reads and allocates no more than the size of the header, at most `MAX_HEADER`, whatever the file claims.

    Args:
        storage: holds the file.
        name: name of the file.
        any_dtype: True to accept entries of unknown dtypes, whose bytes cannot be compared with their shape.
        may_be_cut: True to accept a file that ends before its last entry does.

    Raises:
        FormatError: the header breaks a rule of safetensors, or does not fit the size of the file.
        StorageError: the file is missing or unreadable.
    """
    size = storage.size(name)
    if size is None:
        raise StorageError(
            f"{storage.location}/{name} is missing, so the checkpoint is incomplete.", file=name, missing=True
        )
    length = _header_length(storage.read(name, 0, min(size, _LENGTH)), size, name)
    data = storage.read(name, 0, _LENGTH + length)
    return parse_header(data, size, name, any_dtype=any_dtype, may_be_cut=may_be_cut)


def parse_header(
    data: bytes, size: int, file: str, *, any_dtype: bool = False, may_be_cut: bool = False
) -> ShardHeader:
    """Checks the header at the beginning of `data`, which has at least the whole header of such a file.

    `any_dtype` and `may_be_cut` are those of `read_shard_header`.

    Raises:
        FormatError: the header breaks a rule of safetensors, or does not fit the size of the file.
    """
    data_start = _LENGTH + _header_length(data[:_LENGTH], size, file)
    raw = data[:data_start]
    text = raw[_LENGTH:]
    if not text.startswith(b"{"):
        raise FormatError(
            f"{file}: the header is not a JSON object, so this is not a safetensors file.", file=file
        )
    members = decode_strictly(_MEMBERS, text, file)
    metadata = members.pop("__metadata__", None)
    for name, member in members.items():
        if len(memoryview(member)) > _MAX_ENTRY:
            raise FormatError(f"{file}: the entry {name!r:.200} has more than {_MAX_ENTRY} bytes.", file=file)
    entries = decode_strictly(_ENTRIES, msgspec.json.encode(members), file)
    ordered = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    found: list[HeaderEntry] = []
    end = 0
    for name, entry in ordered:
        start, stop = entry.data_offsets
        bits = _BITS.get(entry.dtype)
        if bits is None and not any_dtype:
            raise FormatError(f"{file}: {name!r:.200} has the unknown type {entry.dtype!r:.50}.", file=file)
        fits = bits is None or math.prod(entry.shape) * bits == (stop - start) * 8
        if len(entry.shape) > MAX_NDIM + 1 or not fits or start > stop:
            raise FormatError(
                f"{file}: {name!r:.200} of type {entry.dtype} and shape {list(entry.shape)!s:.200} cannot "
                f"have {stop - start} bytes.",
                file=file,
            )
        if start != end:
            raise FormatError(
                f"{file}: {name!r:.200} begins at byte {start} of the data, expected {end}.", file=file
            )
        end = stop
        found.append((name, entry.dtype, entry.shape, data_start + start, data_start + stop))
    if data_start + end != size and not (may_be_cut and size < data_start + end):
        raise FormatError(
            f"{file}: the file has {size} bytes, but its header describes "
            f"{data_start + end}. It was cut short or is another file: copy or download it again.",
            file=file,
        )
    texts = {} if metadata is None else decode_strictly(_METADATA, bytes(metadata), file)
    return ShardHeader(metadata=texts, entries=found, data_start=data_start, raw=raw, size=size)


def _header_length(first: bytes, size: int, file: str) -> int:
    if len(first) < _LENGTH:
        raise FormatError(f"{file}: {size} bytes are too few for a safetensors file.", file=file)
    length = int.from_bytes(first, "little")
    if length > min(MAX_HEADER, size - _LENGTH):
        raise FormatError(
            f"{file}: the header claims {length} bytes, but the file has {size} and a header at most "
            f"{MAX_HEADER}. The file was cut short or is not a safetensors file.",
            file=file,
        )
    return length


MAX_DEPTH = 200
"""Levels of nested arrays and objects in a text, at most."""

_BLOCK = 1 << 22
_QUOTE, _OPEN, _CLOSE, _COLON = 1, 2, 3, 4
_CLASSES = bytes.maketrans(b'"[{]}:', bytes([_QUOTE, _OPEN, _OPEN, _CLOSE, _CLOSE, _COLON]))
_OTHERS = bytes(set(range(256)) - set(b'"[{]}:'))
_STEP = np.array([0, 0, 1, -1, 0], np.int64)

T = TypeVar("T")


def decode_strictly(decoder: msgspec.json.Decoder[T], text: bytes, file: str) -> T:
    """Decodes a JSON text and refuses what a lenient parser would accept.

    Args:
        decoder: decoder of a type that requires all its fields and forbids others, so that encoding the value
            gives every member of the text again.
        text: JSON in UTF-8.
        file: name of the file in error messages.

    Raises:
        FormatError: the text is not JSON, not of the type, nested too deeply, or an object has one name
        twice.

    >>> decode_strictly(msgspec.json.Decoder(dict[str, int]), b'{"a": 1}', "f")
    {'a': 1}
    >>> decode_strictly(msgspec.json.Decoder(dict[str, int]), b'{"a": 1, "a": 2}', "f")
    Traceback (most recent call last):
    ...
    shardproof.errors.FormatError: f: an object has the same name twice. It was not written by shardproof, \
or was edited.
    """
    depth, members = shape_of_text(text)
    if depth > MAX_DEPTH:
        raise FormatError(
            f"{file}: nested {depth} levels deep, more than the {MAX_DEPTH} allowed.", file=file
        )
    try:
        value = decoder.decode(text)
        again = msgspec.json.encode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"{file}: {error}.", file=file) from error
    if again != text and shape_of_text(again)[1] != members:
        raise FormatError(
            f"{file}: an object has the same name twice. It was not written by shardproof, or was edited.",
            file=file,
        )
    return value


def shape_of_text(text: bytes) -> tuple[int, int]:
    """Levels of nesting in a JSON text, and the number of members of all its objects.

    For bytes that are not JSON the result means nothing, but the time is the same.

    >>> shape_of_text(b'{"a": [[], {"b:]": ":"}]}')
    (3, 2)
    """
    deepest = depth = members = 0
    inside = False  # a string
    if b"\\" in text:
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    for begin in range(0, len(text), _BLOCK):
        classes = np.frombuffer(text[begin : begin + _BLOCK].translate(_CLASSES, _OTHERS), np.uint8)
        quotes = classes == _QUOTE
        outside = np.logical_xor.accumulate(quotes) == inside
        inside ^= bool(quotes.sum() & 1)
        classes = classes[outside]
        members += int(np.count_nonzero(classes == _COLON))
        depths = depth + np.cumsum(_STEP[classes])
        if len(depths):
            deepest = max(deepest, int(depths.max()))
            depth = int(depths[-1])
    return deepest, members
