"""Parts of a state over real ranks: of each rank, refused or left by all ranks, or on some ranks only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks, world_size


class Plain:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Machine:
    """A part with a value that all ranks share, and with each rank's number and as many bytes."""

    def __init__(self, job: str = "", own: int = -1, answer: bool | str | None = None) -> None:
        self.job = Plain({"name": job})
        self.own = Plain({"rank": own, "data": torch.full((max(own, 0),), max(own, 0), dtype=torch.uint8)})
        self.answer = answer
        self.loaded = 0

    def state_tree(self) -> dict[str, Any]:
        return {"job": self.job, "own": sp.PerRank(self.own)}

    def check_stored(self, stored: dict[str, Any]) -> bool | None:
        assert stored == {"job": {"name": "saved"}}
        if isinstance(self.answer, str):
            raise sp.StructureError(self.answer)
        return self.answer

    def state_loaded(self) -> None:
        self.loaded += 1

    def seen(self) -> tuple[str, int, list[int], int]:
        return self.job.state["name"], self.own.state["rank"], self.own.state["data"].tolist(), self.loaded


def _save(root: str, with_machine: bool = True) -> None:
    state: dict[str, Any] = {"w": torch.ones(2)}
    if with_machine:
        state["rerun"] = Machine("saved", rank())
    sp.save(root, state, rendezvous=rendezvous(deadline=10))


def _load(root: str, answers: list[Any]) -> tuple[Any, ...]:
    """Loads with a machine that gives this rank's answer; "none": this rank has no machine."""
    answer = answers[rank()]
    machine, w = Machine("here", -1, answer), torch.zeros(2)
    state = {"w": w} if answer == "none" else {"w": w, "rerun": machine}
    try:
        report = sp.load(root, state, rendezvous=rendezvous(deadline=10))
    except sp.ShardproofError as error:
        return type(error).__name__, error.message, w.sum().item(), machine.seen()
    return report.unchanged, report.unexpected, w.sum().item(), machine.seen()


def saved(root: Path, ranks: int, *args: Any) -> str:
    assert [outcome.value for outcome in run_ranks(ranks, _save, str(root), *args)] == [None] * ranks
    return str(root)


def test_each_rank_loads_its_own_value_and_all_load_the_shared_one(tmp_path: Path) -> None:
    root = saved(tmp_path, 3)
    for number, outcome in enumerate(run_ranks(3, _load, root, [None, True, None])):
        assert outcome.value == ((), (), 2, ("saved", number, [number] * number, 1))


def test_with_more_ranks_the_new_ones_keep_their_own_values(tmp_path: Path) -> None:
    first, second = run_ranks(2, _load, saved(tmp_path, 1), [None, None])
    assert first.value == ((), (), 2, ("saved", 0, [], 1))
    assert second.value == (("rerun.@part.own.@rank-1",), (), 2, ("saved", -1, [], 1))


def test_with_fewer_ranks_the_values_of_the_others_are_not_loaded(tmp_path: Path) -> None:
    (outcome,) = run_ranks(1, _load, saved(tmp_path, 3), [None])
    assert outcome.value == ((), (), 2, ("saved", 0, [], 1))


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ([None, "rerun pending"], "rank 1: "),
        (["rerun pending"] * 2, ""),
        ([False, "rerun pending"], "rank 1: "),
    ],
)
def test_a_rank_that_refuses_stops_all_ranks_before_anything_changes(
    tmp_path: Path, answers: list[Any], named: str
) -> None:
    for outcome in run_ranks(2, _load, saved(tmp_path, 2), answers):
        kind, text, filled, seen = outcome.value
        assert (kind, text) == ("StructureError", f"{named}rerun pending")
        assert (filled, seen) == (0, ("here", -1, [], 0))


def test_all_ranks_may_leave_a_part(tmp_path: Path) -> None:
    for outcome in run_ranks(2, _load, saved(tmp_path, 2), [False, False]):
        assert outcome.value == (("rerun.@part",), (), 2, ("here", -1, [], 0))


def test_ranks_leave_a_part_together_or_not_at_all(tmp_path: Path) -> None:
    for outcome in run_ranks(2, _load, saved(tmp_path, 2), [None, False]):
        kind, text, filled, seen = outcome.value
        assert kind == "StructureError"
        assert "ranks do not leave the same parts" in text
        assert "rank 1 ['rerun.@part']" in text
        assert (filled, seen) == (0, ("here", -1, [], 0))


def test_one_rank_may_lack_a_part(tmp_path: Path) -> None:
    first, second = run_ranks(2, _load, saved(tmp_path, 2), [None, "none"])
    assert first.value == ((), (), 2, ("saved", 0, [], 1))
    assert second.value == ((), (), 2, ("here", -1, [], 0))


def test_all_ranks_may_lack_a_part(tmp_path: Path) -> None:
    for outcome in run_ranks(2, _load, saved(tmp_path, 2), ["none", "none"]):
        unchanged, unexpected, filled, _ = outcome.value
        assert (unchanged, filled) == ((), 2)
        assert [key for key in unexpected if "@rank" not in key] == ["rerun.@part.job"]


def test_a_checkpoint_may_lack_a_part(tmp_path: Path) -> None:
    for outcome in run_ranks(2, _load, saved(tmp_path, 2, False), [None, None]):
        assert outcome.value == (("rerun.@part",), (), 2, ("here", -1, [], 0))


def _appears(root: str) -> list[Any]:
    """The bytes of the last rank grow between two saves with a cached plan. Returns the restored values."""
    meetings = rendezvous(deadline=10)
    checkpointer = sp.Checkpointer(root, rendezvous=meetings)
    machine = Machine("saved", 0)
    state = {"w": torch.ones(2), "rerun": machine}
    for step in (1, 2, 3):
        if step == 3 and rank() == world_size() - 1:
            machine.own.state = {"rank": 7, "data": torch.arange(7, dtype=torch.uint8)}
        checkpointer.save(step, state).result()
    seen = []
    for step in (2, 3):
        target = Machine()
        checkpointer.restore({"w": torch.zeros(2), "rerun": target}, step=step)
        seen.append(target.seen())
    return seen


def test_state_that_appears_on_one_rank_with_a_cached_plan_is_saved(tmp_path: Path) -> None:
    first, second = run_ranks(2, _appears, str(tmp_path))
    idle: tuple[Any, ...] = ("saved", 0, [], 1)
    assert first.value == [idle, idle]
    assert second.value == [idle, ("saved", 7, [0, 1, 2, 3, 4, 5, 6], 1)]


def _save_step(root: str, step: int) -> None:
    state = {"w": torch.ones(70_000), "own": sp.PerRank(torch.full((70_000,), float(step)))}
    sp.Checkpointer(root, rendezvous=rendezvous(deadline=10)).save(step, state).result()


def _restore_step(root: str) -> Any:
    state = {"w": torch.zeros(70_000), "own": sp.PerRank(torch.zeros(70_000))}
    try:
        return sp.Checkpointer(root, rendezvous=rendezvous(deadline=10)).restore(state)
    except sp.StructureError as error:
        return error.message


@pytest.mark.parametrize(("newest_by", "mixture"), [(2, True), (1, False)])
def test_per_rank_values_of_a_damaged_step_are_not_kept(
    tmp_path: Path, newest_by: int, mixture: bool
) -> None:
    """Step 1 has no value of rank 1. The restore fails only if the damaged step 2 has one."""
    run_ranks(1, _save_step, str(tmp_path), 1)
    run_ranks(newest_by, _save_step, str(tmp_path), 2)
    shard = min((tmp_path / "step-00000002" / "shards").iterdir())
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    for outcome in run_ranks(2, _restore_step, str(tmp_path)):
        if mixture:
            assert "it lacks own.@rank-1\nThe target has values of both" in outcome.value
        else:
            assert outcome.value == 1
