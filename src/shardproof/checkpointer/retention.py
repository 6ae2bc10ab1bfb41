"""Which steps of a run are kept, and how the others, and what dead saves left, are removed.

Note "Only what we wrote": a step's folder may also hold files of the user (a tokenizer, a config). Nothing
here ever deletes a file whose name shardproof would not have given it.

Note "The manifest goes first": a step is deleted by deleting its manifest, durably, and only then the files
that it names. A crash in between leaves files without a manifest, which is a leftover like that of a dead
save and never a committed step that misses files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardproof.errors import FormatError, NotCommittedError
from shardproof.format import MANIFEST_NAME, read_manifest
from shardproof.storage import Storage

__all__ = [
    "KeepLatest",
    "Leftover",
    "Retention",
    "delete_step",
    "is_ours",
    "leftovers",
    "parse_step",
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


def delete_step(storage: Storage, name: str) -> None:
    """Remove the checkpoint in the folder `name` of `storage` (note "The manifest goes first").

    Only files that shardproof wrote are removed (note "Only what we wrote"). Raises `StorageError`.
    """
    storage.delete(f"{name}/{MANIFEST_NAME}")
    for file in storage.list(name):
        if is_ours(file.removeprefix(f"{name}/")):
            storage.delete(file)


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


def leftovers(storage: Storage, modified: Callable[[str], float | None]) -> list[Leftover]:
    """What dead saves, and saves in progress, have in the step folders of a run.

    A folder whose manifest cannot be read is passed over: which of its files belong to it is unknown.

    Args:
        storage: the run's folder.
        modified: when the file of this name was last written, Unix seconds; None if it is gone.
    """
    by_folder: dict[str, list[str]] = {}
    for name in storage.list():
        folder, _, rest = name.partition("/")
        if parse_step(folder) is not None and is_ours(rest) and rest != MANIFEST_NAME:
            by_folder.setdefault(folder, []).append(rest)
    found: list[Leftover] = []
    for folder, files in sorted(by_folder.items(), key=lambda item: parse_step(item[0]) or 0):
        named = _named(storage.within(folder))
        if named is not None:
            found += _leftovers_of(storage, folder, files, named, modified)
    return found


def remove_leftover(storage: Storage, leftover: Leftover) -> bool:
    """Delete the files of a leftover; False, and nothing is deleted, if it has been committed meanwhile."""
    named = _named(storage.within(leftover.folder))
    if named is None or not named.isdisjoint(leftover.files):
        return False
    for file in leftover.files:
        storage.delete(f"{leftover.folder}/{file}")
    return True


def _named(folder: Storage) -> set[str] | None:
    """Files that the manifest of a step names, itself too; none without one; None if it cannot be read."""
    try:
        manifest = read_manifest(folder)
    except NotCommittedError:
        return set()
    except FormatError:
        return None
    return {MANIFEST_NAME, manifest.index.name, *(record.name for record in manifest.files)}


def _leftovers_of(
    storage: Storage,
    folder: str,
    files: Sequence[str],
    named: set[str],
    modified: Callable[[str], float | None],
) -> list[Leftover]:
    by_attempt: dict[str, list[str]] = {}
    for file in files:
        match = _DATA.fullmatch(file)
        if file not in named and match is not None:
            by_attempt.setdefault(match["attempt"] or "", []).append(file)
    found = []
    for attempt, group in sorted(by_attempt.items()):
        times = [time for file in group if (time := modified(f"{folder}/{file}")) is not None]
        total = sum(storage.size(f"{folder}/{file}") or 0 for file in group)
        newest = max(times, default=None)
        found.append(Leftover(folder, attempt, tuple(group), total, newest, bool(named)))
    return found
