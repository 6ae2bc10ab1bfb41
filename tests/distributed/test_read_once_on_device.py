"""Reading once and handing on, into memory of the simulated device: threads work on their caller's stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardproof.loading import Options, load_from, loader
from shardproof.rendezvous import LocalRendezvous, connect
from shardproof.saving import Saver
from shardproof.storage import LocalStorage
from shardproof.streams import on_stream
from tests import simulated
from tests.distributed.test_read_once import go_through, small_rounds
from tests.harness import process_group, run_ranks

pytestmark = pytest.mark.skipif(bool(simulated.why_not()), reason=simulated.why_not())

SHAPE, COUNT = (64, 32), 6


def value(number: int) -> torch.Tensor:
    return torch.arange(float(SHAPE[0] * SHAPE[1])).reshape(SHAPE) + number


def load_late(folder: str, way: str) -> bool:
    simulated.load()
    loader.reading_threads = lambda: 3  # type: ignore[attr-defined]
    go_through(way)
    small_rounds(4096)
    own = torch.Stream("simulated:0")
    with process_group(), on_stream(own, own.device):
        state = {
            str(number): torch.empty(SHAPE[::-1], device="simulated").t()
            if number % 2
            else torch.empty(SHAPE, device="simulated")
            for number in range(COUNT)
        }
        own.synchronize()
        simulated.set_delays(0.02, seed=1)
        for target in state.values():
            for _ in range(40):
                target.fill_(-1)
        report = load_from(LocalStorage(folder), state, connect(), Options(read_once=True))
        doubled = [target * 2 for target in state.values()]
        assert report.read_once and report.received
        return all(torch.equal(found.cpu(), value(number) * 2) for number, found in enumerate(doubled))


@pytest.mark.parametrize("way", ["memory", "group"])
def test_a_load_is_ordered_with_what_its_caller_enqueues(way: str, tmp_path: Path) -> None:
    simulated.library()
    state = {str(number): value(number) for number in range(COUNT)}
    Saver(LocalRendezvous(), chunk_bytes=512).save(LocalStorage(tmp_path), state)
    for outcome in run_ranks(2, load_late, str(tmp_path), way, timeout=120):
        assert outcome.value
