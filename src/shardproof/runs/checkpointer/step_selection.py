"""Chooses the step that a restore takes: the newest that is committed and readable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain

from shardproof.engine.format import MANIFEST_NAME, References, read_index, references_in
from shardproof.engine.storage import Storage
from shardproof.errors import CorruptChunkError, NotCommittedError, ShardproofError, StorageError
from shardproof.runs.checkpointer.judge import Damage, Verdict, is_damage, judge
from shardproof.runs.checkpointer.step_folders import (
    StepFolder,
    files_in,
    folders_in,
    is_settled,
    parse_folder,
    seal_in,
    unsettled_in,
)
from shardproof.runs.checkpointer.tiers import Copies, TieredRun, copies_in

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
    """Seal of the chosen manifest (see `seal_in`)."""
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

    @property
    def cause(self) -> ShardproofError:
        """The error without the advice on an overwritten target, which the load of another step may fill."""
        details = self.error.details
        return type(self.error)(details.get("reason", self.error.message), **details)


def newest_committed(run: Storage, *, suspect: bool) -> StepFolder | None:
    """The newest committed step, readable or not; None if there is none. With `suspect`, also suspects.

    Costs one listing, and one check for a manifest in that step and in each newer leftover.
    """
    return next((folder for folder in _folders(run, suspect) if _is_committed(run, folder)), None)


def named(run: Storage, step: int, *, suspect: bool) -> StepFolder:
    """The folder of a step; that of the unsettled suspect of the number if `suspect`, and there is one."""
    return StepFolder(step, suspect and _is_committed(run, StepFolder(step, suspect=True)))


def plan_restore(tiers: Sequence[Storage]) -> Chosen:
    """The step that `Checkpointer.restore` takes now, and the newer ones that it passes over; loads nothing.

    Damage that only a read of the tensors finds is not known to it.

    Args:
        tiers: the run's folder in each tier, nearest first.

    Raises:
        NotCommittedError: there are committed steps, but none can be read.
        StorageError: the storage failed.
    """
    selection = StepSelection(TieredRun(tiers) if len(tiers) > 1 else tiers[0], suspect=False)
    chosen = selection.choose(())
    return replace(chosen, passed=[*chosen.passed, *selection.nearer_copies()])


class _RunChanged(Exception):
    """Another process changed the run while a step was chosen, so that another step may be the right one."""


class StepSelection:
    """The choices of one restore.

    With `suspect`, unsettled suspects count; a suspect comes before the step of its number. `copies` is the
    choice among the copies of the files; None: that of `run`.
    """

    def __init__(self, run: Storage, *, suspect: bool, copies: Copies | None = None) -> None:
        self._run, self._suspect = run, suspect
        self._copies = copies_in(run) if copies is None else copies

    def choose(self, known: Sequence[PassedOver]) -> Chosen:
        """The newest step with valid manifest, index and file sizes, and the newer steps passed over.

        Training may continue in the run, and retention may remove a step between two reads of it. So a step
        is passed over only if its manifest has not changed, and no newer step was committed in the meantime.
        The steps in `known` are known to be unreadable.

        Raises:
            NotCommittedError: there are committed steps, but none can be read.
            StorageError: the storage failed, or another process removes steps faster than this one reads.
        """
        for _ in range(MOST_TRIES):
            try:
                return self._look(known)
            except _RunChanged:
                continue
        raise StorageError(
            f"{self._run.location}: another process removed or replaced {MOST_TRIES} chosen steps in a row. "
            f"{KEEP_MORE}",
            file=self._run.location,
            damaged=False,
        )

    def choose_after(self, known: Sequence[PassedOver], step: int | None, failed: Failed | None) -> Chosen:
        """The first choice of a restore, and each choice after the last one, `failed`, could not be read.

        If the manifest of that step is gone or has changed, another process removed or replaced the step, and
        rank 0 chooses again. Otherwise a damaged step is passed over, and any other error is final. `step` is
        the one that the caller requests. See `choose` for `known` and the errors.
        """
        run, passed, changed = self._run, list[PassedOver](), False
        if failed is not None and failed.chosen.folder is not None:
            last = failed.chosen.folder
            changed = seal_in(run.within(last.name)) != failed.chosen.seal
            cause = failed.cause
            if not changed and not self._has_next_copy(last, cause):
                if step is not None or not is_damage(cause):
                    return Chosen(last, stands=True)
                damage = None
                if isinstance(cause, CorruptChunkError):  # other errors do not name the bytes
                    damage = Damage.of(cause, run.location, last.name)
                passed = [PassedOver(last.step, cause.message, True, last.suspect, damage)]
                self._copies.pass_over()
        if step is not None:
            folder = named(run, step, suspect=self._suspect)
            chosen = Chosen(folder, seal_in(run.within(folder.name)), changed=changed)
        else:
            chosen = self.choose([*known, *passed])
            if not self._suspect:
                _warn_of_suspects(run, 0 if chosen.folder is None else chosen.folder.step)
            chosen = replace(chosen, passed=[*passed, *chosen.passed], changed=changed)
        if chosen.folder is not None and chosen.seal is not None:
            self._copies.note_other_saves(chosen.folder.name)
        left_out = dict(self._copies.choice.left_out)
        return replace(chosen, passed=[*chosen.passed, *self.nearer_copies()], left_out=left_out)

    def _look(self, known: Sequence[PassedOver]) -> Chosen:
        """One look at the run; see `choose`. Raises `_RunChanged` if the run changed meanwhile."""
        unreadable = {item.folder for item in known if item.committed and not item.tier}
        folders = _folders(self._run, self._suspect)
        references = cache(partial(references_in, self._run))  # read once, and only if a save died
        committed: list[StepFolder] = []
        passed: list[PassedOver] = []
        for folder in folders:
            seal = seal_in(self._run.within(folder.name))
            if seal is None:
                if (why := self._never_committed(folder, references)) is not None:
                    passed.append(PassedOver(folder.step, why, False, folder.suspect, committed=False))
            elif is_settled(self._run, folder):
                continue
            else:
                committed.append(folder)
                if folder in unreadable:
                    continue
                problem = self._fault_of(folder, seal, known)
                if problem is None:
                    if self._copies.has_several:  # another save of the step may count
                        seal = seal_in(self._run.within(folder.name))
                        if seal is None:
                            raise _RunChanged
                    self._check_newest(folders, folder, committed)
                    return Chosen(folder, seal, passed)
                passed.append(problem)
        self._check_newest(folders, None, committed)
        if committed:
            bad = [*(item for item in known if item.committed), *passed]
            reasons = "\n".join(f"  {item.folder}: {item.reason}" for item in bad)
            raise NotCommittedError(
                f"{self._run.location} has {len(committed)} committed steps, and none can be read:\n"
                f"{reasons}",
                path=self._run.location,
            )
        return Chosen(None, passed=passed)

    def _never_committed(self, folder: StepFolder, references: Callable[[], References]) -> str | None:
        """Why a folder without a manifest is no step; None if no file there is that of a save."""
        if not files_in(self._run.within(folder.name), folder.name):
            return None
        found = judge(self._run, folder.name, references=references())
        if found is None or found.verdict is Verdict.REFERENCED:
            return None
        if found.manifest is not None:
            raise _RunChanged
        return found.reason if found.verdict is Verdict.REPAIRABLE else _NEVER_COMMITTED

    def _fault_of(self, folder: StepFolder, seal: bytes, known: Sequence[PassedOver]) -> PassedOver | None:
        """As `why_unreadable`, for a step whose manifest had this seal before."""
        try:
            problem = self.why_unreadable(folder, known)
        except StorageError:
            if seal_in(self._run.within(folder.name)) != seal:
                raise _RunChanged from None
            raise
        if problem is not None:
            if seal_in(self._run.within(folder.name)) != seal:
                raise _RunChanged
            self._copies.pass_over()
        return problem

    def _check_newest(
        self, folders: Sequence[StepFolder], chosen: StepFolder | None, committed: Sequence[StepFolder]
    ) -> None:
        """Checks that no step was committed meanwhile that is newer than those in `committed`.

        A newer step may have been removed after a still newer one was saved.
        """
        if folders[:1] == [chosen]:
            return
        newest = newest_committed(self._run, suspect=self._suspect)
        if newest is not None and newest not in committed:
            raise _RunChanged

    def why_unreadable(self, folder: StepFolder, known: Sequence[PassedOver] = ()) -> PassedOver | None:
        """The fault of a step by its verdict, and by known damage; None if it has none.

        Damage that the load of a newer step found counts if this step has chunks in the same bytes. With
        several copies of a file it does not count, because another copy may have these bytes.

        Raises:
            StorageError: the storage cannot read the step at the moment.
        """
        run, copies = self._run, self._copies
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
            if not self._has_next_copy(folder, found.error):
                return PassedOver(folder.step, found.reason, damaged=True, suspect=folder.suspect)
        assert found.manifest is not None
        if not copies.has_several and any(item.damage is not None for item in known):
            table = read_index(run.within(folder.name), found.manifest)
            for item in known:
                if item.damage is not None and item.damage.is_in(folder.name, found.manifest, table):
                    reason = f"it has chunks in {item.damage}, which the load of {item.folder} found damaged"
                    return PassedOver(folder.step, reason, damaged=True, suspect=folder.suspect)
        return None

    def _has_next_copy(self, folder: StepFolder, error: ShardproofError) -> bool:
        """True if another tier has a copy of the damaged file, which the next read of the step takes."""
        return is_damage(error) and self._copies.next_copy(folder.name, error)

    def nearer_copies(self) -> list[PassedOver]:
        """The copies of chosen steps that were left out in favour of a copy in another tier."""
        choice = self._copies.choice
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
    return run.within(folder.name).size(MANIFEST_NAME) is not None and not is_settled(run, folder)


def _warn_of_suspects(run: Storage, oldest: int) -> None:
    """Logs the unsettled suspects that a restore does not take. Never raises a `StorageError`."""
    try:
        suspects = [folder for folder in unsettled_in(run) if folder.step >= oldest]
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
