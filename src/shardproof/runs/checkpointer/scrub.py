"""The scrub: a thread that reads again the files of other steps that a step refers to.

Note "Proved": a committed step is proved readable if no damage of it is known, and the scrub has read and
verified its references since its commit. References are the chunks that it has in files of other steps. Its
own files need no second read: their bytes were hashed when they were written, and flushed before the commit.

Note "Only rank 0 scrubs": rank 0 chooses the base of every save and removes steps. Only these two decisions
use the result of the scrub, so the other ranks need not know it.

Note "Yielding": the scrub reads small pieces. Before each piece it waits for the save under way, and then
until the rate allows the read. Stopping the scrub ends both waits at once. No save waits for the scrub.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from shardproof.engine.format import has_no_references, read_index, read_manifest, read_seal
from shardproof.engine.saving import Workers
from shardproof.engine.storage import Storage, UncachedStorage
from shardproof.errors import FormatError, NotCommittedError, ShardproofError, StorageError
from shardproof.runs.checkpointer.judge import Damage, is_damage
from shardproof.runs.checkpointer.step_folders import folders_in
from shardproof.runs.maintenance import verify

_POLL = 0.05
"""Seconds between two checks for a running save."""

_log = logging.getLogger("shardproof")


class Scrub:
    """Reads the references of steps again, and records the proved steps and the damage.

    It reads `rate` bytes a second at most; None: no scrub. A run on an object store has none, because the
    store compares the checksums of its objects.
    """

    def __init__(self, run: Storage, rate: int | None, is_saving: Callable[[], bool]) -> None:
        self.damage: tuple[Damage, ...] = ()
        """The damage that the scrub found, oldest first."""
        self._run = run
        self._rate = rate if run.path is not None else None
        self._is_saving = is_saving
        self._process = -1
        self._lock: threading.Lock
        self._stop: threading.Event
        self._workers: Workers
        self._next: str | None = None
        self._pass: Future[None] | None = None
        self._proved: frozenset[tuple[str, bytes]] = frozenset()

    def prepare(self) -> None:
        """Starts the thread, once in a process. A program that is exiting cannot start a thread any more."""
        if self._rate is not None and self._process != os.getpid():
            self._process, self._lock, self._stop = os.getpid(), threading.Lock(), threading.Event()
            self._next = self._pass = None
            self._workers = Workers("shardproof-scrub", 1)

    def begin(self, folder: str) -> None:
        """Schedules the references of a step. Replaces a scheduled step that is not begun.

        Returns at once. `prepare` must be called before.
        """
        if self._rate is None:
            return
        with self._lock:
            self._next = folder
            if self._pass is None or self._pass.done():
                self._pass = self._workers.submit(self._work)

    def wait(self, timeout: float | None) -> None:
        """Waits until the scheduled steps are read, or the scrub is stopped."""
        under_way = self._pass
        if self._process == os.getpid() and under_way is not None:
            under_way.result(timeout)

    def stop(self) -> None:
        """Ends the scrub before its next read. Does not wait for it."""
        if self._process == os.getpid():  # after a fork, the event may be locked for ever in the child
            self._stop.set()

    def is_proved(self, folder: str) -> bool:
        """True if a committed step without known damage is proved readable (note "Proved")."""
        place = self._run.within(folder)
        seal = read_seal(place)
        return seal is not None and ((folder, seal) in self._proved or has_no_references(place))

    def is_damaged(self, folder: str) -> bool:
        """True if a committed step has chunks in damaged bytes, or the storage cannot be read."""
        return bool(self.damage) and self._has_chunks_in(folder, self.damage)

    def _work(self) -> None:
        while True:
            with self._lock:
                folder, self._next = self._next, None
                if folder is None or self._stop.is_set():
                    self._pass = None
                    return
            try:
                self._scrub(folder)
            except _Stopped:
                return
            except Exception as error:
                _log.warning("%s/%s: could not be read again: %s", self._run.location, folder, error)

    def _scrub(self, folder: str) -> None:
        place = self._run.within(folder)
        seal = read_seal(place)
        if seal is None:
            return
        try:
            if has_no_references(place):
                return
            assert place.path is not None
            report = verify(UncachedStorage(place.path, before_read=self._yield), referenced_only=True)
        except ShardproofError:
            if read_seal(place) == seal:
                raise
            return  # the step was removed or replaced meanwhile
        if read_seal(place) != seal:
            return  # the step was removed or replaced meanwhile, and its files with it
        if report.ok:
            there = set(self._run.folders())
            self._proved = frozenset({(folder, seal), *(one for one in self._proved if one[0] in there)})
        for fault in report.faults:
            self._record(fault, folder)

    def _record(self, fault: ShardproofError, folder: str) -> None:
        damage = Damage.of(fault, self._run.location, folder) if is_damage(fault) else None
        if damage is None:
            _log.warning("%s/%s: could not be read again: %s", self._run.location, folder, fault)
        elif damage not in self.damage:
            self.damage = (*self.damage, damage)
            names = [folder.name for folder in folders_in(self._run)]
            steps = [name for name in names if self._has_chunks_in(name, [damage])]
            _log.error(
                "%s: %s changed on the disk, and %s cannot be restored: each has chunks there. The next save "
                "refers to none of these steps and writes the chunks again. Do not trust this disk (see "
                "`dmesg`). %s",
                self._run.location,
                damage,
                ", ".join(steps),
                fault.message,
            )

    def _has_chunks_in(self, folder: str, damage: Sequence[Damage]) -> bool:
        """True if a step has chunks in damaged bytes, or the storage cannot be read."""
        place = self._run.within(folder)
        try:
            manifest = read_manifest(place)
            files = {f"{record.folder or folder}/{record.name}" for record in manifest.files}
            if files.isdisjoint(one.file for one in damage):
                return False
            table = read_index(place, manifest)
        except (FormatError, NotCommittedError):
            return False
        except StorageError:
            return True
        return any(one.is_in(folder, manifest, table) for one in damage)

    def _yield(self, count: int) -> None:
        """Waits until `count` more bytes may be read (note "Yielding")."""
        assert self._rate is not None
        while self._is_saving():
            if self._stop.wait(_POLL):
                raise _Stopped
        if self._stop.wait(count / self._rate):
            raise _Stopped


class _Stopped(Exception):
    """The scrub was stopped."""
