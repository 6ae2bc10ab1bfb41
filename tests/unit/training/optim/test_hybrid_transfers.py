"""Copies that overlap with steps: the stream of each, and the waits between streams."""

from __future__ import annotations

import pytest
import torch

from shardproof.training.optim.hybrid.stepped_copy import SideStreams, transfers_for
from tests.logging_streams import streams_that_log


def test_copies_run_on_their_streams_between_two_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    log = streams_that_log(monkeypatch)
    transfers = transfers_for(torch.device("cpu"), overlap=True)
    assert isinstance(transfers, SideStreams)
    down, up = transfers.event(), transfers.event()
    source, host, device = torch.arange(4.0), torch.zeros(4), torch.zeros(4)
    transfers.begin()
    transfers.down([host], [source], down)
    down.synchronize()
    transfers.up([device], [host], up)
    transfers.end()
    assert log == [
        "mark on main",
        "side waits for main's mark",
        "second side waits for main's mark",
        *("device", "copy on side", "event on side", "device back"),
        "host waits for side's event",
        *("device", "copy on second side", "event on second side", "device back"),
        "main waits for side",
        "main waits for second side",
    ]
    assert torch.equal(device, source)
    assert torch.accelerator.current_stream().name == "main"  # type: ignore[attr-defined]


def test_main_is_current_again_after_a_copy_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    log = streams_that_log(monkeypatch)
    transfers = SideStreams(torch.device("cpu"))
    with pytest.raises(RuntimeError):
        transfers.down([torch.zeros(3)], [torch.zeros(4)], transfers.event())
    assert torch.accelerator.current_stream().name == "main"  # type: ignore[attr-defined]
    assert "event on side" not in log
