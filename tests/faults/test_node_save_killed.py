"""SIGKILL at every file operation of a node-local save with copies, and of the copies after a restore.

Each job restores, repeats the save in which the last job was killed, and is killed one operation later in a
new save. The operations of a rank are those of its own save and of its service. The service writes the copies
of the other node and publishes. Between the jobs, one process restores from each node alone.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.runs.maintenance import verify, verify_files_here
from shardproof.storage import LocalStorage
from tests.faults.dying import Deadly, die_at_every_operation
from tests.harness import rank, run_ranks, world_size
from tests.scenarios.states import attempt, blanked, differences, plain_state, whole_state

RANKS = 2
ENDS = {"", "killed", "RankSilent", "RankFailure", "StorageError", "committed before"}


def node_of(root: Path, number: int) -> Path:
    return root / f"node-{number}"


def resume_and_save(root: Path, meetings: Any, number: int, deadly: Deadly) -> str:
    """Saves step `number` + 1 over any leftovers, and is killed in the save of the next step."""
    # In every other job, the ranks swap nodes.
    place = node_of(root, (rank() + number) % RANKS)
    run = sp.Checkpointer(
        place, node_local=sp.NodeLocal(replicas=1), keep=sp.KeepLatest(2), rendezvous=meetings, cache="none"
    )
    step = number + 1
    target = blanked(plain_state(rank(), world_size(), 0))
    restored = run.restore(target)
    if restored is not None:
        assert restored in (step - 1, step, step + 1)
        assert differences(target, plain_state(rank(), world_size(), int(restored))) == []
    if restored is None or restored < step:
        run.save(step, plain_state(rank(), world_size(), step)).result()
    if restored == step + 1:
        return "committed before"
    with deadly():
        return attempt(lambda: run.save(step + 1, plain_state(rank(), world_size(), step + 1)).result()).kind


def look(root: Path, number: int, ended: list[str]) -> None:
    """From each node alone, restores the newest step whose save has returned, or a newer one."""
    for lost in range(RANKS):
        there = node_of(root, 1 - lost)
        alone = sp.Checkpointer(there, node_local=sp.NodeLocal(replicas=1), rendezvous=LocalRendezvous())
        target = blanked(whole_state(RANKS, 0))
        restored = alone.restore(target, exclude="own")
        assert restored is not None and restored in (number + 1, number + 2)
        assert differences(target, whole_state(RANKS, int(restored))) == []
        assert verify(LocalStorage(there / step_name(int(restored)))).ok
    assert set(ended) <= ENDS, ended
    # A job that is killed in retention leaves older steps. With each of them the next job has more
    # operations, and could be killed at the same one for ever.
    for place in (node_of(root, number) for number in range(RANKS)):
        for folder in place.glob("step-*"):
            if folder.name < step_name(number + 1):
                shutil.rmtree(folder)


def killed(root: str, who: int, every: int) -> list[str]:
    run = Path(root)
    return die_at_every_operation(
        partial(resume_and_save, run), partial(look, run), who, everyone=False, every=every
    )


@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    ("who", "every"),
    [(0, 45), *(pytest.param(who, 1, marks=pytest.mark.slow) for who in (0, 1))],
    ids=["the coordinator, some", "the coordinator", "a follower"],
)
def test_killed_at_every_file_operation(who: int, every: int, tmp_path: Path) -> None:
    ended = run_ranks(RANKS, killed, str(tmp_path), who, every, timeout=1500)[who].value
    assert ended[-1] in ("", "committed before") and set(ended) <= ENDS
    assert ended.count("killed") > (40 if who == 0 else 30) // every


def copy_and_die(root: Path, meetings: Any, number: int, deadly: Deadly) -> str:
    """Completes the copies of the last job, empties node 1, and is killed while it copies again."""
    place = node_of(root, rank())
    run = sp.Checkpointer(place, node_local=sp.NodeLocal(replicas=1), rendezvous=meetings, cache="none")
    if number:
        assert restored_with_copies(run) == ""
        assert verify(LocalStorage(place / step_name(1))).ok
    else:
        run.save(1, plain_state(rank(), world_size(), 1)).result()
    if rank() == 1:
        shutil.rmtree(place / step_name(1))
    with deadly():
        return restored_with_copies(run)


def restored_with_copies(run: sp.Checkpointer) -> str:
    target = blanked(plain_state(rank(), world_size(), 0))
    ended = attempt(lambda: run.restore(target)).kind
    if not ended:
        assert differences(target, plain_state(rank(), world_size(), 1)) == []
        ended = attempt(lambda: run.wait_for_copies(30)).kind
    return ended


def look_at_copies(root: Path, number: int, ended: list[str]) -> None:
    """Node 1 has no manifest, or all its files are whole. Node 0 lost nothing."""
    emptied = LocalStorage(node_of(root, 1) / step_name(1))
    assert emptied.size("manifest.json") is None or verify_files_here(emptied) == ()
    assert verify(LocalStorage(node_of(root, 0) / step_name(1))).ok
    assert set(ended) <= {"", "killed", "RankSilent", "RankFailure", "StorageError"}, ended


def copies_killed(root: str, every: int) -> list[str]:
    run = Path(root)
    return die_at_every_operation(
        partial(copy_and_die, run), partial(look_at_copies, run), 1, everyone=False, every=every
    )


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_copies_killed_at_every_file_operation(every: int, tmp_path: Path) -> None:
    ended = run_ranks(RANKS, copies_killed, str(tmp_path), every, timeout=900)[1].value
    assert ended[-1] == "" and ended.count("killed") > 30 // every, ended
