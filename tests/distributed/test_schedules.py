"""Ranks with other clocks and speeds save at the same call; a notice to one rank ends all after a save."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.runs.checkpointer.due_saves import DueSaves
from tests.harness import Job, Outcome, rank, reach, rendezvous, run_ranks

pytestmark = pytest.mark.timeout(150)

PERIOD = 100.0
"""Seconds of the schedule, by the injected clock of rank 0."""
QUIET = 8000
"""Calls of rank 0 in which its clock stands still, so that the others have time to act on theirs."""


def calls_that_save(steps: int, quiet: int) -> list[int]:
    """The numbers of the calls that save, on a rank whose clock and speed are its own.

    The clock of rank 0 stands still for `quiet` calls, and then goes on one second a call. Those of the other
    ranks run away. Each rank works another time between two calls, and no rank waits for the others except in
    the "save".
    """
    calls = 0
    speed, stands = (1.0, 1e6, -1e6)[rank()], 0 if rank() else quiet
    foreground = rendezvous(deadline=30.0)
    every = sp.Every(steps=steps) | sp.Every(minutes=PERIOD / 60)
    due = DueSaves(every, None, None, foreground, "run", clock=lambda: speed * max(calls - stands, 0))
    saved: list[int] = []
    while len(saved) < 4:
        calls += 1
        if calls % 16 == 0:
            time.sleep((0.002, 0.001, 0.004)[rank()])  # the work of 16 steps
        if due.is_due(calls):
            saved.append(calls)
            foreground.meet("save", "commit", str(calls).encode(), lambda posts: b"".join(sorted(set(posts))))
    return saved


def test_only_the_clock_of_rank_0_counts_and_all_ranks_save_at_the_same_call() -> None:
    found = [outcome.value for outcome in run_ranks(3, calls_that_save, 10**9, QUIET)]
    assert found[0] == found[1] == found[2]
    assert found[0][0] > QUIET + PERIOD  # by the clock of rank 1, a save would be due at its first call
    assert min(after - before for before, after in pairwise(found[0])) > PERIOD


def test_steps_and_time_together() -> None:
    found = [outcome.value for outcome in run_ranks(3, calls_that_save, 700, 0)]
    assert found[0] == found[1] == found[2]
    by_steps = set(range(700, found[0][-1] + 1, 700))
    assert by_steps <= set(found[0]) and set(found[0]) - by_steps


def train(root: str, options: dict[str, Any], points: dict[int, str]) -> None:
    """Trains until it is preempted. Ranks have other speeds, and wait for each other at a save."""
    checkpointer = sp.Checkpointer(
        root,
        rendezvous=rendezvous(deadline=30.0),
        every=sp.Every(steps=200),
        preemption=sp.Preemption(**options),
    )
    reach("made")
    state: dict[str, Any] = {"w": torch.zeros(64, 64), "step": 0}
    for step in range(1, 10**9):
        if step % 8 == 0:
            time.sleep(0.0005 * rank())  # the work of 8 steps
        state["step"] = step
        state["w"].fill_(step)
        if step in points:
            reach(points[step])
        checkpointer.save_if_due(step, state)


def preempted(outcomes: list[Outcome], root: Path, **others: Any) -> tuple[int, str]:
    """Step and reason, equal on all ranks; the step is committed and has the values of that step."""
    for outcome in outcomes:
        if not isinstance(outcome.error, sp.Preempted):
            _ = outcome.value  # raises what happened
    (found,) = {(o.error.step, o.error.reason) for o in outcomes if isinstance(o.error, sp.Preempted)}
    target: dict[str, Any] = {"w": torch.zeros(64, 64), "step": 0, **others}
    assert sp.Checkpointer(root).restore(target) == found[0]
    assert target["step"] == found[0] and target["w"].eq(found[0]).all()
    return found


@pytest.mark.parametrize("point", ["made", "first", "later"])
def test_a_signal_to_one_rank_ends_all_ranks_after_one_save(point: str, tmp_path: Path) -> None:
    points = {1: "first", 250: "later", 251: "past"}
    hold = {1: point, 0: "past"} if point == "later" else {1: point}

    def script(job: Job) -> None:
        job.until_held(1, point)
        if point == "later":  # rank 0 has made the call that rank 1 makes next, so that call cannot save
            job.until_held(0, "past")
            job.go(0)
        job.signal(1, signal.SIGUSR1)
        job.go(1)

    outcomes = run_ranks(3, train, str(tmp_path), {}, points, hold=hold, script=script, timeout=60)
    step, reason = preempted(outcomes, tmp_path)
    assert reason == "SIGUSR1 on rank 1"
    assert step > 250 or point != "later"


def test_signals_to_all_ranks_at_different_steps(tmp_path: Path) -> None:
    points = {1: "first", 150: "later", 190: "last"}

    def script(job: Job) -> None:
        for number, point in ((2, "first"), (0, "later"), (1, "last")):
            job.until_held(number, point)
        for number in (2, 0, 1):
            job.signal(number, signal.SIGTERM)
            job.go(number)

    outcomes = run_ranks(
        3,
        train,
        str(tmp_path),
        {},
        points,
        hold={2: "first", 0: "later", 1: "last"},
        script=script,
        timeout=60,
    )
    step, reason = preempted(outcomes, tmp_path)
    assert reason.startswith("SIGTERM on rank ") and step >= 190  # the step of the fastest rank


class Slow:
    """An object of the state that waits in each save of step 200."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        if self.step == 200:
            reach("saving")
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def train_with_slow_saves(root: str) -> None:
    checkpointer = sp.Checkpointer(
        root,
        rendezvous=rendezvous(deadline=30.0),
        every=sp.Every(steps=200),
        preemption=sp.Preemption(signals=(signal.SIGTERM,)),
        when_busy="skip",
    )
    state: dict[str, Any] = {"w": torch.zeros(64, 64), "step": 0, "slow": (slow := Slow())}
    for step in range(1, 10**9):
        state["step"] = slow.step = step
        state["w"].fill_(step)
        checkpointer.save_if_due(step, state)


def test_a_signal_during_a_save(tmp_path: Path) -> None:
    def script(job: Job) -> None:
        job.until_held(0, "saving")
        job.signal(0, signal.SIGTERM)
        job.go(0)

    outcomes = run_ranks(
        2, train_with_slow_saves, str(tmp_path), hold={0: "saving"}, script=script, timeout=60
    )
    step, reason = preempted(outcomes, tmp_path, slow=Slow())
    assert reason == "SIGTERM on rank 0" and step > 200
    assert 200 in sp.Checkpointer(tmp_path).steps()


def test_the_limit_of_slurm(tmp_path: Path) -> None:
    """Rank 0 has the variable of a job that ends soon; rank 1 has none."""
    end = str(int(time.time()) + 60)
    outcomes = run_ranks(
        2, train, str(tmp_path), {"signals": ()}, {}, environment={"SLURM_JOB_END_TIME": end}, timeout=60
    )
    _, reason = preempted(outcomes, tmp_path)
    assert reason.startswith("the time limit of the job, ")


def train_far_from_the_limit(root: str) -> list[int]:
    made = rendezvous(deadline=30.0)
    every, far = sp.Every(steps=300), sp.Preemption(signals=(), end_time=time.time() + 1e6)
    checkpointer = sp.Checkpointer(root, rendezvous=made, every=every, preemption=far)
    saves = [checkpointer.save_if_due(step, {"w": torch.ones(4)}) for step in range(1, 1001)]
    checkpointer.wait()
    return [save.step for save in saves if save is not None and save.step is not None]


def test_a_limit_that_is_far_ends_nothing(tmp_path: Path) -> None:
    for outcome in run_ranks(2, train_far_from_the_limit, str(tmp_path)):
        assert outcome.value == [300, 600, 900]


def train_and_stay(root: str) -> None:
    with contextlib.suppress(sp.Preempted):
        train(root, {}, {1: "first"})
    reach("preempted")


def test_ranks_that_are_killed_after_the_save_lose_nothing(tmp_path: Path) -> None:
    def script(job: Job) -> None:
        job.until_held(1, "first")
        job.signal(1, signal.SIGTERM)
        job.go(1)

    run = str(tmp_path)
    killed = {0: "preempted", 1: "preempted"}
    outcomes = run_ranks(2, train_and_stay, run, hold={1: "first"}, kill=killed, script=script, timeout=60)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2
    target: dict[str, Any] = {"w": torch.zeros(64, 64), "step": 0}
    assert sp.Checkpointer(tmp_path).restore(target) == target["step"] > 0


def signalled_twice() -> None:
    import shardproof.runs.checkpointer.preemption as preemption

    clock: Iterator[float] = iter((0.0, 1.0, 10.0, 20.0))
    notices = preemption.SignalNotices((signal.SIGTERM,), lambda: None, lambda: next(clock))
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # the same notice, which reached this rank in two ways
    assert notices.first == signal.SIGTERM
    reach("alive")
    signal.raise_signal(signal.SIGTERM)
    reach("not reached")


def test_the_second_notice_has_the_default_effect() -> None:
    (outcome,) = run_ranks(1, signalled_twice)
    assert outcome.exit_code == -signal.SIGTERM, outcome.trace
    assert outcome.reached == ["alive"]


def without_the_other_ranks(root: str) -> str:
    """Rank 1 ends before the ranks can agree, so that rank 0 gets an error, within the deadline."""
    if rank() == 1:
        return ""
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous_alone(), every=sp.Every(minutes=0.001))
    for step in range(1, 10**9):
        try:
            checkpointer.save_if_due(step, {"w": torch.ones(2)})
        except sp.RankSilent as silent:
            return silent.message
        time.sleep(0.01)
    raise AssertionError


def rendezvous_alone() -> Any:
    import os
    from datetime import timedelta

    from torch.distributed import TCPStore

    from shardproof.rendezvous import StoreRendezvous

    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, None, wait_for_workers=False, timeout=timedelta(seconds=30))
    return StoreRendezvous(store, rank(), 2, deadline=2.0)


def test_a_rank_that_is_gone_is_named_within_the_deadline(tmp_path: Path) -> None:
    outcomes = run_ranks(2, without_the_other_ranks, str(tmp_path), timeout=60)
    assert "schedule " in outcomes[0].value and "rank 1" in outcomes[0].value
