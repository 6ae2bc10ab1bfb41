"""Watches the checkpoints of a run, and the saves under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardproof._utils.humanize import listed
from shardproof.engine.storage import Storage
from shardproof.runs.checkpointer.judge import Verdict
from shardproof.runs.checkpointer.retention import Leftover, leftovers
from shardproof.runs.checkpointer.scan import StepInfo, scan_run


@dataclass(frozen=True, slots=True)
class WatchedSave:
    """One checkpoint of a run, or the files of one attempt to save that no manifest names."""

    folder: str
    step: int | None
    attempt: str | None
    state: str
    """The word of its `Verdict`."""
    time: float | None
    """Time of the save; without a manifest, of the last write. Unix seconds."""
    bytes: int
    speed: float | None
    """Bytes a second since the last scan; None: not writing, or the first scan."""
    share: float | None
    """Bytes as a share of the newest committed step; None: not writing, or no such step."""
    note: str

    @property
    def key(self) -> tuple[str, str | None]:
        """Equal in two scans for the same checkpoint or attempt."""
        return self.folder, self.attempt

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


class RunWatch:
    """Scans of one run. Each scan reads all manifests, and no tensors.

    Args:
        storage: the run's folder.
        older_than: seconds. Files without a manifest count as a save under way if their last write is
            younger.
        clock_offset: seconds by which the clock that dates the files is ahead of the clock of `now`.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> from shardproof.storage import LocalStorage
        >>> run = tempfile.mkdtemp()
        >>> _ = sp.Checkpointer(run).save(1, {"w": torch.ones(4)}).result()
        >>> watch = RunWatch(LocalStorage(run), older_than=3600.0)
        >>> [(save.step, save.state, save.bytes) for save in watch.look(now=0.0)]
        [(1, 'committed', 16)]
    """

    def __init__(self, storage: Storage, *, older_than: float, clock_offset: float = 0.0) -> None:
        self._storage = storage
        self._clock_offset = clock_offset
        self._older_than = older_than
        self._before: dict[tuple[str, str | None], tuple[float, int]] = {}
        """Time and bytes of each save under way, at the last scan."""

    def look(self, now: float) -> list[WatchedSave]:
        """The checkpoints and the saves under way, oldest step first.

        Args:
            now: Unix seconds; not less than at the last scan.

        Raises:
            StorageError: the storage cannot list the run. A step that cannot be read is "unreadable".
        """
        infos = scan_run(self._storage)
        unnamed: dict[str, list[Leftover]] = {}
        for leftover in leftovers(self._storage, self._storage.modified):
            unnamed.setdefault(leftover.folder, []).append(leftover)
        newest = next((info for info in reversed(infos) if info.is_step), None)
        saves = [save for info in infos for save in self._of_folder(info, unnamed, newest, now)]
        self._before = {save.key: (now, save.bytes) for save in saves if save.state == Verdict.WRITING}
        return saves

    def _of_folder(
        self, info: StepInfo, unnamed: dict[str, list[Leftover]], newest: StepInfo | None, now: float
    ) -> Iterator[WatchedSave]:
        found = unnamed.get(info.name, [])
        if info.status != Verdict.LEFTOVER or not found:
            stored = info.name, info.step, info.save.attempt, info.status, info.time, info.bytes
            yield WatchedSave(*stored, speed=None, share=None, note=_note(info))
        for leftover in found:
            yield self._of_attempt(info, leftover, newest, now)

    def _of_attempt(
        self, info: StepInfo, leftover: Leftover, newest: StepInfo | None, now: float
    ) -> WatchedSave:
        key = (leftover.folder, leftover.attempt)
        size, speed, share = leftover.bytes, None, None
        note = "in the folder of a committed checkpoint" if leftover.committed else "no manifest"
        is_old = leftover.older_than(self._older_than, now + self._clock_offset)
        state = Verdict.LEFTOVER if is_old else Verdict.WRITING
        if state is Verdict.WRITING:
            if key in self._before and now > self._before[key][0]:
                since, before = self._before[key]
                speed = max(0, size - before) / (now - since)
            share = size / newest.bytes if newest is not None and newest.bytes else None
        return WatchedSave(
            leftover.folder,
            info.step,
            leftover.attempt,
            state.value,
            leftover.modified,
            size,
            speed,
            share,
            note,
        )


def _note(info: StepInfo) -> str:
    parts = [
        info.reason or "",
        f"pinned: {info.pinned}" if info.pinned is not None else "",
        "a symbolic link" if info.linked else "",
        _some("refers to", info.save.references),
        _some("stays for", info.referenced_by) if info.committed else "",
    ]
    return "; ".join(filter(None, parts))


def _some(verb: str, folders: Sequence[str]) -> str:
    return f"{verb} {listed(folders, 2)}" if folders else ""
