"""Records which tensors are described again, instead of reusing a cached description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shardproof.engine.state import visitor as visiting


def watch_described(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which each call of `describe_tensors` from now on appends its keys."""
    described: list[str] = []
    describe = visiting.describe_tensors

    def recording(keys: Sequence[str], *args: Any, **options: Any) -> Any:
        described.extend(keys)
        return describe(keys, *args, **options)

    monkeypatch.setattr(visiting, "describe_tensors", recording)
    return described
