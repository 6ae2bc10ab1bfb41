"""SIGKILL at every file operation of settling a suspect, saving over a settled one, and removing it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.checkpointer.retention import delete_steps, leftovers, remove_leftover
from shardproof.storage import LocalStorage
from tests.faults.dying import Deadly, die_at_every_operation
from tests.harness import rank, run_ranks, world_size
from tests.scenarios.states import attempt, plain_state

RANKS = 2


def state(salt: int) -> dict[str, Any]:
    return plain_state(rank(), world_size(), salt)


def restored_alone(root: Path) -> tuple[int | None, int]:
    """The step and the salt that one process restores, suspects included."""
    target = {"epoch": 0}
    found = sp.Checkpointer(root, rendezvous=LocalRendezvous()).restore(target, suspect=True, include="epoch")
    return found, target["epoch"]


def folder(root: Path, number: int) -> Path:
    """A run of its own for each job."""
    return root / f"job-{number}"


def checkpointer_of(root: Path, meetings: Any, number: int, **options: Any) -> sp.Checkpointer:
    checkpointer = sp.Checkpointer(folder(root, number), rendezvous=meetings, cache="none", **options)
    checkpointer.save(1, state(1), overwrite=True).result()
    checkpointer.save(2, state(2), suspect=True).result()
    return checkpointer


def settle(root: Path, meetings: Any, number: int, deadly: Deadly) -> str:
    checkpointer = checkpointer_of(root, meetings, number)
    with deadly():
        return attempt(lambda: checkpointer.settle_suspect(2, "transient fault")).kind


def settled_or_not(root: Path, seen: list[Any], number: int, ended: list[str]) -> None:
    found = restored_alone(folder(root, number))
    assert found in ((2, 2), (1, 1))
    assert verify(LocalStorage(folder(root, number) / "suspect-00000002")).ok
    seen.append(found == (1, 1))


def save_over(root: Path, meetings: Any, number: int, deadly: Deadly) -> str:
    checkpointer = checkpointer_of(root, meetings, number)
    checkpointer.settle_suspect(2, "transient fault")
    with deadly():
        return attempt(lambda: checkpointer.save(2, state(3), suspect=True).result()).kind


def settled_or_new(root: Path, seen: list[Any], number: int, ended: list[str]) -> None:
    """The old suspect is settled, the new one is not. The verdict counts for the old one alone."""
    found = restored_alone(folder(root, number))
    assert found in ((1, 1), (2, 3)), (
        "the old one is never taken again, the new one is never taken for settled"
    )
    seen.append(found == (2, 3))


def remove(root: Path, meetings: Any, number: int, deadly: Deadly) -> str:
    checkpointer = checkpointer_of(root, meetings, number)
    checkpointer.settle_suspect(2, "transient fault")
    with deadly():
        if rank() == 0:
            delete_steps(LocalStorage(folder(root, number)), ["suspect-00000002"])
    return ""


def settled_or_gone(root: Path, seen: list[Any], number: int, ended: list[str]) -> None:
    assert restored_alone(folder(root, number)) == (1, 1), (
        "a settled suspect is not open again while it is removed"
    )
    storage = LocalStorage(folder(root, number))
    gone = storage.size("suspect-00000002/manifest.json") is None
    for left in leftovers(storage, lambda name: 0.0):
        assert remove_leftover(storage, left)
    assert bool(storage.list("suspect-00000002")) is not gone, "what is left of it is found as a leftover"
    seen.append(gone)


CASES = {
    "settle": (settle, settled_or_not),
    "save over": (save_over, settled_or_new),
    "remove": (remove, settled_or_gone),
}


def killed_everywhere(root: str, case: str, every: int) -> tuple[list[str], list[bool]]:
    job, look = CASES[case]
    seen: list[bool] = []
    check = partial(look, Path(root), seen)
    ended = die_at_every_operation(partial(job, Path(root)), check, 0, False, every)
    return ended, seen


@pytest.mark.parametrize(
    ("case", "every"),
    [("settle", 3), *(pytest.param(case, 1, marks=pytest.mark.slow) for case in CASES)],
)
def test_a_killed_job_leaves_a_suspect_either_open_or_settled(case: str, every: int, tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, killed_everywhere, str(tmp_path), case, every, timeout=250)
    ended, seen = outcomes[0].value
    assert ended[-1] == ""
    assert set(ended) == {"", "killed"}
    assert seen == sorted(seen), "once it has happened, it is not undone by dying later"
    assert (seen[0], seen[-1]) == (False, True)
