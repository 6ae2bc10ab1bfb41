"""Folders of two tiers."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"
