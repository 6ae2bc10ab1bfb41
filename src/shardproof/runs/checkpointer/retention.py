"""Decides which steps of a run stay, and removes the others and the leftovers of dead saves.

Note "Only our files": a step's folder may also hold files of the user (a tokenizer, a config). This module
deletes only files with names that shardproof gives.

Note "The manifest goes first": a deletion removes the manifest of the step, durably, and only then the files
that the manifest names. A crash in between leaves files without a manifest, which are a leftover like that of
a dead save. It never leaves a committed step that lacks files.

Note "Referenced files stay": an incremental step refers to files of earlier steps. If such an earlier step is
deleted, its manifest is removed, so that it is no checkpoint any more. The files that other steps refer to
stay until the last of these steps is deleted. The manifests of the remaining steps name these files.

Note "The last proved step stays": a policy may select no step that is proved readable (note "Proved" in
`runs.checkpointer.scrub`). Then the newest proved step also stays, until a step that the policy selects
is proved.

This module removes nothing in a linked folder (note "Linked steps" in `step_folders`).
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardproof.engine.format import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    References,
    flush_manifests_in,
    named_files,
    read_manifest,
    references_in,
    unreadable_manifests_message,
    unreferenced_files,
)
from shardproof.engine.storage import Storage, map_requests
from shardproof.errors import FormatError, NotCommittedError, ShardproofError, StorageError
from shardproof.runs.checkpointer.policies import Retention, SavedStep
from shardproof.runs.checkpointer.step_folders import (
    PINNED_NAME,
    SETTLED_NAME,
    attempt_of,
    files_in,
    folders_in,
    read_pin,
    step_name,
    steps_in,
    suspects_in,
)

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True)
class Removal:
    """The files that deleting some steps of a run removes."""

    manifests: tuple[str, ...]
    """Manifests, which are deleted first."""
    files: tuple[str, ...]
    """All other files to delete, some of them in folders of other steps."""
    referenced: dict[str, list[str]] = field(default_factory=dict)
    """Files that stay: folder of the deleted step to the folders of the steps that refer to its files."""
    unknown: tuple[str, ...] = ()
    """Folders with unreadable manifests. They may refer to any shard file, so all shard files stay."""


def plan_removal(storage: Storage, names: Sequence[str]) -> Removal:
    """Plans which files to delete with some steps (note "Referenced files stay"). Deletes nothing.

    Args:
        storage: the run's folder.
        names: folders of the steps. Linked folders stay.

    Raises:
        StorageError: the storage failed.
    """
    names = [name for name in names if not storage.within(name).linked]
    references = references_in(storage, without=names)
    files: list[str] = []
    referenced: dict[str, list[str]] = {}
    records: list[FileRecord] = []
    for name in names:
        with suppress(FormatError, NotCommittedError):
            records += read_manifest(storage.within(name)).referenced_files
        for file in files_in(storage.within(name), name):
            if file in references.files(name):
                referenced[name] = references.users(name)
            elif file != MANIFEST_NAME and not (references.unknown and file.startswith("shards/")):
                files.append(f"{name}/{file}")
    gone = set(names)
    elsewhere = [record for record in records if record.folder not in gone]
    released = {record.place for record in unreferenced_files(elsewhere, references, storage.within)}
    manifests = tuple(f"{name}/{MANIFEST_NAME}" for name in names)
    return Removal(manifests, (*files, *sorted(released)), referenced, tuple(references.unknown))


def delete_steps(
    storage: Storage, names: Sequence[str], on_progress: Callable[[int, int], None] | None = None
) -> Removal:
    """Deletes steps (notes "Only our files" and "The manifest goes first").

    Args:
        storage: the run's folder.
        names: folders of the steps.
        on_progress: called with files removed and files in all.

    Raises:
        StorageError: the storage failed. Steps that were deleted in part are no checkpoints.
    """
    removal = plan_removal(storage, names)
    gone = (*removal.manifests, *removal.files)
    for done, file in enumerate(gone):
        if on_progress is not None:
            on_progress(done, len(gone))
        if done == len(removal.manifests):
            flush_manifests_in(storage)
        storage.delete(file)
    return removal


class StepFacts:
    """Times and metadata of the steps of a run, from their manifests. Each manifest is read once.

    `holder` gives the run from which to read the manifest of a step; None: `run`.
    """

    def __init__(self, run: Storage, holder: Callable[[int], Storage] | None = None) -> None:
        self._run = run
        self._holder = holder
        self._known: dict[int, tuple[float, Mapping[str, Any]]] = {}

    def select(
        self,
        policy: Retention,
        steps: Sequence[int],
        only_known: Collection[int] = (),
        run: Storage | None = None,
    ) -> tuple[set[int], set[int]]:
        """The steps that a policy selects, and those with an unreadable manifest that it needs.

        Args:
            policy: the policy.
            steps: the steps, ascending.
            only_known: steps with manifests that must not be read now. If the policy needs one of them and it
                is not cached, the policy runs without the step.
            run: the run to read manifests from now; None: what `holder` gives.
        """
        unreadable: set[int] = set()
        unseen: set[int] = set()
        while True:
            readable = [
                SavedStep(step, partial(self._read, step, step in only_known, run))
                for step in steps
                if step not in unreadable and step not in unseen
            ]
            try:
                return {int(step) for step in policy.select(readable)}, unreadable
            except _Unknown as error:
                unseen.add(error.step)
            except _Unreadable as error:
                unreadable.add(error.step)
                _log.warning(
                    "%s: step %d stays, and the policy does not see it: its manifest cannot be read: %s",
                    self._run.location,
                    error.step,
                    error.__cause__,
                )

    def time_of(self, step: int) -> float | None:
        """The time of the save of a step, Unix seconds; None if its manifest cannot be read now."""
        try:
            return self._read(step, False, None)[0]
        except (_Unreadable, StorageError):
            return None

    def times_of(self, steps: Sequence[int]) -> dict[int, float | None]:
        """The times of the saves of steps, as `time_of`. Asks a remote storage for several at a time."""
        return dict(zip(steps, map_requests(self._run, self.time_of, steps), strict=True))

    def forget(self, step: int) -> None:
        """Reads the manifest of a step again when needed. Call it after a save or a removal."""
        self._known.pop(step, None)

    def learn(self, step: int, manifest: Manifest) -> None:
        """Takes the facts of a step from its manifest."""
        self._known[step] = manifest.time, _small_values(manifest.metadata)

    def _read(self, step: int, only_known: bool, run: Storage | None) -> tuple[float, Mapping[str, Any]]:
        facts = self._known.get(step)
        if facts is None and only_known:
            raise _Unknown(step)
        if facts is None:
            if run is None:
                run = self._run if self._holder is None else self._holder(step)
            try:
                manifest = read_manifest(run.within(step_name(step)))
            except (FormatError, NotCommittedError) as error:
                raise _Unreadable(step) from error
            facts = self._known[step] = manifest.time, _small_values(manifest.metadata)
        return facts


def _small_values(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The decoded values of a manifest's metadata, without those that are stored as tensors."""
    from shardproof.engine.state import decode_plain, references

    return {name: decode_plain(value) for name, value in metadata.items() if not any(references(value))}


class _Unreadable(Exception):
    """The manifest of a step cannot be read."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class _Unknown(_Unreadable):
    """The manifest of a step is not cached, and must not be read now."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownSteps:
    """What a job knows of the committed steps of its run."""

    facts: StepFacts
    """Cache of times and metadata."""
    is_restorable: Callable[[int], bool]
    """See `RestorableSteps`."""
    branch_removal: Callable[[int], str]
    """The commands that list and remove an abandoned branch, for messages."""
    is_damaged: Callable[[int], bool] = lambda step: False
    """True for steps that are known to be damaged."""
    is_proved: Callable[[int], bool] = lambda step: True
    """True for undamaged steps that are proved readable."""
    is_unconfirmed: Callable[[int], bool] = lambda step: False
    """True for steps whose commit is not known to be durable."""


def retain(
    run: Storage,
    keep: Retention,
    newest: int,
    known: KnownSteps,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    protect: Callable[[Sequence[int]], Collection[int]] | None = None,
) -> list[str]:
    """Removes the steps that a policy does not keep. A failure costs space, not safety, so it is only logged.

    Note "One line of steps": only steps up to the one just saved count. After a rollback the run has newer
    ones, which must not displace the steps of the run that continues. Newer steps that were saved after it
    are no sign of a rollback: another process continues the run. Damaged steps do not count, either. A step
    with an unconfirmed commit displaces no other step, and is removed if the policy does not select it.

    Note "What stays is restorable": a step that the policy selects displaces others only if it is restorable
    (note "Only a restorable step counts" in `judge`). Another step stays, and the policy selects among the
    restorable ones. Steps are judged only if a step is to be removed.

    Note "A suspect stays until it is settled": the policy does not see suspects. A settled suspect is removed
    after the commit of a newer step, so that people can read the verdict until then.

    Note "A pinned step stays": the policy sees pinned steps, and they stay even if it does not keep them.

    Args:
        run: the run's folder.
        keep: the policy.
        newest: the step that was just saved.
        known: what the job knows of the steps.
        on_progress: see `delete_steps`.
        protect: takes the steps to remove, and returns those that stay because they wait for their upload. No
            upload of the others begins. None: no step waits.

    Returns:
        Folders of the steps that were removed.
    """
    removed: list[str] = []
    try:
        steps = _committed_steps(run, known)
        _warn_of_branch(run, steps, newest, known)
        dropped = _beyond(run, keep, newest, [step for step in steps if step <= newest], known)
        if dropped and protect is not None:
            dropped = sorted(set(dropped).difference(protect(dropped)))
        for step in dropped:
            known.facts.forget(step)  # another job may save a step of this number
        names = [step_name(step) for step in dropped]
        _delete(run, names, on_progress)
        removed = names
        suspects = suspects_in(run).items()
        settled = [one.name for one, verdict in suspects if verdict is not None and one.step < newest]
        _delete(run, settled, on_progress)
    except Exception as error:
        _log.warning("%s: old steps could not be removed: %s", run.location, error)
    return removed


def _committed_steps(run: Storage, known: KnownSteps) -> list[int]:
    """The committed steps that are not known to be damaged, ascending."""

    def has_manifest(step: int) -> bool:
        try:
            return run.size(f"{step_name(step)}/{MANIFEST_NAME}") is not None
        except StorageError as error:
            _log.warning("%s: retention leaves %s as it is: %s", run.location, step_name(step), error)
            return False

    steps = [step for step in steps_in(run) if not known.is_damaged(step)]
    return [step for step, has in zip(steps, map_requests(run, has_manifest, steps), strict=True) if has]


def _warn_of_branch(run: Storage, steps: Sequence[int], newest: int, known: KnownSteps) -> None:
    """Logs the steps that a rollback gave up (note "One line of steps")."""
    newer = [step for step in steps if step > newest]
    given_up = abandoned(known.facts.times_of([newest, *newer]), newest) if newer else []
    if given_up:
        _log.warning(
            "%s: steps %s have higher numbers than step %d, which was just saved, and were saved before "
            "it: the run was rolled back, or a clock was behind. restore() takes them. %s",
            run.location,
            given_up,
            newest,
            known.branch_removal(newest),
        )


def _beyond(
    run: Storage, keep: Retention, newest: int, counted: Sequence[int], known: KnownSteps
) -> list[int]:
    """The steps of `counted` that neither the policy, nor a pin, nor a note of this module keeps."""
    while True:
        certain = [step for step in counted if step == newest or not known.is_unconfirmed(step)]
        kept = _kept(keep, known.facts, newest, counted, certain)
        dropped = [
            step for step in counted if step not in kept and read_pin(run.within(step_name(step))) is None
        ]
        judged = [step for step in counted if dropped and step != newest]
        restorable = map_requests(run, known.is_restorable, judged)
        others = {step for step, is_good in zip(judged, restorable, strict=True) if not is_good}
        if not others:
            break
        counted = [step for step in counted if step not in others]
    if not any(known.is_proved(step) for step in certain if step not in dropped):
        last_proved = next((step for step in reversed(dropped) if known.is_proved(step)), None)
        dropped = [step for step in dropped if step != last_proved]
    return dropped


def branch_removal(places: Sequence[str], step: int) -> str:
    """The commands that list an abandoned branch, for messages, and the option that removes it.

    >>> print(branch_removal(["a"], 7))
    `shardproof prune a --after 7 --dry-run` lists them, and with --yes in place of --dry-run removes them
    """
    commands = " and ".join(
        f"`shardproof prune {shlex.quote(place)} --after {step} --dry-run`" for place in places
    )
    verbs = ("lists", "removes") if len(places) == 1 else ("list", "remove")
    return f"{commands} {verbs[0]} them, and with --yes in place of --dry-run {verbs[1]} them"


def abandoned(times: Mapping[int, float | None], last: int) -> list[int]:
    """The steps that a rollback gave up for the step `last`: with a higher number, and saved before it.

    Args:
        times: times of the saves, that of `last` too; None for a time that cannot be read. Its step counts as
            not given up.
        last: a step of the run that continues.

    >>> abandoned({10: 1.0, 11: 4.0, 12: 5.0, 20: 2.0, 30: None}, 11)
    [20]
    """
    saved = times[last]
    if saved is None:
        return []
    return [step for step, time in times.items() if step > last and time is not None and time < saved]


def _kept(
    keep: Retention, facts: StepFacts, newest: int, counted: Sequence[int], certain: Sequence[int]
) -> set[int]:
    """The steps that a policy selects of `counted`, of which only `certain` displace others."""
    selected, unreadable = facts.select(keep, certain)
    kept = {newest, *selected, *unreadable}.intersection(counted)
    for step in set(counted) - set(certain):
        selected, unreadable = facts.select(keep, sorted((*certain, step)))
        kept |= {step}.intersection(selected | unreadable)
    return kept


def _delete(run: Storage, names: Sequence[str], on_progress: Callable[[int, int], None] | None) -> None:
    """Deletes steps. Logs a warning if that frees no space, because the disk may fill."""
    if not names:
        return
    unknown = delete_steps(run, names, on_progress).unknown
    if unknown:
        _log.warning(
            "%s: the shard files of %s stay: %s",
            run.location,
            ", ".join(names),
            unreadable_manifests_message(unknown),
        )


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files of one attempt to save that no manifest names, in one step's folder."""

    folder: str
    """The step's folder."""
    attempt: str
    """The attempt in the files' names; empty for an unpublished manifest, and for a verdict or a pin without
    its checkpoint."""
    files: tuple[str, ...]
    """Names within the folder."""
    bytes: int
    modified: float | None
    """Time of the last write to any of the files, Unix seconds; None if unknown."""
    committed: bool
    """True if another attempt is committed in the same folder."""

    def older_than(self, seconds: float, now: float) -> bool:
        """True if the last write is older than this. Only the age shows that a save is dead."""
        return self.modified is not None and now - self.modified >= seconds


def leftovers(
    storage: Storage, modified: Callable[[str], float | None], references: References | None = None
) -> list[Leftover]:
    """Finds the files of dead saves, and of saves under way, in the step folders of a run.

    Folders that the storage cannot read are skipped. A folder with an unreadable manifest has no leftovers,
    because its manifest may name any file in it. Such a manifest may also refer to files of other steps, so
    none of those are leftovers, either.

    Args:
        storage: the run's folder.
        modified: the time of the last write to a file, Unix seconds; None if there is none.
        references: references of the steps of the run; None to read them.

    Raises:
        StorageError: the storage cannot list the run.
    """
    references = references_in(storage) if references is None else references
    found: list[Leftover] = []
    for folder in folders_in(storage):
        try:
            found += _leftovers_in(storage, folder.name, references, modified)
        except StorageError as error:
            _log.info("%s: the leftovers of %s stay: %s", storage.location, folder.name, error)
    return found


def _leftovers_in(
    storage: Storage, folder: str, references: References, modified: Callable[[str], float | None]
) -> list[Leftover]:
    """The leftovers in one step folder. Files are listed before the manifest that may name them is read."""
    place = storage.within(folder)
    if place.linked:
        return []
    files = [name for name in files_in(place, folder) if name != MANIFEST_NAME]
    needed = _needed(place, folder, references) if files else None
    if needed is None:
        return []
    if references.unknown:
        files = [file for file in files if not file.startswith("shards/")]
    by_attempt: dict[str, list[str]] = {}
    for file in files:
        attempt = attempt_of(file, folder)
        if file not in needed and attempt is not None:
            by_attempt.setdefault(attempt, []).append(file)
    found = []
    for attempt, group in sorted(by_attempt.items()):
        newest = max(times_of(storage, modified, [f"{folder}/{file}" for file in group]), default=None)
        total = sum(map_requests(place, partial(_size, place), group))
        found.append(Leftover(folder, attempt, tuple(group), total, newest, MANIFEST_NAME in needed))
    return found


def remove_leftover(storage: Storage, leftover: Leftover) -> bool:
    """Deletes the files of a leftover. Returns False, and deletes nothing, if a manifest names them now.

    The manifest is flushed first. Until it is durable, a crash of the machine may restore the manifest that
    it replaced, which may name these files.
    """
    folder = storage.within(leftover.folder)
    needed = _needed(folder, leftover.folder, references_in(storage))
    if needed is None or not needed.isdisjoint(leftover.files):
        return False
    if MANIFEST_NAME in needed:
        folder.flush(MANIFEST_NAME)
    for file in leftover.files:
        storage.delete(f"{leftover.folder}/{file}")
    return True


def remove_dead_saves(run: Storage, own: Storage) -> None:
    """Removes from the memory of this node the files of saves that died, before the first save of a job.

    On a disk they stay for `prune`. In memory they would take the room of the next save. Does nothing if
    another process uses the run. A failure costs space only, so it is logged. `run` is the run on all nodes:
    a manifest on any of them may name a file of this node.
    """
    try:
        for leftover in own.hold(lambda: leftovers(own, own.modified)):
            if remove_leftover(run, leftover):
                _log.info(
                    "%s/%s: removed %d files of a save that died",
                    own.location,
                    leftover.folder,
                    len(leftover.files),
                )
    except ShardproofError as error:
        _log.warning("%s: the files of dead saves stay in memory: %s", own.location, error)


def _needed(storage: Storage, folder: str, references: References) -> set[str] | None:
    """Files in a step's folder that any manifest names, and the verdict or pin of a step that exists.

    None if the manifest in the folder cannot be read.
    """
    named = named_files(storage)
    if named is None:
        return None
    return named | set(references.files(folder)) | ({SETTLED_NAME, PINNED_NAME} if named else set())


def times_of(storage: Storage, modified: Callable[[str], float | None], files: Sequence[str]) -> list[float]:
    """The times of the last writes to files of a storage and to their folders, each by `modified`.

    A copy may give a file the time of its source. The time of the folder then shows when it was copied.
    """
    folders = {file.rpartition("/")[0] for file in files}
    times = map_requests(storage, modified, (*files, *sorted(folders)))
    return [time for time in times if time is not None]


def _size(storage: Storage, file: str) -> int:
    """Bytes of a file; 0 if it does not exist, or is a dangling link."""
    try:
        return storage.size(file) or 0
    except StorageError as error:
        if error.details.get("lost_link"):
            return 0
        raise
