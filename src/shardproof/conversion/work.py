"""The work of one process: writes units of a conversion, and verifies written ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardproof.conversion.mapped_source import HashedBox, MappedSource, box_digest
from shardproof.conversion.plan import ConversionPlan, plan_conversion
from shardproof.conversion.request import ConversionRequest
from shardproof.conversion.work_folder import UnitRecord, WorkFolder
from shardproof.errors import CorruptChunkError
from shardproof.interop import foreign_of
from shardproof.loading import Checkpoint, StoredTensor, open_storage

__all__ = ["Work"]


class Work:
    """A conversion as one process carries it out. It opens the source and plans at the first use.

    Args:
        request: what to do.
    """

    def __init__(self, request: ConversionRequest) -> None:
        self.request = request
        self.on_bytes: Callable[[int], None] = lambda count: None
        """Called with the bytes that were read since the last call."""
        self.folder = WorkFolder(request.destination)
        self.checkpoint = open_storage(
            foreign_of(request.source),
            format=request.format,
            trust_pickle=request.trust_pickle,
            warn=False,
        )
        self.plan: ConversionPlan = plan_conversion(self.checkpoint, request)
        self._written: Checkpoint | None = None

    def close(self) -> None:
        """Closes the files that reading opened."""
        self.checkpoint.close()
        if self._written is not None:
            self._written.close()

    def write(self, unit: int) -> UnitRecord:
        """Writes a unit and publishes its record.

        Raises:
            ShardproofError: the source is damaged, or the destination fails.
        """
        item = self.plan.writer.units[unit]
        source = _Counted(self.checkpoint, self.plan, self.on_bytes)
        written = self.plan.writer.write(item, source, self.folder.files)
        record = UnitRecord(item.name, written, source.take_boxes(), item.nbytes)
        self.folder.add(record)
        return record

    def verify(self, boxes: Sequence[HashedBox]) -> int:
        """Reads boxes of the written checkpoint and compares their digests.

        Returns:
            The bytes that were compared.

        Raises:
            CorruptChunkError: the bytes are not those that were written.
            ShardproofError: the written checkpoint cannot be read.
        """
        if self._written is None:
            self._written = open_storage(
                self.folder.files, trust_pickle=self.request.trust_pickle, warn=False
            )
        done = 0
        for box in boxes:
            stored = self._written[box.key]
            assert isinstance(stored, StoredTensor)
            sizes = zip(box.offsets, box.sizes, strict=True)
            values = stored[tuple(slice(at, at + size) for at, size in sizes)].contiguous()
            if (found := box_digest(values)) != box.digest:
                raise CorruptChunkError(
                    f"{self.folder.files.location}: the box of {box.key!r} at {list(box.offsets)}, sizes "
                    f"{list(box.sizes)}, has digest {found}, expected {box.digest}: it was not stored as it "
                    "was written. Nothing was published: check the disk, remove the folder, convert again",
                    key=box.key,
                )
            done += values.nbytes
            self.on_bytes(values.nbytes)
        return done


class _Counted(MappedSource):
    """A source that reports the bytes that it gives."""

    def __init__(self, checkpoint: Checkpoint, plan: ConversionPlan, on_bytes: Callable[[int], None]) -> None:
        super().__init__(checkpoint, plan.tensors)
        self._on_bytes = on_bytes

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        values = super().read(key, offsets, sizes)
        self._on_bytes(values.nbytes)
        return values
