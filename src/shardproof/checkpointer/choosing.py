"""Which step of a run a restore takes: the newest that is committed and readable."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from shardproof.checkpointer.damage import Damage
from shardproof.checkpointer.folders import StepFolder, is_ours, parse_folder
from shardproof.checkpointer.suspects import read_settled, unsettled_suspects
from shardproof.errors import FormatError, NotCommittedError, ShardproofError, StorageError
from shardproof.format import MANIFEST_NAME, Manifest, referred_in
from shardproof.loading import UNREADABLE, Checkpoint
from shardproof.storage import Storage

__all__ = ["PassedOver", "check_folder", "choose", "is_damage", "named", "written_folders"]

_NEVER_COMMITTED = "it has no manifest: its save died or is still under way, so it is not a checkpoint"

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer step that `Checkpointer.restore` did not take: damaged, or never committed."""

    step: int
    reason: str
    damaged: bool
    """It was committed and its bytes are lost or changed, so saving this step again may replace it."""
    suspect: bool = False
    """It is the suspect of that number."""
    damage: Damage | None = None
    """The damaged bytes that the load met. Older steps that have chunks there are passed over unread."""

    @property
    def folder(self) -> StepFolder:
        """Its folder."""
        return StepFolder(self.step, self.suspect)


def written_folders(run: Storage, *, suspect: bool) -> dict[StepFolder, bool]:
    """Every step that has files of ours, and whether it has a manifest.

    Args:
        run: the run's folder.
        suspect: whether suspects are among them. They are not even looked at otherwise.
    """
    found: dict[StepFolder, bool] = {}
    for name in run.folders():
        folder = parse_folder(name)
        if folder is not None and (suspect or not folder.suspect):
            place = run.within(name)
            committed = place.size(MANIFEST_NAME) is not None
            if committed or any(is_ours(file, name) for file in place.list()):
                found[folder] = committed
    return found


def named(run: Storage, step: int, *, suspect: bool) -> StepFolder:
    """The folder to restore where a step was asked for by its number.

    Args:
        run: the run's folder.
        step: the number.
        suspect: whether its suspect is preferred, where there is one that is not settled.
    """
    if suspect:
        place = run.within(StepFolder(step, suspect=True).name)
        suspect = place.size(MANIFEST_NAME) is not None and read_settled(place) is None
    return StepFolder(step, suspect)


def choose(
    run: Storage, known: Sequence[PassedOver], *, suspect: bool
) -> tuple[StepFolder | None, list[PassedOver]]:
    """The newest step whose manifest, index and file sizes are right, and those that were passed over for it.

    Args:
        run: the run's folder.
        known: those that are known not to be readable.
        suspect: whether suspects count; of one number, the suspect comes first. Settled ones never count.

    Returns:
        None for the step when nothing was ever committed here.

    Raises:
        NotCommittedError: there are committed steps, but none can be read.
        StorageError: the storage cannot tell.
    """
    passed: list[PassedOver] = []
    folders = written_folders(run, suspect=suspect)
    for folder in [folder for folder, there in folders.items() if folder.suspect and there]:
        if read_settled(run.within(folder.name)) is not None:
            del folders[folder]
    if not all(folders.values()):
        folders = {folder: folders[folder] for folder in folders.keys() - _lenders(run)}
    for candidate in sorted(folders.keys() - {item.folder for item in known}, reverse=True):
        problem = (
            _why_unreadable(run, candidate, known)
            if folders[candidate]
            else PassedOver(candidate.step, _NEVER_COMMITTED, damaged=False, suspect=candidate.suspect)
        )
        if problem is None:
            if not suspect:
                _tell_of_suspects(run, candidate.step)
            return candidate, passed
        passed.append(problem)
    committed = [folder for folder, there in folders.items() if there]
    if committed:
        said = "\n".join(f"  {item.folder}: {item.reason}" for item in (*known, *passed))
        raise NotCommittedError(
            f"{run.location} has {len(committed)} committed steps, and none can be read:\n{said}",
            path=run.location,
        )
    if not suspect:
        _tell_of_suspects(run, 0)
    return None, passed


def check_folder(run: Storage, folder: StepFolder, manifest: Manifest) -> None:
    """A folder that was renamed or copied would restore one step as another.

    Raises:
        FormatError: the manifest is that of another step.
    """
    if manifest.step not in (None, folder.step):
        raise FormatError(
            f"{run.location}/{folder.name} holds step {manifest.step}: it was renamed or copied. Give it "
            "back its name, or load it with shardproof.load",
            file=f"{folder.name}/{MANIFEST_NAME}",
        )


def is_damage(error: ShardproofError) -> bool:
    """Whether stored bytes are lost or changed, rather than out of reach just now. Errors may say so."""
    if "damaged" in error.details:
        return bool(error.details["damaged"])
    if not isinstance(error, StorageError):
        return True
    return bool(error.details.get("missing")) or error.details.get("errno") in (None, "EIO")


def _why_unreadable(run: Storage, folder: StepFolder, known: Sequence[PassedOver]) -> PassedOver | None:
    """What is wrong with a step as far as manifest, index, file sizes and known damage tell, or None.

    Damage counts where the load of a newer step met it: the load of this one reads the same chunk.
    """
    try:
        with Checkpoint(run.within(folder.name)) as checkpoint:
            checkpoint.check_sizes(range(len(checkpoint.manifest.files)))
            manifest = checkpoint.manifest
            for item in known:
                if item.damage is not None and item.damage.is_in(folder.name, manifest, checkpoint.table):
                    reason = f"it has chunks in {item.damage}, which the load of {item.folder} found damaged"
                    return PassedOver(folder.step, reason, damaged=True, suspect=folder.suspect)
    except UNREADABLE as error:
        if not is_damage(error):
            raise
        return PassedOver(folder.step, error.message, damaged=True, suspect=folder.suspect)
    try:
        check_folder(run, folder, manifest)
    except FormatError as error:
        return PassedOver(folder.step, error.message, damaged=False, suspect=folder.suspect)
    return None


def _lenders(run: Storage) -> set[StepFolder]:
    """Steps that are no checkpoints any more, and whose folders only hold files that others refer to."""
    references = referred_in(run)
    found = set()
    for name in references.by_folder:
        files = [file for file in run.within(name).list() if is_ours(file, name)]
        folder = parse_folder(name)
        if folder is not None and set(files) <= set(references.files(name)):
            found.add(folder)
    return found


def _tell_of_suspects(run: Storage, oldest: int) -> None:
    """Says in the log which suspects a restore leaves aside. It fails for none of them."""
    try:
        suspects = [folder for folder in unsettled_suspects(run) if folder.step >= oldest]
    except StorageError as error:
        _log.warning("%s: suspects are left aside, and cannot be looked at: %s", run.location, error)
        return
    if suspects:
        _log.warning(
            "%s: %s: validation failed there and is not settled. restore(..., suspect=True) takes it to find "
            "out why; without it the run goes on from an older state",
            run.location,
            ", ".join(map(str, suspects)),
        )
