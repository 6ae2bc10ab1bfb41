"""The commit, on the coordinator: check the reports of the ranks, then publish index and manifest.

A failed save leaves files without a manifest, or a manifest that may not be durable.

Note "Unconfirmed": if the storage fails after the manifest got its name, readers see the checkpoint, but a
crash of the machine may undo the commit. Such a save fails, and its files stay. The coordinator records the
attempt in memory, because a failing storage cannot record it. Until the commit is confirmed, the same saver
may replace it without `overwrite`, no incremental save refers to it, and retention does not count it. A later
save to the same place confirms it. A flush also confirms it, if the whole checkpoint was read and verified
before. Another process sees a committed checkpoint; `Checkpointer.restore` flushes the checkpoint that it
loads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.engine.format import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    TensorRecord,
    check_sizes,
    encode_index,
    index_name,
    locate_files,
    new_manifest,
    publish,
    read_manifest,
    shard_name,
    with_files,
)
from shardproof.engine.geometry import row_pointers
from shardproof.engine.planning import ChunkTable, WritePlan, chunk_table, remedy_of_difference
from shardproof.engine.saving.messages import Attempt, WriteReport
from shardproof.engine.storage import Storage
from shardproof.errors import (
    AlreadyCommittedError,
    FormatError,
    NotCommittedError,
    StorageError,
    StructureError,
)

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The file and byte of each chunk of a plan, in the order of the plan."""

    writers: tuple[int, ...]
    """Ranks that wrote a file, ascending. Their files are the first rows of the new file table."""
    referenced: tuple[FileRecord, ...]
    """Files of other steps, which are the following rows."""
    file: NDArray[np.int64]
    """(n,) row of the new file table."""
    byte_start: NDArray[np.int64]
    """(n,) first byte in the file."""
    digest: NDArray[np.uint64]
    """(n, 2) digest of the bytes."""

    def table(self, plan: WritePlan) -> ChunkTable:
        """The chunk table of the new index."""
        row_of = np.cumsum(plan.is_stored) - 1  # in the manifest, of each merged tensor that is stored
        columns = self.file, self.byte_start, plan.byte_count, self.digest
        boxes = plan.boxes.start, plan.boxes.offsets, plan.boxes.sizes
        return chunk_table(row_of[plan.tensor], *columns, *boxes)


PlaceChunks = Callable[[WritePlan, Sequence[WriteReport]], Placement]
"""Finds each chunk of a plan after the ranks have written."""


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """A committed checkpoint."""

    manifest: Manifest
    placement: Placement
    seal: bytes
    """See `shardproof.engine.format.read_seal`."""


def commit(
    storage: Storage,
    plan: WritePlan,
    attempt: Attempt,
    reports: Sequence[WriteReport],
    *,
    overwrite: bool,
    place: PlaceChunks | None = None,
    provenance: dict[str, Any] | None = None,
) -> Committed:
    """Checks that the ranks wrote what was planned, then writes the index and, last, the manifest.

    `place` finds the chunks. None: `place_chunks`. `provenance` is the origin of the save, as JSON.

    Raises:
        StructureError: the value of an object differs between ranks that share it, or a rank did not write
            what was planned.
        AlreadyCommittedError: another job committed here first.
        StorageError: the storage failed, or a referenced file is missing.
    """
    _check_objects_agree(reports)
    _check_planned(plan, reports)
    placed = (place or place_chunks)(plan, reports)
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
    without_files = new_manifest(
        attempt=attempt.id,
        step=attempt.step,
        time=attempt.time,
        world_size=attempt.world_size,
        metadata=attempt.metadata,
        tensors=tensors,
        aliases=plan.merged.aliases,
        objects=objects,
    )
    without_files = msgspec.structs.replace(without_files, provenance=provenance or {})
    manifest = with_files(without_files, (*own, *placed.referenced), index)
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
    return Committed(manifest, placed, seal)


def place_chunks(plan: WritePlan, reports: Sequence[WriteReport]) -> Placement:
    """Finds each chunk of a full save in the file of its rank.

    Raises:
        StructureError: a rank reports another number of chunks than planned, or no file for its chunks.
    """
    check_counts(plan, reports)
    return place_written(plan, reports, np.ones(len(plan.tensor), bool))


def check_counts(plan: WritePlan, reports: Sequence[WriteReport]) -> None:
    """Checks that each rank reports as many chunks as were planned for it."""
    for rank, (report, count) in enumerate(zip(reports, np.diff(plan.writer_start).tolist(), strict=True)):
        if len(report.digests) != 16 * count:
            raise StructureError(
                f"rank {rank} reports {len(report.digests) // 16} chunks, but {count} were planned for it; "
                "nothing was committed",
                rank=rank,
            )


def place_written(plan: WritePlan, reports: Sequence[WriteReport], wrote: NDArray[np.bool_]) -> Placement:
    """Finds the written chunks, which are in the file of their rank without gaps, in the order of the plan.

    The other chunks get the row -1.
    """
    writers = tuple(rank for rank, report in enumerate(reports) if report.size)
    rank_of = np.repeat(np.arange(len(reports)), np.diff(plan.writer_start))
    file_of = np.full(len(reports), -1, np.int64)
    file_of[list(writers)] = np.arange(len(writers))
    data_start = np.array([report.data_start for report in reports], np.int64)
    starts = row_pointers(np.where(wrote, plan.byte_count, 0))
    before = starts[:-1] - starts[plan.writer_start[:-1]][rank_of]
    file = np.where(wrote, file_of[rank_of], -1)
    byte_start = np.where(wrote, data_start[rank_of] + before, 0)
    if (file[wrote] < 0).any():
        rank = int(rank_of[wrote][int((file[wrote] < 0).argmax())])
        raise StructureError(f"rank {rank} wrote chunks, but no file; nothing was committed", rank=rank)
    digest = np.frombuffer(b"".join([report.digests for report in reports]), np.uint64).reshape(-1, 2)
    return Placement(writers, (), file, byte_start, digest)


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

    The call adds the keys to `warned`, which has those of earlier warnings.
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


class Unconfirmed:
    """The attempts whose commit is not confirmed, by location."""

    def __init__(self) -> None:
        self._attempts: dict[str, str] = {}

    def add(self, storage: Storage, attempt: str = "") -> None:
        """Records an unconfirmed checkpoint in `storage`. With its attempt, the same saver may replace it."""
        self._attempts[storage.location] = attempt or self._attempts.get(storage.location, "")

    def confirm(self, storage: Storage) -> None:
        """Records that the checkpoint in `storage` is durable."""
        self._attempts.pop(storage.location, None)

    def __contains__(self, storage: Storage) -> bool:
        return storage.location in self._attempts

    def may_replace(self, storage: Storage) -> bool:
        """True if the manifest in `storage` is that of an unconfirmed attempt of this saver."""
        attempt = self._attempts.get(storage.location, "")
        return attempt != "" and is_in_place(storage, attempt) is True


def is_in_place(storage: Storage, attempt: str) -> bool | None:
    """True if the manifest in `storage` is that of `attempt`; None if the manifest cannot be read."""
    try:
        return _committed_attempt(storage) == attempt
    except (FormatError, StorageError):
        return None


def remove_own_files(storage: Storage, rank: int, attempt: str) -> None:
    """Removes this rank's files of a save that the coordinator refused; logs a file that it cannot remove.

    Rank 0 also removes the index.

    Note "Whose files": a file may be removed only if no manifest can name it, now or later. After a refusal
    by the coordinator no manifest can, unless the error states that the manifest is or may be in place
    (`details["committed"]`). The folder alone is no evidence, because another node may see an older state of
    it. A rank only checks once more for a manifest that another node wrote. A silent coordinator
    may be slow, and commit later. An interrupt of this rank does not stop the coordinator. In these cases the
    files stay, and prune removes them.
    """
    names = [shard_name(rank, attempt)]
    if rank == 0:
        names.append(index_name(attempt))
    try:
        if _committed_attempt(storage) != attempt:
            for name in names:
                storage.delete(name)
    except (FormatError, StorageError) as error:
        _log.warning("%s: %s stay for prune (%s)", storage.location, ", ".join(names), error)


def _committed_attempt(storage: Storage) -> str | None:
    try:
        return read_manifest(storage).attempt
    except NotCommittedError:
        return None
