"""State that appears on one rank only, between saves with a cached plan, is saved.

Elsewhere, a cached plan was compared with itself: the new entry was dropped in silence, the save succeeded,
and the checkpoint could not be loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks, world_size
from tests.scenarios.states import Phases, assert_one_attempt, blanked, differences, plain_state, whole

RANKS = 3


class Watcher:
    """A stateful object whose state is empty until it has seen something."""

    def __init__(self, seen: dict[str, Any]) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def state_at(step: int, who: int) -> dict[str, Any]:
    """From step 3 on, rank `who` has a tensor and a value of its own, inside and outside of an object."""
    state = plain_state(rank(), world_size(), step)
    appeared = step >= 3 and rank() == who
    state["watcher"] = sp.PerRank(Watcher({"losses": whole((40,), step), "count": step} if appeared else {}))
    if appeared:
        state["rerun"] = {"candidate": whole((4, 4), step, torch.float64), "step": step}
    return state


def save_five_steps(root: str, who: int) -> tuple[list[bool], list[str]]:
    meetings = Phases(rendezvous(deadline=10.0))
    checkpointer = sp.Checkpointer(root, rendezvous=meetings)
    planned, wrong = [], []
    for step in range(1, 6):
        meetings.met.clear()
        checkpointer.save(step, state_at(step, who)).result()
        planned.append("plan" in meetings.met)
        target, expected = state_at(step, who), state_at(step, who)
        watcher, wanted = target.pop("watcher"), expected.pop("watcher")
        blanked(target)
        watcher.value.seen = {}
        target["watcher"] = watcher
        restored = checkpointer.restore(target)
        del target["watcher"]
        found, saved = watcher.value.seen, wanted.value.seen
        wrong += differences(target, expected) + differences(found, saved)
        wrong += [] if restored == step else [f"restored {restored}"]
    return planned, wrong


@pytest.mark.parametrize("who", [0, 2])
def test_state_that_appears_on_one_rank_is_saved(who: int, tmp_path: Path) -> None:
    values = [outcome.value for outcome in run_ranks(RANKS, save_five_steps, str(tmp_path), who)]
    assert [wrong for _, wrong in values] == [[]] * RANKS
    assert [planned for planned, _ in values] == [[True, False, True, False, False]] * RANKS
    assert_one_attempt(tmp_path / "step-00000005")
    with sp.open(tmp_path / "step-00000005") as checkpoint:
        assert torch.equal(checkpoint["rerun.candidate"][...], whole((4, 4), 5, torch.float64))
        assert checkpoint["rerun.step"] == 5
        assert f"watcher.@rank-{who}.losses" in checkpoint.keys()  # noqa: SIM118
