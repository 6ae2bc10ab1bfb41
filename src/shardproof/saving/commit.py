"""The commit, on the coordinator: check the reports of the ranks, then publish index and manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import compress
from typing import Any

import msgspec

from shardproof.errors import (
    AlreadyCommittedError,
    StorageError,
    StructureError,
)
from shardproof.format import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    TensorRecord,
    bytes_digest,
    check_sizes,
    encode_index,
    index_name,
    locate_files,
    manifest_version,
    publish,
    shard_name,
)
from shardproof.planning import WritePlan, remedy_of_difference
from shardproof.saving.incremental import Base
from shardproof.saving.messages import Attempt, WriteReport
from shardproof.saving.placement import place_chunks
from shardproof.storage import Storage
from shardproof.version import __version__

__all__ = ["commit", "warn_of_orders"]

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

    def advice(record: FileRecord) -> str:
        if record.folder:
            return (
                "The new step refers to unchanged chunks of this file. Save again: the next save writes "
                "missing chunks"
            )
        return (
            f"Rank {record.rank} wrote this file, but rank 0 does not see it: check that all nodes share "
            "this storage"
        )

    folders = (folder for folder, _ in locate_files(storage, manifest))
    check_sizes(list(zip(folders, manifest.files, strict=True)), advice)


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
                    f"checkpoint stores one value. {remedy_of_difference(key)}",
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
