"""Loads into device memory, on a stream of the caller's own that is held."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.loading.read_executor import ChunkReads
from shardproof.storage import LocalStorage
from tests import simulated
from tests.accelerator import first_device
from tests.simulated.waiting import LIMIT, still_waits

pytestmark = pytest.mark.gpu

COUNT = 8


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("layout", ["row-major", "strided"])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("shape", [(600, 600), (60, 30)], ids=["large", "small"])
def test_a_load_is_ordered_with_the_work_of_its_callers_stream(
    layout: str,
    threads: int,
    shape: tuple[int, int],
    cached: bool,
    tmp_path: Path,
    background: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The load waits for earlier work of the stream, and later work of the stream for the load.

    Also if the device must rearrange the values. Files that are not in the page cache are read otherwise.
    """
    monkeypatch.setattr(LocalStorage, "is_cached", lambda *_: cached)
    monkeypatch.setattr("shardproof.engine.loading.load_protocol.reading_threads", lambda: threads)
    sp.save(tmp_path / "c", {str(number): torch.full(shape, float(number)) for number in range(COUNT)})
    own = torch.Stream(first_device())
    reads = threading.Event()
    run = ChunkReads.run

    def read(*args: Any, **options: Any) -> int:
        reads.set()
        return run(*args, **options)

    monkeypatch.setattr(ChunkReads, "run", read)

    def load(state: dict[str, torch.Tensor]) -> None:
        with own:
            sp.load(tmp_path / "c", state)

    with own:
        whole = [torch.empty(shape[0], 2 * shape[1], device=first_device()) for _ in range(COUNT)]
        step = 2 if layout == "strided" else 1
        state = {str(at): tensor[:, ::step][:, : shape[1]] for at, tensor in enumerate(whole)}
        if layout == "row-major":
            state = {key: tensor.contiguous() for key, tensor in state.items()}
        for tensor in state.values():
            tensor.fill_(-2)
        own.synchronize()
        with simulated.held(own):
            for tensor in state.values():
                tensor.fill_(-1)
            loading = background.submit(load, state)
            assert reads.wait(LIMIT)
            assert still_waits(loading)
            with torch.Stream(first_device()):
                now = [float(tensor.cpu().unique()) for tensor in state.values()]
            assert now == [-2.0] * COUNT
        loading.result(LIMIT)
        simulated.set_delays(0.05)
        doubled = [tensor * 2 for tensor in state.values()]
    own.synchronize()
    assert [float(tensor.cpu().unique()) for tensor in doubled] == [2.0 * at for at in range(COUNT)]
