"""Makes the manifest of a commit from the files that were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shardproof.engine.format.digests import bytes_digest
from shardproof.engine.format.file_names import index_name
from shardproof.engine.format.manifest import FileRecord, Manifest, TensorRecord, manifest_version
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
    repaired: bool = False,
    files: Sequence[FileRecord] = (),
    index: bytes = b"",
) -> Manifest:
    """The manifest of a checkpoint that this version of shardproof writes.

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
        repaired: True if it is rebuilt from shard files.
        files: the shard files; none before they are written (see `with_files`).
        index: the encoded index.

    >>> new_manifest(attempt="a", step=3, time=1.5, world_size=1, tensors=(), objects={"b": 1}).index.name
    'index-a.safetensors'
    """
    manifest = Manifest(
        writer="",
        attempt=attempt,
        step=step,
        time=time,
        world_size=world_size,
        repaired=repaired,
        metadata=metadata or {},
        provenance=dict(provenance or {}),
        tensors=tensors,
        aliases=aliases or {},
        objects=dict(sorted(objects.items())),
        files=(),
        index=FileRecord(index_name(attempt), 0, ""),
    )
    return with_files(manifest, files, index)


def with_files(manifest: Manifest, files: Sequence[FileRecord], index: bytes) -> Manifest:
    """The same checkpoint with these shard files and this index, written by this version of shardproof."""
    return msgspec.structs.replace(
        manifest,
        version=manifest_version(files),
        writer=f"shardproof {__version__}",
        files=tuple(files),
        index=FileRecord(index_name(manifest.attempt), len(index), bytes_digest(index)),
    )
