"""Small tensors share system calls."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Reads and writes of this process, by name."""
    counted: Counter[str] = Counter()
    for name in ("pwrite", "pwritev", "write", "pread", "preadv", "read", "open", "fsync"):
        original = getattr(os, name)

        def wrapped(*args: Any, _name: str = name, _original: Any = original, **options: Any) -> Any:
            counted[_name] += 1
            return _original(*args, **options)

        monkeypatch.setattr(os, name, wrapped)
    return counted


def test_twenty_thousand_small_tensors_cost_few_system_calls(tmp_path: Path, calls: Counter[str]) -> None:
    state = {f"t{number}": torch.full((1024,), float(number)) for number in range(20_000)}
    sp.save(tmp_path / "c", state)
    assert sum(calls.values()) < 100, calls
    target = {key: torch.zeros(1024) for key in state}
    calls.clear()
    sp.load(tmp_path / "c", target)
    assert sum(calls.values()) < 400, calls  # spans of 256 KiB, hashed while they are in the cache
    assert all(torch.equal(target[key], state[key]) for key in state)
