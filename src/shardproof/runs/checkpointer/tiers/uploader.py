"""Uploads the committed steps of the first tier to the second, in a background thread of each rank.

    save or restore -> prepare (meet, once) -> a round in the background:
        plan (meet) -> copy (local) -> commit (meet) -> copy -> commit ... until no step waits

Note "Rounds": each commit and each restore begins one round on every rank, so the rounds of the ranks match.
In a round, rank 0 chooses the newest step that waits, until none does. The ranks meet at a rendezvous beside
that of the saves, so neither training nor a save waits for an upload.

Note "A failed round": the error of one rank is the answer to all ranks. It is logged at once, the steps that
wait keep waiting, and the next round tries them again. The first tier and training never see the error.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from shardproof.engine import events
from shardproof.engine.format import FileRecord, size_fault
from shardproof.engine.rendezvous import MeetingSequence, Rendezvous
from shardproof.engine.saving import Progress, Workers, unfinished
from shardproof.engine.storage import Storage
from shardproof.errors import (
    CorruptChunkError,
    FormatError,
    SaveSkipped,
    ShardproofError,
    StorageError,
    tells_nothing,
)
from shardproof.runs.checkpointer.policies import Retention
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.runs.checkpointer.tiers.tiered_run import copies_of, log_other_copy
from shardproof.runs.checkpointer.tiers.upload_coordinator import UploadCoordinator
from shardproof.runs.checkpointer.tiers.upload_messages import (
    UploadAnswer,
    UploadReport,
    UploadRequest,
    UploadShare,
)
from shardproof.runs.maintenance import copy_shard_file

_MOST_PIECE = 1 << 20
_LEAST_PIECE = 64 << 10
_PIECES_A_SECOND = 4
"""Pieces that a throttled rank sends a second, so that it shows signs of life."""
_POLL = 0.2
"""Seconds between two checks for progress."""

_SLICE = 0.5
"""Seconds between two signs of life during a wait of a throttled rank."""

_log = logging.getLogger("shardproof")


class Uploader:
    """Uploads the steps of one run, on this rank.

    Args:
        first: the run in the first tier.
        second: the run in the second tier.
        rendezvous: rendezvous of all ranks.
        keep: the policy of the second tier; None: all steps stay there.
        bandwidth: bytes a second of all ranks together; None: no bound.
        damaged: steps that are known to be damaged in the first tier; grows.
        clock: gives seconds, for the bandwidth.
        sleep: waits some seconds, for the bandwidth.
    """

    def __init__(
        self,
        first: Storage,
        second: Storage,
        rendezvous: Rendezvous,
        keep: Retention | None,
        bandwidth: int | None,
        damaged: Collection[int],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._first, self._second = first, second
        self._rendezvous = rendezvous
        self._coordinator = UploadCoordinator(first, second, keep, bandwidth, damaged)
        self._throttle = Throttle(None, clock=clock, sleep=sleep)
        self._operation = f"upload {second.location}"
        self._patience = 2 * rendezvous.deadline
        self._process = -1
        self._meetings: Rendezvous
        self._workers: Workers
        self._progress = Progress()
        self._changed = threading.Condition()
        self._requests: list[UploadRequest] = []
        self._rounds = 0
        """Rounds that are scheduled and not over."""
        self._failure: ShardproofError | None = None
        """The failure of the last round."""

    def prepare(self) -> None:
        """Names the rendezvous of the uploads and starts the thread, once in a process. All ranks call it.

        Raises:
            ShardproofError: a rank failed or fell silent.
        """
        if self._process == os.getpid():
            return
        name = secrets.token_hex(8)
        with self._rendezvous.operation(self._operation):
            meeting = MeetingSequence(self._rendezvous, self._operation)
            name = meeting.meet("prepare", bytes, lambda posts: name.encode()).decode()
        self._meetings = self._rendezvous.new_rendezvous(f"upload/{name}")
        self._workers = Workers("shardproof-tiers", 1)
        self._changed, self._requests, self._rounds = threading.Condition(), [], 0
        self._failure = None
        self._process = os.getpid()

    def committed(self, request: UploadRequest, step: int, attempt: str) -> None:
        """Begins a round, after the commit of a step on the first tier. Returns at once."""
        request.step, request.attempt = step, attempt
        self._coordinator.committed(step)
        with self._changed:
            self._requests.append(request)
        self.begin_round(step)

    def begin_round(self, step: int | None) -> None:
        """Begins a round of uploads of all steps that wait. All ranks call it; returns at once.

        `step` was saved or restored last; None if the run has none.
        """
        self._coordinator.position = step
        self._meetings.deadline = self._rendezvous.deadline  # it may have changed
        self._patience = 2 * self._rendezvous.deadline
        with self._changed:
            self._rounds += 1
        future = self._workers.submit(self._round)
        unfinished.add(future, self._progress, self._patience, self._operation)

    def protect(self, steps: Sequence[int]) -> Collection[int]:
        """On rank 0: see `UploadCoordinator.protect`."""
        return self._coordinator.protect(steps)

    def wait(self, request: UploadRequest, timeout: float | None) -> None:
        """Returns when a step is whole on the second tier.

        Args:
            request: upload request of a save that is committed on the first tier.
            timeout: seconds; None: as long as the upload makes progress.

        Raises:
            TimeoutError: the upload has not ended.
            SaveSkipped: the step is not uploaded, because newer steps took its place.
            ShardproofError: the upload failed. The next round tries it again.
        """
        self._wait_until(
            lambda: request.is_over or request.error is not None, timeout, f"step {request.step}"
        )
        if request.error is not None:
            raise type(request.error)(request.error.message, **request.error.details)

    def wait_for_all(self, timeout: float | None) -> None:
        """See `Checkpointer.wait_for_uploads`."""
        if self._process != os.getpid():
            return
        self._wait_until(lambda: self._rounds == 0, timeout, "the steps of this run")
        failed = self._failure
        if failed is None:
            failed = next((one.error for one in self._requests if one.error and not one.is_over), None)
        if failed is not None:
            raise type(failed)(failed.message, **failed.details)

    def _wait_until(self, is_true: Callable[[], bool], timeout: float | None, what: str) -> None:
        ends = None if timeout is None else time.monotonic() + timeout
        seen, since = self._progress.count, time.monotonic()
        with self._changed:
            while not is_true():
                now = time.monotonic()
                if ends is not None and now >= ends:
                    raise TimeoutError(f"the upload of {what} to {self._second.location} has not ended")
                if self._progress.is_bounded or self._progress.count != seen:
                    seen, since = self._progress.count, now
                elif ends is None and now - since > self._patience:
                    raise StorageError(
                        f"the upload of {what} to {self._second.location} has made no progress for "
                        f"{self._patience:.0f} s: the storage hangs. The step is committed on "
                        f"{self._first.location}"
                    )
                self._changed.wait(_POLL if ends is None else min(_POLL, ends - now))

    def _round(self) -> None:
        """One round (note "Rounds"), in the background thread."""
        with self._changed:
            self._requests = [one for one in self._requests if not one.is_over]
            for one in self._requests:
                one.error = None
        failure: ShardproofError | None = None
        try:
            with self._meetings.operation(self._operation):
                self._upload_all()
        except Exception as error:
            self._coordinator.end_upload()
            failure = (
                error
                if isinstance(error, ShardproofError)
                else StorageError(f"{self._operation} failed: {type(error).__name__}: {error}")
            )
            _log.error(
                "%s: the upload to %s failed, and the next save tries it again: %s",
                self._first.location,
                self._second.location,
                error,
                exc_info=None if isinstance(error, ShardproofError) else error,
            )
        with self._changed:
            self._rounds -= 1
            self._failure = failure
            if failure is not None and self._rounds == 0:  # else the next round tries it now
                for one in self._requests:
                    if not one.is_over:
                        one.error = failure
            self._changed.notify_all()

    def _upload_all(self) -> None:
        meetings = MeetingSequence(self._meetings, self._operation)
        plan = self._decider(self._coordinator.plan)
        with self._progress.bounded():
            answer = meetings.exchange_each("plan", UploadReport, plan, UploadReport, UploadAnswer)
        while (upload := self._take(answer)) is not None:
            answer = self._copy_and_commit(upload, meetings)

    def _copy_and_commit(self, upload: UploadShare, meetings: MeetingSequence) -> UploadAnswer:
        report = self._copy(upload)
        commit = self._decider(self._coordinator.commit)
        with self._phase(upload.step, "commit"), self._progress.bounded():
            return meetings.exchange_each("commit", lambda: report, commit, UploadReport, UploadAnswer)

    def _take(self, answer: UploadAnswer) -> UploadShare | None:
        """Takes over an answer. Returns what this rank copies next; None if the round is over."""
        with self._changed:
            reasons = {(step, attempt): reason for step, attempt, reason in answer.skipped}
            for one in self._requests:
                save = one.step, one.attempt
                one.is_over |= save in answer.uploaded or save in reasons
                if save in reasons:
                    one.error = SaveSkipped(
                        f"step {one.step} is committed on {self._first.location}, and is not uploaded to "
                        f"{self._second.location}: {reasons[save]}"
                    )
            self._changed.notify_all()
        self._progress.advance()
        if answer.error is not None:
            raise ShardproofError.from_wire(answer.error)
        return answer.next

    def _copy(self, upload: UploadShare) -> UploadReport:
        """Copies the files of this rank, and reports an error."""
        total = sum(record.size for record in upload.files)
        self._throttle.rate = upload.rate
        piece = _MOST_PIECE
        if upload.rate is not None:
            piece = int(min(_MOST_PIECE, max(_LEAST_PIECE, upload.rate / _PIECES_A_SECOND)))
        with self._phase(upload.step, "copy") as phase:
            done = 0

            def alive() -> None:
                self._progress.advance()
                self._meetings.progress(min(done, total), total)  # a file may be copied from two sources
                self._meetings.report_waiting()

            def on_bytes(count: int) -> None:
                nonlocal done
                self._throttle.take(count, alive)
                done += count
                alive()
                phase.progress(min(done, total), total)

            try:
                for record in upload.files:
                    self._copy_file(record, on_bytes, alive, piece)
            except _SourceError as error:
                phase.fail(error.error)
                return UploadReport(error.error.to_wire(), of_first=True, is_damage=error.is_damage)
            except (ShardproofError, OSError) as error:
                phase.fail(error)
                failed = error if isinstance(error, ShardproofError) else StorageError(str(error))
                return UploadReport(failed.to_wire())
        return UploadReport()

    def _copy_file(
        self, record: FileRecord, on_bytes: Callable[[int], None], alive: Callable[[], None], piece: int
    ) -> None:
        target = self._second.within(record.folder)
        try:
            if self._is_whole(target, record, alive):
                return  # of a killed upload, or of another job
            try:
                self._copy_first_whole(record, target, on_bytes, piece)
            except (StorageError, _SourceError):
                if not self._is_whole(target, record, alive):  # another job has not written it meanwhile
                    raise
        finally:
            target.close()

    def _copy_first_whole(
        self, record: FileRecord, target: Storage, on_bytes: Callable[[int], None], piece: int
    ) -> None:
        """Copies a file from the nearest storage of the first tier in which it is not damaged.

        Raises:
            _SourceError: no copy can be read; it has the error of the nearest one.
            ShardproofError: the second tier failed.
        """
        damage: _SourceError | None = None
        for source in copies_of(self._first.within(record.folder), record.name):
            try:
                sink = target.replace(record.name)
                copy_shard_file(source, record, sink, on_bytes, piece_bytes=piece)
            except ShardproofError as error:
                failed = _source_error(error, source, record)
                if failed is None:
                    raise
                damage = damage or failed
            else:
                if damage is not None:
                    log_other_copy(self._first.location, f"{source.location}/{record.name}", damage.error)
                return
            finally:
                source.close()
        assert damage is not None
        raise damage

    def _is_whole(self, target: Storage, record: FileRecord, alive: Callable[[], None]) -> bool:
        """True if a file is on the second tier, has the right bytes, and is durable."""
        try:
            if target.size(record.name) is None:
                return False
            copy_shard_file(target, record, None, lambda count: alive())
        except (CorruptChunkError, FormatError, StorageError):
            return False
        target.flush(record.name)
        return True

    def _decider(
        self, decide: Callable[[Sequence[UploadRequest], Sequence[UploadReport]], list[UploadAnswer]]
    ) -> Callable[[Sequence[UploadReport]], list[UploadAnswer]]:
        """A decision of the coordinator, in which the storage may hang: waiters apply their patience."""

        def decided(reports: Sequence[UploadReport]) -> list[UploadAnswer]:
            with self._changed:
                requests = [one for one in self._requests if not one.is_over]
            with self._progress.bounded(False):
                return decide(requests, reports)

        return decided

    def _phase(self, step: int, name: str) -> events.Phase:
        rank, world_size = self._rendezvous.rank, self._rendezvous.world_size
        operation = f"{self._operation}/{step_name(step)}"
        return events.phase(operation, name, rank=rank, world_size=world_size, step=step)


class Throttle:
    """Spreads bytes evenly over time. An idle time gives no credit for later.

    Any t seconds see at most ``rate * t`` bytes and the bytes of one call of `take`.

    Example:
        >>> now = [0.0]
        >>> throttle = Throttle(10.0, clock=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
        >>> for _ in range(3):
        ...     throttle.take(20)
        >>> now
        [4.0]
    """

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = rate
        self._clock = clock
        self._sleep = sleep
        self._free = clock()
        """When the bytes that were taken are sent at the rate."""

    def take(self, count: int, waiting: Callable[[], None] = lambda: None) -> None:
        """Waits until `count` more bytes may be sent. Calls `waiting` every half second of the wait."""
        if self.rate is None:
            return
        while (left := self._free - self._clock()) > 0:
            waiting()
            self._sleep(min(left, _SLICE))
        self._free = max(self._free, self._clock()) + count / self.rate


class _SourceError(Exception):
    """A file of the first tier cannot be read."""

    def __init__(self, error: ShardproofError, is_damage: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.is_damage = is_damage
        """True if its bytes are lost or changed."""


def _source_error(error: ShardproofError, source: Storage, record: FileRecord) -> _SourceError | None:
    """The error of the source of a copy; None if the copy failed for another reason."""
    is_damage = isinstance(error, (CorruptChunkError, FormatError))
    if not is_damage:
        with suppress(StorageError):
            is_damage = size_fault(source, record.name, record.size) is not None
    if is_damage:
        return _SourceError(error, is_damage=True)
    file = str(error.details.get("file", ""))
    if tells_nothing(error.details) and file.startswith(f"{source.location}/"):
        return _SourceError(error, is_damage=False)
    return None
