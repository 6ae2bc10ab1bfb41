"""The work of each rank after a commit, in the save thread.

A part of it reads the newest step into the page cache, so that a restart on the same node reads from memory.

Note: one thread, at a bounded rate
    A save in the background writes past the page cache. After the commit a thread of each rank reads the file
    that the rank wrote, at `BYTES_PER_SECOND` or less. The kernel reads it into the cache and copies nothing
    into the process, so training keeps its processors. The next save stops the thread. It also stops if the
    rest does not fit (`engine.storage.cache_rule`). Cached pages of other files count as available memory
    there, so the step may take the place of pages that were not used for long. The commit of a newer step
    drops the pages of the older one.

Note: when a read costs little
    Reading each file once more costs a local disk little. Storage that many nodes share would serve the
    whole checkpoint again. So ``cache="auto"`` reads only from local file systems.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardproof.engine.format import shard_name
from shardproof.engine.saving import SaveResult
from shardproof.engine.storage import LocalStorage, fits_cache
from shardproof.errors import StorageError
from shardproof.runs.checkpointer.open_run import OpenRun
from shardproof.runs.checkpointer.policies import Retention
from shardproof.runs.checkpointer.retention import KnownSteps, retain
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.runs.checkpointer.tiers import Uploader, UploadRequest

BYTES_PER_SECOND = 256 << 20
_REQUEST = 16 << 20
_LOCAL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"}
"""File systems of disks that no other node uses."""

_log = logging.getLogger("shardproof")


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


def is_on_local_disk(path: str, mounts: Path) -> bool:
    """True if the file system that has `path` is known to be on a disk of this node."""
    try:
        device = os.stat(path).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        found = [line.split(" - ", 1) for line in mounts.read_text(encoding="utf-8").splitlines()]
        kinds = {after.split()[0] for before, after in found if before.split()[2] == number}
    except (OSError, ValueError, IndexError):
        return False
    return bool(kinds) and kinds <= _LOCAL


class NewestStep:
    """This rank's file of the newest step, in the page cache.

    Args:
        drop_older: True to drop the file of the previous step. False if newer steps refer to that file.
        rate: bytes a second, at most.
        only_if_local: True to read only from local file systems; see the note "when a read costs little".
        mounts: the table of the mounted file systems.
    """

    def __init__(
        self,
        *,
        drop_older: bool = True,
        rate: int = BYTES_PER_SECOND,
        only_if_local: bool = False,
        mounts: Path = Path("/proc/self/mountinfo"),
    ) -> None:
        self._drop_older = drop_older
        self._rate = rate
        self._only_if_local = only_if_local
        self._mounts = mounts
        self._cached: tuple[LocalStorage, str] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def stop(self) -> None:
        """Ends the read under way, without waiting for it. The pages that were read stay in the cache."""
        self._stop.set()

    def committed(self, storage: LocalStorage, name: str) -> None:
        """Begins to read a file of the newest step, and drops the file of the step before."""
        self.stop()
        older, self._cached = self._cached if self._drop_older else None, (storage, name)
        stop = self._stop = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(storage, name, older, stop), name="shardproof-page-cache", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the program is exiting, or at a limit of threads
            _log.debug("%s/%s stays out of the page cache: %s", storage.location, name, error)
        else:
            self._thread = thread

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the current read. Returns True if it ended."""
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _run(
        self, storage: LocalStorage, name: str, older: tuple[LocalStorage, str] | None, stop: threading.Event
    ) -> None:
        try:
            if older is not None:
                _drop(*older)
            size = storage.size(name)
            if size is None:  # this rank wrote nothing, or retention was faster
                return
            if self._only_if_local and not is_on_local_disk(storage.location, self._mounts):
                return
            for start in range(0, size, _REQUEST):
                choice = fits_cache(size - start)
                if stop.is_set() or not choice.through:
                    _log.debug("%s/%s: read up to byte %d: %s", storage.location, name, start, choice)
                    return
                storage.fill_cache(name, start, min(_REQUEST, size - start))
                stop.wait(_REQUEST / self._rate)
        except StorageError as error:
            _log.debug("%s/%s stays out of the page cache: %s", storage.location, name, error)
        finally:
            storage.close()


def _drop(storage: LocalStorage, name: str) -> None:
    """Drops the pages of an older step. A file that retention removed has none."""
    try:
        storage.drop_cached(name)
    except StorageError as error:
        if not error.details.get("missing"):
            raise
    finally:
        storage.close()
