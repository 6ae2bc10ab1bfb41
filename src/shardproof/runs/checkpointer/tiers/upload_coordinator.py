"""The coordinator's side of the uploads: the next step, the files that each rank copies, and the commit.

Note "The manifest goes last": the coordinator publishes the manifest of the second tier after every file that
it names is there with the recorded size. The ranks verified each file with its digest when they read it. The
bytes of index and manifest are those of the first tier. So a step on the second tier is an ordinary
checkpoint, and a killed upload leaves files without a manifest, as a killed save does.

Note "The first tier does not wait": `protect` is part of a save's retention, so it reads only the first
tier. For the second tier it uses the steps that the last round saw, and what rounds read of their manifests.
Of a step whose manifest was not read, the policy knows nothing, and more steps stay.

Note "One step cannot block the others": a step of the first tier that cannot be read is set aside until the
next round. The round uploads the other steps. Then it fails with the error of this step, and the next round
tries the step again. A damaged step is not tried again.

Note "Unknown saves": the seals of two manifests show whether two tiers have the same save of a step. If the
manifest in the first tier cannot be read, and the second tier has the step, the coordinator logs a warning
once, and the round goes on. The round fails in two cases: both seals can be read and differ; or a save of
this process waits for its upload, and the second tier has another save of the step.

Note "Files that are there": an incremental step refers to files of older steps, and the second tier may have
such a file. There are three cases:
- A manifest on the second tier names the file. An upload verified it then, so it is not copied again.
- This round copied the file, for a newer step that it uploaded first. It is not copied again either.
- Any other file was left by a killed upload, or by a step that was removed from the second tier. It may be
  damaged, and a commit would accept the damage. So a rank reads it, compares it with its digest, and copies
  it only if they differ.

Note "Nothing is replaced by accident": the second tier may have another save of a step, by another job or
from a branch that was given up. The step is then uploaded only if its save was allowed to overwrite the step.
Otherwise it is skipped with an error. The process of the save replaces any other save. After a restart, the
name of the attempt has the permission (`engine.format.is_overwrite`). It then covers only earlier saves,
because another job may have saved the step since. A node that returns with an old disk replaces no later
save.

Note "Two jobs": two jobs may upload the same save of a step at once, for example a restarted job and the
earlier processes of that job. Their files have the same names and bytes. So an upload deletes no file
of the second tier. It writes a draft, which takes the place of the file in one step. One of the jobs
publishes the manifest. Then it removes the drafts that killed uploads left. A rank of another job whose draft
is gone finds the whole file. Of two different saves, one is committed, and the upload of the other fails.

Note "One line of steps": after a rollback, the second tier may have steps that are newer than the one that
was saved or restored last. They were given up. As in the first tier (see `retention`), they stay, and do not
displace the steps of the run that continues. Those that still wait are uploaded as without a rollback.

Note "Pins": a pin is copied before the manifest, so that retention never sees a committed step without its
pin. A program may change the pin while the step is uploaded. It changes the pin of the first tier, and then
the pins of the tiers that have the manifest. So the pin is compared again after the manifest is published.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from shardproof.engine.format import (
    MANIFEST_NAME,
    SEAL_LENGTH,
    FileRecord,
    Manifest,
    References,
    check_sizes,
    decode_manifest,
    is_overwrite,
    named_files,
    publish,
    read_manifest,
    read_manifest_text,
    read_seal,
    references_in,
)
from shardproof.engine.loading import from_rank
from shardproof.engine.storage import Storage, map_requests
from shardproof.errors import (
    AlreadyCommittedError,
    FormatError,
    NotCommittedError,
    ShardproofError,
    StorageError,
)
from shardproof.runs.checkpointer.judge import RestorableSteps, misplaced
from shardproof.runs.checkpointer.policies import Retention
from shardproof.runs.checkpointer.retention import KnownSteps, StepFacts, branch_removal, retain
from shardproof.runs.checkpointer.step_folders import PINNED_NAME, read_pin, seal_in, step_name, steps_in
from shardproof.runs.checkpointer.tiers.tiered_run import copies_of, log_other_copy
from shardproof.runs.checkpointer.tiers.upload_messages import (
    UploadAnswer,
    UploadReport,
    UploadRequest,
    UploadShare,
)
from shardproof.runs.maintenance import read_whole_index

T = TypeVar("T")

_log = logging.getLogger("shardproof")


class UploadCoordinator:
    """Plans and commits the uploads of one run, on rank 0. The arguments are those of `Uploader`."""

    def __init__(
        self,
        first: Storage,
        second: Storage,
        keep: Retention | None,
        bandwidth: int | None,
        damaged: Collection[int],
    ) -> None:
        self._first, self._second = first, second
        self._keep, self._bandwidth = keep, bandwidth
        self._damaged_before = damaged
        self.position: int | None = None
        """The step that was saved or restored last (note "One line of steps"); None: all steps count."""
        holder = weakref.WeakMethod(self._holder)  # or both would live until a garbage collection

        def holder_of(step: int) -> Storage:
            found = holder()
            assert found is not None, "the facts belong to this object"
            return found(step)

        self._facts = StepFacts(second, holder_of)
        self._restorable = RestorableSteps(second)
        self._stored: dict[int, bytes] = {}
        """Steps of the second tier as the last round saw them, to their seals."""
        self._there: dict[int, bytes] = {}
        """Steps of the second tier that this process found or made whole, to their seals."""
        self._damaged: dict[int, bytes] = {}
        """Steps that could not be uploaded because they are damaged in the first tier, to their seals."""
        self._round = _Round()
        self._reported: set[tuple[int, bytes]] = set()
        """Step and seal of saves that are not uploaded, as the log says; an empty seal if it is not known."""
        self._claims = _Claims()

    def protect(self, steps: Collection[int]) -> set[int]:
        """The steps of these that retention must not remove from the first tier. No other upload begins.

        One is the step that is uploaded. With a policy for the second tier, the others are the waiting steps
        that the policy keeps (note "The first tier does not wait").
        """
        stay: set[int] = set()
        if self._keep is not None:
            there = self._stored
            here, unreadable = self._committed(self._first)
            waiting = here.keys() - there.keys()
            stay = (self._kept(there, waiting, only_known=True) & waiting) | unreadable.keys()
        return self._claims.remove(steps, stay)

    def committed(self, step: int) -> None:
        """Notes that a step was saved. An earlier save of it may be known, or removed."""
        self._facts.forget(step)
        self._claims.saved(step)

    def plan(self, requests: Sequence[UploadRequest], reports: Sequence[UploadReport]) -> list[UploadAnswer]:
        """The first answer of a round, for the saves that wait and the reports of the ranks."""
        self.end_upload()
        self._round = _Round()
        return self._answer(requests, reports)

    def commit(
        self, requests: Sequence[UploadRequest], reports: Sequence[UploadReport]
    ) -> list[UploadAnswer]:
        """Commits the upload under way, removes old steps of the second tier, and answers as `plan` does."""
        upload = self._round.under_way
        assert upload is not None
        step, seal = upload.step, _seal_of(upload.text)
        failed = [
            (report.of_first, report.is_damage, rank, wire)
            for rank, report in enumerate(reports)
            if (wire := report.error) is not None
        ]
        if failed:
            _, _, rank, wire = min(failed)  # errors of the second tier come first, damage last
            error = from_rank(rank, len(reports), wire)
            if not reports[rank].of_first:
                raise error
            self.end_upload()
            if reports[rank].is_damage:
                self._skip_damaged(step, seal, error)
            else:
                self._set_aside(step, error)
            return self._answer(requests, reports)
        self._publish(upload)
        self._remove_drafts(upload)
        self.end_upload()
        self._round.copied |= {
            (record.folder or step_name(step), record.name) for record in upload.manifest.files
        }
        self._there[step] = seal
        self._restorable.trust(step)
        self._facts.learn(step, upload.manifest)
        self._stored = {**self._stored, step: seal}
        if self._round.references is not None:
            self._round.references.add(step_name(step), upload.manifest)
        _log.info("%s: step %d is on %s", self._first.location, step, self._second.location)
        newest = max(self._in_line(self._stored), default=None)
        if self._keep is not None and newest is not None:
            self._round.references = None
            remove = partial(branch_removal, [self._second.location])
            known = KnownSteps(self._facts, self._restorable, remove)
            removed = retain(self._second, self._keep, newest, known)
            self._stored = {one: seal for one, seal in self._stored.items() if step_name(one) not in removed}
        return self._answer(requests, reports)

    def end_upload(self) -> None:
        """Ends the upload under way, committed or not. Retention of the first tier may remove its step."""
        self._round.under_way = None
        self._claims.release()

    def _answer(
        self, requests: Sequence[UploadRequest], reports: Sequence[UploadReport]
    ) -> list[UploadAnswer]:
        pending, reasons = self._pending(requests)
        while (step := self._claims.choose(pending, self._round.aside, self._in_line)) is not None:
            self._round.under_way = self._read(step, pending[step])
            if self._round.under_way is not None:
                break
            self.end_upload()
            pending, reasons = self._pending(requests)  # without it, the policy may keep an older one
        pending = self._claims.remaining(pending)
        uploaded, skipped = self._results(requests, pending, reasons)
        shares: list[UploadShare | None] = [None] * len(reports)
        waits: dict[str, object] | None = None
        if (upload := self._round.under_way) is not None:
            shares = [*self._share(upload.step, upload.manifest, reports)]
        elif self._round.aside:
            waits = self._round.aside[max(self._round.aside)].to_wire()
        return [UploadAnswer(share, tuple(uploaded), tuple(skipped), waits) for share in shares]

    def _pending(self, requests: Sequence[UploadRequest]) -> tuple[dict[int, bool], dict[int, str]]:
        """The steps to upload, with whether one is replaced; and why other steps are not uploaded."""
        here, unreadable = self._committed(self._first)
        here = self._claims.remaining(here)
        matter = None if self._keep is not None else {*here, *unreadable}
        there, unknown = self._committed(self._second, matter)
        if unknown:
            raise unknown[max(unknown)]
        others = self._other_saves(here, there)
        unreadable |= {step: error for step, error in others.items() if isinstance(error, StorageError)}
        may_replace = {one.step: one.attempt for one in requests if one.overwrite}
        pending: dict[int, bool] = {}
        reasons: dict[int, str] = {}
        for step, seal in here.items():
            other = others.get(step)
            if isinstance(other, FormatError):
                self._skip_damaged(step, seal, other)
            if self._damaged.get(step) == seal:
                reasons[step] = f"it is damaged in {self._first.location}"
            elif step not in there:
                pending[step] = False
            elif isinstance(other, Manifest) and self._may_replace(step, other, may_replace.get(step)):
                pending[step] = True
            elif isinstance(other, Manifest):
                reasons[step] = (
                    f"{self._second.location} has another save of this step. Check that no other job uses "
                    "this place; save with overwrite=True to replace the step there"
                )
                if (step, seal) not in self._reported and all(one.step != step for one in requests):
                    _log.warning("%s: step %d is not uploaded: %s", self._first.location, step, reasons[step])
                self._reported.add((step, seal))
            elif other is None and self._there.get(step) != seal:
                # Its process may have died before all of it was durable.
                self._second.within(step_name(step)).flush(MANIFEST_NAME)
                self._copy_pin(step)
            self._there.update({step: there[step]} if step in there and step not in pending else {})
        for step, error in unreadable.items():
            self._pass_unreadable(
                step, error, requests, is_there=bool(there.get(step)) and step not in others
            )
        self._stored = {step: seal for step, seal in there.items() if step not in pending}
        kept = self._kept(self._stored, pending)
        for step in set(pending) - kept:
            reasons[step] = f"the policy of {self._second.location} does not select it among the steps there"
        return {step: replace for step, replace in pending.items() if step in kept}, reasons

    def _results(
        self, requests: Sequence[UploadRequest], pending: Collection[int], reasons: Mapping[int, str]
    ) -> tuple[list[tuple[int, str]], list[tuple[int, str, str]]]:
        """The fulfilled requests, by step and attempt, and the requests that will not be fulfilled."""
        uploaded: list[tuple[int, str]] = []
        skipped: list[tuple[int, str, str]] = []
        for one in requests:
            if one.step in pending or one.step in self._round.aside:
                continue
            if one.step not in reasons and _attempt(self._second, one.step) == one.attempt:
                uploaded.append((one.step, one.attempt))
                continue
            reason = reasons.get(one.step) or self._why_gone(one)
            skipped.append((one.step, one.attempt, reason))
            _log.warning("%s: step %d is not uploaded: %s", self._first.location, one.step, reason)
        return uploaded, skipped

    def _why_gone(self, request: UploadRequest) -> str:
        """Why a step of the first tier can no longer be uploaded."""
        try:
            is_replaced = _attempt(self._first, request.step) not in (None, request.attempt)
        except StorageError:
            return f"{self._first.location} no longer has this save, or it cannot be read"
        fate = "replaced by a later save in" if is_replaced else "removed from"
        return f"it was {fate} {self._first.location} before its upload"

    def _other_saves(
        self, here: Mapping[int, bytes], there: Mapping[int, bytes]
    ) -> dict[int, Manifest | ShardproofError]:
        """The steps of which the tiers have different saves, to their manifests in the first tier.

        If a manifest is damaged, gone or cannot be read, the error takes its place.
        """
        steps = [
            step
            for step, seal in here.items()
            if there.get(step, seal) != seal and self._damaged.get(step) != seal
        ]

        def manifest_of(step: int) -> Manifest | ShardproofError:
            try:
                return read_manifest(self._first.within(step_name(step)))
            except (FormatError, NotCommittedError, StorageError) as error:
                return error

        return dict(zip(steps, map_requests(self._first, manifest_of, steps), strict=True))

    def _may_replace(self, step: int, manifest: Manifest, attempt: str | None) -> bool:
        """True if a save may replace the step on the second tier (note "Nothing is replaced by accident").

        `attempt` is the one of this process that was allowed to overwrite the step; None without one.
        """
        if manifest.attempt == attempt:
            return True
        try:
            replaced = read_manifest(self._second.within(step_name(step)))
        except FormatError:
            return True
        except NotCommittedError:
            return False
        return is_overwrite(manifest.attempt) and replaced.time < manifest.time

    def _pass_unreadable(
        self, step: int, error: StorageError, requests: Sequence[UploadRequest], *, is_there: bool
    ) -> None:
        """Sets a step aside whose manifest in the first tier cannot be read, if an upload may be missing.

        See note "Unknown saves". `is_there` is true if the second tier has the step, with a seal.
        """
        waiting = {one.attempt for one in requests if one.step == step}
        if not is_there or (waiting and waiting != {_attempt(self._second, step)}):
            if step not in self._round.aside:
                self._set_aside(step, error)
        elif not waiting and (step, b"") not in self._reported:
            self._reported.add((step, b""))
            _log.warning(
                "%s: the manifest of step %d cannot be read. %s has the step, and it is not known whether it "
                "is the same save: %s",
                self._first.location,
                step,
                self._second.location,
                error,
            )

    def _committed(
        self, run: Storage, only: Collection[int] | None = None
    ) -> tuple[dict[int, bytes], dict[int, StorageError]]:
        """Committed steps of a tier to their seals, and those that cannot be read to the errors."""
        steps = [step for step in steps_in(run) if only is None or step in only]
        if run is self._first:
            steps = [step for step in steps if step not in self._damaged_before]

        def seal_of(step: int) -> bytes | StorageError | None:
            try:
                return seal_in(run.within(step_name(step)))
            except StorageError as error:
                return None if error.details.get("lost_link") else error

        found = dict(zip(steps, map_requests(run, seal_of, steps), strict=True))
        unreadable = {step: seal for step, seal in found.items() if isinstance(seal, StorageError)}
        return {step: seal for step, seal in found.items() if isinstance(seal, bytes)}, unreadable

    def _kept(self, there: Collection[int], pending: Collection[int], only_known: bool = False) -> set[int]:
        """The steps that the policy of the second tier keeps, of those there and those that wait.

        With `only_known`, nothing of the second tier is read.
        """
        steps = sorted({*there, *pending})
        if self._keep is None or not steps:
            return set(steps)
        for step in () if only_known else pending:
            self._facts.forget(step)  # it may have been saved again
        known, run = (there, self._first) if only_known else ((), None)
        pinned = {step for step in pending if read_pin(self._first.within(step_name(step))) is not None}
        line = self._in_line(steps)
        if line == steps:
            return pinned | self._selected(line, known, run)
        return pinned | self._selected(line, known, run) | (self._selected(steps, known, run) - set(line))

    def _in_line(self, steps: Iterable[int]) -> list[int]:
        """The steps that were not given up by a rollback (note "One line of steps")."""
        position = self.position
        return [step for step in steps if position is None or step <= position]

    def _selected(self, steps: Sequence[int], only_known: Collection[int], run: Storage | None) -> set[int]:
        """The steps that the policy keeps of these, which ascend. The newest is one of them."""
        if self._keep is None or not steps:
            return set(steps)
        selected, unreadable = self._facts.select(self._keep, steps, only_known, run)
        return {*selected, *unreadable, steps[-1]}

    def _holder(self, step: int) -> Storage:
        """The tier whose manifest of a step counts for the policy: the first for a step that waits."""
        return self._second if step in self._stored else self._first

    def _read(self, step: int, replace: bool) -> _UnderWay | None:
        """The manifest and the index of a step in the first tier; None if one is damaged or gone."""
        place = self._first.within(step_name(step))
        text = b""
        try:
            text = read_manifest_text(place)
            manifest = decode_manifest(text, f"{place.location}/{MANIFEST_NAME}")
            misfit = misplaced(self._first, step_name(step), manifest)
            if misfit is not None:
                raise misfit
            index = _read_index(place, manifest)
        except FormatError as error:
            self._skip_damaged(step, _seal_of(text), error)
        except StorageError as error:
            if not error.details.get("missing"):
                self._set_aside(step, error)
            elif text:
                self._skip_damaged(step, _seal_of(text), error)
        else:
            return _UnderWay(step, manifest, text, index, replace)
        return None

    def _skip_damaged(self, step: int, seal: bytes, error: ShardproofError) -> None:
        self._damaged[step] = seal
        _log.error("%s: step %d is damaged, and is not uploaded: %s", self._first.location, step, error)

    def _set_aside(self, step: int, error: ShardproofError) -> None:
        """Note "One step cannot block the others"."""
        self._round.aside[step] = error
        _log.warning("%s: step %d waits, because it cannot be read: %s", self._first.location, step, error)

    def _share(self, step: int, manifest: Manifest, reports: Sequence[UploadReport]) -> list[UploadShare]:
        """Each rank's part of the upload. The rank that wrote a file copies it, if the job still has it."""
        needed = [
            msgspec.structs.replace(record, folder=record.folder or step_name(step))
            for record in manifest.files
        ]
        parts: list[list[FileRecord]] = [[] for _ in reports]
        for record in needed:
            if (record.folder, record.name) in self._round.copied:
                continue
            if record.folder != step_name(step) and self._is_trusted(record):
                continue
            rank = record.rank % len(reports)
            parts[rank].append(record)
        total = sum(record.size for part in parts for record in part)
        return [
            UploadShare(
                step,
                manifest.attempt,
                tuple(part),
                None
                if self._bandwidth is None
                else max(1.0, self._bandwidth * sum(record.size for record in part) / max(1, total)),
            )
            for part in parts
        ]

    def _is_trusted(self, record: FileRecord) -> bool:
        """True if the second tier has another step's file, and a manifest there names it.

        Note "Files that are there".
        """
        folder = self._second.within(record.folder)
        if folder.size(record.name) != record.size:
            return False
        if record.name in (named_files(folder) or ()):
            return True
        if self._round.references is None:
            self._round.references = references_in(self._second)
        return record.name in self._round.references.files(record.folder)

    def _publish(self, upload: _UnderWay) -> None:
        """The commit on the second tier (note "The manifest goes last")."""
        name, manifest = step_name(upload.step), upload.manifest
        target = self._second.within(name)
        advice = (
            "The ranks copied this file, but rank 0 does not see it: check that all ranks see one second tier"
        )
        files = [(self._second.within(record.folder or name), record) for record in manifest.files]
        check_sizes(files, lambda _: advice)
        target.publish(manifest.index.name, upload.index, replace=True)
        was_pinned = self._copy_pin(upload.step)
        try:
            publish(target, manifest, None, overwrite=upload.replace, text=upload.text)
        except AlreadyCommittedError:
            if read_seal(target) != _seal_of(upload.text):
                raise
            _log.warning("%s: another job has uploaded this save at the same time", target.location)
        if not self._copy_pin(upload.step) and was_pinned:
            target.delete(PINNED_NAME)

    def _copy_pin(self, step: int) -> bool:
        """Copies the pin of a step of the first tier (note "Pins"). False if the step has none."""
        source, target = self._first.within(step_name(step)), self._second.within(step_name(step))
        if read_pin(source) is None:
            return False
        if read_pin(target) is None:
            target.publish(PINNED_NAME, source.read(PINNED_NAME), replace=True)
        return True

    def _remove_drafts(self, upload: _UnderWay) -> None:
        """Removes the drafts that killed uploads left in a step. A failure only wastes space."""
        try:
            for folder in {record.folder or step_name(upload.step) for record in upload.manifest.files}:
                place = self._second.within(folder)
                whole = {record.name for record in upload.manifest.files}
                for name in place.list("shards"):
                    if name.endswith(".tmp") and name.rsplit(".", 2)[0] in whole:
                        place.delete(name)
        except StorageError as error:
            _log.warning("%s: files of killed uploads stay: %s", self._second.location, error)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """The step whose upload is under way."""

    step: int
    manifest: Manifest
    text: bytes
    """The bytes of the manifest."""
    index: bytes
    replace: bool
    """True if it replaces another save of the step."""


@dataclass(slots=True)
class _Round:
    """What the coordinator notes during one round."""

    under_way: _UnderWay | None = None
    references: References | None = None
    """The references of the second tier; None if they are not read, or may have changed."""
    copied: set[tuple[str, str]] = field(default_factory=set)
    """Folder and name of the files of the steps that this round uploaded."""
    aside: dict[int, ShardproofError] = field(default_factory=dict)
    """Steps that this round does not upload, because they cannot be read, to the errors."""


class _Claims:
    """The step that is uploaded, and the steps that retention of the first tier removes: never the same one.

    A round chooses in its thread, while the retention of a save removes in the thread of saves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chosen: int | None = None
        self._removed: set[int] = set()

    def choose(
        self,
        pending: Collection[int],
        aside: Collection[int],
        in_line: Callable[[Iterable[int]], list[int]],
    ) -> int | None:
        """Chooses the newest step to upload, if possible one that `in_line` returns; None without a step."""
        with self._lock:
            left = [step for step in pending if step not in aside and step not in self._removed]
            self._chosen = max(in_line(left) or left, default=None)
            return self._chosen

    def release(self) -> None:
        """Allows retention to remove the chosen step."""
        with self._lock:
            self._chosen = None

    def remove(self, steps: Collection[int], stay: set[int]) -> set[int]:
        """Notes that retention removes `steps`. Returns those that stay: of `stay`, and the chosen one."""
        with self._lock:
            stay = stay if self._chosen is None else stay | {self._chosen}
            self._removed = set(steps) - stay
        return stay.intersection(steps)

    def saved(self, step: int) -> None:
        """Notes that a step is there again."""
        with self._lock:
            self._removed.discard(step)

    def remaining(self, steps: Mapping[int, T]) -> dict[int, T]:
        """The steps that retention does not remove."""
        with self._lock:
            return {step: value for step, value in steps.items() if step not in self._removed}


def _seal_of(text: bytes) -> bytes:
    return text[-SEAL_LENGTH:]


def _attempt(run: Storage, step: int) -> str | None:
    """The attempt of a committed step; None if it cannot be read."""
    try:
        return read_manifest(run.within(step_name(step))).attempt
    except (FormatError, NotCommittedError):
        return None


def _read_index(place: Storage, manifest: Manifest) -> bytes:
    """The bytes of the index of a step, from the nearest copy that is not damaged.

    Raises:
        FormatError: all copies are damaged.
        StorageError: the storage failed, or there is no copy.
    """
    damage: FormatError | None = None
    for copy in copies_of(place, manifest.index.name):
        try:
            index = read_whole_index(copy, manifest.index)
        except FormatError as error:
            damage = damage or error
            continue
        if damage is not None:
            log_other_copy(place.location, f"{copy.location}/{manifest.index.name}", damage)
        return index
    assert damage is not None
    raise damage
