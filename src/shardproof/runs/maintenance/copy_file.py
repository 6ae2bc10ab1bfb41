"""Copies one shard file to another storage, and verifies every byte on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np

from shardproof.engine.format import (
    ChunkVerifier,
    FileRecord,
    bytes_digest,
    check_size,
    digests_as_bytes,
    file_digest,
    locate_files,
    read_chunk_digests,
    read_manifest,
    read_shard_header,
    shard_tail,
)
from shardproof.engine.storage import FileWriter, Sink, Storage, aligned_buffer
from shardproof.errors import FormatError, ShardproofError

_ADVICE = "The file was not copied: another copy of the step, or an older step, has to be used"


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
        starts = [entry[3] for entry in chunks]
        counts = [entry[4] - entry[3] for entry in chunks]
        verifier = ChunkVerifier(
            [record.name] * len(chunks),
            [entry[0] for entry in chunks],
            starts,
            counts,
            digests_as_bytes(digests),
            advice=_ADVICE,
        )

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
        for at, (start, count) in enumerate(zip(starts, counts, strict=True)):
            blocks += verifier.check_pieces(at, pieces(start, count))
        end = starts[-1] + counts[-1] if chunks else header.data_start
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
