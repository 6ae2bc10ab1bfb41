"""The tests of the simulated device run only in a process that has loaded it: see `plugin.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

collect_ignore_glob = [] if hasattr(torch, "simulated") else ["test_*.py"]


@pytest.fixture
def enqueued(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when `copy_` has returned: the copy is enqueued, and done if the host waits for it."""
    event, original = threading.Event(), torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        done = original(self, source, non_blocking)
        event.set()
        return done

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return event


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool
