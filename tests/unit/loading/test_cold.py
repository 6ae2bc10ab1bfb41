"""Loads of files that are not in the page cache: values, verification, and several requests in flight."""

from __future__ import annotations

import ctypes
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
from shardproof._utils.memcpy import address
from shardproof.errors import CorruptChunkError, StorageError
from shardproof.format import read_manifest
from shardproof.loading import LoadReport, cold_reads, load_from, read_executor
from shardproof.loading.checkpoint import NativeCheckpoint
from shardproof.loading.chunk_reader import Chunks
from shardproof.loading.cold_reads import MEMORY_BYTES, MOST_THREADS, SAMPLES, Fetcher, Sketch, reads_twice
from shardproof.rendezvous import LocalRendezvous
from shardproof.saving import Saver
from shardproof.storage import LocalStorage, memory_for
from shardproof.storage.paths import storage_error
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
    """A folder that reports nothing as cached, or only every `period`-th range."""

    def __init__(self, root: Path, *, period: int = 0) -> None:
        super().__init__(root)
        self._asked = itertools.count()
        self._period = period
        self.requests: list[tuple[int, int]] = []
        self.cached: list[int] = []

    def is_cached(self, name: str, start: int, count: int) -> bool:
        return bool(self._period) and next(self._asked) % self._period == 0

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        if len(buffer):  # otherwise the load opens the file
            self.cached.append(start)
        super().read_into(name, start, buffer)

    def read_uncached(self, name: str, start: int, count: int, memory: memoryview) -> memoryview:
        self.requests.append((start, count))
        return super().read_uncached(name, start, count, memory)


WAYS: dict[str, Callable[[Path], Any]] = {
    "past the cache": Uncached,
    "partly cached": lambda folder: Uncached(folder, period=2),
    "a storage that knows of no cache": lambda folder: FaultyStorage(LocalStorage(folder)),
}


def load(storage: Any, state: Any, **options: Any) -> LoadReport:
    return load_from(storage, state, LocalRendezvous(), sp.loading.LoadOptions(**options))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("request_bytes", [256 << 10, 4 << 20])
def test_every_kind_of_destination_gets_the_stored_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str, request_bytes: int
) -> None:
    monkeypatch.setattr(read_executor, "REQUEST_BYTES", request_bytes)
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


def test_cached_ranges_are_read_through_the_cache_and_others_past_it(folder: Path) -> None:
    target = {key: torch.zeros_like(value) for key, value in stored().items()}
    cold, mixed = Uncached(folder), Uncached(folder, period=2)
    load(cold, target)
    load(mixed, target)
    assert cold.requests and not cold.cached
    assert mixed.requests and mixed.cached and len(mixed.requests) < len(cold.requests)


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

    def read_uncached(self, name: str, start: int, count: int, memory: memoryview) -> memoryview:
        number = next(self._number)
        if number in (self._at, self._at + 1):
            self._both.wait()
        if number == self._at:
            raise storage_error(OSError(errno.EIO, "Input/output error"), "read", name)
        return super().read_uncached(name, start, count, memory)


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

    def read_uncached(self, name: str, start: int, count: int, memory: memoryview) -> memoryview:
        if next(self._left) < self._count:
            self._all.wait()
        return super().read_uncached(name, start, count, memory)


def test_several_requests_are_in_flight(folder: Path) -> None:
    target = {key: torch.zeros_like(value) for key, value in stored().items()}
    load(Together(folder, 8), target)
    assert all(torch.equal(target[key], value) for key, value in stored().items())


@pytest.mark.parametrize("longest", [1, 4 << 20, 8 << 20, 16 << 20, 60 << 20])
def test_memory_for_requests_is_bounded(longest: int) -> None:
    threads = Fetcher(True, longest).threads
    assert 1 <= threads <= MOST_THREADS
    assert threads == 2 or threads * longest <= MEMORY_BYTES


def test_one_request_takes_no_more_memory_than_the_longest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = cold_reads.aligned_buffer
    monkeypatch.setattr(cold_reads, "aligned_buffer", lambda count: made.append(count) or real(count))
    load(Uncached(folder), {"w0": torch.zeros(ROWS, COLUMNS)}, strict=False)
    assert made and max(made) <= memory_for(300_000)


def test_a_unit_for_other_ranks_is_read_in_one_request(folder: Path) -> None:
    storage = Uncached(folder)
    with NativeCheckpoint(storage) as opened:
        rows = np.flatnonzero(opened.table.tensor == opened.row("w0"))
        chunks = Chunks(opened.files, opened.manifest, opened.table, rows)
        unit = range(len(chunks))
        memory = bytearray(chunks.span(unit))
        storage.cached.clear()
        chunks.read_unit(unit, memoryview(memory))
    assert len(storage.cached) == 1
    assert memory == stored()["w0"].numpy().tobytes()


def sketch(rows: range, node: str = "n", share: int = 1) -> Sketch:
    whole = np.full(len(rows), 1 << 20)
    found = Sketch.of(np.array(rows), whole // share, whole)
    return Sketch(node, found.samples, found.complete)


@pytest.mark.parametrize("count", [4, 10 * SAMPLES])
def test_reads_twice_is_true_only_for_ranks_of_one_node_that_read_the_same_chunks(count: int) -> None:
    mine, others = range(count), range(count, 2 * count)
    assert reads_twice([sketch(mine), sketch(mine)])
    assert not reads_twice([sketch(mine), sketch(others)])
    assert not reads_twice([sketch(mine, "n0"), sketch(mine, "n1")])
    assert not reads_twice([sketch(mine, share=2), sketch(mine, share=2)])
    assert reads_twice([sketch(mine), sketch(others), sketch(mine), sketch(others)])
    assert not reads_twice([])


def test_reads_twice_is_true_if_one_rank_reads_half_of_anothers_chunks() -> None:
    assert reads_twice([sketch(range(1000)), sketch(range(500))])


def test_reads_twice_ignores_small_tensors_that_all_ranks_read() -> None:
    rows = np.arange(200)
    count = np.where(rows < 100, 1 << 20, 8)
    ranks = []
    for number in range(2):
        mine = (rows >= 100) | (rows % 2 == number)
        ranks.append(Sketch.of(rows[mine], count[mine], count[mine]))
    assert not reads_twice(ranks)


@pytest.mark.parametrize("shift", range(1, 34))
def test_elements_load_from_memory_that_begins_anywhere(
    shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a chunk may be a multiple of the item size although its place in the memory is not."""
    before = torch.arange(shift, dtype=torch.float64 if shift % 2 else torch.uint8)
    state = {"a": before, "b": torch.randn(3, 4, dtype=torch.complex128)}
    sp.save(tmp_path / "c", state)
    read = Fetcher.read

    def read_to_odd_memory(*args: Any) -> memoryview:
        piece = read(*args)
        memory = memoryview(bytearray(len(piece) + 32))
        start = (8 - address(memory)) % 16
        memory[start : start + len(piece)] = piece
        return memoryview((ctypes.c_char * len(piece)).from_buffer(memory, start)).cast("B")

    monkeypatch.setattr(LocalStorage, "is_cached", lambda *_: False)
    monkeypatch.setattr(Fetcher, "read", read_to_odd_memory)
    target = {"a": torch.zeros_like(state["a"]), "b": torch.zeros(4, 3, dtype=torch.complex128).t()}
    sp.load(tmp_path / "c", target)
    assert torch.equal(target["a"], state["a"])
    assert torch.equal(target["b"], state["b"])
