"""The number of requests that the saves of a long run send to a bucket."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch

import shardproof as sp
from shardproof.errors import FormatError
from shardproof.formats import read_json
from shardproof.storage import ObjectStorage

pytestmark = pytest.mark.processes
REQUESTS = ("get", "get_range", "head", "list", "list_with_delimiter", "put", "delete")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts requests."""
    counts: Counter[str] = Counter()

    def counted(name: str, send: Any) -> Any:
        def request(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return send(*args, **options)

        return request

    for name in REQUESTS:
        monkeypatch.setattr(obstore, name, counted(name, getattr(obstore, name)))
    return counts


def growth(checkpointer: sp.Checkpointer, sent: Counter[str]) -> float:
    """Requests that a save sends for each step that the run has already."""
    totals = {}
    for step in range(1, 10):
        sent.clear()
        checkpointer.save(step, {"w": torch.full((8,), float(step))}).durable()
        checkpointer.wait_for_uploads()
        totals[step] = sent.total()
    return (totals[9] - totals[3]) / 6


def test_a_small_file_is_read_with_a_bound_in_one_request(url: str, sent: Counter[str]) -> None:
    storage = ObjectStorage(url)
    storage.publish("a.json", b'{"a": 1}')
    sent.clear()
    assert read_json(storage, "a.json")[1] == {"a": 1}
    assert sent == {"get": 1}
    with pytest.raises(FormatError, match="it has 8 bytes, expected at most 7"):
        read_json(storage, "a.json", 7)
    assert sent == {"get": 2}


def test_a_save_sends_few_requests_for_each_step_of_the_run(
    url: str, sent: Counter[str], tmp_path: Path
) -> None:
    """One request: whether the step is committed. A second tier needs four more for the seal of the step: two
    before the upload and two after it."""
    assert growth(sp.Checkpointer(f"{url}/alone", keep=sp.KeepAll()), sent) == 1
    tiered = sp.Checkpointer(
        tmp_path, second_tier=sp.SecondTier(f"{url}/then", keep=sp.KeepAll()), keep=sp.KeepLatest(2)
    )
    assert growth(tiered, sent) == 5
