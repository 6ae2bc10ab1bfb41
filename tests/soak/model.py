"""A run of training as a simple model: which steps must be there, and which values they may have.

The model knows nothing of files but the names that manifests record, to tell which steps a damaged file
reaches. `Model.check` compares it with the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.errors import FormatError, NotCommittedError, ShardproofError
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.checkpointer.step_folders import folders_in
from shardproof.storage import Storage, storage_at
from tests.scenarios.states import blanked, differences, rows, whole
from tests.soak.disk import Rot

__all__ = ["HEIGHT", "Model", "Policy", "Step", "target", "values", "whole_values"]

HEIGHT = 12
"""Rows of each tensor: any number of ranks up to 4 divides it."""


def values(salt: int, rank: int, ranks: int) -> dict[str, Any]:
    """What one rank saves. "frozen" never changes, and "slow" changes with every fourth salt."""
    part = HEIGHT // ranks
    mine = rank * part, (rank + 1) * part
    return {
        "frozen": rows(whole((HEIGHT, 5), 1), *mine),
        "slow": rows(whole((HEIGHT, 4), salt // 4), *mine),
        "fast": rows(whole((HEIGHT, 3), salt), *mine),
        "bias": whole((5,), salt),
        "salt": salt,
    }


def whole_values(salt: int) -> dict[str, Any]:
    """The same state, whole, in one process."""
    return {
        "frozen": whole((HEIGHT, 5), 1),
        "slow": whole((HEIGHT, 4), salt // 4),
        "fast": whole((HEIGHT, 3), salt),
        "bias": whole((5,), salt),
        "salt": salt,
    }


def target(rank: int, ranks: int) -> dict[str, Any]:
    """A blank destination for the restore of one rank."""
    return blanked(values(0, rank, ranks))


@dataclass(frozen=True)
class Policy:
    """A retention policy, and an independent definition of the steps that it keeps."""

    latest: int
    every: int | None = None
    best: bool = False

    def make(self) -> sp.Retention:
        """The package's policy."""
        keep: Any = sp.KeepLatest(self.latest)
        if self.every is not None:
            keep = keep | sp.KeepEvery(steps=self.every)
        if self.best:
            keep = keep | sp.KeepBest("loss")
        return keep

    def kept(self, steps: Iterable[int], losses: dict[int, float]) -> set[int]:
        """The steps among these that must stay."""
        found = sorted(steps)
        kept = set(found[-self.latest :])
        if self.every is not None:
            kept |= {step for step in found if step % self.every == 0}
        if self.best and found:
            kept.add(min(found, key=lambda step: (losses[step], -step)))
        return kept


@dataclass
class Step:
    """A step, or a suspect, that is or may be committed."""

    salts: set[int]
    """The values that it may have."""
    sure: bool
    """True if a loss of power must not remove it."""
    loss: dict[int, float] = field(default_factory=dict)
    """Its metric, by salt."""
    files: frozenset[str] = frozenset()
    """Files of the run that it needs, also in the folders of other steps."""


@dataclass
class Model:
    """The guarantees about a run after the operations so far.

    Args:
        root: folder or URL of the run.
        rotten: the files that are damaged now, by their path below the run.
        options: of the store, for a URL.
    """

    root: Any
    rotten: Callable[[], Mapping[str, Rot]] = dict
    options: dict[str, Any] | None = None
    steps: dict[int, Step] = field(default_factory=dict)
    suspects: dict[int, Step] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    """Suspects that are or may be settled."""
    pins: dict[int, bool] = field(default_factory=dict)
    """Steps that are or may be pinned, and whether that is certain."""
    may_go: set[int] = field(default_factory=set)
    """Steps that retention or prune may have removed."""
    ghosts: dict[int, Step] = field(default_factory=dict)
    """Steps whose removal was interrupted."""
    seen_bad: set[int] = field(default_factory=set)
    """Steps that the job knows to be damaged."""
    _checked: set[tuple[int, bool]] = field(default_factory=set)

    def describe(self) -> str:
        """The model in one line."""
        marks = {
            step: "?" * (not one.sure) + "!" * (not self.is_sound(step)) + "-" * (step in self.may_go)
            for step, one in sorted(self.steps.items())
        }
        steps = ", ".join(f"{step}{mark}" for step, mark in marks.items())
        return f"steps {steps}; pins {self.pins}; suspects {sorted(self.suspects)}; known bad {self.seen_bad}"

    def storage(self) -> Storage:
        return storage_at(self.root, self.options)

    def listed(self) -> set[int]:
        """Steps with a manifest, restorable or not."""
        run = self.storage()
        folders = [folder for folder in folders_in(run) if not folder.suspect]
        return {folder.step for folder in folders if run.size(f"{folder.name}/{MANIFEST_NAME}") is not None}

    def observer(self) -> sp.Checkpointer:
        """A checkpointer that only reads."""
        return sp.Checkpointer(
            self.root, rendezvous=LocalRendezvous(), cache="none", storage_options=self.options
        )

    @property
    def damaged(self) -> dict[str, Rot]:
        """The damaged files that are there, or that a step or a suspect needs."""
        needed = {name for one in (*self.steps.values(), *self.suspects.values()) for name in one.files}
        return {name: how for name, how in self.rotten().items() if how != "gone" or name in needed}

    def is_sound(self, step: int) -> bool:
        """True if no file that the step needs is damaged."""
        return self.rotten().keys().isdisjoint(self.steps[step].files)

    def begin_save(self, step: int, salt: int, loss: float, *, replaces: bool) -> None:
        """A save begins: from now on the step may have these values."""
        known = self.steps.get(step)
        if known is None:
            self.steps[step] = Step({salt}, False, {salt: loss})
            if (ghost := self.ghosts.get(step)) is not None:  # its removal may be undone in this save
                self.steps[step].salts |= ghost.salts
                self.steps[step].loss |= ghost.loss
        elif replaces:
            known.salts.add(salt)
            known.loss[salt] = loss
            self.redo(step)

    def end_save(self, step: int, salt: int) -> None:
        """A save has ended without an error."""
        known = self.steps[step]
        known.salts, known.sure = {salt}, True
        self.ghosts.pop(step, None)
        self.seen_bad.discard(step)
        self.redo(step)

    def retained(self, policy: Policy | None, newest: int, unsure: set[int]) -> set[int]:
        """Retention may have run after the commit of `newest`. Returns the steps that it may have removed."""
        if policy is None:
            return set()
        counted = [step for step in self.steps if step <= newest and step not in self.seen_bad]
        # A step whose save failed in this job displaces no other.
        certain = [step for step in counted if step == newest or step not in unsure]
        kept = {newest, *self.kept(policy, certain)} | {
            step for step in counted if step not in certain and step in self.kept(policy, [*certain, step])
        }
        pinned = {step for step, certain in self.pins.items() if certain}
        goes = set(counted) - kept - pinned
        self.may_go |= goes
        for step in [step for step in self.suspects if step < newest and step in self.settled]:
            self.suspects[step].sure = False
        return goes

    def kept(self, policy: Policy, steps: list[int]) -> set[int]:
        """The steps that the policy keeps for every combination of their possible values."""
        choices = [
            sorted({self.steps[step].loss[salt] for salt in self.steps[step].salts}) if policy.best else [0.0]
            for step in steps
        ]
        return set.intersection(
            set(steps),
            *(policy.kept(steps, dict(zip(steps, losses, strict=True))) for losses in product(*choices)),
        )

    def redo(self, step: int) -> None:
        """The next check reads the step again."""
        self._checked.discard((step, False))

    def lost_power(self) -> None:
        """The next check reads every step again."""
        self._checked.clear()

    def pruned(self, keep: int) -> None:
        """`prune` has kept this many steps, and did not count those that it found damaged.

        It reads manifests, and the sizes of the other files.
        """
        damaged = self.rotten()
        seen = [
            step
            for step, one in sorted(self.steps.items())
            if not any(
                damaged[name] != "flipped" or name.endswith(MANIFEST_NAME)
                for name in one.files & damaged.keys()
            )
        ]
        self.may_go |= set(self.steps) - {*seen[-keep:], *(step for step, sure in self.pins.items() if sure)}
        for step in self.settled & set(self.suspects):
            self.suspects[step].sure = False

    def check(self, *, interrupted: bool = False) -> None:
        """Compares the run with the model, and drops the possible states that the run is not in.

        Args:
            interrupted: True if an operation was. Steps that it removed may come back after a loss of power.

        Raises:
            AssertionError: a step is lost, a step is there that nothing saved, or a step has wrong values.
        """
        observer = self.observer()
        run = self.storage()
        listed = self.listed()
        lost = {step for step, one in self.steps.items() if one.sure} - listed - self.may_go
        assert not lost, f"steps {sorted(lost)} are lost: {sorted(listed)} are there"
        for step in (listed - set(self.steps)) & set(self.ghosts):
            self.steps[step] = self.ghosts.pop(step)
            self.pins.setdefault(step, False)
        assert listed <= set(self.steps), f"nothing saved {sorted(listed - set(self.steps))}"
        for step in set(self.steps) - listed:
            gone = self.steps.pop(step)
            if interrupted:
                gone.sure = False
                self.ghosts[step] = gone
            self.pins.pop(step, None)
            self.seen_bad.discard(step)
        self.may_go &= listed
        pins = set(observer.pins())
        assert {step for step, certain in self.pins.items() if certain} <= pins <= set(self.pins)
        suspects = set(observer.suspects())
        unsettled = {step for step, one in self.suspects.items() if one.sure and step not in self.settled}
        assert unsettled <= suspects <= set(self.suspects), f"suspects: {suspects}, expected {unsettled}"
        for step in listed:
            self._check_step(run, f"step-{step:08d}", step, self.steps[step], suspect=False)
        for step in suspects:
            self._check_step(run, f"suspect-{step:08d}", step, self.suspects[step], suspect=True)

    def _check_step(self, run: Storage, folder: str, step: int, one: Step, *, suspect: bool) -> None:
        if (step, suspect) in self._checked:
            return
        try:
            manifest = read_manifest(run.within(folder))
        except (FormatError, NotCommittedError):
            assert f"{folder}/manifest.json" in self.rotten(), f"{folder} has a manifest that cannot be read"
            return
        files = {f"{record.folder or folder}/{record.name}" for record in manifest.files}
        one.files = frozenset({*files, f"{folder}/{manifest.index.name}", f"{folder}/manifest.json"})
        found = blanked(whole_values(0))
        try:
            sp.load(run.within(folder), found, rendezvous=LocalRendezvous())
        except ShardproofError:
            if self.rotten().keys().isdisjoint(one.files):
                raise
            return
        wrong = {salt: differences(found, whole_values(salt)) for salt in one.salts}
        assert [] in wrong.values(), f"{folder} has other values than were saved: {wrong}"
        one.salts = {salt for salt, different in wrong.items() if different == []}
        assert torch.equal(found["frozen"], whole((HEIGHT, 5), 1))
        self._checked.add((step, suspect))


def local_files(root: Path, names: Iterable[str]) -> list[str]:
    """The names of the files that exist."""
    return sorted(name for name in names if (root / name).is_file())
