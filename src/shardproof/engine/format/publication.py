"""The commit of a checkpoint: make manifest and index, publish the manifest, and remove replaced files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shardproof.engine.format.checkpoint_files import read_manifest
from shardproof.engine.format.digests import bytes_digest
from shardproof.engine.format.file_names import MANIFEST_NAME, index_name
from shardproof.engine.format.manifest import FileRecord, Manifest, TensorRecord, manifest_version
from shardproof.engine.format.manifest_text import SEAL_LENGTH, encode_manifest
from shardproof.engine.format.references import (
    flush_manifests_of_siblings,
    references_of_siblings,
    unreadable_manifests_message,
    unreferenced_files,
)
from shardproof.engine.storage import Storage, write_file
from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.version import __version__


def new_manifest(
    *,
    attempt: str,
    step: int | None,
    time: float,
    world_size: int,
    tensors: tuple[TensorRecord, ...],
    objects: Mapping[str, Any],
    metadata: dict[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    aliases: dict[str, str] | None = None,
) -> Manifest:
    """The manifest of a checkpoint that has no files yet (see `with_files`).

    Args:
        attempt: name of the save.
        step: number of the step; None outside of a run.
        time: seconds since 1970, UTC.
        world_size: number of ranks that save.
        tensors: all stored tensors, sorted by key.
        objects: plain values as JSON, by key, in any order.
        metadata: the user's metadata, plain JSON; None without.
        provenance: the origin of the save, plain JSON; None without.
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
        provenance=dict(provenance or {}),
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


_log = logging.getLogger("shardproof")


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
