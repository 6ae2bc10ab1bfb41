"""Removes leftovers and uploads of dead saves, steps beyond the number to keep, and steps past repair.

Note "A branch": after a rollback, the run has steps with higher numbers than those of the run that continues,
and a restore takes them. Such a step was saved before the newest step of the run that continues. So the
removal after a step takes only steps with higher numbers that were saved before it, and running it again
removes nothing that was saved since. Suspects stay, and a pinned step is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from shardproof.engine.format import flush_manifests_in, references_in
from shardproof.engine.storage import Storage, Upload
from shardproof.errors import NotCommittedError, StorageError
from shardproof.runs.checkpointer.judge import Verdict, judge_save, verdict_on
from shardproof.runs.checkpointer.policies import KeepLatest
from shardproof.runs.checkpointer.retention import (
    Leftover,
    Removal,
    abandoned,
    delete_steps,
    leftovers,
    plan_removal,
    remove_leftover,
    times_of,
)
from shardproof.runs.checkpointer.scan import StepInfo, scan_folders
from shardproof.runs.checkpointer.step_folders import (
    attempt_of,
    files_in,
    parse_folder,
    parse_step,
    pinned_steps,
    read_pin,
    read_settled,
)

_SPARED = (Verdict.REPAIRABLE, Verdict.DAMAGED, Verdict.MISPLACED, Verdict.UNREADABLE)
"""The verdicts on folders with a manifest in which no file counts as that of a dead save: the manifest may be
wrong, and the files may be those of the step."""


class Fate(StrEnum):
    """What `prune` does with a folder of a run. Its word is a key of `PrunePlan.folders`."""

    BEYOND = "steps"
    """Removed: a committed step beyond those to keep."""
    BRANCH = "branch"
    """Removed: a step that a rollback gave up (note "A branch")."""
    SETTLED = "settled"
    """Removed: a settled suspect older than a step that stays."""
    LOST = "damaged_removed"
    """Removed: a step whose verdict is `Verdict.DAMAGED`."""
    NEWER = "newer"
    """Stays: another step with a higher number than `after`. It was saved after that step, is a link, or may
    be written to."""
    SUSPECT = "suspect"
    """Stays: an unsettled suspect."""
    REPAIRABLE = "repairable"
    """Stays, for `repair`: its verdict is `Verdict.REPAIRABLE`."""
    DAMAGED = "damaged"
    """Stays: its verdict is `Verdict.DAMAGED`."""
    MISPLACED = "misplaced"
    """Stays: the checkpoint of another step."""
    REFERENCED = "referenced"
    """Stays: files that other steps refer to."""
    KEPT = "kept"
    """Stays, for another reason."""


_REMOVED = (Fate.BEYOND, Fate.BRANCH, Fate.SETTLED, Fate.LOST)


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The removals of `prune`, and the folders that stay."""

    folders: dict[str, tuple[str, ...]]
    """The folders of each `Fate`, without those that `prune` does not report (`Fate.KEPT`) and those of
    `referenced`."""
    steps_bytes: int
    """Bytes to remove in folders, without `damaged_bytes`."""
    damaged_bytes: int
    """Bytes to remove in the folders of `Fate.LOST`."""
    leftovers: tuple[Leftover, ...]
    """To remove: files of dead saves."""
    writing: tuple[Leftover, ...]
    """These stay: files that no manifest names, of a save that may not have ended."""
    complete: tuple[Leftover, ...]
    """These stay: saves whose shard files are all there, and that no manifest names."""
    referenced: dict[str, list[str]]
    """Files that stay: folder of the removed step to the folders of the steps that refer to its files."""
    unknown: tuple[str, ...]
    """Folders with unreadable manifests. They may refer to any file of other steps, so such files stay."""
    uploads: tuple[Upload, ...]
    """To remove: multipart uploads of dead saves. Their parts are in no file."""
    recent_uploads: tuple[Upload, ...]
    """These stay: multipart uploads of a save that may not have ended."""
    uploads_fault: str
    """Why the uploads of the run cannot be listed; empty if they can, or if the storage has none."""

    @property
    def removed(self) -> dict[str, Fate]:
        """The folders to remove."""
        return {name: fate for fate in _REMOVED for name in self.folders[fate]}

    @property
    def bytes(self) -> int:
        """Bytes to be removed."""
        leftover = sum(one.bytes for one in self.leftovers) + sum(one.bytes or 0 for one in self.uploads)
        return self.steps_bytes + self.damaged_bytes + leftover

    @property
    def empty(self) -> bool:
        """True if there is nothing to remove."""
        return not (self.leftovers or self.removed or self.uploads)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        values = asdict(self)
        return {"bytes": self.bytes, **values.pop("folders"), **values}


def plan_prune(
    storage: Storage,
    modified: Callable[[str], float | None],
    *,
    older_than: float,
    now: float,
    keep: int | None = None,
    after: int | None = None,
    damaged: bool = False,
    complete: bool = False,
) -> PrunePlan:
    """Plans the removals of `prune`. Removes nothing.

    Only steps whose verdict is `Verdict.COMMITTED` count (note "Only a restorable step counts" in `judge`).
    Nothing is removed from the folder of a step that is damaged or misplaced, unless `damaged` removes it.

    Args:
        storage: the run's folder.
        modified: the time of the last write to a file, Unix seconds; None if it does not exist.
        older_than: least seconds since the last write to a leftover, or to a damaged step, for its removal.
        now: Unix seconds, by the clock that `modified` uses.
        keep: number of the newest committed steps to keep, in addition to pinned ones. Damaged steps do not
            count. None: all steps and all suspects.
        after: removes the steps with higher numbers that were saved before the newest restorable step up to
            this one (note "A branch"). None: no step for this reason.
        damaged: True to remove damaged steps, if another step of the run can be restored.
        complete: True to remove also saves whose shard files are all there, and that no manifest names. Those
            of a step that is newer than the last restorable one stay.

    Raises:
        NotCommittedError: no step up to `after` can be restored.
        StorageError: the storage failed, or a step newer than `after` is pinned.
    """
    references = references_in(storage)
    found, uploads, uploads_fault = _with_uploads(
        storage, leftovers(storage, modified, references), now - older_than
    )
    bare = _bare(found)
    infos = scan_folders(storage, bare, depth="metadata", older_than=older_than, now=now)
    dead = tuple(upload for upload in uploads if now - upload.modified >= older_than)
    recent_uploads = tuple(upload for upload in uploads if upload not in dead)
    steps = {step: info for info in infos if (step := parse_step(info.name)) is not None}
    branch = [] if after is None else _branch(storage.location, steps, after)
    committed = [step for step, info in steps.items() if info.committed and step not in branch]
    last = max(committed, default=-1) if complete else None
    saves = _judge_saves(storage, found, infos, lambda one: not one.older_than(older_than, now), last)
    # A running save may be replacing a step in one of these folders.
    busy = {one.folder for one in saves[Verdict.WRITING]} | {_folder_of(upload) for upload in recent_uploads}

    def is_lost(folder: str) -> bool:
        names = [f"{folder}/{file}" for file in files_in(storage.within(folder), folder)]
        times = times_of(storage, modified, names)
        return bool(times) and now - max(times) >= older_than  # an unfinished copy looks like a damaged step

    fate_of = _Fates(
        selected=committed if keep is None else {*KeepLatest(keep).select(committed), *pinned_steps(storage)},
        newest=-1 if keep is None else max(committed, default=-1),
        branch=branch,
        busy=busy,
        after=after,
        is_lost=is_lost if damaged and committed else None,
        bare=bare,
    )
    fates = {info.name: fate_of(info) for info in infos}
    folders = {fate: tuple(name for name, found in fates.items() if found is fate) for fate in Fate}
    gone = [name for fate in _REMOVED for name in folders[fate]]
    removal = plan_removal(storage, gone)
    left = references_in(storage, without=gone)
    names = dict.fromkeys([*folders[Fate.REFERENCED], *removal.referenced])
    sizes = _bytes_of(storage, removal, saves[Verdict.LEFTOVER], folders[Fate.LOST])
    return PrunePlan(
        folders={fate: found for fate, found in folders.items() if fate not in (Fate.KEPT, Fate.REFERENCED)},
        steps_bytes=sizes[False],
        damaged_bytes=sizes[True],
        leftovers=tuple(saves[Verdict.LEFTOVER]),
        writing=tuple(saves[Verdict.WRITING]),
        complete=tuple(saves[Verdict.REPAIRABLE]),
        referenced={name: users for name in names if (users := left.users(name))},
        unknown=tuple(references.unknown),
        uploads=dead,
        recent_uploads=recent_uploads,
        uploads_fault=uploads_fault,
    )


@dataclass(frozen=True, slots=True)
class _Fates:
    """Decides about each folder of a run, by its verdict."""

    selected: Collection[int]
    """The restorable steps that stay."""
    newest: int
    """A settled suspect of an older step is removed."""
    branch: Collection[int]
    """The steps that a rollback gave up."""
    busy: Collection[str]
    """Folders in which a save may still write."""
    after: int | None
    """See `plan_prune`."""
    is_lost: Callable[[str], bool] | None
    """True for a damaged step that was not written to lately; None: damaged steps stay."""
    bare: Collection[str]
    """Folders without a manifest, in which each save has a verdict of its own."""

    def __call__(self, info: StepInfo) -> Fate:
        is_removable = info.name not in self.busy and not info.linked
        if info.status == Verdict.REFERENCED:
            return Fate.REFERENCED
        if info.name in self.bare:
            return Fate.KEPT
        if info.suspect:
            if info.status == Verdict.LEFTOVER:
                return Fate.KEPT
            if info.verdict is None:
                return Fate.SUSPECT
            return Fate.SETTLED if (info.step or 0) < self.newest and is_removable else Fate.KEPT
        step = parse_step(info.name)
        if step is None:
            return Fate.KEPT
        if step in self.branch:
            return Fate.BRANCH if is_removable else Fate.NEWER
        if info.committed:
            if step not in self.selected and is_removable:
                return Fate.BEYOND
            return Fate.NEWER if self.after is not None and step > self.after else Fate.KEPT
        if info.status == Verdict.DAMAGED and not info.linked:
            is_lost = self.is_lost is not None and is_removable and self.is_lost(info.name)
            return Fate.LOST if is_lost else Fate.DAMAGED
        stays: dict[str, Fate] = {Verdict.REPAIRABLE: Fate.REPAIRABLE, Verdict.MISPLACED: Fate.MISPLACED}
        return stays.get(info.status, Fate.KEPT)


def _judge_saves(
    storage: Storage,
    found: Sequence[Leftover],
    infos: Sequence[StepInfo],
    is_recent: Callable[[Leftover], bool],
    last: int | None,
) -> dict[Verdict, list[Leftover]]:
    """The saves that no manifest names, by their verdict (see `judge_save`).

    Saves up to the step `last` count as leftovers, even if their shard files are all there.
    """
    spared = {info.name for info in infos if info.status in _SPARED} - _bare(found)
    old = {info.name for info in infos if last is not None and info.step is not None and info.step <= last}
    saves: dict[Verdict, list[Leftover]] = {
        verdict: [] for verdict in (Verdict.WRITING, Verdict.REPAIRABLE, Verdict.LEFTOVER)
    }
    for leftover in found:
        folder = leftover.folder
        verdict = judge_save(storage, folder, leftover.attempt, is_recent=is_recent(leftover))
        if verdict is not Verdict.WRITING and folder in spared:
            if verdict is Verdict.LEFTOVER:
                continue
        elif verdict is Verdict.REPAIRABLE and folder in old:
            verdict = Verdict.LEFTOVER
        saves[verdict].append(leftover)
    return saves


def _bare(found: Sequence[Leftover]) -> set[str]:
    """The folders of saves beside which there is no manifest."""
    return {one.folder for one in found if not one.committed}


def _bytes_of(
    storage: Storage, removal: Removal, counted: Sequence[Leftover], lost: Collection[str]
) -> Counter[bool]:
    """Bytes to remove, without the files of `counted`: in the folders of `lost` (True), and in others."""
    before = {f"{leftover.folder}/{file}" for leftover in counted for file in leftover.files}
    sizes: Counter[bool] = Counter()
    for file in {*removal.manifests, *removal.files} - before:
        sizes[file.partition("/")[0] in lost] += storage.size(file) or 0
    return sizes


def _branch(run: str, scanned: Mapping[int, StepInfo], after: int) -> list[int]:
    """The steps with a higher number than `after` that a rollback gave up (note "A branch")."""
    restorable = (Verdict.COMMITTED, Verdict.PARTIAL)
    steps = [step for step, info in scanned.items() if info.status in restorable]
    last = max((step for step in steps if step <= after), default=None)
    if last is None:
        raise NotCommittedError(
            f"{run} has no restorable step up to {after}, so the steps after it stay: name the newest step "
            "of the run that continues (`shardproof ls`)",
            path=run,
        )
    branch = abandoned({step: scanned[step].time for step in steps}, last)
    pinned = next((scanned[step] for step in branch if scanned[step].pinned is not None), None)
    if pinned is not None:
        raise StorageError(
            f"{run}/{pinned.name} is pinned ({pinned.pinned}), so nothing was removed: unpin the step first "
            f"(sp.Checkpointer({run!r}).unpin({pinned.step}))",
            file=f"{run}/{pinned.name}",
        )
    return branch


def _with_uploads(
    storage: Storage, found: list[Leftover], before: float
) -> tuple[list[Leftover], list[Upload], str]:
    """The leftovers, the multipart uploads, and why these cannot be listed.

    Files and uploads of one attempt have one age, because a rank may upload for hours after another finished.
    Of uploads that began after `before`, only the start is known, and not the time of the last part.
    """
    try:
        uploads = [upload for upload in storage.uploads(before) if _attempt_of(upload)]
    except StorageError as error:
        return found, [], error.message
    newest = {(one.folder, one.attempt): one.modified for one in found if one.modified is not None}
    for upload in uploads:
        attempt = _folder_of(upload), _attempt_of(upload)
        newest[attempt] = max(newest.get(attempt, 0.0), upload.modified)
    return (
        [replace(one, modified=newest.get((one.folder, one.attempt))) for one in found],
        [replace(one, modified=newest[_folder_of(one), _attempt_of(one)]) for one in uploads],
        "",
    )


def _folder_of(upload: Upload) -> str:
    return upload.name.partition("/")[0]


def _attempt_of(upload: Upload) -> str:
    """The attempt of an upload; empty if it is no upload of a step of this run."""
    folder, _, file = upload.name.partition("/")
    return (attempt_of(file, folder) or "") if parse_folder(folder) is not None else ""


def prune(storage: Storage, plan: PrunePlan) -> list[str]:
    """Executes a plan.

    Returns:
        Folders that stay, because a save committed them, or a pin marked them, after the plan was made.

    Raises:
        StorageError: the storage failed. Some of the files may be removed. Uploads are removed last.
    """
    flush_manifests_in(storage)
    spared = [leftover.folder for leftover in plan.leftovers if not remove_leftover(storage, leftover)]
    changed = [name for name, fate in plan.removed.items() if not _is_as_planned(storage, name, fate)]
    delete_steps(storage, [name for name in plan.removed if name not in changed])
    _abort_uploads(storage, plan.uploads)
    return [*spared, *changed]


def _is_as_planned(run: Storage, folder: str, fate: Fate) -> bool:
    """False if a save, a pin or a new suspect changed a folder since its removal was planned."""
    if fate is Fate.LOST:
        return verdict_on(run, folder) is Verdict.DAMAGED
    place = run.within(folder)
    return read_settled(place) is not None if fate is Fate.SETTLED else read_pin(place) is None


def _abort_uploads(storage: Storage, uploads: Sequence[Upload]) -> None:
    for at, upload in enumerate(uploads):
        try:
            storage.abort_upload(upload)
        except StorageError as error:
            raise StorageError(
                f"all else is removed, but {len(uploads) - at} of {len(uploads)} multipart uploads stay: "
                f"{error.message}",
                file=storage.location,
            ) from error
