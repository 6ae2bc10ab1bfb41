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
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardproof.errors import FormatError, NotCommittedError
from shardproof.format import (
    MANIFEST_NAME,
    FileRecord,
    References,
    named_files,
    read_manifest,
    referred_in,
    unneeded,
)
from shardproof.storage import Storage

__all__ = [
    "KeepLatest",
    "Leftover",
    "Removal",
    "Retention",
    "delete_steps",
    "is_ours",
    "leftovers",
    "parse_step",
    "plan_removal",
    "remove_leftover",
    "step_name",
]

_STEP = re.compile(r"step-([0-9]{8,18})")
_DATA = re.compile(
    r"(?:shards/[0-9]+-|index-)(?P<attempt>[^/]+?)\.safetensors(?:\.[^/]+\.tmp)?"
    rf"|{re.escape(MANIFEST_NAME)}(?:\.[^/]+\.tmp)?"
)


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


def step_name(step: int) -> str:
    """The folder of a step; names sort as steps do, up to 8 digits.

    >>> step_name(1000)
    'step-00001000'
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
        raise ValueError(f"a step is a whole number from 0 to 10**18 - 1, not {step!r}")
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step whose folder has this name; None for any other name.

    >>> parse_step("step-00001000"), parse_step("step-1000"), parse_step("logs")
    (1000, None, None)
    """
    match = _STEP.fullmatch(name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


def is_ours(name: str) -> bool:
    """Whether a file of a checkpoint's folder has a name that shardproof gives.

    >>> is_ours("shards/00003-8f2c.safetensors"), is_ours("manifest.json.x1.tmp"), is_ours("tokenizer.json")
    (True, True, False)
    """
    return _DATA.fullmatch(name) is not None


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
        names: folders of the steps.

    Raises:
        StorageError: the storage failed.
    """
    references = referred_in(storage, without=names)
    files: list[str] = []
    lent: dict[str, list[str]] = {}
    borrowed: list[FileRecord] = []
    for name in names:
        borrowed += _borrowed(storage.within(name))
        for file in storage.list(name):
            own = file.removeprefix(f"{name}/")
            if not is_ours(own) or own == MANIFEST_NAME:
                continue
            if own in references.files(name):
                lent[name] = references.users(name)
            elif not (references.unknown and own.startswith("shards/")):
                files.append(file)
    gone = set(names)
    elsewhere = [record for record in borrowed if record.folder not in gone]
    released = {record.place for record in unneeded(elsewhere, references, storage.within)}
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
    """The attempt in the files' names; empty for a manifest that was never published."""
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
    references = referred_in(storage) if references is None else references
    by_folder: dict[str, list[str]] = {}
    for name in storage.list():
        folder, _, rest = name.partition("/")
        if parse_step(folder) is not None and is_ours(rest) and rest != MANIFEST_NAME:
            by_folder.setdefault(folder, []).append(rest)
    found: list[Leftover] = []
    for folder, files in sorted(by_folder.items(), key=lambda item: parse_step(item[0]) or 0):
        needed = _needed(storage.within(folder), folder, references)
        if needed is None:
            continue
        if references.unknown:
            files = [file for file in files if not file.startswith("shards/")]
        found += _leftovers_of(storage, folder, files, needed, modified)
    return found


def remove_leftover(storage: Storage, leftover: Leftover) -> bool:
    """Delete the files of a leftover; False, and nothing is deleted, if they are needed meanwhile."""
    needed = _needed(storage.within(leftover.folder), leftover.folder, referred_in(storage))
    if needed is None or not needed.isdisjoint(leftover.files):
        return False
    for file in leftover.files:
        storage.delete(f"{leftover.folder}/{file}")
    return True


def _needed(storage: Storage, folder: str, references: References) -> set[str] | None:
    """Files of a step's folder that a manifest names, the step's or another's; None if its cannot be read."""
    named = named_files(storage)
    return None if named is None else named | set(references.files(folder))


def _leftovers_of(
    storage: Storage,
    folder: str,
    files: Sequence[str],
    needed: set[str],
    modified: Callable[[str], float | None],
) -> list[Leftover]:
    by_attempt: dict[str, list[str]] = {}
    for file in files:
        match = _DATA.fullmatch(file)
        if file not in needed and match is not None:
            by_attempt.setdefault(match["attempt"] or "", []).append(file)
    found = []
    for attempt, group in sorted(by_attempt.items()):
        times = [time for file in group if (time := modified(f"{folder}/{file}")) is not None]
        total = sum(storage.size(f"{folder}/{file}") or 0 for file in group)
        newest = max(times, default=None)
        found.append(Leftover(folder, attempt, tuple(group), total, newest, MANIFEST_NAME in needed))
    return found
