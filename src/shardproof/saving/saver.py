"""Saving again and again: one save at a time, each with what the last one left."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from shardproof._utils import forks
from shardproof.errors import RankFailure, SaveSkipped, ShardproofError
from shardproof.planning import CHUNK_BYTES, SAMPLE_BYTES
from shardproof.reentrance import guarded, refuse_inside
from shardproof.rendezvous import Meetings, Rendezvous
from shardproof.saving.background import Workers, unfinished
from shardproof.saving.bases import FindBase
from shardproof.saving.device import pinned_buffer
from shardproof.saving.kept import Kept, Limits, Request
from shardproof.saving.memory import default_budget
from shardproof.saving.pending import PendingSave
from shardproof.saving.replicas import CheckReplicas
from shardproof.saving.result import SaveResult
from shardproof.saving.session import Session
from shardproof.saving.staging import StagingPool
from shardproof.saving.unconfirmed import Unconfirmed
from shardproof.state import Fence
from shardproof.storage import Storage

__all__ = ["Saver", "WhenBusy"]

WhenBusy = Literal["wait", "skip"]

_log = logging.getLogger("shardproof")
guarded("a step of an optimizer, which waits for a save")(Fence.open)


@dataclass(slots=True)
class _UnderWay:
    session: Session
    future: Future[SaveResult]
    pending: PendingSave


class Saver:
    """Saves states to any place, and keeps plan, buffers and threads from one save to the next.

    A plan is valid for one structure: it is used again only when every rank's structure digest equals the
    digest that the plan was made from, and every rank still holds its part of that plan.

    Args:
        rendezvous: where the ranks meet.
        chunk_bytes: upper bound of a stored chunk.
        host_memory_budget: bytes of copies that may wait to be written; None: a quarter of what is available,
            divided by the ranks of this node.
        sample_bytes: of replicas that a rank compares in one save at most, with ``check_replicas="sample"``.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        host_memory_budget: int | None = None,
        sample_bytes: int = SAMPLE_BYTES,
    ) -> None:
        if host_memory_budget is not None and host_memory_budget < 0:
            raise ValueError(f"host_memory_budget is a number of bytes, not {host_memory_budget!r}")
        self._rendezvous = rendezvous
        self._limits = Limits(chunk_bytes, sample_bytes)
        self._budget = host_memory_budget
        self.unconfirmed = Unconfirmed()
        """Commits that are not known to be durable; only rank 0 has any."""
        self._kept: Kept | None = None
        self._process = os.getpid()
        self._thread: Workers
        self._beside: tuple[str, Rendezvous] | None = None
        self._under_way: _UnderWay | None = None
        self._turn = forks.lock()

    def save(
        self,
        storage: Storage,
        state: Any,
        *,
        step: int | None = None,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        check_replicas: CheckReplicas | None = None,
    ) -> SaveResult:
        """Saves a state tree and returns once it is committed. Called by every rank; one save at a time.

        Arguments are those of `begin`.

        Raises:
            AlreadyCommittedError: a committed checkpoint is in the way and `overwrite` is False.
            StructureError, TilingError, PlainDataError: the state cannot be kept; nothing was committed.
            RankFailure, RankSilent: a rank failed or fell silent; nothing was committed, unless the text says
                so or it was the coordinator, which may have published.
            StorageError: the storage failed.
        """
        refuse_inside("save")
        request = Request(step, metadata or {}, overwrite, None, check_replicas)
        with self._turn:  # threads of one rank take turns; a save waits for ranks, and those have deadlines
            return self._save(storage, state, request)

    @guarded("save")
    def _save(self, storage: Storage, state: Any, request: Request) -> SaveResult:
        before = self._under_way
        try:
            return self._begin(storage, state, request, watched=False).outcome()
        except BaseException as error:  # the caller may change the state from here on
            if self._under_way is not None and self._under_way is not before:
                self._under_way.session.give_up(error)
                self._under_way.pending.tell()
            raise

    def begin(
        self,
        storage: Storage,
        state: Any,
        *,
        step: int | None = None,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        when_busy: WhenBusy = "wait",
        stage_all: bool = False,
        base: FindBase | None = None,
        full_every: int | None = None,
        check_replicas: CheckReplicas | None = None,
        after: Callable[[SaveResult, Callable[[int, int], None]], None] | None = None,
    ) -> PendingSave:
        """Begins to save a state tree, and returns once the caller may change it.

        Args:
            storage: the place.
            state: the state tree.
            step: kept in the manifest.
            metadata: plain data, kept in the manifest.
            overwrite: whether to replace a committed checkpoint.
            when_busy: whether to wait for a save that is under way, or to skip this one. If any rank is busy,
                all skip.
            stage_all: copy everything before this returns, also what only optimizers change.
            base: finds an earlier committed step, beside `storage`, whose chunks need not be written again;
                called on the coordinator. None: all are written.
            full_every: of so many saves in a row with a `base`, at least one is written in full. None: no
                bound.
            check_replicas: whether ranks that hold the same boxes compare their bytes: ``"all"`` of them; or
                a ``"sample"`` of `sample_bytes` a rank, another one at each save, until all had their turn.
                What differs is in `SaveResult.diverged`, and logged. Tensors that each rank changes in its own
                way (statistics of BatchNorm, unless they are synchronised) differ by design: leave them
                out, or keep them by rank (`PerRank`).
            after: called in the background once it is committed, before its result is there, with the
                checkpoint and a function that takes steps done and steps in all.

        Raises:
            ReentrantCallError: a signal handler called it that interrupted a save or a load.
            ShardproofError: as for `save`, for what is known before training goes on; or why the save before
                this one failed, if nobody was told.
        """
        refuse_inside("save")
        begun = time.monotonic()
        request = Request(step, metadata or {}, overwrite, base, check_replicas, full_every)
        with self._turn:
            pending = self._begin(
                storage,
                state,
                request,
                watched=True,
                stage_all=stage_all,
                when_busy=when_busy,
                after=after,
            )
            pending.blocked = time.monotonic() - begun
            return pending

    @guarded("save")
    def _begin(
        self,
        storage: Storage,
        state: Any,
        request: Request,
        *,
        watched: bool,
        stage_all: bool = False,
        when_busy: WhenBusy = "wait",
        after: Callable[[SaveResult, Callable[[int, int], None]], None] | None = None,
    ) -> PendingSave:
        """Begins a save. Its meetings are held by the thread of saves, which no interrupt reaches.

        An interrupt before that thread claims the operation leaves it for all ranks. After that the save goes
        on to its last meeting, and fails there. `watched` says whether the caller goes on before it is over.
        """
        with self._rendezvous.operation(f"save {storage.location}") as operation:
            if when_busy == "skip" and self._any_busy(storage):
                _log.info("%s: skipped, the save before it is still under way", storage.location)
                return PendingSave(request.step, None)
            session = self._session(storage, request)
            patience = 2 * self._rendezvous.deadline
            future: Future[SaveResult] = Future()
            pending = PendingSave(request.step, future, session.progress, patience)
            served = list[object]()

            def work() -> SaveResult:
                if not operation.claim():
                    raise SaveSkipped(f"{storage.location}: the save was interrupted before it began")
                try:
                    with operation:
                        session.agree(keeps_turn=not watched)
                        place = self._rendezvous_beside(session) if watched else self._rendezvous
                        session.hash_replicas(place)
                        session.let_caller_go()
                        if not watched:
                            return self._finish(session, place, after)
                    return self._finish(session, place, after)
                except BaseException as error:
                    failure = self._failure(storage, session, error, told=not watched or session.is_refused)
                finally:
                    session.end()
                    served.clear()
                raise failure

            try:
                session.begin(state, guarded=watched, stage_all=stage_all)
                served.append(self._rendezvous.hold())  # until this save needs the store no more
                self._under_way = _UnderWay(session, future, pending)
                self._thread.submit(work, future)
                unfinished.add(future, session.progress, patience, f"save {storage.location}")
                session.wait_until_agreed()
                session.stage()
            except BaseException as error:  # the caller may change what was not copied
                session.give_up(error)
                pending.tell()
                if operation.claim():  # the thread of saves has not, and lets go of it
                    self._under_way = None
                    session.end()
                raise
            return pending

    def _finish(
        self,
        session: Session,
        rendezvous: Rendezvous,
        after: Callable[[SaveResult, Callable[[int, int], None]], None] | None,
    ) -> SaveResult:
        done = session.finish(rendezvous)
        if after is not None:
            after(done, lambda _done, _total: session.progress.moved())
        session.succeed()
        return done

    def _failure(
        self, storage: Storage, session: Session, error: BaseException, *, told: bool
    ) -> ShardproofError:
        """The error of a save as one of this package; logged, unless the caller waits for it."""
        if session.is_refused and isinstance(error, ShardproofError):
            return ShardproofError.from_wire(
                error.to_wire()
            )  # the caller's own has frames that hold the state
        if not told:
            _log.error("%s: the save failed: %s", storage.location, error)
        if isinstance(error, ShardproofError):
            return error
        rank, cause = self._rendezvous.rank, f"{type(error).__name__}: {error}"
        failure = RankFailure(
            f"{storage.location}: rank {rank} failed: {cause}", phase="background", causes={str(rank): cause}
        )
        failure.__cause__ = None if session.is_refused else error
        return failure

    def fence(self) -> None:
        """Returns when the save under way reads no memory that the caller may write to."""
        refuse_inside("fence")
        if (under_way := self._own_save()) is not None:
            under_way.session.open_fence()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the save that is under way.

        Args:
            timeout: seconds; None: as long as it moves.

        Raises:
            TimeoutError: it is still under way.
            ShardproofError: it failed, and nobody was told yet.
        """
        refuse_inside("wait")
        under_way = self._own_save()
        if under_way is None:
            return
        if timeout is None:
            under_way.pending.settle()
        else:
            under_way.future.exception(timeout)
        if (failed := self._take_failure()) is not None:
            raise failed

    def settle(self) -> None:
        """Waits for the save under way, whatever comes of it; whoever asks next is told."""
        if (under_way := self._own_save()) is not None:
            self._wait_for(under_way)

    def is_saving(self) -> bool:
        """Whether a save has begun on this rank and is not over. Any thread may ask."""
        under_way = self._own_save()
        return self._turn.locked() or (under_way is not None and not under_way.future.done())

    def _session(self, storage: Storage, request: Request) -> Session:
        """The next session, once the one before is over."""
        kept = self._keep()
        self.settle()
        return Session(self._rendezvous, storage, request, kept, self._limits, failed=self._take_failure())

    def _keep(self) -> Kept:
        if self._kept is None or self._process != os.getpid():  # threads do not come along in a fork
            self._process = os.getpid()
            self._under_way = None
            self._thread = Workers("shardproof-save", 1)
            budget = default_budget() if self._budget is None else self._budget
            self._kept = Kept(
                Workers("shardproof-write", 2),
                Workers("shardproof-touch", 1),
                StagingPool(budget, pinned_buffer),
                self.unconfirmed,
            )
        return self._kept

    def _rendezvous_beside(self, session: Session) -> Rendezvous:
        """Where saves meet in the background: named after the first of them, so alike on all ranks."""
        name = session.background
        if self._beside is None or self._beside[0] != name:
            self._beside = name, self._rendezvous.beside(name)
        self._beside[1].deadline = self._rendezvous.deadline
        return self._beside[1]

    def _any_busy(self, storage: Storage) -> bool:
        """Whether the save before is still under way on some rank; the same answer on all."""
        under_way = self._own_save()
        busy = under_way is not None and not under_way.future.done()
        meeting = Meetings(self._rendezvous, f"save {storage.location}")

        def decide(posts: list[bytes]) -> bytes:
            return msgspec.msgpack.encode(any(msgspec.msgpack.decode(post, type=bool) for post in posts))

        answer = meeting.meet("busy", lambda: msgspec.msgpack.encode(busy), decide)
        return msgspec.msgpack.decode(answer, type=bool)

    def _wait_for(self, under_way: _UnderWay) -> None:
        count = 0

        def tick() -> None:
            nonlocal count
            count += 1
            self._rendezvous.progress(count, 0)  # others may wait for this rank at the next meeting

        under_way.pending.settle(tick)

    def _take_failure(self) -> ShardproofError | None:
        under_way = self._own_save()
        return None if under_way is None else under_way.pending.take_failure()

    def _own_save(self) -> _UnderWay | None:
        """The last save that this process began; what a parent began never ends in a child made by fork."""
        return self._under_way if self._process == os.getpid() else None
