"""The bytes that a save writes, safe from what training does after the save began.

Note "Why no torn value can be written". The writer reads the chunks of a rank from the first to the last,
span by span. A chunk is *live* while it would be read from the tensor's own memory, *staged* when it would be
read from a copy, *copied* when the writer has all of it. Only a live chunk can be torn, and:

1. Turning a chunk from live to staged, and reading a span, both hold one lock. So a span is read wholly
   before its chunk is copied, or from the copy.
2. Chunks of tensors that may change at any time are staged before `save` returns, or the tensors are copied
   before it is known which chunks there are (see `Capture`).
3. Other tensors are those that only an optimizer's step writes. Before any optimizer that shares memory with
   them steps, before a load fills anything, and when the program says so (`fence`), all chunks that are
   still live are staged, and only then does the step, the load or the program go on. The tensors still hold
   the values of the save at that moment, for nothing wrote to them since. Where the ranks have not agreed
   yet on what is written, that is waited for first.
4. A write to such a tensor in another way fails the save. When the writer is done, and before any step, load
   or `fence` goes on, version counters and a sample of the memory are compared with those of the save (see
   `WriteWatch`). Only these writes do not show: one that torch does not count and that leaves all samples as
   they were, and one operation that is still running when they are compared, since torch counts it when it
   ends.

The copy is made from the last chunk backwards, the writer comes from the front: they meet, and each byte is
copied once. Where the budget for copies is used up, whoever stages waits for the writer to come nearer, or to
be done with copies made before; if it does neither for as long as a rank may be silent, the save is given up
and training goes on.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np

from shardproof.errors import StorageError, StructureError
from shardproof.planning import RankPlan
from shardproof.saving.background import Progress, Workers
from shardproof.saving.capture import Capture
from shardproof.saving.source import Source
from shardproof.saving.staging import Staged, StagingPool
from shardproof.storage import address

__all__ = ["Snapshot"]

_log = logging.getLogger("shardproof")
_LOOK = 0.1
_TOGETHER = 256 << 10
"""Bytes of small chunks that are staged while the lock is held: to take it costs as much as to copy 4 KiB."""


class Snapshot:
    """What one rank writes in one save: the chunks of its plan, in the order of its file.

    Args:
        capture: this rank's pieces, in the order that the plan speaks of.
        plan: the chunks.
        pool: for copies.
        toucher: the thread on which the pool grows.
        patience: seconds without progress of the writer after which the save is given up.
        progress: of the save.
    """

    def __init__(
        self,
        capture: Capture,
        plan: RankPlan,
        pool: StagingPool,
        toucher: Workers,
        patience: float,
        progress: Progress,
    ) -> None:
        self.waited = 0.0
        """Seconds that training waited for copies."""
        self.staged_bytes = 0
        self._names = capture.names
        self._pool = pool
        self._toucher = toucher
        self._patience = patience
        self._progress = progress
        self._changed = pool.changed
        boxes = plan.box_offsets, plan.box_sizes
        columns = plan.piece, plan.piece_start, plan.byte_count, *boxes
        self._source = Source(capture.pieces, *columns, capture.copies)
        self._count = self._source.byte_counts
        self._before = np.append(0, np.cumsum(plan.byte_count))
        self._watch = capture.watch
        self._copies = capture.copies
        self._staged: dict[int, Staged] = {}
        self._gathered = -1
        """The chunk that the writer gathered last."""
        self._scratch = 0
        self._front = 0
        self._over = self._watch is None
        self._failure: BaseException | None = None

    @property
    def byte_counts(self) -> Sequence[int]:
        """Of the chunks, in the order of the file."""
        return self._count

    def copy(self, row: int, start: int, count: int, to: int) -> None:
        """Copies a span of a chunk. Spans come in order, and each chunk's last span ends it.

        Args:
            row: the chunk.
            start: first byte of the span in the chunk.
            count: bytes.
            to: address.

        Raises:
            StructureError: the tensor's memory was given back.
            BaseException: what the save was given up for.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            staged = self._staged.get(row)
            if staged is not None:
                ctypes.memmove(to, staged.address + start, count)
            else:
                ctypes.memmove(to, self._live(row) + start, count)
            if start + count == self._count[row]:
                self._front = row + 1
                if staged is not None:
                    del self._staged[row]
                    self._pool.give(staged)
                self._changed.notify_all()
        self._progress.moved()

    def copy_whole(self, rows: range, to: int) -> None:
        """Copies chunks, each whole, one after the other.

        Args:
            rows: the chunks.
            to: address of the first; each next one follows without a gap.

        Raises:
            StructureError, BaseException: as `copy`.
        """
        counts, staged = self._count, self._staged
        with self._changed:
            if self._failure is not None:
                raise self._failure
            for row in rows:
                copied = staged.pop(row, None) if staged else None
                if copied is None:
                    ctypes.memmove(to, self._live(row), counts[row])
                else:
                    ctypes.memmove(to, copied.address, counts[row])
                    self._pool.give(copied)
                to += counts[row]
            self._front = rows.stop
            self._changed.notify_all()
        self._progress.moved()

    def secure(self, *, fenced: bool) -> None:
        """Returns when no chunk is read live any more: all are copied, staged, or the save was given up.

        Args:
            fenced: also those of fenced tensors; otherwise only the others.
        """
        begun = time.monotonic()
        try:
            for rows in self._from_the_last(fenced):
                if not self._stage(rows):
                    break
            if fenced:
                self.check_unchanged()
        except BaseException as error:
            self.give_up(error)
            if not isinstance(error, Exception):
                raise
        self.waited += time.monotonic() - begun

    def check_unchanged(self) -> None:
        """Checks that what was read live had the values of the save. Call it when nothing is live any more.

        Raises:
            StructureError: memory was written to by something that no fence stops.
            BaseException: what the save was given up for.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            watch, self._watch = self._watch, None
            piece = watch.changed_piece(self._copies) if watch else None
        if piece is not None:
            raise self._was_changed(piece)

    def give_up(self, error: BaseException) -> None:
        """Let the writer fail with this error, and whoever waits go on."""
        with self._changed:
            if not self._over:
                self._failure, self._over = error, True
            self._changed.notify_all()

    def end(self) -> None:
        """The save is over: nothing is read any more."""
        with self._changed:
            self._over = True
            for staged in self._staged.values():
                self._pool.give(staged)
            self._staged.clear()
            self._changed.notify_all()
        self._source.finish()
        self._watch = None

    def _from_the_last(self, fenced: bool) -> Iterator[list[int]]:
        """The chunks to stage, from the last to the first, small ones some together."""
        watch, rows, together = self._watch, list[int](), 0
        for row in range(len(self._count) - 1, -1, -1):
            if fenced or watch is None or not watch.is_fenced(self._source.piece[row]):
                if rows and together + self._count[row] > _TOGETHER:
                    yield rows
                    rows, together = [], 0
                rows.append(row)
                together += self._count[row]
        if rows:
            yield rows

    def _stage(self, rows: Sequence[int]) -> bool:
        """Stages chunks, one after the other; False when nothing before the last of them is live either."""
        with self._changed:
            for row in rows:
                if row >= self._front and not self._over and not self._try_to_stage(row):
                    self._wait_to_stage(row)
                if row < self._front or self._over:
                    return False
        return True

    def _try_to_stage(self, row: int) -> bool:
        """Stages a live chunk if there is memory for it. `changed` is held, as it is in `_wait_to_stage`."""
        if row in self._staged:
            return True
        count = self._count[row]
        staged = self._pool.take(count)
        if staged is None:
            return False
        try:
            self._check_memory(row)
            self._source.read(row, staged.address)
        except BaseException:
            self._pool.give(staged)
            raise
        self._staged[row] = staged
        self.staged_bytes += count
        return True

    def _wait_to_stage(self, row: int) -> None:
        """Returns when a chunk is staged, or live no more, or the save was given up."""
        self._ask_for_memory(row)
        seen, since, waiting = -1, time.monotonic(), 0.0
        while row >= self._front and not self._over and not self._try_to_stage(row):
            if (moved := self._progress.count + self._pool.size) != seen:
                seen, since = moved, time.monotonic()
            elif time.monotonic() - since > self._patience:
                self._failure = StorageError(
                    f"the writer has made no progress for {self._patience:.0f} s while training waited "
                    "for it: the save is given up, and training goes on. Look at the storage"
                )
                self._over = True
                break
            begun = time.monotonic()
            self._changed.wait(_LOOK)
            waiting += time.monotonic() - begun
        self._say(waiting)

    def _say(self, waiting: float) -> None:
        if waiting > 0.5 and self._pool.size >= self._pool.budget:
            _log.warning(
                "training waited %.1f s for a save to be written: host_memory_budget (%.2f GB) holds no more "
                "copies",
                waiting,
                self._pool.budget / 1e9,
            )

    def _ask_for_memory(self, row: int) -> None:
        """Lets the pool grow to what the chunks that are still live need."""
        live = int(self._before[row + 1] - self._before[self._front])
        staged = sum(self._count[other] for other in self._staged)
        size, largest = live + staged, max(self._count)
        self._toucher.submit(lambda: self._pool.grow(size, largest, lambda: not self._over))

    def _live(self, row: int) -> int:
        """Where the writer finds the bytes of a live chunk: in the tensor, or gathered from it."""
        self._check_memory(row)
        if (there := self._source.addresses[row]) != 0:
            return there
        if self._gathered != row:
            self._scratch = self._scratch or address(self._pool.scratch(max(self._count)))
            self._source.read(row, self._scratch)
            self._gathered = row
        return self._scratch

    def _check_memory(self, row: int) -> None:
        if not self._source.is_in_place(row):
            raise self._was_changed(self._source.piece[row])

    def _was_changed(self, piece: int) -> StructureError:
        return StructureError(
            f"{self._names[piece]} was changed while it was being saved, and not by the step of an optimizer "
            "in the state. Nothing was committed. Call checkpointer.fence() before code that writes to "
            "parameters or optimizer state itself, or use snapshot='stage'",
            key=self._names[piece],
        )
