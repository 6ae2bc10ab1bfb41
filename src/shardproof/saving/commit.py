"""The commit, on the coordinator: check the reports of the ranks, write the index, publish the manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import compress
from typing import Any

import msgspec

from shardproof.errors import (
    AlreadyCommittedError,
    FormatError,
    NotCommittedError,
    StorageError,
    StructureError,
)
from shardproof.format import (
    MANIFEST_NAME,
    SEAL_LENGTH,
    FileRecord,
    Manifest,
    TensorRecord,
    bytes_digest,
    check_size,
    encode_index,
    encode_manifest,
    flush_manifests_of_siblings,
    index_name,
    locate_files,
    manifest_version,
    read_manifest,
    references_of_siblings,
    shard_name,
    unreadable_manifests_message,
    unreferenced_files,
)
from shardproof.planning import WritePlan
from shardproof.saving.incremental import Base
from shardproof.saving.messages import Attempt, WriteReport
from shardproof.saving.placement import place_chunks
from shardproof.storage import Storage, write_file
from shardproof.version import __version__

__all__ = ["commit", "publish", "warn_of_orders"]

_log = logging.getLogger("shardproof")


def commit(
    storage: Storage,
    plan: WritePlan,
    attempt: Attempt,
    reports: Sequence[WriteReport],
    *,
    overwrite: bool,
    base: Base | None = None,
) -> tuple[Manifest, Base]:
    """Checks that the ranks wrote what was planned, then writes the index and, last, the manifest.

    `base` stores the chunks that were not written.

    Returns:
        The manifest; and the new step as the base of the next save by the same plan.

    Raises:
        StructureError: the value of an object differs between ranks that share it, or a rank did not write
            what was planned.
        AlreadyCommittedError: another job committed here first.
        StorageError: the storage failed, or a referenced file is missing.
    """
    _check_objects_agree(reports)
    _check_planned(plan, reports)
    placed = place_chunks(plan, reports, base)
    own = tuple(
        FileRecord(
            shard_name(rank, attempt.id),
            reports[rank].size,
            reports[rank].digest,
            reports[rank].data_start,
            rank,
        )
        for rank in placed.writers
    )
    stored, merged = plan.is_stored, plan.merged
    columns = (compress(column, stored) for column in (merged.keys, merged.dtypes, merged.shapes))
    tensors = tuple(map(TensorRecord, *columns))
    objects: dict[str, Any] = {}
    for report in reports:
        objects |= {key: msgspec.json.decode(value) for key, value in report.objects.items()}
    index = encode_index(placed.table(plan))
    files = (*own, *placed.referenced)
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
    try:
        _check_visible(storage, manifest)
    except StorageError as error:
        if overwrite or storage.size(MANIFEST_NAME) is None:
            raise
        # The retention of the other job may have removed files that this save refers to.
        raise AlreadyCommittedError(
            f"{storage.location} exists: another job has committed it meanwhile. It was not touched: choose "
            "another place or step, or ask for overwriting",
            path=storage.location,
        ) from error
    seal = publish(storage, manifest, index, overwrite=overwrite)
    return manifest, placed.as_base(manifest, storage.folder, seal)


def publish(
    storage: Storage, manifest: Manifest, index: bytes | None, *, overwrite: bool, text: bytes | None = None
) -> bytes:
    """Writes the index, then the manifest, and then removes the files of the replaced checkpoint.

    Args:
        storage: storage of the step.
        manifest: the manifest.
        index: the encoded index; None if the storage already has it.
        overwrite: True to replace a committed checkpoint.
        text: the encoded manifest, for a manifest whose bytes must not change; None to encode `manifest`.

    Returns:
        The seal of the checkpoint, as `shardproof.format.read_seal` returns it.

    Raises:
        AlreadyCommittedError: a checkpoint is committed here and `overwrite` is False.
        StorageError: the storage failed. The detail ``committed`` is None if the manifest may appear later.
    """
    text = encode_manifest(manifest) if text is None else text
    if index is not None:
        write_file(storage, manifest.index.name, index)
    replaced = _committed(storage) if overwrite else None
    try:
        storage.publish(MANIFEST_NAME, text, replace=overwrite)
    except StorageError as error:
        if error.details.get("unanswered"):  # the manifest may appear later, so the files have to stay
            error.details["committed"] = None
        raise
    if replaced is not None:
        _remove_replaced(storage, replaced, manifest)
    return text[-SEAL_LENGTH:]


def _check_planned(plan: WritePlan, reports: Sequence[WriteReport]) -> None:
    """Checks the objects that each rank wrote; `place_chunks` checks the chunks."""
    owned: list[set[str]] = [set() for _ in reports]
    for key, owner in plan.merged.objects.items():
        owned[owner].add(key)
    for rank, report in enumerate(reports):
        if set(report.objects) != owned[rank]:
            raise StructureError(
                f"rank {rank} wrote the objects {sorted(report.objects)}, but {sorted(owned[rank])} were "
                "planned; nothing was committed",
                rank=rank,
            )


def _check_visible(storage: Storage, manifest: Manifest) -> None:
    """Checks that the coordinator, and so any reader, finds each shard file with its size."""
    for record, (folder, name) in zip(manifest.files, locate_files(storage, manifest), strict=True):
        if record.folder:
            advice = (
                "The new step refers to unchanged chunks of this file. Save again: the next save writes "
                "missing chunks"
            )
        else:
            advice = (
                f"Rank {record.rank} wrote this file, but rank 0 does not see it: check that all nodes share "
                "this storage"
            )
        check_size(folder, record, path=f"{folder.location}/{name}", advice=advice)


def _check_objects_agree(reports: Sequence[WriteReport]) -> None:
    """Checks that a key has the same value on all ranks with this key."""
    first: dict[str, tuple[bytes, int]] = {}
    seen: set[tuple[tuple[str, ...], bytes]] = set()
    for rank, report in enumerate(reports):
        if (report.object_keys, report.object_digests) in seen:
            continue
        seen.add((report.object_keys, report.object_digests))
        for at, key in enumerate(report.object_keys):
            digest = report.object_digests[16 * at : 16 * at + 16]
            other, other_rank = first.setdefault(key, (digest, rank))
            if other != digest:
                raise StructureError(
                    f"the value of {key!r} differs between rank {other_rank} and rank {rank}, but a "
                    "checkpoint stores one value. Wrap it in sp.PerRank if each rank has its own; otherwise "
                    "make it equal before the save",
                    key=key,
                    ranks=[other_rank, rank],
                )


def warn_of_orders(location: str, reports: Sequence[WriteReport], warned: set[str]) -> None:
    """Warns once of objects whose dicts have another insertion order on another rank.

    Args:
        location: the committed checkpoint.
        reports: the reports of all ranks.
        warned: keys of earlier warnings. It is updated.
    """
    candidates = {key for report in reports for key in report.orders} - warned
    first: dict[str, tuple[bytes, int]] = {}
    differing: dict[str, tuple[int, int]] = {}
    seen: set[tuple[tuple[str, ...], frozenset[tuple[str, bytes]]]] = set()
    for rank, report in enumerate(reports) if candidates else ():
        signature = report.object_keys, frozenset(report.orders.items())
        if signature in seen:
            continue
        seen.add(signature)
        for key in candidates.intersection(report.object_keys):
            order = report.orders.get(key, b"")
            other, other_rank = first.setdefault(key, (order, rank))
            if other != order:
                differing.setdefault(key, (other_rank, rank))
    warned.update(differing)
    if differing:
        keys = sorted(differing)
        one, other_rank = differing[keys[0]]
        _log.warning(
            "%s: %d values have dicts in another insertion order on another rank. The checkpoint has the "
            "order of the lowest rank with the key. Insert the items in the same order on all ranks, or use "
            "sp.PerRank: %s (rank %d and rank %d)%s",
            location,
            len(keys),
            ", ".join(keys[:3]),
            one,
            other_rank,
            ", ..." if len(keys) > 3 else "",
        )


def _committed(storage: Storage) -> Manifest | None:
    """The checkpoint that this commit replaces; None if there is none, or it cannot be read."""
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
    """Removes files that only the replaced manifest names. A failure only wastes space, so it is logged."""
    try:
        references = references_of_siblings(storage)
        flush_manifests_of_siblings(storage)
        referenced = references.files(storage.folder)
        current = {new.index.name, *(record.name for record in new.own_files)}
        shards = [record.name for record in old.own_files if record.name not in referenced]
        for name in (old.index.name, *(() if references.unknown else shards)):
            if name not in current:
                storage.delete(name)
        for record in unreferenced_files(old.referenced_files, references, storage.sibling):
            storage.sibling(record.folder).delete(record.name)
        if references.unknown:
            _log.warning(
                "%s: shard files of the replaced checkpoint stay: %s",
                storage.location,
                unreadable_manifests_message(references.unknown),
            )
    except Exception as error:  # the new checkpoint is committed, so nothing may fail the save
        _log.warning(
            "%s: files of the replaced checkpoint stay (%s); prune removes them", storage.location, error
        )
