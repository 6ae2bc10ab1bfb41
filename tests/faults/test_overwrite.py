"""A save over a committed step, killed at any operation, leaves the old or the new checkpoint whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.storage import LocalStorage
from tests.faults.dying import Deadly, die_at_every_operation
from tests.faulty_storage import FaultyStorage
from tests.harness import Job, rank, reach, rendezvous, run_ranks, world_size
from tests.scenarios.states import (
    assert_one_attempt,
    attempt,
    blanked,
    differences,
    files_below,
    plain_state,
    same_on_all_ranks,
    whole_state,
)

RANKS = 2
STEP = 7


def salt_found(root: Path) -> int:
    """The salt of the one checkpoint, which this process reads whole."""
    folder = root / step_name(STEP)
    assert_one_attempt(folder, leftovers=True)
    target = blanked(whole_state(RANKS, 0))
    sp.load(folder, target, rendezvous=LocalRendezvous(), exclude="own")
    salt = int(target["epoch"])
    assert differences(target, whole_state(RANKS, salt)) == []
    return salt


def save_over(root: Path, meetings: Any, number: int, deadly: Deadly) -> str:
    """Saves the step again with values of its own."""
    checkpointer = sp.Checkpointer(root, rendezvous=meetings, cache="none")
    if not checkpointer.steps():
        checkpointer.save(STEP, plain_state(rank(), world_size(), 1)).result()
    salt = number + 2
    with deadly():
        return attempt(
            lambda: checkpointer.save(STEP, plain_state(rank(), world_size(), salt), overwrite=True).result()
        ).kind


def look(root: Path, seen: dict[int, int], number: int, ended: list[str]) -> None:
    """Records the salt that is there. It is the salt of this job or of the one before."""
    found, before = salt_found(root), list(seen.values())[-1]
    assert found in (before, number + 2), f"job {number} left {found}, before it was {before}"
    if set(ended) == {""}:
        assert found == number + 2
    seen[number] = found


def killed_everywhere(root: str, who: int, everyone: bool, every: int) -> tuple[list[str], dict[int, int]]:
    run, seen = Path(root), {-1: 1}
    ended = die_at_every_operation(partial(save_over, run), partial(look, run, seen), who, everyone, every)
    return ended, seen


@pytest.mark.parametrize(
    ("who", "everyone", "every"),
    [
        (0, False, 5),
        *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in ((0, False), (1, False), (0, True))),
    ],
    ids=["the coordinator, each fifth", "the coordinator", "a follower", "all"],
)
def test_a_killed_overwrite_leaves_the_old_or_the_new_checkpoint(
    who: int, everyone: bool, every: int, tmp_path: Path
) -> None:
    outcomes = run_ranks(RANKS, killed_everywhere, str(tmp_path), who, everyone, every, timeout=250)
    ended, seen = outcomes[who].value[0], outcomes[0].value[1]
    assert ended[-1] == ""
    assert set(ended) == {"", "killed"}
    assert ended.count("killed") > (30 if who == 0 else 10) // every
    new = [number for number in range(ended.count("killed")) if seen[number] == number + 2]
    # A kill comes before the commit, or while the coordinator removes the files of the old checkpoint.
    assert bool(new) == (who == 0)
    assert len(new) < len(ended) - 10 // every


def refused_then_replaced(root: str) -> list[Any]:
    watched = FaultyStorage(LocalStorage(root))
    checkpointer = sp.Checkpointer(watched, rendezvous=rendezvous(deadline=10.0))
    checkpointer.save(STEP, plain_state(rank(), world_size(), 1)).result()
    watched.arm(None, only=("create", "write_at", "finish", "publish", "delete"))
    refused = attempt(lambda: checkpointer.save(STEP, plain_state(rank(), world_size(), 2)).result())
    operations = list(watched.operations)
    reach("refused")
    replaced = attempt(
        lambda: checkpointer.save(STEP, plain_state(rank(), world_size(), 3), overwrite=True).result()
    )
    return [refused, operations, replaced]


def test_a_save_over_a_committed_step_needs_overwrite(tmp_path: Path) -> None:
    found = []

    def script(job: Job) -> None:
        for number in range(RANKS):
            job.until_held(number, "refused")
        assert_one_attempt(tmp_path / step_name(STEP))
        found.append(salt_found(tmp_path))
        for number in range(RANKS):
            job.go(number)

    hold = dict.fromkeys(range(RANKS), "refused")
    values = [
        o.value for o in run_ranks(RANKS, refused_then_replaced, str(tmp_path), hold=hold, script=script)
    ]
    refused = same_on_all_ranks([value[0] for value in values])
    assert refused.kind == "AlreadyCommittedError"
    assert "overwrite=True" in refused.text
    assert [value[1] for value in values] == [[], []]
    assert found == [1]
    assert same_on_all_ranks([value[2] for value in values]).kind == ""
    assert_one_attempt(tmp_path / step_name(STEP))
    assert salt_found(tmp_path) == 3


def other_layout(root: str) -> Any:
    """Overwrites with a state in which rank 1 has nothing to write: its old file must not stay in use."""
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=10.0))
    checkpointer.save(STEP, plain_state(rank(), world_size(), 1)).result()
    checkpointer.save(STEP, {"epoch": 2}, overwrite=True).result()
    return checkpointer.steps()


def test_an_overwrite_with_fewer_files_leaves_no_old_file(tmp_path: Path) -> None:
    assert [outcome.value for outcome in run_ranks(RANKS, other_layout, str(tmp_path))] == [[STEP], [STEP]]
    folder = tmp_path / step_name(STEP)
    assert_one_attempt(folder)
    assert len(files_below(folder)) == 3
    assert MANIFEST_NAME in files_below(folder)
    assert verify(LocalStorage(folder)).chunks == 0
