"""A state dict built in a different key order on each rank, and at each save, is the same state.

The values of an object keep the insertion order of their dicts if all ranks have the same.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

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


class Queue:
    """An object whose dicts have a meaning in their order."""

    def __init__(self, order: str) -> None:
        self.waiting = {name: {"id": ord(name)} for name in order}
        self.by_number = {-ord(name): name for name in order}

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": self.waiting, "by_number": self.by_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting, self.by_number = state["waiting"], state["by_number"]

    def order(self) -> str:
        assert list(self.by_number.values()) == list(self.waiting)
        return "".join(self.waiting)


def test_an_object_keeps_the_order_of_its_dicts(tmp_path: Path) -> None:
    sp.save(tmp_path / "c", {"queue": Queue("zaqm")})
    target = Queue("")
    sp.load(tmp_path / "c", {"queue": target})
    assert target.order() == "zaqm"


def save_queues(root: str) -> tuple[list[str], list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardproof").addHandler(handler)
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=10.0))
    orders = []
    for step, order in enumerate(("ba", "ab" if rank() else "ba", "ab" if rank() else "ba")):
        checkpointer.save(step, {"queue": Queue(order)}).result()
        target = Queue("")
        checkpointer.restore({"queue": target})
        orders.append(target.order())
    return orders, lines


def test_ranks_with_other_orders_store_that_of_the_lowest_and_are_named_once(tmp_path: Path) -> None:
    first, second = (outcome.value for outcome in run_ranks(2, save_queues, str(tmp_path)))
    assert first[0] == second[0] == ["ba", "ba", "ba"]
    assert not any("insertion order" in line for line in second[1])
    (warning,) = [line for line in first[1] if "insertion order" in line]
    assert "step-00000001: 1 values have dicts in another insertion order on another rank" in warning
    assert "queue (rank 0 and rank 1)" in warning


def test_other_values_in_another_order_are_still_different(tmp_path: Path) -> None:
    for outcome in run_ranks(2, save_different_queues, str(tmp_path)):
        assert outcome.value is None


def save_different_queues(root: str) -> None:
    with pytest.raises(sp.StructureError, match="the value of 'queue' differs between rank 0 and rank 1"):
        sp.save(
            f"{root}/c", {"queue": Queue("abc" if rank() else "bad")}, rendezvous=rendezvous(deadline=10.0)
        )
