"""Watches which tensors are described anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shardproof.state import visitor as visiting


def watch_described(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of tensors that are described from now on, in a list that grows."""
    described: list[str] = []
    describe = visiting.describe_tensors

    def noted(keys: Sequence[str], *given: Any, **options: Any) -> Any:
        described.extend(keys)
        return describe(keys, *given, **options)

    monkeypatch.setattr(visiting, "describe_tensors", noted)
    return described
