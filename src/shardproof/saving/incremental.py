"""Chunks that have not changed since an earlier committed step, the base, and so are not written again.

    base's manifest and index --match_base--> Base --part--> BaseDigests of each rank
    digests and bit masks of all ranks, Base --place--> Placed: what the new index says

A chunk of the plan is the same as one of the base when key, dtype, global shape, box and digest are. Then the
new index refers to the file that holds its bytes: the base's own, or one of an older step that the base
refers to itself. So a reference is never followed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.errors import StructureError
from shardproof.format import FileRecord, Manifest
from shardproof.planning import ChunkTable, WritePlan

__all__ = [
    "Base",
    "BaseDigests",
    "Placed",
    "Written",
    "base_after",
    "match_base",
    "no_base",
    "pack_rows",
    "place",
]


class Written(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says it wrote. Without a file, `size` is 0, and so is `data_start`."""

    size: int
    data_start: int
    digest: str
    digests: bytes
    """(n, 2) uint64 of the planned chunks, in the order of the plan, written or not."""
    objects: dict[str, bytes]
    """The objects that this rank stores, as JSON."""
    object_keys: tuple[str, ...]
    """Keys of all objects that this rank has."""
    object_digests: bytes
    """16 bytes for each of `object_keys`."""
    rows: bytes = b""
    """`pack_rows` of the planned chunks that the file holds; empty: all of them."""
    replicas: bytes = b""
    """Digests of the replicas that this rank was to compare."""
    seconds: float = 0.0
    """From the begin of writing to this post."""


@dataclass(frozen=True, slots=True, eq=False)
class BaseDigests:
    """What one rank is told of the base: digests of its planned chunks there."""

    known: NDArray[np.bool_]
    """(n,) whether the base has the chunk at all."""
    digest: NDArray[np.uint64]
    """(n, 2) high and low half; 0 where it has not."""

    @staticmethod
    def of(digest: NDArray[np.uint64]) -> BaseDigests:
        """Of a base that has all chunks."""
        return BaseDigests(np.ones(len(digest), bool), digest)

    def encode(self) -> bytes:
        """16 bytes for each chunk that the base has and one bit for each that is planned."""
        wire = (len(self.known), pack_rows(self.known), self.digest[self.known].tobytes())
        return msgspec.msgpack.encode(wire)

    @staticmethod
    def decode(data: bytes) -> BaseDigests:
        """What `encode` encoded."""
        count, rows, digests = msgspec.msgpack.decode(data, type=tuple[int, bytes, bytes])
        known = _unpack_rows(rows, count)
        digest = np.zeros((count, 2), np.uint64)
        digest[known] = np.frombuffer(digests, np.uint64).reshape(-1, 2)
        return BaseDigests(known, digest)


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """Where the base has the chunks of a plan: one row for each, in the order of the plan."""

    folder: str
    """The base's folder, beside that of the new step."""
    seal: bytes
    """`shardproof.format.seal_of` the base."""
    files: tuple[FileRecord, ...]
    """The base's files, each with its folder."""
    file: NDArray[np.int64]
    """(n,) row of `files`; -1 where the base does not have the chunk."""
    byte_start: NDArray[np.int64]
    """(n,) first byte in the file."""
    digest: NDArray[np.uint64]
    """(n, 2) of the bytes."""

    def part(self, plan: WritePlan, rank: int) -> BaseDigests:
        """What this rank needs to know."""
        rows = slice(int(plan.writer_start[rank]), int(plan.writer_start[rank + 1]))
        known = self.file[rows] >= 0
        return BaseDigests(known, np.where(known[:, None], self.digest[rows], np.uint64(0)))

    def without(self, lost: Sequence[int], folder: str) -> Base:
        """This base without the chunks in some files, and without those in one folder.

        Args:
            lost: rows of `files`.
            folder: of the new step: a step does not refer to itself, whatever was saved there before.
        """
        bad = np.zeros(len(self.files) + 1, bool)
        bad[list(lost)] = True
        bad[[row for row, record in enumerate(self.files) if record.folder == folder]] = True
        file = np.where(bad[self.file], -1, self.file)  # -1 is the last row, which is never bad
        return Base(self.folder, self.seal, self.files, file, self.byte_start, self.digest)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where all chunks of a plan are after the save, in the order of the plan."""

    writers: tuple[int, ...]
    """Ranks that wrote a file, ascending: the first rows of the new file table."""
    borrowed: tuple[FileRecord, ...]
    """Files of other steps: the rows after them."""
    file: NDArray[np.int64]
    """(n,) row of the new file table."""
    byte_start: NDArray[np.int64]
    """(n,) first byte in the file."""
    digest: NDArray[np.uint64]
    """(n, 2) of the bytes."""


def pack_rows(chosen: NDArray[np.bool_]) -> bytes:
    r"""One bit for each row, the first in the lowest bit of the first byte.

    >>> pack_rows(np.array([True, False, True]))
    b'\x05'
    """
    return np.packbits(chosen, bitorder="little").tobytes()


def _unpack_rows(rows: bytes, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(rows, np.uint8), count=count, bitorder="little").astype(bool)


def match_base(plan: WritePlan, manifest: Manifest, table: ChunkTable, folder: str, seal: bytes) -> Base:
    """Finds the chunks of a plan in an earlier step.

    Args:
        plan: of the new save, n chunks.
        manifest: of the earlier step.
        table: its chunks.
        folder: its folder.
        seal: `shardproof.format.seal_of` it.
    """
    merged = plan.merged
    row_of = {(record.key, record.dtype, record.shape): row for row, record in enumerate(manifest.tensors)}
    described = zip(merged.keys, merged.dtypes, map(tuple, merged.shapes), strict=True)
    tensor_in_base = np.array([row_of.get(what, -1) for what in described], np.int64)[plan.tensor]
    shapes = [record.shape for record in manifest.tensors]
    same = _find(
        _Rows(table.tensor, table.box_start, table.box_offsets, table.box_sizes),
        _Rows(tensor_in_base, plan.box_start, plan.box_offsets, plan.box_sizes),
        shapes,
    )
    found = same >= 0
    file = np.full(len(same), -1, np.int64)
    file[found] = table.file[same[found]]
    byte_start, digest = np.zeros(len(same), np.int64), np.zeros((len(same), 2), np.uint64)
    byte_start[found], digest[found] = table.byte_start[same[found]], table.digest[same[found]]
    return Base(folder, seal, _lendable(manifest.files, folder), file, byte_start, digest)


def base_after(placed: Placed, manifest: Manifest, folder: str, seal: bytes) -> Base:
    """The step that was just committed, as the base of the next save by the same plan."""
    files = _lendable(manifest.files, folder)
    return Base(folder, seal, files, placed.file, placed.byte_start, placed.digest)


def no_base(plan: WritePlan, folder: str) -> Base:
    """A base that has none of the chunks of a plan."""
    count = len(plan.tensor)
    zeros = np.zeros(count, np.int64)
    return Base(folder, b"", (), zeros - 1, zeros, np.zeros((count, 2), np.uint64))


def _lendable(files: Sequence[FileRecord], folder: str) -> tuple[FileRecord, ...]:
    return tuple(msgspec.structs.replace(record, folder=record.folder or folder) for record in files)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Boxes of tensors, one a row; the tensor is -1 where the row is to match nothing."""

    tensor: NDArray[np.int64]
    box_start: NDArray[np.int64]
    box_offsets: NDArray[np.int64]
    box_sizes: NDArray[np.int64]

    def first_elements(self, shapes: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
        """(n,) place of each box's first element in the row-major order of its tensor."""
        strides = [np.array(_strides(shape), np.int64) for shape in shapes]
        ndim = np.array([len(shape) for shape in shapes] + [0], np.int64)
        first = np.append(0, np.cumsum(ndim[:-1]))
        flat = np.concatenate([*strides, np.zeros(0, np.int64)])
        of_box = np.diff(self.box_start)
        known = self.tensor >= 0
        dims = np.repeat(known, of_box)
        tensor = np.repeat(self.tensor, of_box)[dims]
        within = np.arange(len(self.box_offsets)) - np.repeat(self.box_start[:-1], of_box)
        products = np.zeros(len(self.box_offsets) + 1, np.int64)
        products[:-1][dims] = self.box_offsets[dims] * flat[first[tensor] + within[dims]]
        ends = np.append(0, np.cumsum(products[:-1]))
        result: NDArray[np.int64] = ends[self.box_start[1:]] - ends[self.box_start[:-1]]
        return result


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


def _find(old: _Rows, new: _Rows, shapes: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """(new rows,) the row of `old` with the same tensor and box; -1 where there is none.

    Boxes that tile a tensor differ in their first element. So both are sorted by tensor and first element;
    the old box before each new one is the only one that can be the same, and is compared whole. Rows of
    `old` that do not tile may hide each other, and never match wrongly.
    """
    count = len(old.tensor)
    tensor = np.concatenate([old.tensor, new.tensor])
    first = np.concatenate([old.first_elements(shapes), new.first_elements(shapes)])
    order = np.lexsort((first, tensor))  # stable: an old row comes before the new one that equals it
    is_old = order < count
    last_old = np.maximum.accumulate(np.where(is_old, np.arange(len(order)), -1))
    candidate = np.full(len(new.tensor), -1, np.int64)
    at = np.flatnonzero(~is_old & (last_old >= 0))
    candidate[order[at] - count] = order[last_old[at]]
    rows = np.flatnonzero((candidate >= 0) & (new.tensor >= 0))
    rows = rows[old.tensor[candidate[rows]] == new.tensor[rows]]
    rows = rows[_same_boxes(old, candidate[rows], new, rows)]
    found = np.full(len(new.tensor), -1, np.int64)
    found[rows] = candidate[rows]
    return found


def _same_boxes(old: _Rows, a: NDArray[np.int64], new: _Rows, b: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(pairs,) whether the boxes of row a[i] of `old` and row b[i] of `new` are equal; of one tensor each."""
    ndim = (new.box_start[1:] - new.box_start[:-1])[b]
    ends = np.cumsum(ndim)
    within = np.arange(int(ndim.sum())) - np.repeat(ends - ndim, ndim)
    at_old = np.repeat(old.box_start[a], ndim) + within
    at_new = np.repeat(new.box_start[b], ndim) + within
    differs = (old.box_offsets[at_old] != new.box_offsets[at_new]) | (
        old.box_sizes[at_old] != new.box_sizes[at_new]
    )
    before = np.append(0, np.cumsum(differs))
    result: NDArray[np.bool_] = before[ends] == before[ends - ndim]
    return result


def place(plan: WritePlan, written: Sequence[Written], base: Base | None) -> Placed:
    """Where each chunk is, from what the ranks wrote and what the base has.

    Raises:
        StructureError: a rank did not write a chunk that the base does not have with the same bytes; or it
            speaks of other chunks than those that were planned.
    """
    planned = np.diff(plan.writer_start)
    for rank, part in enumerate(written):
        count = int(planned[rank])
        if len(part.digests) != 16 * count or (part.rows and len(part.rows) != -(-count // 8)):
            raise StructureError(
                f"rank {rank} speaks of {len(part.digests) // 16} chunks, but {count} were planned for it; "
                "nothing was committed",
                rank=rank,
            )
    digest = np.frombuffer(b"".join([part.digests for part in written]), np.uint64).reshape(-1, 2)
    wrote = np.ones(len(plan.tensor), bool)
    for rank, part in enumerate(written):
        if part.rows:
            first = int(plan.writer_start[rank])
            wrote[first : first + int(planned[rank])] = _unpack_rows(part.rows, int(planned[rank]))
    writers = tuple(rank for rank, part in enumerate(written) if part.size)
    file = np.full(len(wrote), -1, np.int64)
    byte_start = np.zeros(len(wrote), np.int64)
    _place_written(plan, written, writers, wrote, file, byte_start)
    borrowed = _place_borrowed(plan, base, digest, ~wrote, len(writers), file, byte_start)
    return Placed(writers, borrowed, file, byte_start, digest)


def _place_written(
    plan: WritePlan,
    written: Sequence[Written],
    writers: Sequence[int],
    wrote: NDArray[np.bool_],
    file: NDArray[np.int64],
    byte_start: NDArray[np.int64],
) -> None:
    """Chunks that were written lie in the file of their rank without gaps, in the order of the plan."""
    rank_of = np.repeat(np.arange(len(written)), np.diff(plan.writer_start))
    file_of = np.full(len(written), -1, np.int64)
    file_of[list(writers)] = np.arange(len(writers))
    data_start = np.array([part.data_start for part in written], np.int64)
    ends = np.append(0, np.cumsum(np.where(wrote, plan.byte_count, 0)))
    before = ends[:-1] - ends[plan.writer_start[:-1]][rank_of]
    file[wrote] = file_of[rank_of[wrote]]
    byte_start[wrote] = (data_start[rank_of] + before)[wrote]
    if len(file) and (file[wrote] < 0).any():
        rank = int(rank_of[wrote][int((file[wrote] < 0).argmax())])
        raise StructureError(f"rank {rank} wrote chunks, but no file; nothing was committed", rank=rank)


def _place_borrowed(
    plan: WritePlan,
    base: Base | None,
    digest: NDArray[np.uint64],
    unwritten: NDArray[np.bool_],
    first: int,
    file: NDArray[np.int64],
    byte_start: NDArray[np.int64],
) -> tuple[FileRecord, ...]:
    """Chunks that were not written lie where the base has them; the files that they lie in."""
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
            f"rank {rank} did not write a chunk of {key!r} that no earlier step has with the same bytes; "
            "nothing was committed",
            key=key,
            rank=rank,
        )
    used, at = np.unique(base.file[rows], return_inverse=True)
    file[rows] = first + at.reshape(-1)
    byte_start[rows] = base.byte_start[rows]
    return tuple(base.files[row] for row in used.tolist())
