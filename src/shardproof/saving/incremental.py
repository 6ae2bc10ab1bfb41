"""Incremental saves: a step refers to unchanged chunks of an earlier step, its base.

    manifest and index of the base --match_base--> Base --part--> BaseDigests of each rank

A planned chunk equals a chunk of the base if key, dtype, global shape, box and digest are equal. The new
index then refers to the file that stores its bytes: a file of the base, or one of an older step that the base
refers to. So a reader follows a reference once.

The coordinator gets the base from `BaseChoice`, a rank passes `BaseDigests` to its shard writer, and
`place_chunks` finds unwritten chunks in `Base`. The ranks cache the digests of the last step that they
committed, and the coordinator caches the positions of its chunks. While plan and step are unchanged, the next
save uses these caches. Otherwise the coordinator reads the index of the base and sends each rank the digests
of its chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.format import (
    FileRecord,
    Manifest,
    chain_length,
    has_no_references,
    read_index,
    read_manifest,
    read_seal,
    size_fault,
)
from shardproof.geometry import BoxTable, consecutive, row_major_strides, row_pointers
from shardproof.planning import ChunkTable, WritePlan
from shardproof.saving.messages import pack_rows, unpack_rows
from shardproof.storage import Storage

__all__ = [
    "Base",
    "BaseChoice",
    "BaseDigests",
    "CachedBase",
    "FindBase",
    "match_base",
    "no_base",
    "with_folders",
]

FindBase = Callable[[], Storage | None]
"""Finds the base, in a sibling folder of the new step; None: there is no base."""

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True, eq=False)
class CachedBase:
    """The coordinator's cache of the last save."""

    attempt: str
    """Attempt of the last save. A rank that reports it has the digests of its chunks cached."""
    base: Base


class BaseChoice:
    """The base of one save, which `find` finds. Without `find`, all chunks are written.

    Note "Chains end": a step that refers to its base shares bytes with it, and damage to these bytes damages
    both. So when a chain has the length that the caller allows, the next save is written in full and starts a
    new chain. The attempt of each save contains the length of its chain, so the bound holds across restarts
    and does not depend on what retention removes. A save that replaces a step without references is written
    in full, too: references must not replace an independent copy.
    """

    def __init__(self, storage: Storage, find: FindBase | None, cached: CachedBase | None) -> None:
        self.base: Base | None = None
        """The planned chunks in the base, once `use_cached` or `look_up` has found them."""
        self._storage = storage
        self._cached = cached
        self._found = find() if find is not None else None
        self.length = 0
        """Saves since the last full save, including this one; see `bound_chain`."""

    @property
    def folder(self) -> str:
        """Folder of the base; empty without a base."""
        return self._found.folder if self._found is not None else ""

    def use_cached(self, attempts: Sequence[str]) -> bool:
        """Uses the cached base, if the step and the caches of all ranks still match it.

        `attempts` are those whose digests the ranks have cached.

        Raises:
            StorageError: the storage failed.
        """
        if (
            self._found is None
            or self._cached is None
            or any(one != self._cached.attempt for one in attempts)
        ):
            return False
        base = self._cached.base
        if base.folder != self.folder or base.seal != read_seal(self._found) or self._lost(base):
            return False
        self.base = base
        return True

    def bound_chain(self, full_every: int | None) -> None:
        """Drops the base if the save has to be written in full (note "Chains end").

        At least one of `full_every` saves in a row is written in full; None: no bound.

        Raises:
            StorageError: the storage failed.
        """
        if self._found is None:
            return
        before = self._length_before(self._found)
        self.length = 1 if before is None else before + 1
        is_due = full_every is not None and (before is None or self.length >= full_every)
        if is_due or has_no_references(self._storage):
            self._found = self.base = None

    def _length_before(self, found: Storage) -> int | None:
        """Length of the chain that ends with the base; None if it is unknown."""
        if self.base is not None:
            assert self._cached is not None
            has_references = any(record.folder != found.folder for record in self.base.files)
            return chain_length(self._cached.attempt) if has_references else 0
        try:
            manifest = read_manifest(found)
        except (FormatError, NotCommittedError):
            return 0  # `look_up` finds no chunks there
        return chain_length(manifest.attempt) if manifest.referenced_files else 0

    def look_up(self, plan: WritePlan) -> Base:
        """Finds the planned chunks in the base; a base that cannot be read stores none of them."""
        assert self._found is not None
        try:
            manifest, seal = read_manifest(self._found), read_seal(self._found) or b""
            found = match_base(plan, manifest, read_index(self._found, manifest), self.folder, seal)
            self.base = found.without(self._lost(found), self._storage.folder)
        except (FormatError, NotCommittedError, StorageError) as error:
            _log.warning(
                "%s: all chunks are written, because the base cannot be read: %s",
                self._storage.location,
                error,
            )
            self.base = no_base(plan, self.folder)
        return self.base

    def _lost(self, base: Base) -> list[int]:
        """Rows of the base's files whose size differs from the recorded one."""
        return [
            row
            for row, record in enumerate(base.files)
            if size_fault(self._storage.sibling(record.folder), record.name, record.size) is not None
        ]


@dataclass(frozen=True, slots=True, eq=False)
class BaseDigests:
    """The base's digests of one rank's planned chunks, in the order of the plan."""

    known: NDArray[np.bool_]
    """(n,) True if the base stores the chunk."""
    digest: NDArray[np.uint64]
    """(n, 2) high and low half; 0 if the base does not store the chunk."""

    @staticmethod
    def of(digest: NDArray[np.uint64]) -> BaseDigests:
        """Digests of a base that stores all chunks."""
        return BaseDigests(np.ones(len(digest), bool), digest)

    def encode(self) -> bytes:
        """16 bytes for each chunk of the base, and one bit for each planned chunk."""
        wire = (len(self.known), pack_rows(self.known), self.digest[self.known].tobytes())
        return msgspec.msgpack.encode(wire)

    @staticmethod
    def decode(data: bytes) -> BaseDigests:
        """Inverse of `encode`."""
        count, rows, digests = msgspec.msgpack.decode(data, type=tuple[int, bytes, bytes])
        known = unpack_rows(rows, count)
        digest = np.zeros((count, 2), np.uint64)
        digest[known] = np.frombuffer(digests, np.uint64).reshape(-1, 2)
        return BaseDigests(known, digest)


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """Positions of a plan's chunks in the base: one row per chunk, in the order of the plan."""

    folder: str
    """The base's folder, a sibling of the new step's folder."""
    seal: bytes
    """Seal of the base, from `shardproof.format.read_seal`."""
    files: tuple[FileRecord, ...]
    """The base's files, each with its folder."""
    file: NDArray[np.int64]
    """(n,) row of `files`; -1 if the base does not store the chunk."""
    byte_start: NDArray[np.int64]
    """(n,) first byte in the file."""
    digest: NDArray[np.uint64]
    """(n, 2) digest of the bytes."""

    def part(self, plan: WritePlan, rank: int) -> BaseDigests:
        """The digests for one rank."""
        rows = slice(int(plan.writer_start[rank]), int(plan.writer_start[rank + 1]))
        known = self.file[rows] >= 0
        return BaseDigests(known, np.where(known[:, None], self.digest[rows], np.uint64(0)))

    def without(self, lost: Sequence[int], folder: str) -> Base:
        """This base without the chunks in `lost` rows of `files`, and in `folder`, that of the new step.

        A step does not refer to itself.
        """
        bad = np.zeros(len(self.files) + 1, bool)
        bad[list(lost)] = True
        bad[[row for row, record in enumerate(self.files) if record.folder == folder]] = True
        file = np.where(bad[self.file], -1, self.file)  # -1 is the last row, which is never bad
        return Base(self.folder, self.seal, self.files, file, self.byte_start, self.digest)


def match_base(plan: WritePlan, manifest: Manifest, table: ChunkTable, folder: str, seal: bytes) -> Base:
    """Finds the chunks of a plan in an earlier step, whose seal `shardproof.format.read_seal` returned."""
    merged = plan.merged
    row_of = {(record.key, record.dtype, record.shape): row for row, record in enumerate(manifest.tensors)}
    described = zip(merged.keys, merged.dtypes, map(tuple, merged.shapes), strict=True)
    tensor_in_base = np.array([row_of.get(what, -1) for what in described], np.int64)[plan.tensor]
    old = _TensorBoxes(table.tensor, table.boxes)
    new = _TensorBoxes(tensor_in_base, plan.boxes)
    same = _find(old, new, [record.shape for record in manifest.tensors])
    found = same >= 0
    file = np.full(len(same), -1, np.int64)
    file[found] = table.file[same[found]]
    byte_start, digest = np.zeros(len(same), np.int64), np.zeros((len(same), 2), np.uint64)
    byte_start[found], digest[found] = table.byte_start[same[found]], table.digest[same[found]]
    return Base(folder, seal, with_folders(manifest.files, folder), file, byte_start, digest)


def no_base(plan: WritePlan, folder: str) -> Base:
    """A base that stores no chunk of the plan."""
    count = len(plan.tensor)
    zeros = np.zeros(count, np.int64)
    return Base(folder, b"", (), zeros - 1, zeros, np.zeros((count, 2), np.uint64))


def with_folders(files: Sequence[FileRecord], folder: str) -> tuple[FileRecord, ...]:
    """The files of a step's manifest, each with its folder: `folder` for the step's own."""
    return tuple(msgspec.structs.replace(record, folder=record.folder or folder) for record in files)


@dataclass(frozen=True, slots=True, eq=False)
class _TensorBoxes:
    """Boxes of tensors, one a row; a row with tensor -1 matches no row."""

    tensor: NDArray[np.int64]
    boxes: BoxTable

    def first_elements(self, shapes: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
        """(n,) flat index of each box's first element in the row-major order of its tensor."""
        strides = [np.array(row_major_strides(shape), np.int64) for shape in shapes]
        first_stride = row_pointers([len(shape) for shape in shapes])
        flat = np.concatenate([*strides, np.zeros(0, np.int64)])
        known = self.tensor >= 0
        first, ndim = first_stride[self.tensor[known]], self.boxes.ndim
        products = np.zeros(len(self.boxes.offsets), np.int64)
        at = consecutive(self.boxes.start[:-1][known], ndim[known])
        products[at] = self.boxes.offsets[at] * flat[consecutive(first, ndim[known])]
        return _sums(products, self.boxes.start)


def _sums(values: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n,) sum of each ragged row."""
    ends = row_pointers(values)
    sums: NDArray[np.int64] = ends[start[1:]] - ends[start[:-1]]
    return sums


def _find(old: _TensorBoxes, new: _TensorBoxes, shapes: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """(new rows,) the row of `old` with the same tensor and box; -1 if there is none.

    Boxes that tile a tensor differ in their first element. So both are sorted by tensor and first element.
    Only the old box before a new one can equal it, and the two are compared as a whole. Rows of `old` that do
    not tile may hide each other, but never match wrongly.
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
    a, b = old.boxes.take(candidate[rows]), new.boxes.take(rows)  # of one tensor each, so of equal dimensions
    differs = (a.offsets != b.offsets) | (a.sizes != b.sizes)
    rows = rows[_sums(differs.astype(np.int64), b.start) == 0]
    found = np.full(len(new.tensor), -1, np.int64)
    found[rows] = candidate[rows]
    return found
