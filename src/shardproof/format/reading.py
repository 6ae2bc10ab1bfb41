"""Reading manifest and index from a storage."""

from __future__ import annotations

from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.format.index import decode_index
from shardproof.format.manifest import MAX_MANIFEST, Manifest, decode_manifest
from shardproof.format.names import MANIFEST_NAME
from shardproof.planning.chunks import ChunkTable
from shardproof.storage.interface import Storage

__all__ = ["lost_files", "read_index", "read_manifest"]


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
    size = storage.size(name)
    if size != manifest.index.size:
        found = "it is missing" if size is None else f"it has {size} bytes"
        raise FormatError(
            f"{file}: {found}, but the manifest says {manifest.index.size} bytes. `shardproof repair` can "
            "write it again from the shard files.",
            file=name,
        )
    return decode_index(storage.read(name), manifest, file)


def lost_files(storage: Storage, manifest: Manifest) -> dict[str, str]:
    """Shard files that are not as long as they were written, and so cannot be had back.

    Returns:
        Name to what was expected and found, in words. Nothing is read.

    Raises:
        StorageError: the storage cannot tell.
    """
    lost = {}
    for record in manifest.files:
        size = storage.size(record.name)
        if size != record.size:
            found = "it is missing" if size is None else f"it has {size}"
            lost[record.name] = f"{record.name}: expected {record.size} bytes, {found}"
    return lost
