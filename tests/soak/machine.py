"""The state machine: jobs of several ranks on one folder, with faults at any operation of the disk.

The ranks are threads that meet over a store in memory, so a step of the machine takes some hundredths of a
second. Every operation may meet a failure of the disk that an earlier rule has armed. A failure that ends
the processes is followed by a new job; other failures are errors of the operation, and the job goes on.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch.distributed import HashStore

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME
from shardproof.errors import AlreadyCommittedError, ShardproofError
from shardproof.rendezvous import LocalRendezvous, StoreRendezvous
from shardproof.runs.checkpointer import plan_prune, prune
from tests.scenarios.states import differences
from tests.soak.disk import Disk, Failure
from tests.soak.model import Model, Policy, Step, local_files, target, values

__all__ = ["LIMIT", "OPERATIONS", "POLICIES", "Census", "Job", "RunMachine", "ranks_of_a_job", "small"]

LIMIT = 120.0
"""Seconds that one operation may take."""

SECTOR = 512
"""Bytes that rot together."""

POLICIES = [
    None,
    Policy(1),
    Policy(2),
    Policy(1, every=3),
    Policy(1, best=True),
    Policy(2, every=4, best=True),
]

FAILURES: list[Failure] = ["power", "power", "kill", "full", "error"]

OPERATIONS = [
    *["save"] * 10,
    *["arm"] * 5,
    *["restore"] * 3,
    *["second job", "save again", "suspect", "roll back", "resize", "prune", "pin"] * 2,
    *["settle", "unpin", "restore best"],
    *["damage"] * 2,
]
"""The operations of the machine. The number of repeats is the weight of an operation."""

small = st.integers(0, 255)
ranks_of_a_job = st.integers(1, 3)


class Census:
    """Resources of this process: descriptors, threads, memory, shared files, and keys of a job's store."""

    def __init__(self, keys: int) -> None:
        gc.collect()
        with open("/proc/self/statm") as statm:
            self.memory = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.threads = threading.active_count()
        self.shared = sum("shardproof" in name for name in os.listdir("/dev/shm"))
        self.keys = keys

    def __repr__(self) -> str:
        return str(vars(self))


class Job:
    """Ranks of one job, as threads.

    Args:
        root: folder of the run.
        ranks: number of ranks.
        policy: for `Checkpointer(keep=)`.
        incremental: for `Checkpointer(incremental=)`.
        options: further arguments of `Checkpointer`.
    """

    def __init__(
        self, root: Path, ranks: int, policy: Policy | None, incremental: bool, **options: Any
    ) -> None:
        self.ranks, self.policy, self.incremental = ranks, policy, incremental
        self.store = HashStore()
        self._pool = ThreadPoolExecutor(ranks)
        self.rendezvous = [
            StoreRendezvous(self.store, rank, ranks, deadline=LIMIT / 2) if ranks > 1 else LocalRendezvous()
            for rank in range(ranks)
        ]
        keep = policy.make() if policy is not None else None
        self.checkpointers = [
            sp.Checkpointer(
                root,
                keep=keep,
                rendezvous=rendezvous,
                incremental=incremental and sp.Incremental(full_every=4),
                cache="none",
                **options,
            )
            for rendezvous in self.rendezvous
        ]

    def on_ranks(self, work: Callable[[sp.Checkpointer, int], Any]) -> list[Any]:
        """Returns each rank's result, or the `ShardproofError` that it raised."""

        def run(rank: int) -> Any:
            try:
                return work(self.checkpointers[rank], rank)
            except ShardproofError as error:
                return error

        return [
            future.result(LIMIT) for future in [self._pool.submit(run, rank) for rank in range(self.ranks)]
        ]

    def close(self) -> None:
        for checkpointer in self.checkpointers:
            with suppress(ShardproofError):
                checkpointer.wait(LIMIT)
            with suppress(ShardproofError):
                checkpointer.wait_for_uploads(LIMIT)
            with suppress(TimeoutError, ShardproofError):
                checkpointer.wait_for_scrub(LIMIT)
        for rendezvous in self.rendezvous:
            rendezvous.close()
        self._pool.shutdown()


class RunMachine(RuleBasedStateMachine):
    """See the module."""

    census: ClassVar[list[Census] | None] = None
    """If a list, the machine adds a census after each job."""
    total_steps = 0

    def __init__(self) -> None:
        super().__init__()
        log = logging.getLogger("shardproof")
        self._level = log.level
        log.setLevel(logging.CRITICAL)  # the warnings of a thousand faults
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self.root = Path(self._folder.name) / "run"
        self.disk = Disk(Path(self._folder.name))
        self.disk.__enter__()
        self.model = Model(self.root, partial(self.disk.rotten, self.root))
        self.history: list[str] = []
        self.salt = 0
        self.now = 0
        """The current step of training."""
        self.unsure: set[int] = set()
        """Steps whose save has failed in this job, although they may be committed."""
        self.saves_refused = 0
        self.job: Job | None = None
        self.pending: dict[int, sp.PendingSave] = {}
        """The last save, by rank."""
        self.interrupted = False

    @initialize(ranks=ranks_of_a_job, policy=st.sampled_from(POLICIES), incremental=st.booleans())
    def start(self, ranks: int, policy: Policy | None, incremental: bool) -> None:
        self._begin_job(ranks, policy, incremental)

    @rule(what=st.sampled_from(OPERATIONS), a=small, b=small)
    def act(self, what: str, a: int, b: int) -> None:
        """One operation. One rule for all, because Hypothesis leaves out some rules of a whole example."""
        self._step(what, a, b)

    def _step(self, what: str, a: int, b: int) -> None:
        self._record(f"{what} {a} {b}")
        with self._reported():
            self.interrupted = False
            self._act(what, a, b)
            self._check()
        type(self).total_steps += 1
        self._record(f"  {self._describe()}")

    def _describe(self) -> str:
        return self.model.describe()

    def _check(self) -> None:
        self.model.check(interrupted=self.interrupted)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Prints what the machine did, if a check fails. Threads do not run twice in the same order."""
        try:
            yield
        except BaseException as error:
            print("\n".join(self.history))
            self.failed(error)
            raise

    def failed(self, error: BaseException) -> None:
        """A check failed. Hypothesis may raise something else, if its second run ends in another way."""

    def _record(self, text: str) -> None:
        self.history.append(text)

    def _act(self, what: str, a: int, b: int) -> None:
        model = self.model
        if what == "resize":
            self.resize(1 + a % 3, POLICIES[b % len(POLICIES)], b % 2 == 0)
        elif what == "arm":
            self.arm(a % 60, FAILURES[b % len(FAILURES)])
        elif what == "save":
            self.save(1 + a % 3)
        elif what == "save again":
            if model.steps:
                self.save_again(a, b % 2 == 0)
        elif what == "suspect":
            self.save_suspect(a % 3)
        elif what == "settle":
            if model.suspects:
                self.settle(a)
        elif what == "pin":
            if model.steps:
                self.pin(a)
        elif what == "unpin":
            if model.pins:
                self.unpin(a)
        elif what == "restore":
            self._restore(None)
        elif what == "roll back":
            if model.steps:
                self._restore(self._pick(a))
        elif what == "restore best":
            if self._job.policy is not None and self._job.policy.best:
                self._restore("best")
        elif what == "prune":
            self.prune(model, [None, 1, 3][a % 3])
        elif what == "damage":
            if model.steps:
                self.damage(model, a, b // 3, ["flip", "cut", "remove"][b % 3])
        else:
            self.second_job(1 + a % 2)

    def resize(self, ranks: int, policy: Policy | None, incremental: bool) -> None:
        """The job ends, and another one restores on another number of ranks."""
        self._end_job()
        self._begin_job(ranks, policy, incremental)
        self._restore(None)

    def arm(self, after: int, how: Failure) -> None:
        """One of the next operations of the disk fails."""
        self.disk.fail(after, how)

    def save(self, forward: int) -> None:
        self.now += forward
        self._save(self.now, overwrite=False)

    def save_again(self, which: int, overwrite: bool) -> None:
        """A step that is committed is saved once more."""
        self._save(self._pick(which), overwrite=overwrite)

    def save_suspect(self, forward: int) -> None:
        step, salt = self.now + forward, self._new_salt()
        ranks = self._job.ranks
        before = self.model.suspects.get(step)
        known = self.model.suspects.setdefault(step, Step(set(), False))
        known.salts.add(salt)
        self.model._checked.discard((step, True))
        ended = self._run(
            lambda one, rank: one.save(step, values(salt, rank, ranks), suspect=True).result(LIMIT)
        )
        if self._succeeded(ended):
            known.salts, known.sure = {salt}, True
            self.model.settled.discard(step)
        elif step in self.model.settled and before is not None:
            known.sure = False
        self._after()

    def settle(self, which: int) -> None:
        step = sorted(self.model.suspects)[which % len(self.model.suspects)]
        self.model.settled.add(step)
        self._run(lambda one, rank: one.settle_suspect(step, "a fault of the test"))
        self._after()

    def pin(self, which: int) -> None:
        step = self._pick(which)
        certain = self.model.pins.get(step, False)
        self.model.pins[step] = certain
        ended = self._run(lambda one, rank: one.pin(step, "kept"))
        if self._succeeded(ended) and self.model.steps[step].sure and step not in self.model.may_go:
            self.model.pins[step] = True
        self._after()

    def unpin(self, which: int) -> None:
        step = sorted(self.model.pins)[which % len(self.model.pins)]
        self.model.pins[step] = False
        ended = self._run(lambda one, rank: one.unpin(step))
        if self._succeeded(ended):
            del self.model.pins[step]
        self._after()

    def prune(self, model: Model, keep: int | None) -> None:
        """Runs the command that removes the files of dead saves. No job may save meanwhile."""
        if keep is not None:
            model.pruned(keep)

        def run(one: sp.Checkpointer, rank: int) -> None:
            if rank == 0:
                storage = model.storage()
                plan = plan_prune(
                    storage, lambda name: 0.0, older_than=0.0, now=time.time(), keep=keep, complete=True
                )
                prune(storage, plan)

        ended = self._run(run)
        healthy = self._succeeded(ended)
        healthy &= self.disk.failed is None
        self._after()
        if healthy:
            self._no_leftovers(model)

    def damage(self, model: Model, which: int, place: int, how: str) -> None:
        """A file of a committed step rots."""
        one = model.steps[sorted(model.steps)[which % len(model.steps)]]
        files = local_files(model.root, one.files)
        if not files:
            return
        name = files[place % len(files)]
        if how == "remove" and name.endswith(MANIFEST_NAME):
            how = "cut"
        self._damage(model.root / name, how, place)
        model._checked.clear()

    def second_job(self, forward: int) -> None:
        """Two jobs of one rank each save one step at the same time."""
        self.now += forward
        step, policy = self.now, self._job.policy
        salts = [self._new_salt(), self._new_salt()]
        fresh = step not in self.model.steps
        for salt in salts:
            self.model.begin_save(step, salt, float(salt % 7), replaces=False)
            self.model.steps[step].salts |= set(salts) if fresh else set()
            self.model.steps[step].loss |= {salt: float(salt % 7)} if fresh else {}
        jobs = [Job(self.root, 1, policy, self._job.incremental, **self._job_options()) for _ in salts]
        barrier = threading.Barrier(2)

        def save(index: int) -> Any:
            def run(one: sp.Checkpointer, rank: int) -> Any:
                barrier.wait(LIMIT)
                metadata = {"loss": float(salts[index] % 7)}
                return one.save(step, values(salts[index], 0, 1), metadata=metadata).result(LIMIT)

            return jobs[index].on_ranks(run)[0]

        try:
            with ThreadPoolExecutor(2) as pool:
                ended = [future.result(LIMIT) for future in [pool.submit(save, index) for index in range(2)]]
        finally:
            for job in jobs:
                job.close()
        seen_bad, self.model.seen_bad = self.model.seen_bad, set()  # these jobs have restored nothing
        self.model.retained(policy, step, set())
        self.model.seen_bad = seen_bad
        self._record(f"  {[str(end)[-110:] for end in ended]}, the disk: {self.disk.failed}")
        winners = [index for index, end in enumerate(ended) if not isinstance(end, ShardproofError)]
        assert len(winners) <= 1, "two jobs committed one step"
        if winners:
            assert fresh
            if self.disk.failed is None and not self.model.damaged:
                assert isinstance(ended[1 - winners[0]], AlreadyCommittedError), repr(ended[1 - winners[0]])
            self.model.end_save(step, salts[winners[0]])
        elif fresh and self.disk.failed is None and not self.model.damaged:
            raise AssertionError(f"neither job committed step {step}: {ended}")
        self._after()

    def teardown(self) -> None:
        try:
            if self.job is not None:
                self._record("the end: a loss of power")
                self._end_job()
                self.interrupted = False
                self._restart("power")
                with self._reported():
                    self._check()
        finally:
            self.disk.__exit__()
            self._folder.cleanup()
            logging.getLogger("shardproof").setLevel(self._level)

    @property
    def _job(self) -> Job:
        assert self.job is not None
        return self.job

    def _begin_job(self, ranks: int, policy: Policy | None, incremental: bool) -> None:
        self._record(f"  a job of {ranks} ranks, {policy}, {'incremental' if incremental else 'full'} saves")
        self.job = Job(self.root, ranks, policy, incremental, **self._job_options())
        self.unsure, self.saves_refused = set(), 0
        self.model.seen_bad = set()

    def _job_options(self) -> dict[str, Any]:
        """Further arguments of `Checkpointer`."""
        return {}

    def _end_job(self) -> None:
        job, self.job = self._job, None
        job.close()
        keys = job.store.num_keys()
        del job
        if self.census is not None:
            self.census.append(Census(keys))

    def _run(self, work: Callable[[sp.Checkpointer, int], Any]) -> list[Any]:
        return self._job.on_ranks(work)

    def _succeeded(self, ended: list[Any]) -> bool:
        self._record(f"  {[str(end)[-110:] for end in ended]}, the disk: {self.disk.failed}")
        failed = [isinstance(end, ShardproofError) for end in ended]
        if self.disk.failed is None:
            assert len(set(failed)) == 1, f"only some ranks failed: {ended}"
        return not any(failed)

    def _save(self, step: int, *, overwrite: bool) -> None:
        model, job, salt = self.model, self._job, self._new_salt()
        there = step in model.steps
        replaces = overwrite or step in model.seen_bad
        loss = float(salt % 7)
        model.begin_save(step, salt, loss, replaces=replaces)

        def save(one: sp.Checkpointer, rank: int) -> Any:
            pending = one.save(
                step, values(salt, rank, job.ranks), metadata={"loss": loss}, overwrite=overwrite
            )
            self.pending[rank] = pending
            return pending.result(LIMIT)

        ended = self._run(save)
        if self._succeeded(ended):
            assert not there or replaces or not model.steps[step].sure, f"step {step} was replaced unasked"
            model.begin_save(step, salt, loss, replaces=True)
            model.end_save(step, salt)
            self.unsure.discard(step)
            self.saves_refused = 0
            healthy = self.disk.failed is None and not model.damaged
            goes = model.retained(job.policy, step, self.unsure)
            if healthy and not self.unsure:
                self._retention_works(goes)
        else:
            errors = [end for end in ended if isinstance(end, ShardproofError)]
            if there and not replaces and all(isinstance(error, AlreadyCommittedError) for error in errors):
                pass
            else:
                self.unsure.add(step)
                model.retained(job.policy, step, self.unsure)
                if self.disk.failed is None:
                    assert model.damaged, f"a save failed without a fault: {errors}"
                    self.saves_refused += 1
                    assert self.saves_refused < 3, f"no save works any more: {errors}"
        self._after()

    def _retention_works(self, goes: set[int]) -> None:
        """At most one of the removable steps stays: the last that is proved readable."""
        stays = (goes - set(self.model.pins)) & self.model.listed()
        assert len(stays) <= 1, f"retention left {stays}"

    def _restore(self, step: int | str | None) -> None:
        model, job = self.model, self._job
        targets = [target(rank, job.ranks) for rank in range(job.ranks)]
        expected = self._newest_sound()
        ones: dict[int, sp.Checkpointer] = {}

        def restore(one: sp.Checkpointer, rank: int) -> Any:
            ones[rank] = one
            return one.restore(targets[rank], step=step)

        ended = self._run(restore)
        if not self._succeeded(ended):
            if 0 in ones:  # a failed restore has passed over damaged steps, too
                model.seen_bad |= {
                    item.step for item in ones[0].passed_over if item.damaged and not item.suspect
                }
            error = next(end for end in ended if isinstance(end, ShardproofError))
            if self.disk.failed is None:
                if isinstance(step, int):
                    assert not self._is_restorable(step), f"step {step}: {error}"
                elif step is None:
                    assert expected is None, f"step {expected} was not restored: {error}"
                else:
                    assert self._is_damaged() or expected is None, f"{error}"
            self._after()
            return
        restored = ended[0]
        assert all(end == restored for end in ended), ended
        if restored is None:
            assert expected is None, f"step {expected} was not found"
            self._after()
            return
        number = int(restored)
        if isinstance(step, int):
            assert number == step
        elif step is None:
            assert expected is None or number >= expected, f"restored {number}, and {expected} is whole"
        self._right_values(number, targets)
        self._passed_over(restored)
        model.seen_bad |= {item.step for item in restored.passed_over if item.damaged}
        if self.disk.failed is None:
            self._restored_from(restored).steps[number].sure = True  # a restore flushes the step
            self.unsure.discard(number)
        self.now = number
        self._after()

    def _newest_sound(self) -> int | None:
        """The step that a restore must not go below; None if no step is sure."""
        return max((step for step in self.model.steps if self._is_restorable(step)), default=None)

    def _is_restorable(self, step: int) -> bool:
        """True if a restore of the step must work."""
        return self.model.steps[step].sure and self.model.is_sound(step)

    def _is_damaged(self) -> bool:
        return bool(self.model.damaged)

    def _salts(self, step: int) -> set[int]:
        """The values that the step may have."""
        return self.model.steps[step].salts if step in self.model.steps else set()

    def _passed_over(self, restored: sp.checkpointer.RestoredStep) -> None:
        """Checks the steps that a restore left out."""
        over = {item.step for item in restored.passed_over if item.committed}
        assert all(not self.model.is_sound(one) for one in over), f"whole steps were passed over: {over}"

    def _restored_from(self, restored: sp.checkpointer.RestoredStep) -> Model:
        """The model of the run that a step was restored from."""
        return self.model

    def _right_values(self, step: int, targets: list[dict[str, Any]]) -> None:
        ranks = len(targets)
        salt = targets[0]["salt"]
        assert salt in self._salts(step), f"step {step} has salt {salt}, not one of {self._salts(step)}"
        for rank, found in enumerate(targets):
            assert differences(found, values(salt, rank, ranks)) == [], f"step {step} is mixed"

    def _after(self) -> None:
        """After an operation: if the machine or the processes ended in it, a new job begins."""
        failed = self.disk.failed
        self.interrupted |= failed is not None
        if failed in ("power", "kill"):
            self._record(f"{failed} after {self.disk.operations} operations")
            job = self._job
            self._end_job()
            self._restart(failed)
            self._begin_job(job.ranks, job.policy, job.incremental)
        elif failed is not None:
            self.disk.heal()

    def _restart(self, how: Failure) -> None:
        self.disk.restart(how, Random(self.salt))
        self.model.lost_power()

    def _damage(self, path: Path, how: str, place: int) -> None:
        data = bytearray(path.read_bytes())
        if how == "remove":
            self.disk.remove(path)
            return
        if how == "cut":
            del data[len(data) // 2 :]
        elif data:
            header = 8 + int.from_bytes(data[:8], "little") if path.name.endswith(".safetensors") else 0
            in_data = place % 3 > 0 and header < len(data)  # most of a small file is its header
            begin = header + place % (len(data) - header) if in_data else place * 7919 % len(data)
            for at in range(begin, min(begin + SECTOR, len(data))):
                data[at] ^= 1 << place % 8
        self.disk.overwrite(path, bytes(data))

    def _no_leftovers(self, model: Model) -> None:
        """Every file belongs to a listed step, or a listed step refers to it, or `repair` may need it."""
        if model.damaged:
            return
        model.check()
        needed = {name for one in model.steps.values() for name in one.files}
        found = {
            str(path.relative_to(model.root))
            for path in model.root.rglob("*")
            if path.is_file() and "step-" in str(path)
        }
        committed = [path.parent.name for path in model.root.glob("step-*/manifest.json")]
        extra = {
            name
            for name in found - needed
            if not name.endswith("pinned.json") and name.partition("/")[0] <= max(committed, default="")
        }
        assert not extra, f"prune left {sorted(extra)}"

    def _pick(self, which: int) -> int:
        return sorted(self.model.steps)[which % len(self.model.steps)]

    def _new_salt(self) -> int:
        self.salt += 1
        return self.salt
