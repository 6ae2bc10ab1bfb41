"""The steps of a run: save, restore the newest, keep a few."""

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
from shardproof.checkpointer.page_cache import NewestStep
from shardproof.checkpointer.restored_step import RestoredStep
from shardproof.checkpointer.retention import Retention, retain
from shardproof.checkpointer.scrub import Scrub
from shardproof.checkpointer.step_folders import StepFolder, parse_step, step_name
from shardproof.checkpointer.step_selection import (
    KEEP_MORE,
    MOST_TRIES,
    Chosen,
    Failed,
    PassedOver,
    check_folder,
    choose_after,
    written_folders,
)
from shardproof.checkpointer.suspects import unsettled_suspects, write_settled
from shardproof.checkpointer.views import RestoreReport, check_damage, check_reports, report_view
from shardproof.errors import (
    KeyMismatchError,
    NotCommittedError,
    ShardproofError,
    StorageError,
    StructureError,
)
from shardproof.format import MANIFEST_NAME, Manifest, shard_name
from shardproof.loading import UNREADABLE, Cast, LoadReport, Options, Patterns, ReadOnce, load_from
from shardproof.reentrance import guarded, refuse_inside
from shardproof.rendezvous import MeetingSequence, Rendezvous, check_deadline, check_group, connect
from shardproof.saving import CheckReplicas, PendingSave, Saver, SaveResult, WhenBusy
from shardproof.storage import LocalStorage, StrOrBytesPath

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Checkpointer"]

FULL_EVERY = 20
"""Saves. Writing in full then adds a twentieth of the state's bytes to a save on average."""

SCRUB = 64 << 20
"""Bytes a second: little beside what a disk or a file server gives, and 225 GiB in an hour."""

_REMOVED = "it was removed or replaced while it was read"

_log = logging.getLogger("shardproof")


class Checkpointer:
    """Saves and restores the steps of one run. Every rank makes one, and calls its methods together.

    Args:
        root: folder of the run; each step becomes the folder ``step-00001000`` in it. A relative path is
            taken from the working directory of now.
        keep: which committed steps stay; None for all. Others are removed after a newer one is committed.
        rendezvous: where the ranks meet; found by itself when None (the process group's store, torchrun's,
            or none).
        deadline: seconds that a rank may be silent before all ranks fail with `RankSilent`. It bounds each
            wait for another rank, and the time to reach the store. It does not bound a save or restore as a
            whole: a rank that reports progress is waited for. It holds for all who share the rendezvous that
            is found. None: the deadline of that rendezvous (300 s unless set). Not together with
            `rendezvous`, which has its own.
        when_busy: what `save` does while the save before it is still under way: wait for it, or skip.
        snapshot: "fence" reads parameters and optimizer state while training goes on, and has the next
            step of an optimizer wait until what is left of them is copied; "stage" copies everything before
            `save` returns. Whatever else is in the state is copied at once either way.
        host_memory_budget: bytes of copies that may wait to be written, on this rank. When it is used up,
            training waits for the writer. None: a quarter of what is available, divided by the node's ranks.
        incremental: whether chunks that an earlier step of the run has, bit for bit, are referred to there
            and not written again. Retention keeps what a kept step refers to; to move such a step, copy it
            with ``shardproof convert --standalone``.
        full_every: of so many `incremental` saves in a row, at least one writes every chunk and refers to no
            other step. Damaged bytes so reach at most `full_every` steps, and each step needs fewer than
            `full_every` others. A save that replaces a step without references writes every chunk, too. None:
            no bound, so that one damaged byte may reach every later step of the run.
        scrub: bytes a second at which rank 0 reads again, from the device and in the background, what the
            newest step of `incremental` saves refers to, or the step that was restored. Damage that it finds
            is logged with the file, the bytes and the steps that need them (see `damage`), and no later save
            refers to these steps. Where no step that `keep` selects is proved readable, the newest one that
            is stays, too: without references, or with references that the scrub has read since its commit.
            It yields to saves, and ends with the `Checkpointer` or the process. None: nothing is read again.
        check_replicas: whether a save compares what ranks hold of the same boxes: "all" of it, or a "sample"
            that moves on from save to save; None: neither. See `SaveResult.diverged`.
        cache: "newest" to leave the newest step in the page cache of each node, for a restart in place. After
            the commit each rank reads its file again, at most 256 MiB a second, until the next save, and
            only into memory that nothing uses. "auto" does so on local file systems, if a quarter of the
            node's memory stays free. "none" leaves the step on the storage alone.

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
        root: StrOrBytesPath,
        *,
        keep: Retention | None = None,
        rendezvous: Rendezvous | None = None,
        deadline: float | None = None,
        when_busy: WhenBusy = "wait",
        snapshot: Literal["fence", "stage"] = "fence",
        host_memory_budget: int | None = None,
        incremental: bool = False,
        full_every: int | None = FULL_EVERY,
        scrub: int | None = SCRUB,
        check_replicas: CheckReplicas | None = None,
        cache: Literal["auto", "newest", "none"] = "auto",
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
        check_deadline(rendezvous, deadline)
        self.root = os.fsdecode(root)
        self.last_restore: LoadReport | None = None
        """What the last `restore` loaded."""
        self.passed_over: tuple[PassedOver, ...] = ()
        """Newer steps that the last `restore` could not take, and why; newest first."""
        self._keep = keep
        self._damaged: set[int] = set()
        """Steps that a restore passed over as damaged; saving one of them again replaces it."""
        self._storage = LocalStorage(root)
        self._rendezvous = rendezvous or connect(deadline=deadline)
        self._found_rendezvous = rendezvous is None
        self._when_busy = when_busy
        self._stage_all = snapshot == "stage"
        self._incremental = incremental
        self._full_every = full_every
        self._check_replicas = check_replicas
        self._newest = (
            NewestStep(drop_older=not incremental, only_if_cheap=cache == "auto") if cache != "none" else None
        )
        self._saver = Saver(self._rendezvous, host_memory_budget=host_memory_budget)
        self._scrub = Scrub(self._storage, scrub if incremental else None, _is_saving(self._saver))
        weakref.finalize(self, self._scrub.stop)

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
        """Begins to save a step, and returns once training may go on.

        Whatever changes after that is not in the checkpoint. Code that writes to parameters or optimizer
        state by other ways than an optimizer's `step` or a load calls `fence` first.

        Where the state has the structure of the save before it, which succeeded, and changes in optimizers'
        steps alone (but for 1 MiB), this does not wait for other ranks: they agree in the background, before
        the next step. What fails on another rank, or because the step is committed already, is then a
        failure in the background. `when_busy="skip"`, "stage", `incremental` and `check_replicas` do wait.

        Args:
            step: not negative; names the folder.
            state: see `shardproof.save`.
            metadata: plain data, kept in the manifest.
            overwrite: whether to replace the step if it is committed already.
            when_busy: for this save; None: as the `Checkpointer` was told, and to wait if `suspect`.
            suspect: whether validation of this step failed (see `shardproof.rerun`). It goes into the folder
                ``suspect-00001000``, whole, in place of the suspect of that number that may be there.
                `restore` takes it only if asked to, and it stays until `settle_suspect` was called and a
                newer step is committed.

        Returns:
            The save under way. A failure in the background is logged at once and is raised by its
            `result`; if nobody asks, by the next `save` or `wait`.

        Raises:
            ShardproofError: see `shardproof.save`; or why the save before this one failed.
        """
        self._check_group()
        number, folder = _named(step, suspect)
        if when_busy is None:
            when_busy = "wait" if suspect else self._when_busy
        if self._rendezvous.rank == 0:
            self._scrub.prepare()
        if self._newest is not None:
            self._newest.stop()
        with self._phase(number, folder, "blocked"):
            return self._saver.begin(
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
                after=None if suspect else self._after_commit,
            )

    def fence(self) -> None:
        """Returns when parameters and optimizer state may be written to by any code.

        This copies what the save under way has not written yet. If the ranks have not agreed on the save,
        it waits for that, within the deadlines of their meetings. Optimizers and loads do this by themselves.
        Without a save under way it does nothing. A write to parameters or optimizer state without it fails
        the save. docs/snapshots.md lists the ways to write, and the writes that do not show.
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

    def wait_for_scrub(self, timeout: float | None = None) -> None:
        """Waits until the scrub has read what the newest step refers to that was saved or restored.

        Local: only rank 0 scrubs; on the others, and without a scrub, this returns at once.

        Args:
            timeout: seconds to wait at most; None: as long as it takes.

        Raises:
            TimeoutError: the scrub goes on.

        >>> import shardproof as sp, tempfile, torch
        >>> checkpointer = sp.Checkpointer(tempfile.mkdtemp(), incremental=True)
        >>> for step in (1, 2):
        ...     _ = checkpointer.save(step, {"w": torch.ones(4)}).result()
        >>> checkpointer.wait_for_scrub(timeout=60)
        >>> checkpointer.damage
        ()
        """
        self._scrub.wait(timeout)

    @property
    def damage(self) -> tuple[Damage, ...]:
        """Bytes of the run that the scrub found damaged, oldest first. Empty on all ranks but 0."""
        return self._scrub.damage

    def _base_of(self, step: Any) -> LocalStorage | None:
        """The newest committed step before this one (see note "One line of steps").

        Damaged steps are left out, and those whose commit is not confirmed.
        """
        steps = (parse_step(name) for name in self._storage.folders())
        for earlier in sorted((one for one in steps if one is not None and one < step), reverse=True):
            folder = self._storage.within(step_name(earlier))
            try:
                distrusted = self._is_damaged(earlier) or folder in self._saver.unconfirmed
                if not distrusted and folder.size(MANIFEST_NAME) is not None:
                    return folder
            except StorageError as error:
                _log.warning(
                    "%s: step %s does not build on step %s: %s", self._storage.location, step, earlier, error
                )
        return None

    def _after_commit(self, committed: SaveResult, progress: Callable[[int, int], None]) -> None:
        assert committed.step is not None
        self._damaged.discard(committed.step)
        if self._newest is not None:
            folder = self._storage.within(step_name(committed.step))
            self._newest.committed(folder, shard_name(self._rendezvous.rank, committed.attempt))
        if self._rendezvous.rank:
            return
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
                )
        self._scrub.begin(step_name(committed.step))

    def _is_damaged(self, step: int) -> bool:
        """Whether a committed step was passed over as damaged, or the scrub found bytes of it damaged."""
        return step in self._damaged or self._scrub.is_damaged(step_name(step))

    def _phase(self, step: Any, folder: str, name: str) -> events.Phase:
        number = step if isinstance(step, int) and not isinstance(step, bool) else None
        rank, world_size = self._rendezvous.rank, self._rendezvous.world_size
        operation = f"save {self._storage.location}/{folder}"
        return events.phase(operation, name, rank=rank, world_size=world_size, step=number)

    def steps(self) -> list[int]:
        """Committed steps, ascending, without suspects. Local: asks the storage, meets nobody."""
        folders = written_folders(self._storage, suspect=False)
        return sorted(folder.step for folder, there in folders.items() if there)

    def suspects(self) -> list[int]:
        """Steps with a committed suspect that is not settled, ascending. Local, as `steps`."""
        return [folder.step for folder in unsettled_suspects(self._storage)]

    def settle_suspect(self, step: int, verdict: str) -> None:
        """Notes durably what came of a suspect. Called by every rank; waits for the save under way.

        From then on `restore` does not take it, and retention removes it once a newer step is committed. If
        there is no suspect of that number, this is said in the log, and nothing else happens.

        Args:
            step: of the suspect.
            verdict: for people.

        Raises:
            StructureError: ranks settle different suspects, or with different verdicts.
            StorageError: the storage failed; the suspect is as it was, unless the text says that the file is
                in place: then it counts as settled, and a crash of the machine may undo that.
            RankFailure, RankSilent: some rank failed or fell silent. If that was the coordinator, the suspect
                may be settled or not.

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
            said = [msgspec.msgpack.decode(post, type=tuple[str, str]) for post in posts]
            other = next((rank for rank, one in enumerate(said) if one != said[0]), None)
            if other is not None:
                raise StructureError(
                    f"{self._storage.location}: rank 0 settles {': '.join(said[0])}, and rank {other} "
                    f"{': '.join(said[other])}; nothing was settled",
                    ranks=[0, other],
                )
            if not write_settled(self._storage.within(folder), verdict):
                _log.warning(
                    "%s/%s: nothing to settle: no suspect is committed there", self._storage.location, folder
                )
            return b""

        with self._rendezvous.operation(f"settle {self._storage.location}"):
            self._saver.settle()
            meeting.meet("settle", lambda: msgspec.msgpack.encode(_settling(step, verdict)), decide)

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
        suspect: bool = False,
    ) -> RestoredStep | None:
        """Loads the newest committed and readable step, into whatever layout the state has now.

        A step that is damaged is passed over for the next older one, and `passed_over` says why. A step that
        is whole but does not fit the state is an error, never passed over; so is one that cannot be had just
        now (no permission, a stale file handle). The newest is the one with the highest number.

        A step that another process removes or replaces while it is read is no error: the newest step is taken
        again, at most 16 times.

        Rank 0 flushes the step that was loaded: its save may have failed or died before it was durable. If
        that fails, a warning says so, and neither retention nor incremental saves rely on the step.

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
            suspect: whether suspects that are not settled count as steps, too. Of one number, the suspect is
                taken.

        Returns:
            The step, an `int` that also says what was loaded (`report`) and which newer steps were passed
            over and why (`passed_over`). None if no rank sees a committed step.

        Raises:
            ReentrantCallError: a signal handler called it that interrupted a save or a load.
            NotCommittedError: there are committed steps, but none can be read; or `step` is not committed, or
                was removed while it was read.
            StorageError: a rank cannot look at the run, or sees a newer step than rank 0; or steps are
                removed faster than they are read.
            ShardproofError: see `shardproof.load`.
        """
        refuse_inside("restore")
        self._check_group()
        options = Options(strict, include, exclude, cast, rename, read_once, group)
        with self._rendezvous.operation(f"restore {self._storage.location}"):
            return self._restore(state, step, suspect, options)

    @guarded("restore")
    def _restore(self, state: Any, step: int | None, suspect: bool, options: Options) -> RestoredStep | None:
        self._saver.settle()
        self.passed_over = ()
        self.last_restore = None
        overwritten: StepFolder | None = None
        untouched: set[str] = set()  # by every step that began to overwrite, on this rank
        removed: list[StepFolder] = []  # or replaced, while they were read
        failed: Failed | None = None
        while True:
            try:
                chosen = self._choose(step, suspect, failed)
                if failed is not None:
                    self._go_on(failed, chosen, removed)
            except ShardproofError as error:
                if overwritten is None or error.details.get("overwritten"):
                    raise
                raise _half_restored(error, overwritten) from error
            if chosen.folder is None:
                return None
            try:
                report = load_from(
                    self._storage.within(chosen.folder.name),
                    state,
                    self._rendezvous,
                    options,
                    check=partial(self._check, chosen, failed is None),
                )
            except KeyMismatchError as error:
                if overwritten is None:
                    raise
                raise _mixed(error.message, overwritten, chosen.folder) from error
            except UNREADABLE as error:
                if error.details.get("overwritten"):
                    left = set(error.details["untouched"])
                    untouched = left if overwritten is None else untouched & left
                    overwritten = chosen.folder
                failed = Failed(chosen, error)
                continue
            if overwritten is not None:
                lacking = self._together({*report.missing, *report.kept} - untouched)
                if lacking:
                    raise _mixed(f"it lacks {', '.join(lacking)}", overwritten, chosen.folder)
            for folder in {folder for folder in removed if folder > chosen.folder}:
                self._pass_over(PassedOver(folder.step, _REMOVED, damaged=False, suspect=folder.suspect))
            self._keep_newer(chosen.folder)
            self.last_restore = report
            if self._rendezvous.rank == 0:
                self._confirm(chosen.folder, whole=options.include is None and options.exclude is None)
                if not chosen.folder.suspect:
                    self._scrub.prepare()
                    self._scrub.begin(chosen.folder.name)
            return RestoredStep(chosen.folder.step, report, self.passed_over)

    def _check_group(self) -> None:
        if self._found_rendezvous:
            check_group(self._rendezvous)

    def _confirm(self, folder: StepFolder, *, whole: bool) -> None:
        """Flushes the step that was restored: its save may have died, or failed, before it was durable.

        Args:
            folder: of the step.
            whole: whether every byte was read and verified.
        """
        storage = self._storage.within(folder.name)
        try:
            storage.flush(MANIFEST_NAME)
        except StorageError as error:
            if error.details.get("missing"):
                return  # another process removed the step after it was read
            self._saver.unconfirmed.add(storage)
            _log.warning(
                "%s: %s was restored and every byte that was read is verified, but it is not known to be "
                "durable: %s. No incremental save refers to it and retention does not count it until a "
                "restore can flush it or it is saved again",
                self._storage.location,
                folder,
                error,
            )
        else:
            if whole:
                self._saver.unconfirmed.confirm(storage)

    def _choose(self, step: int | None, suspect: bool, failed: Failed | None) -> Chosen:
        """What rank 0 chooses, once every rank has reported what it sees."""
        meeting = MeetingSequence(self._rendezvous, f"restore {self._storage.location}")
        rank = self._rendezvous.rank

        def report() -> bytes:
            return msgspec.msgpack.encode(report_view(self._storage, rank, step, suspect=suspect))

        def decide(posts: Sequence[bytes]) -> bytes:
            check_reports(self._storage, [msgspec.msgpack.decode(post, type=RestoreReport) for post in posts])
            return msgspec.msgpack.encode(
                choose_after(self._storage, self.passed_over, step, failed, suspect=suspect)
            )

        chosen = msgspec.msgpack.decode(meeting.meet("choose", report, decide), type=Chosen)
        for item in chosen.passed:
            self._pass_over(item)
        return chosen

    def _check(self, chosen: Chosen, first: bool, manifest: Manifest) -> None:
        """Raises if the manifest that this rank reads, or what it sees beside it, does not fit the choice."""
        assert chosen.folder is not None
        check_folder(self._storage, chosen.folder, manifest)
        if first and 0 < self._rendezvous.rank == self._rendezvous.world_size - 1:
            check_damage(self._storage, chosen)

    def _go_on(self, failed: Failed, chosen: Chosen, removed: list[StepFolder]) -> None:
        """Raises if the restore ends with a step that could not be read; else notes a step that is gone."""
        last, location = failed.chosen.folder, self._storage.location
        if chosen.stands or last is None:
            raise failed.error
        if chosen.changed:
            removed.append(last)
            if len(removed) >= MOST_TRIES:
                raise StorageError(
                    f"{location}: {len(removed)} times in a row the step that was restored was removed or "
                    f"replaced while it was read, {last} at last. {KEEP_MORE}",
                    file=location,
                    damaged=False,
                ) from failed.error
        if chosen.folder is None or chosen.seal is None:
            left = "no step is committed there now" if chosen.folder is None else "it is not committed now"
            raise NotCommittedError(
                f"{location}: {last} was committed when this restore began, and {left}: it was removed while "
                "it was read, or the folder is out of sight",
                path=location,
            ) from failed.error

    def _together(self, keys: set[str]) -> list[str]:
        """A few of the keys of all ranks, so that all go on alike: what is kept differs by rank."""
        meeting = MeetingSequence(self._rendezvous, f"restore {self._storage.location}")

        def decide(posts: Sequence[bytes]) -> bytes:
            said = {key for post in posts for key in msgspec.msgpack.decode(post, type=list[str])}
            return msgspec.msgpack.encode(sorted(said)[:8])

        answer = meeting.meet("compare", lambda: msgspec.msgpack.encode(sorted(keys)[:8]), decide)
        return msgspec.msgpack.decode(answer, type=list[str])

    def _keep_newer(self, restored: StepFolder) -> None:
        """Of what was passed over, a step that was replaced meanwhile and restored after all is not newer."""
        self.passed_over = tuple(item for item in self.passed_over if item.folder > restored)

    def _pass_over(self, item: PassedOver) -> None:
        if item in self.passed_over:
            return
        items = [*(other for other in self.passed_over if other.folder != item.folder), item]
        self.passed_over = tuple(sorted(items, key=lambda item: item.folder, reverse=True))
        if item.damaged and not item.suspect:
            self._damaged.add(item.step)
        if self._rendezvous.rank == 0:
            _log.warning("%s: %s is passed over: %s", self._storage.location, item.folder, item.reason)


def _is_saving(saver: Saver) -> Callable[[], bool]:
    """`Saver.is_saving`, without keeping the saver: a pass of the scrub must not keep its `Checkpointer`."""
    known = weakref.ref(saver)

    def ask() -> bool:
        there = known()
        return there is not None and there.is_saving()

    return ask


def _named(step: Any, suspect: bool) -> tuple[Any, str]:
    """The step and its folder. One that is no step is refused by the save, where every rank learns of it."""
    try:
        number = operator.index(step)
        return (step if isinstance(step, bool) else number), StepFolder(number, suspect).name
    except (TypeError, ValueError):
        return repr(step), "invalid-step"


def _settling(step: Any, verdict: Any) -> tuple[str, str]:
    """What a rank settles, for all ranks to be the same."""
    number, folder = _named(step, suspect=True)
    if not isinstance(number, int):
        raise StructureError(f"a suspect is settled by its step, a whole number, not {step!r}")
    if not isinstance(verdict, str):
        raise StructureError(f"a suspect is settled with a text, not with {verdict!r}")
    return folder, verdict


def _half_restored(error: ShardproofError, overwritten: StepFolder) -> ShardproofError:
    text = f"The target is partly overwritten from {overwritten}: restore again, before using it."
    return type(error)(f"{error.message}\n{text}", **{**error.details, "overwritten": True})


def _mixed(problem: str, damaged: StepFolder, older: StepFolder) -> StructureError:
    return StructureError(
        f"{damaged} could not be read to its end, after part of the target was overwritten, and {older} does "
        f"not replace all of it: {problem}\nThe target holds values of both: make the state anew, and "
        f"restore step={older.step} into it with what it lacks left out or strict=False",
        overwritten=True,
    )
