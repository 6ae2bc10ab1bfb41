"""A rank falls silent in a call with `deadline=`: the others fail after that deadline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.rendezvous import connect
from tests import harness
from tests.harness import Job, run_ranks

DEADLINE = 3.0
SLACK = 4.0


def _attempt(what: str, folder: str) -> Any:
    state = {"w": sp.PerRank(torch.ones(4))}
    if what == "save":
        return sp.save(f"{folder}/new", state, deadline=DEADLINE)
    if what == "load":
        return sp.load(f"{folder}/good", state, deadline=DEADLINE)
    return sp.Checkpointer(f"{folder}/run", deadline=DEADLINE).save(1, state).result()


def one_is_silent(what: str, folder: str) -> Any:
    """Rank 1 takes part in a save of all ranks, and in nothing after it."""
    sp.save(f"{folder}/good", {"w": sp.PerRank(torch.ones(4))})
    if harness.rank() == 1:
        harness.reach("silent")
        return None
    began = time.monotonic()
    try:
        _attempt(what, folder)
    except sp.RankSilent as error:
        end = (error.ranks, error.message, time.monotonic() - began, connect().deadline)
        harness.reach("failed")
        return end
    raise AssertionError("the silent rank was not missed")


@pytest.mark.parametrize("what", ["save", "load", "checkpointer"])
def test_a_silent_rank_is_given_up_after_the_deadline_of_the_call(what: str, tmp_path: Path) -> None:
    def script(job: Job) -> None:
        for rank in (0, 2):
            job.until_held(rank, "failed")
        for rank in range(3):
            job.go(rank)

    hold = {0: "failed", 1: "silent", 2: "failed"}
    outcomes = run_ranks(3, one_is_silent, what, str(tmp_path), store="rank 0", hold=hold, script=script)
    for rank in (0, 2):
        ranks, message, seconds, lasting = outcomes[rank].value
        assert ranks == [1]
        assert f"silent for {DEADLINE:g} s (the deadline)" in message
        assert seconds <= DEADLINE + SLACK
        assert lasting == (DEADLINE if what == "checkpointer" else 300.0)
    assert max(outcomes[rank].value[2] for rank in (0, 2)) >= DEADLINE
