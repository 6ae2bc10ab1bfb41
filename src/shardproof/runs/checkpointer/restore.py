"""One restore: the ranks choose a step together, load it, and choose again if it cannot be read.

Note "Rank 0 looks last": rank 0 lists the run after every other rank has reported. A step that another rank
saw committed is then visible to rank 0, or a newer step replaced it. If rank 0 sees neither, the ranks do not
see one run. The opposite case needs no rule: a rank that does not see the chosen step cannot open it, and the
load fails on all ranks.

Note "One wait for a tier": a tier that does not respond delays a restore by the deadline of one request.
Rank 0 asks all tiers before its report, while the other ranks list them. After a request without an answer, a
rank sends that tier no other one (`OpenRun.view`), and no rank chooses another step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import msgspec

from shardproof.engine.format import Manifest
from shardproof.engine.loading import UNREADABLE, LoadOptions, LoadReport, load_from
from shardproof.engine.rendezvous import MeetingSequence, Rendezvous
from shardproof.engine.storage import Storage
from shardproof.errors import (
    KeyMismatchError,
    NotCommittedError,
    ShardproofError,
    StorageError,
    StructureError,
)
from shardproof.runs.checkpointer.judge import misplaced
from shardproof.runs.checkpointer.step_folders import StepFolder
from shardproof.runs.checkpointer.step_selection import (
    KEEP_MORE,
    MOST_TRIES,
    Chosen,
    Failed,
    PassedOver,
    StepSelection,
    named,
    newest_committed,
)
from shardproof.runs.checkpointer.tiers import copies_in

_REMOVED = "it was removed or replaced while it was read"

_log = logging.getLogger("shardproof")


class RestoredStep(int):
    """The step that `Checkpointer.restore` loaded: an `int` with a report of the restore.

    It compares, hashes, formats and JSON-encodes as the number of the step. Arithmetic gives a plain `int`.
    A checkpoint stores it as a plain `int`, too. The attributes cannot be set. The number and `passed_over`
    are the same on every rank. Each rank has its own `report`.

    Args:
        step: number of the step.
        report: report of the load on this rank.
        passed_over: newer steps that the restore passed over, with the reasons; newest first. With several
            tiers also copies of the restored step in nearer tiers, and with `node_local` on nodes.
        tier: the location of the run in the tier that the step was restored from. Single files that are lost
            there were read from another tier, as `passed_over` says. Empty without a run.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> checkpointer = sp.Checkpointer(tempfile.mkdtemp())
        >>> _ = checkpointer.save(7, {"w": torch.ones(2)}).result()
        >>> step = checkpointer.restore({"w": torch.zeros(2)})
        >>> step, step + 1, step.passed_over
        (7, 8, ())
    """

    __stored_as__ = int
    """The type of plain data that a checkpoint stores in its place."""
    report: LoadReport
    """Report of the load on this rank."""
    passed_over: tuple[PassedOver, ...]
    """Newer steps that the restore passed over, with the reasons; newest first."""
    tier: str
    """The location of the run in the tier that the step was restored from; empty without a run."""

    def __new__(
        cls, step: int, report: LoadReport, passed_over: tuple[PassedOver, ...] = (), tier: str = ""
    ) -> RestoredStep:
        """Makes the value; see the class."""
        made = super().__new__(cls, step)
        made.__dict__.update(report=report, passed_over=tuple(passed_over), tier=tier)
        return made

    def __reduce__(self) -> tuple[type[RestoredStep], tuple[int, LoadReport, tuple[PassedOver, ...], str]]:
        """Supports pickle and copy."""
        return RestoredStep, (int(self), self.report, self.passed_over, self.tier)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuses: the value is frozen.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(f"RestoredStep is frozen: {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        """Refuses, as `__setattr__`.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(f"RestoredStep is frozen: {name!r} cannot be deleted")


class Restore:
    """One call of `Checkpointer.restore`, on this rank.

    Args:
        run: the run's folder.
        rendezvous: rendezvous of the ranks that restore.
        step: the step to restore; None for the newest.
        suspect: True if unsettled suspects count as steps.
        options: options of the load.
        check_tiers: raises if a tier is no run. Called on rank 0.
        explained: adds the remedy to the errors of tiers.
    """

    def __init__(
        self,
        run: Storage,
        rendezvous: Rendezvous,
        step: int | None,
        suspect: bool,
        options: LoadOptions,
        check_tiers: Callable[[], None],
        explained: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.passed_over: tuple[PassedOver, ...] = ()
        """Newer steps that were not restored, newest first."""
        self.damaged: set[int] = set()
        """Steps, without suspects, with a damaged copy that was passed over."""
        self.damaged_everywhere: set[int] = set()
        """The steps of `damaged` without a readable copy."""
        self._run, self._rendezvous = run, rendezvous
        self._meetings = MeetingSequence(rendezvous, f"restore {run.location}")
        self._copies = copies_in(run)
        self._selection = StepSelection(run, suspect=suspect, copies=self._copies)
        self._step, self._suspect, self._options = step, suspect, options
        self._check_tiers = check_tiers
        self._explained = explained
        self._overwritten: StepFolder | None = None
        """The last step whose load failed after it had overwritten part of the target."""
        self._untouched: set[str] = set()
        """Keys that no such load overwrote on this rank."""
        self._failed: Failed | None = None
        """The last choice, if it could not be read."""
        self._removed: list[StepFolder] = []
        """Steps that another process removed or replaced while they were read."""

    def run(self, state: Any) -> tuple[StepFolder, LoadReport] | None:
        """Fills the state. See `Checkpointer.restore` for the errors.

        Returns:
            The restored step and the report of this rank; None if no rank sees a committed step.
        """
        try:
            while (folder := (chosen := self._choose()).folder) is not None:
                if (report := self._load(chosen, folder, state)) is not None:
                    break
            else:
                return None
        finally:
            self._failed = None  # the frames of its error refer to this object
        if self._overwritten is not None:
            self._check_complete(report, self._overwritten, folder)
        for removed in {removed for removed in self._removed if removed > folder}:
            self._pass_over(PassedOver(removed.step, _REMOVED, damaged=False, suspect=removed.suspect))
        # A step that was passed over, then replaced and now restored is not a newer one.
        # A copy in a nearer tier was passed over although its step is restored.
        self.passed_over = tuple(
            item
            for item in self.passed_over
            if (item.folder == folder if item.tier else item.folder > folder)
        )
        return folder, report

    def _load(self, chosen: Chosen, folder: StepFolder, state: Any) -> LoadReport | None:
        """Loads the chosen step into the state; None if it cannot be read (`_failed`)."""
        check = partial(self._check, chosen, self._failed is None)
        try:
            return load_from(
                self._run.within(folder.name), state, self._rendezvous, self._options, check=check
            )
        except KeyMismatchError as error:
            if self._overwritten is None:
                raise
            raise _mixed(error.message, self._overwritten, folder) from error
        except UNREADABLE as error:
            if error.details.get("unanswered"):  # equal on all ranks
                with self._explained():
                    raise
            if error.details.get("overwritten"):
                untouched = set(error.details["untouched"])
                self._untouched = untouched & (self._untouched if self._overwritten else untouched)
                self._overwritten = folder
            self._failed = Failed(chosen, error)
            return None

    def _choose(self) -> Chosen:
        """The step that rank 0 chooses after all reports. Raises if the restore cannot continue."""

        def report() -> _RestoreReport | ShardproofError:
            found = _RestoreReport(self._step, self._suspect)
            try:
                if self._rendezvous.rank == 0:  # lists the run later (note "Rank 0 looks last")
                    with self._explained():
                        self._check_tiers()
                elif self._step is None or self._suspect:  # else there is nothing to choose
                    found.newest = _newest(self._copies.seen_here(), self._step, self._suspect)
            except ShardproofError as error:
                return error
            return found

        def decide(reports: Sequence[_RestoreReport]) -> Chosen:
            with self._explained():
                _check_reports(self._run, reports)
                return self._selection.choose_after(self.passed_over, self._step, self._failed)

        try:
            chosen = self._meetings.exchange("choose", report, decide, _RestoreReport, Chosen)
            # Rank 0 sends all copies each time: an earlier save counts after the later one failed.
            self.passed_over = tuple(
                item for item in self.passed_over if not item.tier or item in chosen.passed
            )
            for item in chosen.passed:
                self._pass_over(item)
            if chosen.folder is not None:
                self._copies.use(chosen.left_out, chosen.folder.name, chosen.seal)
            if self._failed is not None:
                self._check_progress(chosen)
        except ShardproofError as error:
            if self._overwritten is None or error.details.get("overwritten"):
                raise
            advice = (
                f"The target is partly overwritten from {self._overwritten}: restore again, before using it."
            )
            details = {**error.details, "overwritten": True}
            raise type(error)(f"{error.message}\n{advice}", **details) from error
        return chosen

    def _check(self, chosen: Chosen, first: bool, manifest: Manifest) -> None:
        """Raises if the step on this rank differs from the choice of rank 0."""
        assert chosen.folder is not None
        misfit = misplaced(self._run, chosen.folder.name, manifest)
        if misfit is not None:
            raise misfit
        if first and 0 < self._rendezvous.rank == self._rendezvous.world_size - 1:
            _check_damage(self._copies.anew(), chosen)

    def _check_progress(self, chosen: Chosen) -> None:
        """Raises if the restore ends with the step that could not be read."""
        assert self._failed is not None
        last, location = self._failed.chosen.folder, self._run.location
        if chosen.stands or last is None:
            raise self._failed.error
        if chosen.changed:
            self._removed.append(last)
            if len(self._removed) >= MOST_TRIES:
                raise StorageError(
                    f"{location}: another process removed or replaced {len(self._removed)} chosen steps in a "
                    f"row during their load, {last} last. {KEEP_MORE}",
                    file=location,
                    damaged=False,
                ) from self._failed.error
        if chosen.folder is None or chosen.seal is None:
            left = "no step is committed there now" if chosen.folder is None else "it is not committed now"
            raise NotCommittedError(
                f"{location}: {last} was committed when this restore began, and {left}: another process "
                "removed it during the load, or this node does not see the folder",
                path=location,
            ) from self._failed.error

    def _check_complete(self, report: LoadReport, overwritten: StepFolder, restored: StepFolder) -> None:
        """Raises on every rank if any rank still has values of a damaged step."""
        lacking = sorted({*report.missing, *report.unchanged} - self._untouched)

        def decide(posts: Sequence[list[str]]) -> list[str]:
            return sorted({key for keys in posts for key in keys})[:8]

        keys = self._meetings.exchange("compare", lambda: lacking[:8], decide, list[str], list[str])
        if keys:
            raise _mixed(f"it lacks {', '.join(keys)}", overwritten, restored)

    def _pass_over(self, item: PassedOver) -> None:
        if item in self.passed_over:
            return
        copy = item.folder, item.tier
        items = [*(other for other in self.passed_over if (other.folder, other.tier) != copy), item]
        self.passed_over = tuple(sorted(items, key=lambda item: item.folder, reverse=True))
        if item.damaged and not item.suspect:
            self.damaged.add(item.step)
            if not item.tier:
                self.damaged_everywhere.add(item.step)
        if self._rendezvous.rank == 0:
            where = f" on {item.tier}" if item.tier else ""
            _log.warning("%s: %s%s is passed over: %s", self._run.location, item.folder, where, item.reason)


class _RestoreReport(msgspec.Struct, array_like=True):
    """The report of one rank before rank 0 chooses a step."""

    step: int | None
    """The step that the caller requests; None for the newest."""
    suspect: bool
    newest: StepFolder | None = None
    """The newest committed step that the rank sees. For a numbered step: its folder."""


def _check_reports(run: Storage, reports: Sequence[_RestoreReport]) -> None:
    """Rank 0 checks that all ranks request the same step, and that no rank sees a newer step than rank 0."""
    wanted = {(report.step, report.suspect) for report in reports}
    if len(wanted) > 1:
        steps = sorted({str(step) for step, _ in wanted})
        raise StructureError(
            f"{run.location}: the ranks request different steps: {steps}"
            f"{'' if len(steps) > 1 else ', some of them with suspect=True'}; nothing was changed"
        )
    seen = {rank: report.newest for rank, report in enumerate(reports) if report.newest is not None}
    if not seen:
        return
    newest = _newest(run, reports[0].step, reports[0].suspect)
    newer = {rank: folder for rank, folder in seen.items() if newest is None or folder > newest}
    if newer:
        rank, folder = max(newer.items(), key=lambda item: (item[1], -item[0]))
        own = f"sees no run at {run.location}" if newest is None else f"sees no step after {newest}"
        raise StorageError(
            f"{run.location}: rank 0 {own}, rank {rank} sees {folder}; nothing was changed. Check "
            "that all nodes share and mount this folder, and restore again when all ranks see the same steps",
            file=run.location,
            damaged=False,
            ranks=[0, *sorted(newer)],
        )


def _check_damage(run: Storage, chosen: Chosen) -> None:
    """The last rank checks that the damage that rank 0 found is damage on its node, too.

    If only rank 0 cannot see a file, the ranks must not restore an older step. With several nodes, the last
    rank is on another node than rank 0.
    """
    selection = StepSelection(run, suspect=False)
    for item in chosen.passed:
        if item.damaged and not item.tier and selection.why_unreadable(item.folder) is None:
            raise StorageError(
                f"{run.location}: this rank can read {item.folder}, and rank 0 cannot: {item.reason}\n"
                "Nothing was changed. Check that all nodes share and mount this folder",
                file=run.location,
                damaged=False,
            )


def _newest(run: Storage, step: int | None, suspect: bool) -> StepFolder | None:
    return newest_committed(run, suspect=suspect) if step is None else named(run, step, suspect=suspect)


def _mixed(problem: str, damaged: StepFolder, older: StepFolder) -> StructureError:
    return StructureError(
        f"{damaged} could not be read completely, after part of the target was overwritten, and {older} does "
        f"not replace all of it: {problem}\nThe target has values of both: make a new state, and restore "
        f"step={older.step} into it, without the missing keys or with strict=False",
        overwritten=True,
    )
