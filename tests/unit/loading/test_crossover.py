"""The choice between reading everything and reading once, and the measurement that decides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardproof.loading.read_once import cost_model as crossover
from shardproof.loading.read_once.cost_model import Sampled, pays, sample, worth_measuring
from shardproof.loading.read_once.orders import Loads

GIGA = 10**9
WORK = 0.25
"""Processor seconds to read a gigabyte from the page cache."""


def whole(ranks: int, nodes: int = 1) -> Loads:
    """Every rank wants the same gigabyte."""
    each = np.full(ranks, GIGA)
    handed = each * (ranks - 1) // ranks
    node = np.arange(ranks) * nodes // ranks
    return Loads(node, each, np.full(nodes, GIGA), each // ranks, handed, handed)


def columns(ranks: int) -> Loads:
    """Every rank wants a part of every chunk."""
    loads = whole(ranks)
    handed = loads.received // ranks
    return Loads(loads.node, loads.read_all, loads.distinct_all, loads.read_once, handed, handed)


def found(
    ranks: int, storage: float, again: float, *, handing: float = 3.0, processors: float = 0.5
) -> list[tuple[Sampled, float]]:
    """Measurements of ranks that share a storage of `storage` GB/s, or `again` GB/s for data read before."""
    nbytes = GIGA // 500
    first, second = (max(nbytes / speed / GIGA * ranks, nbytes / GIGA * WORK) for speed in (storage, again))
    sampled = Sampled(nbytes, 0.0, first, second, nbytes / GIGA * WORK, processors)
    return [(sampled, handing * GIGA)] * ranks


@pytest.mark.parametrize(
    ("loads", "measured", "answer"),
    [
        (whole(2), found(2, 0.1, 0.1), True),  # the storage serves every rank anew
        (whole(4), found(4, 2.0, 2.0), True),
        (whole(2), found(2, 0.1, 99.0), False),  # the page cache has what the first rank read
        (whole(4), found(4, 0.1, 99.0), False),
        (columns(4), found(4, 0.1, 99.0), False),
        (whole(2), found(2, 99.0, 99.0), False),  # cached already: processors decide
        (columns(4), found(4, 99.0, 99.0), True),
        (columns(4), found(4, 99.0, 99.0, processors=8.0), False),
        (columns(4), found(4, 99.0, 99.0, handing=0.1), False),
    ],
)
def test_the_choice_on_a_node_follows_the_measurements(
    loads: Loads, measured: list[tuple[Sampled, float]], answer: bool
) -> None:
    assert pays(loads, measured, through_memory=True) is answer


@pytest.mark.parametrize(
    ("storage", "group", "nodes", "answer"),
    [
        (0.1, 1.0, 2, True),  # two nodes on slow storage
        (0.1, 1.0, 1, False),  # one node, whose page cache has what was read
        (8.0, 1.0, 2, False),  # storage faster than the group
        (0.1, 0.001, 2, False),
    ],
)
def test_the_choice_over_a_process_group_follows_the_measurements(
    storage: float, group: float, nodes: int, answer: bool
) -> None:
    measured = found(2, storage, 99.0, handing=group, processors=1.0)
    assert pays(whole(2, nodes), measured, through_memory=False) is answer


def test_a_load_with_little_to_gain_is_not_measured() -> None:
    assert worth_measuring(whole(2))
    little = np.array([1 << 20] * 2)
    assert not worth_measuring(Loads(np.array([0, 0]), little, little[:1], little // 2, little, little))


def test_the_speed_of_ranks_is_their_bytes_over_the_time_of_all() -> None:
    """Four ranks, a megabyte each in 4 ms: a GB/s if all read at once, a quarter of it one after another."""
    together = [Sampled(1_000_000, 1.0, 4e-3, 4e-3, 0.0, 1.0)] * 4
    in_turn = [Sampled(1_000_000, 1.0 + number, 4e-3, 4e-3, 0.0, 1.0) for number in range(4)]
    assert crossover._speed(together) == pytest.approx(GIGA)
    assert crossover._speed(in_turn) == pytest.approx(GIGA / 4)
    assert crossover._speed([Sampled(0, 1.0, 0.0, 0.0, 0.0, 1.0)]) == float("inf")


class Stored:
    """Chunks whose first read waits for the storage, and a clock that only reads and sleeps advance."""

    def __init__(self) -> None:
        self.now, self.worked, self.slept = 10.001, 0.0, 0.0
        self.seen: dict[int, int] = {}

    def __len__(self) -> int:
        return 100

    def sample(self, at: int, memory: memoryview) -> int:
        self.seen[at] = self.seen.get(at, 0) + 1
        self.worked += 1e-4
        self.now += 1e-3 if self.seen[at] == 1 else 1e-4
        if len(self.seen) == 3:
            self.now += 5.0  # the scheduler stops the thread
        return len(memory)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds

    def clock(self) -> Any:
        return SimpleNamespace(monotonic=lambda: self.now, thread_time=lambda: self.worked, sleep=self.sleep)


def test_samples_start_at_a_common_time_and_a_delayed_one_counts_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = Stored()
    monkeypatch.setattr(crossover, "time", stored.clock())
    monkeypatch.setattr(crossover, "processors", lambda: 0.5)
    found = sample(stored)  # type: ignore[arg-type]
    assert found.begun == pytest.approx(10.005) and stored.slept == pytest.approx(4e-3)
    assert list(stored.seen.values()) == [2] * 8
    assert found.nbytes == 8 * (256 << 10)
    assert (found.first, found.again, found.work) == pytest.approx((8e-3, 8e-4, 8e-4))
    assert found.processors == 0.5
    assert crossover._again([found]) == pytest.approx(0.0)
