"""Runs in memory whose folders only one test sees."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardproof.engine.storage.memory_store import VARIABLE

__all__ = ["VARIABLE", "private_tmpfs"]


@contextmanager
def private_tmpfs(patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the tmpfs of this node for the runs of a test; skips where there is no tmpfs.

    Args:
        patch: names the folder in the environment until the test ends.
    """
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(prefix="test-shardproof-", dir="/dev/shm") as folder:
        patch.setenv(VARIABLE, folder)
        yield Path(folder)
