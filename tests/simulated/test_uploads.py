"""Copies of a load to the device, with streams that are held where it matters."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.loading.destinations import DestinationWriter, UploadBuffers, Uploads
from shardproof.storage import LocalStorage
from tests import simulated
from tests.accelerator import first_device
from tests.simulated.waiting import LIMIT, still_waits

pytestmark = pytest.mark.gpu

COUNT = 1 << 16
SIZES = (600, 2, 500, 1)
"""Rows of tensors, some of which share an upload."""


def send(buffers: UploadBuffers, value: int, target: torch.Tensor) -> None:
    """Fills the next buffer and enqueues its copy."""
    buffers.next(COUNT)[:] = bytes([value]) * COUNT
    target.copy_(buffers.tensor[:COUNT], non_blocking=True)
    buffers.enqueued()


def test_a_buffer_is_filled_again_when_its_copy_is_done(background: ThreadPoolExecutor) -> None:
    device = first_device()
    targets = torch.zeros(3, COUNT, dtype=torch.uint8, device=device)
    uploads = Uploads([device])
    with uploads.entered():
        side = torch.accelerator.current_stream(device)
        buffers = uploads.new_buffers()
        with simulated.held(side):
            send(buffers, 1, targets[0])
            send(buffers, 2, targets[1])
            third = background.submit(buffers.next, COUNT)
            assert still_waits(third)
        third.result(LIMIT)[:] = bytes([3]) * COUNT
        uploads.finish()
    assert targets[0].cpu().unique().tolist() == [1]
    assert targets[1].cpu().unique().tolist() == [2]


def test_a_wait_lasts_until_all_copies_are_done(background: ThreadPoolExecutor) -> None:
    device = first_device()
    target = torch.zeros(COUNT, dtype=torch.uint8, device=device)
    uploads = Uploads([device])
    with uploads.entered(), simulated.held(torch.accelerator.current_stream(device)):
        send(uploads.new_buffers(), 1, target)
        finishing = background.submit(uploads.finish)
        assert still_waits(finishing)
    finishing.result(LIMIT)


def test_memory_of_a_thread_that_ended_is_not_freed_before_its_copies() -> None:
    """Torch reuses freed page-locked memory, and the next user overwrites it."""
    device = first_device()
    target = torch.zeros(COUNT, dtype=torch.uint8, device=device)
    uploads = Uploads([device])
    memory = list[weakref.ref[torch.Tensor]]()

    def work() -> None:
        with uploads.entered():
            buffers = uploads.new_buffers()
            send(buffers, 1, target)
            memory.append(weakref.ref(buffers.tensor))

    with uploads.entered(), simulated.held(torch.accelerator.current_stream(device)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(LIMIT)
        gc.collect()
        assert memory[0]() is not None
    uploads.finish()
    gc.collect()
    assert memory[0]() is None


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("layout", ["row-major", "small", "strided", "shard", "inference", "small inference"])
def test_values_are_there_when_a_load_returns(
    layout: str, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that waits for no other stream reads the values.

    One thread reads the pieces of all tensors into its two buffers. Copies are late, so that a buffer that is
    filled too early has wrong values. Small tensors share one copy to the device.
    """
    monkeypatch.setattr(LocalStorage, "is_cached", lambda *_: cached)
    monkeypatch.setattr("shardproof.engine.loading.load_protocol.reading_threads", lambda: 1)
    device = first_device()
    shape = (8, 16) if "small" in layout else (600, 600)
    is_inference = "inference" in layout
    sp.save(tmp_path / "c", {str(at): torch.full(shape, float(at)) for at in range(8)})
    with torch.inference_mode(is_inference):
        state: dict[str, Any] = {str(at): torch.full(shape, -1.0, device=device) for at in range(8)}
    values = dict(state)
    if layout == "strided":
        state = values = {key: torch.full((*shape, 2), -1.0, device=device)[..., 0] for key in state}
    if layout == "shard":
        values = {key: tensor[300:] for key, tensor in state.items()}
        state = {key: sp.LocalShards(shape, [(tensor, (300, 0))]) for key, tensor in values.items()}
    torch.accelerator.synchronize()
    simulated.set_delays(0.05)
    with torch.inference_mode(is_inference):
        sp.load(tmp_path / "c", state)
    simulated.set_delays(0.0)
    with torch.Stream(device) as other:
        doubled = {key: value * 2 for key, value in values.items()}
        other.synchronize()
    assert [float(doubled[str(at)].cpu().unique()) for at in range(8)] == [2.0 * at for at in range(8)]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("cached", [True, False])
def test_a_load_in_inference_mode_fills_other_tensors(
    cached: bool, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "is_cached", lambda *_: cached)
    monkeypatch.setattr("shardproof.engine.loading.load_protocol.reading_threads", lambda: threads)
    sp.save(tmp_path / "c", {str(at): torch.full((size, 600), float(at)) for at, size in enumerate(SIZES)})
    state = {
        str(at): torch.nn.Parameter(torch.zeros(size, 600, device=first_device()))
        for at, size in enumerate(SIZES)
    }
    with torch.inference_mode():
        sp.load(tmp_path / "c", state)
    assert [float(state[str(at)].detach().cpu().unique()) for at in range(4)] == [0.0, 1.0, 2.0, 3.0]


def mixed(device: torch.device) -> dict[str, torch.Tensor]:
    """Small tensors of several dtypes and layouts, on a device and on the host."""
    whole = torch.arange(60, dtype=torch.float32)
    state = {f"{at:02}": torch.randn(50 + at).to(device) for at in range(40)}
    state |= {f"{at:02} half": torch.randn(7).bfloat16().to(device) for at in range(0, 40, 4)}
    state |= {f"{at:02} host": torch.randn(3) for at in range(0, 40, 5)}
    state |= {f"{at:02} strided": whole.to(device).view(6, 10).t() for at in range(0, 40, 9)}
    state |= {f"{at:02} column": torch.randn(3, 2, device=device)[:1, 0] for at in range(0, 40, 7)}
    return state | {"01 host, strided": whole.view(6, 10).t(), "02 empty": torch.empty(0, 3, device=device)}


def assert_loads(folder: Path, state: dict[str, torch.Tensor]) -> None:
    loaded = {key: torch.full_like(value, -1) for key, value in state.items()}
    sp.load(folder, loaded)
    assert {key for key, value in state.items() if not torch.equal(loaded[key].cpu(), value.cpu())} == set()


@pytest.mark.parametrize("cached", [True, False])
def test_small_tensors_share_one_upload(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "is_cached", lambda *_: cached)
    state = mixed(first_device())
    sp.save(tmp_path / "c", state)
    alone = list[tuple[int, ...]]()
    put = DestinationWriter.put

    def counted(writer: DestinationWriter, row: int, parts: range, *args: Any, **options: Any) -> None:
        alone.append((row, *parts))
        put(writer, row, parts, *args, **options)

    monkeypatch.setattr(DestinationWriter, "put", counted)
    assert_loads(tmp_path / "c", state)
    others = [key for key in state if "strided" in key]
    assert 0 < len(alone) <= len(others)


@pytest.mark.parametrize("snapshot", ["fence", "stage"])
def test_small_tensors_of_two_devices(snapshot: Any, tmp_path: Path) -> None:
    state = {str(at): torch.randn(8, device=f"simulated:{at % 2}") for at in range(40)}
    checkpointer = sp.Checkpointer(tmp_path, snapshot=snapshot)
    checkpointer.save(1, state).result(LIMIT)
    assert_loads(tmp_path / "step-00000001", state)


def test_a_few_small_tensors_do_not_upload_their_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between tensors of the host, a copy of each costs less."""
    state = {f"{at:03}": torch.randn(15_000) for at in range(100)}
    state |= {f"{at:03} device": torch.randn(9, device=first_device()) for at in (3, 96)}
    sp.save(tmp_path / "c", state)
    uploaded = list[int]()
    to = torch.Tensor.to

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        uploaded.append(tensor.nbytes)
        return to(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    assert_loads(tmp_path / "c", state)
    assert sum(uploaded) < 1 << 20


def test_small_tensors_load_if_the_device_has_no_room_for_their_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = mixed(first_device())
    sp.save(tmp_path / "c", state)
    failed = list[torch.device]()

    def to(tensor: torch.Tensor, device: torch.device, **options: Any) -> torch.Tensor:
        failed.append(device)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "to", to)
    loaded = {key: torch.full_like(value, -1) for key, value in state.items()}
    sp.load(tmp_path / "c", loaded)
    monkeypatch.undo()
    assert failed == [first_device()]
    assert all(torch.equal(loaded[key].cpu(), value.cpu()) for key, value in state.items())
