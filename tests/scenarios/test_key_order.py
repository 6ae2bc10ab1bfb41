"""A state dict built in a different key order on each rank, and at each save, is the same state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks, world_size
from tests.scenarios.states import Phases, assert_one_attempt, blanked, differences, plain_state

RANKS = 3


def shuffled(tree: dict[str, Any], order: random.Random) -> dict[str, Any]:
    keys = list(tree)
    order.shuffle(keys)
    return {key: shuffled(tree[key], order) if isinstance(tree[key], dict) else tree[key] for key in keys}


def wide_state(salt: int) -> dict[str, Any]:
    return plain_state(rank(), world_size(), salt) | {
        f"layer{n}": {"scale": salt * n, "shift": n} for n in range(9)
    }


def save_in_any_order(root: str) -> tuple[list[list[str]], list[str], list[list[str]]]:
    meetings = Phases(rendezvous(deadline=10.0))
    checkpointer = sp.Checkpointer(root, rendezvous=meetings)
    phases, orders, wrong = [], [], []
    for step in range(4):
        order = random.Random(100 * step + rank())
        state = shuffled(wide_state(step), order)
        orders.append(" ".join(state))
        meetings.met.clear()
        checkpointer.save(step, state).result()
        phases.append(list(meetings.met))
        target = shuffled(blanked(wide_state(0)), order)
        checkpointer.restore(target)
        wrong.append(differences(target, wide_state(step)))
    return phases, orders, wrong


def test_any_key_order_is_the_same_state(tmp_path: Path) -> None:
    values = [outcome.value for outcome in run_ranks(RANKS, save_in_any_order, str(tmp_path))]
    for phases, _, wrong in values:
        assert wrong == [[]] * 4
        # The first save plans. Its plan is valid for all key orders.
        assert phases == [["collect", "plan", "write"]] + [["collect", "write"]] * 3
    assert len({order for _, orders, _ in values for order in orders}) == 4 * RANKS
    for step in range(4):
        assert_one_attempt(tmp_path / f"step-{step:08d}")
