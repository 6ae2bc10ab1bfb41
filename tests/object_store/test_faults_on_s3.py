"""The faults of local folders, in a bucket: death at every operation, a silent rank, refusals, damage."""

from __future__ import annotations

from typing import Any

import pytest

import shardproof as sp
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import ObjectStorage
from tests.faulty_storage import FaultyStorage, kill_self
from tests.harness import Job, rank, reach, rendezvous, run_ranks, world_size
from tests.object_store.seaweed import S3Server
from tests.scenarios.states import attempt, blanked, differences, plain_state, whole_state

pytestmark = pytest.mark.processes

CHANGES = ("create", "write_at", "finish", "publish", "delete")
RANKS = 2
DEADLINE = 4.0


def save(url: str, options: dict[str, str], step: int, who: int, at: int | None) -> tuple[str, list[str]]:
    """Saves a step on all ranks. Rank `who` dies before its `at`-th change of the bucket."""
    meetings = rendezvous(deadline=60.0)
    storage = FaultyStorage(
        ObjectStorage(url, options), at if rank() == who else None, kill_self, only=CHANGES
    )
    checkpointer = sp.Checkpointer(storage, rendezvous=meetings, keep=sp.KeepLatest(1))
    meetings.meet("test", "ready", b"", lambda posts: b"")
    meetings.deadline = DEADLINE
    ended = attempt(lambda: checkpointer.save(step, plain_state(rank(), world_size(), step)).result())
    return ended.kind, [operation for operation, _ in storage.operations]


def restored(url: str, options: dict[str, str]) -> int | None:
    """The step that one process alone restores, with the values of that step."""
    target = blanked(whole_state(RANKS, 0))
    checkpointer = sp.Checkpointer(url, rendezvous=LocalRendezvous(), storage_options=options)
    step = checkpointer.restore(target, exclude="own")
    if step is not None:
        assert differences(target, whole_state(RANKS, int(step))) == []
    return step


def die(url: str, s3: S3Server, step: int, who: int, at: int) -> bool:
    """True if rank `who` died in its save of the step. The run must have that step or the one before."""
    outcomes = run_ranks(RANKS, save, url, s3.options, step, who, at, timeout=120)
    dead = outcomes[who].exit_code != 0
    if dead:
        assert outcomes[1 - who].value[0] in ("", "RankSilent", "RankFailure")
    else:
        assert [outcome.value[0] for outcome in outcomes] == ["", ""]
    found = restored(url, s3.options)
    assert found in ((step - 1, step) if dead else (step,)), (found, step, at)
    return dead


@pytest.mark.parametrize(("who", "at"), [(1, 2), (0, 6)], ids=["in the flush of a shard", "in the commit"])
def test_a_rank_that_dies_leaves_the_step_before(s3: S3Server, url: str, who: int, at: int) -> None:
    (first, _), _ = (
        outcome.value for outcome in run_ranks(RANKS, save, url, s3.options, 1, 0, None, timeout=120)
    )
    assert first == ""
    assert die(url, s3, 2, who, at)
    assert restored(url, s3.options) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("who", [0, 1], ids=["the coordinator", "a follower"])
def test_killed_at_every_operation(s3: S3Server, url: str, who: int) -> None:
    """Job after job saves the step after the newest, and dies one operation later."""
    run_ranks(RANKS, save, url, s3.options, 1, who, None, timeout=120)
    at = 0
    while die(url, s3, (restored(url, s3.options) or 0) + 1, who, at):
        at += 1
    assert at >= (8 if who == 0 else 3)


def stop_in_a_save(url: str, options: dict[str, str]) -> str:
    meetings = rendezvous(deadline=60.0)

    def pause(operation: str, name: str) -> None:
        reach("writing")

    fault: Any = pause if rank() == 1 else None
    storage = FaultyStorage(ObjectStorage(url, options), 1 if fault else None, fault, only=CHANGES)
    checkpointer = sp.Checkpointer(storage, rendezvous=meetings)
    meetings.meet("test", "ready", b"", lambda posts: b"")
    meetings.deadline = DEADLINE
    ended = attempt(lambda: checkpointer.save(2, plain_state(rank(), world_size(), 2)).result())
    return f"{ended.kind} {ended.details.get('ranks') or ended.details.get('rank')}"


def test_a_silent_rank_is_named_and_the_step_before_stays(s3: S3Server, url: str) -> None:
    def script(job: Job) -> None:
        job.until_held(1, "writing")
        job.stop(1)
        job.until_done(0)
        job.kill(1)

    run_ranks(RANKS, save, url, s3.options, 1, 0, None, timeout=120)
    outcomes = run_ranks(
        RANKS, stop_in_a_save, url, s3.options, hold={1: "writing"}, script=script, timeout=120
    )
    assert outcomes[0].value == "RankSilent [1]"
    assert restored(url, s3.options) == 1


def test_a_store_that_refuses_writes_fails_the_save_on_all_ranks(s3: S3Server, url: str) -> None:
    """As a full quota does: the server answers 403 to each write, and reads go on."""
    run_ranks(RANKS, save, url, s3.options, 1, 0, None, timeout=120)
    outcomes = run_ranks(RANKS, save, url, s3.reader_options, 2, 0, None)
    assert {outcome.value[0] for outcome in outcomes} == {"RankFailure"}
    assert restored(url, s3.reader_options) == 1
    assert [outcome.value[0] for outcome in run_ranks(RANKS, save, url, s3.options, 2, 0, None)] == ["", ""]
    assert restored(url, s3.options) == 2


def test_each_damaged_file_of_a_step_is_passed_over(s3: S3Server, url: str) -> None:
    storage = ObjectStorage(url, s3.options)
    alone = sp.Checkpointer(url, rendezvous=LocalRendezvous(), storage_options=s3.options)
    for step in (1, 2):
        alone.save(step, whole_state(RANKS, step)).result()
    names = storage.list("step-00000002")
    assert len(names) == 3
    for name in names:
        data = storage.read(name)
        flipped = bytearray(data)
        weight = whole_state(RANKS, 2)["model"]["weight"].numpy().tobytes()
        flipped[max(data.find(weight), len(data) // 2)] ^= 4
        for damaged in (bytes(flipped), data[: len(data) // 2], None):
            if damaged is None:
                storage.delete(name)
            else:
                storage.publish(name, damaged, replace=True)
            assert restored(url, s3.options) == 1, (name, damaged and len(damaged))
        storage.publish(name, data, replace=True)
        assert restored(url, s3.options) == 2
