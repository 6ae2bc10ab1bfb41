"""Fixtures of the tests of saving."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gate import Gate


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()
