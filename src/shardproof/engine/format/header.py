"""Reads the header of a safetensors file, and trusts nothing in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from shardproof.engine.format.json import decode_strictly
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
