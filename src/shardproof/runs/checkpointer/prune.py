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
from shardproof.runs.checkpointer.judge import Verdict, judge, judge_save
from shardproof.runs.checkpointer.marks import pinned_steps, read_pin, read_settled
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
from shardproof.runs.checkpointer.scan import StepInfo, scan_run
from shardproof.runs.checkpointer.step_folders import attempt_of, is_ours, parse_folder, parse_step

_SPARED = (Verdict.REPAIRABLE, Verdict.DAMAGED, Verdict.MISPLACED, Verdict.UNREADABLE)
"""The verdicts on folders with a manifest in which no file counts as that of a dead save: the manifest may be
wrong, and the files may be those of the step."""


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The removals of `prune`, and the folders that stay."""

    leftovers: tuple[Leftover, ...]
    """To remove: files of dead saves."""
    steps: tuple[str, ...]
    """To remove: folders of committed steps beyond those to keep."""
    steps_bytes: int
    """Bytes of `steps`, `branch` and `settled`."""
    settled: tuple[str, ...]
    """To remove: folders of settled suspects older than a step that stays."""
    suspect: tuple[str, ...]
    """These stay: folders of unsettled suspects."""
    writing: tuple[Leftover, ...]
    """These stay: files that no manifest names, of a save that may not have ended."""
    repairable: tuple[str, ...]
    """These stay, for `repair`: folders whose verdict is `Verdict.REPAIRABLE`."""
    damaged: tuple[str, ...]
    """These stay: folders whose verdict is `Verdict.DAMAGED`."""
    damaged_removed: tuple[str, ...]
    """To remove: folders whose verdict is `Verdict.DAMAGED`."""
    damaged_bytes: int
    """Bytes of `damaged_removed`."""
    referenced: dict[str, list[str]]
    """Files that stay: folder of the removed step to the folders of the steps that refer to its files."""
    unknown: tuple[str, ...]
    """Folders with unreadable manifests. They may refer to any file of other steps, so such files stay."""
    uploads: tuple[Upload, ...] = ()
    """To remove: multipart uploads of dead saves. Their parts are in no file."""
    recent_uploads: tuple[Upload, ...] = ()
    """These stay: multipart uploads of a save that may not have ended."""
    uploads_fault: str = ""
    """Why the uploads of the run cannot be listed; empty if they can, or if the storage has none."""
    complete: tuple[Leftover, ...] = ()
    """These stay: saves whose shard files are all there, and that no manifest names."""
    misplaced: tuple[str, ...] = ()
    """These stay: folders with the checkpoint of another step."""
    branch: tuple[str, ...] = ()
    """To remove: folders of steps that a rollback gave up (note "A branch")."""
    newer: tuple[str, ...] = ()
    """These stay: folders of other steps with a higher number than `after`. They were saved after that step,
    are links, or may be written to."""

    @property
    def bytes(self) -> int:
        """Bytes to be removed."""
        leftover = sum(one.bytes for one in self.leftovers) + sum(one.bytes or 0 for one in self.uploads)
        return self.steps_bytes + self.damaged_bytes + leftover

    @property
    def empty(self) -> bool:
        """True if there is nothing to remove."""
        steps = self.steps or self.branch or self.settled or self.damaged_removed
        return not (self.leftovers or steps or self.uploads)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"bytes": self.bytes, **asdict(self)}


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
    infos = scan_run(storage, depth="metadata")
    dead = tuple(upload for upload in uploads if now - upload.modified >= older_than)
    recent_uploads = tuple(upload for upload in uploads if upload not in dead)
    steps = _steps(infos)
    branch = [] if after is None else _branch(storage.location, steps, after)
    committed = [step for step, info in steps.items() if info.committed and step not in branch]
    last = max(committed, default=-1) if complete else None
    saves = _judge_saves(storage, found, infos, lambda one: not one.older_than(older_than, now), last)
    # A running save may be replacing a step in one of these folders.
    busy = {one.folder for one in saves[Verdict.WRITING]} | {_folder_of(upload) for upload in recent_uploads}

    def is_lost(folder: str) -> bool:
        ours = [file for file in storage.list(folder) if is_ours(file.removeprefix(f"{folder}/"), folder)]
        times = times_of(modified, ours)  # an unfinished copy looks like a damaged step
        return bool(times) and now - max(times) >= older_than

    fates = _Fates(storage, infos, committed, branch, busy, keep, after, is_lost if damaged else None)
    names = fates.names()
    gone = [name for fate in _REMOVED for name in names[fate]]
    removal = plan_removal(storage, gone)
    lost_bytes, other_bytes = _bytes_of(storage, removal, saves[Verdict.LEFTOVER], names[Fate.LOST])
    left = references_in(storage, without=gone)
    return PrunePlan(
        leftovers=tuple(saves[Verdict.LEFTOVER]),
        steps=names[Fate.BEYOND],
        steps_bytes=other_bytes,
        settled=names[Fate.SETTLED],
        suspect=names[Fate.SUSPECT],
        writing=tuple(saves[Verdict.WRITING]),
        repairable=names[Fate.REPAIRABLE],
        damaged=names[Fate.DAMAGED],
        damaged_removed=names[Fate.LOST],
        damaged_bytes=lost_bytes,
        referenced={
            name: users
            for name in dict.fromkeys([*names[Fate.REFERENCED], *removal.referenced])
            if (users := left.users(name))
        },
        unknown=tuple(references.unknown),
        uploads=dead,
        recent_uploads=recent_uploads,
        uploads_fault=uploads_fault,
        complete=tuple(saves[Verdict.REPAIRABLE]),
        misplaced=names[Fate.MISPLACED],
        branch=names[Fate.BRANCH],
        newer=names[Fate.NEWER],
    )


class Fate(StrEnum):
    """What `prune` does with a folder of a run."""

    BEYOND = "removed: a step beyond those to keep"
    BRANCH = "removed: a step that a rollback gave up"
    SETTLED = "removed: a settled suspect older than a step that stays"
    LOST = "removed: a damaged step"
    KEPT = "stays"
    NEWER = "stays: a step after the one to go back to"
    SUSPECT = "stays: a suspect without a verdict"
    REPAIRABLE = "stays, for repair"
    DAMAGED = "stays: a damaged step"
    MISPLACED = "stays: the checkpoint of another step"
    REFERENCED = "stays: files that other steps refer to"


_REMOVED = (Fate.BEYOND, Fate.BRANCH, Fate.SETTLED, Fate.LOST)
_FATES: dict[str, Fate] = {
    Verdict.REPAIRABLE: Fate.REPAIRABLE,
    Verdict.MISPLACED: Fate.MISPLACED,
    Verdict.REFERENCED: Fate.REFERENCED,
}


class _Fates:
    """Decides about each folder of a run, by its verdict.

    Args:
        storage: the run's folder.
        infos: the folders.
        committed: the restorable steps without those of `branch`.
        branch: the steps that a rollback gave up.
        busy: folders in which a save may still write.
        keep: see `plan_prune`; so is `after`.
        is_lost: True for a damaged step that was not written to lately; None: damaged steps stay.
    """

    def __init__(
        self,
        storage: Storage,
        infos: Sequence[StepInfo],
        committed: Sequence[int],
        branch: Collection[int],
        busy: Collection[str],
        keep: int | None,
        after: int | None,
        is_lost: Callable[[str], bool] | None,
    ) -> None:
        self._infos, self._branch, self._busy, self._after = infos, branch, busy, after
        self._selected = set(committed)
        self._newest = -1
        if keep is not None:
            self._selected = {*KeepLatest(keep).select(committed), *pinned_steps(storage)}
            self._newest = max(committed, default=-1)
        self._is_lost = is_lost if committed else None

    def names(self) -> dict[Fate, tuple[str, ...]]:
        """The folders of each fate."""
        fates = [(info.name, self._fate(info)) for info in self._infos]
        return {fate: tuple(name for name, found in fates if found is fate) for fate in Fate}

    def _fate(self, info: StepInfo) -> Fate:
        is_removable = info.name not in self._busy and not info.linked
        if info.status == Verdict.REFERENCED:
            return Fate.REFERENCED
        if info.suspect:
            return self._fate_of_suspect(info, is_removable)
        step = parse_step(info.name)
        if step is None:
            return Fate.KEPT
        if step in self._branch:
            return Fate.BRANCH if is_removable else Fate.NEWER
        if info.committed:
            if step not in self._selected and is_removable:
                return Fate.BEYOND
            return Fate.NEWER if self._after is not None and step > self._after else Fate.KEPT
        if info.status == Verdict.DAMAGED and not info.linked:
            is_lost = self._is_lost is not None and is_removable and self._is_lost(info.name)
            return Fate.LOST if is_lost else Fate.DAMAGED
        return _FATES.get(info.status, Fate.KEPT)

    def _fate_of_suspect(self, info: StepInfo, is_removable: bool) -> Fate:
        if info.status == Verdict.LEFTOVER:
            return Fate.KEPT
        if info.verdict is None:
            return Fate.SUSPECT
        return Fate.SETTLED if (info.step or 0) < self._newest and is_removable else Fate.KEPT


def _steps(infos: Sequence[StepInfo]) -> dict[int, StepInfo]:
    """The folders of steps, without suspects, by the number of the step."""
    return {step: info for info in infos if (step := parse_step(info.name)) is not None}


def _judge_saves(
    storage: Storage,
    found: Sequence[Leftover],
    infos: Sequence[StepInfo],
    is_recent: Callable[[Leftover], bool],
    last: int | None,
) -> dict[Verdict, list[Leftover]]:
    """The saves that no manifest names, by their verdict (see `judge_save`).

    Args:
        storage: the run's folder.
        found: the files of these saves.
        infos: the folders of the run.
        is_recent: True if one of the files was written to lately.
        last: saves up to this step count as leftovers, even if their shard files are all there; None: none.
    """
    spared = {info.name for info in infos if info.status in _SPARED}
    saves: dict[Verdict, list[Leftover]] = {
        verdict: [] for verdict in (Verdict.WRITING, Verdict.REPAIRABLE, Verdict.LEFTOVER)
    }
    for leftover in found:
        folder = leftover.folder
        verdict = judge_save(storage, folder, leftover.attempt, is_recent=is_recent(leftover))
        if verdict is not Verdict.WRITING and folder in spared:
            if verdict is Verdict.LEFTOVER:
                continue
        elif verdict is Verdict.REPAIRABLE and last is not None and _step_of(leftover) <= last:
            verdict = Verdict.LEFTOVER
        saves[verdict].append(leftover)
    return saves


def _bytes_of(
    storage: Storage, removal: Removal, counted: Sequence[Leftover], lost: Collection[str]
) -> tuple[int, int]:
    """Bytes of the files to remove in the folders of `lost`, and in others, without those of `counted`."""
    before = {f"{leftover.folder}/{file}" for leftover in counted for file in leftover.files}
    sizes: Counter[bool] = Counter()
    for file in {*removal.manifests, *removal.files} - before:
        sizes[file.partition("/")[0] in lost] += storage.size(file) or 0
    return sizes[True], sizes[False]


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


def _step_of(leftover: Leftover) -> int:
    """The step of the folder of a leftover."""
    folder = parse_folder(leftover.folder)
    assert folder is not None
    return folder.step


def _with_uploads(
    storage: Storage, found: list[Leftover], before: float
) -> tuple[list[Leftover], list[Upload], str]:
    """The leftovers, the multipart uploads, and why these cannot be listed.

    Files and uploads of one attempt have one age, because a rank may upload for hours after another finished.

    Args:
        storage: the run's folder.
        found: the leftovers.
        before: Unix seconds. For uploads that began later, only the start time is known, not the time of the
            last part.
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
    lost = [name for name in plan.damaged_removed if _is_damaged(storage, name)]
    settled = [name for name in plan.settled if read_settled(storage.within(name)) is not None]
    unpinned = [name for name in (*plan.steps, *plan.branch) if read_pin(storage.within(name)) is None]
    delete_steps(storage, [*unpinned, *settled, *lost])
    _abort_uploads(storage, plan.uploads)
    return [
        *spared,
        *(name for name in (*plan.steps, *plan.branch) if name not in unpinned),
        *(name for name in (*plan.settled, *plan.damaged_removed) if name not in (*settled, *lost)),
    ]


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


def _is_damaged(run: Storage, folder: str) -> bool:
    found = judge(run, folder)
    return found is not None and found.verdict is Verdict.DAMAGED
