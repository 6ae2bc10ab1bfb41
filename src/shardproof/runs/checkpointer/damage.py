"""Damaged bytes of a run: which errors mean damage, and which steps have chunks in the bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardproof.engine.format import Manifest
from shardproof.engine.planning import ChunkTable
from shardproof.errors import CorruptChunkError, ShardproofError, StorageError


def is_damage(error: ShardproofError) -> bool:
    """True if stored bytes are lost or changed; False if the storage cannot read them at the moment."""
    if "damaged" in error.details:
        return bool(error.details["damaged"])
    if not isinstance(error, StorageError):
        return True
    return bool(error.details.get("missing")) or error.details.get("errno") in (None, "EIO")


@dataclass(frozen=True, slots=True)
class Damage:
    """A byte range of a shard file whose bytes are lost or changed.

    Example:
        >>> str(Damage("step-00000001/shards/00000-a.safetensors", 64, 128))
        'bytes 64 to 128 of step-00000001/shards/00000-a.safetensors'
        >>> str(Damage("step-00000001/shards/00000-a.safetensors"))
        'step-00000001/shards/00000-a.safetensors'
    """

    file: str
    """Folder of the step, and name of the file in it."""
    start: int = 0
    stop: int | None = None
    """First byte after the range; None: the end of the file."""

    @staticmethod
    def of(error: ShardproofError, run: str, folder: str) -> Damage | None:
        """The range that an error names; None if it names no shard file.

        Args:
            error: raised by a read of a step. A `CorruptChunkError` names the bytes, another error the file.
            run: location of the run.
            folder: folder of the step.
        """
        file = error.details.get("file")
        if not isinstance(file, str):
            return None
        if os.path.isabs(file):
            file = os.path.relpath(file, run)
        elif file.startswith("shards/"):
            file = f"{folder}/{file}"
        if "/shards/" not in file:
            return None
        if not isinstance(error, CorruptChunkError):
            return Damage(file)
        start = error.details["byte_start"]
        return Damage(file, start, start + error.details["byte_count"])

    def is_in(self, folder: str, manifest: Manifest, table: ChunkTable) -> bool:
        """True if a step has a chunk, with at least one byte, in the range.

        Args:
            folder: folder of the step.
            manifest: manifest of the step.
            table: chunks of the step.
        """
        for row, record in enumerate(manifest.files):
            if f"{record.folder or folder}/{record.name}" == self.file:
                ends = table.byte_start + table.byte_count
                found = (table.file == row) & (table.byte_count > 0) & (ends > self.start)
                if self.stop is not None:
                    found &= table.byte_start < self.stop
                return bool(found.any())
        return False

    def __str__(self) -> str:
        return self.file if self.stop is None else f"bytes {self.start} to {self.stop} of {self.file}"
