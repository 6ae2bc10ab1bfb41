"""Two jobs save to one step at once: one commits, the other gets an error, and their files are not mixed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.storage import LocalStorage
from tests import harness
from tests.faulty_storage import FaultyStorage
from tests.harness import Job, reach, run_ranks
from tests.scenarios.states import (
    CallResult,
    assert_one_attempt,
    attempt,
    blanked,
    differences,
    plain_state,
    same_on_all_ranks,
    whole_state,
)

STEP = 5


def save_as_one_of_two(root: str, point: str) -> CallResult:
    """Ranks 0 and 1 are one job, 2 and 3 the other; the coordinator of each reaches a point in its save."""
    from torch.distributed import TCPStore

    from shardproof.rendezvous import StoreRendezvous

    job, rank = divmod(harness.rank(), 2)
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, is_master=False)
    meetings = StoreRendezvous(store, rank, 2, deadline=20.0, name=f"job-{job}")
    storage = FaultyStorage(LocalStorage(root))
    checkpointer = sp.Checkpointer(storage, rendezvous=meetings)
    if rank == 0:
        storage.arm(0, lambda *_: reach(point), only=(point,))
    salt = 10 * (job + 1)
    result = attempt(lambda: checkpointer.save(STEP, plain_state(rank, 2, salt)).result())
    storage.disarm()
    winner = 10 * (job + 1) if not result.kind else 10 * (2 - job)
    reach("after")
    target = blanked(plain_state(rank, 2, 0))
    assert checkpointer.restore(target) == STEP
    result.after["wrong"] = differences(target, plain_state(rank, 2, winner))
    return result


@pytest.mark.parametrize(
    ("first", "point"), [(0, "publish"), (2, "publish"), (None, "publish"), (2, "create"), (None, "size")]
)
def test_one_job_commits_and_the_other_gets_an_error(first: int | None, point: str, tmp_path: Path) -> None:
    def script(job: Job) -> None:
        for coordinator in (0, 2):
            job.until_held(coordinator, point)  # both are at the point
        for coordinator in (0, 2) if first is None else (first, 2 - first):
            job.go(coordinator)
            if first is not None:
                job.until_held(coordinator, "after")  # the other one comes when all is over
        for rank in range(4):
            job.until_held(rank, "after")
        for rank in range(4):
            job.go(rank)

    hold = {rank: [point, "after"] if rank % 2 == 0 else "after" for rank in range(4)}
    outcomes = run_ranks(4, save_as_one_of_two, str(tmp_path), point, hold=hold, script=script)
    results = [outcome.value for outcome in outcomes]
    jobs = [same_on_all_ranks(results[:2]), same_on_all_ranks(results[2:])]
    assert sorted(job.kind for job in jobs) == ["", "AlreadyCommittedError"]
    won = 0 if not jobs[0].kind else 1
    if first is not None:
        assert won == first // 2
    assert step_name(STEP) in jobs[1 - won].text
    assert [one.after["wrong"] for one in results] == [[]] * 4
    folder = tmp_path / step_name(STEP)
    assert assert_one_attempt(folder) == results[2 * won].value.attempt
    target = blanked(whole_state(2, 0))
    sp.load(folder, target, exclude="own")
    assert differences(target, whole_state(2, 10 * (won + 1))) == []
    with sp.open(folder) as checkpoint:
        assert torch.equal(checkpoint["model.bias"][...], whole_state(2, 10 * (won + 1))["model"]["bias"])
