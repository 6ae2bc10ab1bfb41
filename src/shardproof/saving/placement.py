"""Positions of a plan's chunks after a save: in the files that the ranks wrote, or in files of the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardproof.errors import StructureError
from shardproof.format import FileRecord, Manifest
from shardproof.geometry import row_pointers
from shardproof.planning import ChunkTable, WritePlan, chunk_table
from shardproof.saving.incremental import Base, with_folders
from shardproof.saving.messages import WriteReport, unpack_rows

__all__ = ["Placement", "place_chunks"]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The file and byte of each chunk of a plan, in the order of the plan."""

    writers: tuple[int, ...]
    """Ranks that wrote a file, ascending. Their files are the first rows of the new file table."""
    referenced: tuple[FileRecord, ...]
    """Files of other steps, which are the following rows."""
    file: NDArray[np.int64]
    """(n,) row of the new file table."""
    byte_start: NDArray[np.int64]
    """(n,) first byte in the file."""
    digest: NDArray[np.uint64]
    """(n, 2) digest of the bytes."""

    def as_base(self, manifest: Manifest, folder: str, seal: bytes) -> Base:
        """Converts the committed step to the base of the next save by the same plan."""
        files = with_folders(manifest.files, folder)
        return Base(folder, seal, files, self.file, self.byte_start, self.digest)

    def table(self, plan: WritePlan) -> ChunkTable:
        """The chunk table of the new index."""
        row_of = np.cumsum(plan.is_stored) - 1  # in the manifest, of each merged tensor that is stored
        columns = self.file, self.byte_start, plan.byte_count, self.digest
        boxes = plan.boxes.start, plan.boxes.offsets, plan.boxes.sizes
        return chunk_table(row_of[plan.tensor], *columns, *boxes)


def place_chunks(plan: WritePlan, reports: Sequence[WriteReport], base: Base | None) -> Placement:
    """Finds each chunk in the files that the ranks report or in the base.

    Raises:
        StructureError: a rank reports chunks that were not planned for it. Or it left out a chunk that the
            base lacks or stores with other bytes.
    """
    planned = np.diff(plan.writer_start)
    for rank, report in enumerate(reports):
        count = int(planned[rank])
        if len(report.digests) != 16 * count or (report.rows and len(report.rows) != -(-count // 8)):
            raise StructureError(
                f"rank {rank} reports {len(report.digests) // 16} chunks, but {count} were planned for it; "
                "nothing was committed",
                rank=rank,
            )
    digest = np.frombuffer(b"".join([report.digests for report in reports]), np.uint64).reshape(-1, 2)
    wrote = np.ones(len(plan.tensor), bool)
    for rank, report in enumerate(reports):
        if report.rows:
            first = int(plan.writer_start[rank])
            wrote[first : first + int(planned[rank])] = unpack_rows(report.rows, int(planned[rank]))
    writers = tuple(rank for rank, report in enumerate(reports) if report.size)
    file = np.full(len(wrote), -1, np.int64)
    byte_start = np.zeros(len(wrote), np.int64)
    _place_written(plan, reports, writers, wrote, file, byte_start)
    referenced = _place_referenced(plan, base, digest, ~wrote, len(writers), file, byte_start)
    return Placement(writers, referenced, file, byte_start, digest)


def _place_written(
    plan: WritePlan,
    reports: Sequence[WriteReport],
    writers: Sequence[int],
    wrote: NDArray[np.bool_],
    file: NDArray[np.int64],
    byte_start: NDArray[np.int64],
) -> None:
    """Positions of written chunks, which are in the file of their rank without gaps, in plan order."""
    rank_of = np.repeat(np.arange(len(reports)), np.diff(plan.writer_start))
    file_of = np.full(len(reports), -1, np.int64)
    file_of[list(writers)] = np.arange(len(writers))
    data_start = np.array([report.data_start for report in reports], np.int64)
    starts = row_pointers(np.where(wrote, plan.byte_count, 0))
    before = starts[:-1] - starts[plan.writer_start[:-1]][rank_of]
    file[wrote] = file_of[rank_of[wrote]]
    byte_start[wrote] = (data_start[rank_of] + before)[wrote]
    if len(file) and (file[wrote] < 0).any():
        rank = int(rank_of[wrote][int((file[wrote] < 0).argmax())])
        raise StructureError(f"rank {rank} wrote chunks, but no file; nothing was committed", rank=rank)


def _place_referenced(
    plan: WritePlan,
    base: Base | None,
    digest: NDArray[np.uint64],
    unwritten: NDArray[np.bool_],
    first: int,
    file: NDArray[np.int64],
    byte_start: NDArray[np.int64],
) -> tuple[FileRecord, ...]:
    """Positions of unwritten chunks, which are in the base. Returns the files that store them."""
    rows = np.flatnonzero(unwritten)
    if not len(rows):
        return ()
    good = np.zeros(len(rows), bool)
    if base is not None:
        good = (base.file[rows] >= 0) & (base.digest[rows] == digest[rows]).all(axis=1)
    if base is None or not good.all():
        row = int(rows[int(good.argmin())])
        rank = int(np.searchsorted(plan.writer_start, row, side="right")) - 1
        key = plan.merged.keys[int(plan.tensor[row])]
        raise StructureError(
            f"rank {rank} did not write a chunk of {key!r}, but the base does not have it with the same "
            "bytes; nothing was committed",
            key=key,
            rank=rank,
        )
    used, at = np.unique(base.file[rows], return_inverse=True)
    file[rows] = first + at.reshape(-1)
    byte_start[rows] = base.byte_start[rows]
    return tuple(base.files[row] for row in used.tolist())
