"""SIGKILL at every file operation of a save, of one rank and of all.

Each job restores, repeats the save in which the last job was killed, and is killed one operation later in a
new save, until a save completes. Between the jobs, another process checks the files.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.checkpointer.retention import leftovers, remove_leftover
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.storage import LocalStorage
from tests.faults.dying import Deadly, die_at_every_operation
from tests.harness import rank, run_ranks, world_size
from tests.scenarios.states import (
    assert_one_attempt,
    attempt,
    blanked,
    differences,
    files_below,
    plain_state,
    whole_state,
)

RANKS = 2


def resume_and_save(root: Path, meetings: Any, number: int, deadly: Deadly) -> str:
    """Saves step `number` + 1 over any leftovers, and is killed in the save of the next step."""
    checkpointer = sp.Checkpointer(root, rendezvous=meetings, cache="none")
    step = number + 1
    target = blanked(plain_state(rank(), world_size(), 0))
    restored = checkpointer.restore(target)
    if restored is not None:
        assert restored in (step - 1, step, step + 1)
        assert differences(target, plain_state(rank(), world_size(), int(restored))) == []
    if restored is None or restored < step:
        checkpointer.save(step, plain_state(rank(), world_size(), step)).result()
    if restored == step + 1:
        return "committed before"
    with deadly():
        return attempt(
            lambda: checkpointer.save(step + 1, plain_state(rank(), world_size(), step + 1)).result()
        ).kind


def look(root: Path, number: int, ended: list[str]) -> None:
    """One process restores the newest committed step. Each committed step has one attempt's files."""
    checkpointer = sp.Checkpointer(root, rendezvous=LocalRendezvous())
    committed = checkpointer.steps()
    step = number + 1
    assert committed in (list(range(1, step + 1)), list(range(1, step + 2)))
    target = blanked(whole_state(RANKS, 0))
    assert checkpointer.restore(target, exclude="own") == committed[-1]
    passed_over = {item.step for item in checkpointer.passed_over}
    assert passed_over <= {step + 1} - set(committed)  # nothing but the save that died
    assert differences(target, whole_state(RANKS, committed[-1])) == []
    for found in committed[-2:]:
        assert_one_attempt(root / step_name(found), leftovers=True)
    if number % 4 == 3:  # at other times leftovers stay, in the way of the next save
        prune(root)
    assert set(ended) <= {"", "killed", "RankSilent", "RankFailure", "committed before"}, ended


def prune(root: Path) -> None:
    """Removes what dead saves left; then every file belongs to a committed step."""
    storage = LocalStorage(root)
    for leftover in leftovers(storage, lambda name: time.time()):
        assert remove_leftover(storage, leftover)
    expected = []
    for step in sp.Checkpointer(root, rendezvous=LocalRendezvous()).steps():
        manifest = read_manifest(storage.within(step_name(step)))
        names = [MANIFEST_NAME, manifest.index.name, *(record.name for record in manifest.files)]
        expected += [f"{step_name(step)}/{name}" for name in names]
    assert files_below(root) == sorted(expected)


def killed_everywhere(root: str, who: int, everyone: bool, every: int) -> list[str]:
    run = Path(root)
    return die_at_every_operation(partial(resume_and_save, run), partial(look, run), who, everyone, every)


@pytest.mark.parametrize(
    ("who", "everyone", "every"),
    [
        (0, False, 5),
        *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in ((0, False), (1, False), (0, True))),
    ],
    ids=["the coordinator, each fifth", "the coordinator", "a follower", "all"],
)
def test_killed_at_every_file_operation(who: int, everyone: bool, every: int, tmp_path: Path) -> None:
    root = tmp_path / "run"
    outcomes = run_ranks(RANKS, killed_everywhere, str(root), who, everyone, every, timeout=250)
    ended = outcomes[who].value
    assert ended[-1] == ""
    assert ended.count("killed") > (30 if who == 0 else 10) // every
    assert set(ended) == {"", "killed"}
    prune(root)
