"""The protocol of one save on one rank.

Two threads execute the steps. `Save.start` has the steps of the caller's thread, which collects and stages.
`Save._save` has the steps of the save thread, which attends all meetings and writes. No interrupt reaches
this thread. The following methods are in the order of the steps.

A rank *goes ahead* if it returns to its caller before the ranks agree. It does so if it can reuse its cached
plan and has copied all memory that no fence protects. Each rank decides this without the other ranks,
because the meetings are the same in both cases. After a failed save, the next save agrees synchronously, so
that every rank reports the failure exactly once.

Note "Fixed meetings": every rank takes part in every meeting, with its result or with its error. So the error
of one rank is the answer to all ranks, and no rank waits for a rank that gave up. The meetings before the
caller continues follow the order of the caller's own meetings. A save in the background writes and commits at
a separate rendezvous, so the caller's meetings do not wait for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import astuple
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof import events
from shardproof._utils.gc_pause import no_garbage_collection
from shardproof.errors import RankFailure, RankSilent, SaveSkipped, ShardproofError, StorageError
from shardproof.format import shard_name
from shardproof.planning import RankPlan, Structure
from shardproof.rendezvous import MeetingSequence, Operation, Rendezvous, Reservation
from shardproof.saving.background import Progress, wait_while_moving
from shardproof.saving.cache import CachedDigests, CachedPlan, Limits, SaveCache, SaveRequest
from shardproof.saving.capture import Capture
from shardproof.saving.coordinator import Coordinator
from shardproof.saving.failed_commit import remove_own_files
from shardproof.saving.incremental import BaseDigests
from shardproof.saving.messages import Agreement, Attempt, RankReport, SaveResult, WriteReport, pack_rows
from shardproof.saving.pending import PendingSave
from shardproof.saving.prepared_shard import prepare_shard
from shardproof.saving.rank_report import fits_cached_plan, report_rank, structure_of
from shardproof.saving.replica_check import chosen_slices, hash_replicas, warn_of_divergences
from shardproof.saving.shard_writer import BufferPool, WrittenShard, write_shard
from shardproof.saving.snapshot import Snapshot
from shardproof.saving.space_check import free_space
from shardproof.state import Fence, collect
from shardproof.storage import LocalStorage, Storage, choose_cache, past_cache

__all__ = ["After", "Save"]

After = Callable[[SaveResult, Callable[[int, int], None]], None]
"""Called after the commit, with the result and a function that takes the numbers of done and total steps."""

T = TypeVar("T")

_log = logging.getLogger("shardproof")
_NOTHING = Capture((), (), {}, {}, None, is_complete=False)


class Save:
    """One save on one rank, which updates the cache.

    `failed` is the error of the previous save, if the caller has not received it.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        storage: Storage,
        request: SaveRequest,
        cache: SaveCache,
        limits: Limits,
        failed: ShardproofError | None = None,
    ) -> None:
        self.operation = f"save {storage.location}"
        self.progress = Progress()
        self.patience = 2 * rendezvous.deadline
        """Seconds without progress after which a waiting thread gives up."""
        self.future: Future[SaveResult] = Future()
        self.pending = PendingSave(request.step, self.future, self.progress, self.patience)
        self._begun = time.monotonic()
        self._rendezvous = rendezvous
        self._storage = storage
        self._request = request
        self._cache = cache
        self._failed_before = failed
        self._coordinator = Coordinator(storage, request, cache, limits)
        self._store: object = None
        """Keeps the rendezvous' store alive while the save needs it."""
        self._capture = _NOTHING
        self._structure: Structure
        self._digest: bytes
        self._report: RankReport | BaseException
        self._reservation: Reservation | None = None
        self._goes_ahead = False
        """True if the caller continues before the ranks agree."""
        self._agreement: Agreement
        self._refusal: BaseException | None = None
        """The error of a failed agreement."""
        self._agreed: Future[None] = Future()
        """Done when the ranks have agreed, or the agreement failed."""
        self._base: BaseDigests | None = None
        self._replica_digests = b""
        self._chunk_digests: NDArray[np.uint64] | None = None
        self._snapshot: Snapshot | None = None
        self._fence: Fence | None = None
        self._problem: BaseException | None = None
        """The error of a local step of this rank, which is reported at the meeting of the commit."""
        self._given_up: BaseException | None = None

    def start(
        self,
        state: Any,
        operation: Operation,
        submit: Callable[[Callable[[], SaveResult]], None],
        *,
        background: bool,
        stage_all: bool = False,
        after: After | None = None,
    ) -> None:
        """Executes the steps of the caller's thread; returns once the caller may change the state.

        Args:
            state: the state tree.
            operation: position of the first meetings in the order of this rank's meetings.
            submit: runs a function on the save thread, for `future`.
            background: True if the caller continues before the commit. Otherwise it waits for `future`.
            stage_all: True to copy all memory, without use of the fence.
            after: called after the commit.
        """
        self._collect(state, guarded=background, stage_all=stage_all)
        submit(partial(self._run, operation, background, after))  # `_save`, on the save thread
        self._wait_until_agreed()
        self._stage()  # while the save thread writes

    def _save(self, operation: Operation, background: bool, after: After | None) -> SaveResult:
        """Executes the steps of the save thread."""
        with ExitStack() as order:
            order.enter_context(operation)
            part = self._agree(exclusive=not background)  # meetings: collect [plan] [base]
            rendezvous = self._rendezvous
            if background:
                rendezvous = self._cache.background_rendezvous(rendezvous, self._agreement.background)
            with self._local_steps():
                self._prepare(part)
                self._hash_replicas(rendezvous)
            self.release_caller()
            if background:
                order.close()  # the caller's next meeting may begin
            report = self._write(rendezvous, background)
            result = self._commit(rendezvous, report)  # meeting: write
            if after is not None:
                after(result, lambda _done, _total: self.progress.advance())
        self._cache.succeeded = True
        return result

    def _collect(self, state: Any, *, guarded: bool, stage_all: bool) -> None:
        """Collects the state, and reserves the place in the order of meetings for `_agree`.

        With `guarded`, memory may change before the save is over; staging and the fence protect it.
        """
        succeeded, self._cache.succeeded = self._cache.succeeded, False

        def report() -> RankReport:
            with no_garbage_collection():
                rank, world_size = self._rendezvous.rank, self._rendezvous.world_size
                last = self._cache.walk if guarded else None  # `sp.save` has no next save
                collected = collect(state, rank=rank, world_size=world_size, last=last)
                self._structure, self._digest = structure_of(collected, self._cache)
                stepped = () if stage_all else collected.stepped
                may_go_ahead = succeeded and fits_cached_plan(self._request, self._cache, self._digest)
                self._capture = Capture.of(collected, stepped, guarded=guarded, complete=may_go_ahead)
                if self._capture.watch:
                    self._fence = Fence(stepped, self._stage_for_fence, partial(self._phase, "fence"))
            return report_rank(self._request, self._cache, self._digest, self._failed_before)

        with self._phase("collect") as phase:
            self._report = _outcome(report, phase)
        self._goes_ahead = self._capture.is_complete and isinstance(self._report, RankReport)
        self._reservation = self._rendezvous.reserve()
        self._store = self._rendezvous.store_server()

    def _run(self, operation: Operation, background: bool, after: After | None) -> SaveResult:
        """Runs `_save`, and converts any error to a `ShardproofError`."""
        if not operation.claim():
            raise SaveSkipped(f"{self._storage.location}: the save was interrupted before it began")
        try:
            return self._save(operation, background, after)
        except BaseException as error:
            failure = self._failure(error, logged=background and not self._is_refused)
        finally:
            self.end()
        raise failure  # here, so that its context does not hold the state

    def _agree(self, *, exclusive: bool) -> bytes | None:
        """Agrees with the other ranks, at the reserved place in the order of meetings.

        With `exclusive`, no other meeting of this rank may come before the commit.

        Returns:
            This rank's part of a new plan; None: the cached plan is reused.
        """
        assert self._reservation is not None
        with self.progress.bounded():  # meetings have deadlines, and so has the wait for a turn
            try:
                self._reservation.__enter__()
                part = self._meet()
                if not exclusive:
                    self._reservation.give_up()
            except BaseException as error:
                self._refusal = error
                raise
        return part

    def _meet(self) -> bytes | None:
        meeting = MeetingSequence(self._rendezvous, self.operation)
        with self._phase("agree"):
            answer = meeting.meet("collect", self._first_report, self._unbounded(self._coordinator.agree))
        agreement = self._agreement = msgspec.msgpack.decode(answer, type=Agreement)
        part = None
        if not agreement.reuse_plan:
            self._cache.plan = self._cache.digests = None
            with self._phase("plan"):
                part = meeting.meet("plan", self._structure.encode, self._coordinator.plan)
        if agreement.send_base:
            with self._phase("plan"):
                base = meeting.meet("base", lambda: b"", self._coordinator.send_base)
                self._base = BaseDigests.decode(base)
        elif agreement.attempt.base:
            assert self._cache.digests is not None
            self._base = self._cache.digests.digests
        return part

    def _first_report(self) -> bytes:
        """This rank's report of `_collect`, with the space for its file."""
        report = _result_of(self._report)
        with self.progress.bounded(False):  # the storage may hang here
            space = free_space(self._storage)
        seen = None if space is None else astuple(space)
        return msgspec.msgpack.encode(msgspec.structs.replace(report, space=seen))

    @contextmanager
    def _local_steps(self) -> Iterator[None]:
        """Stores an error of this rank for its report at the commit (note "Fixed meetings")."""
        try:
            yield
        except BaseException as error:
            self._problem = error

    def _prepare(self, part: bytes | None) -> None:
        """Makes the snapshot of this rank's chunks, by a new part of the plan or the cached one."""
        with nullcontext() if self._goes_ahead else no_garbage_collection():  # training needs the collector
            if part is not None:
                shard = prepare_shard(self._structure, RankPlan.decode(part))
                self._cache.plan = CachedPlan(self._attempt.id, shard, self._digest)
            assert self._cache.plan is not None
            self._snapshot = Snapshot(
                self._capture,
                self._cache.plan.shard.plan,
                self._cache.staging,
                self._cache.allocator,
                self._rendezvous.deadline,
                self.progress,
            )
        if self._given_up is not None:
            self._snapshot.give_up(self._given_up)

    def _hash_replicas(self, rendezvous: Rendezvous) -> None:
        """Hashes the replicas that the request selects."""
        if not self._request.check_replicas:
            return
        rendezvous.start_heartbeat()  # other ranks may wait there already
        with self._phase("replicas") as phase:
            plan = self._cache.plan
            assert plan is not None
            slices = plan.shared_slices(self._structure)
            turn = None if self._request.check_replicas == "all" else self._agreement.turn
            rows = chosen_slices(slices, plan.shard.plan.shared.turns, turn)
            on_progress = self._progress_of(rendezvous, phase, int(slices.byte_count[rows].sum()))
            pieces, staging = self._capture.pieces, self._cache.staging
            self._replica_digests = hash_replicas(pieces, slices, rows, staging, on_progress)

    def release_caller(self) -> None:
        """Ends the wait of the caller, or of an optimizer step, for the agreement of the ranks."""
        if not self._agreed.done():
            self._agreed.set_result(None)

    def _wait_until_agreed(self) -> None:
        """Returns when the ranks have agreed; at once if this rank goes ahead.

        Raises:
            BaseException: the error of a failed agreement, or an interrupt of a local step.
        """
        if self._goes_ahead:
            return
        if not wait_while_moving(self._agreed, self.progress, self.patience):
            raise StorageError(
                f"{self._storage.location}: the ranks have not agreed for {self.patience:.0f} s, and the "
                "save fails. Check that the storage responds"
            )
        if self._refusal is not None:
            raise self._refusal
        if self._problem is not None and not isinstance(self._problem, Exception):
            raise self._problem  # the save thread reports it to the other ranks

    def _stage(self) -> None:
        """Copies all memory that no fence protects. The commit reports an error."""
        if self._snapshot is not None and not self._goes_ahead:
            with self._phase("stage") as phase:
                self._snapshot.stage_live(fenced=False)
                phase.progress(self._snapshot.staged_bytes, self._snapshot.staged_bytes)

    def _write(self, rendezvous: Rendezvous, background: bool) -> bytes | BaseException:
        """Writes this rank's shard file, if it has one. Returns the report for the commit, or the error."""
        with self._phase("write") as phase:
            return _outcome(partial(self._write_shard, rendezvous, background, phase), phase)

    def _write_shard(self, rendezvous: Rendezvous, background: bool, phase: events.Phase) -> bytes:
        if self._problem is not None:
            raise self._problem
        self._check_given_up()
        rendezvous.start_heartbeat()
        assert self._cache.plan is not None and self._snapshot is not None
        begun, shard, objects = time.monotonic(), self._cache.plan.shard, self._capture.objects
        owned = {key: objects[key] for key in shard.plan.objects}
        file = WrittenShard.nothing()
        if shard.is_written:
            buffers, self._cache.buffers = self._cache.buffers or BufferPool(), None
            storage = self._storage
            if isinstance(storage, LocalStorage):
                cache = choose_cache(shard.data_bytes, direct=storage.direct, beside_training=background)
                phase.note(cache=str(cache))
                storage = storage if cache.through else past_cache(storage)
            file = write_shard(
                partial(storage.create, shard_name(rendezvous.rank, self._attempt.id)),
                shard,
                partial(shard.header, self._attempt, rendezvous.rank, owned),
                self._snapshot,
                self._base,
                buffers,
                self._cache.writers,
                self._progress_of(rendezvous, phase, shard.data_bytes),
            )
            self._check_given_up()
            self._cache.buffers = buffers
            self._snapshot.check_unchanged()
            phase.note(staged=self._snapshot.staged_bytes, waited=self._snapshot.waited)
        if self._request.base is not None:
            self._chunk_digests = file.digests
        digests, orders = self._capture.object_digests()
        report = WriteReport(
            file.size,
            file.data_start,
            file.digest,
            file.digests.tobytes(),
            owned,
            tuple(objects),
            digests,
            b"" if file.written.all() else pack_rows(file.written),
            self._replica_digests,
            time.monotonic() - begun,
            orders,
        )
        return msgspec.msgpack.encode(report)

    def _commit(self, rendezvous: Rendezvous, report: bytes | BaseException) -> SaveResult:
        """Commits with the other ranks. After a refusal, this rank removes its files."""
        meeting = MeetingSequence(rendezvous, self.operation)
        try:
            with self._phase("commit") as phase:
                with self.progress.bounded():
                    commit = self._unbounded(self._coordinator.commit)
                    answer = meeting.meet("write", partial(_result_of, report), commit)
                result = msgspec.msgpack.decode(answer, type=SaveResult)
                phase.note(**self._coordinator.facts)
                if self._request.check_replicas:
                    phase.note(diverged=result.diverged_count)
        except RankSilent:
            raise  # note "Whose files" in `remove_own_files`
        except ShardproofError as error:
            if error.details.get("committed", False) is False:
                remove_own_files(self._storage, self._rendezvous.rank, self._attempt.id)
            raise
        warn_of_divergences(result, self._rendezvous.rank)
        if self._chunk_digests is not None:
            self._cache.digests = CachedDigests(self._attempt.id, BaseDigests.of(self._chunk_digests))
        return msgspec.structs.replace(result, seconds=time.monotonic() - self._begun)

    def end(self) -> None:
        """Releases the state, the reservation, the store and the fence, which refers to this save.

        Called once or more at the end of every save.
        """
        if self._reservation is not None:
            self._reservation.give_up()
        self.release_caller()
        fence, self._fence = self._fence, None
        if fence is not None:
            fence.close()
        if self._snapshot is not None:
            self._snapshot.end()
        self._capture = _NOTHING
        self._store = None

    def open_fence(self) -> None:
        """Waits until the save does not read memory of the state any more."""
        if (fence := self._fence) is not None:  # the save thread may end the save meanwhile
            fence.open()

    def _stage_for_fence(self) -> int:
        """For the fence: copies all live memory. Returns the number of copied bytes."""
        if not wait_while_moving(self._agreed, self.progress, self.patience):
            self.give_up(
                StorageError(
                    f"the ranks have not agreed for {self.patience:.0f} s while training waited. The save "
                    "fails, and training continues. Check that the storage responds"
                )
            )
        if self._snapshot is None:
            return 0
        before = self._snapshot.staged_bytes
        self._snapshot.stage_live(fenced=True)
        return self._snapshot.staged_bytes - before

    def give_up(self, error: BaseException) -> None:
        """Makes the save fail with this error: the caller may change memory that is not written yet."""
        self._given_up = error
        if self._snapshot is not None:
            self._snapshot.give_up(error)

    def _check_given_up(self) -> None:
        """Fails if the caller continued after an error: bytes that were read since may be torn."""
        if self._given_up is not None:
            raise self._given_up

    @property
    def _attempt(self) -> Attempt:
        return self._agreement.attempt

    @property
    def _is_refused(self) -> bool:
        """True if the ranks do not agree, and the caller still waits for the error."""
        return self._refusal is not None and not self._goes_ahead

    def _phase(self, name: str) -> events.Phase:
        step = self._request.step if isinstance(self._request.step, int) else None
        rank, world_size = self._rendezvous.rank, self._rendezvous.world_size
        return events.phase(self.operation, name, rank=rank, world_size=world_size, step=step)

    def _progress_of(self, rendezvous: Rendezvous, phase: events.Phase, total: int) -> Callable[[int], None]:
        """A progress callback that takes the bytes done. It raises once the save is given up."""

        def on_progress(done: int) -> None:
            self._check_given_up()
            self.progress.advance()
            rendezvous.progress(done, total)
            phase.progress(done, total)

        return on_progress

    def _unbounded(self, decide: Callable[[Sequence[bytes]], bytes]) -> Callable[[Sequence[bytes]], bytes]:
        """On the coordinator: storage may hang in `decide`, so waiters apply the progress timeout."""

        def decided(posts: Sequence[bytes]) -> bytes:
            with self.progress.bounded(False):
                return decide(posts)

        return decided

    def _failure(self, error: BaseException, *, logged: bool) -> ShardproofError:
        """Converts the error of the save to a `ShardproofError`; logs it if no caller waits for it."""
        if self._is_refused and isinstance(error, ShardproofError):
            # A copy, because the frames of the caller's error have references to the state.
            return ShardproofError.from_wire(error.to_wire())
        location, cause = self._storage.location, f"{type(error).__name__}: {error}"
        if logged:
            _log.error(
                "%s: the save failed: %s", location, error if isinstance(error, ShardproofError) else cause
            )
        if isinstance(error, ShardproofError):
            return error
        rank = self._rendezvous.rank
        text = f"{location}: rank {rank} failed: {cause}"
        failure = RankFailure(text, phase="background", causes={str(rank): cause})
        failure.__cause__ = None if self._is_refused else error
        return failure


def _outcome(work: Callable[[], T], phase: events.Phase) -> T | BaseException:
    """The result of `work`, or its error, which the rank reports at the next meeting."""
    try:
        return work()
    except BaseException as error:
        phase.fail(error)
        return error


def _result_of(outcome: T | BaseException) -> T:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
