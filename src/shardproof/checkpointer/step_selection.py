"""Chooses the step that a restore takes: the newest that is committed and readable."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from shardproof.checkpointer.damage import Damage, is_damage
from shardproof.checkpointer.judge import Verdict, judge
from shardproof.checkpointer.marks import read_settled, suspects_in
from shardproof.checkpointer.step_folders import StepFolder, folders_in, is_ours, parse_folder
from shardproof.checkpointer.tiers import copies_in
from shardproof.errors import CorruptChunkError, NotCommittedError, ShardproofError, StorageError
from shardproof.format import MANIFEST_NAME, References, read_index, read_seal, references_in
from shardproof.storage import Storage

__all__ = [
    "KEEP_MORE",
    "MOST_TRIES",
    "Chosen",
    "Failed",
    "PassedOver",
    "choose",
    "choose_after",
    "named",
    "newest_committed",
    "seal_now",
    "why_unreadable",
]

MOST_TRIES = 16
"""Maximum number of attempts to choose a step while another process removes or replaces chosen steps. If each
attempt fails with probability 1/2, one restore in 65,536 fails."""

KEEP_MORE = (
    "Retention removes steps faster than this process reads them: keep more steps in the training job, for "
    "example by Checkpointer(keep=KeepLatest(2))"
)

_NEVER_COMMITTED = "it has no manifest: its save died or has not ended, so it is not a checkpoint"

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer step that `Checkpointer.restore` did not take: damaged, or never committed."""

    step: int
    """Number of the step."""
    reason: str
    """Why `restore` did not take it, for messages."""
    damaged: bool
    """It was committed and its bytes are lost or changed. A save of this step may replace it."""
    suspect: bool = False
    """True for the suspect of that number."""
    damage: Damage | None = None
    """The damaged bytes. `restore` passes over older steps with chunks there, without reading them."""
    committed: bool = True
    """True if it has or had a manifest. Without one, its save died or has not ended."""
    tier: str = ""
    """With several tiers or nodes: location of the copy that was passed over, if another tier or node has a
    copy that can be restored; otherwise empty."""

    @property
    def folder(self) -> StepFolder:
        """Its folder."""
        return StepFolder(self.step, self.suspect)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The step that rank 0 chooses to restore."""

    folder: StepFolder | None
    """None: the run has no committed step."""
    seal: bytes | None = None
    """Seal of the chosen manifest (see `seal_now`)."""
    passed: list[PassedOver] = field(default_factory=list)
    """Newer steps that rank 0 passed over."""
    changed: bool = False
    """True if another process removed or replaced the last chosen step during the read."""
    stands: bool = False
    """True if the error of the last chosen step is final, and rank 0 chooses no other step."""
    left_out: dict[str, list[int]] = field(default_factory=dict)
    """With several tiers: see note "Left out" in `tiered_run`."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A chosen step that could not be read. Equal on all ranks."""

    chosen: Chosen
    error: ShardproofError


def newest_committed(run: Storage, *, suspect: bool) -> StepFolder | None:
    """The newest committed step, readable or not; None if there is none. With `suspect`, also suspects.

    Costs one listing, and one check for a manifest in that step and in each newer leftover.
    """
    return next((folder for folder in _folders(run, suspect) if _is_committed(run, folder)), None)


def named(run: Storage, step: int, *, suspect: bool) -> StepFolder:
    """The folder of a step; that of the unsettled suspect of the number if `suspect`, and there is one."""
    return StepFolder(step, suspect and _is_committed(run, StepFolder(step, suspect=True)))


def choose(run: Storage, known: Sequence[PassedOver], *, suspect: bool) -> Chosen:
    """The newest step with valid manifest, index and file sizes, and the newer steps that are passed over.

    Training may continue in the run, and retention may remove a step between two reads of it. So a step is
    passed over only if its manifest has not changed, and no newer step was committed in the meantime.

    Args:
        run: the run's folder.
        known: steps that are known to be unreadable.
        suspect: True if unsettled suspects count. A suspect comes before the step of its number.

    Raises:
        NotCommittedError: there are committed steps, but none can be read.
        StorageError: the storage failed, or another process removes steps faster than this one reads.
    """
    for _ in range(MOST_TRIES):
        found = _choose_once(run, known, suspect)
        if found is not None:
            if not suspect:
                _warn_of_suspects(run, 0 if found.folder is None else found.folder.step)
            return found
    raise StorageError(
        f"{run.location}: another process removed or replaced {MOST_TRIES} chosen steps in a row. "
        f"{KEEP_MORE}",
        file=run.location,
        damaged=False,
    )


def choose_after(
    run: Storage, known: Sequence[PassedOver], step: int | None, failed: Failed | None, *, suspect: bool
) -> Chosen:
    """The first choice of a restore, and each choice after a chosen step could not be read.

    If the manifest of that step is gone or has changed, another process removed or replaced the step, and
    rank 0 chooses again. Otherwise a damaged step is passed over, and any other error is final.

    Args:
        run: the run's folder.
        known: steps that are known to be unreadable.
        step: the step that the caller requests; None for the newest.
        failed: the last choice, if it could not be read.
        suspect: see `choose`, also for the errors.
    """
    passed: list[PassedOver] = []
    changed = False
    if failed is not None and failed.chosen.folder is not None:
        last = failed.chosen.folder
        changed = seal_now(run, last) != failed.chosen.seal
        if not changed and not _has_next_copy(run, last, failed.error):
            if step is not None or not is_damage(failed.error):
                return Chosen(last, stands=True)
            damage = None
            if isinstance(failed.error, CorruptChunkError):  # other errors do not name the bytes
                damage = Damage.of(failed.error, run.location, last.name)
            passed = [PassedOver(last.step, failed.error.message, True, last.suspect, damage)]
            copies_in(run).pass_over()
    if step is not None:
        folder = named(run, step, suspect=suspect)
        chosen = Chosen(folder, seal_now(run, folder), changed=changed)
    else:
        chosen = choose(run, [*known, *passed], suspect=suspect)
        chosen = replace(chosen, passed=[*passed, *chosen.passed], changed=changed)
    if chosen.folder is not None and chosen.seal is not None:
        copies_in(run).note_other_saves(chosen.folder.name)
    left_out = dict(copies_in(run).choice.left_out)
    return replace(chosen, passed=[*chosen.passed, *_nearer_copies(run)], left_out=left_out)


def _choose_once(run: Storage, known: Sequence[PassedOver], suspect: bool) -> Chosen | None:
    """As `choose`; None if the run changed in a way that may change the choice."""
    passed: list[PassedOver] = []
    committed: list[StepFolder] = []
    unreadable = {item.folder for item in known if item.committed and not item.tier}
    references: References | None = None
    chosen = Chosen(None)
    folders = _folders(run, suspect)
    for candidate in folders:
        seal = seal_now(run, candidate)
        if seal is None:
            files = {file for file in run.within(candidate.name).list() if is_ours(file, candidate.name)}
            if not files:
                continue
            references = references_in(run) if references is None else references
            if not files.issubset(references.files(candidate.name)):  # else: deleted, but others need them
                passed.append(
                    PassedOver(candidate.step, _NEVER_COMMITTED, False, candidate.suspect, committed=False)
                )
            continue
        if candidate.suspect and read_settled(run.within(candidate.name)) is not None:
            continue
        committed.append(candidate)
        if candidate in unreadable:
            continue
        try:
            problem = why_unreadable(run, candidate, known)
        except StorageError:
            if seal_now(run, candidate) == seal:
                raise
            return None
        if problem is None:
            if copies_in(run).has_several:  # another save of the step may count now
                seal = seal_now(run, candidate)
                if seal is None:
                    return None
            chosen = Chosen(candidate, seal)
            break
        if seal_now(run, candidate) != seal:
            return None
        passed.append(problem)
        copies_in(run).pass_over()
    if folders[:1] != [chosen.folder]:  # a newer step may have been removed after a still newer one was saved
        newest = newest_committed(run, suspect=suspect)
        if newest is not None and newest not in committed:
            return None
    if chosen.folder is None and committed:
        bad = [*(item for item in known if item.committed), *passed]
        reasons = "\n".join(f"  {item.folder}: {item.reason}" for item in bad)
        raise NotCommittedError(
            f"{run.location} has {len(committed)} committed steps, and none can be read:\n{reasons}",
            path=run.location,
        )
    return replace(chosen, passed=passed)


def seal_now(run: Storage, folder: StepFolder) -> bytes | None:
    """The seal of a step's manifest (see `read_seal`), which no other manifest has; None without a manifest.

    Empty if the manifest is too short for a seal, or is being replaced.
    """
    place = run.within(folder.name)
    try:
        seal = read_seal(place)
        return b"" if seal is None and place.size(MANIFEST_NAME) is not None else seal
    except StorageError as error:
        if "byte_count" in error.details:  # shorter than its size just was
            return b""
        raise


def why_unreadable(run: Storage, folder: StepFolder, known: Sequence[PassedOver] = ()) -> PassedOver | None:
    """The fault of a step by its verdict, and by known damage; None if it has none.

    Damage that the load of a newer step found counts if this step has chunks in the same bytes. With several
    copies of a file it does not count, because another copy may have these bytes.

    Raises:
        StorageError: the storage cannot read the step at the moment.
    """
    copies = copies_in(run)
    while True:
        found = judge(run, folder.name, plan_repairs=False)
        if found is None or found.verdict in (Verdict.LEFTOVER, Verdict.REFERENCED):
            return PassedOver(folder.step, _NEVER_COMMITTED, False, folder.suspect, committed=False)
        if found.manifest is not None:
            copies.note_lost_files(folder.name, found.manifest)
        if found.verdict is Verdict.MISPLACED:
            return PassedOver(folder.step, found.reason, damaged=False, suspect=folder.suspect)
        if found.error is None:
            break
        if not is_damage(found.error):
            raise found.error
        if not _has_next_copy(run, folder, found.error):
            return PassedOver(folder.step, found.reason, damaged=True, suspect=folder.suspect)
    assert found.manifest is not None
    if not copies.has_several and any(item.damage is not None for item in known):
        table = read_index(run.within(folder.name), found.manifest)
        for item in known:
            if item.damage is not None and item.damage.is_in(folder.name, found.manifest, table):
                reason = f"it has chunks in {item.damage}, which the load of {item.folder} found damaged"
                return PassedOver(folder.step, reason, damaged=True, suspect=folder.suspect)
    return None


def _has_next_copy(run: Storage, folder: StepFolder, error: ShardproofError) -> bool:
    """True if another tier has a copy of the damaged file, which the next read of the step takes."""
    return is_damage(error) and copies_in(run).next_copy(folder.name, error)


def _nearer_copies(run: Storage) -> list[PassedOver]:
    """The copies of chosen steps that were left out in favour of a copy in another tier."""
    choice = copies_in(run).choice
    copies = chain(choice.nearer, *choice.other_saves.values())
    found = ((parse_folder(copy.folder), copy) for copy in copies)
    return [
        PassedOver(folder.step, copy.reason, copy.damaged, folder.suspect, tier=copy.tier)
        for folder, copy in found
        if folder is not None
    ]


def _folders(run: Storage, suspect: bool) -> list[StepFolder]:
    """The folders of steps, newest first."""
    return [folder for folder in reversed(folders_in(run)) if suspect or not folder.suspect]


def _is_committed(run: Storage, folder: StepFolder) -> bool:
    """True if the folder contains a committed step, or a suspect that is not settled."""
    place = run.within(folder.name)
    return place.size(MANIFEST_NAME) is not None and not (folder.suspect and read_settled(place) is not None)


def _warn_of_suspects(run: Storage, oldest: int) -> None:
    """Logs the unsettled suspects that a restore does not take. Never raises a `StorageError`."""
    try:
        suspects = [
            one for one, settled in suspects_in(run).items() if settled is None and one.step >= oldest
        ]
    except StorageError as error:
        _log.warning("%s: restore ignores suspects, but cannot list them: %s", run.location, error)
        return
    if suspects:
        _log.warning(
            "%s: %s: its validation failed, and it has no verdict. restore(..., suspect=True) restores it to "
            "attribute the failure; without it, the run continues from an older state",
            run.location,
            ", ".join(map(str, suspects)),
        )
