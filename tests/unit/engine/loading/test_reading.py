"""Which byte ranges a load reads: neighbours are joined across small gaps, up to a limit."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardproof as sp
from shardproof.engine.loading import LoadOptions, load_from, read_executor
from shardproof.engine.loading.checkpoint import NativeCheckpoint
from shardproof.engine.loading.chunk_reader import GAP, Chunks
from shardproof.engine.loading.read_executor import in_threads
from shardproof.engine.saving import Saver
from shardproof.errors import CorruptChunkError
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.small_blocks import blocks_of


class Counting(LocalStorage):
    """Records the ranges that are read from shard files, and reports all of them as cached."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ranges: list[tuple[int, int]] = []

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        if len(buffer):  # otherwise the load opens the file
            self.ranges.append((start, len(buffer)))
        super().read_into(name, start, buffer)

    def is_cached(self, name: str, start: int, count: int) -> bool:
        return True


class ChunkLayout:
    """Chunks at given offsets of files, without bytes."""

    def __init__(self, file: list[int], start: list[int], count: list[int]) -> None:
        self.chunks = Chunks.__new__(Chunks)
        self.chunks.file, self.chunks.start, self.chunks.count = file, start, count


def layout_of(gaps: list[int], counts: list[int], files: list[int]) -> ChunkLayout:
    file, start, at = [], [], 0
    for gap, count, new in zip(gaps, counts, files, strict=True):
        file.append((file[-1] if file else 0) + new)
        at = gap if new else at + gap
        start.append(at)
        at += count
    return ChunkLayout(file, start, counts)


rows = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.sampled_from([0, 0, 1, 100, GAP, GAP + 1]), min_size=n, max_size=n),
        st.lists(st.sampled_from([1, 50, 5_000, 300_000, 3_000_000]), min_size=n, max_size=n),
        st.lists(st.sampled_from([0, 0, 0, 1]), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)


@given(rows)
def test_batches_have_each_chunk_once_and_few_unwanted_bytes(
    drawn: tuple[list[int], list[int], list[int], list[bool]],
) -> None:
    gaps, counts, files, alone = drawn
    chunks = layout_of(gaps, counts, files).chunks
    batches = chunks.batches(alone, 1 << 20)
    assert [at for batch in batches for at in batch] == list(range(len(counts)))
    for batch in batches:
        wanted = sum(chunks.count[at] for at in batch)
        unwanted = chunks.span(batch) - wanted
        assert unwanted * 16 <= wanted
        assert len({chunks.file[at] for at in batch}) == 1
        assert len(batch) == 1 or (chunks.span(batch) <= 1 << 20 and not any(alone[at] for at in batch))
    for one, other in pairwise(batches):
        last, first = one[-1], other[0]
        joinable = chunks.file[last] == chunks.file[first] and not alone[last] and not alone[first]
        if joinable and chunks.start[last] + chunks.count[last] == chunks.start[first]:
            extent = chunks.start[first] + chunks.count[first] - chunks.start[one[0]]
            assert extent > 1 << 20  # neighbours are only read apart where one read would be too long


def test_small_neighbours_share_a_read_across_a_small_gap(tmp_path: Path) -> None:
    state = {f"{n:02}": torch.full((1000,), float(n)) for n in range(40)}
    sp.save(tmp_path, state)
    storage = Counting(tmp_path)
    target = {key: torch.zeros(1000) for key in state if key != "30"}
    report = load_from(storage, target, LocalRendezvous(), LoadOptions(exclude="30"))
    assert all(torch.equal(target[key], state[key]) for key in target)
    assert len(storage.ranges) == 1 and storage.ranges[0][1] == 40 * 4000
    assert (report.bytes, report.needed) == (40 * 4000, 39 * 4000)
    far = Counting(tmp_path)
    target = {key: torch.zeros(1000) for key in ("00", "39")}
    report = load_from(far, target, LocalRendezvous(), LoadOptions(strict=False))
    assert len(far.ranges) == 2 and report.bytes == report.needed == 2 * 4000


def test_a_large_chunk_is_read_straight_into_its_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.randn(600, 600), "v": torch.randn(600, 600)}
    sp.save(tmp_path, state)
    monkeypatch.setattr(read_executor._Job, "_read_through_scratch", lambda *args: pytest.fail("a copy"))
    target = {key: torch.zeros(600, 600) for key in state}
    sp.load(tmp_path, target)
    assert all(torch.equal(target[key], state[key]) for key in state)


def test_blocks_are_read_two_at_a_time(tmp_path: Path) -> None:
    blocks = 10
    value = torch.arange(blocks * 65_536 + 5, dtype=torch.float32)
    sp.save(tmp_path, {"w": value})
    storage, target = Counting(tmp_path), torch.zeros(len(value))
    load_from(storage, {"w": target}, LocalRendezvous())
    assert torch.equal(target, value)
    assert [count for _, count in storage.ranges] == [512 << 10] * 5 + [20]


def test_a_damaged_chunk_beside_a_gap_is_named(tmp_path: Path) -> None:
    sp.save(tmp_path, {f"{n}": torch.full((1000,), float(n)) for n in range(9)})
    with NativeCheckpoint(LocalStorage(tmp_path)) as opened:
        row = opened.row("7")
        at = int(opened.table.byte_start[np.flatnonzero(opened.table.tensor == row)[0]])
        name = opened.manifest.files[0].name
    raw = bytearray((tmp_path / name).read_bytes())
    raw[at + 5] ^= 1
    (tmp_path / name).write_bytes(raw)
    target: dict[str, Any] = {f"{n}": torch.zeros(1000) for n in range(9)}
    with pytest.raises(CorruptChunkError) as caught:
        sp.load(tmp_path, target)
    assert caught.value.details["key"] == "7"
    sp.load(tmp_path, target, exclude="7")  # an unwanted chunk is read over, not verified


def test_a_load_of_columns_reads_whole_rows_and_reports_their_bytes(tmp_path: Path) -> None:
    whole = torch.randn(64, 32)
    Saver(LocalRendezvous(), chunk_bytes=1024).save(LocalStorage(tmp_path), {"w": whole})
    view = torch.zeros(64, 8)
    target = {"w": sp.LocalShards((64, 32), [(view, (0, 16))])}
    report = sp.load(tmp_path, target)
    assert torch.equal(view, whole[:, 16:24])
    assert (report.bytes, report.needed, report.received) == (64 * 32 * 4, 64 * 8 * 4, 0)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_stop_at_the_first_failure(threads: int) -> None:
    begun: list[int] = []
    lock = threading.Lock()

    def work(item: int) -> None:
        with lock:
            begun.append(item)
        if item == 5:
            raise KeyError(item)

    with pytest.raises(KeyError):
        in_threads(work, range(10_000), threads)
    assert 5 in begun and len(begun) < 10_000
    done: list[int] = []
    in_threads(done.append, range(100), threads)
    assert sorted(done) == list(range(100))


def test_threads_stop_if_one_cannot_start() -> None:
    """The other threads stay at their first item until it fails. Each later item takes a millisecond."""
    begun: list[int] = []
    failed, pause = threading.Event(), threading.Event()
    entering: list[None] = []

    @contextmanager
    def within() -> Iterator[None]:
        entering.append(None)
        if len(entering) == 2:
            failed.set()
            raise KeyError("no stream")
        yield

    def work(item: int) -> None:
        begun.append(item)
        assert failed.wait(60)
        pause.wait(0.001)

    with pytest.raises(KeyError):
        in_threads(work, range(1000), 3, within)
    assert len(begun) < 1000


@pytest.mark.parametrize("direct", [1, 1 << 30])
@settings(max_examples=40)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 7),
    chunk_bytes=st.integers(8, 200),
    block=st.integers(1, 50),
    data=st.data(),
)
def test_parts_of_chunks_are_read_and_verified_in_whole_blocks(
    direct: int, rows: int, columns: int, chunk_bytes: int, block: int, data: st.DataObject
) -> None:
    """With the scratch buffer and without, the tensor is the same, and so is the error for a changed byte in
    a block that is read. Blocks that the load does not need are not read."""
    value = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    top = data.draw(st.integers(0, rows - 1))
    height = data.draw(st.integers(1, rows - top))
    patches = pytest.MonkeyPatch.context()
    with tempfile.TemporaryDirectory() as folder, patches as patch, blocks_of(block):
        patch.setattr(read_executor, "LARGE_BYTES", direct)
        Saver(LocalRendezvous(), chunk_bytes=chunk_bytes).save(LocalStorage(folder), {"w": value})

        def load() -> tuple[torch.Tensor, int]:
            view = torch.zeros(height, columns)
            report = sp.load(folder, {"w": sp.LocalShards((rows, columns), [(view, (top, 0))])})
            return view, report.bytes

        with sp.open(folder) as opened:
            table, name = opened.table, opened.manifest.files[0].name

        def read(at: int) -> range:
            """The bytes of a chunk that have to be read."""
            begin, width = int(table.box_offsets[2 * at]), 4 * int(table.box_sizes[2 * at + 1])
            above = min(max(top - begin, 0), int(table.box_sizes[2 * at]))
            below = min(max(top + height - begin, 0), int(table.box_sizes[2 * at]))
            if above == below:
                return range(0)
            last = -(-below * width // block) * block
            return range(above * width // block * block, min(last, int(table.byte_count[at])))

        found, nbytes = load()
        assert torch.equal(found, value[top : top + height])
        assert nbytes == sum(len(read(at)) for at in range(len(table)))
        at = data.draw(st.sampled_from(range(len(table))))
        within = data.draw(st.integers(0, int(table.byte_count[at]) - 1))
        byte = int(table.byte_start[at]) + within
        path = Path(folder) / name
        raw = bytearray(path.read_bytes())
        raw[byte] ^= 1
        path.write_bytes(raw)
        if within in read(at):
            with pytest.raises(sp.CorruptChunkError):
                load()
        else:
            assert torch.equal(load()[0], value[top : top + height])
