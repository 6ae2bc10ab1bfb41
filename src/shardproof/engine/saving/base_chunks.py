"""The chunks that an earlier committed step, the base, already stores, and the shard file of the others.

    manifest and index of the base --match_base--> Base --part--> BaseDigests of each rank
    write reports --place_with_base--> Placement

A planned chunk equals a chunk of the base if key, dtype, global shape, box and digest are equal. The new
index then refers to the file that stores its bytes: a file of the base, or one of an older step that the base
refers to. So a reader follows a reference once.

The header of a shard file lists its chunks. `write_changed` copies and hashes a chunk that the base stores
before it knows whether the file needs the chunk. So it writes the header last, into reserved space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof._utils.libc import address
from shardproof.engine.format import (
    BLOCK_BYTES,
    ChunkHasher,
    FileRecord,
    Manifest,
    digests_as_bytes,
    digests_from_bytes,
    encode_chunks,
    file_digest,
    shard_tail,
    start_in_page,
)
from shardproof.engine.geometry import BoxTable, consecutive, row_major_strides, row_pointers
from shardproof.engine.planning import ChunkTable, WritePlan
from shardproof.engine.saving.commit import Committed, Placement, check_counts, place_written
from shardproof.engine.saving.messages import WriteReport, pack_rows, unpack_rows
from shardproof.engine.saving.shard_writer import Output, PreparedShard, ShardStream, WrittenShard
from shardproof.engine.saving.snapshot import Snapshot
from shardproof.engine.storage import ALIGNMENT
from shardproof.errors import StructureError

NAME = "incremental"
"""The name of the option, and of its posts."""

_PADDING_ENTRY = 128
"""Upper bound for the bytes of a padding entry in a header."""


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
    """Seal of the base, from `shardproof.engine.format.read_seal`."""
    files: tuple[FileRecord, ...]
    """The base's files, each with its folder."""
    file: NDArray[np.int64]
    """(n,) row of `files`; -1 if the base does not store the chunk."""
    byte_start: NDArray[np.int64]
    """(n,) first byte in the file."""
    digest: NDArray[np.uint64]
    """(n, 2) digest of the bytes."""

    @staticmethod
    def of(step: Committed, folder: str) -> Base:
        """The committed step of a folder, as the base of the next save by the same plan."""
        placed, files = step.placement, _with_folders(step.manifest.files, folder)
        return Base(folder, step.seal, files, placed.file, placed.byte_start, placed.digest)

    def part(self, plan: WritePlan, rank: int) -> BaseDigests:
        """The digests for one rank."""
        rows = slice(int(plan.writer_start[rank]), int(plan.writer_start[rank + 1]))
        known = self.file[rows] >= 0
        return BaseDigests(known, np.where(known[:, None], self.digest[rows], np.uint64(0)))

    def without(self, lost: Sequence[int], folder: str) -> Base:
        """This base without the chunks of some files.

        Args:
            lost: rows of `files`.
            folder: folder of the new step. A step does not refer to itself.
        """
        bad = np.zeros(len(self.files) + 1, bool)
        bad[list(lost)] = True
        bad[[row for row, record in enumerate(self.files) if record.folder == folder]] = True
        file = np.where(bad[self.file], -1, self.file)  # -1 is the last row, which is never bad
        return Base(self.folder, self.seal, self.files, file, self.byte_start, self.digest)


def match_base(plan: WritePlan, manifest: Manifest, table: ChunkTable, folder: str, seal: bytes) -> Base:
    """Finds the chunks of a plan in an earlier step, whose seal `engine.format.read_seal` returned."""
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
    return Base(folder, seal, _with_folders(manifest.files, folder), file, byte_start, digest)


def no_base(plan: WritePlan, folder: str) -> Base:
    """A base that stores no chunk of the plan."""
    count = len(plan.tensor)
    zeros = np.zeros(count, np.int64)
    return Base(folder, b"", (), zeros - 1, zeros, np.zeros((count, 2), np.uint64))


def _with_folders(files: Sequence[FileRecord], folder: str) -> tuple[FileRecord, ...]:
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


def place_with_base(plan: WritePlan, reports: Sequence[WriteReport], base: Base | None) -> Placement:
    """Finds each chunk in the files that the ranks report, or in the base.

    Raises:
        StructureError: a rank reports chunks that were not planned for it. Or it left out a chunk that the
            base lacks or stores with other bytes.
    """
    check_counts(plan, reports)
    wrote = np.ones(len(plan.tensor), bool)
    for rank, report in enumerate(reports):
        first, end = int(plan.writer_start[rank]), int(plan.writer_start[rank + 1])
        if rows := report.options.get(NAME, b""):
            if len(rows) != -(-(end - first) // 8):
                raise StructureError(
                    f"rank {rank} reports {len(rows)} bytes of flags for {end - first} chunks; nothing was "
                    "committed",
                    rank=rank,
                )
            wrote[first:end] = unpack_rows(rows, end - first)
    placed, unwritten = place_written(plan, reports, wrote), np.flatnonzero(~wrote)
    if not len(unwritten):
        return placed
    good = np.zeros(len(unwritten), bool)
    if base is not None:
        good = (base.file[unwritten] >= 0) & (base.digest[unwritten] == placed.digest[unwritten]).all(axis=1)
    if base is None or not good.all():
        row = int(unwritten[int(good.argmin())])
        rank = int(np.searchsorted(plan.writer_start, row, side="right")) - 1
        key = plan.merged.keys[int(plan.tensor[row])]
        raise StructureError(
            f"rank {rank} did not write a chunk of {key!r}, but the base does not have it with the same "
            "bytes; nothing was committed",
            key=key,
            rank=rank,
        )
    used, at = np.unique(base.file[unwritten], return_inverse=True)
    placed.file[unwritten] = len(placed.writers) + at.reshape(-1)
    placed.byte_start[unwritten] = base.byte_start[unwritten]
    return replace(placed, referenced=tuple(base.files[row] for row in used.tolist()))


def write_changed(
    shard: PreparedShard,
    header: Callable[..., bytes],
    snapshot: Snapshot,
    base: BaseDigests,
    output: Output,
    scratch: Callable[[int], memoryview],
) -> tuple[WrittenShard, NDArray[np.bool_]]:
    """Writes the chunks that differ from the base; no file if no chunk differs and the rank has no objects.

    Returns the file, and (chunks,) True for the chunks that it stores. `base` has the digests of the chunks
    of `snapshot` in the base. `scratch` returns memory for one chunk.

    Raises:
        StorageError, StructureError: as `write_shard`.
    """
    # A header that lists only some of the chunks exceeds the header of all by at most one entry of padding.
    longest = len(header(shard.entries)) + _PADDING_ENTRY
    reserved = -(-longest // ALIGNMENT) * ALIGNMENT
    with ShardStream(output, start=reserved) as stream:
        changed = _ChangedChunks(shard, snapshot, base, stream)
        changed.write(scratch)
        written, digests = changed.written, digests_from_bytes(changed.digests)
        if not stream.is_open and not shard.plan.objects:
            return WrittenShard(0, 0, "", digests), written
        changed.open(len(written))
        entries = shard.entries
        if not written.all():
            chosen = written.tolist()
            columns = (shard.names, shard.codes, shard.shapes)
            names, codes, shapes = (list(compress(column, chosen)) for column in columns)
            entries = encode_chunks(names, codes, shapes, shard.plan.byte_count[written])  # type: ignore[arg-type]
        stream.put(shard_tail(entries.padding, stream.blocks, digests[written]))
        length = reserved + changed.spaces
        head = header(entries, size=length)
        if len(head) != length or not head.endswith(b" " * changed.spaces):
            raise AssertionError(f"the header takes {len(head)} bytes, {length} are reserved")
        size = stream.finish(head[:reserved])
    return WrittenShard(size, len(head), file_digest(head, digests[written]), digests), written


class _ChangedChunks:
    """Puts the chunks that differ from the base into a stream, in the order of the plan."""

    def __init__(
        self, shard: PreparedShard, snapshot: Snapshot, base: BaseDigests, stream: ShardStream
    ) -> None:
        pairs = zip(digests_as_bytes(base.digest), base.known.tolist(), strict=True)
        self._in_base = [digest if known else b"" for digest, known in pairs]
        self._byte_count = shard.plan.byte_count
        self._snapshot = snapshot
        self._stream = stream
        self.spaces = 0
        """Bytes of the header that the stream has: spaces before the first chunk."""
        self.digests: list[bytes] = []
        self.written = np.zeros(len(self._in_base), bool)

    def open(self, row: int) -> None:
        """Begins the file once. Its first chunk is `row`, and chunks begin at their place in a page."""
        if not self._stream.is_open:
            self.spaces = start_in_page(self._byte_count[row:])
            self._stream.open()
            self._stream.put(b" " * self.spaces)

    def write(self, scratch: Callable[[int], memoryview]) -> None:
        """Puts all changed chunks. `scratch` as in `write_changed`."""
        in_base, counts, row = self._in_base, self._snapshot.byte_counts, 0
        compared = [count for count, old in zip(counts, in_base, strict=True) if old]
        memory = scratch(max(compared, default=0))
        while row < len(in_base):
            if in_base[row]:
                self._put_if_changed(row, memory[: counts[row]])
                row += 1
                continue
            end = row + 1
            while end < len(in_base) and not in_base[end]:
                end += 1
            self.open(row)
            self.digests += self._stream.put_chunks(self._snapshot, range(row, end))
            self.written[row:end] = True
            row = end

    def _put_if_changed(self, row: int, memory: memoryview) -> None:
        """Copies a chunk once, and hashes the copy: later writes do not change it."""
        hasher, count, to = ChunkHasher(), len(memory), address(memory)
        for start in range(0, max(count, 1), BLOCK_BYTES):
            size = min(BLOCK_BYTES, count - start)
            self._snapshot.copy(row, start, size, to + start)
            hasher.update(memory[start : start + size])
        self.digests.append(hasher.digest())
        if self.digests[-1] == self._in_base[row]:
            self._stream.count(count)
            return
        self.open(row)
        self._stream.put(memory)
        self._stream.blocks += hasher.blocks()
        self.written[row] = True
