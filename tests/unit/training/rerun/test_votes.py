"""The device of the votes of the rerun machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardproof.rendezvous import LocalRendezvous
from shardproof.training.rerun import votes


def test_a_vote_uses_the_device_that_is_current_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without a number is the current one. No accelerator is used, but for its name."""
    used: list[torch.device] = []
    monkeypatch.setattr(votes, "device_of_group", lambda group: torch.device("cuda", 1))
    monkeypatch.setattr(votes, "all_reduce", lambda tensor, group, kind: None)
    monkeypatch.setattr(torch, "tensor", lambda values, dtype, device: used.append(device))
    group: Any = object()
    votes.BallotExchange(LocalRendezvous(), group)._start(0, 0)
    assert used == [torch.device("cuda")]
