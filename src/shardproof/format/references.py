"""Which files of a run are referred to by other steps than the one that wrote them.

Note "Who refers is asked of the manifests": a reference stands in the manifest of the step that needs it and
nowhere else, so that there is nothing to keep in step with it. Before a file is removed, the manifests beside
it are read. A manifest that cannot be read may refer to anything: then nothing that could be lent is removed.
A folder of any name may have one, for steps can be renamed. Only what a file system calls ``lost+found`` has
none: what is found again lies there under numbers, and most may not even look. A link that leads nowhere
counts only under the name of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.format.manifest import FileRecord, Manifest
from shardproof.format.manifest_text import MAX_MANIFEST, USUAL_BEGINNING, is_foreign
from shardproof.format.names import MANIFEST_NAME, STEP_FOLDER
from shardproof.format.records import read_manifest
from shardproof.storage import Storage

__all__ = [
    "References",
    "named_files",
    "referred",
    "referred_beside",
    "referred_in",
    "refers_to_none",
    "unneeded",
    "why_kept",
]


_LOST_AND_FOUND = "lost+found"


@dataclass(slots=True)
class References:
    """Files that committed steps refer to in folders of other steps.

    >>> References({"step-00000001": {"shards/00000-a.safetensors": ["step-00000002"]}}).users(
    ...     "step-00000001")
    ['step-00000002']
    """

    by_folder: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Folder to the names of its files that are referred to, each with the folders of those that refer."""
    unknown: list[str] = field(default_factory=list)
    """Folders with a manifest that cannot be read: what they refer to is unknown."""

    def add(self, user: str, manifest: Manifest) -> None:
        """Counts what the step in the folder `user` refers to."""
        for record in manifest.files:
            if record.folder:
                users = self.by_folder.setdefault(record.folder, {}).setdefault(record.name, [])
                users.append(user)

    def files(self, folder: str) -> Collection[str]:
        """Names of the files in a folder that other steps refer to."""
        return self.by_folder.get(folder, {}).keys()

    def users(self, folder: str) -> list[str]:
        """Folders of the steps that refer to files of this one, sorted."""
        return sorted({user for users in self.by_folder.get(folder, {}).values() for user in users})


def why_kept(unknown: Sequence[str]) -> str:
    """Why files stay that nobody may need, and what to do.

    Args:
        unknown: the folders whose manifests cannot be read.
    """
    return (
        f"the manifest in {', '.join(unknown)} cannot be read (no permission, or damaged) and may refer to "
        "them. Make it readable for this process, or move the folder elsewhere; then `shardproof prune` "
        "removes what is left"
    )


def referred(places: Iterable[tuple[str, Storage]]) -> References:
    """What the checkpoints among these folders refer to.

    Args:
        places: name and storage of each folder. Those without a manifest refer to nothing.
    """
    found = References()
    for name, storage in places:
        if name == _LOST_AND_FOUND:
            continue
        try:
            if _may_refer(storage):
                found.add(name, read_manifest(storage))
        except NotCommittedError:
            continue
        except (FormatError, StorageError) as error:
            if error.details.get("lost_link") and STEP_FOLDER.fullmatch(name) is None:
                continue
            if not _is_foreign(storage):
                found.unknown.append(name)
    return found


def referred_in(run: Storage, *, without: Collection[str] = ()) -> References:
    """What the checkpoints in the folders of `run` refer to, but for those named in `without`."""
    return referred((name, run.within(name)) for name in run.folders() if name not in without)


def referred_beside(storage: Storage) -> References:
    """What the checkpoints beside the one in `storage` refer to, its own references too."""
    return referred((name, storage.sibling(name)) for name in storage.siblings())


def named_files(storage: Storage) -> set[str] | None:
    """Files of its own that the manifest of a folder names, itself too.

    Returns:
        Empty without a manifest; None where it cannot be read, so that what it names is unknown.

    Raises:
        StorageError: it is there and cannot be had just now.
    """
    try:
        manifest = read_manifest(storage)
    except NotCommittedError:
        return set()
    except FormatError:
        return None
    return {MANIFEST_NAME, manifest.index.name, *(record.name for record in manifest.own_files)}


def unneeded(
    borrowed: Iterable[FileRecord], references: References, folder: Callable[[str], Storage]
) -> list[FileRecord]:
    """Of files that a removed manifest referred to, those that no manifest needs any more.

    Files in linked folders are not among them (see `Storage.linked`).

    Args:
        borrowed: file records of the removed manifest.
        references: of the manifests that are left.
        folder: the storage of the folder of this name.
    """
    if references.unknown:
        return []
    needed: dict[str, set[str] | None] = {}
    found = []
    for record in borrowed:
        if record.folder not in needed:
            place = folder(record.folder)
            own = None if place.linked else named_files(place)
            needed[record.folder] = None if own is None else own | set(references.files(record.folder))
        of_folder = needed[record.folder]
        if of_folder is not None and record.name not in of_folder:
            found.append(record)
    return found


def _is_foreign(storage: Storage) -> bool:
    try:
        size = storage.size(MANIFEST_NAME)
        return size is not None and size <= MAX_MANIFEST and is_foreign(storage.read(MANIFEST_NAME))
    except StorageError:
        return False


def refers_to_none(storage: Storage) -> bool:
    """Whether there is a checkpoint in `storage` that refers to no other, by the first bytes of its manifest.

    Raises:
        StorageError: it is there and cannot be had just now.
    """
    return storage.size(MANIFEST_NAME) is not None and not _may_refer(storage)


def _may_refer(storage: Storage) -> bool:
    """Whether there is a manifest, unless its first bytes say that it is of a version without references."""
    size = storage.size(MANIFEST_NAME)
    if size is None:
        return False
    return storage.read(MANIFEST_NAME, 0, min(size, len(USUAL_BEGINNING))) != USUAL_BEGINNING
