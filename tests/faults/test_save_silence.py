"""Ranks that never join a save, stop, die or hang in it are named in time; a slow rank is waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import shardproof as sp
from shardproof.engine.saving import save_protocol
from shardproof.engine.saving.shard_writer import BufferPool
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.harness import Job, Outcome, rank, reach, rendezvous, run_ranks, world_size
from tests.scenarios.states import (
    CallResult,
    assert_one_attempt,
    attempt,
    blanked,
    differences,
    files_below,
    plain_state,
    rows,
    same_on_all_ranks,
    whole,
)

RANKS = 3
DEADLINE = 3.0
SLACK = 4.0
"""Seconds. The machine may be busy with other tests."""


class Run:
    """A checkpointer of one rank, whose storage may have a fault."""

    def __init__(self, root: str, deadline: float = DEADLINE) -> None:
        self.storage = FaultyStorage(LocalStorage(root))
        self.meetings = rendezvous(deadline=deadline)
        self.checkpointer = sp.Checkpointer(self.storage, rendezvous=self.meetings)

    @contextmanager
    def with_long_deadline(self) -> Iterator[None]:
        """A deadline that a busy machine keeps, for the steps that are not under test."""
        self.meetings.deadline, short = 20.0, self.meetings.deadline
        try:
            yield
        finally:
            self.meetings.deadline = short

    def save(self, step: int) -> None:
        self.checkpointer.save(step, plain_state(rank(), world_size(), step)).result()

    def restored(self, step: int) -> list[str]:
        """What a restore of the newest step gets wrong."""
        target = blanked(plain_state(rank(), world_size(), 0))
        found = self.checkpointer.restore(target)
        wrong = differences(target, plain_state(rank(), world_size(), step))
        return wrong + ([] if found == step else [str(found)])

    def reach_in(self, point: str) -> None:
        """The next operation of the storage that the point names reaches it."""
        operation, _, when = point.partition(" ")
        self.storage.arm(0, lambda *_: reach(point), only=(operation,), after=when == "done")


def save_three(root: str, point: str) -> list[Any]:
    """A save; one in which `point` is reached; then, past the point "again", a restore and a save."""
    run = Run(root)
    with run.with_long_deadline():
        run.save(1)
    if point == "before":
        reach(point)
    else:
        run.reach_in(point)
    result = attempt(lambda: run.save(2))
    run.storage.disarm()
    reach("again")
    with run.with_long_deadline():
        wrong = run.restored(1)
        run.save(3)
        return [result, wrong + run.restored(3)]


def in_time(outcomes: list[Outcome], silent: int, phase: str) -> CallResult:
    """Asserts that all ranks got one RankSilent error for this rank, within the deadline."""
    results = [outcome.value[0] for outcome in outcomes]
    result = same_on_all_ranks(results)
    assert result.kind == "RankSilent", result.text
    assert result.details["ranks"] == [silent]
    assert result.details["phase"] == phase
    assert f"rank {silent}" in result.text
    assert 0 < result.details["last_heard"][str(silent)] < DEADLINE + SLACK
    assert "last heard" in result.text
    assert DEADLINE / 2 < max(one.seconds for one in results) < DEADLINE + SLACK
    return result


@pytest.mark.parametrize(
    ("silent", "point", "phase"),
    [
        (1, "before", "collect"),
        (0, "before", "collect"),
        (1, "write_at", "write"),
        (0, "finish done", "write"),
    ],
)
def test_a_stopped_rank_is_named_and_saves_again_later(
    silent: int, point: str, phase: str, tmp_path: Path
) -> None:
    others = [number for number in range(RANKS) if number != silent]

    def script(job: Job) -> None:
        job.until_held(silent, point)
        job.stop(silent)
        for number in others:
            job.until_held(number, "again")
        job.go(silent)
        job.resume(silent)
        for number in range(RANKS):
            job.until_held(number, "again")
        for number in range(RANKS):
            job.go(number)

    hold = {number: [point, "again"] if number == silent else "again" for number in range(RANKS)}
    outcomes = run_ranks(RANKS, save_three, str(tmp_path), point, hold=hold, script=script)
    in_time([outcomes[number] for number in others], silent, phase)
    late = outcomes[silent].value[0]
    assert late.error == outcomes[others[0]].value[0].error  # the stopped rank gets the same error
    assert [outcome.value[1] for outcome in outcomes] == [[]] * RANKS
    assert "manifest.json" not in files_below(tmp_path / "step-00000002")
    assert_one_attempt(tmp_path / "step-00000001")
    assert_one_attempt(tmp_path / "step-00000003")


def save_then_lose_one(root: str, point: str) -> CallResult:
    run = Run(root)
    with run.with_long_deadline():
        run.save(1)
    run.reach_in(point)
    return attempt(lambda: run.save(2))


def restart(root: str) -> list[str]:
    """The restarted job restores step 1, and saves the lost step."""
    run = Run(root, 20.0)
    wrong = run.restored(1)
    run.save(2)
    return wrong + run.restored(2)


@pytest.mark.parametrize(
    ("silent", "point"),
    [(1, "write_at"), (2, "finish done"), (0, "create"), (0, "publish")],
)
def test_a_killed_rank_is_named_and_the_job_can_start_again(silent: int, point: str, tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, save_then_lose_one, str(tmp_path), point, kill={silent: point})
    assert outcomes[silent].exit_code == -9
    for outcome in outcomes:
        outcome.result = [outcome.result]
    in_time([outcome for outcome in outcomes if outcome.rank != silent], silent, "write")
    assert "manifest.json" not in files_below(tmp_path / "step-00000002")
    again = run_ranks(RANKS, restart, str(tmp_path))
    assert [outcome.value for outcome in again] == [[]] * RANKS
    assert_one_attempt(tmp_path / "step-00000002", leftovers=True)


def one_never_comes(root: str) -> CallResult | None:
    run = Run(root)
    if rank() == 1:
        return None
    return attempt(lambda: run.save(1))


def test_a_rank_that_never_arrives_is_named(tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, one_never_comes, str(tmp_path))
    results = [outcomes[0].value, outcomes[2].value]
    result = same_on_all_ranks(results)
    assert (result.kind, result.details["ranks"], result.details["phase"]) == ("RankSilent", [1], "collect")
    assert result.details["last_heard"] == {"1": None}
    assert "never heard" in result.text
    assert max(one.seconds for one in results) < DEADLINE + SLACK
    assert files_below(tmp_path) == []


def one_writes_slowly(root: str, slow: int) -> CallResult:
    """Buffers of 4 KiB, so that every 4 KiB is a write of its own and a step of progress."""
    run, lock = Run(root, deadline=5.0), threading.Lock()
    state = {"large": rows(whole((6 * 1024, 2), 1), 0, 6 * 1024 if rank() == slow else 0)}

    def wait(_operation: str, name: str) -> None:
        if name.startswith("step-00000001/shards/"):
            with lock:  # two threads write, and there is one pipe to the parent
                reach("a write")

    if rank() == slow:
        run.storage.arm(lambda: True, wait, only=("write_at",))
    with mock.patch.object(save_protocol, "BufferPool", partial(BufferPool, 4096, 3)):
        return attempt(lambda: run.checkpointer.save(1, state).result())


@pytest.mark.parametrize("slow", [0, 1])
def test_the_others_wait_for_a_rank_that_writes_slowly(slow: int, tmp_path: Path) -> None:
    held_back = 10  # writes: more than a deadline together

    def script(job: Job) -> None:
        for _ in range(held_back):
            job.until_held(slow, "a write")
            job.pump(0.7)  # the duration of a write
            job.go(slow)
        job.hold.clear()
        while job.held or job.processes[slow].is_alive():
            for number in list(job.held):
                job.go(number)
            job.pump(0.05)

    outcomes = run_ranks(2, one_writes_slowly, str(tmp_path), slow, hold={slow: "a write"}, script=script)
    results = [outcome.value for outcome in outcomes]
    assert [result.kind for result in results] == ["", ""], results
    assert min(result.seconds for result in results) > 6.0
    assert_one_attempt(tmp_path / "step-00000001")


def one_hangs(root: str) -> CallResult:
    """Rank 1 is alive, inside a write that does not end."""
    run = Run(root)
    with run.with_long_deadline():
        run.save(1)
    if rank() == 1:
        run.storage.arm(0, lambda *_: reach("a write"), only=("write_at",))
    return attempt(lambda: run.save(2))


def test_a_rank_that_hangs_in_a_write_is_named(tmp_path: Path) -> None:
    def script(job: Job) -> None:
        job.until_held(1, "a write")
        job.until_done(0, 2)
        job.go(1)

    outcomes = run_ranks(RANKS, one_hangs, str(tmp_path), hold={1: "a write"}, script=script)
    late = outcomes[1].value
    for outcome in outcomes:
        outcome.result = [outcome.result]
    result = in_time([outcomes[0], outcomes[2]], 1, "write")
    assert late.error == result.error
    assert "manifest.json" not in files_below(tmp_path / "step-00000002")
