"""The work of each rank after a commit, in the save thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardproof.engine.format import shard_name
from shardproof.engine.saving import SaveResult
from shardproof.engine.storage import LocalStorage
from shardproof.runs.checkpointer.open_run import OpenRun
from shardproof.runs.checkpointer.page_cache import NewestStep
from shardproof.runs.checkpointer.policies import Retention
from shardproof.runs.checkpointer.retention import KnownSteps, retain
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.runs.checkpointer.tiers import Uploader, UploadRequest


@dataclass(frozen=True, slots=True, eq=False)
class AfterCommit:
    """Begins the upload, and reads the step into the page cache. Rank 0 also retains and scrubs."""

    run: OpenRun
    keep: Retention | None
    newest: NewestStep | None
    uploader: Uploader | None
    note_cost: Callable[[float], None]

    def __call__(
        self, upload: UploadRequest | None, committed: SaveResult, on_progress: Callable[[int, int], None]
    ) -> None:
        """Does the work. With local disks, each rank serves its files until all ranks are done."""
        if self.run.nodes is None:
            self._tidy(upload, committed, on_progress)
            return
        group = self.run.nodes.group
        meetings = group.meetings
        meetings.start_heartbeat()

        def report_progress(done: int, total: int) -> None:
            on_progress(done, total)
            meetings.progress(done, total)

        try:
            self._tidy(upload, committed, report_progress)
        finally:
            group.end_barrier(f"save {committed.attempt}")

    def _tidy(
        self, upload: UploadRequest | None, committed: SaveResult, on_progress: Callable[[int, int], None]
    ) -> None:
        assert committed.step is not None
        run, name = self.run, step_name(committed.step)
        self.note_cost(committed.seconds)
        run.damaged.discard(committed.step)
        run.damaged_everywhere.discard(committed.step)
        if upload is not None and self.uploader is not None:
            self.uploader.committed(upload, committed.step, committed.attempt)
        own = run.storage if run.nodes is None else run.nodes.own
        if self.newest is not None and own.path is not None:
            file = shard_name(run.rendezvous.rank, committed.attempt)
            self.newest.committed(LocalStorage(own.path / name), file)
        if run.rendezvous.rank:
            return
        run.facts.forget(committed.step)
        run.restorable.trust(committed.step)
        if self.keep is not None:
            with run.phase(committed.step, name, "retain"):
                known = KnownSteps(
                    run.facts,
                    run.restorable,
                    run.branch_removal,
                    run.is_damaged,
                    lambda step: run.scrub.is_proved(step_name(step)),
                    run.is_unconfirmed,
                )
                protect = None if self.uploader is None else self.uploader.protect
                retain(
                    run.storage, self.keep, committed.step, known, on_progress=on_progress, protect=protect
                )
        run.scrub.begin(name)
