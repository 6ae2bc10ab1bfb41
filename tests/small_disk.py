"""A real file system of a few bytes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["small_disk"]


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system of `size` bytes; skips where mounting is not allowed."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        made = subprocess.run(["mount", *options], capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if made.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not permitted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)
