"""The run that a `Checkpointer` has open: its tiers, its nodes, and the known faults of its steps."""

from __future__ import annotations

import logging
import shlex
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import NoneType
from typing import Any

from shardproof._utils.contexts import logged_wait
from shardproof.engine import events
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.engine.rendezvous import MeetingSequence, Rendezvous
from shardproof.engine.saving import Saver, Unconfirmed
from shardproof.engine.storage import LocalStorage, Storage
from shardproof.errors import FormatError, NotCommittedError, StorageError, StructureError, tells_nothing
from shardproof.runs.checkpointer.judge import RestorableSteps, Verdict, verdict_on
from shardproof.runs.checkpointer.nodes import MissingCopies, NodeStorage, NodesView, join_nodes
from shardproof.runs.checkpointer.policies import BestStep, KeepBest, Retention
from shardproof.runs.checkpointer.retention import StepFacts, abandoned, branch_removal, remove_dead_saves
from shardproof.runs.checkpointer.run_options import Incremental, NodeLocal
from shardproof.runs.checkpointer.scrub import Scrub
from shardproof.runs.checkpointer.step_folders import (
    Pin,
    StepFolder,
    parse_argument,
    parse_folder,
    pinned_steps,
    remove_pin,
    step_name,
    steps_in,
    steps_with_manifest,
    write_pin,
    write_settled,
)
from shardproof.runs.checkpointer.tiers import TieredRun

_log = logging.getLogger("shardproof")

_LOG_SECONDS = 10.0
"""Seconds between two records of a wait for a tier."""
_EARLIER_STEPS = 64
"""Steps before a restored one, at most, whose times are compared with its own."""


class OpenRun:
    """A run, on this rank."""

    def __init__(
        self,
        storage: Storage,
        second: Storage | None,
        rendezvous: Rendezvous,
        unconfirmed: Unconfirmed,
        scrub: Scrub,
    ) -> None:
        self.storage = storage
        """The run in the first tier; with nodes, the folders of all nodes."""
        self.tiers = [storage] if second is None else [storage, second]
        """The run in each tier, nearest first."""
        self.nodes = storage if isinstance(storage, NodeStorage) else None
        """The nodes, if each node has a folder of its own."""
        self.copies = None if self.nodes is None else MissingCopies(self.nodes, rendezvous)
        """Replaces copies that were lost with a node; None without nodes."""
        self.rendezvous, self.scrub = rendezvous, scrub
        # Not the saver: its last save has methods of this object, so both would live until a collection.
        self._unconfirmed = unconfirmed
        self._runs: set[str] = set()
        """Locations of the tiers that are checked to be runs."""
        self.facts = StepFacts(storage)
        self._judges = {tier.location: RestorableSteps(tier) for tier in self.tiers}
        self.restorable = self._judges[storage.location]
        """Whether a step of the first tier can be restored."""
        self.damaged: set[int] = set()
        """Steps with a damaged copy that a restore passed over. A save replaces them in the first tier."""
        self.damaged_everywhere: set[int] = set()
        """The steps of `damaged` without a whole copy in any tier. A save replaces them in all tiers."""

    @property
    def location(self) -> str:
        """The location of the first tier."""
        return self.storage.location

    def view(self) -> Storage:
        """A read-only view of the run over all tiers, for one restore: it waits once for a silent tier."""
        tiers = [tier.with_one_wait() for tier in self.tiers]
        if self.nodes is not None:
            return NodesView(self.nodes.group, tiers[1] if len(tiers) > 1 else None)
        return TieredRun(tiers) if len(tiers) > 1 else tiers[0]

    def check_tiers(self) -> None:
        """Refuses a tier that is a checkpoint, or that does not respond. Rank 0 calls it for a restore.

        It asks the second tier each time, and logs that it waits.
        """
        self.check_is_run(self.storage)
        for tier in self.tiers[1:]:
            self._runs.discard(tier.location)
            text = f"{self.location}: restore waits for the second tier, {tier.location}"
            with logged_wait(_log, text, _LOG_SECONDS):
                self.check_is_run(tier)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Adds to an error of a second tier that does not respond how to restore without it."""
        try:
            yield
        except StorageError as error:
            file = str(error.details.get("file", ""))
            is_second = any(f"{file}/".startswith(f"{tier.location}/") for tier in self.tiers[1:])
            if not is_second or not tells_nothing(error.details):
                raise
            raise StorageError(
                f"{error.message}\nThe restore did not succeed, because the second tier may have the newest "
                f"step. To restore the newest step of {self.location} now, leave out second_tier=. A later "
                "restart with second_tier= uploads the steps that the second tier lacks",
                **error.details,
            ) from error

    def check_is_run(self, tier: Storage) -> None:
        """Refuses a tier that is a checkpoint itself. A save calls this for the first tier, on rank 0.

        A folder with a manifest and with steps is a run, unless its own name is that of a step. A tier is
        checked once.

        Raises:
            StorageError: the tier is a checkpoint, or the storage failed.
        """
        if tier.location in self._runs:
            return
        if tier.size(MANIFEST_NAME) is not None and (
            parse_folder(tier.folder) is not None or not any(map(parse_folder, tier.folders()))
        ):
            raise StorageError(
                f"{tier.location} is a checkpoint, and not the folder of a run: it has a {MANIFEST_NAME}. "
                "Pass the folder of its run to the Checkpointer, most often the folder above. To load this "
                "checkpoint into another run, call restore(step=PATH)",
                file=tier.location,
                damaged=False,
            )
        self._runs.add(tier.location)

    def steps(self) -> list[int]:
        """Committed steps of all tiers, ascending, without suspects, by the verdicts of `judge`.

        On local disks of nodes, each step with a manifest counts: other nodes have some of its files.

        Raises:
            StorageError: a tier cannot be listed, or a step cannot be read at the moment.
        """
        found: set[int] = set()
        for tier in self.tiers:
            steps = steps_with_manifest(tier)
            found.update(steps if tier is self.nodes else self._judges[tier.location].among(steps))
        return sorted(found)

    def pins(self) -> dict[int, Pin]:
        """Pinned steps of all tiers, ascending. A pin in the first tier takes precedence."""
        return dict(sorted(pin for tier in reversed(self.tiers) for pin in pinned_steps(tier).items()))

    def holders(self, step: int) -> list[Storage]:
        """The tiers in which a step has a manifest; the first tier if there is none."""
        name = f"{step_name(step)}/{MANIFEST_NAME}"
        return [tier for tier in self.tiers if tier.size(name) is not None] or self.tiers[:1]

    def check_restorable(self, tier: Storage, step: int) -> None:
        """Refuses a step with a manifest that a restore would pass over.

        Raises:
            NotCommittedError: the verdict is another one than `Verdict.COMMITTED`.
            StorageError: the storage cannot read the step at the moment.
        """
        if tier is self.nodes or tier.size(f"{step_name(step)}/{MANIFEST_NAME}") is None:
            return
        if not self._judges[tier.location].among([step]):
            raise NotCommittedError(
                f"{tier.location}/{step_name(step)} cannot be restored, so it cannot be pinned. See "
                f"`shardproof doctor {shlex.quote(tier.location)}`"
            )

    def best_step(self, keep: Retention | None, saver: Saver) -> int | None:
        """The step with the best metric of the `KeepBest` in `keep`; None if no step is committed.

        Rank 0 chooses it. See `Checkpointer.restore` for the errors.
        """
        policies = KeepBest.within(keep)
        if len(policies) != 1:
            raise ValueError(
                f"restore(step='best') needs one KeepBest in keep=, for example KeepBest('loss'), and keep= "
                f"has {len(policies)}"
            )
        metric, best = policies[0].metric, BestStep(policies[0])
        saver.wait_for_end()  # its step may be the best

        def decide(posts: Sequence[None]) -> list[int]:
            with self.explained():
                steps = [step for step in self.steps() if not self.is_damaged(step)]
                facts = self.facts if len(self.tiers) == 1 else StepFacts(self.view())
                found, _ = facts.select(best, steps)
            if steps and not found:
                raise NotCommittedError(
                    f"{self.location}: no committed step has a finite {metric!r} in its metadata. Save "
                    "it with metadata=, or restore another step"
                )
            return list(found)

        meetings = MeetingSequence(self.rendezvous, f"restore {self.location}")
        return max(meetings.exchange("choose", lambda: None, decide, NoneType, list[int]), default=None)

    def branch_removal(self, step: int) -> str:
        """How to list and remove an abandoned branch on the tiers that have the step, for messages."""
        commands = branch_removal([tier.location for tier in self.holders(step)], step)
        return commands if self.nodes is None else f"On each node, with its folder: {commands}"

    def warn_of_branch(self, view: Storage, restored: int) -> None:
        """Logs that a restored step was saved before a step with a lower number. Rank 0 calls it.

        Then a rollback gave up the restored step. Reads the manifests of the newest earlier steps. The
        restore has succeeded, so a storage that fails here is no error of it.
        """
        with suppress(StorageError):
            self._warn_of_branch(view, restored)

    def _warn_of_branch(self, view: Storage, restored: int) -> None:
        earlier = [step for step in steps_in(view) if step < restored]
        times = StepFacts(view).times_of([restored, *earlier[-_EARLIER_STEPS:]])
        later = [(time, step) for step, time in times.items() if time and restored in abandoned(times, step)]
        for _, last in sorted(later, reverse=True):
            if verdict_on(view, step_name(last), plan_repairs=False) is Verdict.COMMITTED:
                break
        else:
            return
        _log.warning(
            "%s: step %d was restored, and was saved before step %d: the run was rolled back, and the "
            "restored step is of the branch that was given up, or a clock was behind. To continue from step "
            "%d, remove the steps of that branch and restore again. %s",
            self.location,
            restored,
            last,
            last,
            self.branch_removal(last),
        )

    def is_damaged(self, step: int) -> bool:
        """True if a restore or the scrub found a committed step damaged."""
        return step in self.damaged or self.scrub.is_damaged(step_name(step))

    def is_unconfirmed(self, step: int) -> bool:
        """True if a step may not be durable."""
        return self.storage.within(step_name(step)) in self._unconfirmed

    def confirm(self, view: Storage, folder: StepFolder, *, whole: bool) -> list[bytes]:
        """Makes the restored step durable, or marks it as unconfirmed. Rank 0 calls it.

        `view` is the view of all tiers that the restore used. The commit is confirmed only if the load read
        the whole step.

        Returns:
            Each rank's share of the missing copies of the step; empty if no copy is missing.
        """
        storage = view.within(folder.name)
        shares: list[bytes] = []
        try:
            if self.nodes is not None and self.copies is not None and isinstance(storage, NodesView):
                text = self.nodes.confirm(storage)
                if text is not None:
                    shares = self.copies.plan(folder.name, text, storage.choice.left_out)
            storage.flush(MANIFEST_NAME)
        except StorageError as error:
            if error.details.get("missing"):
                return []  # another process removed the step after it was read
            self._unconfirmed.add(storage)
            _log.warning(
                "%s: %s was restored, and every byte that was read is verified, but it is not known to be "
                "durable: %s. No incremental save refers to it and retention does not count it until a "
                "restore can flush it or it is saved again",
                self.location,
                folder,
                error,
            )
        else:
            if whole:
                self._unconfirmed.confirm(storage)
        return shares

    def base_of(self, step: Any) -> Storage | None:
        """The newest confirmed and undamaged step before this one (note "One line of steps")."""
        for earlier in reversed([one for one in steps_in(self.storage) if one < step]):
            folder = self.storage.within(step_name(earlier))
            try:
                distrusted = self.is_damaged(earlier) or self.is_unconfirmed(earlier)
                if distrusted or folder.size(MANIFEST_NAME) is None:
                    continue
                if not self.restorable(earlier):
                    continue
                if self.nodes is None or not self.nodes.group.replicas:
                    return folder
                if self.nodes.has_copies(folder.folder, read_manifest(folder)):  # as many as `replicas`
                    return folder
            except (FormatError, NotCommittedError):
                continue
            except StorageError as error:
                _log.warning("%s: step %s does not build on step %s: %s", self.location, step, earlier, error)
        return None

    def phase(self, step: Any, folder: str, name: str) -> events.Phase:
        """A phase of a save of this run."""
        number = step if isinstance(step, int) and not isinstance(step, bool) else None
        rank, world_size = self.rendezvous.rank, self.rendezvous.world_size
        return events.phase(
            f"save {self.location}/{folder}", name, rank=rank, world_size=world_size, step=number
        )


def open_run(
    first: Storage,
    second: Storage | None,
    saver: Saver,
    rendezvous: Rendezvous,
    *,
    node_local: NodeLocal | None,
    incremental: Incremental | None,
) -> OpenRun:
    """Opens a run. With `node_local`, all ranks call it, and `first` is the folder on the node of this rank.

    The scrub yields to the saves of `saver`. Without `incremental`, there is none.

    Raises:
        RankFailure, RankSilent: with `node_local`, a rank failed or fell silent.
    """
    storage, rate = first, None if incremental is None else incremental.scrub
    if node_local is not None:
        assert isinstance(first, LocalStorage), "check_node_local"
        storage = NodeStorage(join_nodes(rendezvous, first, node_local.replicas))
        if first.in_memory:
            remove_dead_saves(storage, first)
        elif rate is not None and rendezvous.rank == 0:
            _log.warning(
                "%s: there is no scrub with node_local=True, because rank 0 does not have all files. Run "
                "`shardproof doctor FOLDER --scrub` on each node, and pass "
                "incremental=Incremental(scrub=None)",
                storage.location,
            )
    saving = weakref.WeakMethod(saver.is_saving)  # a scrub does not keep its Checkpointer alive
    scrub = Scrub(storage, rate, lambda: (is_saving := saving()) is not None and is_saving())
    return OpenRun(storage, second, rendezvous, saver.unconfirmed, scrub)


def change_pin(run: OpenRun, saver: Saver, step: Any, label: Any) -> None:
    """Pins a step, or removes its pin. See `Checkpointer.pin` for the errors."""
    operation = f"pin {run.location}"

    def describe() -> tuple[int, str | None]:
        number, _ = parse_argument(step, suspect=False)
        if not isinstance(number, int) or isinstance(number, bool):
            raise StructureError(f"pin needs a whole number as step, not {step!r}")
        if label is not None and not isinstance(label, str):
            raise StructureError(f"pin needs a text as label, not {label!r}")
        return number, label

    def decide(posts: Sequence[tuple[int, str | None]]) -> None:
        other = next((rank for rank, post in enumerate(posts) if post != posts[0]), None)
        if other is not None:
            raise StructureError(
                f"{run.location}: rank 0 and rank {other} pin different steps, or with different labels; "
                "nothing was changed. Pass the same arguments on all ranks",
                ranks=[0, other],
            )
        number, text = posts[0]
        for tier in run.holders(number):
            if text is None:
                remove_pin(tier, number)
            else:
                run.check_restorable(tier, number)
                write_pin(tier, number, text)

    with run.rendezvous.operation(operation):
        saver.wait_for_end()  # its retention may remove the step
        meetings = MeetingSequence(run.rendezvous, operation)
        meetings.exchange("pin", describe, decide, tuple[int, str | None], NoneType)


def settle_suspect(run: OpenRun, saver: Saver, step: Any, verdict: Any) -> None:
    """Stores the verdict on a suspect. See `Checkpointer.settle_suspect` for the errors."""
    operation = f"settle {run.location}"
    number, folder = parse_argument(step, suspect=True)

    def describe() -> tuple[str, str]:
        if not isinstance(number, int):
            raise StructureError(f"settle_suspect needs a whole number as step, not {step!r}")
        if not isinstance(verdict, str):
            raise StructureError(f"settle_suspect needs a text as verdict, not {verdict!r}")
        return folder, verdict

    def decide(verdicts: Sequence[tuple[str, str]]) -> None:
        other = next((rank for rank, one in enumerate(verdicts) if one != verdicts[0]), None)
        if other is not None:
            raise StructureError(
                f"{run.location}: rank 0 settles {': '.join(verdicts[0])}, but rank {other} settles "
                f"{': '.join(verdicts[other])}; nothing was settled. Pass the same verdict on all ranks",
                ranks=[0, other],
            )
        if not write_settled(run.storage.within(folder), verdict):
            _log.warning("%s/%s: nothing to settle: there is no committed suspect", run.location, folder)

    with run.rendezvous.operation(operation):
        saver.wait_for_end()
        meetings = MeetingSequence(run.rendezvous, operation)
        meetings.exchange("settle", describe, decide, tuple[str, str], NoneType)
