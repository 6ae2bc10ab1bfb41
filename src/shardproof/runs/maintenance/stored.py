"""Reads single shard files: the declaration of each, and the bytes that its digests verify."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.engine.format import (
    ChunkVerifier,
    Declared,
    FileRecord,
    HeaderEntry,
    ShardHeader,
    declaration_of,
    digests_as_bytes,
    encode_entries,
    file_digest,
    parse_chunk_name,
    read_chunk_digests,
    read_pieces,
    read_shard_header,
    shard_name,
)
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError

_BUFFER = 8 << 20
"""Bytes that are read and hashed at once."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundShard:
    """A shard file with a valid header."""

    name: str
    header: ShardHeader
    declared: Declared


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedShard:
    """A shard file whose chunks match the digests in it."""

    record: FileRecord
    declared: Declared
    chunks: list[HeaderEntry]
    boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    """Key, offsets and sizes of each chunk."""
    digests: NDArray[np.uint64]


def find_shard(storage: Storage, name: str) -> FoundShard:
    """Reads and checks the header of the shard file `name`.

    Raises:
        FormatError: it is no shard file, its header is damaged, or it was renamed.
        StorageError: it cannot be read.
    """
    header = read_shard_header(storage, name)
    names, codes, shapes, starts, stops = ([entry[at] for entry in header.entries] for at in range(5))
    first = np.array(starts, np.int64)
    counts = np.array(stops, np.int64) - first
    # The header's digest covers the entries together with the declaration.
    entries = encode_entries(names, codes, shapes, first - header.data_start, counts)  # type: ignore[arg-type]
    declared = declaration_of(header.metadata, entries, name)
    if name != shard_name(declared.rank, declared.attempt):
        raise FormatError(
            f"{name}: it says that it is {shard_name(declared.rank, declared.attempt)}. "
            "It was copied or renamed",
            file=name,
        )
    return FoundShard(name, header, declared)


def verify_shard(storage: Storage, shard: FoundShard) -> VerifiedShard:
    """Compares every chunk with its digest in the file.

    Raises:
        CorruptChunkError: a chunk does not match.
        FormatError: an entry contradicts its name or the declaration of the file.
        StorageError: the file cannot be read.
    """
    name, header = shard.name, shard.header
    digests = read_chunk_digests(storage, name, header)
    chunks = header.entries[: len(digests)]
    boxes = [_box(name, entry, shard.declared) for entry in chunks]
    starts = [entry[3] for entry in chunks]
    counts = [entry[4] - entry[3] for entry in chunks]
    verifier = ChunkVerifier(
        [name] * len(chunks),
        [key for key, _, _ in boxes],
        starts,
        counts,
        digests_as_bytes(digests),
        advice="The file carries this digest itself and cannot be repaired: restore another step",
    )
    buffer = memoryview(bytearray(min(_BUFFER, max(counts, default=0))))
    for at, (start, count) in enumerate(zip(starts, counts, strict=True)):
        verifier.check_pieces(at, read_pieces(storage, name, start, count, buffer))
    size = header.entries[-1][4]
    record = FileRecord(name, size, file_digest(header.raw, digests), header.data_start, shard.declared.rank)
    return VerifiedShard(record, shard.declared, chunks, boxes, digests)


def _box(name: str, entry: HeaderEntry, declared: Declared) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Key, offsets and sizes of an entry. Raises if its dtype or shape is not that of its tensor."""
    title, code, shape, _, _ = entry
    try:
        key, offsets, sizes = parse_chunk_name(title)
    except ValueError as error:
        raise FormatError(f"{name}: {error}", file=name) from error
    tensor = declared.tensors.get(key)
    dtype = DTYPES.get(tensor[0]) if tensor is not None else None
    if tensor is None or dtype is None or len(tensor[1]) != len(sizes):
        raise FormatError(f"{name}: it holds {title!r}, but declares {key!r} as {tensor}", file=name)
    if any(start + size > extent for start, size, extent in zip(offsets, sizes, tensor[1], strict=True)):
        raise FormatError(f"{name}: {title!r} is outside of {key!r} of shape {list(tensor[1])}", file=name)
    if code != dtype.code or shape != ((*sizes, dtype.parts) if dtype.parts > 1 else sizes):
        raise FormatError(
            f"{name}: the entry {title!r} is {code} {list(shape)}, but {key!r} is {dtype.name}", file=name
        )
    return key, offsets, sizes
