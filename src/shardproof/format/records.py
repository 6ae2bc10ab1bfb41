"""Reading manifest and index from a storage."""

from __future__ import annotations

from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.format.index import decode_index
from shardproof.format.manifest import Manifest
from shardproof.format.manifest_text import MAX_MANIFEST, SEAL_LENGTH, decode_manifest
from shardproof.format.names import MANIFEST_NAME
from shardproof.format.size_check import size_error, size_fault
from shardproof.planning import ChunkTable
from shardproof.storage import Storage

__all__ = ["files_of", "lost_files", "read_index", "read_manifest", "seal_of"]


def read_manifest(storage: Storage) -> Manifest:
    """The manifest of the checkpoint in `storage`.

    Raises:
        NotCommittedError: there is none, so there is no checkpoint.
        FormatError: it is damaged.
        StorageError: it cannot be read.
    """
    size = storage.size(MANIFEST_NAME)
    try:
        if size is not None and size > MAX_MANIFEST:
            raise FormatError(
                f"{storage.location}/{MANIFEST_NAME}: {size} bytes, a manifest has at most {MAX_MANIFEST}.",
                file=MANIFEST_NAME,
            )
        data = storage.read(MANIFEST_NAME)
    except StorageError as error:
        if not error.details.get("missing"):
            raise
        raise NotCommittedError(
            f"{storage.location} holds no committed checkpoint: there is no {MANIFEST_NAME}. The save "
            "failed or still goes on, or the path is wrong. `shardproof repair` can commit a save whose "
            "files are whole.",
            path=storage.location,
        ) from error
    return decode_manifest(data, f"{storage.location}/{MANIFEST_NAME}")


def read_index(storage: Storage, manifest: Manifest) -> ChunkTable:
    """The chunk table of the checkpoint that `manifest` describes, checked against it.

    Raises:
        FormatError: the index is missing, damaged or of another checkpoint.
        StorageError: it cannot be read.
    """
    name = manifest.index.name
    file = f"{storage.location}/{name}"
    fault = size_fault(storage, name, manifest.index.size)
    if fault is not None:
        raise FormatError(
            f"{file}: {fault[0]}. `shardproof repair` can write it again from the shard files.",
            file=name,
            missing=fault[1],
        )
    return decode_index(storage.read(name), manifest, file)


def files_of(storage: Storage, manifest: Manifest) -> list[tuple[Storage, str]]:
    """Where the shard files of a checkpoint are: for each row of `manifest.files` its storage and name.

    Files of one folder share one storage, so closing each of them once closes all that reading opened.

    Args:
        storage: of the checkpoint.
        manifest: of the checkpoint.
    """
    storages = {"": storage}
    for record in manifest.files:
        if record.folder not in storages:
            storages[record.folder] = storage.sibling(record.folder)
    return [(storages[record.folder], record.name) for record in manifest.files]


def lost_files(storage: Storage, manifest: Manifest) -> dict[str, str]:
    """Shard files that are not as long as they were written, and so cannot be had back.

    Returns:
        Place (see `FileRecord.place`) to what was expected and found, in words. Nothing is read.

    Raises:
        StorageError: the storage cannot tell.
    """
    lost = {}
    for (folder, _), record in zip(files_of(storage, manifest), manifest.files, strict=True):
        error = size_error(folder, record)
        if error is not None:
            lost[record.place] = error.message
    return lost


def seal_of(storage: Storage) -> bytes | None:
    """The digest at the end of a checkpoint's manifest, which tells one manifest from any other.

    Returns:
        None where there is no manifest, or none that ends as one does.

    Raises:
        StorageError: it cannot be read.
    """
    size = storage.size(MANIFEST_NAME)
    if size is None or size < SEAL_LENGTH:
        return None
    return storage.read(MANIFEST_NAME, size - SEAL_LENGTH, size)
