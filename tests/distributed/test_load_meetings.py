"""Meetings of a load: ranks meet after the reads only if one of them loads objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.errors import RankFailure
from tests.harness import rank, rendezvous, run_ranks


class Counter:
    """An object of the state, which may refuse its loaded state."""

    def __init__(self, count: int, refuses: bool = False) -> None:
        self.count, self.refuses = count, refuses

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise ValueError("will not be loaded")
        self.count = state["count"]


def _load(folder: str, asks: int | None, refuses: bool) -> tuple[list[str], list[float], int | None, str]:
    """The phases of a load, the loaded values, and the error. Rank `asks` loads the counter, too."""
    phases: list[str] = []

    def note(event: sp.events.Event) -> None:
        if event.kind == "begin":
            phases.append(event.phase)

    target: dict[str, Any] = {"w": torch.zeros(4)}
    if rank() == asks:
        target["counter"] = Counter(0, refuses)
    message = ""
    with sp.events.subscribe(note):
        try:
            sp.load(folder, target, strict=asks is not None, rendezvous=rendezvous(deadline=20.0))
        except RankFailure as failure:
            message = failure.message
    return phases, target["w"].tolist(), target["counter"].count if rank() == asks else None, message


@pytest.mark.parametrize("asks", [None, 0, 1])
def test_ranks_meet_after_the_reads_only_if_one_loads_objects(asks: int | None, tmp_path: Path) -> None:
    sp.save(tmp_path / "c", {"w": torch.arange(4.0), "counter": Counter(7)})
    for outcome in run_ranks(2, _load, str(tmp_path / "c"), asks, False):
        phases, values, count, message = outcome.value
        assert phases == (["match", "read"] if asks is None else ["match", "read", "apply"])
        assert values == [0.0, 1.0, 2.0, 3.0]
        assert count == (7 if outcome.rank == asks else None)
        assert not message


@pytest.mark.parametrize("asks", [0, 1])
def test_an_object_that_refuses_its_state_on_one_rank_fails_the_load_of_all(
    asks: int, tmp_path: Path
) -> None:
    sp.save(tmp_path / "c", {"w": torch.arange(4.0), "counter": Counter(7)})
    outcomes = run_ranks(2, _load, str(tmp_path / "c"), asks, True)
    texts = {outcome.value[3] for outcome in outcomes}
    (text,) = texts
    assert "phase apply" in text and f"rank {asks}" in text and "will not be loaded" in text
    assert "partly overwritten" in text
