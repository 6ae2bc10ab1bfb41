"""The work of one process: writes units of a conversion, verifies written ones, and uploads files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import foreign_of
from shardproof.engine.loading import Checkpoint, open_storage
from shardproof.engine.state import register_by_name
from shardproof.errors import CorruptChunkError
from shardproof.formats.conversion.destination import BucketDestination
from shardproof.formats.conversion.mapped_source import Box, HashedBox, MappedSource, batches, box_digest
from shardproof.formats.conversion.plan import ConversionPlan, piece_bytes, plan_conversion
from shardproof.formats.conversion.request import ConversionRequest
from shardproof.formats.conversion.work_folder import UnitRecord, WorkFolder

_READS = 4
"""Reads in flight of a written checkpoint. It was written past the page cache, and a disk serves several
reads faster than one (benchmarks/interop.py)."""


class ConversionWork:
    """One process's part of a conversion. The constructor opens the source and plans.

    Args:
        request: what to do.

    Raises:
        StructureError: the destination is the name of a file, and does not fit the format or the plan.
    """

    def __init__(self, request: ConversionRequest) -> None:
        for name in request.register:
            register_by_name(name)
        self.request = request
        self.on_bytes: Callable[[int], None] = lambda count: None
        """Called with the bytes that were read since the last call."""
        self.folder = WorkFolder(request.destination, request.temporary)
        self.folder.destination.check_format(request.to)
        self.checkpoint = open_storage(
            foreign_of(request.source),
            format=request.format,
            trust_pickle=request.trust_pickle,
            warn=False,
        )
        self.plan: ConversionPlan = plan_conversion(self.checkpoint, request)
        self.folder.destination.check_files(len(self.plan.writer.units))
        self._written: Checkpoint | None = None
        self._memory: torch.Tensor | None = None
        """Memory for the boxes that are read again."""

    def close(self) -> None:
        """Closes the files that reading opened."""
        self.checkpoint.close()
        if self._written is not None:
            self._written.close()

    def write(self, unit: int) -> None:
        """Writes a unit and publishes its record.

        Raises:
            ShardproofError: the source is damaged, or the work folder fails or is not shared.
        """
        self.folder.check_is_shared()
        item = self.plan.writer.units[unit]
        source = MappedSource(
            self.checkpoint, self.plan.tensors, item.boxes, piece_bytes(self.request), self.on_bytes
        )
        written = self.plan.writer.write(item, source, self.folder.files)
        self.folder.add(UnitRecord(item.name, written, source.boxes, item.nbytes))

    def verify(self, boxes: Sequence[HashedBox]) -> int:
        """Reads boxes of the written checkpoint and compares their digests.

        Returns:
            The bytes that were compared.

        Raises:
            CorruptChunkError: the bytes are not those that were written.
            ShardproofError: the written checkpoint cannot be read, or the work folder is not shared.
        """
        if self._written is None:
            self.folder.check_is_shared()
            self._written = open_storage(
                self.folder.files, trust_pickle=self.request.trust_pickle, warn=False
            )
        written, done = self._written, 0

        def nbytes(box: Box) -> int:
            return prod(box[2]) * DTYPES[written.dtype(box[0])].itemsize

        if self._memory is None:
            self._memory = torch.empty(piece_bytes(self.request), dtype=torch.uint8, device="cpu")
        digests = {(box.key, box.offsets, box.sizes): box.digest for box in boxes if 0 not in box.sizes}
        for batch in batches(list(digests), nbytes, piece_bytes(self.request)):
            read = written.read_boxes(batch, threads=_READS, memory=self._memory)
            for box, values in zip(batch, read, strict=True):
                if (found := box_digest(values)) != digests[box]:
                    raise CorruptChunkError(
                        f"{self.folder.files.location}: the box of {box[0]!r} at {list(box[1])}, sizes "
                        f"{list(box[2])}, has digest {found}, expected {digests[box]}: it was not stored as "
                        "it was written. Nothing was published: check the disk and convert again",
                        key=box[0],
                    )
                done += values.nbytes
                self.on_bytes(values.nbytes)
        return done

    def upload(self, names: Sequence[str]) -> None:
        """Uploads files of the new checkpoint: a large one, or some small ones.

        Raises:
            ShardproofError: the destination fails or has other bytes, or the work folder is not shared.
        """
        self.folder.check_is_shared()
        destination = self.folder.destination
        assert isinstance(destination, BucketDestination)
        destination.upload(self.folder.files, names, self.on_bytes)
