"""SIGKILL at every file operation of an upload to a second tier, of one rank.

Each job completes the upload in which the last job was killed, and saves the next step on the first tier
alone. It is killed one operation later in the upload of that step. Between the jobs, rank 0 checks both
tiers: every committed step of the second tier is whole and equal to the first tier's.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.storage import LocalStorage
from tests.faults.dying import Deadly, die_at_every_operation
from tests.harness import rank, run_ranks, world_size
from tests.scenarios.states import attempt, blanked, differences, plain_state, whole_state


def upload_and_die(root: Path, meetings: Any, number: int, deadly: Deadly) -> str:
    """Commits step `number` + 1 on the first tier, and is killed in its upload."""
    keep = sp.KeepLatest(2)
    run = sp.Checkpointer(
        root / "near",
        keep=keep,
        second_tier=sp.SecondTier(root / "far", keep=keep),
        rendezvous=meetings,
        cache="none",
    )
    if number:
        run.restore(blanked(plain_state(rank(), world_size(), 0)))
        run.wait_for_uploads(30)
    near = sp.Checkpointer(root / "near", keep=keep, rendezvous=meetings, cache="none")
    step = number + 1
    if step not in near.steps():
        near.save(step, plain_state(rank(), world_size(), step)).result()
    with deadly():
        target = blanked(plain_state(rank(), world_size(), 0))
        ended = attempt(lambda: run.restore(target)).kind
        if not ended:
            assert differences(target, plain_state(rank(), world_size(), step)) == []
            ended = attempt(lambda: run.wait_for_uploads(30)).kind
        return ended


def look(root: Path, number: int, ended: list[str]) -> None:
    """Every committed step of the second tier is whole, has its values, and equals the first tier's."""
    near, far = LocalStorage(root / "near"), LocalStorage(root / "far")
    committed = sp.Checkpointer(far, rendezvous=LocalRendezvous()).steps()
    for step in committed:
        report = verify(far.within(step_name(step)))
        assert report.ok, (number, step, report.faults)
        name = f"{step_name(step)}/manifest.json"
        assert near.size(name) is None or far.read(name) == near.read(name)
    if committed:
        target = blanked(whole_state(world_size(), 0))
        place = far.within(step_name(committed[-1]))
        sp.load(place, target, exclude="own", rendezvous=LocalRendezvous())
        assert differences(target, whole_state(world_size(), committed[-1])) == []
    # A job that is killed in retention leaves older steps or their folders. With each of them the next job
    # has more operations, and could be killed at the same one for ever.
    for name in far.folders():
        if name < step_name(number):
            shutil.rmtree(far.path / name)
    assert set(ended) <= {"", "killed", "RankSilent", "RankFailure", "StorageError"}, ended


def killed(root: str, who: int, every: int) -> list[str]:
    run = Path(root)
    job, check = partial(upload_and_die, run), partial(look, run)
    return die_at_every_operation(job, check, who, everyone=False, every=every)


@pytest.mark.parametrize(
    ("ranks", "who", "every"),
    [(1, 0, 5), *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in ((1, 0), (2, 1)))],
    ids=["alone, each fifth", "alone", "a follower"],
)
def test_killed_at_every_file_operation(ranks: int, who: int, every: int, tmp_path: Path) -> None:
    ended = run_ranks(ranks, killed, str(tmp_path), who, every, timeout=400)[who].value
    assert ended[-1] == "" and set(ended) == {"", "killed"}
    assert ended.count("killed") > (20 if who == 0 else 5) // every
    near = sp.Checkpointer(tmp_path / "near", rendezvous=LocalRendezvous()).steps()
    assert sp.Checkpointer(tmp_path / "far", rendezvous=LocalRendezvous()).steps() == near
    assert len(near) == 2
