"""The saver: runs one save at a time, each with the cache of earlier saves."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from shardproof._utils import forks
from shardproof._utils.arguments import check_boolean, check_whole
from shardproof.engine.planning import CHUNK_BYTES, SAMPLE_BYTES
from shardproof.engine.rendezvous import MeetingSequence, Rendezvous
from shardproof.engine.saving.background import (
    PendingSave,
    Workers,
    drop_last_frames,
    unfinished,
    wait_for_end,
)
from shardproof.engine.saving.cache import Limits, SaveCache
from shardproof.engine.saving.commit import Unconfirmed
from shardproof.engine.saving.incremental import BaseCache, IncrementalOption
from shardproof.engine.saving.messages import SaveResult
from shardproof.engine.saving.provenance import facts, is_allowed
from shardproof.engine.saving.replica_check import CheckReplicas, ReplicaCache, ReplicaOption
from shardproof.engine.saving.save_option import SaveOption
from shardproof.engine.saving.save_protocol import After, Save
from shardproof.engine.saving.save_request import SaveRequest
from shardproof.engine.saving.staging import StagingPool, default_budget, pinned_buffer
from shardproof.engine.state import Fence
from shardproof.engine.storage import Storage
from shardproof.errors import ShardproofError
from shardproof.reentrance import guarded, refuse_inside

WhenBusy = Literal["wait", "skip"]

_log = logging.getLogger("shardproof")
# A signal handler may interrupt a step that waits in `Fence.open`. A save from that handler would wait for
# itself.
guarded("a step of an optimizer, which waits for a save")(Fence.open)


class Saver:
    """Saves states to any storage, and caches plan, buffers and threads between saves.

    A plan is reused if the structure digests of all ranks are unchanged, and every rank has its part of the
    plan cached.

    Args:
        rendezvous: the rendezvous of all ranks.
        chunk_bytes: upper bound of a stored chunk.
        host_memory_budget: upper bound in bytes of the copies that wait to be written. None: a quarter of the
            available memory, divided by the ranks of this node.
        sample_bytes: upper bound of the replicas that a rank hashes in one save with
            ``check_replicas="sample"``.
        provenance: True to record the origin of each save in its manifest, unless the environment variable
            SHARDPROOF_PROVENANCE is 0; see `shardproof.save`.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        host_memory_budget: int | None = None,
        sample_bytes: int = SAMPLE_BYTES,
        provenance: bool = True,
    ) -> None:
        check_boolean("provenance", provenance)
        check_whole("host_memory_budget", host_memory_budget, "of bytes")
        if host_memory_budget is not None and host_memory_budget < 0:
            raise ValueError(f"host_memory_budget is {host_memory_budget!r}, not a number of bytes")
        self._rendezvous = rendezvous
        self._limits = Limits(chunk_bytes, sample_bytes)
        self._budget = host_memory_budget
        self.unconfirmed = Unconfirmed()
        """Commits that are not known to be durable; empty on ranks other than 0."""
        self._records_provenance = provenance and rendezvous.rank == 0 and is_allowed()
        if self._records_provenance:
            facts.begin()
        self._cache: SaveCache | None = None
        self._bases = BaseCache()
        self._replicas = ReplicaCache()
        self._process = os.getpid()
        self._thread: Workers
        self._under_way: Save | None = None
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
        check_place: Callable[[], None] | None = None,
        on_commit: Callable[[], None] | None = None,
    ) -> SaveResult:
        """Saves a state tree and returns once it is committed. All ranks call it.

        The arguments are those of `begin` and `SaveRequest`.

        Raises:
            AlreadyCommittedError: `storage` has a committed checkpoint and `overwrite` is False.
            StructureError, TilingError, PlainDataError: the state cannot be stored; nothing was committed.
            RankFailure, RankSilent: a rank failed or fell silent. Nothing was committed, with two exceptions:
                the message says that it was, or the silent rank is the coordinator.
            StorageError: the storage failed.
        """
        refuse_inside("save")
        request = SaveRequest(
            step,
            metadata,
            overwrite,
            check_replicas=check_replicas,
            check_place=check_place,
            on_commit=on_commit,
        )
        with self._turn:  # serialises the threads of a rank; deadlines bound the wait
            return self._save(storage, state, request)

    @guarded("save")
    def _save(self, storage: Storage, state: Any, request: SaveRequest) -> SaveResult:
        before = self._under_way
        try:
            return self._begin(storage, state, request, background=False).outcome()
        except BaseException as error:  # the caller may change the state from here on
            if self._under_way is not None and self._under_way is not before:
                self._under_way.fail(error)
                self._under_way.pending.mark_reported()
            raise

    def begin(
        self,
        storage: Storage,
        state: Any,
        request: SaveRequest | None = None,
        *,
        when_busy: WhenBusy = "wait",
        stage_all: bool = False,
        after: After | None = None,
    ) -> PendingSave:
        """Begins to save a state tree, and returns once the caller may change it. All ranks call it.

        Args:
            storage: storage of the step.
            state: the state tree.
            request: what is saved with the state, and how. None: the defaults.
            when_busy: "wait" for the current save, or "skip" this one. If one rank skips, all ranks skip.
            stage_all: True to copy all memory before this returns, including memory that only optimizers
                write.
            after: called on each rank in the background after the commit and before its `PendingSave.done`,
                with the result and a function that takes the numbers of done and total steps.

        Raises:
            ReentrantCallError: a signal handler that interrupted a save or a load called it.
            ShardproofError: as for `save`, if the error occurs before training continues; or the error of the
                previous save, if no caller has received it.
        """
        refuse_inside("save")
        begun = time.monotonic()
        with self._turn:
            pending = self._begin(
                storage,
                state,
                request or SaveRequest(),
                background=True,
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
        request: SaveRequest,
        *,
        background: bool,
        stage_all: bool = False,
        when_busy: WhenBusy = "wait",
        after: After | None = None,
    ) -> PendingSave:
        """Begins a save; `background` as for `Save.start`.

        If an interrupt comes before the save thread claims the operation, the operation fails on all ranks.
        Later, the save continues to its last meeting, and fails there.
        """
        with self._rendezvous.operation(f"save {storage.location}") as operation:
            if when_busy == "skip":
                before = self._own_save()
                busy = before is not None and not before.future.done()
                meeting = MeetingSequence(self._rendezvous, f"save {storage.location}")
                if meeting.exchange("busy", lambda: busy, any, bool, bool):  # on any rank
                    _log.info("%s: skipped, because the previous save has not ended", storage.location)
                    return PendingSave(request.step, None)
            cache = self._own_cache()
            self.wait_for_end()
            options: list[SaveOption] = []
            if request.base is not None:
                options.append(IncrementalOption(request.base, request.full_every, self._bases))
            if request.check_replicas is not None:
                options.append(ReplicaOption(request.check_replicas, self._replicas))
            save = Save(self._rendezvous, storage, request, options, cache, self._limits)
            failed = self._take_failure()
            try:
                save.start(
                    state,
                    operation,
                    partial(self._submit, save),
                    background=background,
                    stage_all=stage_all,
                    after=after,
                    failed=failed,
                )
            except BaseException as error:  # the caller may change memory that was not copied
                save.fail(error)
                save.pending.mark_reported()
                if operation.claim():  # the save thread has not claimed it, and does not end the save
                    self._under_way = None
                    save.end()
                raise
            return save.pending

    def _submit(self, save: Save, work: Callable[[], SaveResult]) -> None:
        self._under_way = save
        save.future.add_done_callback(drop_last_frames)
        self._thread.submit(work, save.future)
        unfinished.add(save.future, save.progress, save.patience, save.operation)

    def fence(self) -> None:
        """Waits until the current save does not read memory of the state any more."""
        refuse_inside("fence")
        if (under_way := self._own_save()) is not None:
            under_way.open_fence()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the current save.

        Args:
            timeout: seconds; None: until the save is over or makes no progress.

        Raises:
            TimeoutError: the save has not ended.
            ShardproofError: the save failed, and no caller has received the error.
        """
        refuse_inside("wait")
        under_way = self._own_save()
        if under_way is None:
            return
        if timeout is None:
            under_way.pending.wait_for_end()
        else:
            wait_for_end(under_way.future, under_way.pending.step, timeout)
        if (failed := self._take_failure()) is not None:
            try:
                raise failed
            finally:
                del failed  # its frames have this one

    def wait_for_end(self) -> None:
        """Waits for the current save; the next call reports its error."""
        count = 0

        def tick() -> None:
            nonlocal count
            count += 1
            self._rendezvous.progress(count, 0)  # other ranks may wait for this rank at the next meeting

        if (under_way := self._own_save()) is not None:
            under_way.pending.wait_for_end(tick)

    def is_saving(self) -> bool:
        """True while this rank saves. Any thread may call it."""
        under_way = self._own_save()
        return self._turn.locked() or (under_way is not None and not under_way.future.done())

    def _own_cache(self) -> SaveCache:
        if self._cache is None or self._process != os.getpid():  # a fork does not copy threads
            self._process = os.getpid()
            self._under_way = None
            self._thread = Workers("shardproof-save", 1)
            budget = default_budget() if self._budget is None else self._budget
            self._cache = SaveCache(
                Workers("shardproof-write", 2),
                Workers("shardproof-touch", 1),
                StagingPool(budget, pinned_buffer),
                self.unconfirmed,
                self._records_provenance,
            )
        return self._cache

    def _take_failure(self) -> ShardproofError | None:
        under_way = self._own_save()
        return None if under_way is None else under_way.pending.take_failure()

    def _own_save(self) -> Save | None:
        """The last save of this process. In a forked child, a save of its parent never ends."""
        return self._under_way if self._process == os.getpid() else None
