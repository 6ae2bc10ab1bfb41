"""Ranks that never join a save, stop, die or hang in it are named in time; a slow rank is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.engine.saving.shard_writer import BufferPool
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


def checkpointer_at(root: str, deadline: float = DEADLINE) -> sp.Checkpointer:
    return sp.Checkpointer(root, rendezvous=rendezvous(deadline=deadline))


@contextmanager
def with_long_deadline(checkpointer: sp.Checkpointer) -> Iterator[None]:
    """A deadline that a busy machine keeps, for the steps that are not under test."""
    meetings: Any = checkpointer._rendezvous
    meetings.deadline, short = 20.0, meetings.deadline
    try:
        yield
    finally:
        meetings.deadline = short


def restored(checkpointer: sp.Checkpointer, step: int) -> list[str]:
    target = blanked(plain_state(rank(), world_size(), 0))
    found = checkpointer.restore(target)
    return differences(target, plain_state(rank(), world_size(), step)) + (
        [] if found == step else [str(found)]
    )


def save_three(root: str, point: str) -> list[Any]:
    """A save; one in which `point` is reached; then, past the point "again", a restore and a save."""
    checkpointer = checkpointer_at(root)
    with with_long_deadline(checkpointer):
        checkpointer.save(1, plain_state(rank(), world_size(), 1)).result()
    kept = checkpointer._run.storage
    if point == "before":
        reach(point)
    else:
        operation, _, when = point.partition(" ")
        storage = FaultyStorage(kept, 0, lambda *_: reach(point), only=(operation,), after=when == "done")
        checkpointer._run.storage = storage  # type: ignore[assignment]
    result = attempt(lambda: checkpointer.save(2, plain_state(rank(), world_size(), 2)).result())
    checkpointer._run.storage = kept
    reach("again")
    with with_long_deadline(checkpointer):
        wrong = restored(checkpointer, 1)
        checkpointer.save(3, plain_state(rank(), world_size(), 3)).result()
        return [result, wrong + restored(checkpointer, 3)]


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
    checkpointer = checkpointer_at(root)
    with with_long_deadline(checkpointer):
        checkpointer.save(1, plain_state(rank(), world_size(), 1)).result()
    operation, _, when = point.partition(" ")
    checkpointer._run.storage = FaultyStorage(  # type: ignore[assignment]
        checkpointer._run.storage, 0, lambda *_: reach(point), only=(operation,), after=when == "done"
    )
    return attempt(lambda: checkpointer.save(2, plain_state(rank(), world_size(), 2)).result())


def restart(root: str) -> list[str]:
    """The restarted job restores step 1, and saves the lost step."""
    checkpointer = checkpointer_at(root, 20.0)
    wrong = restored(checkpointer, 1)
    checkpointer.save(2, plain_state(rank(), world_size(), 2)).result()
    return wrong + restored(checkpointer, 2)


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
    checkpointer = checkpointer_at(root)
    if rank() == 1:
        return None
    return attempt(lambda: checkpointer.save(1, plain_state(rank(), world_size(), 1)).result())


def test_a_rank_that_never_arrives_is_named(tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, one_never_comes, str(tmp_path))
    results = [outcomes[0].value, outcomes[2].value]
    result = same_on_all_ranks(results)
    assert (result.kind, result.details["ranks"], result.details["phase"]) == ("RankSilent", [1], "collect")
    assert result.details["last_heard"] == {"1": None}
    assert "never heard" in result.text
    assert max(one.seconds for one in results) < DEADLINE + SLACK
    assert files_below(tmp_path) == []


class Gated(FaultyStorage):
    """Every write of a shard waits at a point until the parent lets it go on."""

    def __init__(self, inner: Any) -> None:
        lock = threading.Lock()

        def wait_at(operation: str, name: str) -> None:
            with lock:  # two threads write, and there is one pipe to the parent
                reach("a write")

        super().__init__(inner, None, None, only=("write_at",))
        self._trigger = _EveryTime(wait_at)  # type: ignore[assignment]


class _EveryTime:
    def __init__(self, hook: Callable[[str, str], None]) -> None:
        self._hook = hook

    def run(self, operation: str, name: str, work: Callable[[], Any]) -> Any:
        if operation == "write_at" and name.startswith("step-00000001/shards/"):
            self._hook(operation, name)
        return work()


def one_writes_slowly(root: str, slow: int) -> CallResult:
    """Buffers of 4 KiB, so that every 4 KiB is a write of its own and a step of progress."""
    checkpointer = checkpointer_at(root, deadline=5.0)
    state = {"large": rows(whole((6 * 1024, 2), 1), 0, 6 * 1024 if rank() == slow else 0)}
    if rank() == slow:
        checkpointer._saver._own_cache().buffers = BufferPool(4096, 3)
        checkpointer._run.storage = Gated(checkpointer._run.storage)  # type: ignore[assignment]
    return attempt(lambda: checkpointer.save(1, state).result())


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
    checkpointer = checkpointer_at(root)
    with with_long_deadline(checkpointer):
        checkpointer.save(1, plain_state(rank(), world_size(), 1)).result()
    if rank() == 1:
        checkpointer._run.storage = FaultyStorage(  # type: ignore[assignment]
            checkpointer._run.storage, 0, lambda *_: reach("a write"), only=("write_at",)
        )
    return attempt(lambda: checkpointer.save(2, plain_state(rank(), world_size(), 2)).result())


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
