"""The steps of a run: save, restore the newest, keep a few."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shardproof.checkpointer.retention import Retention, delete_step, is_ours, parse_step, step_name
from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.format import MANIFEST_NAME, Manifest, read_index, read_manifest
from shardproof.loading import UNREADABLE, LoadReport, load_from
from shardproof.loading.selection import Cast, Patterns
from shardproof.rendezvous import Meetings, Rendezvous, connect
from shardproof.saving import Committed, Saver
from shardproof.storage import LocalStorage

__all__ = ["Checkpointer", "PassedOver", "PendingSave"]

_NEVER_COMMITTED = "it has no manifest: its save died or is still under way, so it is not a checkpoint"

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer step that `Checkpointer.restore` did not take: damaged, or never committed."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A save that was begun. Saving is synchronous, so it is committed by the time this exists."""

    _committed: Committed

    def result(self) -> Committed:
        """The committed checkpoint."""
        return self._committed


class Checkpointer:
    """Saves and restores the steps of one run. Every rank makes one, and calls its methods together.

    Args:
        root: folder of the run; each step becomes the folder ``step-00001000`` in it.
        keep: which committed steps stay; None for all. Others are removed after a newer one is committed.
        rendezvous: where the ranks meet; found by itself when None (the process group's store, torchrun's,
        or none).
        deadline: seconds of silence after which a rank is given up; work that moves is never cut short.

    >>> import shardproof as sp, tempfile, torch
    >>> checkpointer = sp.Checkpointer(tempfile.mkdtemp(), keep=sp.KeepLatest(2))
    >>> for step in (1, 2, 3):
    ...     _ = checkpointer.save(step, {"w": torch.full((2,), float(step))})
    >>> checkpointer.steps()
    [2, 3]
    >>> state = {"w": torch.zeros(2)}
    >>> checkpointer.restore(state), state["w"].tolist()
    (3, [3.0, 3.0])
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: Retention | None = None,
        rendezvous: Rendezvous | None = None,
        deadline: float | None = None,
    ) -> None:
        if rendezvous is not None and deadline is not None:
            raise ValueError(
                "give the deadline to the rendezvous, or leave the rendezvous to the Checkpointer"
            )
        self.root = os.fspath(root)
        self.last_restore: LoadReport | None = None
        """What the last `restore` loaded."""
        self.passed_over: tuple[PassedOver, ...] = ()
        """Newer steps that the last `restore` could not take, and why; newest first."""
        self._keep = keep
        self._storage = LocalStorage(root)
        self._rendezvous = rendezvous or connect(deadline=deadline)
        self._saver = Saver(self._rendezvous)

    def save(
        self, step: int, state: Any, *, metadata: dict[str, Any] | None = None, overwrite: bool = False
    ) -> PendingSave:
        """Saves a step, and returns once training may go on.

        Args:
            step: not negative; names the folder.
            state: see `shardproof.save`.
            metadata: plain data, kept in the manifest.
            overwrite: whether to replace the step if it is committed already.

        Raises:
            ShardproofError: see `shardproof.save`.
        """
        try:
            folder = step_name(step)
        except ValueError:
            folder = "invalid-step"  # refused below, where every rank learns of it
        committed = self._saver.save(
            self._storage.within(folder), state, step=step, metadata=metadata, overwrite=overwrite
        )
        if self._keep is not None and self._rendezvous.rank == 0:
            self._retain(self._keep, step)
        return PendingSave(committed)

    def wait(self) -> None:
        """Waits for the save that is under way. Saving is synchronous, so there is none."""

    def steps(self) -> list[int]:
        """Committed steps, ascending. Local: asks the storage, meets nobody."""
        return sorted(step for step, committed in self._folders().items() if committed)

    def _folders(self) -> dict[int, bool]:
        """Every step that has files of ours, and whether it has a manifest."""
        found: dict[int, bool] = {}
        for name in self._storage.list():
            folder, _, file = name.partition("/")
            step = parse_step(folder)
            if step is not None and is_ours(file):
                found[step] = found.get(step, False) or file == MANIFEST_NAME
        return found

    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        strict: bool = True,
        include: Patterns = None,
        exclude: Patterns = None,
        cast: Cast = False,
        rename: Mapping[str, str] | None = None,
    ) -> int | None:
        """Loads the newest committed and readable step, into whatever layout the state has now.

        A step that is damaged is passed over for the next older one, and `passed_over` says why. A step that
        is whole but does not fit the state is an error, never passed over.

        Args:
            state: the tree to fill.
            step: exactly this one; None for the newest.
            strict: see `shardproof.load`; so are `include`, `exclude`, `cast` and `rename`.
            include: keys to load.
            exclude: keys to leave.
            cast: keys to convert.
            rename: keys with other names in the checkpoint.

        Returns:
            The step, or None when nothing was ever committed here.

        Raises:
            NotCommittedError: there are committed steps, but none can be read; or `step` is not committed.
            ShardproofError: see `shardproof.load`.
        """
        self.passed_over = ()
        self.last_restore = None
        while (chosen := self._choose(step)) is not None:
            folder = self._storage.within(step_name(chosen))
            try:
                self.last_restore = load_from(
                    folder,
                    state,
                    self._rendezvous,
                    strict=strict,
                    include=include,
                    exclude=exclude,
                    cast=cast,
                    rename=rename,
                )
            except UNREADABLE as error:
                if step is not None:
                    raise
                self._pass_over(PassedOver(chosen, str(error)))
                continue
            return chosen
        return None

    def _choose(self, step: int | None) -> int | None:
        """The leader's choice: the newest step whose manifest, index and file sizes are right."""
        meeting = Meetings(self._rendezvous, f"restore {self.root}")
        tried = [item.step for item in self.passed_over]

        def decide(posts: Sequence[bytes]) -> bytes:
            if step is not None:
                self._check_step(read_manifest(self._storage.within(step_name(step))), step)
                return msgspec.msgpack.encode((step, []))
            passed: list[tuple[int, str]] = []
            folders = self._folders()
            for candidate in sorted(folders.keys() - set(tried), reverse=True):
                reason = self._why_unreadable(candidate) if folders[candidate] else _NEVER_COMMITTED
                if reason is None:
                    return msgspec.msgpack.encode((candidate, passed))
                passed.append((candidate, reason))
            steps = [step for step, committed in folders.items() if committed]
            if steps:
                reasons = [(item.step, item.reason) for item in self.passed_over] + passed
                said = "\n".join(f"  step {number}: {reason}" for number, reason in reasons)
                raise NotCommittedError(
                    f"{self.root} has {len(steps)} committed steps, and none can be read:\n{said}",
                    path=self.root,
                )
            return msgspec.msgpack.encode((None, passed))

        answer = meeting.meet("choose", lambda: b"", decide)
        chosen, passed = msgspec.msgpack.decode(answer, type=tuple[int | None, list[tuple[int, str]]])
        for number, reason in passed:
            self._pass_over(PassedOver(number, reason))
        return chosen

    def _pass_over(self, item: PassedOver) -> None:
        self.passed_over = (*self.passed_over, item)
        if self._rendezvous.rank == 0:
            _log.warning("%s: step %d is passed over: %s", self.root, item.step, item.reason)

    def _check_step(self, manifest: Manifest, step: int) -> None:
        """A folder that was renamed or copied would restore one step as another."""
        if manifest.step != step:
            name = step_name(step)
            raise FormatError(
                f"{self.root}/{name} holds step {manifest.step}: it was renamed or copied. Give it back its "
                f"name, or "
                "load it with shardproof.load",
                file=f"{name}/{MANIFEST_NAME}",
            )

    def _why_unreadable(self, step: int) -> str | None:
        """What is wrong with a step as far as manifest, index and file sizes tell; None if nothing is."""
        folder = self._storage.within(step_name(step))
        try:
            manifest = read_manifest(folder)
            self._check_step(manifest, step)
            read_index(folder, manifest)
            for record in manifest.files:
                size = folder.size(record.name)
                if size != record.size:
                    found = "no file" if size is None else str(size)
                    return f"{record.name}: expected {record.size} bytes, found {found}"
        except UNREADABLE as error:
            return str(error)
        finally:
            folder.close()
        return None

    def _retain(self, keep: Retention, newest: int) -> None:
        """Removes what the policy lets go. Failing costs space, not safety, so it is only logged."""
        steps = self.steps()
        kept = keep.select(steps) | {newest}
        for step in steps:
            if step not in kept:
                try:
                    delete_step(self._storage, step_name(step))
                except StorageError as error:
                    _log.warning("%s: step %d could not be removed: %s", self.root, step, error)
