"""A stored checkpoint of any format as a manifest and a chunk table, from which the reports are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from shardproof.engine.foreign import NATIVE, Foreign, format_of
from shardproof.engine.format import FileRecord, Manifest, locate_files, read_index, read_manifest, size_error
from shardproof.engine.planning import ChunkTable
from shardproof.engine.storage import Storage, map_requests
from shardproof.errors import StorageError, tells_nothing

if TYPE_CHECKING:
    from shardproof.engine.loading import ForeignCheckpoint

_NO_DIGEST = 32 * "0"


@dataclass(frozen=True, slots=True)
class Stored:
    """What is stored, without the values of tensors."""

    location: str
    format: str
    manifest: Manifest
    """For another format, made from its description. Plain values are read when they are accessed."""
    table: ChunkTable
    notes: tuple[str, ...] = ()
    """What a foreign format cannot prove or lost, a sentence each."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Values of a foreign checkpoint that cannot be read: key to a description. They count as plain values
    of the manifest."""

    @property
    def has_digests(self) -> bool:
        """True if each chunk has a digest."""
        return self.format == NATIVE


def describe(
    place: Storage | Foreign,
    *,
    format: str | None = None,  # noqa: A002 as in sp.open
    trust_pickle: bool = False,
) -> Stored:
    """Describes a checkpoint of any format. Shardproof's own format needs no torch.

    Raises:
        NotCommittedError, FormatError, StorageError: it cannot be read.
    """
    foreign = place if isinstance(place, Foreign) else Foreign(place)
    if (name := format or format_of(foreign)) == NATIVE:
        manifest = read_manifest(foreign.storage)
        return Stored(foreign.location, NATIVE, manifest, read_index(foreign.storage, manifest))
    from shardproof.engine.loading import ForeignCheckpoint, open_storage

    with open_storage(foreign, format=name, trust_pickle=trust_pickle, warn=False) as checkpoint:
        assert isinstance(checkpoint, ForeignCheckpoint)
        return _described(checkpoint)


def check_files(place: Storage | Foreign, stored: Stored) -> None:
    """Checks the size of each shard file of shardproof, and on file systems that it can be opened.

    Raises:
        StorageError: of a missing or cut file; if there is none, of a file that cannot be read.
    """
    if not stored.has_digests:
        return
    storage = place.storage if isinstance(place, Foreign) else place

    def fault_of(item: tuple[tuple[Storage, str], FileRecord]) -> StorageError | None:
        (folder, name), record = item
        try:
            error = size_error(
                folder,
                record,
                path=f"{folder.location}/{name}",
                advice=f"`shardproof verify {storage.location}` names all damage",
            )
            if error is None and folder.path is not None:
                folder.read(name, 0, min(1, record.size))
        except StorageError as failure:
            return failure
        return error

    items = zip(locate_files(storage, stored.manifest), stored.manifest.files, strict=True)
    faults = [fault for fault in map_requests(storage, fault_of, items) if fault is not None]
    if faults:
        raise min(faults, key=lambda fault: tells_nothing(fault.details))


def _described(checkpoint: ForeignCheckpoint) -> Stored:
    from shardproof.engine.state import encode_plain  # imports torch

    sizes = checkpoint.reader.files()
    files = tuple(
        FileRecord(name, sizes.get(name) or checkpoint.reader.storage.size(name) or 0, _NO_DIGEST, 0, -1)
        for name in checkpoint.files
    )
    manifest = Manifest(
        writer=checkpoint.reader.name,
        attempt=checkpoint.attempt,
        step=checkpoint.step,
        time=0.0,
        world_size=checkpoint.world_size,
        metadata=encode_plain(checkpoint.metadata, "metadata"),
        tensors=tuple(checkpoint.tensors),
        aliases=dict(checkpoint.aliases),
        objects=cast(dict[str, Any], checkpoint.objects),
        files=files,
        index=FileRecord("", 0, _NO_DIGEST, 0, -1),
    )
    reader = checkpoint.reader
    unreadable = {key: value.kind for key, value in reader.unreadable.items()}
    return Stored(
        checkpoint.location, reader.name, manifest, checkpoint.table, tuple(reader.notes), unreadable
    )
