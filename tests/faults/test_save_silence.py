"""Ranks that never come to a save, stop, die or hang in it are named in time; one that moves is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.saving.shard_writer import BufferPool
from tests.faulty_storage import FaultyStorage
from tests.harness import Job, Outcome, rank, reach, rendezvous, run_ranks, world_size
from tests.scenarios.states import (
    Said,
    agreed,
    attempt,
    blanked,
    differences,
    files_below,
    only_its_own,
    plain_state,
    rows,
    whole,
)

RANKS = 3
DEADLINE = 3.0
SLACK = 4.0
"""Two cores may be busy with other tests."""


def checkpointer_at(root: str, deadline: float = DEADLINE) -> sp.Checkpointer:
    return sp.Checkpointer(root, rendezvous=rendezvous(deadline=deadline))


@contextmanager
def without_haste(checkpointer: sp.Checkpointer) -> Iterator[None]:
    """A deadline that a busy machine keeps, for what is not put to the test."""
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
    with without_haste(checkpointer):
        checkpointer.save(1, plain_state(rank(), world_size(), 1)).result()
    kept = checkpointer._run.storage
    if point == "before":
        reach(point)
    else:
        operation, _, when = point.partition(" ")
        storage = FaultyStorage(kept, 0, lambda *_: reach(point), only=(operation,), after=when == "done")
        checkpointer._run.storage = storage  # type: ignore[assignment]
    said = attempt(lambda: checkpointer.save(2, plain_state(rank(), world_size(), 2)).result())
    checkpointer._run.storage = kept
    reach("again")
    with without_haste(checkpointer):
        wrong = restored(checkpointer, 1)
        checkpointer.save(3, plain_state(rank(), world_size(), 3)).result()
        return [said, wrong + restored(checkpointer, 3)]


def in_time(outcomes: list[Outcome], silent: int, phase: str) -> Said:
    """All were told that this rank is silent, since when, and soon enough."""
    saids = [outcome.value[0] for outcome in outcomes]
    said = agreed(saids)
    assert said.kind == "RankSilent", said.text
    assert said.details["ranks"] == [silent]
    assert said.details["phase"] == phase
    assert f"rank {silent}" in said.text
    assert 0 < said.details["last_heard"][str(silent)] < DEADLINE + SLACK
    assert "last heard" in said.text
    assert DEADLINE / 2 < max(one.seconds for one in saids) < DEADLINE + SLACK
    return said


@pytest.mark.parametrize(
    ("silent", "point", "phase"),
    [
        (1, "before", "collect"),
        (0, "before", "collect"),
        (1, "write_at", "write"),
        (0, "finish done", "write"),
    ],
)
def test_a_stopped_rank_is_named_and_later_in_step_again(
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
    assert late.error == outcomes[others[0]].value[0].error  # the one that slept is told the same
    assert [outcome.value[1] for outcome in outcomes] == [[]] * RANKS
    assert "manifest.json" not in files_below(tmp_path / "step-00000002")
    only_its_own(tmp_path / "step-00000001")
    only_its_own(tmp_path / "step-00000003")


def save_then_lose_one(root: str, point: str) -> Said:
    checkpointer = checkpointer_at(root)
    with without_haste(checkpointer):
        checkpointer.save(1, plain_state(rank(), world_size(), 1)).result()
    operation, _, when = point.partition(" ")
    checkpointer._run.storage = FaultyStorage(  # type: ignore[assignment]
        checkpointer._run.storage, 0, lambda *_: reach(point), only=(operation,), after=when == "done"
    )
    return attempt(lambda: checkpointer.save(2, plain_state(rank(), world_size(), 2)).result())


def restart(root: str) -> list[str]:
    """The job started anew: what is there is step 1, and the step that was lost can be saved."""
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
    only_its_own(tmp_path / "step-00000002", leftovers=True)


def one_never_comes(root: str) -> Said | None:
    checkpointer = checkpointer_at(root)
    if rank() == 1:
        return None
    return attempt(lambda: checkpointer.save(1, plain_state(rank(), world_size(), 1)).result())


def test_a_rank_that_never_arrives(tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, one_never_comes, str(tmp_path))
    saids = [outcomes[0].value, outcomes[2].value]
    said = agreed(saids)
    assert (said.kind, said.details["ranks"], said.details["phase"]) == ("RankSilent", [1], "collect")
    assert said.details["last_heard"] == {"1": None}
    assert "never heard" in said.text
    assert max(one.seconds for one in saids) < DEADLINE + SLACK
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


def one_writes_slowly(root: str, slow: int) -> Said:
    """Buffers of 4 KiB, so that every 4 KiB is a write of its own and a step of progress."""
    checkpointer = checkpointer_at(root, deadline=5.0)
    state = {"large": rows(whole((6 * 1024, 2), 1), 0, 6 * 1024 if rank() == slow else 0)}
    if rank() == slow:
        checkpointer._saver._own_cache().buffers = BufferPool(4096, 3)
        checkpointer._run.storage = Gated(checkpointer._run.storage)  # type: ignore[assignment]
    return attempt(lambda: checkpointer.save(1, state).result())


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_writes_slowly_is_waited_for(slow: int, tmp_path: Path) -> None:
    held_back = 10  # writes: more than a deadline together

    def script(job: Job) -> None:
        for _ in range(held_back):
            job.until_held(slow, "a write")
            job.pump(0.7)  # this long a write takes
            job.go(slow)
        job.hold.clear()
        while job.held or job.processes[slow].is_alive():
            for number in list(job.held):
                job.go(number)
            job.pump(0.05)

    outcomes = run_ranks(2, one_writes_slowly, str(tmp_path), slow, hold={slow: "a write"}, script=script)
    saids = [outcome.value for outcome in outcomes]
    assert [said.kind for said in saids] == ["", ""], saids
    assert min(said.seconds for said in saids) > 6.0
    only_its_own(tmp_path / "step-00000001")


def one_hangs(root: str) -> Said:
    """Alive, and inside of a write that never ends."""
    checkpointer = checkpointer_at(root)
    with without_haste(checkpointer):
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
    said = in_time([outcomes[0], outcomes[2]], 1, "write")
    assert late.error == said.error
    assert "manifest.json" not in files_below(tmp_path / "step-00000002")
