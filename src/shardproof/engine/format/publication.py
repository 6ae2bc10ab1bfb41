"""The commit of a checkpoint, the files to which other steps refer, and the removal of the others.

Note: Manifests have all references
-----------------------------------
Only the manifest of the step that needs a file stores the reference, so no second record can disagree. Before
a program removes a file, it reads the manifests of all sibling folders. An unreadable manifest may refer to
any file. Then the program removes no file that another step could need. Steps can be renamed, so a folder of
any name may have a manifest. Two exceptions: ``lost+found`` of a file system is skipped, and a dangling link
counts only under the name of a step.

Note: Manifests are flushed before files are removed
----------------------------------------------------
A process may die after it removed or replaced a manifest, and before that was durable. A crash of the machine
may then restore the old manifest. It may refer to a file that no manifest names now. So a program flushes the
manifests of all folders before it removes a file that another step could need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from shardproof.engine.format.checkpoint_files import read_manifest
from shardproof.engine.format.digests import bytes_digest
from shardproof.engine.format.file_names import MANIFEST_NAME, STEP_FOLDER, index_name
from shardproof.engine.format.manifest import (
    SEAL_LENGTH,
    USUAL_BEGINNING,
    FileRecord,
    Manifest,
    TensorRecord,
    encode_manifest,
    is_foreign,
    manifest_version,
)
from shardproof.engine.storage import Storage, map_requests, write_file
from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.version import __version__

_log = logging.getLogger("shardproof")
_MOST_FOREIGN = 64 << 20
"""Bytes of a `manifest.json` of another program that is recognized, at most."""

_LOST_AND_FOUND = "lost+found"


def new_manifest(
    *,
    attempt: str,
    step: int | None,
    time: float,
    world_size: int,
    tensors: tuple[TensorRecord, ...],
    objects: Mapping[str, Any],
    metadata: dict[str, Any] | None = None,
    aliases: dict[str, str] | None = None,
) -> Manifest:
    """The manifest of a checkpoint that has no files (see `with_files`) and no `provenance` yet.

    Args:
        attempt: name of the save.
        step: number of the step; None outside of a run.
        time: seconds since 1970, UTC.
        world_size: number of ranks that save.
        tensors: all stored tensors, sorted by key.
        objects: plain values as JSON, by key, in any order.
        metadata: the user's metadata, plain JSON; None without.
        aliases: other keys of tied tensors; None without.

    >>> new_manifest(attempt="a", step=3, time=1.5, world_size=1, tensors=(), objects={"b": 1}).index.name
    'index-a.safetensors'
    """
    manifest = Manifest(
        writer="",
        attempt=attempt,
        step=step,
        time=time,
        world_size=world_size,
        metadata=metadata or {},
        tensors=tensors,
        aliases=aliases or {},
        objects=dict(sorted(objects.items())),
        files=(),
        index=FileRecord(index_name(attempt), 0, ""),
    )
    return with_files(manifest, (), b"")


def with_files(manifest: Manifest, files: Sequence[FileRecord], index: bytes) -> Manifest:
    """The same checkpoint with these shard files and this index, written by this version of shardproof."""
    return msgspec.structs.replace(
        manifest,
        version=manifest_version(files),
        writer=f"shardproof {__version__}",
        files=tuple(files),
        index=FileRecord(index_name(manifest.attempt), len(index), bytes_digest(index)),
    )


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
        The seal of the checkpoint, as `shardproof.engine.format.read_seal` returns it.

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


@dataclass(slots=True)
class References:
    """Files that committed steps refer to in folders of other steps.

    >>> References({"step-00000001": {"shards/00000-a.safetensors": ["step-00000002"]}}).users(
    ...     "step-00000001")
    ['step-00000002']
    """

    by_folder: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Folder to file name to the folders of the steps that refer to the file."""
    unknown: list[str] = field(default_factory=list)
    """Folders whose manifest cannot be read, so that their references are unknown."""

    def add(self, user: str, manifest: Manifest) -> None:
        """Adds the references of the step in the folder `user`."""
        for record in manifest.files:
            if record.folder:
                users = self.by_folder.setdefault(record.folder, {}).setdefault(record.name, [])
                users.append(user)

    def files(self, folder: str) -> Collection[str]:
        """Names of the files in a folder to which other steps refer."""
        return self.by_folder.get(folder, {}).keys()

    def users(self, folder: str) -> list[str]:
        """Folders of the steps that refer to files in a folder, sorted."""
        return sorted({user for users in self.by_folder.get(folder, {}).values() for user in users})


def unreadable_manifests_message(unknown: Sequence[str]) -> str:
    """Why unreadable manifests in some folders make files stay, and what to do, for messages."""
    return (
        f"the manifest in {', '.join(unknown)} cannot be read (no permission, or damaged) and may refer to "
        "them. Make it readable for this process, or move the folder elsewhere; then `shardproof prune` "
        "removes the files"
    )


def _referred(places: Iterable[tuple[str, Storage]]) -> References:
    """The references of the checkpoints in some folders, given by name and storage. Others count as none."""
    found = References()
    places = [(name, storage) for name, storage in places if name != _LOST_AND_FOUND]
    if not places:
        return found
    looks = map_requests(places[0][1], _referring_manifest, places)
    for (name, _), look in zip(places, looks, strict=True):
        if isinstance(look, Manifest):
            found.add(name, look)
        elif look == "unknown":
            found.unknown.append(name)
    return found


def _referring_manifest(place: tuple[str, Storage]) -> Manifest | Literal["no references", "unknown"]:
    """The manifest of a folder if it may have references; else why there is none."""
    name, storage = place
    try:
        size = storage.size(MANIFEST_NAME)
        if size is None:
            return "no references"
        return read_manifest(storage) if _may_refer(storage, size) else "no references"
    except NotCommittedError:
        return "no references"
    except (FormatError, StorageError) as error:
        is_lost_link = error.details.get("lost_link") and STEP_FOLDER.fullmatch(name) is None
        return "no references" if is_lost_link or _is_foreign(storage) else "unknown"


def newest_step(run: Storage) -> str | None:
    """The folder of the step with the highest number and a manifest; None if the folder is not that of a run.

    A dangling link is no step.

    Raises:
        StorageError: the storage cannot list the folder, or look for a manifest.
    """

    def has_manifest(name: str) -> bool:
        try:
            return run.within(name).size(MANIFEST_NAME) is not None
        except StorageError as error:
            if error.details.get("lost_link"):
                return False
            raise

    matches = [match for name in run.folders() if (match := STEP_FOLDER.fullmatch(name)) is not None]
    steps = sorted((int(match[2]), match[0]) for match in matches if match[1] == "step")
    newest_first = [name for _, name in reversed(steps)]
    return next(filter(has_manifest, newest_first), None)


def references_in(run: Storage, *, without: Collection[str] = ()) -> References:
    """The references of the checkpoints in all folders of `run` but those named in `without`."""
    return _referred((name, run.within(name)) for name in run.folders() if name not in without)


def references_of_siblings(storage: Storage) -> References:
    """The references of the checkpoint in `storage` and of those in its sibling folders."""
    return _referred((name, storage.sibling(name)) for name in storage.siblings())


def flush_manifests_in(run: Storage) -> None:
    """Makes it durable which manifest each folder of `run` has, or that it has none.

    See note "Manifests are flushed before files are removed". A folder with an unreadable manifest is
    skipped. Its references are unknown, so no file is removed that another step could need.

    Raises:
        StorageError: the storage failed.
    """
    _flush_manifests((name, run.within(name)) for name in run.folders())


def flush_manifests_of_siblings(storage: Storage) -> None:
    """As `flush_manifests_in`, for the folder of `storage` and its sibling folders.

    Raises:
        StorageError: the storage failed.
    """
    _flush_manifests((name, storage.sibling(name)) for name in storage.siblings())


def _flush_manifests(places: Iterable[tuple[str, Storage]]) -> None:
    for name, storage in places:
        if storage.is_remote:
            return  # changes there are durable when they return
        if name == _LOST_AND_FOUND or not _had_manifest(name, storage):
            continue
        try:
            storage.flush_names()
        except StorageError:
            if _is_readable(storage):
                raise


def _had_manifest(name: str, storage: Storage) -> bool:
    """True if the folder has a manifest, or may have lost one. Only manifests of steps are ever removed."""
    if STEP_FOLDER.fullmatch(name) is not None:
        return True
    try:
        return storage.size(MANIFEST_NAME) is not None
    except StorageError:
        return False


def _is_readable(storage: Storage) -> bool:
    """True if the storage can look for the manifest of a folder."""
    try:
        storage.size(MANIFEST_NAME)
    except StorageError:
        return False
    return True


def named_files(storage: Storage) -> set[str] | None:
    """The files of a step in its own folder: manifest, index and own shard files.

    Returns:
        Names of the files; none without a manifest; None if the manifest is damaged.

    Raises:
        StorageError: the manifest exists and the storage cannot read it now.
    """
    try:
        manifest = read_manifest(storage)
    except NotCommittedError:
        return set()
    except FormatError:
        return None
    return {MANIFEST_NAME, manifest.index.name, *(record.name for record in manifest.own_files)}


def unreferenced_files(
    records: Iterable[FileRecord], references: References, folder: Callable[[str], Storage]
) -> list[FileRecord]:
    """The records of a removed manifest whose files only it referred to, and which may now be removed.

    Files in linked folders stay (see `Storage.linked`), also those of a linked folder ``shards``. All files
    stay if a manifest is unreadable.
    `references` are those of the manifests that are left, and `folder` gives the storage of a folder.
    """
    if references.unknown:
        return []
    needed: dict[str, set[str] | None] = {}
    found = []
    for record in records:
        if record.folder not in needed:
            place = folder(record.folder)
            is_linked = place.linked or place.within("shards").linked
            own = None if is_linked else named_files(place)
            needed[record.folder] = None if own is None else own | set(references.files(record.folder))
        of_folder = needed[record.folder]
        if of_folder is not None and record.name not in of_folder:
            found.append(record)
    return found


def _is_foreign(storage: Storage) -> bool:
    try:
        size = storage.size(MANIFEST_NAME)
        return size is not None and size <= _MOST_FOREIGN and is_foreign(storage.read(MANIFEST_NAME))
    except StorageError:
        return False


def has_no_references(storage: Storage) -> bool:
    """True if `storage` holds a checkpoint without references. Reads the first bytes of the manifest only.

    Raises:
        StorageError: the manifest exists and the storage cannot read it now.
    """
    size = storage.size(MANIFEST_NAME)
    return size is not None and not _may_refer(storage, size)


def _may_refer(storage: Storage, size: int) -> bool:
    """True if the first bytes of a manifest of this size are not those of one without references."""
    return storage.read(MANIFEST_NAME, 0, min(size, len(USUAL_BEGINNING))) != USUAL_BEGINNING
