"""Saving again and again: one save at a time, each with what the last one left."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from shardproof.errors import RankFailure, ShardproofError
from shardproof.planning import CHUNK_BYTES, SAMPLE_BYTES
from shardproof.rendezvous import Meetings, Rendezvous
from shardproof.saving.background import Workers, unfinished
from shardproof.saving.bases import FindBase
from shardproof.saving.committed import Committed
from shardproof.saving.device import pinned_buffer
from shardproof.saving.kept import Kept, Limits, Request
from shardproof.saving.memory import default_budget
from shardproof.saving.pending import PendingSave
from shardproof.saving.replicas import CheckReplicas
from shardproof.saving.session import Session
from shardproof.saving.staging import StagingPool
from shardproof.saving.unconfirmed import Unconfirmed
from shardproof.storage import Storage

__all__ = ["Saver", "WhenBusy"]

WhenBusy = Literal["wait", "skip"]

_log = logging.getLogger("shardproof")


@dataclass(slots=True)
class _UnderWay:
    session: Session
    future: Future[Committed]
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
        self._turn = threading.Lock()

    def save(
        self,
        storage: Storage,
        state: Any,
        *,
        step: int | None = None,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        check_replicas: CheckReplicas | None = None,
    ) -> Committed:
        """Saves a state tree and returns once it is committed. Called by every rank; one save at a time.

        Arguments are those of `begin`.

        Raises:
            AlreadyCommittedError: a committed checkpoint is in the way and `overwrite` is False.
            StructureError, TilingError, PlainDataError: the state cannot be kept; nothing was committed.
            RankFailure, RankSilent: a rank failed or fell silent; nothing was committed, unless the text says
                so or it was the leader, which may have published.
            StorageError: the storage failed.
        """
        with self._turn:  # threads of one rank take turns; a save waits for ranks, and those have deadlines
            session = self._session(storage, Request(step, metadata or {}, overwrite, None, check_replicas))
            try:
                session.begin(state, guarded=False)
                session.hash_replicas(self._rendezvous)
                done = session.finish(self._rendezvous)
                session.succeed()
                return done
            finally:
                session.end()

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
        after: Callable[[Committed, Callable[[int, int], None]], None] | None = None,
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
                called on the leader. None: all are written.
            full_every: of so many saves in a row with a `base`, at least one is written in full. None: no
                bound.
            check_replicas: whether ranks that hold the same boxes compare their bytes: ``"all"`` of them; or
                a ``"sample"`` of `sample_bytes` a rank, another one at each save, until all had their turn.
                What differs is in `Committed.diverged`, and logged. Tensors that each rank changes in its own
                way (statistics of BatchNorm, unless they are synchronised) differ by design: leave them
                out, or keep them by rank (`PerRank`).
            after: called in the background once it is committed, before its result is there, with the
                checkpoint and a function that takes steps done and steps in all.

        Raises:
            ShardproofError: as for `save`, for what is known before training goes on; or why the save before
                this one failed, if nobody was told.
        """
        begun = time.monotonic()
        with self._turn:
            if when_busy == "skip" and self._any_busy(storage):
                _log.info("%s: skipped, the save before it is still under way", storage.location)
                skipped = PendingSave(step, None)
                skipped.blocked = time.monotonic() - begun
                return skipped
            request = Request(step, metadata or {}, overwrite, base, check_replicas, full_every)
            session = self._session(storage, request)
            rank, patience = self._rendezvous.rank, 2 * self._rendezvous.deadline
            served = list[object]()

            def work() -> Committed:
                try:
                    session.agree()
                    done = session.finish(self._rendezvous_beside(session))
                    if after is not None:
                        after(done, lambda _done, _total: session.progress.moved())
                    session.succeed()
                    return done
                except BaseException as error:
                    _log.error("%s: the save failed: %s", storage.location, error)
                    if isinstance(error, ShardproofError):
                        raise
                    raise RankFailure(
                        f"{storage.location}: rank {rank} failed: {type(error).__name__}: {error}",
                        phase="background",
                        causes={str(rank): f"{type(error).__name__}: {error}"},
                    ) from error
                finally:
                    session.end()
                    served.clear()

            future: Future[Committed] | None = None
            try:
                session.begin(state, guarded=True, stage_all=stage_all)
                if not session.is_ahead:
                    session.hash_replicas(self._rendezvous_beside(session))
                served.append(self._rendezvous.hold())  # until this save needs the store no more
                future = self._thread.submit(work)
                pending = PendingSave(step, future, session.progress, patience)
                self._under_way = _UnderWay(session, future, pending)
                unfinished.add(future, session.progress, patience, f"save {storage.location}")
                if session.interrupt is not None:
                    raise session.interrupt  # the other ranks are told in the background
                session.stage()
            except BaseException as error:  # the caller may change what was not copied
                session.give_up(error)
                if future is None:
                    session.end()
                raise
            pending.blocked = time.monotonic() - begun
            return pending

    def fence(self) -> None:
        """Returns when the save under way reads no memory that the caller may write to."""
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
        if under_way is None or under_way.session.interrupt is not None:  # which was raised at once
            return None
        return under_way.pending.take_failure()

    def _own_save(self) -> _UnderWay | None:
        """The last save that this process began; what a parent began never ends in a child made by fork."""
        return self._under_way if self._process == os.getpid() else None
