"""The state machine on a run of two tiers: uploads, outages of the second tier, loss of the first.

Both tiers are on the simulated disk, so a failure may happen at any operation of a save or of an upload, and
a loss of power takes what neither tier has flushed. After each operation the machine waits for the uploads,
and compares each tier with a model of its own.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.engine.saving import SaveResult
from shardproof.errors import SaveSkipped, ShardproofError, StorageError
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.soak.disk import Failure
from tests.soak.machine import LIMIT, OPERATIONS, POLICIES, RunMachine, ranks_of_a_job, small
from tests.soak.model import Model, Policy, Step, target

__all__ = ["TieredMachine", "UploadMachine"]

TIERED_OPERATIONS = [
    *OPERATIONS,
    *["outage", "damage far"] * 2,
    *["node loss", "prune far", "roll back far", "overwrite and restart"],
]

UPLOAD_OPERATIONS = [
    *["save"] * 8,
    *["outage", "damage", "arm"] * 3,
    *["restore", "damage what waits", "damage a killed upload", "damage and restore"] * 2,
    *["resize", "node loss", "overwrite and restart"],
]

policies = st.sampled_from(POLICIES)


class TieredMachine(RunMachine):
    """See the module. `model` is that of the first tier."""

    def __init__(self) -> None:
        super().__init__()
        self.far = Model(self.root.with_name("far"), partial(self.disk.rotten, self.root.with_name("far")))
        self.keep_far: Policy | None = None
        self.outage = 0
        """Operations until the second tier answers again."""
        self.saving: tuple[int, int] | None = None
        """Step and salt of the save of this operation."""
        self.overwrites = False
        """True if the save of this operation overwrites its step."""
        self.may_replace: set[int] = set()
        """Steps that a job may replace on the second tier, also after a restart."""
        self.must_replace: dict[int, str] = {}
        """Steps that a save has overwritten, to its attempt. The next upload replaces them."""
        self.has_uploaded = False
        """True if a round of uploads of this operation has ended without an error."""
        self.has_restored = False
        self.by_hand = False
        """True if this operation removed steps that the policies keep."""
        self.position: int | None = None
        """The step that the job saved or restored last; None if that is not certain."""
        self.there: set[int] = set()
        """The steps of the second tier before this operation."""
        self.damaged_there: set[int] = set()
        """The steps that were damaged before this operation's restore. The next upload may repair them."""

    @initialize(ranks=ranks_of_a_job, policy=policies, incremental=st.booleans(), keep_far=policies)
    def start(self, ranks: int, policy: Policy | None, incremental: bool, keep_far: Policy | None) -> None:
        self.keep_far = keep_far
        self._record(f"the second tier keeps {keep_far}")
        self._begin_job(ranks, policy, incremental)

    @rule(what=st.sampled_from(TIERED_OPERATIONS), a=small, b=small)
    def act(self, what: str, a: int, b: int) -> None:
        """See `RunMachine.act`."""
        self._step(what, a, b)

    def _step(self, what: str, a: int, b: int) -> None:
        self.outage = max(0, self.outage - 1)
        self.saving = None
        self.overwrites = False
        self.has_uploaded = self.has_restored = self.by_hand = False
        self.there = set(self.far.steps)
        super()._step(what, a, b)

    def _act(self, what: str, a: int, b: int) -> None:
        if what == "outage":
            self.outage = 1 + a % 4
        elif what == "damage far":
            if self.far.steps:
                self.damage(self.far, a, b // 3, ["flip", "cut", "remove"][b % 3])
        elif what == "node loss":
            self.lose_node(1 + a % 3)
        elif what == "roll back far":
            if self.far.steps:
                self._restore(sorted(self.far.steps)[a % len(self.far.steps)])
        elif what == "overwrite and restart":
            if self.model.steps:
                self.overwrite_and_restart(a, 1 + b % 3)
        elif what == "prune far":
            self.prune(self.far, [None, 1, 3][a % 3])
            job = self._job
            self._end_job()  # its uploads know the steps of the second tier
            self._begin_job(job.ranks, job.policy, job.incremental)
        else:
            super()._act(what, a, b)

    def lose_node(self, ranks: int) -> None:
        """The first tier is gone, and a job on other nodes restores from the second."""
        job = self._job
        self._end_job()
        self.disk.wipe(self.root)
        self.model = Model(self.model.root, self.model.rotten)
        self.by_hand = True
        self._begin_job(ranks, job.policy, job.incremental)
        self._restore(None)

    def overwrite_and_restart(self, which: int, ranks: int) -> None:
        """A step is overwritten, and the next job uploads it."""
        self.outage = 1
        self._save(self._pick(which), overwrite=True)
        self._check()  # so that the restore finds the model up to date
        self.outage = 0
        self.resize(ranks, self._job.policy, self._job.incremental)

    def prune(self, model: Model, keep: int | None) -> None:
        self.by_hand = keep is not None
        super().prune(model, keep)

    def pin(self, which: int) -> None:
        step = self._pick(which)
        if step in self.far.steps:
            self.far.pins.setdefault(step, False)
        super().pin(which)

    def unpin(self, which: int) -> None:
        step = sorted(self.model.pins)[which % len(self.model.pins)]
        certain = self.far.pins.pop(step, None)
        super().unpin(which)
        if certain is not None and step in self.model.pins:
            self.far.pins[step] = False

    def _describe(self) -> str:
        down = f"; down for {self.outage}" if self.outage else ""
        return f"{self.model.describe()}\n  far: {self.far.describe()}{down}"

    def _begin_job(self, ranks: int, policy: Policy | None, incremental: bool) -> None:
        self.position = None
        super()._begin_job(ranks, policy, incremental)

    def _job_options(self) -> dict[str, Any]:
        down = StorageError("the second tier does not answer", errno="EHOSTUNREACH")
        return {
            "second_tier": sp.SecondTier(
                FaultyStorage(LocalStorage(self.far.root), lambda: self.outage > 0, down),
                keep=None if self.keep_far is None else self.keep_far.make(),
            )
        }

    def _restart(self, how: Failure) -> None:
        super()._restart(how)
        self.far.lost_power()

    def _save(self, step: int, *, overwrite: bool) -> None:
        self.saving, self.overwrites = (step, self.salt + 1), overwrite
        if overwrite or step in self.model.seen_bad:
            self.may_replace.add(step)
        super()._save(step, overwrite=overwrite)

    def _restore(self, step: int | str | None) -> None:
        self.damaged_there = {one for one in self.far.steps if not self.far.is_sound(one)}
        if not self.outage:
            super()._restore(step)
            return
        ranks = self._job.ranks
        ended = self._run(lambda one, rank: one.restore(target(rank, ranks), step=step))
        assert all(isinstance(end, ShardproofError) for end in ended), "a tier could not be listed"
        self._after()

    def _after(self) -> None:
        self._settle_uploads()
        super()._after()

    def _settle_uploads(self) -> None:
        """Waits for the uploads, and updates the model of the second tier."""
        pending, self.pending = self.pending, {}
        saved = self._job.on_ranks(lambda one, rank: rank in pending and pending[rank].result(LIMIT))
        durable = self._job.on_ranks(lambda one, rank: rank in pending and pending[rank].durable(LIMIT))
        settled = self._job.on_ranks(lambda one, rank: one.wait_for_uploads(LIMIT))
        works = self.disk.failed is None and not self.outage
        if pending or any(settled):
            self._record(f"  uploads: {[str(end)[-110:] for end in (*durable, *settled)]}")
        if pending:
            certain = all(isinstance(end, SaveResult) for end in saved) and self.saving is not None
            self.position = self.saving[0] if certain and self.saving is not None else None
        begun = self.has_restored or all(isinstance(end, SaveResult) for end in saved)
        if works and begun:  # else the errors are those of an earlier round
            assert not any(settled), settled
            self.has_uploaded = True
        if works and all(isinstance(end, SaveResult) for end in saved):
            skipped = [isinstance(end, SaveSkipped) for end in durable]
            assert len(set(skipped)) == 1, durable
            assert skipped[0] or all(isinstance(end, SaveResult) for end in durable), durable
        if self.overwrites and self.saving is not None and all(isinstance(end, SaveResult) for end in saved):
            self.must_replace[self.saving[0]] = saved[0].attempt
        self._may_be_uploaded()
        if any(isinstance(end, SaveResult) for end in durable):
            assert self.saving is not None
            step, salt = self.saving
            one = self.far.steps[step]
            one.salts, one.sure = {salt}, True
        if self.far.steps:
            self.far.retained(self.keep_far, max(self.far.steps), set())

    def _may_be_uploaded(self) -> None:
        """The second tier may have any of the steps that the first had during the operation."""
        damaged = self.far.rotten()
        for step, near in self.model.steps.items():
            far = self.far.steps.setdefault(step, Step(set(), False))
            is_damaged = f"step-{step:08d}/{MANIFEST_NAME}" in damaged
            if not far.sure or is_damaged or step in self.may_replace:
                far.salts |= near.salts
                far.loss |= near.loss
                self.far.redo(step)
            if step in self.model.pins:
                self.far.pins.setdefault(step, False)

    def _check(self) -> None:
        before = {
            step
            for step, one in self.model.steps.items()
            if one.sure and self.model.is_sound(step) and step not in self.model.seen_bad
        }
        kept = before & self._kept_on_far()
        super()._check()
        self.far.check(interrupted=self.interrupted)
        near, far = set(self.model.steps), set(self.far.steps)
        if not self.by_hand:
            lost = kept - near - far
            assert not lost, f"steps {sorted(lost)} were removed before their upload"
        wanted = self._wanted(near, far) if self.has_uploaded else set()
        if self.has_uploaded and not self._is_damaged() and not self.model.seen_bad:
            assert wanted <= far, f"steps {sorted(wanted - far)} were not uploaded"
            for step in near & far:
                if self._same_manifest(step):
                    self.far.steps[step].sure = True
        stale = [step for step in wanted & far if self._is_overwritten(step) and not self._same_save(step)]
        assert not stale, f"steps {stale} were overwritten, and were not replaced"
        if not self.interrupted:  # else a step may come back that was damaged before its removal
            for step in far - self.there:
                own = {name for name in self.far.steps[step].files if name.startswith(f"step-{step:08d}/")}
                assert own.isdisjoint(self.far.rotten()), f"step {step} was uploaded with damage"

    def _line(self, steps: set[int]) -> set[int]:
        """The steps up to the job's position, if it is certain. A rollback abandons the later ones."""
        return steps if self.position is None else {step for step in steps if step <= self.position}

    def _kept_on_far(self) -> set[int]:
        """The steps of both tiers that the second keeps for every combination of their possible values."""
        if self.keep_far is None:
            return set()
        both = Model(self.far.root)
        for step in {*self.model.steps, *self.far.steps}:
            found = [one.steps[step] for one in (self.model, self.far) if step in one.steps]
            both.steps[step] = Step(
                {salt for one in found for salt in one.salts},
                True,
                {salt: loss for one in found for salt, loss in one.loss.items()},
            )
        return both.kept(self.keep_far, sorted(both.steps))

    def _wanted(self, near: set[int], far: set[int]) -> set[int]:
        """The steps of the first tier that the second one must have, if they are not damaged."""
        policy = self.keep_far
        if policy is None:
            return near
        certain = Policy(policy.latest, policy.every)
        return near & (certain.kept(near | far, {}) | certain.kept(self._line(near | far), {}))

    def _is_overwritten(self, step: int) -> bool:
        """True if the save of the step in the first tier has overwritten an earlier one, and is whole."""
        attempt = self.must_replace.get(step)
        if attempt is None or step in self.model.seen_bad or not self.model.is_sound(step):
            return False
        return read_manifest(self.model.storage().within(f"step-{step:08d}")).attempt == attempt

    def _same_manifest(self, step: int) -> bool:
        name = f"step-{step:08d}/{MANIFEST_NAME}"
        paths: list[Path] = [model.root / name for model in (self.model, self.far)]
        return all(path.is_file() for path in paths) and paths[0].read_bytes() == paths[1].read_bytes()

    def _retention_works(self, goes: set[int]) -> None:
        """The step of the running upload stays, too, and waiting steps that the second tier keeps."""
        here = self.model.listed()
        stays = (goes - set(self.model.pins)) & here
        if self.keep_far is not None:
            waits = here - self.far.listed()
            policy = self.keep_far
            line = self._line(here)
            stays -= waits if policy.best else waits & (policy.kept(here, {}) | policy.kept(line, {}))
        assert len(stays) <= 2, f"retention left {stays}"

    def _is_damaged(self) -> bool:
        return bool(self.model.damaged or self.far.damaged)

    def _newest_sound(self) -> int | None:
        steps = {*self.model.steps, *self.far.steps}
        return max((step for step in steps if self._is_restorable(step)), default=None)

    def _is_restorable(self, step: int) -> bool:
        if not any(model.steps[step].sure for model in (self.model, self.far) if step in model.steps):
            return False
        return any(
            self._is_sound_in(first, other, step)
            for first, other in ((self.model, self.far), (self.far, self.model))
            if step in first.steps
        )

    def _is_sound_in(self, first: Model, other: Model, step: int) -> bool:
        """True if the manifest and the index of a tier are whole, and each file is in one of the tiers."""
        damaged, elsewhere = first.rotten(), other.rotten()
        return all(
            "/shards/" in name and name not in elsewhere and (other.root / name).is_file()
            for name in first.steps[step].files & damaged.keys()
        )

    def _same_save(self, step: int) -> bool:
        """True if both tiers have the same save of a step, or the manifest of one is damaged."""
        name = f"step-{step:08d}/{MANIFEST_NAME}"
        if name in self.model.rotten() or name in self.far.rotten():
            return True
        return self._same_manifest(step)

    def _salts(self, step: int) -> set[int]:
        return {
            salt
            for model in (self.model, self.far)
            if step in model.steps
            for salt in model.steps[step].salts
        }

    def _passed_over(self, restored: sp.checkpointer.RestoredStep) -> None:
        for item in restored.passed_over:
            if item.tier:
                model = self._model_of(item.tier)
                was_damaged = model is self.far and item.step in self.damaged_there
                is_earlier = model is self.model and not self._same_save(item.step)
                assert was_damaged or is_earlier or not model.is_sound(item.step), (
                    f"a whole copy on {item.tier} was passed over: {item}"
                )
            elif item.committed:
                assert not self._is_restorable(item.step), f"a whole step was passed over: {item}"

    def _restored_from(self, restored: sp.checkpointer.RestoredStep) -> Model:
        self.has_restored = True
        step = self.position = int(restored)
        if self._model_of(restored.tier) is self.far and step in self.model.steps:
            is_later = not self._same_save(step)
            own = {name for name in self.model.steps[step].files if "/shards/" not in name}
            assert is_later or own & self.model.rotten().keys(), f"step {step} has a nearer copy"
        return self._model_of(restored.tier)

    def _model_of(self, tier: str) -> Model:
        return {str(model.root): model for model in (self.model, self.far)}[tier]


class UploadMachine(TieredMachine):
    """A machine with only the operations that matter to uploads, so that steps wait for theirs more often."""

    @rule(what=st.sampled_from(UPLOAD_OPERATIONS), a=small, b=small)
    def act(self, what: str, a: int, b: int) -> None:
        """See `RunMachine.act`."""
        self._step(what, a, b)

    def _act(self, what: str, a: int, b: int) -> None:
        if what == "damage what waits":
            self.outage = 1
            self.save(1 + a % 3)
            self._damage_shards(self.model, self.now)
        elif what == "damage a killed upload":
            # Each rank adds operations to the save, and the failure is to come in the upload after it.
            self.arm(20 * self._job.ranks + a % (30 * self._job.ranks), ["kill", "power"][b % 2])
            self.save(1)
            if self.now not in self.far.listed():
                self._damage_shards(self.far, self.now)
        elif what == "damage and restore":
            if self.model.steps:
                self.damage(self.model, len(self.model.steps) - 1, b // 3, ["flip", "cut", "remove"][b % 3])
                self._restore(None)
        else:
            super()._act(what, a, b)

    def _damage_shards(self, model: Model, step: int) -> None:
        """The data rots in all shard files of a step, which may be uncommitted."""
        for path in sorted((model.root / f"step-{step:08d}" / "shards").glob("*.safetensors")):
            self._damage(path, "flip", 1)
        model._checked.clear()
