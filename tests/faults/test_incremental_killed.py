"""SIGKILL at every file operation of an incremental save and of the retention after it.

Each job restores, saves one step, and is killed in the save after it, one operation later than the job
before. Between the jobs, one process reads every committed step whole: each must have all files that it
refers to.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.checkpointer.retention import leftovers, remove_leftover
from shardproof.runs.checkpointer.step_folders import parse_step, step_name
from shardproof.storage import LocalStorage
from tests.faults.dying import Deadly, die_at_every_operation
from tests.harness import rank, run_ranks, world_size
from tests.scenarios.states import attempt, blanked, differences, rows, whole


def state(step: int) -> dict[str, Any]:
    """Tensors that never change, that change every third step, and that change every step."""
    part = 8 // world_size()
    mine = rank() * part, (rank() + 1) * part
    return {
        "frozen": rows(whole((8, 30), 1), *mine),
        "slow": rows(whole((8, 20), step // 3), *mine),
        "fast": rows(whole((8, 10), step), *mine),
        "bias": whole((5,), 7),
    }


def state_of_one_process(step: int) -> dict[str, Any]:
    return {
        "frozen": whole((8, 30), 1),
        "slow": whole((8, 20), step // 3),
        "fast": whole((8, 10), step),
        "bias": whole((5,), 7),
    }


def resume_and_save(root: Path, meetings: Any, number: int, deadly: Deadly) -> str:
    """Restores, saves one step (which catches up on retention), and is killed in the next save."""
    checkpointer = sp.Checkpointer(
        root, rendezvous=meetings, cache="none", incremental=True, keep=sp.KeepLatest(2)
    )
    target = blanked(state(0))
    restored = checkpointer.restore(target)
    if restored is not None:
        assert differences(target, state(restored)) == []
    step = (restored or 0) + 1
    checkpointer.save(step, state(step)).result()
    checkpointer.wait_for_scrub(timeout=30)  # so that retention may remove the steps before it
    with deadly():
        return attempt(lambda: checkpointer.save(step + 1, state(step + 1)).result()).kind


def look(root: Path, number: int, ended: list[str]) -> None:
    """All committed steps are whole and have their values."""
    checkpointer = sp.Checkpointer(root, rendezvous=LocalRendezvous())
    steps = checkpointer.steps()
    assert steps
    for step in steps:
        report = verify(LocalStorage(root / step_name(step)))
        assert report.ok, (number, step, report.faults)
        target = blanked(state_of_one_process(0))
        sp.load(root / step_name(step), target, rendezvous=LocalRendezvous())
        assert differences(target, state_of_one_process(step)) == []
    if number % 5 == 4:  # prune must not remove files that other steps refer to
        storage = LocalStorage(root)
        for leftover in leftovers(storage, lambda name: 0.0):
            assert remove_leftover(storage, leftover)
        for step in steps:
            assert verify(LocalStorage(root / step_name(step))).ok
    assert set(ended) <= {"", "killed", "RankSilent", "RankFailure"}, ended


def killed(root: str, who: int, every: int) -> list[str]:
    run = Path(root)
    job, check = partial(resume_and_save, run), partial(look, run)
    return die_at_every_operation(job, check, who, everyone=False, every=every)


@pytest.mark.parametrize(
    ("ranks", "who", "every"),
    [(1, 0, 5), *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in ((1, 0), (2, 1)))],
    ids=["the coordinator, each fifth", "the coordinator", "a follower"],
)
def test_killed_at_every_file_operation(ranks: int, who: int, every: int, tmp_path: Path) -> None:
    root = tmp_path / "run"
    ended = run_ranks(ranks, killed, str(root), who, every, timeout=400)[who].value
    assert ended[-1] == "" and set(ended) == {"", "killed"}
    assert ended.count("killed") > (30 if who == 0 else 8) // every
    storage = LocalStorage(root)
    for leftover in leftovers(storage, lambda name: 0.0):
        assert remove_leftover(storage, leftover)
    committed = sp.Checkpointer(root, rendezvous=LocalRendezvous()).steps()
    referenced = {parse_step(name) for name in storage.folders()} - set(committed)
    assert referenced, "files of removed steps stay for the steps that refer to them"
    for step in committed:
        target = blanked(state_of_one_process(0))
        sp.load(root / step_name(step), target, rendezvous=LocalRendezvous())
        assert differences(target, state_of_one_process(step)) == []
