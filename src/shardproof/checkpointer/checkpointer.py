"""`Checkpointer`: saves the steps of a run, restores the newest, and keeps a few of them."""

from __future__ import annotations

import logging
import operator
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shardproof import events
from shardproof.checkpointer.damage import Damage
from shardproof.checkpointer.due_saves import DueSaves
from shardproof.checkpointer.nodes import MissingCopies, NodeStorage, NodesView, join_nodes
from shardproof.checkpointer.page_cache import NewestStep
from shardproof.checkpointer.pins import Pin, pinned_steps, remove_pin, write_pin
from shardproof.checkpointer.policies import KeepBest, Retention
from shardproof.checkpointer.preemption import Preemption
from shardproof.checkpointer.restore import Restore
from shardproof.checkpointer.restored_step import RestoredStep
from shardproof.checkpointer.retention import StepFacts, retain
from shardproof.checkpointer.schedules import Schedule
from shardproof.checkpointer.scrub import Scrub
from shardproof.checkpointer.step_folders import StepFolder, parse_step, step_name
from shardproof.checkpointer.step_selection import PassedOver, written_folders
from shardproof.checkpointer.suspects import unsettled_suspects, write_settled
from shardproof.checkpointer.tiers import (
    TieredRun,
    Uploader,
    UploadRequest,
    check_node_local,
    open_tiers,
    tier_of,
)
from shardproof.errors import FormatError, NotCommittedError, StorageError, StructureError
from shardproof.format import MANIFEST_NAME, read_manifest, shard_name
from shardproof.interop import foreign_of
from shardproof.loading import Cast, LoadReport, Options, Patterns, ReadOnce, load_from
from shardproof.reentrance import guarded, refuse_inside
from shardproof.rendezvous import MeetingSequence, Rendezvous, check_deadline, check_group, connect
from shardproof.saving import CheckReplicas, PendingSave, Saver, SaveResult, WhenBusy
from shardproof.storage import LocalStorage, Location, Storage, is_url

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Checkpointer"]

FULL_EVERY = 20
"""Saves. One full save in twenty adds 5 % of the state's bytes to a save on average."""

SCRUB = 64 << 20
"""Bytes a second: a small share of what a disk or a file server reads, and 225 GiB an hour."""

_log = logging.getLogger("shardproof")


class Checkpointer:
    """Saves and restores the steps of one run. All ranks must call the methods together.

    Args:
        root: folder of the run, or a URL such as ``s3://bucket/run``. Each step becomes a folder in it, such
            as ``step-00001000``. A relative path is resolved when the `Checkpointer` is made.
        keep: which committed steps stay; None for all. A save removes the others after its commit. Policies
            combine: ``KeepLatest(3) | KeepEvery(hours=24) | KeepBest("loss")``. The newest step and pinned
            steps stay in any case.
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
        incremental: True to write only chunks whose bytes differ from an earlier step of the run, and to
            refer to that step for the others. Retention keeps files that a kept step refers to. To move such
            a step, copy it with ``shardproof convert --standalone``.
        full_every: at least one of this many `incremental` saves in a row writes every chunk and refers
            to no other step. Damaged bytes then reach at most `full_every` steps, and each step needs fewer
            than `full_every` others. A save that replaces a step without references writes every chunk, too.
            None: no bound, so that one damaged byte may reach every later step of the run.
        scrub: bytes a second at which rank 0 reads the references of the newest step again, in the background
            and from the device. It does so after `incremental` saves and after a restore. It logs damage
            with the file, the bytes and the steps that need them (see `damage`), and no later save refers to
            these steps. If `keep` selects no step that is proved readable, the newest proved step stays, too.
            A step is proved if it has no references, or the scrub has read them since its commit. The scrub
            yields to saves, and ends with the `Checkpointer` or the process. None: no scrub.
        check_replicas: the replicas that a save compares among the ranks: "all", or a "sample" that changes
            with each save; None: none. See `SaveResult.diverged`.
        cache: "newest" to leave the newest step in the page cache of each node, for a restart in place. After
            the commit each rank reads its file again, at most 256 MiB a second, until the next save, and
            only into memory that nothing uses. "auto" does so on local file systems, if a quarter of the
            node's memory stays free. "none" leaves the step on the storage alone.
        every: the schedule of `save_if_due`. Schedules combine: ``Every(steps=500) | Every(minutes=20)``.
        preemption: a save before the scheduler ends the job; see `Preemption`. None: no signal is handled,
            and no time limit is watched.
        mtbf_hours: hours between two failures of the job, on average. After some saves, rank 0 logs a better
            interval once, if the present one is far from it. None: no suggestion.
        then: the second tier: a folder, a URL or a storage for a copy of the run, such as a bucket behind a
            local disk. A save is committed on `root`. Then each rank copies its files to `then` in the
            background. `restore` takes the newest step of both tiers, and each file from the nearest copy.
            None: one tier. See docs/tiers.md.
        keep_then: as `keep`, for `then`. A step that waits for its upload and that `keep_then` keeps stays on
            `root`, too.
        upload_bandwidth: bytes a second that all ranks together send to `then`. None: no bound.
        node_local: True if `root` is a folder on the local disk of each node, which other nodes do not see.
            Each rank writes to its node, and reads what its node lacks from the nodes that have it, over the
            network. All ranks make the `Checkpointer` together. See docs/tiers.md.
        replicas: 1 to keep a copy of each file on a partner node, too, so that a run that loses a node
            restores without `then`. After a restore, copies that were lost are made again in the
            background; see `wait_for_copies`. Needs `node_local`.

    Raises:
        ValueError: an argument has an invalid value.
        RankFailure, RankSilent: with `node_local`, a rank failed or fell silent.

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
        incremental: bool = False,
        full_every: int | None = FULL_EVERY,
        scrub: int | None = SCRUB,
        check_replicas: CheckReplicas | None = None,
        cache: Literal["auto", "newest", "none"] = "auto",
        every: Schedule | None = None,
        preemption: Preemption | None = None,
        mtbf_hours: float | None = None,
        then: Location | None = None,
        keep_then: Retention | None = None,
        upload_bandwidth: int | None = None,
        node_local: bool = False,
        replicas: int = 0,
    ) -> None:
        if cache not in ("auto", "newest", "none"):
            raise ValueError(f"cache is 'auto', 'newest' or 'none', not {cache!r}")
        if when_busy not in ("wait", "skip"):
            raise ValueError(f"when_busy is 'wait' or 'skip', not {when_busy!r}")
        if snapshot not in ("fence", "stage"):
            raise ValueError(f"snapshot is 'fence' or 'stage', not {snapshot!r}")
        if check_replicas not in (None, "sample", "all"):
            raise ValueError(f"check_replicas is 'sample', 'all' or None, not {check_replicas!r}")
        if full_every is not None and (
            isinstance(full_every, bool) or not isinstance(full_every, int) or full_every < 1
        ):
            raise ValueError(
                f"full_every is a whole number of saves, at least 1, or None, not {full_every!r}"
            )
        if scrub is not None and (isinstance(scrub, bool) or not isinstance(scrub, int) or scrub < 1):
            raise ValueError(f"scrub is a whole number of bytes a second, at least 1, or None, not {scrub!r}")
        for name, policy in (("keep", keep), ("keep_then", keep_then)):
            if policy is not None and (isinstance(policy, type) or not isinstance(policy, Retention)):
                raise ValueError(f"{name} is a policy such as KeepLatest(3), or None, not {policy!r}")
        check_deadline(rendezvous, deadline)
        self.root = os.fsdecode(root) if isinstance(root, (str, bytes, os.PathLike)) else root.location
        self.last_restore: LoadReport | None = None
        """Report of the last `restore`."""
        self.passed_over: tuple[PassedOver, ...] = ()
        """Newer steps that the last `restore` passed over, with the reasons; newest first."""
        self._keep = keep
        self._damaged: set[int] = set()
        """Steps that a restore passed over as damaged. A save of one of them replaces it."""
        first, second = open_tiers(root, then, keep_then, upload_bandwidth, storage_options)
        check_node_local(first, node_local, replicas)
        self._rendezvous = rendezvous or connect(deadline=deadline)
        self._found_rendezvous = rendezvous is None
        self._nodes: NodeStorage | None = None
        self._copies: MissingCopies | None = None
        if node_local and isinstance(first, LocalStorage):
            self._nodes = NodeStorage(join_nodes(self._rendezvous, first, replicas))
            self._copies = MissingCopies(self._nodes, self._rendezvous)
        self._storage: Storage = first if self._nodes is None else self._nodes
        self._runs: list[Storage] = [self._storage] if second is None else [self._storage, second]
        """The run in each tier, nearest first."""
        self._storage_options = storage_options
        self._facts = StepFacts(self._storage)
        self._when_busy = when_busy
        self._stage_all = snapshot == "stage"
        self._incremental = incremental
        self._full_every = full_every
        self._check_replicas = check_replicas
        self._newest = (
            NewestStep(drop_older=not incremental, only_if_cheap=cache == "auto")
            if cache != "none" and isinstance(first, LocalStorage)
            else None
        )
        self._saver = Saver(self._rendezvous, host_memory_budget=host_memory_budget)
        self._due = DueSaves(every, preemption, mtbf_hours, self._rendezvous, self._storage.location)
        self._scrub = Scrub(self._storage, scrub if incremental else None, _is_saving(self._saver))
        if self._nodes is not None and incremental and scrub is not None and self._rendezvous.rank == 0:
            _log.warning(
                "%s: there is no scrub with node_local=True, because rank 0 does not have all files. Run "
                "`shardproof doctor FOLDER --scrub` on each node, and pass scrub=None",
                self._storage.location,
            )
        weakref.finalize(self, self._scrub.stop)
        self._uploader: Uploader | None = None
        if second is not None:
            self._uploader = Uploader(
                self._storage, second, self._rendezvous, keep_then, upload_bandwidth, self._damaged
            )

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
            overwrite: True to replace the step if it is committed already.
            when_busy: for this save. None: that of the `Checkpointer`, or "wait" if `suspect`.
            suspect: True if validation of this step failed (see `shardproof.rerun`). The save writes all
                chunks to the folder ``suspect-00001000``, and replaces a suspect of that number. `restore`
                takes a suspect only with ``suspect=True``. Retention removes it after `settle_suspect` and
                the commit of a newer step.

        Returns:
            The pending save. A failure in the background is logged at once. Its `result` raises the
            failure; if the program does not call `result`, the next `save` or `wait` raises it.

        Raises:
            ShardproofError: see `shardproof.save`; or the failure of the previous save.
        """
        self._check_group()
        number, folder = _named(step, suspect)
        if when_busy is None:
            when_busy = "wait" if suspect else self._when_busy
        if self._rendezvous.rank == 0:
            self._scrub.prepare()
        if self._newest is not None:
            self._newest.stop()
        upload = None
        if self._uploader is not None and not suspect:
            self._uploader.prepare()
            upload = UploadRequest(overwrite or number in self._damaged)
        with self._phase(number, folder, "blocked"):
            pending = self._saver.begin(
                self._storage.within(folder),
                state,
                step=number,
                metadata=metadata,
                overwrite=overwrite or suspect or number in self._damaged,
                when_busy=when_busy,
                stage_all=self._stage_all,
                base=partial(self._base_of, number) if self._incremental and not suspect else None,
                full_every=self._full_every,
                check_replicas=self._check_replicas,
                after=None if suspect else partial(self._after_commit, upload),
            )
        if upload is not None and self._uploader is not None:
            pending.wait_for_upload_by(partial(self._uploader.wait, upload))
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
            RankSilent: the ranks could not agree on a call.
            ShardproofError: see `save`. If the save before the end of the program failed, the next call saves
                again.

        >>> import shardproof as sp, tempfile, torch
        >>> checkpointer = sp.Checkpointer(tempfile.mkdtemp(), every=sp.Every(steps=2))
        >>> for step in range(1, 6):
        ...     _ = checkpointer.save_if_due(step, {"w": torch.ones(2)}, force=step == 5)
        >>> checkpointer.wait()
        >>> checkpointer.steps()
        [2, 4, 5]
        """
        if not self._due.is_due(step) and not force:
            return None
        if self._due.is_preempted:
            self._due.settle(self.wait)
        when_busy: WhenBusy | None = "wait" if force or self._due.is_preempted else None
        pending = self.save(step, state, metadata=metadata, overwrite=overwrite, when_busy=when_busy)
        return self._due.began(pending)

    def _after_commit(
        self, upload: UploadRequest | None, committed: SaveResult, progress: Callable[[int, int], None]
    ) -> None:
        """On each rank, in the thread of saves: upload, page cache; on rank 0 also retention and scrub."""
        if self._nodes is None:
            self._tidy(upload, committed, progress)
            return
        meetings = self._nodes.group.meetings
        meetings.arrive()

        def moved(done: int, total: int) -> None:
            progress(done, total)
            meetings.progress(done, total)

        try:
            self._tidy(upload, committed, moved)
        finally:
            self._nodes.group.end_together(f"save {committed.attempt}")

    def _tidy(
        self, upload: UploadRequest | None, committed: SaveResult, progress: Callable[[int, int], None]
    ) -> None:
        assert committed.step is not None
        self._due.committed(committed.seconds)
        if upload is not None and self._uploader is not None:
            self._uploader.committed(upload, committed.step, committed.attempt)
        self._damaged.discard(committed.step)
        folder = self._storage.within(step_name(committed.step))
        if isinstance(folder, NodeStorage):
            folder = folder.own()
        if self._newest is not None and isinstance(folder, LocalStorage):
            self._newest.committed(folder, shard_name(self._rendezvous.rank, committed.attempt))
        if self._rendezvous.rank:
            return
        self._facts.forget(committed.step)
        if self._keep is not None:
            with self._phase(committed.step, step_name(committed.step), "retain"):
                retain(
                    self._storage,
                    self._keep,
                    committed.step,
                    self._is_damaged,
                    lambda step: self._scrub.is_proved(step_name(step)),
                    progress,
                    unconfirmed=lambda step: self._storage.within(step_name(step)) in self._saver.unconfirmed,
                    facts=self._facts,
                    protected=set if self._uploader is None else self._uploader.protected,
                )
        self._scrub.begin(step_name(committed.step))

    def _base_of(self, step: Any) -> Storage | None:
        """The newest confirmed and undamaged step before this one (note "One line of steps")."""
        steps = (parse_step(name) for name in self._storage.folders())
        for earlier in sorted((one for one in steps if one is not None and one < step), reverse=True):
            folder = self._storage.within(step_name(earlier))
            try:
                distrusted = self._is_damaged(earlier) or folder in self._saver.unconfirmed
                if not distrusted and folder.size(MANIFEST_NAME) is not None and self._has_copies(folder):
                    return folder
            except StorageError as error:
                _log.warning(
                    "%s: step %s does not build on step %s: %s", self._storage.location, step, earlier, error
                )
        return None

    def _has_copies(self, folder: Storage) -> bool:
        """True if every file of a step has as many copies as `replicas` asks for."""
        if self._nodes is None or not self._nodes.group.replicas:
            return True
        try:
            return self._nodes.has_copies(folder.folder, read_manifest(folder))
        except (FormatError, NotCommittedError):
            return False

    def _is_damaged(self, step: int) -> bool:
        """True if a restore or the scrub found a committed step damaged."""
        return step in self._damaged or self._scrub.is_damaged(step_name(step))

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
        read_once: ReadOnce = False,
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
            read_once: True if one rank reads each box that several ranks need, and sends it to them.
            group: the process group for `read_once`; None: the default group.
            suspect: True if unsettled suspects count as steps. A suspect comes before the step of its number.

        Returns:
            The step, an `int` with a `report` of the load and the newer steps that were passed over
            (`passed_over`). None if no rank sees a committed step. For a checkpoint elsewhere, the step that
            it records, or 0.

        Raises:
            ReentrantCallError: a signal handler that interrupted a save or a load called `restore`.
            NotCommittedError: there are committed steps, but none can be read; or `step` is not committed, or
                was removed during the read.
            StorageError: a rank cannot list the run, or sees a newer step than rank 0; or another process
                removes steps faster than this one reads them.
            ValueError: `step` is "best", and `keep` has no `KeepBest` or several.
            ShardproofError: see `shardproof.load`.
        """
        refuse_inside("restore")
        self._check_group()
        options = Options(strict, include, exclude, cast, rename, read_once, group)
        if self._uploader is not None:
            self._uploader.prepare()  # an operation of its own, so not within that of the restore
        with self._rendezvous.operation(f"restore {self._storage.location}"):
            if step == "best":
                step = self._best_step()
            if step is None or step == "latest":
                return self._restore(state, None, suspect, options)
            if isinstance(step, (str, bytes, os.PathLike, Storage)):
                return self._restore_elsewhere(state, step, options)
            if isinstance(step, bool) or not hasattr(type(step), "__index__"):
                raise StructureError(
                    f"restore needs a whole number, a path or a storage as step, not {step!r}"
                )
            return self._restore(state, operator.index(step), suspect, options)

    def _best_step(self) -> int | None:
        """The step with the best metric, as rank 0 sees it; None if there is no committed step."""
        policies = KeepBest.within(self._keep)
        if len(policies) != 1:
            raise ValueError(
                f"restore(step='best') needs one KeepBest in keep=, for example KeepBest('loss'), and keep= "
                f"has {len(policies)}"
            )
        best = KeepBest(policies[0].metric, 1, policies[0].mode)
        self._saver.settle()  # it may be the best

        def decide(posts: Sequence[bytes]) -> bytes:
            steps = [step for step in self.steps() if not self._is_damaged(step)]
            facts = self._facts if self._uploader is None else StepFacts(self._view())
            found, _ = facts.select(best, steps)
            if steps and not found:
                raise NotCommittedError(
                    f"{self._storage.location}: no committed step has a finite {best.metric!r} in its "
                    "metadata. Save it with metadata=, or restore another step"
                )
            return msgspec.msgpack.encode(max(found, default=None))

        meetings = MeetingSequence(self._rendezvous, f"restore {self._storage.location}")
        return msgspec.msgpack.decode(meetings.meet("choose", bytes, decide), type=int | None)

    def _options_for(self, path: Location) -> Mapping[str, Any] | None:
        """The options of this run's store, for a URL of the same store."""
        same = (
            isinstance(path, str)
            and is_url(path)
            and self.root.partition("://")[0] == path.partition("://")[0]
        )
        return self._storage_options if same else None

    @guarded("restore")
    def _restore_elsewhere(self, state: Any, path: Location, options: Options) -> RestoredStep:
        """Loads a checkpoint that is no step of this run."""
        self._saver.settle()
        self.passed_over, self.last_restore = (), None
        self.last_restore = load_from(
            foreign_of(path, self._options_for(path)),
            state,
            self._rendezvous,
            options,
        )
        return RestoredStep(self.last_restore.step or 0, self.last_restore)

    @guarded("restore")
    def _restore(self, state: Any, step: int | None, suspect: bool, options: Options) -> RestoredStep | None:
        self._saver.settle()
        self.last_restore = None
        run = self._view()
        restore = Restore(run, self._rendezvous, step, suspect, options)
        try:
            restored = restore.run(state)
        finally:
            self.passed_over = restore.passed_over
            self._damaged |= restore.damaged
        if self._uploader is not None:
            self._uploader.begin_round(None if restored is None else restored[0].step)
        if restored is None:
            return None
        folder, self.last_restore = restored
        shares: list[bytes] = []
        if self._rendezvous.rank == 0:
            shares = self._confirm(run, folder, whole=options.include is None and options.exclude is None)
            if not folder.suspect:
                self._scrub.prepare()
                self._scrub.begin(folder.name)
        tier = tier_of(run, folder.name).location
        if self._nodes is not None and self._copies is not None:
            share = self._nodes.group.end_together(f"restore {folder}", shares)
            if share:
                self._copies.begin(share)
        return RestoredStep(folder.step, self.last_restore, self.passed_over, tier)

    def _view(self) -> Storage:
        """The run as all tiers hold it together, for reading."""
        if self._nodes is not None:
            return self._nodes.view(self._runs[1] if len(self._runs) > 1 else None)
        return TieredRun(self._runs) if len(self._runs) > 1 else self._storage

    def _confirm(self, run: Storage, folder: StepFolder, *, whole: bool) -> list[bytes]:
        """Flushes the restored step. If the load read it `whole`, its commit is confirmed.

        Returns:
            What each rank has to do for the missing copies of the step; empty if there are none.
        """
        storage = run.within(folder.name)
        shares: list[bytes] = []
        try:
            if self._nodes is not None and self._copies is not None and isinstance(storage, NodesView):
                text = self._nodes.confirm(storage)
                if text is not None:
                    shares = self._copies.plan(folder.name, text, storage.choice.left_out)
            storage.flush(MANIFEST_NAME)
        except StorageError as error:
            if error.details.get("missing"):
                return []  # another process removed the step after it was read
            self._saver.unconfirmed.add(storage)
            _log.warning(
                "%s: %s was restored, and every byte that was read is verified, but it is not known to be "
                "durable: %s. No incremental save refers to it and retention does not count it until a "
                "restore can flush it or it is saved again",
                self._storage.location,
                folder,
                error,
            )
        else:
            if whole:
                self._saver.unconfirmed.confirm(storage)
        return shares

    def steps(self) -> list[int]:
        """Committed steps of all tiers, ascending, without suspects.

        Lists the storage; does not wait for other ranks.
        """
        found = [written_folders(run, suspect=False) for run in self._runs]
        return sorted({folder.step for folders in found for folder, there in folders.items() if there})

    def suspects(self) -> list[int]:
        """Steps with a committed, unsettled suspect, ascending. Lists the storage, as `steps` does."""
        return [folder.step for folder in unsettled_suspects(self._storage)]

    def pin(self, step: int, label: str) -> None:
        """Marks a committed step to stay, whatever `keep` selects. Every rank calls this.

        Retention and ``shardproof prune`` do not remove a pinned step. The mark is a file in the step's
        folder, so it outlives the program. A second pin replaces the label.

        Args:
            step: number of the step.
            label: why it stays.

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
        self._change_pin(step, label)

    def unpin(self, step: int) -> None:
        """Removes the pin of a step, if it has one. Every rank calls this; see `pin`."""
        self._change_pin(step, None)

    def pins(self) -> dict[int, Pin]:
        """Pinned and committed steps, ascending, with label and time. Lists the storage, as `steps` does."""
        return dict(sorted(pin for run in reversed(self._runs) for pin in pinned_steps(run).items()))

    def _change_pin(self, step: int, label: str | None) -> None:
        refuse_inside("pin")
        self._check_group()
        operation = f"pin {self._storage.location}"

        def describe() -> bytes:
            number, _ = _named(step, suspect=False)
            if not isinstance(number, int) or isinstance(number, bool):
                raise StructureError(f"pin needs a whole number as step, not {step!r}")
            if label is not None and not isinstance(label, str):
                raise StructureError(f"pin needs a text as label, not {label!r}")
            return msgspec.msgpack.encode((number, label))

        def decide(posts: Sequence[bytes]) -> bytes:
            other = next((rank for rank, post in enumerate(posts) if post != posts[0]), None)
            if other is not None:
                raise StructureError(
                    f"{self._storage.location}: rank 0 and rank {other} pin different steps, or with "
                    "different labels; nothing was changed. Pass the same arguments on all ranks",
                    ranks=[0, other],
                )
            number, text = msgspec.msgpack.decode(posts[0], type=tuple[int, str | None])
            for run in self._holders(number):
                if text is None:
                    remove_pin(run, number)
                else:
                    write_pin(run, number, text)
            return b""

        with self._rendezvous.operation(operation):
            self._saver.settle()  # its retention may remove the step
            MeetingSequence(self._rendezvous, operation).meet("pin", describe, decide)

    def _holders(self, step: int) -> list[Storage]:
        """The tiers in which a step is committed; the first one without any."""
        name = f"{step_name(step)}/{MANIFEST_NAME}"
        return [run for run in self._runs if run.size(name) is not None] or self._runs[:1]

    def settle_suspect(self, step: int, verdict: str) -> None:
        """Stores the verdict on a suspect durably. Every rank calls this; it waits for the current save.

        From then on `restore` does not take the suspect, and retention removes it after the commit of a newer
        step. Without a suspect of that number, rank 0 logs a warning, and nothing else happens.

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
        _, folder = _named(step, suspect=True)
        meeting = MeetingSequence(self._rendezvous, f"settle {self._storage.location}")

        def decide(posts: Sequence[bytes]) -> bytes:
            verdicts = [msgspec.msgpack.decode(post, type=tuple[str, str]) for post in posts]
            other = next((rank for rank, one in enumerate(verdicts) if one != verdicts[0]), None)
            if other is not None:
                raise StructureError(
                    f"{self._storage.location}: rank 0 settles {': '.join(verdicts[0])}, but rank {other} "
                    f"settles {': '.join(verdicts[other])}; nothing was settled. Pass the same verdict on "
                    "all ranks",
                    ranks=[0, other],
                )
            if not write_settled(self._storage.within(folder), verdict):
                _log.warning(
                    "%s/%s: nothing to settle: there is no committed suspect", self._storage.location, folder
                )
            return b""

        with self._rendezvous.operation(f"settle {self._storage.location}"):
            self._saver.settle()
            meeting.meet("settle", lambda: msgspec.msgpack.encode(_settling(step, verdict)), decide)

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
        self._scrub.wait(timeout)

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
        >>> checkpointer = sp.Checkpointer(near, then=far)
        >>> checkpointer.restore({"w": torch.zeros(2)})
        7
        >>> checkpointer.wait_for_uploads(timeout=60)
        >>> sp.Checkpointer(far).steps()
        [7]
        """
        if self._uploader is not None:
            self._uploader.settle(timeout)

    def wait_for_copies(self, timeout: float | None = None) -> None:
        """Waits until the files of the restored step are on two nodes again, on all ranks.

        After a restore with `replicas`, files of the step may have one copy, because a node was replaced. The
        ranks copy these files in the background. Without such files, this returns at once.

        Args:
            timeout: seconds to wait at most; None: as long as the ranks make progress.

        Raises:
            TimeoutError: the copies are not made.
            ShardproofError: a copy could not be made. The next restore tries it again.

        >>> import shardproof as sp, tempfile, torch
        >>> checkpointer = sp.Checkpointer(tempfile.mkdtemp(), node_local=True, replicas=1)
        >>> _ = checkpointer.save(7, {"w": torch.ones(2)}).result()
        >>> checkpointer.restore({"w": torch.zeros(2)})
        7
        >>> checkpointer.wait_for_copies(timeout=60)
        """
        if self._copies is not None:
            self._copies.wait(timeout)

    @property
    def damage(self) -> tuple[Damage, ...]:
        """Bytes of the run that the scrub found damaged, oldest first. Empty on all ranks but 0."""
        return self._scrub.damage

    def _check_group(self) -> None:
        if self._found_rendezvous:
            check_group(self._rendezvous)

    def _phase(self, step: Any, folder: str, name: str) -> events.Phase:
        number = step if isinstance(step, int) and not isinstance(step, bool) else None
        rank, world_size = self._rendezvous.rank, self._rendezvous.world_size
        operation = f"save {self._storage.location}/{folder}"
        return events.phase(operation, name, rank=rank, world_size=world_size, step=number)


def _is_saving(saver: Saver) -> Callable[[], bool]:
    """`Saver.is_saving` by a weak reference: a pass of the scrub must not keep its `Checkpointer` alive."""
    reference = weakref.ref(saver)

    def ask() -> bool:
        alive = reference()
        return alive is not None and alive.is_saving()

    return ask


def _named(step: Any, suspect: bool) -> tuple[Any, str]:
    """The step and its folder. The save refuses an invalid step, so that every rank raises the error."""
    try:
        number = operator.index(step)
        return (step if isinstance(step, bool) else number), StepFolder(number, suspect).name
    except (TypeError, ValueError):
        return repr(step), "invalid-step"


def _settling(step: Any, verdict: Any) -> tuple[str, str]:
    """The folder and the verdict that a rank reports; all ranks must report the same."""
    number, folder = _named(step, suspect=True)
    if not isinstance(number, int):
        raise StructureError(f"settle_suspect needs a whole number as step, not {step!r}")
    if not isinstance(verdict, str):
        raise StructureError(f"settle_suspect needs a text as verdict, not {verdict!r}")
    return folder, verdict
