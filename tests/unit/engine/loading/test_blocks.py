"""Parts of chunks are verified by the digests of their blocks, and never loaded unverified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest, read_shard_header
from shardproof.engine.loading.read_executor import Scratch
from shardproof.engine.saving import Saver
from shardproof.errors import CorruptChunkError, FormatError, StorageError
from shardproof.loading import LoadReport
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.maintenance import make_standalone, repair, verify
from shardproof.storage import LocalStorage
from tests.faults.damage import Region, flipped, regions
from tests.small_blocks import blocks_of

BLOCK, ROWS, COLUMNS = 1000, 100, 50
VALUE = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
"""20 blocks in one chunk; five rows are a block."""


@pytest.fixture(autouse=True)
def _blocks() -> Iterator[None]:
    with blocks_of(BLOCK):
        yield


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    sp.save(tmp_path / "saved", {"w": VALUE})
    return tmp_path / "saved"


def load_rows(folder: Path, top: int, bottom: int) -> LoadReport:
    """Loads some rows and asserts that they are right."""
    view = torch.zeros(bottom - top, COLUMNS)
    report = sp.load(folder, {"w": sp.LocalShards((ROWS, COLUMNS), [(view, (top, 0))])})
    assert torch.equal(view, VALUE[top:bottom])
    return report


def chunk_and_tail(folder: Path) -> tuple[Region, Region]:
    """The chunk, and what comes after it in its file: the digests of its blocks, and its own."""
    _, found = regions(folder)
    (chunk,) = [region for region in found if region.key]
    return chunk, found[-1]


def test_a_read_of_a_part_reads_only_its_blocks(saved: Path) -> None:
    assert load_rows(saved, 5, 10).bytes == BLOCK
    assert load_rows(saved, 7, 12).bytes == 2 * BLOCK
    assert load_rows(saved, 0, ROWS).bytes == 20 * BLOCK
    report = load_rows(saved, 6, 99)
    assert (report.bytes, report.needed) == (19 * BLOCK, 93 * 200)


def test_a_read_of_several_parts_reads_all_blocks_from_the_first_to_the_last(saved: Path) -> None:
    views = [torch.zeros(1, COLUMNS), torch.zeros(3, COLUMNS)]
    pieces = [(views[0], (11, 0)), (views[1], (40, 0))]
    report = sp.load(saved, {"w": sp.LocalShards((ROWS, COLUMNS), pieces)})
    assert torch.equal(views[0], VALUE[11:12]) and torch.equal(views[1], VALUE[40:43])
    assert report.bytes == 7 * BLOCK, "rows 10 to 45"
    half = torch.zeros(3, COLUMNS, dtype=torch.float16)
    report = sp.load(
        saved, {"w": sp.LocalShards((ROWS, COLUMNS), [(half, (11, 0))], dtype=torch.float16)}, cast=True
    )
    assert torch.equal(half, VALUE[11:14].half()) and report.bytes == BLOCK


def test_a_part_takes_memory_for_its_blocks_only(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = Scratch.take

    def noted(scratch: Scratch, count: int) -> Any:
        taken.append(count)
        return take(scratch, count)

    monkeypatch.setattr(Scratch, "take", noted)
    with sp.open(saved) as opened:
        assert torch.equal(opened["w"][11:14, 3:9], VALUE[11:14, 3:9])
    assert taken == [2 * BLOCK], "its block, and room for what the rest of a block passes through"


def test_damage_is_named_inside_of_the_blocks_read_and_ignored_outside(saved: Path) -> None:
    chunk, _ = chunk_and_tail(saved)
    with flipped(saved / chunk.file, chunk.start + 3 * BLOCK + 5, 1):
        load_rows(saved, 5, 15)
        with pytest.raises(CorruptChunkError) as caught:
            load_rows(saved, 14, 17)
        assert caught.value.details["byte_start"] == chunk.start + 3 * BLOCK
        assert caught.value.details["byte_count"] == BLOCK
        with pytest.raises(CorruptChunkError) as caught:
            load_rows(saved, 0, ROWS)
        assert caught.value.details["byte_count"] == 20 * BLOCK


def test_blocks_whose_digests_are_damaged_are_read_with_the_whole_chunk(saved: Path) -> None:
    chunk, tail = chunk_and_tail(saved)
    assert tail.stop - tail.start == 16 * 20 + 16
    for at in (tail.start, tail.start + 16 * 19 + 15):
        with flipped(saved / chunk.file, at, 0):
            assert load_rows(saved, 5, 10).bytes == 20 * BLOCK
            with sp.open(saved) as opened:
                assert torch.equal(opened["w"][5:7], VALUE[5:7])
            (fault,) = verify(LocalStorage(saved)).faults
            assert isinstance(fault, FormatError) and "block digests" in fault.message
            with flipped(saved / chunk.file, chunk.start + 9 * BLOCK, 0):
                with pytest.raises(CorruptChunkError):
                    load_rows(saved, 5, 10)
                (fault,) = verify(LocalStorage(saved)).faults
                assert isinstance(fault, CorruptChunkError), "which digests are wrong cannot be told"


def test_blocks_whose_digests_cannot_be_read_are_read_with_the_whole_chunk(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, _ = chunk_and_tail(saved)
    assert load_rows(saved, 5, 10).bytes == BLOCK
    unreadable(monkeypatch)
    assert load_rows(saved, 5, 10).bytes == 20 * BLOCK
    with flipped(saved / chunk.file, chunk.start + 19 * BLOCK, 0), pytest.raises(CorruptChunkError):
        load_rows(saved, 5, 10)


def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every read of a shard file fail, except reads of chunks."""
    read = LocalStorage.read

    def fail(storage: LocalStorage, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if name.startswith("shards/"):
            raise StorageError(f"cannot read {name}: input/output error", file=name)
        return bytes(read(storage, name, start, stop))

    monkeypatch.setattr(LocalStorage, "read", fail)


def test_a_read_of_a_part_of_a_lent_file_reads_only_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = sp.Checkpointer(tmp_path, incremental=True)
    for step in (1, 2):
        only_first = {"a": VALUE + 1, "z": VALUE + 2, "none": torch.zeros(0)} if step == 1 else {}
        state = {"w": VALUE, "step": torch.full((600,), float(step)), **only_first}
        checkpointer.save(step, state).result()
    folder = tmp_path / "step-00000002"
    manifest = read_manifest(LocalStorage(folder))
    assert [record.folder for record in manifest.files] == ["", "step-00000001"]
    assert verify(LocalStorage(folder)).ok
    view = torch.zeros(5, COLUMNS)
    target = {"w": sp.LocalShards((ROWS, COLUMNS), [(view, (5, 0))]), "step": torch.zeros(600)}
    assert sp.load(folder, target).bytes == BLOCK + 2400
    assert torch.equal(view, VALUE[5:10])
    referenced = tmp_path / manifest.files[1].place
    header = read_shard_header(LocalStorage(referenced.parent.parent), f"shards/{referenced.name}")
    with flipped(referenced, len(header.raw) - 1, 3):  # a header that cannot be read
        view.zero_()
        assert sp.load(folder, target).bytes == 20 * BLOCK + 2400
        assert torch.equal(view, VALUE[5:10])
    with monkeypatch.context() as patch:
        unreadable(patch)
        assert sp.load(folder, target).bytes == 20 * BLOCK + 2400
    make_standalone(LocalStorage(folder), LocalStorage(tmp_path / "copy"))
    assert verify(LocalStorage(tmp_path / "copy")).ok
    assert sp.load(tmp_path / "copy", target).bytes == BLOCK + 2400


def test_an_incremental_step_has_the_blocks_of_the_chunks_that_it_writes(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, incremental=True)
    for step in (1, 2):
        state = {"old": VALUE, "changed": VALUE * step, "new" if step == 2 else "gone": VALUE + step}
        checkpointer.save(step, state).result()
        assert verify(LocalStorage(tmp_path / f"step-0000000{step}")).ok
    view = torch.zeros(5, COLUMNS)
    for key, expected in (("changed", VALUE * 2), ("new", VALUE + 2)):
        target = {key: sp.LocalShards((ROWS, COLUMNS), [(view, (5, 0))])}
        report = sp.load(tmp_path / "step-00000002", target, strict=False)
        assert report.bytes == BLOCK and torch.equal(view, expected[5:10])


def test_a_repaired_checkpoint_has_digests_of_blocks(saved: Path) -> None:
    (saved / MANIFEST_NAME).unlink()
    repair(LocalStorage(saved))
    assert verify(LocalStorage(saved)).ok
    assert load_rows(saved, 5, 10).bytes == BLOCK


def test_a_file_has_the_block_digests_of_many_chunks(tmp_path: Path) -> None:
    """Chunks of one block and of several alternate; others have another alignment in the file."""
    state = {f"{n:02}": torch.arange(n * 100, n * 100 + 40 + 300 * (n % 3)) for n in range(12)}
    state |= {f"small {n}": torch.arange(n, n + 700, dtype=torch.int16) for n in range(3)}
    Saver(LocalRendezvous(), chunk_bytes=2500).save(LocalStorage(tmp_path), state)
    assert verify(LocalStorage(tmp_path)).ok
    for key, value in state.items():
        begin = len(value) - 30
        view = torch.zeros(20, dtype=value.dtype)
        target = {key: sp.LocalShards((len(value),), [(view, (begin,))])}
        report = sp.load(tmp_path, target, strict=False)
        assert torch.equal(view, value[begin : begin + 20])
        assert report.bytes <= 2 * BLOCK
