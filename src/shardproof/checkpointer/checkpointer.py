"""The steps of a run: save, restore the newest, keep a few."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shardproof import events
from shardproof.checkpointer.choosing import (
    PassedOver,
    check_folder,
    choose,
    is_damage,
    named,
    written_folders,
)
from shardproof.checkpointer.folders import StepFolder, parse_step, step_name
from shardproof.checkpointer.retention import Retention, retain
from shardproof.checkpointer.suspects import unsettled_suspects, write_settled
from shardproof.errors import KeyMismatchError, StructureError
from shardproof.format import MANIFEST_NAME
from shardproof.loading import UNREADABLE, LoadReport, Options, ReadOnce, load_from
from shardproof.loading.selection import Cast, Patterns
from shardproof.reentrance import guarded, refuse_inside
from shardproof.rendezvous import Meetings, Rendezvous, connect
from shardproof.saving import CheckReplicas, Committed, PendingSave, Saver, WhenBusy
from shardproof.storage import LocalStorage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Checkpointer"]

_log = logging.getLogger("shardproof")


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
        check_replicas: whether a save compares what ranks hold of the same boxes: "all" of it, or a "sample"
            that moves on from save to save; None: neither. See `Committed.diverged`.

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
        check_replicas: CheckReplicas | None = None,
    ) -> None:
        if when_busy not in ("wait", "skip"):
            raise ValueError(f"when_busy is 'wait' or 'skip', not {when_busy!r}")
        if snapshot not in ("fence", "stage"):
            raise ValueError(f"snapshot is 'fence' or 'stage', not {snapshot!r}")
        if check_replicas not in (None, "sample", "all"):
            raise ValueError(f"check_replicas is 'sample', 'all' or None, not {check_replicas!r}")
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
        self._check_replicas = check_replicas
        self._saver = Saver(self._rendezvous, host_memory_budget=host_memory_budget)

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
        number, folder = _named(step, suspect)
        if when_busy is None:
            when_busy = "wait" if suspect else self._when_busy
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
                check_replicas=self._check_replicas,
                after=None if suspect else self._after_commit,
            )

    def fence(self) -> None:
        """Returns when parameters and optimizer state may be written to by any code.

        What the save under way has not written yet is copied first; where the ranks have not agreed on the
        save yet, that is waited for, within the deadlines of their meetings. Optimizers and loads do this by
        themselves. Nothing under way: nothing to do. A write to parameters or optimizer state without it
        fails the save, unless torch does not count it (through ``.data``, by a replayed CUDA graph, by
        ``torch._foreach_*`` on DTensors).
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
            with self._phase(committed.step, step_name(committed.step), "retain"):
                retain(self._storage, self._keep, committed.step, self._damaged, progress)

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
            StorageError: the storage failed; the suspect is as it was.
            RankFailure, RankSilent: some rank failed or fell silent. If that was the leader, the suspect may
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
        _, folder = _named(step, suspect=True)
        meeting = Meetings(self._rendezvous, f"settle {self.root}")

        def decide(posts: Sequence[bytes]) -> bytes:
            said = [msgspec.msgpack.decode(post, type=tuple[str, str]) for post in posts]
            other = next((rank for rank, one in enumerate(said) if one != said[0]), None)
            if other is not None:
                raise StructureError(
                    f"{self.root}: rank 0 settles {': '.join(said[0])}, and rank {other} "
                    f"{': '.join(said[other])}; nothing was settled",
                    ranks=[0, other],
                )
            if not write_settled(self._storage.within(folder), verdict):
                _log.warning("%s/%s: nothing to settle: no suspect is committed there", self.root, folder)
            return b""

        with self._rendezvous.operation(f"settle {self.root}"):
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
            suspect: whether suspects that are not settled count as steps, too. Of one number, the suspect is
                taken.

        Returns:
            The step, or None when nothing was ever committed here.

        Raises:
            ReentrantCallError: a signal handler called it that interrupted a save or a load.
            NotCommittedError: there are committed steps, but none can be read; or `step` is not committed.
            ShardproofError: see `shardproof.load`.
        """
        refuse_inside("restore")
        options = Options(strict, include, exclude, cast, rename, read_once, group)
        with self._rendezvous.operation(f"restore {self.root}"):
            return self._restore(state, step, suspect, options)

    @guarded("restore")
    def _restore(self, state: Any, step: int | None, suspect: bool, options: Options) -> int | None:
        self._saver.settle()
        self.passed_over = ()
        self.last_restore = None
        overwritten: StepFolder | None = None
        untouched: set[str] = set()  # by every step that began to overwrite, on this rank
        while (chosen := self._choose(step, suspect)) is not None:
            try:
                report = load_from(
                    self._storage.within(chosen.name),
                    state,
                    self._rendezvous,
                    options,
                    check=partial(check_folder, self._storage, chosen),
                )
            except KeyMismatchError as error:
                raise error if overwritten is None else _mixed(error.message, overwritten, chosen) from error
            except UNREADABLE as error:
                if step is not None or not is_damage(error):
                    raise
                if error.details.get("overwritten"):
                    left = set(error.details["untouched"])
                    untouched = left if overwritten is None else untouched & left
                    overwritten = chosen
                self._pass_over(PassedOver(chosen.step, error.message, damaged=True, suspect=chosen.suspect))
                continue
            if overwritten is not None:
                lacking = self._together({*report.missing, *report.kept} - untouched)
                if lacking:
                    raise _mixed(f"it lacks {', '.join(lacking)}", overwritten, chosen)
            self.last_restore = report
            return chosen.step
        return None

    def _choose(self, step: int | None, suspect: bool) -> StepFolder | None:
        """The leader's choice."""
        meeting = Meetings(self._rendezvous, f"restore {self.root}")

        def decide(posts: Sequence[bytes]) -> bytes:
            wanted = {msgspec.msgpack.decode(post, type=tuple[int | None, bool]) for post in posts}
            if len(wanted) > 1:
                steps = sorted({str(one) for one, _ in wanted})
                raise StructureError(
                    f"{self.root}: ranks were asked to restore different steps: {steps}"
                    f"{'' if len(steps) > 1 else ', some of them with suspect=True'}; nothing was changed"
                )
            if step is not None:
                return msgspec.msgpack.encode((named(self._storage, step, suspect=suspect), []))
            return msgspec.msgpack.encode(choose(self._storage, self.passed_over, suspect=suspect))

        answer = meeting.meet("choose", lambda: msgspec.msgpack.encode((step, suspect)), decide)
        chosen, passed = msgspec.msgpack.decode(answer, type=tuple[StepFolder | None, list[PassedOver]])
        for item in passed:
            self._pass_over(item)
        return chosen

    def _together(self, keys: set[str]) -> list[str]:
        """A few of the keys of all ranks, so that all go on alike: what is kept differs by rank."""
        meeting = Meetings(self._rendezvous, f"restore {self.root}")

        def decide(posts: Sequence[bytes]) -> bytes:
            said = {key for post in posts for key in msgspec.msgpack.decode(post, type=list[str])}
            return msgspec.msgpack.encode(sorted(said)[:8])

        answer = meeting.meet("compare", lambda: msgspec.msgpack.encode(sorted(keys)[:8]), decide)
        return msgspec.msgpack.decode(answer, type=list[str])

    def _pass_over(self, item: PassedOver) -> None:
        self.passed_over = (*self.passed_over, item)
        if item.damaged and not item.suspect:
            self._damaged.add(item.step)
        if self._rendezvous.rank == 0:
            _log.warning("%s: %s is passed over: %s", self.root, item.folder, item.reason)


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


def _mixed(problem: str, damaged: StepFolder, older: StepFolder) -> StructureError:
    return StructureError(
        f"{damaged} turned out to be damaged after part of the target was overwritten, and {older} does "
        f"not replace all of it: {problem}\nThe target holds values of both: make the state anew, and "
        f"restore step={older.step} into it with what it lacks left out or strict=False",
        overwritten=True,
    )
