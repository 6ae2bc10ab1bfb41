"""Which steps of a run are kept, and how the others, and what dead saves left, are removed.

Note "Only what we wrote": a step's folder may also hold files of the user (a tokenizer, a config). Nothing
here ever deletes a file whose name shardproof would not have given it.

Note "The manifest goes first": a step is deleted by deleting its manifest, durably, and only then the files
that it names. A crash in between leaves files without a manifest, which is a leftover like that of a dead
save and never a committed step that misses files.

Note "Lent files stay": a step that was saved incrementally refers to files of earlier steps. When such an
earlier step is deleted, its manifest goes (it is no checkpoint any more), and the files that a kept step
refers to stay; the last step that refers to a file takes it along. Which files those are is asked of the
manifests that will be left.

Note "The last proved step stays": a policy may let go every step that is proved readable (note "Proved" in
`shardproof.checkpointer.scrub`) and keep only steps whose references were not read since their commit. Then
the newest proved step stays, too. It goes once a step that the policy keeps is proved.

Nothing is removed in a linked folder (note "Linked steps" in `step_folders`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardproof.checkpointer.step_folders import SETTLED_NAME, attempt_of, is_ours, parse_folder, step_name
from shardproof.checkpointer.suspects import settled_suspects
from shardproof.errors import FormatError, NotCommittedError
from shardproof.format import (
    MANIFEST_NAME,
    FileRecord,
    References,
    kept_files_message,
    named_files,
    read_manifest,
    references_in,
    unreferenced_files,
)
from shardproof.storage import Storage

__all__ = [
    "KeepLatest",
    "Leftover",
    "Removal",
    "Retention",
    "delete_steps",
    "leftovers",
    "plan_removal",
    "remove_leftover",
    "retain",
]

_log = logging.getLogger("shardproof")


class Retention(Protocol):
    """A policy: which committed steps to keep."""

    def select(self, steps: Sequence[int]) -> set[int]:
        """The steps to keep, of the committed `steps` (in any order)."""
        ...


@dataclass(frozen=True, slots=True)
class KeepLatest:
    """Keep the `n` newest committed steps.

    Raises:
        ValueError: `n` is not a whole number of at least 1.

    >>> sorted(KeepLatest(2).select([100, 300, 200]))
    [200, 300]
    """

    n: int

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"KeepLatest keeps a whole number of steps, at least 1, not {self.n!r}")

    def select(self, steps: Sequence[int]) -> set[int]:
        """The `n` largest of `steps`."""
        return set(sorted(steps)[-self.n :])


@dataclass(frozen=True, slots=True)
class Removal:
    """What deleting some steps of a run takes away."""

    manifests: tuple[str, ...]
    """Manifests, which go first."""
    files: tuple[str, ...]
    """All other files that go, some of them in folders of other steps."""
    lent: dict[str, list[str]] = field(default_factory=dict)
    """Folders of deleted steps whose files stay in part, to the folders of the steps that refer to them."""
    unknown: tuple[str, ...] = ()
    """Folders of steps whose manifests cannot be read: because of them, all that could be lent stays."""


def plan_removal(storage: Storage, names: Sequence[str]) -> Removal:
    """What goes, and what stays, when steps are deleted (note "Lent files stay"). Deletes nothing.

    Args:
        storage: the run's folder.
        names: folders of the steps. Linked ones stay.

    Raises:
        StorageError: the storage failed.
    """
    names = [name for name in names if not storage.within(name).linked]
    references = references_in(storage, without=names)
    files: list[str] = []
    lent: dict[str, list[str]] = {}
    borrowed: list[FileRecord] = []
    for name in names:
        borrowed += _borrowed(storage.within(name))
        for file in storage.list(name):
            own = file.removeprefix(f"{name}/")
            if not is_ours(own, name) or own == MANIFEST_NAME:
                continue
            if own in references.files(name):
                lent[name] = references.users(name)
            elif not (references.unknown and own.startswith("shards/")):
                files.append(file)
    gone = set(names)
    elsewhere = [record for record in borrowed if record.folder not in gone]
    released = {record.place for record in unreferenced_files(elsewhere, references, storage.within)}
    manifests = tuple(f"{name}/{MANIFEST_NAME}" for name in names)
    return Removal(manifests, (*files, *sorted(released)), lent, tuple(references.unknown))


def delete_steps(
    storage: Storage, names: Sequence[str], on_progress: Callable[[int, int], None] | None = None
) -> Removal:
    """Removes the checkpoints in some folders of a run (notes "The manifest goes first", "Lent files stay").

    Only files that shardproof wrote are removed (note "Only what we wrote").

    Args:
        storage: the run's folder.
        names: folders of the steps.
        on_progress: called with files removed and files in all.

    Raises:
        StorageError: the storage failed; what is left of the steps is no checkpoint.
    """
    removal = plan_removal(storage, names)
    gone = (*removal.manifests, *removal.files)
    for done, file in enumerate(gone):
        if on_progress is not None:
            on_progress(done, len(gone))
        storage.delete(file)
    return removal


def retain(
    run: Storage,
    keep: Retention,
    newest: int,
    damaged: Callable[[int], bool],
    is_proved: Callable[[int], bool],
    on_progress: Callable[[int, int], None] | None = None,
    unconfirmed: Callable[[int], bool] = lambda step: False,
) -> None:
    """Removes what a policy lets go. Failing costs space, not safety, so it is only logged.

    Note "One line of steps": only steps up to the one just saved are counted. Newer ones are there when the
    run was rolled back; they must not push out the steps of the run that goes on. Nor do damaged steps count.
    A step whose commit is not confirmed pushes out no other step; it goes when the policy would let it go.

    Note "A suspect stays until it is settled": no policy is asked about suspects. One that is settled goes
    with the first newer step; before that, the verdict is still to be seen beside the run.

    Args:
        run: the run's folder.
        keep: the policy.
        newest: the step that was just saved.
        damaged: whether a committed step is known to be damaged.
        is_proved: whether a committed step that is not damaged is proved readable.
        on_progress: see `delete_steps`.
        unconfirmed: whether the commit of a step is not known to be durable.
    """
    try:
        folders = [folder for folder in map(parse_folder, run.folders()) if folder is not None]
        steps = [
            folder.step
            for folder in folders
            if not folder.suspect
            and run.size(f"{folder.name}/{MANIFEST_NAME}") is not None
            and not damaged(folder.step)
        ]
        newer = sorted(step for step in steps if step > newest)
        if newer:
            _log.warning(
                "%s: steps %s are newer than step %d, which was just saved: restore() would take them. "
                "Remove their folders if the run was rolled back",
                run.location,
                newer,
                newest,
            )
        counted = sorted(step for step in steps if step <= newest)
        certain = [step for step in counted if step == newest or not unconfirmed(step)]
        kept = {newest, *keep.select(certain)}.intersection(counted)
        for step in set(counted) - set(certain):
            kept |= {step}.intersection(keep.select(sorted((*certain, step))))
        let_go = sorted(set(counted) - kept)
        if let_go and not any(is_proved(step) for step in kept.intersection(certain)):
            last_proved = next((step for step in reversed(let_go) if is_proved(step)), None)
            let_go = [step for step in let_go if step != last_proved]
        if let_go:
            _delete(run, [step_name(step) for step in let_go], on_progress)
        settled = [folder for folder in settled_suspects(run) if folder.step < newest]
        if settled:
            _delete(run, [folder.name for folder in settled], on_progress)
    except Exception as error:
        _log.warning("%s: old steps could not be removed: %s", run.location, error)


def _delete(run: Storage, names: Sequence[str], on_progress: Callable[[int, int], None] | None) -> None:
    """Deletes steps, and says if that frees nothing: disks fill in silence otherwise."""
    unknown = delete_steps(run, names, on_progress).unknown
    if unknown:
        _log.warning(
            "%s: the shard files of %s stay: %s", run.location, ", ".join(names), kept_files_message(unknown)
        )


def _borrowed(folder: Storage) -> tuple[FileRecord, ...]:
    """Files of other steps that a step refers to, as far as it can be read."""
    try:
        return read_manifest(folder).borrowed_files
    except (FormatError, NotCommittedError):
        return ()


@dataclass(frozen=True, slots=True)
class Leftover:
    """What one attempt to save has left in a step's folder, and no manifest names."""

    folder: str
    """The step's folder."""
    attempt: str
    """The attempt in the files' names; empty for a manifest that was never published, or for what settled a
    suspect that is gone."""
    files: tuple[str, ...]
    """Names within the folder."""
    bytes: int
    modified: float | None
    """When the youngest of the files was last written, Unix seconds; None if that cannot be told."""
    committed: bool
    """Another attempt is committed in the same folder."""

    def older_than(self, seconds: float, now: float) -> bool:
        """Whether nothing of it was written in the last so many seconds.

        A save in progress looks the same as a dead one: its youngest file tells them apart.
        """
        return self.modified is not None and now - self.modified >= seconds


def leftovers(
    storage: Storage, modified: Callable[[str], float | None], references: References | None = None
) -> list[Leftover]:
    """What dead saves, and saves in progress, have in the step folders of a run.

    A folder whose manifest cannot be read is passed over: which of its files belong to it is unknown. Where
    such a manifest may refer to files of other steps, those are passed over too.

    Args:
        storage: the run's folder.
        modified: when the file of this name was last written, Unix seconds; None if it is gone.
        references: what the steps of the run refer to; None: it is found out.
    """
    references = references_in(storage) if references is None else references
    by_folder: dict[str, list[str]] = {}
    for folder in storage.folders():
        if parse_folder(folder) is None or storage.within(folder).linked:
            continue
        for name in storage.within(folder).list():
            if is_ours(name, folder) and name != MANIFEST_NAME:
                by_folder.setdefault(folder, []).append(name)
    found: list[Leftover] = []
    for folder, files in sorted(by_folder.items(), key=lambda item: parse_folder(item[0]) or ()):
        needed = _needed(storage.within(folder), folder, references)
        if needed is None:
            continue
        if references.unknown:
            files = [file for file in files if not file.startswith("shards/")]
        found += _leftovers_of(storage, folder, files, needed, modified)
    return found


def remove_leftover(storage: Storage, leftover: Leftover) -> bool:
    """Delete the files of a leftover; False, and nothing is deleted, if they are needed meanwhile.

    The manifest is flushed first: until it is durable, a crash of the machine may bring back the one that it
    replaced, which names the leftover's files.
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


def _needed(storage: Storage, folder: str, references: References) -> set[str] | None:
    """Files of a step's folder that a manifest names, the step's or another's; None if its cannot be read.

    What settles a suspect is needed as long as there is one to settle.
    """
    named = named_files(storage)
    if named is None:
        return None
    return named | set(references.files(folder)) | ({SETTLED_NAME} if named else set())


def _leftovers_of(
    storage: Storage,
    folder: str,
    files: Sequence[str],
    needed: set[str],
    modified: Callable[[str], float | None],
) -> list[Leftover]:
    by_attempt: dict[str, list[str]] = {}
    for file in files:
        attempt = attempt_of(file, folder)
        if file not in needed and attempt is not None:
            by_attempt.setdefault(attempt, []).append(file)
    found = []
    for attempt, group in sorted(by_attempt.items()):
        times = [time for file in group if (time := modified(f"{folder}/{file}")) is not None]
        total = sum(storage.size(f"{folder}/{file}") or 0 for file in group)
        newest = max(times, default=None)
        found.append(Leftover(folder, attempt, tuple(group), total, newest, MANIFEST_NAME in needed))
    return found
