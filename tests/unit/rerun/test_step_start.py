"""What a step changes is put back to its beginning."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from shardproof.errors import StructureError
from shardproof.rerun import BufferState
from shardproof.rerun.step_start import ProcessState


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1)), random.gauss(0.0, 1.0)]


def test_every_generator_draws_the_same_again() -> None:
    beginning = ProcessState.of([])
    drawn = draw()
    beginning.restore([])
    assert draw() == drawn
    beginning.restore([])
    assert draw() == drawn


def test_buffers_are_put_back_in_place_and_stay_the_same_tensors() -> None:
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    mean = norm[0].running_mean
    kept = BufferState(norm)
    beginning = ProcessState.of([kept])
    norm(torch.randn(5, 2))
    assert mean.abs().sum() > 0
    beginning.restore([kept])
    assert norm[0].running_mean is mean and mean.tolist() == [0.0, 0.0]
    assert int(norm[0].num_batches_tracked) == 0


def test_buffers_of_another_module_are_refused() -> None:
    saved = BufferState(torch.nn.BatchNorm1d(2)).save()
    with pytest.raises(StructureError, match=r"expected running_mean \[3\].*found running_mean \[2\]"):
        BufferState(torch.nn.BatchNorm1d(3)).restore(saved)


def test_another_number_of_step_states_is_refused() -> None:
    kept = BufferState(torch.nn.BatchNorm1d(2))
    with pytest.raises(StructureError, match="began with 1 step_state objects, and the machine has 0"):
        ProcessState.of([kept]).restore([])
