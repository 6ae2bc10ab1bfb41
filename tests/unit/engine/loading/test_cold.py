"""Loads of files that are not in the page cache: values, verification, and several requests in flight."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.engine.format import read_manifest
from shardproof.engine.loading import LoadOptions, LoadReport, chunk_reader, load_from
from shardproof.engine.loading.checkpoint import NativeCheckpoint
from shardproof.engine.loading.chunk_reader import COLD_BYTES, Chunks
from shardproof.engine.loading.read_executor import Scratch
from shardproof.engine.saving import Saver
from shardproof.engine.storage.paths import storage_error
from shardproof.errors import CorruptChunkError, StorageError
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.small_blocks import blocks_of

ROWS, COLUMNS = 700, 300


def stored() -> dict[str, torch.Tensor]:
    """Large tensors of several blocks and chunks, and small ones beside them that share a read."""
    torch.manual_seed(0)
    state = {f"w{number}": torch.randn(ROWS, COLUMNS) for number in range(3)}
    state |= {f"b{number}": torch.randn(1 + 7 * number) for number in range(9)}
    return state | {"half": torch.randn(ROWS, COLUMNS).bfloat16(), "empty": torch.zeros(0, 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved") / "step"
    Saver(LocalRendezvous(), chunk_bytes=300_000).save(LocalStorage(place), stored())
    return place


class Uncached(LocalStorage):
    """A folder that reports nothing as cached, or only every `period`-th range; records its reads."""

    def __init__(self, root: Path, *, period: int = 0) -> None:
        super().__init__(root)
        self._asked = itertools.count()
        self._period = period
        self.requests: list[tuple[int, int]] = []

    def is_cached(self, name: str, start: int, count: int) -> bool:
        return bool(self._period) and next(self._asked) % self._period == 0

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        if len(buffer):  # otherwise the load opens the file
            self.requests.append((start, len(buffer)))
        super().read_into(name, start, buffer)


WAYS: dict[str, Callable[[Path], Any]] = {
    "past the cache": lambda folder: LocalStorage(folder, direct=True),
    "not cached": Uncached,
    "partly cached": lambda folder: Uncached(folder, period=2),
    "a storage that knows of no cache": lambda folder: FaultyStorage(LocalStorage(folder)),
}


def load(storage: Any, state: Any, **options: Any) -> LoadReport:
    return load_from(storage, state, LocalRendezvous(), LoadOptions(**options))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("request_bytes", [256 << 10, 4 << 20])
def test_every_kind_of_destination_gets_the_stored_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str, request_bytes: int
) -> None:
    monkeypatch.setattr(chunk_reader, "COLD_BYTES", request_bytes)
    state = stored()
    targets: list[dict[str, Any]] = [
        {key: torch.zeros_like(value) for key, value in state.items()},
        {key: torch.zeros(*value.shape[:-1], 2 * value.shape[-1])[..., ::2] for key, value in state.items()},
    ]
    for target in targets:
        load(WAYS[way](folder), target, cast=True)
        assert all(torch.equal(target[key].to(state[key].dtype), state[key]) for key in state)
    box = torch.zeros(331, 120)
    piece = sp.LocalShards((ROWS, COLUMNS), [(box, (101, 90))])
    load(WAYS[way](folder), {"w1": piece}, strict=False)
    assert torch.equal(box, state["w1"][101:432, 90:210])


@pytest.mark.parametrize("way", WAYS)
def test_a_load_of_some_rows_reads_only_their_blocks(tmp_path: Path, way: str) -> None:
    value = torch.randn(64, 64)
    with blocks_of(1024):
        sp.save(tmp_path, {"w": value})
        rows = torch.zeros(20, 64)
        report = load(WAYS[way](tmp_path), {"w": sp.LocalShards((64, 64), [(rows, (17, 0))])})
    assert torch.equal(rows, value[17:37])
    assert report.bytes == 24 * 64 * 4  # rows 16 to 39: four of 256 bytes in a block


def test_bytes_that_are_not_cached_are_read_in_large_requests(tmp_path: Path) -> None:
    sp.save(tmp_path, {"w": torch.randn(3 << 20)})
    target = {"w": torch.zeros(3 << 20)}
    cold, warm = Uncached(tmp_path), Uncached(tmp_path, period=1)
    load(cold, target)
    load(warm, target)
    assert max(count for _, count in cold.requests) == COLD_BYTES
    assert max(count for _, count in warm.requests) < COLD_BYTES


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", ["w1", "b4", "half"])
@pytest.mark.parametrize("boxes", [False, True], ids=["whole", "a part"])
def test_changed_bytes_are_found(folder: Path, way: str, key: str, boxes: bool) -> None:
    with sp.open(folder) as opened:
        row = opened.row(key)
        rows = np.flatnonzero(opened.table.tensor == row)
        at, name = int(opened.table.byte_start[rows[0]]), opened.manifest.files[0].name
    path = folder / name
    raw = path.read_bytes()
    value = stored()[key]
    target: Any = torch.zeros_like(value)
    if boxes:
        view = torch.zeros(value[:1].shape, dtype=value.dtype)
        target = sp.LocalShards(tuple(value.shape), [(view, (0,) * value.dim())])
    try:
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with pytest.raises(CorruptChunkError) as caught:
            load(WAYS[way](folder), {key: target}, strict=False)
    finally:
        path.write_bytes(raw)
    assert caught.value.details["key"] == key


class Failing(Uncached):
    """The `at`-th request fails while another is in flight."""

    def __init__(self, root: Path, at: int) -> None:
        super().__init__(root)
        self._number = itertools.count()
        self._at = at
        self._both = threading.Barrier(2, timeout=30)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        number = next(self._number) if len(buffer) else -1
        if number in (self._at, self._at + 1):
            self._both.wait()
        if number == self._at:
            raise storage_error(OSError(errno.EIO, "Input/output error"), "read", name)
        super().read_into(name, start, buffer)


@pytest.mark.parametrize("at", [0, 3])
def test_a_request_that_fails_among_others_fails_the_load(folder: Path, at: int) -> None:
    target = {key: torch.zeros_like(value) for key, value in stored().items()}
    before = threading.active_count()
    with pytest.raises(StorageError, match="EIO") as caught:
        load(Failing(folder, at), target)
    assert caught.value.details["overwritten"]
    assert threading.active_count() == before


def test_a_file_that_is_shorter_than_recorded_fails_the_load(tmp_path: Path) -> None:
    sp.save(tmp_path, {"w": torch.randn(300, 300)})
    record = read_manifest(LocalStorage(tmp_path)).files[0]

    class AsRecorded(Uncached):
        def size(self, name: str) -> int | None:
            return record.size if name == record.name else super().size(name)

    with (tmp_path / record.name).open("r+b") as file:
        file.truncate(record.size // 2)
    with pytest.raises(StorageError, match="too short"):
        load(AsRecorded(tmp_path), {"w": torch.zeros(300, 300)})


class Together(Uncached):
    """Each of the first `count` requests waits until all of them are in flight."""

    def __init__(self, root: Path, count: int) -> None:
        super().__init__(root)
        self._left = itertools.count()
        self._count = count
        self._all = threading.Barrier(count, timeout=30)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        if len(buffer) and next(self._left) < self._count:
            self._all.wait()
        super().read_into(name, start, buffer)


def test_several_requests_are_in_flight(folder: Path) -> None:
    target = {key: torch.zeros_like(value) for key, value in stored().items()}
    load(Together(folder, 8), target)
    assert all(torch.equal(target[key], value) for key, value in stored().items())


def test_a_unit_for_other_ranks_is_read_in_one_request(folder: Path) -> None:
    storage = Uncached(folder)
    with NativeCheckpoint(storage) as opened:
        rows = np.flatnonzero(opened.table.tensor == opened.row("w0"))
        chunks = Chunks(opened.files, opened.manifest, opened.table, rows)
        unit = range(len(chunks))
        memory = bytearray(chunks.span(unit))
        chunks.look_for_pages([unit])
        storage.requests.clear()
        chunks.read(unit, memoryview(memory))
    assert len(storage.requests) == 1
    assert memory == stored()["w0"].numpy().tobytes()


@pytest.mark.parametrize("shift", range(1, 34))
def test_elements_load_from_memory_that_begins_anywhere(
    shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a chunk may be a multiple of the item size although its place in the memory is not."""
    before = torch.arange(shift, dtype=torch.float64 if shift % 2 else torch.uint8)
    state = {"a": before, "b": torch.randn(3, 4, dtype=torch.complex128)}
    sp.save(tmp_path / "c", state)

    def take_odd_memory(scratch: Scratch, count: int) -> tuple[torch.Tensor, memoryview]:
        memory = torch.empty(count + 32, dtype=torch.uint8)
        start = (8 - memory.data_ptr()) % 16
        odd = memory[start : start + count]
        return odd, memoryview(odd.numpy().data)

    monkeypatch.setattr(Scratch, "take", take_odd_memory)
    target = {"a": torch.zeros_like(state["a"]), "b": torch.zeros(4, 3, dtype=torch.complex128).t()}
    sp.load(tmp_path / "c", target)
    assert torch.equal(target["a"], state["a"])
    assert torch.equal(target["b"], state["b"])
