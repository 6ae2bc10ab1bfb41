"""A pytest plugin that loads the simulated device before collection (``-p tests.simulated.plugin``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests import simulated

simulated.load()
torch.set_num_threads(1)  # of kernels in the threads of streams, too


@pytest.fixture(autouse=True)
def _nothing_is_left_in_queues() -> Iterator[None]:
    """Every operation may be late. Work that fails late fails its own test."""
    simulated.set_delays(0.0005)
    yield
    simulated.set_delays(0.0)
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
