"""A manifest from the shard files alone, for a checkpoint that lost its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.errors import (
    AlreadyCommittedError,
    CorruptChunkError,
    FormatError,
    NotCommittedError,
    StorageError,
)
from shardproof.format import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    ShardHeader,
    TensorRecord,
    file_digest,
    index_name,
    parse_chunk_name,
    read_index,
    read_manifest,
    read_shard_header,
)
from shardproof.planning import prove_chunks
from shardproof.saving.commit import chunk_table, publish
from shardproof.saving.prepare import Attempt
from shardproof.storage import Storage

__all__ = ["repair"]


@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """One shard file, its chunks verified against the digests that it carries."""

    record: FileRecord
    declared: dict[str, Any]
    keys: list[str]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    byte_start: list[int]
    byte_count: list[int]
    digests: NDArray[np.uint64]


def repair(storage: Storage) -> Manifest:
    """Rebuilds index and manifest from complete, verified shard files, and commits them.

    Every chunk is read and compared with the digest that its file carries, and the tiling of every tensor is
    proved. Of several complete attempts the newest is taken.

    Raises:
        AlreadyCommittedError: manifest and index are fine; there is nothing to repair.
        FormatError: no attempt has all its shard files, or they contradict each other.
        CorruptChunkError: the bytes of a chunk are damaged.
        TilingError: the chunks do not cover a tensor.
        StorageError: the storage failed.
    """
    try:
        try:
            read_index(storage, read_manifest(storage))
        except (NotCommittedError, FormatError, StorageError):
            pass  # this is what repair is for
        else:
            raise AlreadyCommittedError(
                f"{storage.location} is committed and readable: there is nothing to repair (`shardproof "
                f"verify` checks "
                "its bytes)",
                path=storage.location,
            )
        return _rebuild(storage, _newest_complete(storage))
    finally:
        storage.close()


def _newest_complete(storage: Storage) -> list[_Shard]:
    """The shards of the newest attempt that has all its files."""
    attempts: dict[str, list[tuple[str, ShardHeader, dict[str, Any]]]] = {}
    unreadable: list[str] = []
    for name in storage.list("shards"):
        if not name.endswith(".safetensors"):
            continue
        try:
            header = read_shard_header(storage, name)
            declared = _declaration(name, header)
        except FormatError as error:
            unreadable.append(str(error))
            continue
        attempts.setdefault(str(declared["attempt"]), []).append((name, header, declared))
    complete = [files for files in attempts.values() if len(files) == files[0][2]["files"]]
    if not complete:
        found = "; ".join(
            f"attempt {attempt}: {len(files)} of {files[0][2]['files']} files"
            for attempt, files in attempts.items()
        )
        raise FormatError(
            f"{storage.location}: no attempt has all its shard files ({found or 'there are none'}"
            f"{'; ' + '; '.join(unreadable) if unreadable else ''}). It cannot be repaired: restore another "
            f"step",
            file="shards",
        )
    newest = max(complete, key=lambda files: float(files[0][2]["time"]))
    ordered = sorted(newest, key=lambda item: int(item[2]["rank"]))
    return [_verified(storage, name, header, declared) for name, header, declared in ordered]


def _declaration(name: str, header: ShardHeader) -> dict[str, Any]:
    """What the shard says of itself, with the types that it must have."""
    try:
        declared = json.loads(header.metadata["shardproof"])
        expected: dict[str, type | tuple[type, ...]] = {
            "attempt": str,
            "time": (int, float),
            "rank": int,
            "world_size": int,
            "files": int,
            "tensors": dict,
            "aliases": dict,
            "objects": dict,
            "metadata": dict,
        }
        for field, kind in expected.items():
            if not isinstance(declared[field], kind):
                raise TypeError(f"{field} is {type(declared[field]).__name__}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{name}: not a shard of this format ({error})", file=name) from error
    return dict(declared)


def _verified(storage: Storage, name: str, header: ShardHeader, declared: dict[str, Any]) -> _Shard:
    entries = sorted(header.entries, key=lambda entry: entry.start)
    chunks = [entry for entry in entries if not entry.name.startswith("@")]
    tail = entries[-1] if entries else None
    if tail is None or tail.name != "@digests" or tail.stop - tail.start != 16 * len(chunks):
        raise FormatError(f"{name}: it does not end in the digests of its {len(chunks)} chunks", file=name)
    raw = storage.read(name, header.data_start + tail.start, header.data_start + tail.stop)
    digests = np.frombuffer(raw, "<u8").astype(np.uint64).reshape(-1, 2)
    keys, boxes = [], []
    for entry, (high, low) in zip(chunks, digests.tolist(), strict=True):
        key, offsets, sizes = parse_chunk_name(entry.name)
        first, last = header.data_start + entry.start, header.data_start + entry.stop
        found = xxhash.xxh3_128_hexdigest(storage.read(name, first, last))
        if found != f"{high:016x}{low:016x}":
            raise CorruptChunkError(
                f"{name}: bytes {first} to {last} of tensor {key!r} do not match the digest that the file "
                f"carries; it cannot be "
                "repaired: restore another step",
                file=name,
                key=key,
                byte_start=first,
                byte_count=last - first,
            )
        keys.append(key)
        boxes.append((offsets, sizes))
    size = storage.size(name)
    assert size is not None
    record = FileRecord(
        name, size, file_digest(header.raw, digests), header.data_start, int(declared["rank"])
    )
    starts = [header.data_start + entry.start for entry in chunks]
    return _Shard(
        record, declared, keys, boxes, starts, [entry.stop - entry.start for entry in chunks], digests
    )


def _rebuild(storage: Storage, shards: list[_Shard]) -> Manifest:
    first = shards[0].declared
    tensors: dict[str, TensorRecord] = {}
    objects: dict[str, Any] = {}
    for shard in shards:
        objects |= shard.declared["objects"]
        for key, (dtype, shape) in shard.declared["tensors"].items():
            record = TensorRecord(key, dtype, tuple(shape))
            if dtype not in DTYPES or tensors.setdefault(key, record) != record:
                raise FormatError(
                    f"{shard.record.name}: it contradicts another shard on {key!r}", file=shard.record.name
                )
    keys = sorted(tensors)
    row_of = {key: row for row, key in enumerate(keys)}
    unknown = sorted({key for shard in shards for key in shard.keys} - row_of.keys())
    if unknown:
        raise FormatError(
            f"{storage.location}: the shards hold {unknown[0]!r}, but none declares it", file="shards"
        )
    boxes = [box for shard in shards for box in shard.boxes]
    table = chunk_table(
        np.array([row_of[key] for shard in shards for key in shard.keys], np.int64),
        np.repeat(np.arange(len(shards)), [len(shard.keys) for shard in shards]),
        np.array([start for shard in shards for start in shard.byte_start], np.int64),
        np.array([count for shard in shards for count in shard.byte_count], np.int64),
        np.concatenate([shard.digests for shard in shards]),
        np.append(0, np.cumsum([len(offsets) for offsets, _ in boxes], dtype=np.int64)),
        np.array([value for offsets, _ in boxes for value in offsets], np.int64),
        np.array([value for _, sizes in boxes for value in sizes], np.int64),
    )
    prove_chunks(keys, [tensors[key].shape for key in keys], table, np.arange(len(keys)))
    attempt = Attempt(
        str(first["attempt"]),
        float(first["time"]),
        first["step"],
        int(first["world_size"]),
        first["metadata"],
    )
    for leftover in (MANIFEST_NAME, index_name(attempt.id)):
        storage.delete(leftover)
    return publish(
        storage,
        attempt,
        tuple(tensors[key] for key in keys),
        dict(first["aliases"]),
        objects,
        tuple(shard.record for shard in shards),
        table,
        False,
        repaired=True,
    )
