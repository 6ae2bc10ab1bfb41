"""The steps of a run: save, restore the newest, keep a few."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shardproof import events
from shardproof.checkpointer.retention import Retention, delete_steps, is_ours, parse_step, step_name
from shardproof.errors import (
    FormatError,
    KeyMismatchError,
    NotCommittedError,
    ShardproofError,
    StorageError,
    StructureError,
)
from shardproof.format import MANIFEST_NAME, Manifest, referred_in
from shardproof.loading import UNREADABLE, Checkpoint, LoadReport, Options, ReadOnce, load_from
from shardproof.loading.selection import Cast, Patterns
from shardproof.rendezvous import Meetings, Rendezvous, connect
from shardproof.saving import Committed, PendingSave, Saver, WhenBusy
from shardproof.storage import LocalStorage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Checkpointer", "PassedOver"]

_NEVER_COMMITTED = "it has no manifest: its save died or is still under way, so it is not a checkpoint"

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer step that `Checkpointer.restore` did not take: damaged, or never committed."""

    step: int
    reason: str
    damaged: bool
    """It was committed and its bytes are lost or changed, so saving this step again may replace it."""


class Checkpointer:
    """Saves and restores the steps of one run. Every rank makes one, and calls its methods together.

    Args:
        root: folder of the run; each step becomes the folder ``step-00001000`` in it.
        keep: which committed steps stay; None for all. Others are removed after a newer one is committed.
        rendezvous: where the ranks meet; found by itself when None (the process group's store, torchrun's,
        or none).
        deadline: seconds of silence after which a rank is given up; work that moves is never cut short.
        when_busy: what `save` does while the save before it is still under way: wait for it, or skip.
        snapshot: "fence" reads parameters and optimizer state while training goes on, and has the next
            step of an optimizer wait until what is left of them is copied; "stage" copies everything before
            `save` returns. Whatever else is in the state is copied at once either way.
        host_memory_budget: bytes of copies that may wait to be written, on this rank. When it is used up,
            training waits for the writer. None: a quarter of what is available, divided by the node's ranks.
        incremental: whether chunks that an earlier step of the run has, bit for bit, are referred to there
            and not written again. Retention keeps what a kept step refers to; to move such a step, copy it
            with ``shardproof convert --standalone``.

    >>> import shardproof as sp, tempfile, torch
    >>> checkpointer = sp.Checkpointer(tempfile.mkdtemp(), keep=sp.KeepLatest(2))
    >>> for step in (1, 2, 3):
    ...     _ = checkpointer.save(step, {"w": torch.full((2,), float(step))})
    >>> checkpointer.wait()
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
        when_busy: WhenBusy = "wait",
        snapshot: Literal["fence", "stage"] = "fence",
        host_memory_budget: int | None = None,
        incremental: bool = False,
    ) -> None:
        if when_busy not in ("wait", "skip"):
            raise ValueError(f"when_busy is 'wait' or 'skip', not {when_busy!r}")
        if snapshot not in ("fence", "stage"):
            raise ValueError(f"snapshot is 'fence' or 'stage', not {snapshot!r}")
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
        self._damaged: set[int] = set()
        """Steps that a restore passed over as damaged; saving one of them again replaces it."""
        self._storage = LocalStorage(root)
        self._rendezvous = rendezvous or connect(deadline=deadline)
        self._when_busy = when_busy
        self._stage_all = snapshot == "stage"
        self._incremental = incremental
        self._saver = Saver(self._rendezvous, host_memory_budget=host_memory_budget)

    def save(
        self,
        step: int,
        state: Any,
        *,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        when_busy: WhenBusy | None = None,
    ) -> PendingSave:
        """Begins to save a step, and returns once training may go on.

        Whatever changes after that is not in the checkpoint. Code that writes to parameters or optimizer
        state by other ways than an optimizer's `step` or a load calls `fence` first.

        Args:
            step: not negative; names the folder.
            state: see `shardproof.save`.
            metadata: plain data, kept in the manifest.
            overwrite: whether to replace the step if it is committed already.
            when_busy: for this save; None: as the `Checkpointer` was told.

        Returns:
            The save under way. A failure in the background is logged at once and is raised by its
            `result`; if nobody asks, by the next `save` or `wait`.

        Raises:
            ShardproofError: see `shardproof.save`; or why the save before this one failed.
        """
        number, folder = _named(step)
        with self._phase(number, "blocked"):
            return self._saver.begin(
                self._storage.within(folder),
                state,
                step=number,
                metadata=metadata,
                overwrite=overwrite or number in self._damaged,
                when_busy=when_busy or self._when_busy,
                stage_all=self._stage_all,
                base=partial(self._base_of, number) if self._incremental else None,
                after=self._after_commit,
            )

    def fence(self) -> None:
        """Returns when parameters and optimizer state may be written to by any code.

        What the save under way has not written yet is copied first. Optimizers and loads do this by
        themselves. Nothing under way: nothing to do.
        """
        self._saver.fence()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the save that is under way.

        Args:
            timeout: seconds to wait at most; None: as long as it moves.

        Raises:
            TimeoutError: it is still under way.
            ShardproofError: it failed, and neither its `result` nor this has said so yet.
        """
        self._saver.wait(timeout)

    def _base_of(self, step: Any) -> LocalStorage | None:
        """The newest committed step before this one (see note "One line of steps"), damaged ones left out."""
        steps = (parse_step(name) for name in self._storage.folders())
        for earlier in sorted((one for one in steps if one is not None and one < step), reverse=True):
            folder = self._storage.within(step_name(earlier))
            if earlier not in self._damaged and folder.size(MANIFEST_NAME) is not None:
                return folder
        return None

    def _after_commit(self, committed: Committed, progress: Callable[[int, int], None]) -> None:
        assert committed.step is not None
        self._damaged.discard(committed.step)
        if self._keep is not None and self._rendezvous.rank == 0:
            with self._phase(committed.step, "retain"):
                self._retain(self._keep, committed.step, progress)

    def _phase(self, step: Any, name: str) -> events.Phase:
        number = step if isinstance(step, int) and not isinstance(step, bool) else None
        folder = "invalid-step" if number is None else step_name(number)
        rank, world_size = self._rendezvous.rank, self._rendezvous.world_size
        operation = f"save {self._storage.location}/{folder}"
        return events.phase(operation, name, rank=rank, world_size=world_size, step=number)

    def steps(self) -> list[int]:
        """Committed steps, ascending. Local: asks the storage, meets nobody."""
        return sorted(step for step, committed in self._folders().items() if committed)

    def _folders(self) -> dict[int, bool]:
        """Every step that has files of ours, and whether it has a manifest."""
        found: dict[int, bool] = {}
        for name in self._storage.folders():
            step = parse_step(name)
            if step is not None:
                folder = self._storage.within(name)
                committed = folder.size(MANIFEST_NAME) is not None
                if committed or any(is_ours(file) for file in folder.list()):
                    found[step] = committed
        return found

    def _lenders(self) -> set[int]:
        """Steps that are no checkpoints any more, and whose folders only hold files that others refer to."""
        references = referred_in(self._storage)
        found = set()
        for name in references.by_folder:
            files = [file for file in self._storage.within(name).list() if is_ours(file)]
            if (step := parse_step(name)) is not None and set(files) <= set(references.files(name)):
                found.add(step)
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
        read_once: ReadOnce = False,
        group: ProcessGroup | None = None,
    ) -> int | None:
        """Loads the newest committed and readable step, into whatever layout the state has now.

        A step that is damaged is passed over for the next older one, and `passed_over` says why. A step that
        is whole but does not fit the state is an error, never passed over; so is one that cannot be had just
        now (no permission, a stale file handle). The newest is the one with the highest number.

        Args:
            state: the tree to fill.
            step: exactly this one; None for the newest.
            strict: see `shardproof.load`; so are the other options.
            include: keys to load.
            exclude: keys to leave.
            cast: keys to convert.
            rename: keys with other names in the checkpoint.
            read_once: whether one rank reads what several want, and hands it on.
            group: the process group for that; None: the default one.

        Returns:
            The step, or None when nothing was ever committed here.

        Raises:
            NotCommittedError: there are committed steps, but none can be read; or `step` is not committed.
            ShardproofError: see `shardproof.load`.
        """
        self._saver.settle()
        options = Options(strict, include, exclude, cast, rename, read_once, group)
        self.passed_over = ()
        self.last_restore = None
        overwritten: int | None = None
        while (chosen := self._choose(step)) is not None:
            try:
                report = load_from(
                    self._storage.within(step_name(chosen)),
                    state,
                    self._rendezvous,
                    options,
                    check=partial(self._check_step, chosen),
                )
            except KeyMismatchError as error:
                raise error if overwritten is None else _mixed(error.message, overwritten, chosen) from error
            except UNREADABLE as error:
                if step is not None or not _is_damage(error):
                    raise
                if error.details.get("overwritten"):
                    overwritten = chosen
                self._pass_over(PassedOver(chosen, error.message, damaged=True))
                continue
            if overwritten is not None and report.missing:
                raise _mixed(f"it lacks {', '.join(report.missing[:8])}", overwritten, chosen)
            self.last_restore = report
            return chosen
        return None

    def _choose(self, step: int | None) -> int | None:
        """The leader's choice: the newest step whose manifest, index and file sizes are right."""
        meeting = Meetings(self._rendezvous, f"restore {self.root}")
        known = {item.step for item in self.passed_over}

        def decide(posts: Sequence[bytes]) -> bytes:
            wanted = {msgspec.msgpack.decode(post, type=int | None) for post in posts}
            if len(wanted) > 1:
                raise StructureError(
                    f"{self.root}: ranks were asked to restore different steps: {sorted(map(str, wanted))}; "
                    "nothing was changed"
                )
            if step is not None:
                return msgspec.msgpack.encode((step, []))
            passed: list[PassedOver] = []
            folders = self._folders()
            if not all(folders.values()):
                folders = {step: folders[step] for step in folders.keys() - self._lenders()}
            for candidate in sorted(folders.keys() - known, reverse=True):
                problem = (
                    self._why_unreadable(candidate)
                    if folders[candidate]
                    else PassedOver(candidate, _NEVER_COMMITTED, damaged=False)
                )
                if problem is None:
                    return msgspec.msgpack.encode((candidate, passed))
                passed.append(problem)
            steps = [step for step, committed in folders.items() if committed]
            if steps:
                said = "\n".join(
                    f"  step {item.step}: {item.reason}" for item in (*self.passed_over, *passed)
                )
                raise NotCommittedError(
                    f"{self.root} has {len(steps)} committed steps, and none can be read:\n{said}",
                    path=self.root,
                )
            return msgspec.msgpack.encode((None, passed))

        answer = meeting.meet("choose", lambda: msgspec.msgpack.encode(step), decide)
        chosen, passed = msgspec.msgpack.decode(answer, type=tuple[int | None, list[PassedOver]])
        for item in passed:
            self._pass_over(item)
        return chosen

    def _pass_over(self, item: PassedOver) -> None:
        self.passed_over = (*self.passed_over, item)
        if item.damaged:
            self._damaged.add(item.step)
        if self._rendezvous.rank == 0:
            _log.warning("%s: step %d is passed over: %s", self.root, item.step, item.reason)

    def _check_step(self, step: int, manifest: Manifest) -> None:
        """A folder that was renamed or copied would restore one step as another."""
        if manifest.step not in (None, step):
            name = step_name(step)
            raise FormatError(
                f"{self.root}/{name} holds step {manifest.step}: it was renamed or copied. Give it back its "
                "name, or load it with shardproof.load",
                file=f"{name}/{MANIFEST_NAME}",
            )

    def _why_unreadable(self, step: int) -> PassedOver | None:
        """What is wrong with a step as far as manifest, index and file sizes tell; None if nothing is."""
        folder = self._storage.within(step_name(step))
        try:
            with Checkpoint(folder) as checkpoint:
                checkpoint.check_sizes(range(len(checkpoint.manifest.files)))
                manifest = checkpoint.manifest
        except UNREADABLE as error:
            if not _is_damage(error):
                raise
            return PassedOver(step, error.message, damaged=True)
        try:
            self._check_step(step, manifest)
        except FormatError as error:
            return PassedOver(step, error.message, damaged=False)
        return None

    def _retain(self, keep: Retention, newest: int, progress: Callable[[int, int], None]) -> None:
        """Removes what the policy lets go. Failing costs space, not safety, so it is only logged.

        Note "One line of steps": only steps up to the one just saved are counted. Newer ones are there when
        the run was rolled back; they must not push out the steps of the run that goes on. Nor do damaged
        steps count.
        """
        try:
            steps = [step for step in self.steps() if step not in self._damaged]
            newer = [step for step in steps if step > newest]
            if newer:
                _log.warning(
                    "%s: steps %s are newer than step %d, which was just saved: restore() would take them. "
                    "Remove their folders if the run was rolled back",
                    self.root,
                    newer,
                    newest,
                )
            counted = [step for step in steps if step <= newest]
            let_go = sorted(set(counted) - set(keep.select(counted)) - {newest})
            if let_go:
                delete_steps(self._storage, [step_name(step) for step in let_go], progress)
        except Exception as error:
            _log.warning("%s: old steps could not be removed: %s", self.root, error)


def _named(step: Any) -> tuple[Any, str]:
    """The step and its folder. One that is no step is refused by the save, where every rank learns of it."""
    try:
        number = operator.index(step)
        return (step if isinstance(step, bool) else number), step_name(number)
    except (TypeError, ValueError):
        return repr(step), "invalid-step"


def _is_damage(error: ShardproofError) -> bool:
    """Whether stored bytes are lost or changed, rather than out of reach just now."""
    if not isinstance(error, StorageError):
        return True
    return bool(error.details.get("missing")) or error.details.get("errno") in (None, "EIO")


def _mixed(problem: str, damaged: int, older: int) -> StructureError:
    return StructureError(
        f"step {damaged} turned out to be damaged after part of the target was overwritten, and step "
        f"{older} does "
        f"not replace all of it: {problem}\nThe target holds values of both: make the state anew, and "
        f"restore step={older} into it with what it lacks left out or strict=False",
        overwritten=True,
    )
