"""The bytes that a save writes, protected from later writes of training.

Note "Why no torn value can be written". The writer reads the chunks of a rank from the first to the last,
part by part. A chunk is *live* while the writer would read it from the tensor's own memory. It is
*staged* once there is a copy to read, and *copied* once the writer has all of it. Only a live chunk can be
torn, and:

1. One lock covers each change from live to staged, and each read of a part. So the writer reads a part either
   before its chunk is staged, or from the copy.
2. Chunks of tensors that may change at any time are staged before `save` returns. Or `Capture` copies the
   tensors before the chunks are known.
3. Only an optimizer's step writes to the other tensors. Three events first stage all live chunks: a step of
   any optimizer that shares memory with them, a load into the state, and `fence`. They come before the first
   write, so the tensors still have the values of the save. If the ranks have not agreed on the chunks yet,
   these events wait for that, too.
4. Any other write to such a tensor fails the save. The save compares version counters and a sample of the
   memory with those at its start (see `WriteWatch`). It does so when the writer is done, and before a step,
   load or `fence` continues. Two kinds of writes are not detected. One is a write that torch does not count
   and that changes no sample. The other is an operation that still runs at the comparison, because torch
   counts it at its end.

Staging goes backwards from the last chunk, and the writer goes forwards from the first chunk, so each byte is
copied once. When the budget for copies is used up, the staging thread waits until the writer reaches the
chunk or frees copies. If the writer makes no progress for the deadline of a silent rank, the save fails, and
training continues.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from shardproof._utils.libc import address
from shardproof.engine.planning import RankPlan
from shardproof.engine.saving.background import Progress, Workers
from shardproof.engine.saving.staging import (
    SLOT_BYTES,
    DeviceCopies,
    SliceSource,
    Staged,
    StagingPool,
    copies_of,
)
from shardproof.engine.saving.write_watch import WriteWatch
from shardproof.engine.state import Collected, Piece, Stepped, canonical_json
from shardproof.errors import StorageError, StructureError

_UNFENCED_BYTES = 1 << 20
"""Largest size of unfenced tensors that a save copies before the ranks agree on a plan."""


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """The state of one rank at the start of a save."""

    pieces: Sequence[Piece]
    """In the order of the structure."""
    names: Sequence[str]
    """Names of the pieces' tensors, for messages."""
    objects: dict[str, bytes]
    """As JSON, by key."""
    copies: dict[torch.device, DeviceCopies]
    """Copies of the pieces' current values, by device."""
    watch: WriteWatch | None
    """Detects writes to the pieces; None: the caller waits, so no memory changes."""
    goes_ahead: bool
    """True if all unfenced memory is copied. Only fenced memory can change, so the caller may continue."""

    @staticmethod
    def of(collected: Collected, stepped: Sequence[Stepped], *, guarded: bool, goes_ahead: bool) -> Capture:
        """Records the collected state.

        Args:
            collected: collected state of this rank.
            stepped: the optimizers whose steps the fence delays.
            guarded: True if memory may change before the save is over.
            goes_ahead: True to copy the unfenced memory, if it is small.
        """
        pieces = [piece for entry in collected.tensors for piece in entry.pieces]
        watch = WriteWatch(pieces, stepped) if guarded else None
        goes_ahead = goes_ahead and _copy_unfenced(pieces, watch)
        encoded: dict[int, bytes] = {}  # a value that several keys share is encoded once
        for entry in collected.objects:
            if id(entry.value) not in encoded:
                encoded[id(entry.value)] = msgspec.json.encode(entry.value)
        return Capture(
            pieces,
            [entry.key for entry in collected.tensors for _ in entry.pieces],
            {entry.key: encoded[id(entry.value)] for entry in collected.objects},
            copies_of(piece.view for piece in pieces),
            watch,
            goes_ahead,
        )

    def object_digests(self) -> tuple[bytes, dict[str, bytes]]:
        """The fields `object_digests` and `orders` of `WriteReport`."""
        known: dict[int, tuple[bytes, bytes]] = {}
        for text in self.objects.values():
            if id(text) not in known:
                canonical = canonical_json(msgspec.json.decode(text))
                order = b"" if text == canonical else xxhash.xxh3_64_digest(text)
                known[id(text)] = xxhash.xxh3_128_digest(canonical), order
        found = {key: known[id(text)] for key, text in self.objects.items()}
        digests = b"".join([digest for digest, _ in found.values()])
        return digests, {key: order for key, (_, order) in found.items() if order}


def _copy_unfenced(pieces: list[Piece], watch: WriteWatch | None) -> bool:
    """Replaces unfenced pieces with copies; False if they are too large, or none is fenced."""
    if not watch:
        return False
    unfenced = [row for row in range(len(pieces)) if not watch.is_fenced(row)]
    if sum(pieces[row].view.nbytes for row in unfenced) > _UNFENCED_BYTES:
        return False
    try:
        for row in unfenced:
            piece = pieces[row]
            pieces[row] = Piece.of(piece.view.clone(), piece.offsets, piece.sizes)
    except torch.OutOfMemoryError:  # staging through host memory takes no device memory
        return False
    return True


_log = logging.getLogger("shardproof")
_POLL_SECONDS = 0.1
_BATCH_BYTES = 256 << 10
"""Bytes of small chunks to stage under one lock: taking the lock costs as much as copying 4 KiB."""
_DEVICE_BATCH_BYTES = 32 << 20
"""As `_BATCH_BYTES` for device memory: the host waits once for all copies of a batch. See
benchmarks/results/2026-11-26-gpu.md."""


class Snapshot:
    """The chunks that one rank writes in one save, in the order of its file.

    The save fails if the writer makes no progress for `patience` seconds while training waits for it. The
    thread of `allocator` allocates memory for the pool.
    """

    def __init__(
        self,
        capture: Capture,
        plan: RankPlan,
        pool: StagingPool,
        allocator: Workers,
        patience: float,
        progress: Progress,
    ) -> None:
        self.waited = 0.0
        """Seconds that training waited for copies."""
        self.staged_bytes = 0
        self._pool = pool
        self._allocator = allocator
        self._patience = patience
        self._progress = progress
        self._changed = pool.changed
        boxes = plan.box_offsets, plan.box_sizes
        columns = plan.piece, plan.piece_start, plan.byte_count, *boxes
        self._source = SliceSource(capture.pieces, *columns, capture.copies)
        self._live = _LiveChunks(self._source, pool, capture.names)
        self.byte_counts: Sequence[int] = self._source.byte_counts
        """Sizes of the chunks, in the order of the file."""
        self._watch = capture.watch
        self._staged: dict[int, Staged] = {}
        self._front = 0
        self._over = self._watch is None
        self._failure: BaseException | None = None

    def copy(self, row: int, start: int, count: int, to: int) -> None:
        """Copies `count` bytes of a chunk, from byte `start` on, to an address. The writer copies in order.

        Raises:
            StructureError: the memory of the tensor was freed.
            BaseException: the error with which the save failed.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            staged = self._staged.get(row)
            if staged is not None:
                ctypes.memmove(to, staged.address + start, count)
            else:
                ctypes.memmove(to, self._live.address_of(row) + start, count)
            if start + count == self.byte_counts[row]:
                self._front = row + 1
                if staged is not None:
                    del self._staged[row]
                    self._pool.give(staged)
                self._changed.notify_all()
        self._progress.advance()

    def copy_whole(self, rows: range, to: int) -> None:
        """Copies whole chunks to an address, one after the other without gaps.

        Raises:
            StructureError, BaseException: as `copy`.
        """
        counts, staged = self.byte_counts, self._staged
        with self._changed:
            if self._failure is not None:
                raise self._failure
            gathered = self._live.gathered(row for row in rows if row not in staged)
            for row in rows:
                copied = staged.pop(row, None) if staged else None
                if copied is None:
                    ctypes.memmove(to, gathered.get(row) or self._live.address_of(row), counts[row])
                else:
                    ctypes.memmove(to, copied.address, counts[row])
                    self._pool.give(copied)
                to += counts[row]
            self._front = rows.stop
            self._changed.notify_all()
        self._progress.advance()

    def stage_live(self, *, fenced: bool) -> None:
        """Stages all live chunks, those of fenced tensors only if `fenced`.

        On return, each is copied or staged, or the save has failed. The save thread reports the failure. So
        only an interrupt that comes during this call is raised here, and not one that ended the save before.
        """
        begun = time.monotonic()
        try:
            for rows in self._from_the_last(fenced):
                if not self._stage(rows):
                    break
            if fenced:
                self._check_watch()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        self.waited += time.monotonic() - begun

    def check_unchanged(self) -> None:
        """Checks that live chunks had the values of the save. Called when no chunk is live.

        Raises:
            StructureError: code that no fence delays wrote to the memory.
            BaseException: the error with which the save failed.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
        self._check_watch()

    def _check_watch(self) -> None:
        """Raises StructureError if code that no fence delays wrote to the memory."""
        with self._changed:
            watch, self._watch = self._watch, None
            piece = watch.changed_piece(self._source.copies) if watch else None
        if piece is not None:
            raise self._live.was_changed(piece)

    def fail(self, error: BaseException) -> None:
        """Makes the writer fail with this error, and ends the wait of staging threads."""
        with self._changed:
            if not self._over:
                self._failure, self._over = error, True
            self._changed.notify_all()

    def end(self) -> None:
        """Frees all copies and releases the state."""
        with self._changed:
            self._over = True
            for staged in self._staged.values():
                self._pool.give(staged)
            self._staged.clear()
            self._changed.notify_all()
        self._source.finish()
        self._watch = None

    def _from_the_last(self, fenced: bool) -> Iterator[list[int]]:
        """The chunks to stage, from the last to the first; small ones in batches."""
        watch, rows, size = self._watch, list[int](), 0
        most = _DEVICE_BATCH_BYTES if self._source.copies else _BATCH_BYTES
        for row in range(len(self.byte_counts) - 1, -1, -1):
            if fenced or watch is None or not watch.is_fenced(self._source.piece[row]):
                if rows and size + self.byte_counts[row] > most:
                    yield rows
                    rows, size = [], 0
                rows.append(row)
                size += self.byte_counts[row]
        if rows:
            yield rows

    def _stage(self, rows: Sequence[int]) -> bool:
        """Stages chunks, in order; False if the chunks before them are not live either."""
        with self._changed:
            try:
                return self._stage_each(rows)
            except BaseException as error:
                self.fail(error)  # before the writer can take a chunk whose copy failed
                raise

    def _stage_each(self, rows: Sequence[int]) -> bool:
        """As `_stage`. The caller holds `changed`."""
        try:
            for row in rows:
                if row >= self._front and not self._over and not self._try_to_stage(row):
                    self._wait_to_stage(row)
                if row < self._front or self._over:
                    return False
        finally:
            self._live.wait()  # before other threads may use them
        return True

    def _try_to_stage(self, row: int) -> bool:
        """Stages a live chunk if there is memory for it. The caller holds `changed`."""
        if row in self._staged:
            return True
        count = self.byte_counts[row]
        staged = self._pool.take(count)
        if staged is None:
            return False
        try:
            self._live.check(row)
            self._source.read(row, staged.address, wait=False, segment=staged.segment)
        except BaseException:
            self._pool.give(staged)
            raise
        self._staged[row] = staged
        self.staged_bytes += count
        return True

    def _wait_to_stage(self, row: int) -> None:
        """Waits until a chunk is not live, or the save has failed. The caller holds `changed`."""
        self._live.wait()
        live = sum(self.byte_counts[self._front : row + 1])
        staged = sum(self.byte_counts[other] for other in self._staged)
        size, largest = live + staged, max(self.byte_counts)
        self._allocator.submit(lambda: self._grow(size, largest))
        seen, since, waiting = -1, time.monotonic(), 0.0
        while row >= self._front and not self._over and not self._try_to_stage(row):
            if (moved := self._progress.count + self._pool.size) != seen:
                seen, since = moved, time.monotonic()
            elif time.monotonic() - since > self._patience:
                self._failure = StorageError(
                    f"the writer has made no progress for {self._patience:.0f} s while training waited "
                    "for it. The save fails, and training continues. Check that the storage responds"
                )
                self._over = True
                break
            begun = time.monotonic()
            self._changed.wait(_POLL_SECONDS)  # nothing is enqueued: `_try_to_stage` failed
            waiting += time.monotonic() - begun
        if waiting > 0.5 and self._pool.size >= self._pool.budget:
            _log.warning(
                "training waited %.1f s for the writer of a save, because host_memory_budget (%.2f GB) is "
                "used up",
                waiting,
                self._pool.budget / 1e9,
            )

    def _grow(self, size: int, largest: int) -> None:
        """Without more memory, training waits for the writer, so an error is only logged."""
        try:
            self._pool.grow(size, largest, lambda: not self._over)
        except Exception as error:
            _log.warning("there is no more memory for the copies of a save: %s", error)


class _LiveChunks:
    """The bytes of live chunks: in their tensors, or in copies that are gathered in scratch memory.

    Callers hold `changed` of the pool. `names` are those of the pieces' tensors.
    """

    def __init__(self, source: SliceSource, pool: StagingPool, names: Sequence[str]) -> None:
        self._source = source
        self._pool = pool
        self._names = names
        self._gathers = 0 in source.addresses
        self._row = -1
        """The chunk in the scratch memory of `address_of`."""
        self._scratch = 0

    def address_of(self, row: int) -> int:
        """The address of the bytes of one chunk."""
        self.check(row)
        if (there := self._source.addresses[row]) != 0:
            return there
        if self._row != row:
            self._scratch = self._scratch or address(self._pool.scratch(max(self._source.byte_counts)))
            self._source.read(row, self._scratch)
            self._row = row
        return self._scratch

    def gathered(self, rows: Iterable[int]) -> dict[int, int]:
        """Copies the chunks that have no address. Returns the addresses of the copies, by row."""
        live = [row for row in rows if self._source.addresses[row] == 0] if self._gathers else []
        if not live:
            return {}
        self._scratch, self._row = 0, -1
        slots = [-(-self._source.byte_counts[row] // SLOT_BYTES) * SLOT_BYTES for row in live]
        to = address(self._pool.scratch(max(1, sum(slots))))
        copies: dict[int, int] = {}
        try:
            for row, slot in zip(live, slots, strict=True):
                self.check(row)
                self._source.read(row, to, wait=False)
                copies[row] = to
                to += slot
        finally:
            self.wait()
        return copies

    def wait(self) -> None:
        """Waits for all copies. Raises StructureError if the memory of a tensor was freed before."""
        if freed := self._source.wait():
            raise self.was_changed(self._source.piece[freed[0]])

    def check(self, row: int) -> None:
        """Raises StructureError if the memory of a tensor was freed."""
        if not self._source.is_in_place(row):
            raise self.was_changed(self._source.piece[row])

    def was_changed(self, piece: int) -> StructureError:
        """The error of a piece whose memory other code wrote to or freed."""
        return StructureError(
            f"{self._names[piece]} was changed while it was being saved, and not by the step of an optimizer "
            "in the state. Nothing was committed. Call checkpointer.fence() before code that writes to "
            "parameters or optimizer state itself, or use snapshot='stage'",
            key=self._names[piece],
        )
