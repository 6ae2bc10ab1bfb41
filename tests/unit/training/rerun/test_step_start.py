"""The state at the start of a step is restored for its rerun."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from shardproof.errors import StructureError
from shardproof.rerun import BufferState
from shardproof.training.rerun.step_start import ProcessState


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1)), random.gauss(0.0, 1.0)]


def test_every_generator_draws_the_same_again() -> None:
    beginning = ProcessState.of([])
    drawn = draw()
    beginning.restore([])
    assert draw() == drawn
    beginning.restore([])
    assert draw() == drawn


def test_buffers_are_restored_in_place() -> None:
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    mean = norm[0].running_mean
    buffer_state = BufferState(norm)
    beginning = ProcessState.of([buffer_state])
    norm(torch.randn(5, 2))
    assert mean.abs().sum() > 0
    beginning.restore([buffer_state])
    assert norm[0].running_mean is mean and mean.tolist() == [0.0, 0.0]
    assert int(norm[0].num_batches_tracked) == 0


def test_buffers_of_another_module_are_refused() -> None:
    saved = BufferState(torch.nn.BatchNorm1d(2)).save()
    with pytest.raises(StructureError, match=r"expected running_mean \[3\].*found running_mean \[2\]"):
        BufferState(torch.nn.BatchNorm1d(3)).restore(saved)


def test_another_number_of_step_states_is_refused() -> None:
    buffer_state = BufferState(torch.nn.BatchNorm1d(2))
    with pytest.raises(StructureError, match="began with 1 step_state objects, and the machine has 0"):
        ProcessState.of([buffer_state]).restore([])
