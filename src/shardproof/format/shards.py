"""Shard files: writing their headers, and reading the digests that they carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.errors import FormatError
from shardproof.format.blocks import block_counts
from shardproof.format.digests import digests_as_table, digests_from_bytes, digests_from_table
from shardproof.format.header import MAX_HEADER, HeaderEntry, ShardHeader
from shardproof.storage import Storage

__all__ = [
    "BLOCKS",
    "DIGESTS",
    "PADDING",
    "PAGE_BYTES",
    "encode_entries",
    "read_chunk_digests",
    "shard_header",
    "shard_tail",
]

PAGE_BYTES = 4096
"""Bytes of a page of memory on most machines."""

PADDING = "@padding"
"""Entry of zero bytes that aligns what comes after it."""

BLOCKS = "@blocks"
"""Entry before the last: U64 [n, 2], high and low half of the digests of the blocks of those chunks that have
several, in byte order; not there if no chunk has."""

DIGESTS = "@digests"
"""Last entry: U64 [n, 2], high and low half of the digests of the chunks before it, in byte order."""


class _Entry(msgspec.Struct, gc=False):
    dtype: str
    shape: Sequence[int]
    data_offsets: tuple[int, int]


_ENCODER = msgspec.json.Encoder()
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def encode_entries(
    names: Sequence[str],
    codes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    starts: NDArray[Any],
    counts: NDArray[Any],
) -> bytes:
    """Entries of a safetensors header, as the inside of a JSON object.

    It depends on the structure alone: the same plan, the same bytes.

    Args:
        names: of n entries.
        codes: safetensors' codes of their types.
        shapes: their shapes.
        starts: (n,) int64, first byte of each, counted from the first byte of the data.
        counts: (n,) int64, bytes.

    Raises:
        FormatError: two entries of one name, or a name that is not valid Unicode.

    >>> encode_entries(["w[0:2]"], ["F32"], [(2,)], np.array([0]), np.array([8]))
    b'"w[0:2]":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    """
    starts = np.asarray(starts, np.int64)
    stops = (starts + counts).tolist()
    offsets = zip(starts.tolist(), stops, strict=True)
    entries = dict(zip(names, map(_Entry, codes, shapes, offsets), strict=True))
    if len(entries) != len(names):
        raise FormatError("a shard file would have two entries of one name.")
    try:
        return _ENCODER.encode(entries)[1:-1]
    except UnicodeEncodeError as error:
        raise FormatError(f"a key is not valid Unicode: {error}.") from error


def shard_header(entries: bytes, metadata: dict[str, str], *, in_page: int = 0, size: int = 0) -> bytes:
    """All bytes of a shard file before its data.

    Args:
        entries: from `encode_entries`.
        metadata: texts, the file's ``__metadata__``.
        in_page: byte of a page of `PAGE_BYTES` at which the data begin, a multiple of 8; what is left of the
            header are spaces.
        size: bytes that the header has instead, if they are enough; a multiple of 8.

    Raises:
        FormatError: longer than any safetensors reader accepts.

    >>> header = shard_header(b"", {"shardproof": "{}"})
    >>> len(header), header[8:46]
    (4096, b'{"__metadata__":{"shardproof":"{}"}}  ')
    """
    try:
        head = b'{"__metadata__":' + _ENCODER.encode(metadata)
    except UnicodeEncodeError as error:
        raise FormatError(f"the metadata of a shard file is not valid Unicode: {error}.") from error
    used = 8 + len(head) + bool(entries) + len(entries) + 1
    length = (size if used <= size else used + (in_page - used) % PAGE_BYTES) - 8
    if length > MAX_HEADER:
        part, count = _largest_part(entries, metadata)
        raise FormatError(
            f"the header of a shard file would have {length} bytes, but safetensors allows {MAX_HEADER}. "
            f"Most of it, {count} bytes, is {part}. Keep large values as tensors or arrays, tensors in fewer "
            "and larger pieces, and large metadata in a file of your own."
        )
    parts = (length.to_bytes(8, "little"), head, b"," if entries else b"", entries, b"}")
    return b"".join(parts) + b" " * (length + 8 - used)


def shard_tail(padding: int, blocks: Sequence[bytes], digests: NDArray[np.uint64]) -> bytes:
    """All bytes of a shard file after its chunks.

    Args:
        padding: zero bytes, fewer than 8.
        blocks: digests of the blocks of chunks of several, in byte order, 16 bytes each.
        digests: (n, 2) of the chunks, in byte order.

    >>> len(shard_tail(4, [bytes(16)] * 2, np.zeros((3, 2), np.uint64)))
    84
    """
    tables = (digests_from_bytes(blocks), digests)
    return bytes(padding) + b"".join(map(digests_as_table, tables))


def _largest_part(entries: bytes, metadata: dict[str, str]) -> tuple[str, int]:
    """What takes most of a header, in words, and its bytes: down to one object where that can be told."""
    sizes = {"the list of its chunks": len(entries)}
    for name, text in metadata.items():
        sizes[f"the metadata {name!r:.200}"] = len(text)
        try:
            members = _MEMBERS.decode(text)
            inner = {group: _MEMBERS.decode(members.pop(group)) for group in ("objects", "metadata")}
        except (msgspec.MsgspecError, KeyError):
            continue  # not of a shard
        del sizes[f"the metadata {name!r:.200}"]
        sizes |= {f"the list of its {group}": len(bytes(raw)) for group, raw in members.items()}
        sizes |= {f"the value of {key!r:.200}": len(bytes(raw)) for key, raw in inner["objects"].items()}
        sizes |= {f"the metadata {key!r:.200}": len(bytes(raw)) for key, raw in inner["metadata"].items()}
    return max(sizes.items(), key=lambda part: part[1])


def read_chunk_digests(storage: Storage, name: str, header: ShardHeader) -> NDArray[np.uint64]:
    """Digests of the chunks of the shard file `name`, as the file itself carries them.

    Returns:
        (n, 2) uint64, of the entries of `header` without the last ones: `PADDING`, `BLOCKS` and `DIGESTS`.

    Raises:
        FormatError: there are none, their number or that of the blocks is wrong, or the padding is not zero.
    """
    chunks = list(header.entries)
    if not chunks or chunks[-1][0] != DIGESTS:
        raise FormatError(f"{name}: its last entry is not {DIGESTS!r}. It is no shard file.", file=name)
    digests = chunks.pop()
    blocks = chunks.pop() if chunks and chunks[-1][0] == BLOCKS else None
    if chunks and chunks[-1][0] == PADDING:
        _, _, _, first, after = chunks.pop()
        if after - first >= 8 or any(storage.read(name, first, after)):
            raise FormatError(f"{name}: the bytes {first} to {after} are padding, but not zero.", file=name)
    _check_digests(name, digests, len(chunks))
    counts = np.array([stop - start for _, _, _, start, stop in chunks], np.int64)
    expected = int(block_counts(counts).sum())
    if blocks is not None:
        _check_digests(name, blocks, expected)
    elif expected:
        raise FormatError(f"{name}: there is no entry {BLOCKS!r} before the last.", file=name)
    return digests_from_table(storage.read(name, *digests[3:]))


def _check_digests(name: str, entry: HeaderEntry, count: int) -> None:
    title, code, shape, _, _ = entry
    if code != "U64" or shape != (count, 2):
        raise FormatError(
            f"{name}: {title!r} is of type {code} and shape {list(shape)}, expected U64 and {[count, 2]}.",
            file=name,
        )
