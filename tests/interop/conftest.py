"""Fixtures of the tests with released packages of other projects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.formats.peers import Golden


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    """The golden checkpoint that an indirect parameter names."""
    return Golden(request.param, tmp_path)
