"""A race on a GPU gives wrong values here, every time; work that is ordered gives the right ones.

Streams are held, so that their work is late for sure. Reading a tensor (`tolist`) waits for the current
stream, which is main.
"""

from __future__ import annotations

import pytest
import torch

from tests import simulated
from tests.simulated.values import COUNT, all_are, device_memory, page_locked

pytestmark = pytest.mark.gpu

DEVICE = torch.device("simulated", 0)


@pytest.fixture(autouse=True)
def main() -> torch.Stream:
    simulated.set_delays(0.0)
    stream = torch.accelerator.current_stream(DEVICE)
    stream.synchronize()
    return stream


@pytest.fixture
def side() -> torch.Stream:
    return torch.Stream(DEVICE)


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_to_page_locked_memory_is_read_too_early(main: torch.Stream, waits: bool) -> None:
    source, target = device_memory(1), page_locked(0)
    with simulated.held(main):
        target.copy_(source, non_blocking=True)
        done = main.record_event()
        assert not done.query()
        if not waits:
            assert all_are(target, 0)
    done.synchronize()
    assert all_are(target, 1)


@pytest.mark.parametrize("waits", [False, True])
def test_a_tensor_is_overwritten_while_side_copies_it(
    main: torch.Stream, side: torch.Stream, waits: bool
) -> None:
    source, target = device_memory(1), page_locked(0)
    with simulated.held(side):
        with side:
            target.copy_(source, non_blocking=True)
        if waits:
            main.wait_event(side.record_event())
        source.fill_(2)
        if not waits:
            main.synchronize()
    side.synchronize()
    assert all_are(target, 1 if waits else 2)
    assert all_are(source, 2)


@pytest.mark.parametrize("waits", [False, True])
def test_side_copies_what_main_has_not_written_yet(
    main: torch.Stream, side: torch.Stream, waits: bool
) -> None:
    source, target = device_memory(1), page_locked(0)
    with simulated.held(main):
        source.fill_(2)
        if waits:
            side.wait_stream(main)
        with side:
            target.copy_(source, non_blocking=True)
        if not waits:
            side.synchronize()
    side.synchronize()
    assert all_are(target, 2 if waits else 1)


@pytest.mark.parametrize("owner", ["main", "main, recorded", "side"])
def test_a_temporary_is_freed_while_side_uses_it(main: torch.Stream, side: torch.Stream, owner: str) -> None:
    source, target = device_memory(1), page_locked(0)
    if owner == "side":
        with side:
            temporary = source + 1
    else:
        temporary = source + 1
        main.synchronize()
    with simulated.held(side):
        with side:
            target.copy_(temporary, non_blocking=True)
        if owner == "main, recorded":
            temporary.record_stream(side)
        del temporary
        other = torch.full((COUNT,), 7.0, device=DEVICE)
        main.synchronize()
    side.synchronize()
    assert all_are(target, 7 if owner == "main" else 2)
    assert all_are(other, 7)


def test_freed_memory_is_handed_out_at_once_and_overwritten(main: torch.Stream, side: torch.Stream) -> None:
    first = device_memory(1)
    address = first.data_ptr()
    del first
    with side:
        assert torch.empty(COUNT, device=DEVICE).data_ptr() != address
    again = torch.empty(COUNT, device=DEVICE)
    assert again.data_ptr() == address
    assert again.isnan().all()


@pytest.mark.parametrize("waits", [False, True])
def test_a_page_locked_source_is_overwritten_too_early(main: torch.Stream, waits: bool) -> None:
    source, target = page_locked(1), device_memory(0)
    with simulated.held(main):
        target.copy_(source, non_blocking=True)
        if not waits:
            source.fill_(2)
    main.synchronize()
    source.fill_(2)
    assert all_are(target, 1 if waits else 2)


def test_other_host_memory_is_read_before_the_call_returns(main: torch.Stream) -> None:
    sources = [torch.ones(COUNT), page_locked(1).double(), torch.ones(COUNT, 2, pin_memory=True)[:, 0]]
    targets = [device_memory(0) for _ in sources]
    with simulated.held(main):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
            source.fill_(2)
    assert all(all_are(target, 1) for target in targets)


def test_other_host_memory_is_filled_when_the_call_returns(main: torch.Stream) -> None:
    simulated.set_delays(0.02, seed=1)
    source = torch.zeros(COUNT, device=DEVICE)
    for value in range(20):
        target = torch.empty(COUNT)
        source.fill_(value)
        target.copy_(source, non_blocking=True)
        assert all_are(target, value)


@pytest.mark.parametrize("known", [True, False])
def test_page_locked_memory_is_freed_while_it_is_copied_to(main: torch.Stream, known: bool) -> None:
    """The allocator waits for the copies of its own tensors, and knows of no others."""
    source, memory = device_memory(1), torch.empty(2 * COUNT, pin_memory=True)
    address = memory.data_ptr()
    target = memory[COUNT:] if known else torch.frombuffer(memory.numpy().data[COUNT:], dtype=torch.float32)
    del memory
    with simulated.held(main):
        target.copy_(source, non_blocking=True)
        del target
        others = [torch.zeros(2 * COUNT, pin_memory=True) for _ in range(5)]
        assert (address in [other.data_ptr() for other in others]) != known
    main.synchronize()
    assert all(all_are(other[COUNT:], 0) for other in others) == known
    again = [torch.zeros(2 * COUNT, pin_memory=True) for _ in range(50)]
    assert (address in [other.data_ptr() for other in again]) == known


def test_devices_are_ordered_by_their_own_streams(main: torch.Stream) -> None:
    there, here = torch.zeros(COUNT, device="simulated:1"), device_memory(1)
    with simulated.held(main):
        here.fill_(2)
        there.copy_(here, non_blocking=True)
        here.fill_(3)
    assert all_are(there, 2)
    assert all_are(here, 3)


def test_work_that_is_late_stays_in_order(main: torch.Stream, side: torch.Stream) -> None:
    simulated.set_delays(0.001, seed=2)
    value, seen = device_memory(0), []
    for _ in range(50):
        value.mul_(2).add_(1).remainder_(1000)
        side.wait_stream(main)
        with side:
            target = page_locked(-1)
            target.copy_(value, non_blocking=True)
            seen.append((target, side.record_event()))
        main.wait_stream(side)
    expected = 0
    for target, event in seen:
        event.synchronize()
        expected = (expected * 2 + 1) % 1000
        assert all_are(target, expected)
