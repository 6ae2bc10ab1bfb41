"""The leader's side of a commit: what was written is what was planned, then index and manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from shardproof.errors import FormatError, NotCommittedError, StorageError, StructureError
from shardproof.format import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    TensorRecord,
    bytes_digest,
    encode_index,
    encode_manifest,
    index_name,
    read_manifest,
    shard_name,
)
from shardproof.planning import ChunkTable, WritePlan
from shardproof.saving.prepare import Attempt
from shardproof.storage import Storage
from shardproof.version import __version__

__all__ = ["Written", "chunk_table", "commit", "write_index"]

_log = logging.getLogger("shardproof")


class Written(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says it wrote. Without a file, `size` is 0 and the rest is empty."""

    size: int
    data_start: int
    digest: str
    digests: bytes
    """(n, 2) uint64 of the chunks, in file order."""
    objects: dict[str, bytes]
    """The objects that this rank stores, as JSON."""
    object_keys: tuple[str, ...]
    """Keys of all objects that this rank has."""
    object_digests: bytes
    """16 bytes for each of `object_keys`."""


def commit(
    storage: Storage, plan: WritePlan, attempt: Attempt, written: Sequence[Written], *, overwrite: bool
) -> Manifest:
    """Checks that written equals planned, then writes the index and, last, the manifest.

    Raises:
        StructureError: the value of an object differs between ranks that share it, or a rank wrote something
            else than was planned.
        AlreadyCommittedError: another job committed here first.
        StorageError: the storage failed.
    """
    _check_objects_agree(written)
    _check_planned(plan, written)
    _check_visible(storage, plan, attempt, written)
    files = tuple(
        FileRecord(
            shard_name(rank, attempt.id),
            written[rank].size,
            written[rank].digest,
            written[rank].data_start,
            rank,
        )
        for rank in plan.writers
    )
    stored = plan.stored_keys
    rows = {key: row for row, key in enumerate(plan.merged.keys)}
    tensors = tuple(
        TensorRecord(key, plan.merged.dtypes[rows[key]], plan.merged.shapes[rows[key]]) for key in stored
    )
    objects: dict[str, Any] = {}
    for part in written:
        objects |= {key: msgspec.json.decode(value) for key, value in part.objects.items()}
    return _publish(
        storage,
        attempt,
        tensors,
        plan.merged.aliases,
        objects,
        files,
        _table_of(plan, stored, written),
        overwrite,
    )


def _publish(
    storage: Storage,
    attempt: Attempt,
    tensors: tuple[TensorRecord, ...],
    aliases: dict[str, str],
    objects: dict[str, Any],
    files: tuple[FileRecord, ...],
    table: ChunkTable,
    overwrite: bool,
) -> Manifest:
    """Writes the index, then the manifest, and only then removes the files of what it replaced."""
    index = encode_index(table)
    name = index_name(attempt.id)
    write_index(storage, name, index)
    manifest = Manifest(
        writer=f"shardproof {__version__}",
        attempt=attempt.id,
        step=attempt.step,
        time=attempt.time,
        world_size=attempt.world_size,
        metadata=attempt.metadata,
        tensors=tensors,
        aliases=aliases,
        objects=dict(sorted(objects.items())),
        files=files,
        index=FileRecord(name, len(index), bytes_digest(index)),
    )
    replaced = _committed_files(storage) if overwrite else []
    storage.publish(MANIFEST_NAME, encode_manifest(manifest), replace=overwrite)
    kept = {name, *(record.name for record in files)}
    for old in replaced:
        if old not in kept:
            _remove(storage, old)
    return manifest


def write_index(storage: Storage, name: str, index: bytes) -> None:
    """Writes an encoded index as a new file, flushed; nothing is left of it on an error."""
    sink = storage.create(name)
    try:
        sink.write_at(0, memoryview(index))
        sink.finish(len(index))
    except BaseException:
        sink.abort()
        raise


def chunk_table(
    tensor: np.ndarray[Any, Any],
    file: np.ndarray[Any, Any],
    byte_start: np.ndarray[Any, Any],
    byte_count: np.ndarray[Any, Any],
    digest: np.ndarray[Any, Any],
    box_start: np.ndarray[Any, Any],
    box_offsets: np.ndarray[Any, Any],
    box_sizes: np.ndarray[Any, Any],
) -> ChunkTable:
    """A chunk table from columns in any order of rows; rows of one tensor keep their order."""
    order = np.argsort(tensor, kind="stable")
    ndim = np.diff(box_start)[order]
    starts = np.append(0, np.cumsum(ndim))
    at = np.repeat(box_start[:-1][order] - starts[:-1], ndim) + np.arange(int(ndim.sum()))
    return ChunkTable(
        tensor[order],
        file[order],
        byte_start[order],
        byte_count[order],
        digest[order],
        starts,
        box_offsets[at],
        box_sizes[at],
    )


def _table_of(plan: WritePlan, stored: Sequence[str], written: Sequence[Written]) -> ChunkTable:
    row_of = {key: row for row, key in enumerate(stored)}
    tensor_rows = np.array([row_of.get(key, -1) for key in plan.merged.keys], np.int64)
    world_size = len(written)
    counts = np.diff(plan.writer_start)
    file_of = np.full(world_size, -1, np.int64)
    file_of[list(plan.writers)] = np.arange(len(plan.writers))
    data_start = np.array([part.data_start for part in written], np.int64)
    digests = np.frombuffer(b"".join([part.digests for part in written]), np.uint64).reshape(-1, 2)
    return chunk_table(
        tensor_rows[plan.tensor],
        np.repeat(file_of, counts),
        plan.byte_start + np.repeat(data_start, counts),
        plan.byte_count,
        digests,
        plan.box_start,
        plan.box_offsets,
        plan.box_sizes,
    )


def _check_planned(plan: WritePlan, written: Sequence[Written]) -> None:
    """What each rank wrote is the set that was planned for it, no more and no less."""
    owned: list[set[str]] = [set() for _ in written]
    for key, owner in plan.merged.objects.items():
        owned[owner].add(key)
    for rank, part in enumerate(written):
        planned = int(plan.writer_start[rank + 1] - plan.writer_start[rank])
        if len(part.digests) != 16 * planned or set(part.objects) != owned[rank]:
            raise StructureError(
                f"rank {rank} wrote {len(part.digests) // 16} chunks and the objects "
                f"{sorted(part.objects)}, but "
                f"{planned} chunks and {sorted(owned[rank])} were planned; nothing was committed",
                rank=rank,
            )


def _check_visible(storage: Storage, plan: WritePlan, attempt: Attempt, written: Sequence[Written]) -> None:
    """The shard files are where the leader, and so any reader, looks for them."""
    for rank in plan.writers:
        name = shard_name(rank, attempt.id)
        size = storage.size(name)
        if size != written[rank].size:
            found = "no such file" if size is None else f"{size} bytes"
            raise StorageError(
                f"rank {rank} wrote {storage.location}/{name} with {written[rank].size} bytes, and rank 0 "
                f"finds {found}: is this place shared by all nodes?",
                file=name,
            )


def _check_objects_agree(written: Sequence[Written]) -> None:
    """A value that several ranks have under one key must be the same on all of them."""
    first: dict[str, tuple[bytes, int]] = {}
    seen: set[tuple[tuple[str, ...], bytes]] = set()
    for rank, part in enumerate(written):
        if (part.object_keys, part.object_digests) in seen:
            continue
        seen.add((part.object_keys, part.object_digests))
        for at, key in enumerate(part.object_keys):
            digest = part.object_digests[16 * at : 16 * at + 16]
            other, other_rank = first.setdefault(key, (digest, rank))
            if other != digest:
                raise StructureError(
                    f"the value of {key!r} differs between rank {other_rank} and rank {rank}, and only one "
                    f"of them "
                    "could be kept. If each rank has its own, wrap it in sp.PerRank; if it should be the "
                    "same, make it so before saving",
                    key=key,
                    ranks=[other_rank, rank],
                )


def _committed_files(storage: Storage) -> list[str]:
    """Files of the checkpoint that is about to be replaced, as far as their names are ours to give."""
    try:
        old = read_manifest(storage)
    except NotCommittedError:
        return []
    except FormatError as error:
        _log.warning(
            "%s: replacing a manifest that cannot be read (%s); its files stay for prune",
            storage.location,
            error,
        )
        return []
    named = {index_name(old.attempt), *(shard_name(record.rank, old.attempt) for record in old.files)}
    return [name for name in (old.index.name, *(record.name for record in old.files)) if name in named]


def _remove(storage: Storage, name: str) -> None:
    """Removes a file that no manifest names. Failing costs space, not safety, so it is only logged."""
    try:
        storage.delete(name)
    except StorageError as error:
        _log.warning(
            "%s: %s was replaced but not removed (%s); prune removes it", storage.location, name, error
        )
