"""Single files of a checkpoint: copies and verifies them, and reads what a shard file declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
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
    bytes_digest,
    check_size,
    declaration_of,
    digests_as_bytes,
    encode_entries,
    file_digest,
    locate_files,
    parse_chunk_name,
    read_chunk_digests,
    read_manifest,
    read_pieces,
    read_shard_header,
    shard_name,
    shard_tail,
)
from shardproof.engine.storage import FileWriter, Sink, Storage, aligned_buffer
from shardproof.errors import FormatError, ShardproofError

_ADVICE = "The file was not copied: another copy of the step, or an older step, has to be used"
_BUFFER = 8 << 20
"""Bytes that are read and hashed at once."""


def copy_shard_file(
    source: Storage,
    record: FileRecord,
    sink: Sink | None,
    on_bytes: Callable[[int], None] = lambda count: None,
    *,
    piece_bytes: int = 1 << 20,
) -> None:
    """Copies a shard file, byte for byte. Verifies every byte with the digest in its record.

    The digest of a file is that of its header and of the digests of its chunks. So the header proves the list
    of chunks, the list proves each chunk, and the chunks prove the digests of their blocks.

    Args:
        source: the folder that holds the file.
        record: record of the file, in the manifest of a step.
        sink: the copy; it is finished, or aborted after an error. None: the file is verified only.
        on_bytes: called with a number of bytes before each piece is written.
        piece_bytes: bytes of a piece, at most.

    Raises:
        CorruptChunkError, FormatError: the file is damaged.
        StorageError: a storage failed, or the file is missing or has another size.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> from shardproof.engine.format import read_manifest
        >>> from shardproof.storage import LocalStorage
        >>> source, target = LocalStorage(tempfile.mkdtemp()), LocalStorage(tempfile.mkdtemp())
        >>> _ = sp.save(source, {"w": torch.ones(4)})
        >>> (record,) = read_manifest(source).files
        >>> copy_shard_file(source, record, target.create(record.name))
        >>> target.read(record.name) == source.read(record.name)
        True
    """
    memory = aligned_buffer(piece_bytes) if sink is None else None
    with FileWriter(sink) if sink is not None else nullcontext() as copy:
        check_size(source, record)
        header = read_shard_header(source, record.name)
        digests = read_chunk_digests(source, record.name, header)
        if header.data_start != record.data_start or file_digest(header.raw, digests) != record.digest:
            raise FormatError(
                f"{source.location}/{record.name}: the header or the list of its chunks is not what was "
                f"written (digest differs from the manifest's). {_ADVICE}",
                file=record.name,
            )
        chunks = header.entries[: len(digests)]
        verifier, ranges = _verifier(record.name, chunks, [entry[0] for entry in chunks], digests, _ADVICE)

        def pieces(start: int, count: int) -> Iterator[memoryview]:
            done = 0
            while done < count:
                room = memory if copy is None else copy.room()
                assert room is not None
                piece = room[: min(count - done, piece_bytes)]
                on_bytes(len(piece))
                source.read_into(record.name, start + done, piece)
                yield piece
                done += len(piece)
                if copy is not None:
                    copy.advance(len(piece))

        if copy is not None:
            on_bytes(len(header.raw))
            copy.put(header.raw)
        blocks: list[bytes] = []
        for at, (start, count) in enumerate(ranges):
            blocks += verifier.check_pieces(at, pieces(start, count))
        end = chunks[-1][4] if chunks else header.data_start
        tail = shard_tail(-(end - header.data_start) % 8, blocks, np.ascontiguousarray(digests))
        if source.read(record.name, end, record.size) != tail:
            raise FormatError(
                f"{source.location}/{record.name}: the last {record.size - end} bytes (padding and digests) "
                f"are not what was written. {_ADVICE}",
                file=record.name,
            )
        if copy is not None:
            on_bytes(len(tail))
            copy.put(tail)
            copy.finish()


def read_whole_index(source: Storage, record: FileRecord) -> bytes:
    """Reads the bytes of an index, and compares them with the digest in its record.

    Raises:
        FormatError: the index is damaged.
        StorageError: the storage failed, or there is no such file.
    """
    data = source.read(record.name)
    if bytes_digest(data) != record.digest:
        raise FormatError(
            f"{source.location}/{record.name}: the digest differs from the manifest's. `shardproof repair` "
            "can write the index again",
            file=record.name,
        )
    return data


def verify_files_here(
    storage: Storage, on_progress: Callable[[int, int], None] | None = None
) -> tuple[ShardproofError, ...]:
    """Verifies the index and the shard files of a checkpoint that are there. A missing file is no fault.

    Returns:
        The first fault of each damaged file.

    Raises:
        NotCommittedError: there is no manifest.
        FormatError: the manifest is damaged.
        StorageError: the manifest cannot be read, or the storage cannot tell a size.
    """
    manifest = read_manifest(storage)
    located = zip(locate_files(storage, manifest), manifest.files, strict=True)
    here = [(place, record) for (place, name), record in located if place.size(name) is not None]
    done, total = 0, sum(record.size for _, record in here)

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    faults: list[ShardproofError] = []
    if storage.size(manifest.index.name) is not None:
        try:
            read_whole_index(storage, manifest.index)
        except ShardproofError as error:
            faults.append(error)
    for place, record in here:
        try:
            copy_shard_file(place, record, None, on_bytes)
        except ShardproofError as error:
            faults.append(error)
        finally:
            place.close()
    return tuple(faults)


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
    advice = "The file carries this digest itself and cannot be repaired: restore another step"
    verifier, ranges = _verifier(name, chunks, [key for key, _, _ in boxes], digests, advice)
    buffer = memoryview(bytearray(min(_BUFFER, max((count for _, count in ranges), default=0))))
    for at, (start, count) in enumerate(ranges):
        verifier.check_pieces(at, read_pieces(storage, name, start, count, buffer))
    size = header.entries[-1][4]
    record = FileRecord(name, size, file_digest(header.raw, digests), header.data_start, shard.declared.rank)
    return VerifiedShard(record, shard.declared, chunks, boxes, digests)


def _verifier(
    name: str, chunks: Sequence[HeaderEntry], keys: list[str], digests: NDArray[np.uint64], advice: str
) -> tuple[ChunkVerifier, list[tuple[int, int]]]:
    """The verifier of the chunks of a file, and the first byte and the bytes of each."""
    ranges = [(start, stop - start) for _, _, _, start, stop in chunks]
    starts, counts = [start for start, _ in ranges], [count for _, count in ranges]
    files, expected = [name] * len(chunks), digests_as_bytes(digests)
    return ChunkVerifier(files, keys, starts, counts, expected, advice=advice), ranges


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
