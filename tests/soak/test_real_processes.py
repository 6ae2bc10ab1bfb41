"""Real ranks, which are killed with SIGKILL at a file operation and start again in other numbers."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

import shardproof as sp
from tests.faults.dying import _file_operations
from tests.harness import rank, rendezvous, run_ranks, world_size
from tests.scenarios.states import differences
from tests.soak.model import Model, Policy, target, values

ROUNDS, SAVES = 40, 3


def train(root: str, salt: int, at: int, dying_rank: int, incremental: bool) -> None:
    """Restores, and saves steps until rank `dying_rank` dies. Rank 0 notes each save that has ended."""
    meetings = rendezvous(deadline=60.0)
    checkpointer = sp.Checkpointer(
        root, rendezvous=meetings, keep=POLICY.make(), incremental=incremental, cache="none"
    )
    state = target(rank(), world_size())
    step = int(checkpointer.restore(state) or 0)
    if step:
        assert differences(state, values(state["salt"], rank(), world_size())) == []
    meetings.deadline = 2.0
    with _file_operations(at if rank() == dying_rank else None, [own_pid()]):
        for number in range(1, SAVES + 1):
            note(root, "begun", step + number, salt + number)
            checkpointer.save(step + number, values(salt + number, rank(), world_size())).result()
            note(root, "ended", step + number, salt + number)


POLICY = Policy(2, every=5)


def own_pid() -> int:
    import os

    return os.getpid()


def note(root: str, what: str, step: int, salt: int) -> None:
    if rank() == 0:
        with open(f"{root}.{what}", "a") as file:  # not through `os`, which counts
            file.write(f"{step} {salt}\n")


def noted(root: Path, what: str) -> list[tuple[int, int]]:
    file = Path(f"{root}.{what}")
    if not file.exists():
        return []
    return [(int(step), int(salt)) for step, salt in map(str.split, file.read_text().splitlines())]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_ranks_that_are_killed_lose_no_committed_step(tmp_path: Path) -> None:
    root, chance = tmp_path / "run", Random(20)
    root.mkdir()
    model, killed = Model(root), 0
    for number in range(ROUNDS):
        ranks = chance.randint(1, 3)
        begun, ended = len(noted(root, "begun")), len(noted(root, "ended"))
        plan = str(root), 10 * number, chance.randrange(90), chance.randrange(ranks), chance.random() < 0.5
        outcomes = run_ranks(ranks, train, *plan, timeout=120)
        killed += any(outcome.exit_code != 0 for outcome in outcomes)
        for step, salt in noted(root, "begun")[begun:]:
            model.begin_save(step, salt, 0.0, replaces=False)
            model.retained(POLICY, step, set())
        for step, salt in noted(root, "ended")[ended:]:
            model.end_save(step, salt)
        model.lost_power()
        model.check()
    assert killed > ROUNDS // 3
