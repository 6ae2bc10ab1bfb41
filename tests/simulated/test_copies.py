"""Copies of device memory, with streams that are held where it matters."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from shardproof._utils.libc import address
from shardproof.engine.saving.staging import DeviceCopies, SliceSource, copies_of, pinned_buffer
from shardproof.state import Piece
from tests import simulated
from tests.accelerator import first_device
from tests.simulated.waiting import LIMIT, still_waits

pytestmark = pytest.mark.gpu

SHAPE = (100, 200)


@pytest.fixture
def buffer() -> memoryview:
    torch.zeros(1, device=first_device())  # with a device in use, the buffer is page-locked
    memory = pinned_buffer(4 * SHAPE[0] * SHAPE[1])
    memory[:] = bytes(len(memory))
    return memory


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.ones(SHAPE, device=first_device())


def side_of(copies: DeviceCopies) -> torch.Stream:
    side = copies._side
    assert side is not None
    return side


def all_are(buffer: memoryview, value: float) -> bool:
    return bool((torch.frombuffer(buffer, dtype=torch.float32) == value).all())


def test_a_copy_waits_for_earlier_work_of_the_main_stream(
    background: ThreadPoolExecutor, enqueued: threading.Event, weight: torch.Tensor, buffer: memoryview
) -> None:
    main = torch.accelerator.current_stream()
    main.synchronize()
    with simulated.held(main):
        weight.fill_(2)
        copies = DeviceCopies(weight.device)
        copying = background.submit(copies.copy, weight, buffer)
        assert enqueued.wait(LIMIT)
        assert still_waits(copying)
    copying.result(LIMIT)
    assert all_are(buffer, 2)


def test_a_copy_does_not_wait_for_later_work_of_the_main_stream(
    background: ThreadPoolExecutor, weight: torch.Tensor, buffer: memoryview
) -> None:
    other = torch.ones(SHAPE, device=first_device())
    main = torch.accelerator.current_stream()
    copies = DeviceCopies(weight.device)
    main.synchronize()
    with simulated.held(main):
        other.fill_(2)
        background.submit(copies.copy, weight.t(), buffer).result(LIMIT)
        assert not main.query()
    assert all_are(buffer, 1)


def test_a_copy_returns_when_its_bytes_have_arrived(
    background: ThreadPoolExecutor, enqueued: threading.Event, weight: torch.Tensor, buffer: memoryview
) -> None:
    copies = DeviceCopies(weight.device)
    with simulated.held(side_of(copies)):
        copying = background.submit(copies.copy, weight, buffer)
        assert enqueued.wait(LIMIT)
        assert still_waits(copying)
        assert not all_are(buffer, 1)
    copying.result(LIMIT)
    assert all_are(buffer, 1)


def test_memory_of_a_temporary_is_not_given_to_training(
    background: ThreadPoolExecutor, enqueued: threading.Event, weight: torch.Tensor, buffer: memoryview
) -> None:
    main = torch.accelerator.current_stream()
    copies = DeviceCopies(weight.device)
    with simulated.held(side_of(copies)):
        copying = background.submit(copies.copy, weight.t(), buffer)
        assert enqueued.wait(LIMIT)
        assert still_waits(copying)  # its temporary has been freed by now
        others = [torch.full(SHAPE, 7.0, device=first_device()) for _ in range(5)]
        main.synchronize()
    copying.result(LIMIT)
    assert all_are(buffer, 1)
    assert all(bool((other == 7).all()) for other in others)


def test_a_wait_ends_when_all_copies_are_done(
    background: ThreadPoolExecutor, enqueued: threading.Event, weight: torch.Tensor, buffer: memoryview
) -> None:
    copies = DeviceCopies(weight.device)
    with simulated.held(side_of(copies)):
        background.submit(copies.copy, weight, buffer)
        assert enqueued.wait(LIMIT)
        waiting = background.submit(copies.wait)
        assert still_waits(waiting)
    waiting.result(LIMIT)
    assert all_are(buffer, 1)


def test_one_copy_has_the_tensors_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    views = [torch.full((16,), float(at), device=f"simulated:{at // 2 % 2}") for at in range(6)]
    pieces = [Piece.of(view, (0,), (16,)) for view in views]
    ones, copies = np.ones(6, np.int64), copies_of(views)
    source = SliceSource(pieces, np.arange(6), ones * 0, ones * 64, ones * 0, ones * 16, copies)
    memory, sent = pinned_buffer(6 * 64), list[list[str]]()
    enqueue = DeviceCopies.enqueue_together

    def record(copies: DeviceCopies, sources: Sequence[torch.Tensor], *where: Any) -> None:
        sent.append([str(one.device) for one in sources])
        enqueue(copies, sources, *where)

    monkeypatch.setattr(DeviceCopies, "enqueue_together", record)
    for row in range(6):
        source.read(row, address(memory) + 64 * row, wait=False)
    assert source.wait() == []
    assert sent == [["simulated:0"] * 2, ["simulated:1"] * 2, ["simulated:0"] * 2]
    found = torch.frombuffer(memory, dtype=torch.float32).view(6, 16)
    assert torch.equal(found, torch.arange(6.0).unsqueeze(1).expand(6, 16))


def test_a_copy_changes_no_current_device_or_stream(buffer: memoryview) -> None:
    weight = torch.ones(SHAPE, device="simulated:1")
    here, there = torch.Stream("simulated:0"), torch.accelerator.current_stream("simulated:1")
    with here:
        DeviceCopies(weight.device).copy(weight.t(), buffer)
        assert torch.accelerator.current_device_index() == 0
        assert torch.accelerator.current_stream("simulated:0") == here
        assert torch.accelerator.current_stream("simulated:1") == there
    assert all_are(buffer, 1)
