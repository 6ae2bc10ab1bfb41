"""Removes leftovers and uploads of dead saves, steps beyond the number to keep, and steps past repair.

Note "A branch": after a rollback, the run has steps with higher numbers than those of the run that continues,
and a restore takes them. Such a step was saved before the newest step of the run that continues. So the
removal after a step takes only steps with higher numbers that were saved before it, and running it again
removes nothing that was saved since. Suspects stay, and a pinned step is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardproof.checkpointer.judge import Verdict, judge, judge_save
from shardproof.checkpointer.marks import pinned_steps, read_pin, read_settled
from shardproof.checkpointer.policies import KeepLatest
from shardproof.checkpointer.retention import (
    Leftover,
    abandoned,
    delete_steps,
    leftovers,
    plan_removal,
    remove_leftover,
    times_of,
)
from shardproof.checkpointer.scan import StepInfo, scan_run
from shardproof.checkpointer.step_folders import attempt_of, is_ours, parse_folder, parse_step
from shardproof.errors import NotCommittedError, StorageError
from shardproof.format import flush_manifests_in, references_in
from shardproof.storage import Storage, Upload

__all__ = ["PrunePlan", "plan_prune", "prune"]

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
    scanned = {step: info for info in infos if (step := parse_step(info.name)) is not None}
    branch = [] if after is None else _branch(storage.location, scanned, after)
    last = max((step for step, info in scanned.items() if info.committed and step not in branch), default=-1)
    spared = {info.name for info in infos if info.status in _SPARED}
    verdicts = {
        leftover: judge_save(
            storage, leftover.folder, leftover.attempt, is_recent=not leftover.older_than(older_than, now)
        )
        for leftover in found
    }
    writing = tuple(one for one, verdict in verdicts.items() if verdict is Verdict.WRITING)
    unnamed = [one for one, verdict in verdicts.items() if verdict is Verdict.REPAIRABLE]
    old = [
        one for one, verdict in verdicts.items() if verdict is Verdict.LEFTOVER and one.folder not in spared
    ]
    if complete:
        superseded = [one for one in unnamed if one.folder not in spared and _step_of(one) <= last]
        old += superseded
        unnamed = [one for one in unnamed if one not in superseded]
    committed = [step for step, info in scanned.items() if info.committed and step not in branch]
    selected = set(committed)
    if keep is not None:
        selected = {*KeepLatest(keep).select(committed), *pinned_steps(storage)}
    dead = tuple(upload for upload in uploads if now - upload.modified >= older_than)
    recent_uploads = tuple(upload for upload in uploads if upload not in dead)
    # A running save may be replacing a step in one of these folders.
    busy = {leftover.folder for leftover in writing} | {_folder_of(upload) for upload in recent_uploads}

    def is_removable(info: StepInfo) -> bool:
        return info.name not in busy and not info.linked

    steps = [scanned[step].name for step in committed if step not in selected and is_removable(scanned[step])]
    dropped = [scanned[step].name for step in branch if is_removable(scanned[step])]
    newest = -1 if keep is None else max(committed, default=-1)
    suspects = [info for info in infos if info.suspect and info.status != Verdict.LEFTOVER]
    settled = [
        info.name
        for info in suspects
        if info.verdict is not None and (info.step or 0) < newest and is_removable(info)
    ]
    hopeless = [info.name for info in scanned.values() if info.status == Verdict.DAMAGED and not info.linked]
    lost = []
    for name in hopeless if damaged and committed else ():
        ours = [file for file in storage.list(name) if is_ours(file.removeprefix(f"{name}/"), name)]
        times = times_of(modified, ours)  # an unfinished copy looks like a damaged step
        if name not in busy and times and now - max(times) >= older_than:
            lost.append(name)
    removal = plan_removal(storage, [*steps, *dropped, *settled, *lost])
    counted = {f"{leftover.folder}/{file}" for leftover in old for file in leftover.files}
    sizes: Counter[bool] = Counter()
    for file in {*removal.manifests, *removal.files} - counted:
        sizes[file.partition("/")[0] in lost] += storage.size(file) or 0
    removed_before = [info.name for info in infos if info.status == Verdict.REFERENCED]
    left = references_in(storage, without=[*steps, *dropped, *settled, *lost])
    return PrunePlan(
        leftovers=tuple(old),
        steps=tuple(steps),
        steps_bytes=sizes[False],
        settled=tuple(settled),
        suspect=tuple(info.name for info in suspects if info.verdict is None),
        writing=writing,
        repairable=tuple(info.name for info in scanned.values() if info.status == Verdict.REPAIRABLE),
        damaged=tuple(name for name in hopeless if name not in lost),
        damaged_removed=tuple(lost),
        damaged_bytes=sizes[True],
        referenced={
            name: users
            for name in dict.fromkeys([*removed_before, *removal.referenced])
            if (users := left.users(name))
        },
        unknown=tuple(references.unknown),
        uploads=dead,
        recent_uploads=recent_uploads,
        uploads_fault=uploads_fault,
        complete=tuple(unnamed),
        misplaced=tuple(info.name for info in scanned.values() if info.status == Verdict.MISPLACED),
        branch=tuple(dropped),
        newer=tuple(
            scanned[step].name
            for step in sorted(committed + branch)
            if after is not None and step > after and scanned[step].name not in dropped
        ),
    )


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
