"""Lists the checkpoints and leftovers in a run's folder, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import msgspec

from shardproof._utils.humanize import listed
from shardproof.checkpointer.marks import NodeMark, read_node_mark, read_pin, read_settled
from shardproof.checkpointer.save_interval import IntervalAdvice, advice_of
from shardproof.checkpointer.step_folders import PINNED_NAME, SETTLED_NAME, is_ours, parse_folder
from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.format import (
    MANIFEST_NAME,
    References,
    locate_files,
    lost_files,
    read_manifest,
    references_in,
    size_error,
    tensor_bytes,
)
from shardproof.storage import Storage, map_requests

__all__ = ["StepInfo", "interval_advice", "scan_run"]

_LONGEST_SAVE = 3600.0
"""Seconds. If the manifest's file is newer than the time in the manifest by this or more, the file is a
later copy."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One checkpoint of a run, or the leftover of a save that was not committed."""

    name: str
    """The folder in the run; "." for the run's folder itself."""
    step: int | None
    status: str
    """One of:

    - "committed";
    - "suspect": committed, and its validation failed and is not settled;
    - "settled": a suspect with a `verdict`;
    - "leftover": without a manifest;
    - "referenced": removed, except for files that other steps refer to;
    - "damaged": its manifest is damaged, or a file is missing or cut;
    - "partial": some of its files are on other nodes (``node_local=True``);
    - "unreadable": the storage failed, and the state of the checkpoint is unknown.
    """
    reason: str | None
    """The reason why it is not committed."""
    time: float | None
    """Time of the save, Unix seconds."""
    bytes: int
    """Bytes of its tensors; for a leftover, of its files."""
    tensors: int
    objects: int
    world_size: int | None
    attempt: str | None
    repaired: bool
    unnamed: int
    """Number of files of dead attempts in the folder of a committed checkpoint, which `prune` removes."""
    beyond_repair: bool
    """Shard files are missing or cut, so that `repair` cannot help."""
    references: tuple[str, ...] = ()
    """Folders of earlier steps whose files it refers to."""
    referenced_by: tuple[str, ...] = ()
    """Folders of later steps that refer to its files."""
    suspect: bool = False
    """True if it is in the folder of a suspect."""
    verdict: str | None = None
    """The verdict of a settled suspect."""
    linked: bool = False
    """The folder is a symbolic link, so that retention and `prune` remove nothing in it."""
    pinned: str | None = None
    """The label of its pin; None if it has none."""

    @property
    def committed(self) -> bool:
        """True if it can be restored as a step of the run."""
        return self.status == "committed"

    @property
    def whole(self) -> bool:
        """True if it is a readable checkpoint, of a step or of a suspect."""
        return self.status in ("committed", "suspect", "settled")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "committed": self.committed}


def scan_run(storage: Storage, *, sizes: bool = False) -> list[StepInfo]:
    """Every checkpoint and every leftover in a run's folder, oldest step first.

    The scan reads only manifests; `shardproof.maintenance.verify` checks the bytes.

    Args:
        storage: the run's folder.
        sizes: True to check also the size of every shard file and index. A truncated file is damage.

    Returns:
        One entry for each folder named ``step-...`` or ``suspect-...`` that has a file of shardproof, or that
        cannot be listed. One for each other folder, and for the run's folder, that has a manifest.

    Raises:
        StorageError: the storage cannot list the run.
    """
    references = references_in(storage)
    mark = read_node_mark(storage)
    look = partial(_folder_info, storage, sizes, references, mark)
    found = filter(None, map_requests(storage, look, [".", *storage.folders()]))
    return sorted(found, key=lambda info: (info.step is None, info.step or 0, info.name))


def _folder_info(
    storage: Storage, sizes: bool, references: References, mark: NodeMark | None, folder: str
) -> StepInfo | None:
    """The entry of a folder of the run, or of the run's folder; None if it has none."""
    place = storage if folder == "." else storage.within(folder)
    parsed = parse_folder(folder)
    step, suspect = (None, False) if parsed is None else parsed
    try:
        if parsed is None and place.size(MANIFEST_NAME) is None:
            return None
        names = place.list()
    except StorageError as error:
        if folder == ".":
            raise
        if parsed is None:
            return None
        info = _without_manifest(place, folder, step, (), "unreadable", str(error))
        return replace(info, suspect=suspect, linked=place.linked)
    ours = {name for name in names if is_ours(name, folder)}
    if MANIFEST_NAME not in ours and (parsed is None or not ours):
        return None
    files = ours - {SETTLED_NAME, PINNED_NAME}
    info = _step_info(place, folder, step, files, sizes, references)
    if mark is not None and info.status == "damaged" and _only_lacks_files(place):
        info = replace(info, status="partial", reason=mark.sentence, beyond_repair=False)
    if info.status == "damaged" and place.size(MANIFEST_NAME) is None:  # removed meanwhile
        info = _step_info(place, folder, step, files, sizes, references_in(storage))
    pin = read_pin(place) if PINNED_NAME in ours else None
    info = replace(info, linked=folder != "." and place.linked, pinned=None if pin is None else pin.label)
    return _suspect(place, info) if suspect else info


def interval_advice(
    infos: Iterable[StepInfo], modified: Callable[[str], float | None], mtbf: float
) -> IntervalAdvice | None:
    """A time between saves, from the committed steps of a run; None for fewer than two.

    The cost of a save is the time from the agreement of the ranks, which the manifest records, to the time of
    the manifest's file. Manifests that were written again or copied are not measured.

    Args:
        infos: the checkpoints of a run.
        modified: the time of the last write to a file of the run, Unix seconds; None if it does not exist.
        mtbf: seconds between two failures of the job, on average.
    """
    times, costs = [], []
    for info in infos:
        if info.committed and info.time is not None:
            times.append(info.time)
            written = modified(f"{info.name}/{MANIFEST_NAME}")
            if written is not None and not info.repaired and 0 < written - info.time < _LONGEST_SAVE:
                costs.append(written - info.time)
    return advice_of(times, costs, mtbf)


def _step_info(
    place: Storage, name: str, step: int | None, files: set[str], sizes: bool, references: References
) -> StepInfo:
    referenced, users = set(references.files(name)), tuple(references.users(name))
    try:
        manifest = read_manifest(place)
        checked = manifest if sizes else msgspec.structs.replace(manifest, files=manifest.referenced_files)
        cut = lost_files(place, checked)
        index = size_error(place, manifest.index) if sizes else None
    except NotCommittedError:
        if referenced:
            return _only_referenced(place, name, step, files, referenced, users)
        reason = "no manifest: the save died, or is still in progress"
        return _without_manifest(place, name, step, files, "leftover", reason)
    except FormatError as error:
        return _without_manifest(place, name, step, files, "damaged", str(error))
    except StorageError as error:
        return _without_manifest(place, name, step, files, "unreadable", str(error))
    shards = {record.name for record in manifest.own_files}
    # A linked folder hides its files from `list` but not from `size`.
    missing = [file for file in sorted(({manifest.index.name} | shards) - files) if place.size(file) is None]
    lost = sorted(shards.intersection(missing) | cut.keys())
    fault = index.message if index else None
    if missing:
        fault = f"files that the manifest names are missing: {listed(missing, 1)}"
    elif cut:
        fault = next(iter(cut.values())) + (f", and {len(cut) - 1} more such files" if len(cut) > 1 else "")
    return StepInfo(
        name=name,
        step=step if step is not None else manifest.step,
        status="committed" if fault is None else "damaged",
        reason=f"{fault}; it cannot be repaired" if lost else fault,
        time=manifest.time,
        bytes=sum(tensor_bytes(record) for record in manifest.tensors),
        tensors=len(manifest.tensors),
        objects=len(manifest.objects),
        world_size=manifest.world_size,
        attempt=manifest.attempt,
        repaired=manifest.repaired,
        unnamed=len(files - referenced - shards - {MANIFEST_NAME, manifest.index.name}),
        beyond_repair=bool(lost),
        references=tuple(sorted({record.folder for record in manifest.referenced_files})),
        referenced_by=users,
    )


def _suspect(place: Storage, info: StepInfo) -> StepInfo:
    """`info` with the status and verdict of a suspect."""
    try:
        settled = read_settled(place)
    except StorageError as error:
        return replace(info, suspect=True, status="unreadable", reason=str(error))
    verdict = None if settled is None else settled.verdict
    info = replace(info, suspect=True, verdict=verdict)
    if not info.committed:
        return info
    if verdict is None:
        reason = "validation failed and is not settled: only restore(suspect=True) takes it"
        return replace(info, status="suspect", reason=reason)
    return replace(info, status="settled", reason=verdict)


def _only_referenced(
    place: Storage, name: str, step: int | None, files: set[str], referenced: set[str], users: tuple[str, ...]
) -> StepInfo:
    size = sum(place.size(file) or 0 for file in files & referenced)
    count = len(files & referenced)
    reason = f"removed; {count} file{'s' if count > 1 else ''} stay for {listed(users, 3)}"
    info = _without_manifest(place, name, step, (), "referenced", reason)
    return replace(info, bytes=size, unnamed=len(files - referenced), referenced_by=users)


def _without_manifest(
    place: Storage, name: str, step: int | None, files: Iterable[str], status: str, reason: str
) -> StepInfo:
    try:
        size = sum(place.size(file) or 0 for file in files)
    except StorageError:
        size = 0
    return StepInfo(name, step, status, reason, None, size, 0, 0, None, None, False, 0, False)


def _only_lacks_files(place: Storage) -> bool:
    """True if the files of a step that are here have the sizes that the manifest records."""
    try:
        manifest = read_manifest(place)
        files = [(place, manifest.index)]
        for (folder, _), record in zip(locate_files(place, manifest), manifest.files, strict=True):
            files.append((folder, record))
        return all(folder.size(record.name) in (None, record.size) for folder, record in files)
    except (FormatError, NotCommittedError, StorageError):
        return False
