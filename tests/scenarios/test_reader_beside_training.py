"""Another process restores again and again from a run in which training goes on and keeps one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof import events
from shardproof.rendezvous import LocalRendezvous
from tests.harness import rank, rendezvous, run_ranks

_TENSORS = 8


def _state(step: int) -> dict[str, torch.Tensor]:
    """Half of the tensors change from step to step."""
    return {f"w{at}": torch.full((20_000,), float(step if at % 2 else 0)) for at in range(_TENSORS)}


def _training(root: str, incremental: bool) -> sp.Checkpointer:
    return sp.Checkpointer(root, keep=sp.KeepLatest(1), incremental=incremental, rendezvous=LocalRendezvous())


def train_or_read(root: str, steps: int, incremental: bool) -> list[tuple[int, list[Any]]]:
    """Rank 0 trains. Rank 1 restores until it has the last step; returns each step and damaged ones."""
    rendezvous(deadline=10)  # both begin together
    if rank() == 0:
        training = _training(root, incremental)
        for step in range(1, steps + 1):
            training.save(step, _state(step)).result()
        return []
    reader, found = sp.Checkpointer(root, rendezvous=LocalRendezvous()), []
    while not found or found[-1][0] < steps:
        state = _state(-1)
        step = reader.restore(state)
        if step is None:
            assert not found
            continue
        expected = _state(step)
        assert all(torch.equal(state[key], expected[key]) for key in expected)
        found.append((step, [item for item in reader.passed_over if item.damaged]))
    return found


def _check(found: list[tuple[int, list[Any]]]) -> None:
    steps = [step for step, _ in found]
    assert steps == sorted(steps)
    assert all(damaged == [] for _, damaged in found)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_reader_beside_training_gets_whole_steps(tmp_path: Path, incremental: bool) -> None:
    outcomes = run_ranks(2, train_or_read, str(tmp_path / "run"), 60, incremental)
    _check(outcomes[1].value)


@pytest.mark.slow
@pytest.mark.parametrize("incremental", [False, True])
def test_a_reader_beside_long_training_gets_whole_steps(tmp_path: Path, incremental: bool) -> None:
    outcomes = run_ranks(2, train_or_read, str(tmp_path / "run"), 500, incremental, timeout=300)
    _check(outcomes[1].value)


def read_together(root: str, phase: str, incremental: bool) -> tuple[int | None, list[float], int]:
    """Two ranks restore; rank 0 makes the next save of training in two loads, at the phase of that name."""
    training = _training(root, incremental)
    if rank() == 0:
        for step in (1, 2):
            training.save(step, _state(step)).result()
    meetings = rendezvous(deadline=10)
    todo = [3, 4] if rank() == 0 else []

    def save(event: events.Event) -> None:
        if event.operation.startswith("load ") and (event.kind, event.phase) == ("begin", phase) and todo:
            training.save(todo[0], _state(todo.pop(0))).result()

    state = _state(-1)
    reader = sp.Checkpointer(root, rendezvous=meetings)
    with events.subscribe(save):
        step = reader.restore(state)
    return step, [tensor[0].item() for tensor in state.values()], len(reader.passed_over)


@pytest.mark.parametrize("phase", ["match", "read"])
@pytest.mark.parametrize("incremental", [False, True])
def test_ranks_that_read_beside_training_get_one_whole_step(
    tmp_path: Path, phase: str, incremental: bool
) -> None:
    for outcome in run_ranks(2, read_together, str(tmp_path / "run"), phase, incremental):
        step, values, passed_over = outcome.value
        assert step in (2, 3, 4) and passed_over == 0
        assert values == [float(step if at % 2 else 0) for at in range(_TENSORS)]
