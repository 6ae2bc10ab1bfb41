"""The rerun machine in checkpoints of several ranks: saved with it or without it, in any world size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof import rerun
from tests.harness import rank, run_ranks

HERE = rerun.DeviceIdentity("here")


def machine_of(**options: Any) -> rerun.RerunMachine:
    return rerun.RerunMachine(identity=HERE, **options)


def step(machine: rerun.RerunMachine, value: float = 1.0) -> rerun.Decision:
    data = rerun.ReplayableIterator([torch.full((100 * (rank() + 1),), float(rank()))])
    while machine.should_run(data):
        next(data)
        machine.validate(value, math.isnan, message="loss")
    return machine.decide()


def save(folder: str, with_machine: bool, pending: bool) -> None:
    machine = machine_of()
    step(machine)
    state: dict[str, Any] = {"w": torch.ones(3)} | ({"rerun": machine} if with_machine else {})
    if pending:
        assert step(machine, math.nan if rank() == 1 else 1.0).checkpoint
    sp.Checkpointer(folder).save(1, state, suspect=pending).result()


def restore(folder: str, with_machine: bool, options: dict[str, Any]) -> tuple[int | None, int, str]:
    machine = machine_of(**options)
    state: dict[str, Any] = {"w": torch.zeros(3)} | ({"rerun": machine} if with_machine else {})
    restored = sp.Checkpointer(folder).restore(state, suspect=True)
    assert state["w"].tolist() == [1.0, 1.0, 1.0]
    return restored, machine.step, machine.state.value


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_idle_state_loads_in_any_world_size(ranks: int, tmp_path: Path) -> None:
    run_ranks(2, save, str(tmp_path), True, False)
    for outcome in run_ranks(ranks, restore, str(tmp_path), True, {}):
        assert outcome.value == (1, 1, "not running")


@pytest.mark.parametrize(("saved", "loaded", "found"), [(True, False, 0), (False, True, 0), (True, True, 1)])
def test_checkpoints_without_the_machine_load_into_runs_with_it_and_the_other_way_round(
    saved: bool, loaded: bool, found: int, tmp_path: Path
) -> None:
    run_ranks(2, save, str(tmp_path), saved, False)
    for outcome in run_ranks(2, restore, str(tmp_path), loaded, {}):
        assert outcome.value == (1, found, "not running")


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_pending_rerun_in_another_world_size_is_refused_unless_it_is_dropped(
    ranks: int, tmp_path: Path
) -> None:
    run_ranks(2, save, str(tmp_path), True, True)
    assert [outcome.value for outcome in run_ranks(2, restore, str(tmp_path), True, {})] == [
        (1, 1, "will rerun from checkpoint")
    ] * 2
    for outcome in run_ranks(ranks, restore, str(tmp_path), True, {}):
        assert isinstance(outcome.error, sp.StructureError), outcome.trace
        assert f"2 ranks, now {ranks}" in str(outcome.error) and 'pending="drop"' in str(outcome.error)
    for outcome in run_ranks(ranks, restore, str(tmp_path), True, {"pending": "drop"}):
        assert outcome.value == (1, 1, "not running")


def appear(folder: str) -> list[Any]:
    """An undeclared machine appears on one rank, on a fault, after the plan was cached."""
    state: dict[str, Any] = {"w": torch.ones(3)}
    checkpointer = sp.Checkpointer(folder)
    for number in range(3):
        checkpointer.save(number, state).result()
    if rank() == 1:
        data = torch.arange(1000, dtype=torch.uint8)
        state["undeclared"] = sp.PerRank({"step_data": data, "state": "will rerun"})
    checkpointer.save(3, state, suspect=True).result()

    found: dict[str, Any] = {"w": torch.zeros(3)}
    if rank() == 1:
        found["undeclared"] = sp.PerRank({"step_data": torch.zeros(1000, dtype=torch.uint8), "state": ""})
    checkpointer.restore(found, suspect=True)
    if rank() == 1:
        value = found["undeclared"].value
        return [found["w"].tolist(), value["state"], int(value["step_data"].sum())]
    return [found["w"].tolist()]


def test_state_that_appears_on_a_fault_on_one_rank_with_a_cached_plan_is_saved_and_loaded(
    tmp_path: Path,
) -> None:
    one, other = (outcome.value for outcome in run_ranks(2, appear, str(tmp_path)))
    assert one == [[1.0, 1.0, 1.0]]
    assert other == [[1.0, 1.0, 1.0], "will rerun", int(torch.arange(1000, dtype=torch.uint8).sum())]


def grow(folder: str) -> list[int]:
    """With a cached plan, the data of the pending step appears in the state, and is gone after it settles."""
    machine, sizes = machine_of(inject=rerun.FaultInjector("correct", steps=[2], ranks=[1])), []
    state = {"w": torch.ones(3), "rerun": machine}
    checkpointer = sp.Checkpointer(folder)
    for number in (1, 2):
        step(machine)
        checkpointer.save(number, state).result()
    assert step(machine).checkpoint
    checkpointer.save(2, state, suspect=True).result()

    again = machine_of()
    assert checkpointer.restore({"w": torch.zeros(3), "rerun": again}, suspect=True) == 2
    sizes.append(again.state_tree()["own"].value.state_dict()["step_data"].numel())
    fresh = rerun.ReplayableIterator([torch.zeros(1)])
    while again.should_run(fresh):
        assert next(fresh).tolist() == [float(rank())] * (100 * (rank() + 1))
    assert again.decide().settles
    checkpointer.save(3, {"w": torch.ones(3), "rerun": again}).result()
    sizes.append(again.state_tree()["own"].value.state_dict()["step_data"].numel())
    return sizes


def test_a_cached_plan_saves_the_pending_step_of_each_rank(tmp_path: Path) -> None:
    for outcome in run_ranks(2, grow, str(tmp_path)):
        pending, settled = outcome.value
        assert pending > 400 * (outcome.rank + 1) and settled == 0
