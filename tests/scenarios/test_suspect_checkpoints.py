"""Checkpoints of steps whose validation failed, with real ranks, some of which die or disagree."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.harness import Job, rank, reach, rendezvous, run_ranks, world_size
from tests.scenarios.states import (
    CallResult,
    assert_one_attempt,
    attempt,
    blanked,
    differences,
    plain_state,
    same_on_all_ranks,
)

RANKS = 3


def at(root: Any, deadline: float = 10.0, **options: Any) -> sp.Checkpointer:
    return sp.Checkpointer(root, rendezvous=rendezvous(deadline=deadline), **options)


def state(salt: int) -> dict[str, Any]:
    return plain_state(rank(), world_size(), salt)


def restored(checkpointer: sp.Checkpointer, salt: int, **options: Any) -> tuple[int | None, list[str]]:
    """The restored step, and where the state differs from that of the salt."""
    target = blanked(state(0))
    step = checkpointer.restore(target, **options)
    return step, differences(target, state(salt))


def _life(root: str) -> list[Any]:
    """A step fails validation; the run restarts from the suspect, settles it, and goes on."""
    checkpointer = at(root, keep=sp.KeepLatest(1))
    checkpointer.save(10, state(1)).result()
    checkpointer.save(17, state(2), suspect=True).result()
    results = [restored(checkpointer, 1), restored(checkpointer, 2, suspect=True), checkpointer.suspects()]
    checkpointer.settle_suspect(17, "persistent fault: node 3")
    results += [checkpointer.suspects(), restored(checkpointer, 1, suspect=True)]
    checkpointer.save(20, state(3)).result()
    return [*results, restored(checkpointer, 3, suspect=True), sorted(os.listdir(root))]


def test_a_run_restarts_from_a_suspect_until_it_is_settled(tmp_path: Path) -> None:
    for outcome in run_ranks(RANKS, _life, str(tmp_path)):
        assert outcome.value == [(10, []), (17, []), [17], [], (10, []), (20, []), ["step-00000020"]]


def _disagree(root: str) -> list[str]:
    checkpointer = at(root)
    checkpointer.save(1, state(1)).result()
    checkpointer.save(2, state(2), suspect=True).result()
    first = rank() == 0
    calls: list[Callable[[], Any]] = [
        lambda: checkpointer.restore(state(0), suspect=first),
        lambda: checkpointer.restore(state(0), suspect=first, step=2 if first else 1),
        lambda: checkpointer.save(3, state(3), suspect=first).result(),
        lambda: checkpointer.settle_suspect(2 if first else 3, "transient fault"),
        lambda: checkpointer.settle_suspect(2, f"the verdict of {rank()}"),
        lambda: checkpointer.settle_suspect(2, "transient" if first else None),  # type: ignore[arg-type]
    ]
    results = []
    for call in calls:
        try:
            call()
            results.append("done")
        except sp.ShardproofError as error:
            results.append(error.message)
    assert (checkpointer.steps(), checkpointer.suspects()) == ([1], [2])
    checkpointer.settle_suspect(2, "transient fault")
    return results


def test_calls_with_different_arguments_are_refused_alike_on_all_ranks(tmp_path: Path) -> None:
    outcomes = run_ranks(2, _disagree, str(tmp_path))
    results = outcomes[0].value
    assert outcomes[1].value == results
    for text, expected in zip(
        results,
        [
            "some of them with suspect=True; nothing was changed",
            "different steps: ['1', '2']; nothing was changed",
            "suspect-00000003",
            "rank 1 settles suspect-00000003: transient fault; nothing was settled",
            "rank 1 settles suspect-00000002: the verdict of 1; nothing was settled",
            "needs a text as verdict",
        ],
        strict=True,
    ):
        assert expected in text


def _settle(root: str, point: str) -> tuple[CallResult, list[int]]:
    """Settles. The coordinator reaches a point in its publishing."""
    storage = FaultyStorage(LocalStorage(root))
    checkpointer = at(storage, deadline=4.0)
    if rank() == 0:
        operation, _, when = point.partition(" ")
        storage.arm(0, lambda *_: reach(point), only=(operation,), after=when == "done")
    result = attempt(lambda: checkpointer.settle_suspect(2, "transient fault"))
    return result, checkpointer.suspects()


def _prepare(root: str) -> None:
    checkpointer = at(root)
    checkpointer.save(1, state(1)).result()
    checkpointer.save(2, state(2), suspect=True).result()


def _restore_and_settle(root: str) -> tuple[list[int], tuple[int | None, list[str]], list[int]]:
    checkpointer = at(root)
    before = checkpointer.suspects()
    found = restored(checkpointer, 2 if before else 1, suspect=True)
    checkpointer.settle_suspect(2, "transient fault")
    return before, found, checkpointer.suspects()


@pytest.mark.parametrize(("point", "settled"), [("publish", False), ("publish done", True)])
def test_a_coordinator_that_dies_while_it_settles_is_named(tmp_path: Path, point: str, settled: bool) -> None:
    root = str(tmp_path)
    assert [outcome.value for outcome in run_ranks(RANKS, _prepare, root)] == [None] * RANKS
    outcomes = run_ranks(RANKS, _settle, root, point, kill={0: point})
    assert outcomes[0].exit_code == -signal.SIGKILL
    result = same_on_all_ranks([outcome.value[0] for outcome in outcomes[1:]])
    assert (result.kind, result.details["ranks"]) == ("RankSilent", [0])
    left = [] if settled else [2]
    assert [outcome.value[1] for outcome in outcomes[1:]] == [left] * (RANKS - 1)
    expected: tuple[Any, ...] = (left, (1, []) if settled else (2, []), [])
    assert [outcome.value for outcome in run_ranks(RANKS, _restore_and_settle, root)] == [expected] * RANKS


def _refused(root: str) -> tuple[CallResult, list[int]]:
    storage = FaultyStorage(LocalStorage(root))
    checkpointer = at(storage)
    if rank() == 0:
        storage.arm(0, sp.StorageError("no space left", errno="ENOSPC"), only=("publish",))
    return attempt(lambda: checkpointer.settle_suspect(2, "transient fault")), checkpointer.suspects()


def test_a_verdict_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, _prepare, str(tmp_path))
    outcomes = run_ranks(2, _refused, str(tmp_path))
    assert same_on_all_ranks([outcome.value[0] for outcome in outcomes]).kind == "StorageError"
    assert [outcome.value[1] for outcome in outcomes] == [[2], [2]]


def _damaged(root: str) -> list[Any]:
    checkpointer = at(root)
    found = restored(checkpointer, 1, suspect=True)
    return [found, [(item.step, item.suspect, item.damaged) for item in checkpointer.passed_over]]


@pytest.mark.parametrize("pattern", ["shards/00001-*", "index-*", MANIFEST_NAME])
def test_a_damaged_suspect_is_passed_over_on_all_ranks(tmp_path: Path, pattern: str) -> None:
    run_ranks(2, _prepare, str(tmp_path))
    (file,) = (tmp_path / "suspect-00000002").glob(pattern)
    raw = file.read_bytes()
    half = len(raw) // 2
    file.write_bytes(raw[:half] + bytes(byte ^ 1 for byte in raw[half:]))
    for outcome in run_ranks(2, _damaged, str(tmp_path)):
        assert outcome.value == [(1, []), [(2, True, True)]]


def _save_and_reach_write(root: str) -> CallResult:
    storage = FaultyStorage(LocalStorage(root))
    checkpointer = at(storage, deadline=1.5)
    if rank() == 1:
        storage.arm(0, lambda *_: reach("write"), only=("write_at",))
    return attempt(lambda: checkpointer.save(5, state(5), suspect=True).result())


def _after(root: str) -> list[Any]:
    checkpointer = at(root)
    found = restored(checkpointer, 2, suspect=True)
    passed = [(item.step, item.suspect, item.damaged) for item in checkpointer.passed_over]
    checkpointer.save(5, state(5), suspect=True).result()
    return [found, passed, restored(checkpointer, 5, suspect=True), checkpointer.suspects()]


def test_a_suspect_whose_save_died_is_no_checkpoint_and_is_saved_again(tmp_path: Path) -> None:
    run_ranks(2, _prepare, str(tmp_path))
    outcomes = run_ranks(2, _save_and_reach_write, str(tmp_path), kill={1: "write"})
    assert outcomes[0].value.kind == "RankSilent"
    for outcome in run_ranks(2, _after, str(tmp_path)):
        found, passed, again, suspects = outcome.value
        assert (found, again, suspects) == ((2, []), (5, []), [2, 5])
        assert passed in ([(5, True, False)], []), "empty if not a byte of it had been written"
    assert_one_attempt(tmp_path / "suspect-00000005", leftovers=True)


def _held(root: str) -> list[int]:
    """Settles a suspect whose save is still under way on all ranks: the save ends first."""
    storage = FaultyStorage(LocalStorage(root))
    checkpointer = at(storage)
    if rank() == 0:
        storage.arm(0, lambda *_: reach("commit"), only=("publish",))
    checkpointer.save(4, state(4), suspect=True)
    checkpointer.settle_suspect(4, "transient fault")
    return checkpointer.suspects()


def test_settling_waits_for_the_suspect_to_be_saved(tmp_path: Path) -> None:
    def script(job: Job) -> None:
        job.until_held(0, "commit")
        job.go(0)

    outcomes = run_ranks(2, _held, str(tmp_path), hold={0: "commit"}, script=script)
    assert [outcome.value for outcome in outcomes] == [[], []]
    assert (tmp_path / "suspect-00000004" / "settled.json").exists()


def _fewer(root: str) -> tuple[int | None, list[str], list[int]]:
    checkpointer = at(root)
    target = {"epoch": 0}
    step = checkpointer.restore(target, suspect=True, include="epoch")
    checkpointer.settle_suspect(2, "transient fault")
    return step, [str(target["epoch"])], checkpointer.suspects()


def test_another_world_size_restores_and_settles_a_suspect(tmp_path: Path) -> None:
    run_ranks(3, _prepare, str(tmp_path))
    for outcome in run_ranks(2, _fewer, str(tmp_path)):
        assert outcome.value == (2, ["2"], [])
