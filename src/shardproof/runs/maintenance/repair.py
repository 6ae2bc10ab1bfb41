"""Rebuilds the manifest and the index of a checkpoint from its shard files."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np

from shardproof.engine.format import (
    MANIFEST_NAME,
    STEP_FOLDER,
    Manifest,
    TensorRecord,
    decode_index,
    encode_index,
    encode_manifest,
    index_name,
    lost_files,
    new_manifest,
    parse_chunk_name,
    read_index,
    read_manifest,
    with_files,
)
from shardproof.engine.geometry import BoxTable
from shardproof.engine.planning import ChunkTable, chunk_table, prove_chunks
from shardproof.engine.storage import Storage, map_requests
from shardproof.errors import AlreadyCommittedError, FormatError, NotCommittedError, StorageError, TilingError
from shardproof.runs.maintenance.shard_files import FoundShard, VerifiedShard, find_shard, verify_shard


def repair(storage: Storage) -> Manifest:
    """Rebuilds index and manifest from complete, verified shard files, and commits them.

    Repair compares every chunk with the digest in its file, and proves the tiling of every tensor. It changes
    nothing before all checks have passed.

    `plan_repair` chooses the save. If the manifest is readable and only the index is damaged, the manifest
    names the files. Otherwise the candidates are the attempts that wrote an index, or else those with all
    shard files; repair takes the newest candidate. A manifest is replaced if none of its shard files are
    there, and all shard files of another save are: it was copied from another run or from a backup. A step
    that refers to other steps cannot be repaired, because only its manifest and its index record the
    positions of the chunks in other steps.

    Args:
        storage: storage of the checkpoint. Repair closes its files.

    Returns:
        The new manifest, with ``repaired`` set.

    Raises:
        AlreadyCommittedError: manifest and index are readable; there is nothing to repair.
        FormatError: shard files are missing or cut, or contradict each other.
        CorruptChunkError: the bytes of a chunk are damaged.
        TilingError: the chunks do not cover a tensor.
        StorageError: the storage failed.
    """
    try:
        plan = plan_repair(storage)
        shards = [verify_shard(storage, shard) for shard in plan.shards]
        _check_alike(shards)
        if plan.intact is not None:
            _check_named(shards, plan.intact)
        return _commit(storage, shards, plan.intact)
    finally:
        storage.close()


@dataclass(frozen=True, slots=True, eq=False)
class RepairPlan:
    """The save that a repair commits, as far as manifest, index and headers of shard files show."""

    attempt: str
    shards: tuple[FoundShard, ...]
    """All shard files of the save, by rank."""
    intact: Manifest | None
    """The manifest, if only the index is damaged; None if the manifest is."""


def plan_repair(storage: Storage) -> RepairPlan:
    """Chooses the save that `repair` commits. Reads no chunks, and changes nothing.

    Raises:
        AlreadyCommittedError: manifest and index are readable; there is nothing to repair.
        FormatError: shard files are missing or cut, or belong to the step of another folder.
        StorageError: the storage failed.
    """
    attempts, unreadable = _found_shards(storage)
    try:
        manifest = read_manifest(storage)
    except (NotCommittedError, FormatError):
        intact, copied = None, ""
    else:
        copied = manifest.attempt if _is_of_another_save(storage, manifest, attempts) else ""
        intact = None if copied else _intact_manifest(storage, manifest)
    candidates = _candidates(storage, attempts, intact, copied, unreadable)
    shards = _shards(storage, intact, attempts, candidates, unreadable)
    declared, step = shards[0].declared, _step_of_folder(storage)
    if step is not None and declared.step not in (None, step):
        raise FormatError(
            f"{storage.location}: the shard files are of step {declared.step}: the folder was renamed or "
            "copied. Give it the name of its step, and repair it there",
            file="shards",
        )
    if intact is None and declared.base and not _has_all_elements(shards):
        raise _not_here(storage, declared.base)
    return RepairPlan(declared.attempt, tuple(shards), intact)


def whole_attempts(storage: Storage) -> set[str]:
    """The saves in a folder whose shard files are all there, and that need no other step."""
    attempts, _ = _found_shards(storage)
    return {name for name, files in attempts.items() if _is_whole(files)}


def _intact_manifest(storage: Storage, manifest: Manifest) -> Manifest:
    """The manifest, if only the index is damaged. Raises if both are readable."""
    try:
        read_index(storage, manifest)
    except FormatError as error:
        folders = sorted({record.folder for record in manifest.referenced_files})
        if folders:
            raise _not_here(storage, ", ".join(folders)) from error
        return manifest
    storage.flush(MANIFEST_NAME)  # an earlier commit may have failed after the manifest got its name
    lost = lost_files(storage, manifest)
    if lost:
        name, fault = next(iter(lost.items()))
        more = f", and {len(lost) - 1} more are missing or of another size" if len(lost) > 1 else ""
        raise FormatError(
            f"{storage.location}: {fault}{more}. It cannot be repaired: restore another step", file=name
        )
    raise AlreadyCommittedError(
        f"{storage.location} is committed and readable: there is nothing to repair (`shardproof verify` "
        "checks its bytes)",
        path=storage.location,
    )


def _is_of_another_save(storage: Storage, manifest: Manifest, attempts: dict[str, list[FoundShard]]) -> bool:
    """True if the manifest has no file here, and the files of a whole save of this step are here."""
    own = [record.name for record in manifest.own_files] or [manifest.index.name]
    if any(storage.size(name) is not None for name in own):
        return False
    step = _step_of_folder(storage)
    whole = [files[0].declared for files in attempts.values() if _is_whole(files)]
    return any(step is None or declared.step in (None, step) for declared in whole)


def _step_of_folder(storage: Storage) -> int | None:
    """The step that the folder is named after; None for any other name."""
    match = STEP_FOLDER.fullmatch(storage.folder)
    return None if match is None else int(match[2])


def _shards(
    storage: Storage,
    intact: Manifest | None,
    attempts: dict[str, list[FoundShard]],
    candidates: list[str],
    unreadable: list[str],
) -> list[FoundShard]:
    """All shard files of the newest candidate, by rank."""
    chosen = max(candidates, key=lambda attempt: attempts[attempt][0].declared.time, default=None)
    if chosen is None or not _is_complete(attempts[chosen]):
        bases = {files[0].declared.base for name, files in attempts.items() if chosen in (None, name)}
        if bases and "" not in bases:
            raise _not_here(storage, ", ".join(sorted(bases)))
        found = [
            f"attempt {name}: {len(files)} of {files[0].declared.files} files"
            for name, files in attempts.items()
        ] or ["there are none"]
        attempt = intact.attempt if intact is not None else chosen
        which = "any attempt" if attempt is None else f"attempt {attempt}"
        raise FormatError(
            f"{storage.location}: not all shard files of {which} are there "
            f"({'; '.join([*found, *unreadable])}). It cannot be repaired: restore another step",
            file="shards",
        )
    return sorted(attempts[chosen], key=lambda shard: shard.declared.rank)


def _found_shards(storage: Storage) -> tuple[dict[str, list[FoundShard]], list[str]]:
    """The shard files with a whole header, by attempt, and why others have none."""

    def find(name: str) -> FoundShard | str:
        try:
            return find_shard(storage, name)
        except (FormatError, StorageError) as error:
            if isinstance(error, StorageError) and not error.details.get("lost_link"):
                raise
            return error.message

    attempts: dict[str, list[FoundShard]] = {}
    unreadable: list[str] = []
    names = [name for name in storage.list("shards") if name.endswith(".safetensors")]
    for found in map_requests(storage, find, names):
        if isinstance(found, str):
            unreadable.append(found)
        else:
            attempts.setdefault(found.declared.attempt, []).append(found)
    return attempts, unreadable


def _candidates(
    storage: Storage,
    attempts: dict[str, list[FoundShard]],
    intact: Manifest | None,
    copied: str,
    unreadable: list[str],
) -> list[str]:
    """Attempts that may have been committed here, without the attempt `copied` of a copied manifest.

    A save writes its index when every shard file is on stable storage. So if any attempt has an index, an
    attempt without one is a dead save. An attempt with an index is a candidate even if it lacks a shard.
    """
    if intact is not None:
        return [intact.attempt] if intact.attempt in attempts else []
    before, after = index_name("\n").split("\n")
    names = [name for name in storage.list() if name.startswith(before) and name.endswith(after)]
    indexed = [name.removeprefix(before).removesuffix(after) for name in names]
    indexed = [name for name in indexed if name != copied]
    for attempt in indexed:
        if attempt not in attempts:
            raise FormatError(
                f"{storage.location}: attempt {attempt} has an index, but none of its shard "
                f"files can be read ({'; '.join(unreadable) or 'there are none'}; a step that was "
                "saved incrementally has none if no chunk changed). It cannot be repaired: "
                f"restore another step, or remove {index_name(attempt)} to repair an older attempt",
                file="shards",
            )
    return indexed or [attempt for attempt, files in attempts.items() if _is_complete(files)]


def _not_here(storage: Storage, folders: str) -> FormatError:
    return FormatError(
        f"{storage.location}: saved incrementally: chunks that had not changed since {folders} were not "
        "written, and only the lost manifest and index record where they lie. It cannot be repaired: "
        "restore another step",
        file="shards",
    )


def _is_whole(shards: list[FoundShard]) -> bool:
    """True if the files of a save are all there, and it needs no other step."""
    return _is_complete(shards) and not shards[0].declared.base


def _has_all_elements(shards: list[FoundShard]) -> bool:
    """True if the chunks of a save have as many elements as its tensors. `_table` proves the tiling."""
    lacking = {
        key: prod(shape)
        for shard in shards
        for key, (_, shape) in shard.declared.tensors.items()
        if key not in shard.declared.aliases
    }
    for shard in shards:
        for title, *_ in shard.header.entries:
            try:
                key, _, sizes = parse_chunk_name(title)
            except ValueError:
                continue  # the digests
            if key in lacking:
                lacking[key] -= prod(sizes)
    return not any(lacking.values())


def _is_complete(shards: list[FoundShard]) -> bool:
    return len(shards) == shards[0].declared.files


def _check_alike(shards: list[VerifiedShard]) -> None:
    """Raises if two shards declare different values of their save."""
    first = shards[0]
    for shard in shards:
        if shard.declared.save != first.declared.save:
            raise FormatError(
                f"{shard.record.name}: it and {first.record.name} declare different values of one save. "
                "One of them is damaged; it cannot be repaired: restore another step",
                file=shard.record.name,
            )


def _check_named(shards: list[VerifiedShard], intact: Manifest) -> None:
    """Raises if the files or their tensors are not those that the manifest names."""
    named = {record.name: record for record in intact.files}
    for shard in shards:
        if named.pop(shard.record.name, None) != shard.record:
            raise FormatError(
                f"{shard.record.name}: not the file that the manifest names (its digest differs). It cannot "
                "be repaired: restore another step",
                file=shard.record.name,
            )
    for name in named:
        raise FormatError(f"{name} is missing, but the manifest names it", file=name)
    stored = {record.key: (record.dtype, record.shape) for record in intact.tensors}
    for shard in shards:
        for key, declared in shard.declared.tensors.items():
            if key not in intact.aliases and declared != stored.get(key):
                raise FormatError(
                    f"{shard.record.name}: it declares {key!r} as {declared}, but the manifest has "
                    f"{stored.get(key)}. One of them is damaged; it cannot be repaired: restore another step",
                    file=shard.record.name,
                )


def _commit(storage: Storage, shards: list[VerifiedShard], intact: Manifest | None) -> Manifest:
    """Checks the new index and manifest as a reader does, and only then changes the storage."""
    first = shards[0].declared
    tensors = _tensors(shards) if intact is None else intact.tensors
    table = _table(storage, shards, tensors)
    index = encode_index(table)
    without_files = new_manifest(
        attempt=first.attempt,
        step=first.step,
        time=first.time,
        world_size=first.world_size,
        metadata=first.metadata if intact is None else intact.metadata,
        tensors=tensors,
        aliases=first.aliases if intact is None else intact.aliases,
        objects=_objects(shards) if intact is None else intact.objects,
    )
    provenance = {} if intact is None else intact.provenance
    repaired = msgspec.structs.replace(without_files, repaired=True, provenance=provenance)
    manifest = with_files(repaired, [shard.record for shard in shards], index)
    text = encode_manifest(manifest)
    decode_index(index, manifest, manifest.index.name)
    # The damaged manifest is replaced last: until then, prune removes no file of the step.
    try:
        storage.publish(manifest.index.name, index, replace=True)
    except StorageError as error:
        error.details.pop("in_place", None)  # this detail is about the manifest
        raise
    storage.publish(MANIFEST_NAME, text, replace=storage.size(MANIFEST_NAME) is not None)
    return manifest


def _tensors(shards: list[VerifiedShard]) -> tuple[TensorRecord, ...]:
    """The tensors that the shards declare. An empty tied tensor is declared under each of its keys."""
    tensors: dict[str, TensorRecord] = {}
    for shard in shards:
        for key, (dtype, shape) in shard.declared.tensors.items():
            record = TensorRecord(key, dtype, shape)
            if tensors.setdefault(key, record) != record:
                raise FormatError(
                    f"{shard.record.name}: it contradicts another shard on {key!r}", file=shard.record.name
                )
    aliases = shards[0].declared.aliases
    return tuple(tensors[key] for key in sorted(tensors) if key not in aliases)


def _objects(shards: list[VerifiedShard]) -> dict[str, Any]:
    objects: dict[str, Any] = {}
    for shard in shards:
        twice = sorted(objects.keys() & shard.declared.objects.keys())
        if twice:
            raise FormatError(
                f"{shard.record.name}: another shard stores {twice[0]!r} too", file=shard.record.name
            )
        objects |= shard.declared.objects
    return objects


def _table(storage: Storage, shards: list[VerifiedShard], tensors: tuple[TensorRecord, ...]) -> ChunkTable:
    """The chunks of all shards. Proves that they tile the tensors."""
    row_of = {record.key: row for row, record in enumerate(tensors)}
    placed = [box for shard in shards for box in shard.boxes]
    chunks = [chunk for shard in shards for chunk in shard.chunks]
    unknown = sorted({key for key, _, _ in placed} - row_of.keys())
    if unknown:
        raise FormatError(f"{storage.location}: the manifest does not know {unknown[0]!r}", file="shards")
    boxes = BoxTable.of(
        [len(offsets) for _, offsets, _ in placed],
        np.array([value for _, offsets, _ in placed for value in offsets], np.int64),
        np.array([value for _, _, sizes in placed for value in sizes], np.int64),
    )
    table = chunk_table(
        np.array([row_of[key] for key, _, _ in placed], np.int64),
        np.repeat(np.arange(len(shards)), [len(shard.chunks) for shard in shards]),
        np.array([start for _, _, _, start, _ in chunks], np.int64),
        np.array([stop - start for _, _, _, start, stop in chunks], np.int64),
        np.concatenate([shard.digests for shard in shards]),
        boxes.start,
        boxes.offsets,
        boxes.sizes,
    )
    try:
        prove_chunks(tensors, table, np.arange(len(tensors)))
    except TilingError as error:
        base = shards[0].declared.base
        if base and error.details.get("kind") == "gap":
            raise _not_here(storage, base) from error
        raise
    return table
