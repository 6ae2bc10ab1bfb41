"""`Checkpointer`: saves the steps of a run, restores the newest, and keeps a few of them."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from shardproof._utils.arguments import check_boolean, check_whole, names_forms
from shardproof.engine.foreign import foreign_of
from shardproof.engine.loading import Cast, LoadOptions, LoadReport, Patterns, load_from
from shardproof.engine.rendezvous import Rendezvous, check_deadline, check_group, connect
from shardproof.engine.saving import CheckReplicas, PendingSave, Saver, SaveRequest, WhenBusy
from shardproof.engine.storage import Location, Storage, check_location, is_url
from shardproof.errors import NotCommittedError, ShardproofError, StructureError
from shardproof.reentrance import guarded, refuse_inside
from shardproof.runs.checkpointer.after_commit import AfterCommit, NewestStep
from shardproof.runs.checkpointer.due_saves import DueSaves
from shardproof.runs.checkpointer.judge import Damage
from shardproof.runs.checkpointer.open_run import change_pin, open_run, settle_suspect
from shardproof.runs.checkpointer.policies import MetricCheck, Retention, check_policy
from shardproof.runs.checkpointer.preemption import Preemption
from shardproof.runs.checkpointer.restore import Restore, RestoredStep
from shardproof.runs.checkpointer.run_options import NEW_FORMS, Incremental, NodeLocal, SecondTier
from shardproof.runs.checkpointer.schedules import Schedule
from shardproof.runs.checkpointer.step_folders import Pin, checked_step, parse_argument, unsettled_in
from shardproof.runs.checkpointer.step_selection import PassedOver
from shardproof.runs.checkpointer.tiers import (
    TieredRun,
    Uploader,
    UploadRequest,
    check_node_local,
    open_tiers,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True)
class _SaveOptions:
    """The arguments of a `Checkpointer` that each of its saves uses."""

    when_busy: WhenBusy
    snapshot: Literal["fence", "stage"]
    incremental: Incremental | None
    check_replicas: CheckReplicas | None

    def __post_init__(self) -> None:
        _check_choice("when_busy", self.when_busy, "wait", "skip")
        _check_choice("snapshot", self.snapshot, "fence", "stage")
        _check_choice("check_replicas", self.check_replicas, "sample", "all", None)


class Checkpointer:
    """Saves and restores the steps of one run. All ranks must call the methods together.

    Args:
        root: folder of the run, or a URL such as ``s3://bucket/run``. Each step becomes a folder in it, such
            as ``step-00001000``. A relative path is resolved when the `Checkpointer` is made.
        keep: which committed steps stay; None for all. A save removes the others after its commit. Policies
            combine: ``KeepLatest(3) | KeepEvery(hours=24) | KeepBest("loss")``. The newest step and pinned
            steps stay in any case. Rank 0 warns once of a save without the metric of a `KeepBest`.
        rendezvous: the rendezvous of all ranks. None: the process group's store, torchrun's store, or one
            rank.
        deadline: seconds that a rank may be silent before all ranks fail with `RankSilent`. It bounds each
            wait for another rank, and the time to reach the store. It does not bound a save or a restore:
            the ranks wait for a rank that reports progress. It applies to all users of the same
            rendezvous. None: the deadline of that rendezvous (default 300 s). Not allowed together with
            `rendezvous`, which has its own.
        storage_options: settings of an object store; see `shardproof.storage.ObjectStorage`. None: those of
            the environment.
        when_busy: during an earlier save, `save` may "wait" for it, or "skip" the new save.
        snapshot: "fence" reads parameters and optimizer state while training runs. The next optimizer step
            waits until the rest is copied. "stage" copies everything before `save` returns. Other parts of
            the state are always staged.
        host_memory_budget: largest size in bytes of the copies on this rank that wait for the writer. If the
            budget is used up, training waits for the writer. None: a quarter of the available memory, divided
            by the ranks of the node.
        incremental: True or an `Incremental` to write only the chunks that differ from an earlier step.
        check_replicas: the replicas that a save compares among the ranks: "all", or a "sample" that changes
            with each save; None: none. See `SaveResult.diverged`.
        provenance: True to record the origin of each save in its manifest: the program and its arguments
            without secrets, the git commit, versions, hosts and meshes (docs/format.md). The environment
            variable SHARDPROOF_PROVENANCE=0 turns it off for all saves.
        cache: "newest" to keep the newest step in the page cache of each node, for a restart in place. After
            the commit each rank reads its file again, at 256 MiB a second or less, until the next save. The
            read takes at most half of the available memory. "auto" does so on local file systems. "none" does
            not read the step again.
        every: the schedule of `save_if_due`. Schedules combine: ``Every(steps=500) | Every(minutes=20)``.
        preemption: a save before the scheduler ends the job; see `Preemption`. None: no signal is handled,
            and no time limit is watched.
        mtbf_hours: hours between two failures of the job, on average. After some saves, rank 0 logs a better
            interval once, if the present one is far from it. None: no suggestion.
        node_local: True or a `NodeLocal` if `root` is a folder on the local disk of each node, which other
            nodes do not see. Each rank writes to its node, and reads what its node lacks from the nodes that
            have it, over the network. All ranks make the `Checkpointer` together. See docs/tiers.md. A run in
            memory (``memory://run``) is always of this kind; see docs/memory_tier.md.
        second_tier: a folder, a URL, a storage or a `SecondTier` for a copy of the run, such as a bucket
            behind a local disk. A save is committed on `root`. Then each rank copies its files to the second
            tier in the background. `restore` takes the newest step of both tiers, and each file from the
            nearest copy. None: one tier. See docs/tiers.md.

    A ``with`` block of a `Checkpointer` waits for the last save at its end, as `wait` does.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has an invalid value.
        RankFailure, RankSilent: with `node_local` or a run in memory, a rank failed or fell silent.

    Example:
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

    @names_forms("Checkpointer", NEW_FORMS)
    def __init__(
        self,
        root: Location,
        *,
        keep: Retention | None = None,
        rendezvous: Rendezvous | None = None,
        deadline: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
        when_busy: WhenBusy = "wait",
        snapshot: Literal["fence", "stage"] = "fence",
        host_memory_budget: int | None = None,
        incremental: bool | Incremental = False,
        check_replicas: CheckReplicas | None = None,
        provenance: bool = True,
        cache: Literal["auto", "newest", "none"] = "auto",
        every: Schedule | None = None,
        preemption: Preemption | None = None,
        mtbf_hours: float | None = None,
        node_local: bool | NodeLocal = False,
        second_tier: Location | SecondTier | None = None,
    ) -> None:
        check_location("root", root)
        check_whole("host_memory_budget", host_memory_budget, "of bytes")
        _check_choice("cache", cache, "auto", "newest", "none")
        check_policy("keep", keep)
        how = _SaveOptions(when_busy, snapshot, Incremental.of(incremental), check_replicas)
        nodes, tier = NodeLocal.of(node_local), SecondTier.of(second_tier)
        check_deadline(rendezvous, deadline)
        self.root = os.fsdecode(root) if isinstance(root, (str, bytes, os.PathLike)) else root.location
        self.last_restore: LoadReport | None = None
        """Report of the last `restore`."""
        self.passed_over: tuple[PassedOver, ...] = ()
        """Newer steps that the last `restore` passed over, with the reasons; newest first."""
        first, second = open_tiers(root, tier, storage_options)
        if first.in_memory:
            nodes = nodes or NodeLocal()
        check_node_local(first, nodes)
        self._rendezvous = rendezvous or connect(deadline=deadline)
        self._found_rendezvous = rendezvous is None
        self._saver = Saver(self._rendezvous, host_memory_budget=host_memory_budget, provenance=provenance)
        self._run = open_run(
            first, second, self._saver, self._rendezvous, node_local=nodes, incremental=how.incremental
        )
        weakref.finalize(self, self._run.scrub.stop)
        self._keep = keep
        self._metrics = MetricCheck(self._run.location, keep, None if tier is None else tier.keep)
        self._storage_options = storage_options
        self._how = how
        self._newest: NewestStep | None = None
        if cache != "none" and first.path is not None and not first.in_memory:
            self._newest = NewestStep(drop_older=how.incremental is None, only_if_local=cache == "auto")
        self._due = DueSaves(every, preemption, mtbf_hours, self._rendezvous, self._run.location)
        self._uploader: Uploader | None = None
        if tier is not None and second is not None:
            self._uploader = Uploader(
                self._run.storage, second, self._rendezvous, tier.keep, tier.bandwidth, self._run.damaged
            )
        self._after = AfterCommit(self._run, keep, self._newest, self._uploader, self._due.committed)

    def save(
        self,
        step: int,
        state: Any,
        *,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        when_busy: WhenBusy | None = None,
        suspect: bool = False,
    ) -> PendingSave:
        """Begins to save a step, and returns when training may continue.

        The checkpoint has the values as of this call. Code that writes to parameters or optimizer state calls
        `fence` first; optimizer steps and loads need not.

        A save may return before the other ranks agree. This needs the structure of an earlier save that
        succeeded, and at most 1 MiB outside of parameters and optimizer state. The ranks then agree in the
        background, before the next optimizer step. A failure of another rank, or a step that is committed
        already, is then a failure in the background. Saves with `when_busy="skip"`, `snapshot="stage"`,
        `incremental` or `check_replicas` wait for the other ranks.

        Args:
            step: number of the step, at least 0.
            state: see `shardproof.save`.
            metadata: plain data that the manifest stores.
            overwrite: True to replace the step if it is committed already; with a second tier, on both.
            when_busy: for this save. None: that of the `Checkpointer`, or "wait" if `suspect`.
            suspect: True if validation of this step failed (see `shardproof.rerun`). The save writes all
                chunks to the folder ``suspect-00001000``, and replaces a suspect of that number. `restore`
                takes a suspect only with ``suspect=True``. Retention removes it after `settle_suspect` and
                the commit of a newer step.

        Returns:
            The pending save. A failure in the background is logged at once. Its `result` raises the
            failure; if the program does not call `result`, the next `save` or `wait` raises it.

        Raises:
            TypeError, ValueError: an argument has a wrong type or an invalid value.
            StorageError: the folder of the run is a checkpoint itself; or see `shardproof.save`.
            ShardproofError: see `shardproof.save`; or the failure of the previous save.
        """
        self._check_group()
        check_boolean("suspect", suspect)
        number, folder = parse_argument(step, suspect=suspect)
        if when_busy is not None:
            _check_choice("when_busy", when_busy, "wait", "skip")
        else:
            when_busy = "wait" if suspect else self._how.when_busy
        if self._rendezvous.rank == 0:
            self._run.scrub.prepare()
        if self._newest is not None:
            self._newest.stop()
        incremental = self._how.incremental
        upload = None
        if self._uploader is not None and not suspect:
            self._uploader.prepare()
            upload = UploadRequest(overwrite or number in self._run.damaged_everywhere)
        with self._run.phase(number, folder, "blocked"):
            request = SaveRequest(
                number,
                metadata,
                # A wrong type reaches the first meeting as it is, which refuses it on all ranks.
                overwrite=(suspect or number in self._run.damaged) if overwrite is False else overwrite,
                base=None if suspect or incremental is None else partial(self._run.base_of, number),
                full_every=None if incremental is None else incremental.full_every,
                check_replicas=self._how.check_replicas,
                check_place=partial(self._run.check_is_run, self._run.storage),
                record_overwrite=upload is not None and upload.overwrite,
            )
            pending = self._saver.begin(
                self._run.storage.within(folder),
                state,
                request,
                when_busy=when_busy,
                stage_all=self._how.snapshot == "stage",
                after=None if suspect else partial(self._after, upload),
            )
        if self._rendezvous.rank == 0 and not suspect:
            self._metrics.check(number, metadata)
        if upload is not None and self._uploader is not None:
            pending.set_upload_wait(partial(self._uploader.wait, upload))
        return pending

    def save_if_due(
        self,
        step: int,
        state: Any,
        *,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        force: bool = False,
    ) -> PendingSave | None:
        """Saves the step if the schedule (`every`) or a preemption asks for it. Call it once after each step.

        Every rank makes the same calls, and all ranks save at the same call. A call that is not due takes
        microseconds, and communicates with no rank.

        Args:
            step: see `save`.
            state: see `save`.
            metadata: see `save`.
            overwrite: see `save`.
            force: True to save in any case, for example after the last step. The same on all ranks.

        Returns:
            The pending save; None if none is due.

        Raises:
            Preempted: the program has to end (`preemption`), and the step is committed.
            ValueError: the `Checkpointer` has neither `every` nor `preemption`, and `force` is False.
            RankSilent: the ranks could not agree on a call.
            ShardproofError: see `save`. A call with an invalid step does not count. If the save before the
                end of the program failed, the next call saves again.

        >>> import shardproof as sp, tempfile, torch
        >>> checkpointer = sp.Checkpointer(tempfile.mkdtemp(), every=sp.Every(steps=2))
        >>> for step in range(1, 6):
        ...     _ = checkpointer.save_if_due(step, {"w": torch.ones(2)}, force=step == 5)
        >>> checkpointer.wait()
        >>> checkpointer.steps()
        [2, 4, 5]
        """
        if not self._due.is_due(step, force=force) and not force:
            return None
        if self._due.is_preempted:
            try:
                self.wait()
            except ShardproofError as error:  # the last save must begin in any case
                _log.warning(
                    "%s: the save before the end of the program failed: %s", self._run.location, error
                )
        when_busy: WhenBusy | None = "wait" if force or self._due.is_preempted else None
        pending = self.save(step, state, metadata=metadata, overwrite=overwrite, when_busy=when_busy)
        return self._due.began(pending)

    def fence(self) -> None:
        """Waits until any code may write to parameters and optimizer state.

        The fence copies the memory that the current save has not written yet. If the ranks have not agreed on
        the save, the fence waits for them, within the deadlines of their meetings. Optimizers and loads call
        the fence themselves. Without a current save, it does nothing. A write to parameters or optimizer
        state without it fails the save. docs/snapshots.md lists the ways to write, and the writes that no
        check finds.
        """
        self._saver.fence()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the current save.

        Args:
            timeout: seconds to wait at most; None: as long as the save makes progress.

        Raises:
            TimeoutError: the save has not ended.
            ShardproofError: the save failed, and neither its `result` nor `wait` has raised the failure yet.
        """
        self._saver.wait(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        """Waits for the current save, so that a failed save ends the program with an error; see `wait`.

        An exception of the ``with`` block ends the block at once.
        """
        if kind is None:
            self.wait()

    def restore(
        self,
        state: Any,
        *,
        step: int | Location | None = None,
        strict: bool = True,
        include: Patterns = None,
        exclude: Patterns = None,
        cast: Cast = False,
        rename: Mapping[str, str] | None = None,
        read_once: bool = False,
        group: ProcessGroup | None = None,
        suspect: bool = False,
    ) -> RestoredStep | None:
        """Loads the newest committed and readable step into the state, whatever its layout is now.

        The newest step is the one with the highest number. If a step is damaged, `restore` takes the next
        older one, and `passed_over` says why. A whole step that does not fit the state is an error. So is a
        step that the storage cannot read at the moment (no permission, a stale file handle).

        If another process removes or replaces a step while this one reads it, `restore` chooses again, at
        most 16 times.

        Rank 0 flushes the loaded step, because its save may have failed or died before it was durable. If the
        flush fails, rank 0 logs a warning, and neither retention nor incremental saves rely on the step.

        Args:
            state: the tree to fill.
            step: number of the step to load. "latest" or None: the newest. "best": the best by the metric of
                the `KeepBest` in `keep`. Any other text or path: a checkpoint elsewhere, of any format, for
                a warm start from another run.
            strict: see `shardproof.load`; so are the other options.
            include: keys to load.
            exclude: keys not to load.
            cast: keys to convert.
            rename: keys with other names in the checkpoint.
            read_once: True if one rank reads each box that several ranks need, and sends it to them; see
                `shardproof.load` for when that is faster.
            group: the process group for `read_once`; None: the default group.
            suspect: True if unsettled suspects count as steps. A suspect comes before the step of its number.

        Returns:
            The step, an `int` with a `report` of the load and the newer steps that were passed over
            (`passed_over`). None if no rank sees a committed step. For a checkpoint elsewhere, the step that
            it records, or 0.

        Raises:
            TypeError: an option has a wrong type.
            ReentrantCallError: a signal handler that interrupted a save or a load called `restore`.
            NotCommittedError: there are committed steps, but none can be read; or `step` is not committed, or
                was removed during the read.
            StorageError: a rank cannot list the run, or sees a newer step than rank 0; or another process
                removes steps faster than this one reads them; or the folder of the run is a checkpoint
                itself.
            ValueError: `step` is "best", and `keep` has no `KeepBest` or several.
            ShardproofError: see `shardproof.load`.
        """
        refuse_inside("restore")
        self._check_group()
        if self._uploader is not None:
            self._uploader.prepare()  # an operation of its own, so not within that of the restore
        with self._rendezvous.operation(f"restore {self._run.location}"):
            # Here, so that a wrong option of one rank fails the restore on all ranks.
            options = LoadOptions(strict, include, exclude, cast, rename, read_once, group)
            check_boolean("suspect", suspect)
            if step == "best":
                step = self._run.best_step(self._keep, self._saver)
            if step is None or step == "latest":
                return self._restore(state, None, suspect, options)
            if hasattr(step, "within"):
                check_location("step", step)
            if isinstance(step, (str, bytes, os.PathLike, Storage)):
                return self._restore_elsewhere(state, step, options)
            if isinstance(step, bool) or not hasattr(type(step), "__index__"):
                raise StructureError(
                    f"restore needs a whole number, a path or a storage as step, not {step!r}"
                )
            return self._restore(state, checked_step(step), suspect, options)

    @guarded("restore")
    def _restore_elsewhere(self, state: Any, path: Location, options: LoadOptions) -> RestoredStep:
        """Loads a checkpoint that is no step of this run."""
        self._saver.wait_for_end()
        self.passed_over, self.last_restore = (), None
        is_same_store = (
            isinstance(path, str)
            and is_url(path)
            and self.root.partition("://")[0] == path.partition("://")[0]
        )
        source = foreign_of(path, self._storage_options if is_same_store else None)
        try:
            self.last_restore = load_from(source, state, self._rendezvous, options)
        except NotCommittedError as error:
            if isinstance(path, str) and not is_url(path) and not os.path.lexists(path):
                raise NotCommittedError(
                    f"{error.message}\nrestore takes step={path!r} as the path of a checkpoint, and nothing "
                    "is there. Pass 'latest', 'best', a whole number, or another path",
                    **error.details,
                ) from error
            raise
        return RestoredStep(self.last_restore.step or 0, self.last_restore)

    @guarded("restore")
    def _restore(
        self, state: Any, step: int | None, suspect: bool, options: LoadOptions
    ) -> RestoredStep | None:
        self._saver.wait_for_end()
        self.last_restore = None
        view = self._run.view()
        restore = Restore(
            view, self._rendezvous, step, suspect, options, self._run.check_tiers, self._run.explained
        )
        try:
            restored = restore.run(state)
        finally:
            self.passed_over = restore.passed_over
            self._run.damaged |= restore.damaged
            self._run.damaged_everywhere |= restore.damaged_everywhere
        if self._uploader is not None:
            self._uploader.begin_round(None if restored is None else restored[0].step)
        if restored is None:
            return None
        folder, self.last_restore = restored
        shares: list[bytes] = []
        if self._rendezvous.rank == 0:
            whole = options.include is None and options.exclude is None
            shares = self._run.confirm(view, folder, whole=whole)
            if step is None and not folder.suspect:
                self._run.warn_of_branch(view, folder.step)
            if not folder.suspect:
                self._run.scrub.prepare()
                self._run.scrub.begin(folder.name)
        tier = (view.within(folder.name).tier if isinstance(view, TieredRun) else view).location
        if self._run.nodes is not None and self._run.copies is not None:
            share = self._run.nodes.group.end_barrier(f"restore {folder}", shares)
            if share:
                self._run.copies.begin(share)
        return RestoredStep(folder.step, self.last_restore, self.passed_over, tier)

    def steps(self) -> list[int]:
        """Committed steps of all tiers, ascending, without suspects.

        Reads manifests and indexes, and of known steps only the ends of the manifests. The list lacks a
        step that `restore` would pass over by them, and the log names it. Does not wait for other ranks.

        Raises:
            StorageError: a tier cannot be listed, or a step cannot be read at the moment.
        """
        return self._run.steps()

    def suspects(self) -> list[int]:
        """Steps with a committed, unsettled suspect, ascending. Lists the storage, as `steps` does."""
        return [folder.step for folder in unsettled_in(self._run.storage)]

    def pin(self, step: int, label: str) -> None:
        """Pins a committed step: retention and ``shardproof prune`` do not remove it. Every rank calls this.

        The pin is a file in the step's folder, so it stays after the program ends. A second pin replaces the
        label.

        Args:
            step: number of the step.
            label: the reason, for people.

        Raises:
            NotCommittedError: the step is not committed.
            StructureError: ranks pin different steps, or with different labels.
            StorageError: the storage failed.
            RankFailure, RankSilent: a rank failed or fell silent.

        >>> import shardproof as sp, tempfile, torch
        >>> checkpointer = sp.Checkpointer(tempfile.mkdtemp(), keep=sp.KeepLatest(1))
        >>> for step in (1, 2, 3):
        ...     _ = checkpointer.save(step, {"w": torch.ones(2)}).result()
        ...     if step == 1:
        ...         checkpointer.pin(1, "baseline")
        >>> checkpointer.steps(), checkpointer.pins()[1].label
        ([1, 3], 'baseline')
        """
        self._pin(step, label)

    def unpin(self, step: int) -> None:
        """Removes the pin of a step, if it has one. Every rank calls this; see `pin`."""
        self._pin(step, None)

    def _pin(self, step: int, label: str | None) -> None:
        refuse_inside("pin")
        self._check_group()
        change_pin(self._run, self._saver, step, label)

    def pins(self) -> dict[int, Pin]:
        """Pinned and committed steps, ascending, with label and time. Lists the storage, as `steps` does."""
        return self._run.pins()

    def settle_suspect(self, step: int, verdict: str) -> None:
        """Stores the verdict on a suspect durably. Every rank calls this; it waits for the current save.

        From then on `restore` does not take the suspect, and retention removes it after the commit of a newer
        step. Without a suspect of that number, the call only logs a warning on rank 0.

        Args:
            step: number of the suspect.
            verdict: any text.

        Raises:
            StructureError: ranks settle different suspects, or with different verdicts.
            StorageError: the storage failed, and the suspect is not settled. If the message says that the
                file is in place, the suspect counts as settled, and a crash of the machine may undo that.
            RankFailure, RankSilent: a rank failed or fell silent. If it was the coordinator, the suspect may
                be settled or not.

        >>> import shardproof as sp, tempfile, torch
        >>> checkpointer = sp.Checkpointer(tempfile.mkdtemp())
        >>> _ = checkpointer.save(7, {"w": torch.ones(2)}, suspect=True).result()
        >>> checkpointer.steps(), checkpointer.suspects()
        ([], [7])
        >>> checkpointer.settle_suspect(7, "persistent fault: node 3, device 1")
        >>> checkpointer.suspects()
        []
        """
        refuse_inside("settle_suspect")
        self._check_group()
        settle_suspect(self._run, self._saver, step, verdict)

    def wait_for_scrub(self, timeout: float | None = None) -> None:
        """Waits until the scrub has read the references of the step that was saved or restored last.

        Only rank 0 scrubs. On other ranks, and without a scrub, this returns at once.

        Args:
            timeout: seconds to wait at most; None: until the scrub ends.

        Raises:
            TimeoutError: the scrub has not ended.

        >>> import shardproof as sp, tempfile, torch
        >>> checkpointer = sp.Checkpointer(tempfile.mkdtemp(), incremental=True)
        >>> for step in (1, 2):
        ...     _ = checkpointer.save(step, {"w": torch.ones(4)}).result()
        >>> checkpointer.wait_for_scrub(timeout=60)
        >>> checkpointer.damage
        ()
        """
        self._run.scrub.wait(timeout)

    def wait_for_uploads(self, timeout: float | None = None) -> None:
        """Waits until the uploads that have begun are over, also those of earlier processes.

        Without a second tier, this returns at once. `PendingSave.durable` waits for the upload of one save.

        Args:
            timeout: seconds to wait at most; None: as long as the uploads make progress.

        Raises:
            TimeoutError: the uploads have not ended.
            ShardproofError: the last upload failed. The next save or restore tries it again.

        >>> import shardproof as sp, tempfile, torch
        >>> near, far = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> _ = sp.Checkpointer(near).save(7, {"w": torch.ones(2)}).result()
        >>> checkpointer = sp.Checkpointer(near, second_tier=far)
        >>> checkpointer.restore({"w": torch.zeros(2)})
        7
        >>> checkpointer.wait_for_uploads(timeout=60)
        >>> sp.Checkpointer(far).steps()
        [7]
        """
        if self._uploader is not None:
            self._uploader.wait_for_all(timeout)

    def wait_for_copies(self, timeout: float | None = None) -> None:
        """Waits until the files of the restored step are on two nodes again, on all ranks.

        After a restore with `replicas` (see `NodeLocal`), files of the step may have one copy, because a node
        was replaced. The ranks copy these files in the background. Without such files, this returns at once.

        Args:
            timeout: seconds to wait at most; None: as long as the ranks make progress.

        Raises:
            TimeoutError: the copies are not made.
            ShardproofError: a copy could not be made. The next restore tries it again.

        >>> import shardproof as sp, tempfile, torch
        >>> checkpointer = sp.Checkpointer(tempfile.mkdtemp(), node_local=sp.NodeLocal(replicas=1))
        >>> _ = checkpointer.save(7, {"w": torch.ones(2)}).result()
        >>> checkpointer.restore({"w": torch.zeros(2)})
        7
        >>> checkpointer.wait_for_copies(timeout=60)
        """
        if self._run.copies is not None:
            self._run.copies.wait(timeout)

    @property
    def damage(self) -> tuple[Damage, ...]:
        """Bytes of the run that the scrub found damaged, oldest first. Empty on all ranks but 0."""
        return self._run.scrub.damage

    def _check_group(self) -> None:
        if self._found_rendezvous:
            check_group(self._rendezvous)


def _check_choice(name: str, value: object, *choices: str | None) -> None:
    if value not in choices:
        *first, last = map(repr, choices)
        raise ValueError(f"{name} is {', '.join(first)} or {last}, not {value!r}")
