"""Judges the checkpoint in a folder of a run. All commands, restore and retention use these verdicts.

Note "Three depths": "sizes" looks at names, sizes and manifests, for listings. "metadata" also reads the
index: restore, retention and `prune` decide so. "bytes" reads every byte. So a verdict of a lower depth may
change to a worse one at a higher depth, and never to a better one.

Note "Only a restorable step counts": retention and `prune` count a step among those to keep only if its
verdict is `Verdict.COMMITTED`. A step with any other verdict displaces no step. So a command that removes
older steps leaves steps that a restore takes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from shardproof._utils.humanize import counted, listed
from shardproof.engine.format import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    References,
    locate_files,
    read_index,
    read_manifest,
    read_seal,
    size_error,
    size_errors,
)
from shardproof.engine.planning import ChunkTable
from shardproof.engine.storage import Storage, file_sizes, map_requests
from shardproof.errors import (
    CorruptChunkError,
    FormatError,
    NotCommittedError,
    ShardproofError,
    StorageError,
    tells_nothing,
)
from shardproof.runs.checkpointer.retention import times_of
from shardproof.runs.checkpointer.step_folders import (
    PINNED_NAME,
    SETTLED_NAME,
    NodeMark,
    StepFolder,
    files_in,
    parse_folder,
    place_of,
    read_settled,
)

Depth = Literal["sizes", "metadata", "bytes"]
"""What a verdict is based on (note "Three depths")."""

_TRIES = 3
"""Times that a folder is judged if its manifest changes meanwhile."""

_log = logging.getLogger("shardproof")


class Verdict(StrEnum):
    """The state of the checkpoint in a folder of a run. docs/failures.md has the same table.

    >>> Verdict.COMMITTED, Verdict.COMMITTED.meaning
    (<Verdict.COMMITTED: 'committed'>, 'a whole checkpoint of this step')
    """

    meaning: str

    def __new__(cls, word: str, meaning: str) -> Verdict:
        """Makes a verdict from its word and its meaning."""
        verdict = str.__new__(cls, word)
        verdict._value_ = word
        verdict.meaning = meaning
        return verdict

    COMMITTED = "committed", "a whole checkpoint of this step"
    SUSPECT = "suspect", "a whole checkpoint of a step whose validation failed"
    SETTLED = "settled", "a suspect with a verdict on its failure"
    REPAIRABLE = "repairable", "all shard files of a save are there, and its manifest or index is not"
    DAMAGED = "damaged", "files are missing, cut or changed, and cannot be written again"
    MISPLACED = "misplaced", "the checkpoint of another step: the folder was renamed or copied"
    PARTIAL = "partial", "other nodes have some of its files"
    WRITING = "writing", "files without a manifest, written to lately"
    LEFTOVER = "leftover", "files of a save that died"
    REFERENCED = "referenced", "removed, except for files that other steps refer to"
    UNREADABLE = "unreadable", "the storage cannot read it at the moment, and it may be whole"


_FAULTY = (Verdict.DAMAGED, Verdict.REPAIRABLE)


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """The verdict on one folder of a run."""

    verdict: Verdict
    reason: str = ""
    """Why it is not committed: what is wrong, and where."""
    error: ShardproofError | None = None
    """The first fault; None without one."""
    manifest: Manifest | None = None
    """The manifest, if it can be read."""
    faults: tuple[ShardproofError, ...] = ()
    """With depth "bytes": all faults."""
    settled: str | None = None
    """The verdict that settles a suspect; None if it has none."""

    @property
    def is_unnamed(self) -> bool:
        """True for the files of a save that no manifest names."""
        return self.manifest is None and self.error is None and self.verdict is not Verdict.REFERENCED


def judge(
    run: Storage,
    folder: str,
    *,
    depth: Depth = "metadata",
    references: References | None = None,
    mark: NodeMark | None = None,
    plan_repairs: bool = True,
    saves_since: Callable[[], float] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Judgement | None:
    """The verdict on the checkpoint in a folder of a run. No other code decides which step is good.

    Args:
        run: the run's folder; with several tiers or nodes, the view of all.
        folder: the folder in the run; "." for the run's folder itself.
        depth: what to read (note "Three depths").
        references: the references of all steps of the run. None: files that other steps refer to count as
            files of a dead save.
        mark: the mark of a run on local disks of several nodes, of which `run` is one; None: all files are
            expected in `run`.
        plan_repairs: False to leave out whether a repair helps: a repairable step is then damaged, or a
            leftover if it has no manifest.
        saves_since: gives a time, Unix seconds. Files without a manifest that were written to since are a
            `Verdict.WRITING`. Called only if there is no manifest. None: no save is taken for a running one.
        on_progress: with depth "bytes", called with bytes done and bytes in all.

    Returns:
        The verdict; None if there is no file of a checkpoint. `judge_save` gives that of one of several saves
        in a folder without a manifest.
    """
    for _ in range(_TRIES):
        found = _judge_once(run, folder, depth, references, mark, plan_repairs, saves_since, on_progress)
        if found is None or found.verdict not in _FAULTY or not _is_replaced(run, folder, found):
            break
    return found


def verdict_on(run: Storage, folder: str, *, plan_repairs: bool = True) -> Verdict | None:
    """The verdict of `judge` alone; None if there is no file of a checkpoint."""
    found = judge(run, folder, plan_repairs=plan_repairs)
    return None if found is None else found.verdict


def _judge_once(
    run: Storage,
    folder: str,
    depth: Depth,
    references: References | None,
    mark: NodeMark | None,
    plan_repairs: bool,
    saves_since: Callable[[], float] | None,
    on_progress: Callable[[int, int], None] | None,
) -> Judgement | None:
    place = place_of(run, folder)
    try:
        manifest: Manifest | None = read_manifest(place)
        error: ShardproofError | None = None
    except NotCommittedError:
        return _judge_without_manifest(run, folder, references, plan_repairs, saves_since)
    except FormatError as damage:
        manifest, error = None, damage
    except StorageError as failure:
        return Judgement(Verdict.UNREADABLE, failure.message, failure)
    parsed = parse_folder(folder)
    is_suspect = parsed is not None and parsed.suspect
    try:
        settled = read_settled(place) if is_suspect else None
        error = error if manifest is None else _fault(place, manifest, depth)
    except StorageError as failure:
        return Judgement(Verdict.UNREADABLE, failure.message, failure, manifest)
    found = _judge_manifest(run, folder, manifest, error, mark, plan_repairs)
    if found.verdict is Verdict.COMMITTED and depth == "bytes":
        found = _judge_bytes(place, found, on_progress)
    if settled is not None:
        found = replace(found, settled=settled.verdict)
    if found.verdict is not Verdict.COMMITTED or not is_suspect:
        return found
    if settled is not None:
        return replace(found, verdict=Verdict.SETTLED, reason=settled.verdict)
    reason = "validation failed and is not settled: only restore(suspect=True) takes it"
    return replace(found, verdict=Verdict.SUSPECT, reason=reason)


def _judge_manifest(
    run: Storage,
    folder: str,
    manifest: Manifest | None,
    error: ShardproofError | None,
    mark: NodeMark | None,
    plan_repairs: bool,
) -> Judgement:
    """The verdict on a folder with a manifest, of a step or of a suspect."""
    place = place_of(run, folder)
    if error is not None:
        if mark is not None and manifest is not None and _has_only_missing_files(place, manifest):
            return Judgement(Verdict.PARTIAL, mark.sentence, None, manifest)
        return _damaged_or_repairable(place, error, manifest, plan_repairs)
    misfit = None if manifest is None else misplaced(run, folder, manifest)
    if misfit is not None:
        return Judgement(Verdict.MISPLACED, misfit.message, misfit, manifest)
    return Judgement(Verdict.COMMITTED, manifest=manifest)


def _is_replaced(run: Storage, folder: str, found: Judgement) -> bool:
    """True if a save, a repair or a removal changed the manifest while it was judged."""
    place, judged = place_of(run, folder), found.manifest
    try:
        now: Manifest | None = read_manifest(place)
    except NotCommittedError:
        return found.error is not None  # that of a manifest
    except (FormatError, StorageError):
        now = None
    return now is not None and (
        judged is None or (now.attempt, now.repaired) != (judged.attempt, judged.repaired)
    )


def judge_save(run: Storage, folder: str, attempt: str, *, is_recent: bool) -> Verdict:
    """The verdict on the files of one save that no manifest names; `is_recent` if one was written to lately.

    Returns:
        `Verdict.WRITING`, `Verdict.REPAIRABLE` if all shard files are there, or `Verdict.LEFTOVER`.
    """
    if is_recent:
        return Verdict.WRITING
    from shardproof.runs.maintenance import (
        whole_attempts,  # a listing of a healthy run starts faster without it
    )

    try:
        is_whole = bool(attempt) and attempt in whole_attempts(run.within(folder))
    except StorageError:
        is_whole = True  # not known, so the files stay
    return Verdict.REPAIRABLE if is_whole else Verdict.LEFTOVER


def repair_refusal(run: Storage, folder: str) -> str:
    """Why `repair` makes no step of the files in a folder without a manifest; empty if it does.

    Raises:
        StorageError: the storage failed.
    """
    from shardproof.runs.maintenance import plan_repair

    try:
        plan_repair(run.within(folder))
    except FormatError as error:
        return error.message
    return ""


def misplaced(run: Storage, folder: str, manifest: Manifest) -> FormatError | None:
    """The error of a folder that was renamed or copied, because it would restore one step as another."""
    parsed = parse_folder(folder)
    if parsed is None or manifest.step in (None, parsed.step):
        return None
    return FormatError(
        f"{run.location}/{folder} contains step {manifest.step}: it was renamed or copied. Restore its name, "
        "or load it with shardproof.load",
        file=f"{folder}/{MANIFEST_NAME}",
    )


class RestorableSteps:
    """The steps of a run that are restorable, for decisions of a job (note "Only a restorable step counts").

    A step is judged once for each commit, with depth "metadata".
    """

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._known: dict[str, bytes] = {}
        """Seal of the manifest of each folder that was found restorable."""
        self._reported: set[tuple[str, str]] = set()
        self._unreadable: dict[int, ShardproofError | None] = {}
        """The errors of the steps that could not be read at the last look."""

    def among(self, steps: Iterable[int]) -> list[int]:
        """The restorable steps of these, in their order. Asks a remote storage for several at a time.

        Raises:
            StorageError: the storage cannot read a step at the moment.
        """
        steps = list(steps)
        found = list(map_requests(self._run, self.__call__, steps))
        for step in (step for step, good in zip(steps, found, strict=True) if not good):
            if isinstance(error := self._unreadable.get(step), StorageError):
                raise error
        return [step for step, good in zip(steps, found, strict=True) if good]

    def __call__(self, step: int) -> bool:
        """True if a step is restorable. Logs once why a step is not. Never raises a `StorageError`."""
        folder = StepFolder(step).name
        self._unreadable.pop(step, None)
        try:
            seal = read_seal(self._run.within(folder))
            if seal is not None and self._known.get(folder) == seal:
                return True
            found = judge(self._run, folder, plan_repairs=False)
        except StorageError as error:
            found, seal = Judgement(Verdict.UNREADABLE, error.message, error), None
        if found is not None and found.verdict is Verdict.COMMITTED and seal is not None:
            self._known[folder] = seal
            return True
        if found is None or found.verdict is Verdict.LEFTOVER:
            return False  # another process removed it since it was listed
        if found.verdict is Verdict.UNREADABLE:
            self._unreadable[step] = found.error
        reason = f"{found.verdict}: {found.reason}"
        if (folder, reason) not in self._reported:
            self._reported.add((folder, reason))
            _log.warning(
                "%s: %s cannot be restored. It stays, displaces no other step, and no incremental save "
                "refers to it: %s",
                self._run.location,
                folder,
                reason,
            )
        return False

    def trust(self, step: int) -> None:
        """Marks a step as restorable that this job has just committed."""
        folder = StepFolder(step).name
        with suppress(StorageError):  # the step is judged when that matters
            seal = read_seal(self._run.within(folder))
            if seal is not None:
                self._known[folder] = seal


def is_damage(error: ShardproofError) -> bool:
    """True if stored bytes are lost or changed; False if the storage cannot read them at the moment."""
    if "damaged" in error.details:
        return bool(error.details["damaged"])
    if not isinstance(error, StorageError):
        return True
    return bool(error.details.get("missing")) or error.details.get("errno") in (None, "EIO")


@dataclass(frozen=True, slots=True)
class Damage:
    """A byte range of a shard file whose bytes are lost or changed.

    Example:
        >>> str(Damage("step-00000001/shards/00000-a.safetensors", 64, 128))
        'bytes 64 to 128 of step-00000001/shards/00000-a.safetensors'
        >>> str(Damage("step-00000001/shards/00000-a.safetensors"))
        'step-00000001/shards/00000-a.safetensors'
    """

    file: str
    """Folder of the step, and name of the file in it."""
    start: int = 0
    stop: int | None = None
    """First byte after the range; None: the end of the file."""

    @staticmethod
    def of(error: ShardproofError, run: str, folder: str) -> Damage | None:
        """The range that an error names; None if it names no shard file.

        Args:
            error: raised by a read of a step. A `CorruptChunkError` names the bytes, another error the file.
            run: location of the run.
            folder: folder of the step.
        """
        file = error.details.get("file")
        if not isinstance(file, str):
            return None
        if os.path.isabs(file):
            file = os.path.relpath(file, run)
        elif file.startswith("shards/"):
            file = f"{folder}/{file}"
        if "/shards/" not in file:
            return None
        if not isinstance(error, CorruptChunkError):
            return Damage(file)
        start = error.details["byte_start"]
        return Damage(file, start, start + error.details["byte_count"])

    def is_in(self, folder: str, manifest: Manifest, table: ChunkTable) -> bool:
        """True if a step has a chunk, with at least one byte, in the range."""
        for row, record in enumerate(manifest.files):
            if f"{record.folder or folder}/{record.name}" == self.file:
                ends = table.byte_start + table.byte_count
                found = (table.file == row) & (table.byte_count > 0) & (ends > self.start)
                if self.stop is not None:
                    found &= table.byte_start < self.stop
                return bool(found.any())
        return False

    def __str__(self) -> str:
        return self.file if self.stop is None else f"bytes {self.start} to {self.stop} of {self.file}"


def _judge_without_manifest(
    run: Storage,
    folder: str,
    references: References | None,
    plan_repairs: bool,
    saves_since: Callable[[], float] | None,
) -> Judgement | None:
    place = place_of(run, folder)
    try:
        files = {*files_in(place, folder)} - {SETTLED_NAME, PINNED_NAME}
    except StorageError as error:
        return Judgement(Verdict.UNREADABLE, error.message, error)
    if not files:
        return None
    needed = files.intersection(references.files(folder)) if references is not None else set()
    if needed and references is not None:
        users = listed(references.users(folder), 3)
        reason = f"removed; {len(needed)} file{'s' if len(needed) > 1 else ''} stay for {users}"
        return Judgement(Verdict.REFERENCED, reason)
    dead = Judgement(Verdict.LEFTOVER, "no manifest: the save died, or is still in progress")
    if not plan_repairs:
        return dead
    if saves_since is not None and _is_written_since(run, folder, files, saves_since):
        return Judgement(Verdict.WRITING, "no manifest: a save may be in progress")
    from shardproof.runs.maintenance import plan_repair

    try:
        attempt = plan_repair(place).attempt
    except ShardproofError as refusal:
        if isinstance(refusal, StorageError) and tells_nothing(refusal.details):
            return Judgement(Verdict.UNREADABLE, refusal.message, refusal)
        return dead
    reason = (
        f"no manifest, and all shard files of the save {attempt} are there: `shardproof repair` makes it a "
        f"step{'' if saves_since is not None else ', unless its save is still in progress'}"
    )
    return Judgement(Verdict.REPAIRABLE, reason)


def _is_written_since(
    run: Storage, folder: str, files: Iterable[str], saves_since: Callable[[], float]
) -> bool:
    """True if a file was written to since; False, too, if the storage does not tell the times."""
    try:
        times = times_of(run, run.modified, [f"{folder}/{file}" for file in files])
        return max(times, default=0.0) > saves_since()
    except StorageError:
        return False


def _fault(place: Storage, manifest: Manifest, depth: Depth) -> ShardproofError | None:
    """The first fault of a checkpoint, by its index and by the sizes of its files; None without one.

    Raises:
        StorageError: the storage cannot tell.
    """
    if depth == "sizes":
        fault: ShardproofError | None = size_error(
            place, manifest.index, path=f"{place.location}/{manifest.index.name}"
        )
    else:
        fault = None
        try:
            read_index(place, manifest)
        except FormatError as error:
            fault = error

    def advice(record: FileRecord) -> str:
        written = f"Rank {record.rank} wrote it"
        if not record.folder:
            return written
        return (
            f"{place.location} was saved incrementally and has chunks in it, so it must stay beside it. "
            f"{written}"
        )

    holders = (holder for holder, _ in locate_files(place, manifest))
    lost = size_errors(list(zip(holders, manifest.files, strict=True)), advice)
    if len(lost) > 1:
        index = "its index" if fault is not None and fault.details.get("missing") else ""
        more = " and ".join(filter(None, (f"{len(lost) - 1} more such files", index)))
        return StorageError(f"{lost[0].message}; and {more}", **lost[0].details)
    return lost[0] if lost else fault


def _has_only_missing_files(place: Storage, manifest: Manifest) -> bool:
    """True if the files of a step that are here have the sizes that the manifest records."""
    located = locate_files(place, manifest)
    records = [manifest.index, *manifest.files]
    try:
        sizes = file_sizes([(place, manifest.index.name), *located])
    except StorageError:
        return False
    return all(size in (None, record.size) for size, record in zip(sizes, records, strict=True))


def _damaged_or_repairable(
    place: Storage, error: ShardproofError, manifest: Manifest | None, plan_repairs: bool
) -> Judgement:
    """The verdict on a checkpoint with a fault: `repair` decides whether it can be repaired."""
    if not plan_repairs:
        return Judgement(Verdict.DAMAGED, error.message, error, manifest)
    from shardproof.runs.maintenance import plan_repair  # a listing of a healthy run starts faster without it

    try:
        plan = plan_repair(place)
    except ShardproofError as refusal:
        if isinstance(refusal, StorageError) and tells_nothing(refusal.details):
            return Judgement(Verdict.UNREADABLE, refusal.message, refusal, manifest)
        return Judgement(Verdict.DAMAGED, f"{error.message}; it cannot be repaired", error, manifest)
    reason = error.message
    if manifest is not None and plan.intact is None:
        reason = (
            f"its {MANIFEST_NAME} is of another save ({manifest.attempt}), which has no shard file here. All "
            f"shard files of the save {plan.attempt} are here"
        )
    return Judgement(Verdict.REPAIRABLE, reason, error, manifest)


def _judge_bytes(
    place: Storage, found: Judgement, on_progress: Callable[[int, int], None] | None
) -> Judgement:
    """The verdict after every byte is read."""
    from shardproof.runs.maintenance import verify

    try:
        faults = verify(place, on_progress).faults
    except NotCommittedError as error:
        return replace(found, verdict=Verdict.UNREADABLE, reason=error.message, error=error)
    if not faults:
        return found
    first = next(filter(is_damage, faults), faults[0])
    more = f" (and {counted(len(faults) - 1, 'more fault')})" if len(faults) > 1 else ""
    verdict = Verdict.DAMAGED if is_damage(first) else Verdict.UNREADABLE
    reason = f"{first.message}{more}"
    return replace(found, verdict=verdict, reason=reason, error=first, faults=tuple(faults))
