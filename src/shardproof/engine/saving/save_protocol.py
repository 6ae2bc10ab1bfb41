"""The protocol of one save on one rank.

Two threads execute the steps. `Save.start` lists the steps of the caller's thread, which collects and stages.
`Save._save` lists the steps of the save thread, which attends all meetings and writes. No interrupt reaches
this thread. `_CallerSteps` and `_ThreadSteps` have the steps in their order. `_BothThreads` has what both
use, and what they tell each other.

A rank *goes ahead* if it returns to its caller before the ranks agree. It does so if it can reuse its cached
plan and has copied all memory that no fence protects. Each rank decides this without the other ranks,
because the meetings are the same in both cases. After a failed save, the next save agrees synchronously, so
that every rank reports the failure exactly once.

Note "Fixed meetings": every rank takes part in every meeting, with its result or with its error. So the error
of one rank is the answer to all ranks, and no rank waits for a rank that left. The meetings before the
caller continues follow the order of the caller's own meetings. A save in the background writes and commits at
a separate rendezvous, so the caller's meetings do not wait for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from shardproof._utils.contexts import no_garbage_collection
from shardproof.engine import events
from shardproof.engine.format import shard_name
from shardproof.engine.planning import RankPlan, Structure
from shardproof.engine.rendezvous import MeetingSequence, Operation, Rendezvous, Reservation
from shardproof.engine.saving.background import PendingSave, Progress, frames_to_notes, wait_while_moving
from shardproof.engine.saving.cache import CachedPlan, Limits, SaveCache
from shardproof.engine.saving.commit import remove_own_files
from shardproof.engine.saving.coordinator import Coordinator
from shardproof.engine.saving.messages import Agreement, RankReport, SaveResult, WriteReport
from shardproof.engine.saving.save_option import SaveOption
from shardproof.engine.saving.save_request import SaveRequest, report_rank
from shardproof.engine.saving.shard_writer import (
    BufferPool,
    Output,
    WriteShard,
    WrittenShard,
    prepare_shard,
    write_shard,
)
from shardproof.engine.saving.snapshot import Capture, Snapshot
from shardproof.engine.state import Fence, collect
from shardproof.engine.storage import Storage, choose_cache
from shardproof.errors import RankFailure, RankSilent, SaveSkipped, ShardproofError, StorageError

After = Callable[[SaveResult, Callable[[int, int], None]], None]
"""Called after the commit, with the result and a function that takes the numbers of done and total steps."""

T = TypeVar("T")
A = TypeVar("A")

_log = logging.getLogger("shardproof")


class Save:
    """One save on one rank, which updates the cache: the steps of its two threads, in their order."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        storage: Storage,
        request: SaveRequest,
        options: Sequence[SaveOption],
        cache: SaveCache,
        limits: Limits,
    ) -> None:
        self.future: Future[SaveResult] = Future()
        self._shared = shared = _BothThreads(rendezvous, storage, request, options, cache)
        for option in options:
            option.begin(storage, cache)
        self._caller = _CallerSteps(shared)
        self._thread = _ThreadSteps(shared, Coordinator(storage, request, options, cache, limits))
        self.operation, self.progress, self.patience = shared.operation, shared.progress, shared.patience
        self.pending = PendingSave(request.step, self.future, self.progress, self.patience)

    def start(
        self,
        state: Any,
        operation: Operation,
        submit: Callable[[Callable[[], SaveResult]], None],
        *,
        background: bool,
        stage_all: bool = False,
        after: After | None = None,
        failed: ShardproofError | None = None,
    ) -> None:
        """Executes the steps of the caller's thread; returns once the caller may change the state.

        Args:
            state: the state tree.
            operation: position of the first meetings in the order of this rank's meetings.
            submit: runs a function on the save thread, for `future`.
            background: True if the caller continues before the commit. Otherwise it waits for `future`.
            stage_all: True to copy all memory, without use of the fence.
            after: called after the commit.
            failed: the error of the previous save, if the caller has not received it.
        """
        caller = self._caller
        caller.collect(state, failed, guarded=background, stage_all=stage_all)
        submit(partial(self._run, operation, background, after))  # `_save`, on the save thread
        caller.wait_until_agreed()
        caller.stage()  # while the save thread writes

    def _save(self, operation: Operation, background: bool, after: After | None) -> SaveResult:
        """Executes the steps of the save thread."""
        thread = self._thread
        with ExitStack() as order:
            order.enter_context(operation)
            part = thread.agree(exclusive=not background)  # meetings: collect [plan], those of options
            if background:
                thread.continue_in_background()
            with thread.local_steps():
                thread.prepare(part)
                thread.read_state()
            self._shared.release_caller()
            if background:
                order.close()  # the caller's next meeting may begin
            report = thread.write(background)
            result = thread.commit(report)  # meeting: write
            if after is not None:
                after(result, lambda _done, _total: self.progress.advance())
        self._shared.cache.succeeded = True
        return result

    def _run(self, operation: Operation, background: bool, after: After | None) -> SaveResult:
        """Runs `_save`, and converts any error to a `ShardproofError`."""
        if not operation.claim():
            location = self._shared.storage.location
            raise SaveSkipped(f"{location}: the save was interrupted before it began")
        try:
            return self._save(operation, background, after)
        except BaseException as error:
            failure = self._shared.converted(error, background)
        finally:
            self.end()
        frames_to_notes(failure)
        raise failure  # here, so that its context does not hold the state

    def open_fence(self) -> None:
        """Waits until the save does not read memory of the state any more."""
        if (fence := self._shared.fence) is not None:  # the save thread may end the save meanwhile
            fence.open()

    def fail(self, error: BaseException) -> None:
        """Makes the save fail with this error: the caller may change memory that is not written yet."""
        self._shared.fail(error)

    def end(self) -> None:
        """Releases the state, the reservation and the store. Called once or more at the end of every save."""
        self._shared.end()


class _BothThreads:
    """What both threads of a save use, and its outcome on this rank: `agreed`, then perhaps `failure`."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        storage: Storage,
        request: SaveRequest,
        options: Sequence[SaveOption],
        cache: SaveCache,
    ) -> None:
        self.rendezvous = rendezvous
        self.storage = storage
        self.request = request
        self.options = options
        self.cache = cache
        self.progress = Progress()
        self.reservation: Reservation | None = None
        self.store: object = None
        """Keeps the rendezvous' store alive while the save needs it."""
        self.fence: Fence | None = None
        self.collected: _Collected | BaseException | None = None
        """What the caller's thread collected, or its error; None once the save has ended."""
        self.goes_ahead = False
        """True if the caller continues before the ranks agree."""
        self.agreed: Future[None] = Future()
        """Done when the ranks have agreed and this rank has its snapshot, or the save fails earlier."""
        self.snapshot: Snapshot | None = None
        self.failure: BaseException | None = None
        """The first error of this rank, which is its report at the next meeting; or that of the agreement."""
        self.is_refused = False
        """True if `failure` is that of the agreement: all ranks have it, and no commit follows."""
        self._has_ended = False

    @property
    def operation(self) -> str:
        """The name of the operation."""
        return f"save {self.storage.location}"

    @property
    def patience(self) -> float:
        """Seconds without progress after which a waiting thread gives up."""
        return 2 * self.rendezvous.deadline

    def phase(self, name: str) -> events.Phase:
        """A phase of this save, for the listeners of events."""
        step = self.request.step if isinstance(self.request.step, int) else None
        rank, world_size = self.rendezvous.rank, self.rendezvous.world_size
        return events.phase(self.operation, name, rank=rank, world_size=world_size, step=step)

    def fail(self, error: BaseException) -> None:
        """Makes the save fail with this error on this rank, unless it has failed or ended."""
        if self._has_ended:
            return  # nothing reads the error, and its frames refer to the state
        if self.failure is None and not self.is_refused:
            self.failure = error
        if self.snapshot is not None:
            self.snapshot.fail(error)

    def check(self) -> None:
        """Raises `failure`. After an error the caller may have changed memory, so no later byte counts."""
        if self.failure is not None:
            raise self.failure

    def has_agreed(self) -> bool:
        """Waits until `agreed` is done; False if the save makes no progress."""
        return wait_while_moving(self.agreed, self.progress, self.patience)

    def release_caller(self) -> None:
        """Ends the wait of the caller, or of an optimizer step, for the agreement of the ranks."""
        if not self.agreed.done():
            self.agreed.set_result(None)

    def converted(self, error: BaseException, background: bool) -> ShardproofError:
        """The error of the save as a `ShardproofError`; logged if no caller waits for it."""
        caller_has_it = self.is_refused and not self.goes_ahead
        if caller_has_it and isinstance(error, ShardproofError):
            # A copy, because the frames of the caller's error have references to the state.
            return ShardproofError.from_wire(error.to_wire())
        location, cause = self.storage.location, f"{type(error).__name__}: {error}"
        if background and not caller_has_it:
            _log.error(
                "%s: the save failed: %s",
                location,
                str(error) if isinstance(error, ShardproofError) else cause,
            )
        if isinstance(error, ShardproofError):
            return error
        rank = self.rendezvous.rank
        text = f"{location}: rank {rank} failed: {cause}"
        failure = RankFailure(text, phase="background", causes={str(rank): cause})
        # An interrupt is the caller's own, and passes the caller's frames at this time.
        failure.__cause__ = error if isinstance(error, Exception) and not caller_has_it else None
        return failure

    def end(self) -> None:
        """See `Save.end`."""
        self._has_ended = True
        if self.reservation is not None:
            self.reservation.release()
        self.release_caller()
        fence, self.fence = self.fence, None  # it refers to this object
        if fence is not None:
            fence.close()
        if self.snapshot is not None:
            self.snapshot.end()
        self.collected = self.store = None
        if isinstance(self.failure, Exception) and not (self.is_refused and not self.goes_ahead):
            self.failure = None  # no caller waits for it, and its frames refer to this object


@dataclass(frozen=True, slots=True, eq=False)
class _Collected:
    """The state of this rank, and its first report."""

    capture: Capture
    structure: Structure
    digest: bytes
    report: RankReport


class _CallerSteps:
    """The steps of the caller's thread."""

    def __init__(self, shared: _BothThreads) -> None:
        self._shared = shared

    def collect(self, state: Any, failed: ShardproofError | None, *, guarded: bool, stage_all: bool) -> None:
        """Collects the state, and reserves the place in the order of meetings for the agreement.

        With `guarded`, memory may change before the save is over; staging and the fence protect it.
        """
        shared, request, cache = self._shared, self._shared.request, self._shared.cache
        rank, world_size = shared.rendezvous.rank, shared.rendezvous.world_size
        succeeded, cache.succeeded = cache.succeeded, False

        def collected() -> _Collected:
            with no_garbage_collection():
                last = cache.walk if guarded else None  # `sp.save` has no next save
                ranks = getattr(shared.rendezvous, "global_ranks", None)
                found = collect(state, rank=rank, world_size=world_size, ranks=ranks, last=last)
                structure, digest = cache.structure_of(found)
                report = report_rank(request, shared.options, cache, digest, failed)
                has_plan = cache.plan is not None and cache.plan.digest == digest
                goes_ahead = succeeded and has_plan and not shared.options  # they need an answer
                stepped = () if stage_all else found.stepped
                capture = Capture.of(found, stepped, guarded=guarded, goes_ahead=goes_ahead)
                if capture.watch:
                    shared.fence = Fence(stepped, self._stage_for_fence, partial(shared.phase, "fence"))
                return _Collected(capture, structure, digest, report)

        with shared.phase("collect") as phase:
            shared.collected = _outcome(collected, phase)
        shared.goes_ahead = isinstance(shared.collected, _Collected) and shared.collected.capture.goes_ahead
        shared.reservation = shared.rendezvous.reserve()
        shared.store = shared.rendezvous.store_server()

    def wait_until_agreed(self) -> None:
        """Returns when the ranks have agreed; at once if this rank goes ahead.

        Raises:
            BaseException: the error of a failed agreement, or an interrupt of a local step.
        """
        shared = self._shared
        if shared.goes_ahead:
            return
        if not shared.has_agreed():
            raise StorageError(
                f"{shared.storage.location}: the ranks have not agreed for {shared.patience:.0f} s, and the "
                "save fails. Check that the storage responds"
            )
        # The commit reports any other error to the caller, as to the other ranks.
        if shared.is_refused or not isinstance(shared.failure, Exception | None):
            try:
                shared.check()
            finally:
                if shared.is_refused:  # the error belongs to the caller, and its frames refer to this save
                    shared.failure = None

    def stage(self) -> None:
        """Copies all memory that no fence protects. The commit reports an error."""
        shared = self._shared
        if shared.snapshot is not None and not shared.goes_ahead:
            with shared.phase("stage") as phase:
                shared.snapshot.stage_live(fenced=False)
                phase.progress(shared.snapshot.staged_bytes, shared.snapshot.staged_bytes)

    def _stage_for_fence(self) -> int:
        """For the fence: copies all live memory. Returns the number of copied bytes."""
        shared = self._shared
        if not shared.has_agreed():
            shared.fail(
                StorageError(
                    f"the ranks have not agreed for {shared.patience:.0f} s while training waited. The save "
                    "fails, and training continues. Check that the storage responds"
                )
            )
        if shared.snapshot is None:
            return 0
        before = shared.snapshot.staged_bytes
        shared.snapshot.stage_live(fenced=True)
        return shared.snapshot.staged_bytes - before


class _ThreadSteps:
    """The steps of the save thread."""

    def __init__(self, shared: _BothThreads, coordinator: Coordinator) -> None:
        self._shared = shared
        self._coordinator = coordinator
        self._begun = time.monotonic()
        self._rendezvous = shared.rendezvous
        self._options = shared.options
        self._agreement: Agreement

    def agree(self, *, exclusive: bool) -> bytes | None:
        """Agrees with the other ranks, at the reserved place in the order of meetings.

        Returns this rank's part of a new plan; None if the cached plan is reused. With `exclusive`, no other
        meeting of this rank may come before the commit.
        """
        shared = self._shared
        assert shared.reservation is not None
        with shared.progress.bounded():  # meetings have deadlines, and so has the wait for a turn
            try:
                shared.reservation.__enter__()
                part = self._meet()
                if not exclusive:
                    shared.reservation.release()
            except BaseException as error:
                shared.fail(error)
                shared.failure, shared.is_refused = error, True  # also after an earlier error of this rank
                raise
        return part

    def _meet(self) -> bytes | None:
        shared, cache = self._shared, self._shared.cache
        meeting = MeetingSequence(self._rendezvous, shared.operation)
        with shared.phase("agree"):
            agreement = self._agreement = meeting.exchange(
                "collect", self._first_report, self._unbounded(self._coordinator.agree), RankReport, Agreement
            )
        part = None
        if not agreement.reuse_plan:
            cache.plan = None
            with shared.phase("plan"):
                part = meeting.meet("plan", self._collected().structure.encode, self._coordinator.plan)
        for option in self._options:
            option.meet(agreement.options[option.name], agreement.attempt, meeting, shared.phase)
        return part

    def _first_report(self) -> RankReport:
        """This rank's first report, with the space for its file; or the error of the caller's steps."""
        report = self._collected().report
        with self._shared.progress.bounded(False):  # the storage may hang here
            space = self._shared.storage.free_space()
        seen = None if space is None else astuple(space)
        return msgspec.structs.replace(report, space=seen)

    def _collected(self) -> _Collected:
        assert self._shared.collected is not None
        return _result_of(self._shared.collected)

    def continue_in_background(self) -> None:
        """Uses the rendezvous in the background for all later meetings."""
        cache, name = self._shared.cache, self._agreement.background
        self._rendezvous = cache.background_rendezvous(self._rendezvous, name)

    @contextmanager
    def local_steps(self) -> Iterator[None]:
        """Stores an error of this rank for its report at the commit (note "Fixed meetings")."""
        try:
            yield
        except BaseException as error:
            self._shared.fail(error)

    def prepare(self, part: bytes | None) -> None:
        """Makes the snapshot of this rank's chunks, by a new part of the plan or the cached one."""
        shared, cache, collected = self._shared, self._shared.cache, self._collected()
        with nullcontext() if shared.goes_ahead else no_garbage_collection():  # training needs the collector
            if part is not None:
                shard = prepare_shard(collected.structure, RankPlan.decode(part))
                cache.plan = CachedPlan(self._agreement.attempt.id, shard, collected.digest)
            assert cache.plan is not None
            shared.snapshot = Snapshot(
                collected.capture,
                cache.plan.shard.plan,
                cache.staging,
                cache.allocator,
                shared.rendezvous.deadline,
                shared.progress,
            )
        if shared.failure is not None:
            shared.snapshot.fail(shared.failure)

    def read_state(self) -> None:
        """Lets the options of the save read the state before the caller may change it."""
        collected = self._collected()
        if self._options:
            self._rendezvous.start_heartbeat()  # other ranks may wait there already
        for option in self._options:
            option.read_state(collected.capture.pieces, collected.structure, self._track)

    @contextmanager
    def _track(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """A phase of an option, with the callback for its progress."""
        with self._shared.phase(name) as phase:
            yield self._progress_of(phase, total)

    def write(self, background: bool) -> WriteReport | BaseException:
        """Writes this rank's shard file, if it has one. Returns the report for the commit, or the error."""
        with self._shared.phase("write") as phase:
            return _outcome(partial(self._write_shard, background, phase), phase)

    def _write_shard(self, background: bool, phase: events.Phase) -> WriteReport:
        shared, cache = self._shared, self._shared.cache
        shared.check()
        self._rendezvous.start_heartbeat()
        assert cache.plan is not None and shared.snapshot is not None
        begun, shard, capture = time.monotonic(), cache.plan.shard, self._collected().capture
        owned = {key: capture.objects[key] for key in shard.plan.objects}
        file = WrittenShard.nothing()
        if shard.is_written:
            buffers, cache.buffers = cache.buffers or BufferPool(), None
            storage = shared.storage
            if storage.path is not None:
                choice = choose_cache(shard.data_bytes, direct=storage.direct, beside_training=background)
                phase.note(cache=str(choice))
                storage = storage if choice.through else storage.past_cache()
            rank, attempt = shared.rendezvous.rank, self._agreement.attempt
            write: WriteShard = write_shard
            for option in self._options:
                write = option.writer(write)
            create = partial(storage.create, shard_name(rank, attempt.id))
            on_progress = self._progress_of(phase, shard.data_bytes)
            file = write(
                shard,
                partial(shard.header, attempt, rank, owned),
                shared.snapshot,
                Output(create, buffers, cache.writers, on_progress),
            )
            shared.check()
            cache.buffers = buffers
            shared.snapshot.check_unchanged()
            phase.note(staged=shared.snapshot.staged_bytes, waited=shared.snapshot.waited)
        digests, orders = capture.object_digests()
        return WriteReport(
            file.size,
            file.data_start,
            file.digest,
            file.digests.tobytes(),
            owned,
            tuple(capture.objects),
            digests,
            {option.name: option.report_write(file) for option in self._options},
            time.monotonic() - begun,
            orders,
        )

    def commit(self, report: WriteReport | BaseException) -> SaveResult:
        """Commits with the other ranks. After a refusal, this rank removes its files."""
        shared, attempt = self._shared, self._agreement.attempt
        meeting = MeetingSequence(self._rendezvous, shared.operation)
        try:
            with shared.phase("commit") as phase:
                with shared.progress.bounded():
                    commit = self._unbounded(self._coordinator.commit)
                    result = meeting.exchange(
                        "write", partial(_result_of, report), commit, WriteReport, SaveResult
                    )
                phase.note(**self._coordinator.facts)
                for option in self._options:
                    option.committed(result, phase, shared.rendezvous.rank)
        except RankSilent:
            raise  # note "Whose files" in `remove_own_files`
        except ShardproofError as error:
            if error.details.get("committed", False) is False:
                remove_own_files(shared.storage, shared.rendezvous.rank, attempt.id)
            raise
        return msgspec.structs.replace(result, seconds=time.monotonic() - self._begun)

    def _progress_of(self, phase: events.Phase, total: int) -> Callable[[int], None]:
        """A progress callback that takes the bytes done. It raises once the save has failed."""

        def on_progress(done: int) -> None:
            self._shared.check()
            self._shared.progress.advance()
            self._rendezvous.progress(done, total)
            phase.progress(done, total)

        return on_progress

    def _unbounded(self, decide: Callable[[list[T]], A]) -> Callable[[list[T]], A]:
        """On the coordinator: storage may hang in `decide`, so waiters apply the progress timeout."""

        def decided(posts: list[T]) -> A:
            with self._shared.progress.bounded(False):
                return decide(posts)

        return decided


def _outcome(work: Callable[[], T], phase: events.Phase) -> T | BaseException:
    """The result of `work`, or its error, which the rank reports at the next meeting."""
    try:
        return work()
    except BaseException as error:
        phase.fail(error)
        return error


def _result_of(outcome: T | BaseException) -> T:
    if isinstance(outcome, BaseException):
        try:
            raise outcome
        finally:
            del outcome  # its frames have this one
    return outcome
