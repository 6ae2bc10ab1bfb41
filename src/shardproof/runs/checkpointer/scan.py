"""Lists the checkpoints and leftovers in a run's folder, step by step, and watches the saves under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

from shardproof._utils.humanize import listed
from shardproof.engine.format import MANIFEST_NAME, References, references_in, tensor_bytes
from shardproof.engine.storage import Storage, map_requests
from shardproof.errors import StorageError
from shardproof.runs.checkpointer.judge import Depth, Judgement, Verdict, judge, judge_save
from shardproof.runs.checkpointer.retention import Leftover, leftovers
from shardproof.runs.checkpointer.schedules import IntervalAdvice, advice_of
from shardproof.runs.checkpointer.step_folders import (
    PINNED_NAME,
    SETTLED_NAME,
    files_in,
    parse_folder,
    parse_step,
    place_of,
    read_node_mark,
    read_pin,
)

_DEAD_SAVE = 3600.0
"""Seconds since the last write after which files without a manifest are those of a dead save, by default."""
_UNNAMED = (Verdict.WRITING, Verdict.LEFTOVER, Verdict.REPAIRABLE)
"""Verdicts on a folder without a manifest, of which `RunWatch` shows each save, and not the folder."""
_LONGEST_SAVE = 3600.0
"""Seconds. If the manifest's file is newer than the time in the manifest by this or more, the file is a
later copy."""


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """What a manifest tells of its save. The default is that of a folder without a readable manifest."""

    step: int | None = None
    """The step that the manifest names. It differs from that of a folder that was renamed or copied."""
    time: float | None = None
    """Unix seconds."""
    tensors: int = 0
    objects: int = 0
    world_size: int | None = None
    attempt: str | None = None
    repaired: bool = False
    references: tuple[str, ...] = ()
    """Folders of earlier steps whose files it refers to."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """The origin of the save; empty if it is not recorded."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One checkpoint of a run, or the leftover of a save that was not committed."""

    name: str
    """The folder in the run; "." for the run's folder itself."""
    status: str
    """The word of its `Verdict`."""
    reason: str | None
    """The reason why it is not committed."""
    save: SaveFacts
    """What its manifest tells."""
    bytes: int
    """Bytes of its tensors; without a readable manifest, of the files in its folder."""
    file_bytes: int
    """Bytes of the files in its folder that it names; without a readable manifest, of all. An incremental
    step also uses files of other steps."""
    unnamed: int
    """Number of files of dead attempts in the folder of a committed checkpoint, which `prune` removes."""
    referenced_by: tuple[str, ...]
    """Folders of later steps that refer to its files."""
    verdict: str | None
    """The verdict of a settled suspect."""
    linked: bool
    """The folder is a symbolic link, so that retention and `prune` remove nothing in it."""
    pinned: str | None
    """The label of its pin; None if it has none."""

    @property
    def step(self) -> int | None:
        """The step of its folder, by the name; that of its manifest in a folder of another name."""
        folder = parse_folder(self.name)
        return self.save.step if folder is None else folder.step

    @property
    def suspect(self) -> bool:
        """True if it is in the folder of a suspect."""
        folder = parse_folder(self.name)
        return folder is not None and folder.suspect

    @property
    def time(self) -> float | None:
        """Time of the save, Unix seconds."""
        return self.save.time

    @property
    def committed(self) -> bool:
        """True if it is a whole checkpoint, and no suspect."""
        return self.status == Verdict.COMMITTED

    @property
    def is_step(self) -> bool:
        """True if a restore takes it: it is committed, in the folder of a step."""
        return self.committed and parse_step(self.name) is not None

    @property
    def whole(self) -> bool:
        """True if it is a readable checkpoint, of a step or of a suspect."""
        return self.status in (Verdict.COMMITTED, Verdict.SUSPECT, Verdict.SETTLED)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values = asdict(self)
        save = values.pop("save")
        stored_step = save.pop("step")
        own = {"step": self.step, "suspect": self.suspect, "committed": self.committed}
        return {**values, **save, **own, "stored_step": stored_step}


def scan_run(
    storage: Storage, *, depth: Depth = "sizes", older_than: float = _DEAD_SAVE, now: float | None = None
) -> list[StepInfo]:
    """Every checkpoint and every leftover in a run's folder, oldest step first.

    Args:
        storage: the run's folder.
        depth: what the verdicts are based on: "sizes" reads manifests, "metadata" also indexes.
        older_than: seconds. Files without a manifest count as a save under way if their last write is
            younger.
        now: Unix seconds, by the clock that dates the files. None: that of the storage, or of this machine.

    Returns:
        One entry for each folder named ``step-...`` or ``suspect-...`` that has a file of shardproof, or that
        cannot be listed. One for each other folder, and for the run's folder, that has a manifest.

    Raises:
        StorageError: the storage cannot list the run.
    """
    return scan_folders(storage, (), depth=depth, older_than=older_than, now=now)


def scan_folders(
    storage: Storage, unplanned: Collection[str], *, depth: Depth, older_than: float, now: float | None
) -> list[StepInfo]:
    """As `scan_run`. The folders `unplanned` have no manifest, and the caller judges their saves one by one.

    They count as leftovers, and no file in them is read.
    """
    references = references_in(storage)
    mark = read_node_mark(storage)
    since = cache(partial(saves_since, storage, older_than, now))  # a bucket is asked only if it matters
    judged = partial(judge, storage, depth=depth, mark=mark, saves_since=since)

    def look(folder: str) -> StepInfo | None:
        planned = partial(judged, plan_repairs=folder not in unplanned)
        return _folder_info(storage, planned, references, folder)

    found = filter(None, map_requests(storage, look, [".", *storage.folders()]))
    return sorted(found, key=lambda info: (info.step is None, info.step or 0, info.name))


def saves_since(storage: Storage, older_than: float = _DEAD_SAVE, now: float | None = None) -> float:
    """The time before which the files of a dead save were written; the arguments are those of `scan_run`.

    Raises:
        StorageError: the store does not tell its time.
    """
    told = storage.now(writes=False) if now is None else now
    return (time.time() if told is None else told) - older_than


def _folder_info(
    storage: Storage, judged: Callable[..., Judgement | None], references: References, folder: str
) -> StepInfo | None:
    """The entry of a folder of the run, or of the run's folder; None if it has none."""
    place = place_of(storage, folder)
    parsed = parse_folder(folder)
    ours: set[str] = set()
    try:
        if parsed is None and place.size(MANIFEST_NAME) is None:
            return None
        ours = {*files_in(place, folder)}
    except StorageError as error:
        if folder == ".":
            raise
        if parsed is None:
            return None
        found: Judgement | None = Judgement(Verdict.UNREADABLE, error.message, error)
    else:
        found = judged(folder, references=references)
        if found is not None and found.is_unnamed and MANIFEST_NAME in ours:
            references = references_in(storage)  # removed meanwhile
            found = judged(folder, references=references)
    if found is None:
        return None
    files, referenced = ours - {SETTLED_NAME, PINNED_NAME}, set(references.files(folder))
    pin = read_pin(place) if PINNED_NAME in ours else None
    nbytes = _bytes(place, found, files, referenced)
    save, file_bytes, named = SaveFacts(), nbytes, set[str]()
    if (manifest := found.manifest) is not None:
        own = (manifest.index, *manifest.own_files)
        file_bytes, named = sum(record.size for record in own), {record.name for record in own}
        save = SaveFacts(
            step=manifest.step,
            time=manifest.time,
            tensors=len(manifest.tensors),
            objects=len(manifest.objects),
            world_size=manifest.world_size,
            attempt=manifest.attempt,
            repaired=manifest.repaired,
            references=tuple(sorted({record.folder for record in manifest.referenced_files})),
            provenance=manifest.provenance,
        )
    has_leftovers = manifest is not None or found.verdict is Verdict.REFERENCED
    return StepInfo(
        name=folder,
        status=found.verdict.value,
        reason=found.reason or None,
        save=save,
        bytes=nbytes,
        file_bytes=file_bytes,
        unnamed=len(files - named - referenced - {MANIFEST_NAME}) if has_leftovers else 0,
        referenced_by=tuple(references.users(folder)),
        verdict=found.settled,
        linked=folder != "." and place.linked,
        pinned=None if pin is None else pin.label,
    )


def _bytes(place: Storage, found: Judgement, files: set[str], referenced: set[str]) -> int:
    """Bytes of the tensors of a checkpoint; without a readable manifest, of its files."""
    if found.manifest is not None:
        return sum(map(tensor_bytes, found.manifest.tensors))
    if found.verdict is Verdict.REFERENCED:
        files = files & referenced
    try:
        return sum(size or 0 for size in map_requests(place, place.size, files))
    except StorageError:
        return 0


def save_seconds(info: StepInfo, modified: Callable[[str], float | None]) -> float | None:
    """Seconds from the agreement of the ranks, which the manifest records, to the commit.

    The commit is the time of the manifest's file. None for a manifest that was written again or copied, and
    for a step that is not committed.

    Args:
        info: a checkpoint of a run.
        modified: as of `interval_advice`.
    """
    if not info.committed or info.time is None or info.save.repaired:
        return None
    written = modified(f"{info.name}/{MANIFEST_NAME}")
    return written - info.time if written is not None and 0 < written - info.time < _LONGEST_SAVE else None


def interval_advice(
    infos: Iterable[StepInfo], modified: Callable[[str], float | None], mtbf: float
) -> IntervalAdvice | None:
    """A time between saves, from the committed steps of a run; None for fewer than two.

    The cost of a save is its `save_seconds`.

    Args:
        infos: the checkpoints of a run.
        modified: the time of the last write to a file of the run, Unix seconds; None if it does not exist.
        mtbf: seconds between two failures of the job, on average.
    """
    saved = [info for info in infos if info.committed and info.time is not None]
    times = [info.time for info in saved if info.time is not None]
    costs = [cost for info in saved if (cost := save_seconds(info, modified)) is not None]
    return advice_of(times, costs, mtbf)


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
        self._dead: dict[str, tuple[list[Leftover], list[WatchedSave]]] = {}
        """The dead saves in each folder without a manifest: their files, and their rows at the last scan."""

    def look(self, now: float) -> list[WatchedSave]:
        """The checkpoints and the saves under way, oldest step first.

        Args:
            now: Unix seconds; not less than at the last scan.

        Raises:
            StorageError: the storage cannot list the run. A step that cannot be read is "unreadable".
        """
        there = now + self._clock_offset
        unnamed: dict[str, list[Leftover]] = {}
        for leftover in leftovers(self._storage, self._storage.modified):
            unnamed.setdefault(leftover.folder, []).append(leftover)
        self._dead = {name: known for name, known in self._dead.items() if known[0] == unnamed.get(name)}
        writing = (one for found in unnamed.values() for one in found if self._is_writing(one, now))
        unplanned = {one.folder for one in writing if not one.committed} | self._dead.keys()
        infos = scan_folders(self._storage, unplanned, depth="sizes", older_than=self._older_than, now=there)
        newest = next((info for info in reversed(infos) if info.is_step), None)
        saves = [save for info in infos for save in self._of_folder(info, unnamed, newest, now)]
        self._before = {save.key: (now, save.bytes) for save in saves if save.state == Verdict.WRITING}
        return saves

    def _of_folder(
        self, info: StepInfo, unnamed: dict[str, list[Leftover]], newest: StepInfo | None, now: float
    ) -> Iterator[WatchedSave]:
        found = unnamed.get(info.name, [])
        if not found or any(leftover.committed for leftover in found) or info.status not in _UNNAMED:
            stored = info.name, info.step, info.save.attempt, info.status, info.time, info.bytes
            yield WatchedSave(*stored, speed=None, share=None, note=_note(info))
        if info.name in self._dead:
            yield from self._dead[info.name][1]
            return
        is_only = len(found) == 1
        rows = [
            self._of_attempt(info, leftover, newest, now, is_only)
            for leftover in found
            if leftover.attempt != info.save.attempt  # committed since it was found
        ]
        if info.status in (Verdict.LEFTOVER, Verdict.REPAIRABLE) and not any(
            leftover.committed or self._is_writing(leftover, now) for leftover in found
        ):
            self._dead[info.name] = found, rows
        yield from rows

    def _is_writing(self, leftover: Leftover, now: float) -> bool:
        return not leftover.older_than(self._older_than, now + self._clock_offset)

    def _of_attempt(
        self, info: StepInfo, leftover: Leftover, newest: StepInfo | None, now: float, is_only: bool
    ) -> WatchedSave:
        key = (leftover.folder, leftover.attempt)
        size, speed, share = leftover.bytes, None, None
        note = "in the folder of a committed checkpoint" if leftover.committed else "no manifest"
        is_old = not self._is_writing(leftover, now)
        state = Verdict.LEFTOVER if is_old else Verdict.WRITING
        if is_old and info.status == Verdict.REPAIRABLE and not leftover.committed:
            state = (
                Verdict.REPAIRABLE
                if is_only
                else judge_save(self._storage, info.name, leftover.attempt, is_recent=False)
            )
            note = info.reason or note
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
