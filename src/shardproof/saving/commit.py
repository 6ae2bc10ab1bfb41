"""The coordinator's side of a commit: what was written is what was planned, then index and manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import compress
from typing import Any

import msgspec
import numpy as np

from shardproof.errors import FormatError, NotCommittedError, StorageError, StructureError
from shardproof.format import (
    MANIFEST_NAME,
    SEAL_LENGTH,
    FileRecord,
    Manifest,
    TensorRecord,
    bytes_digest,
    encode_index,
    encode_manifest,
    files_of,
    index_name,
    manifest_version,
    read_manifest,
    referred_beside,
    shard_name,
    unneeded,
    why_kept,
)
from shardproof.planning import ChunkTable, WritePlan
from shardproof.saving.incremental import Base, Placed, Written, base_after, place
from shardproof.saving.prepare import Attempt
from shardproof.storage import Storage
from shardproof.version import __version__

__all__ = ["Written", "chunk_table", "commit", "publish", "write_index"]

_log = logging.getLogger("shardproof")


def commit(
    storage: Storage,
    plan: WritePlan,
    attempt: Attempt,
    written: Sequence[Written],
    *,
    overwrite: bool,
    base: Base | None = None,
) -> tuple[Manifest, Base]:
    """Checks that written equals planned, then writes the index and, last, the manifest.

    Args:
        storage: of the step.
        plan: of all ranks.
        attempt: see `Attempt`.
        written: of each rank.
        overwrite: whether to replace a committed checkpoint.
        base: where chunks are that were not written.

    Returns:
        The manifest; and the new step as the base of a next save by the same plan.

    Raises:
        StructureError: the value of an object differs between ranks that share it, or a rank wrote something
            else than was planned.
        AlreadyCommittedError: another job committed here first.
        StorageError: the storage failed, or a file that is referred to is gone.
    """
    _check_objects_agree(written)
    _check_planned(plan, written)
    placed = place(plan, written, base)
    own = tuple(
        FileRecord(
            shard_name(rank, attempt.id),
            written[rank].size,
            written[rank].digest,
            written[rank].data_start,
            rank,
        )
        for rank in placed.writers
    )
    stored, merged = plan.is_stored, plan.merged
    columns = (compress(column, stored) for column in (merged.keys, merged.dtypes, merged.shapes))
    tensors = tuple(map(TensorRecord, *columns))
    objects: dict[str, Any] = {}
    for part in written:
        objects |= {key: msgspec.json.decode(value) for key, value in part.objects.items()}
    index = encode_index(_table_of(plan, placed))
    files = (*own, *placed.borrowed)
    manifest = Manifest(
        version=manifest_version(files),
        writer=f"shardproof {__version__}",
        attempt=attempt.id,
        step=attempt.step,
        time=attempt.time,
        world_size=attempt.world_size,
        metadata=attempt.metadata,
        tensors=tensors,
        aliases=plan.merged.aliases,
        objects=dict(sorted(objects.items())),
        files=files,
        index=FileRecord(index_name(attempt.id), len(index), bytes_digest(index)),
    )
    _check_visible(storage, manifest)
    seal = publish(storage, manifest, index, overwrite=overwrite)
    return manifest, base_after(placed, manifest, storage.folder, seal)


def publish(storage: Storage, manifest: Manifest, index: bytes, *, overwrite: bool) -> bytes:
    """Writes the index, then the manifest, and only then removes the files of what it replaced.

    Returns:
        `shardproof.format.seal_of` the checkpoint.

    Raises:
        AlreadyCommittedError: a checkpoint is committed here and `overwrite` is False.
        StorageError: the storage failed.
    """
    text = encode_manifest(manifest)
    write_index(storage, manifest.index.name, index)
    replaced = _committed(storage) if overwrite else None
    storage.publish(MANIFEST_NAME, text, replace=overwrite)
    if replaced is not None:
        _remove_replaced(storage, replaced, manifest)
    return text[-SEAL_LENGTH:]


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


def _table_of(plan: WritePlan, placed: Placed) -> ChunkTable:
    row_of = np.cumsum(plan.is_stored) - 1  # in the manifest, of each merged tensor that is stored
    return chunk_table(
        row_of[plan.tensor],
        placed.file,
        placed.byte_start,
        plan.byte_count,
        placed.digest,
        plan.box_start,
        plan.box_offsets,
        plan.box_sizes,
    )


def _check_planned(plan: WritePlan, written: Sequence[Written]) -> None:
    """The objects that each rank wrote are those that were planned for it; `place` says so of the chunks."""
    owned: list[set[str]] = [set() for _ in written]
    for key, owner in plan.merged.objects.items():
        owned[owner].add(key)
    for rank, part in enumerate(written):
        if set(part.objects) != owned[rank]:
            raise StructureError(
                f"rank {rank} wrote the objects {sorted(part.objects)}, but {sorted(owned[rank])} were "
                "planned; nothing was committed",
                rank=rank,
            )


def _check_visible(storage: Storage, manifest: Manifest) -> None:
    """The shard files are where the coordinator, and so any reader, looks for them."""
    for record, (folder, name) in zip(manifest.files, files_of(storage, manifest), strict=True):
        size = folder.size(name)
        if size == record.size:
            continue
        found = "no such file" if size is None else f"{size} bytes"
        if record.folder:
            raise StorageError(
                f"{folder.location}/{name} has chunks that did not change and were not written again; "
                f"expected {record.size} bytes, and rank 0 finds {found}. Was the step removed while it was "
                "referred to? Save again: what is gone will be written",
                file=record.place,
            )
        raise StorageError(
            f"rank {record.rank} wrote {storage.location}/{name} with {record.size} bytes, and rank 0 "
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


def _committed(storage: Storage) -> Manifest | None:
    """The checkpoint that is about to be replaced, if there is one that can be read."""
    try:
        return read_manifest(storage)
    except NotCommittedError:
        return None
    except FormatError as error:
        _log.warning(
            "%s: replacing a manifest that cannot be read (%s); its files stay for prune",
            storage.location,
            error,
        )
        return None


def _remove_replaced(storage: Storage, old: Manifest, new: Manifest) -> None:
    """Removes files that only a replaced manifest named. Failing costs space, not safety: it is logged."""
    try:
        references = referred_beside(storage)
        lent = references.files(storage.folder)
        kept = {new.index.name, *(record.name for record in new.own_files)}
        shards = [record.name for record in old.own_files if record.name not in lent]
        for name in (old.index.name, *(() if references.unknown else shards)):
            if name not in kept:
                storage.delete(name)
        for record in unneeded(old.borrowed_files, references, storage.sibling):
            storage.sibling(record.folder).delete(record.name)
        if references.unknown:
            _log.warning(
                "%s: shard files of the checkpoint that was replaced stay: %s",
                storage.location,
                why_kept(references.unknown),
            )
    except (FormatError, StorageError) as error:
        _log.warning(
            "%s: files of the checkpoint that was replaced stay (%s); prune removes them",
            storage.location,
            error,
        )
