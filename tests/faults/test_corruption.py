"""Readers find and name damage to any file of a checkpoint. A load returns the right values or raises."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_index, read_manifest
from shardproof.engine.loading import read_executor
from shardproof.errors import CorruptChunkError, FormatError, NotCommittedError, ShardproofError
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.faults.damage import (
    ROWS,
    Region,
    damaged,
    faults_of,
    flipped,
    load_and_judge,
    open_and_judge,
    regions,
    sample,
    save,
    target_like,
    values_of,
)
from tests.harness import rank, rendezvous, run_ranks, world_size
from tests.small_blocks import blocks_of

STEPS = (1, 2)


def _folder(root: Path | str, step: int) -> Path:
    return Path(root) / f"step-{step:08d}"


def save_two_steps(root: str) -> None:
    """Both ranks save two steps of one structure."""
    meeting = rendezvous(deadline=20.0)
    for step in STEPS:
        save(_folder(root, step), sample(step, rank(), world_size(), of_rank=True), step, meeting)


@pytest.fixture(scope="module", params=["one process", "small blocks", "two ranks"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("run")
    with blocks_of(16) if request.param == "small blocks" else nullcontext():
        if request.param == "two ranks":
            assert [outcome.value for outcome in run_ranks(2, save_two_steps, str(place))] == [None, None]
        else:
            for step in STEPS:
                save(_folder(place, step), sample(step), step, LocalRendezvous())
        yield place


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    return _folder(root, 1)


@pytest.fixture(autouse=True)
def _nothing_stays_damaged(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "folder" in request.fixturenames:
        assert faults_of(request.getfixturevalue("folder")) == []


def _names(error: ShardproofError, file: str) -> bool:
    return file in error.message and str(error.details.get("file", error.details.get("path"))) != "None"


each_fifth_or_every = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])


def _positions(region: Region, folder: Path, every: int) -> list[int]:
    """Each n-th byte of chunks and of text, fewer bytes of padding, and both ends of the region."""
    data = (folder / region.file).read_bytes()[region.start : region.stop]
    edges = {region.start, region.stop - 1}
    interesting = [at for at, byte in enumerate(data) if region.key or byte not in (0x20, 0, 0xFF)]
    dull = [at for at, byte in enumerate(data) if not (region.key or byte not in (0x20, 0, 0xFF))]
    return sorted(edges | {region.start + at for at in (*interesting[::every], *dull[::97])})


def test_the_sample_has_every_kind_of_region(root: Path, folder: Path) -> None:
    manifest, found = regions(folder)
    assert len(manifest.files) == (1 if "one" in root.name else len(manifest.files))
    keys = {region.key for region in found}
    assert {"w", "half", "complex", "flags", "count", "blob.@data", None} <= keys
    assert sum(region.key == "w" for region in found) > 2, "a tensor in many chunks"
    assert load_and_judge(folder, sample(1)).error is None
    assert open_and_judge(folder, sample(1)) == {}


@each_fifth_or_every
def test_a_flipped_bit_of_a_chunk_is_named_with_file_and_key(folder: Path, every: int) -> None:
    chunks = [region for region in regions(folder)[1] if region.key]
    for region in chunks:
        for at in _positions(region, folder, every):
            with flipped(folder / region.file, at, at % 8):
                (fault,) = faults_of(folder)
                assert isinstance(fault, CorruptChunkError)
                assert fault.details["file"] == region.file and fault.details["key"] == region.key
                assert fault.details["byte_start"] == region.start
                assert region.file in fault.message and repr(region.key) in fault.message
                if at in (region.start, region.stop - 1):
                    loaded = load_and_judge(folder, sample(1))
                    assert isinstance(loaded.error, CorruptChunkError), (region, at)
                    assert loaded.error.details["key"] == region.key and _names(loaded.error, region.file)
                    stored = {"tied": "half"}.get(region.key or "", region.key)
                    errors = open_and_judge(folder, sample(1))
                    of_tied = {"half", "tied"} if stored == "half" else {stored}
                    assert errors.keys() == of_tied & sample(1).keys()


@each_fifth_or_every
def test_a_flipped_bit_of_manifest_or_index_is_named_and_nothing_loads(folder: Path, every: int) -> None:
    for region in regions(folder)[1][:2]:
        for at in _positions(region, folder, every):
            with flipped(folder / region.file, at, at % 8):
                (fault,) = faults_of(folder)
                assert isinstance(fault, FormatError) and _names(fault, region.file), (region.file, at)
                error = load_and_judge(folder, sample(1)).error
                assert isinstance(error, FormatError) and error.message == fault.message
                assert "partly" not in error.message
                assert open_and_judge(folder, sample(1))[""].message == fault.message


@each_fifth_or_every
def test_verify_finds_a_flipped_bit_that_no_load_needs(folder: Path, every: int) -> None:
    rest = [region for region in regions(folder)[1][2:] if region.key is None]
    assert {region.file for region in rest} == {record.name for record in regions(folder)[0].files}
    for region in rest:
        for at in _positions(region, folder, every)[:: 1 if region.start else 3]:  # headers are long
            with flipped(folder / region.file, at, at % 8):
                faults = faults_of(folder)
                assert faults, (region, at)
                assert all(isinstance(fault, FormatError) for fault in faults), faults
                assert all(_names(fault, region.file) for fault in faults), faults
                if at % 32 == 0 or at in (region.start, region.stop - 1):
                    assert load_and_judge(folder, sample(1)).error is None
                    assert open_and_judge(folder, sample(1)) == {}


def _lengths(folder: Path, file: str) -> list[int]:
    """Where to cut: at and around every border of a region, and some between."""
    size = (folder / file).stat().st_size
    edges = {
        edge for region in regions(folder)[1] if region.file == file for edge in (region.start, region.stop)
    }
    near = {edge + by for edge in edges for by in (-1, 0, 1)}
    return sorted(length for length in near | set(range(0, size, 211)) | {1, 7, 8, 9} if 0 <= length < size)


def test_a_file_cut_short_is_named(folder: Path) -> None:
    for file in sorted({region.file for region in regions(folder)[1]}):
        path = folder / file
        for length in _lengths(folder, file):
            with damaged(path, lambda path, length=length: os.truncate(path, length)):  # type: ignore[misc]
                faults = faults_of(folder)
                assert faults and all(_names(fault, file) for fault in faults), (file, length, faults)
                loaded = load_and_judge(folder, sample(1))
                assert loaded.error is not None and _names(loaded.error, file), (file, length)
                assert not loaded.touched, "a short file is known before anything is copied"
                for error in open_and_judge(folder, sample(1)).values():
                    assert _names(error, file)


def test_a_file_with_bytes_appended_is_named(folder: Path) -> None:
    for file in sorted({region.file for region in regions(folder)[1]}):
        with damaged(folder / file, lambda path: path.write_bytes(path.read_bytes() + b"\n")):
            faults = faults_of(folder)
            assert faults and all(_names(fault, file) for fault in faults)
            loaded = load_and_judge(folder, sample(1))
            assert loaded.error is not None and _names(loaded.error, file) and not loaded.touched


def _remove(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _dead_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _link_to_zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [_remove, _empty, _folder_instead, _dead_link, _link_to_zeros, _pipe])
def test_a_file_removed_or_of_another_kind_is_named(folder: Path, damage: Callable[[Path], None]) -> None:
    for file in sorted({region.file for region in regions(folder)[1]}):
        with damaged(folder / file, damage):
            faults = faults_of(folder)
            assert faults and all(_names(fault, file) for fault in faults), faults
            loaded = load_and_judge(folder, sample(1))
            assert loaded.error is not None and _names(loaded.error, file) and not loaded.touched
            for error in open_and_judge(folder, sample(1)).values():
                assert _names(error, file)
            if file == MANIFEST_NAME and damage is _remove:
                assert isinstance(loaded.error, NotCommittedError)


def _counterparts(root: Path) -> dict[str, list[tuple[Path, Path]]]:
    """Sets of files of step 1, each with its counterpart of step 2."""
    one, two = regions(_folder(root, 1))[0], regions(_folder(root, 2))[0]
    names = [(MANIFEST_NAME, MANIFEST_NAME), (one.index.name, two.index.name)]
    names += [(a.name, b.name) for a, b in zip(one.files, two.files, strict=True)]
    pairs = [(_folder(root, 1) / a, _folder(root, 2) / b) for a, b in names]
    return {
        "manifest": pairs[:1],
        "index": pairs[1:2],
        "manifest and index": pairs[:2],
        "one shard": pairs[2:3],
        "last shard": pairs[-1:],
        "all shards": pairs[2:],
        "index and shards": pairs[1:],
    }


@pytest.mark.parametrize(
    "which",
    ["manifest", "index", "manifest and index", "one shard", "last shard", "all shards", "index and shards"],
)
def test_files_of_another_step_are_refused(root: Path, folder: Path, which: str) -> None:
    swapped = _counterparts(root)[which]
    kept = {ours: ours.read_bytes() for ours, _ in swapped}
    try:
        for ours, theirs in swapped:
            shutil.copyfile(theirs, ours)
        faults = faults_of(folder)
        assert faults
        if "manifest" in which:  # it is whole, and names files that are not there
            absent = regions(_folder(root, 2))[0]
            assert _names(faults[0], absent.index.name)
        else:
            named = {fault.details["file"] for fault in faults}
            assert any(str(path).endswith(name) for path, _ in swapped for name in named), faults
        loaded = load_and_judge(folder, sample(1))
        assert loaded.error is not None
        open_and_judge(folder, sample(1))
    finally:
        for ours, data in kept.items():
            ours.write_bytes(data)


def test_shards_of_another_step_under_the_right_names_are_found(root: Path, tmp_path: Path) -> None:
    """Manifest and index of step 2, and its shard names, over the bytes of step 1's shards."""
    folder = tmp_path / "mixed"
    shutil.copytree(_folder(root, 2), folder)
    one, two = regions(_folder(root, 1))[0], regions(_folder(root, 2))[0]
    for ours, theirs in zip(two.files, one.files, strict=True):
        shutil.copyfile(_folder(root, 1) / theirs.name, folder / ours.name)
    faults = faults_of(folder)
    keys = {fault.details["key"] for fault in faults if isinstance(fault, CorruptChunkError)}
    assert {"w", "half", "count", "blob.@data"} <= keys
    assert isinstance(load_and_judge(folder, sample(2)).error, CorruptChunkError)
    assert open_and_judge(folder, sample(2)).keys() >= {"w", "half", "tied", "count"}


def test_large_chunks_are_read_in_place_and_the_message_says_what_was_overwritten(tmp_path: Path) -> None:
    wanted = {"a": torch.arange(100_000, dtype=torch.float32), "b": torch.arange(90_000.0), "note": 3}
    save(tmp_path, wanted, 1, LocalRendezvous(), chunk_bytes=300_000)
    _, found = regions(tmp_path)
    chunks = [region for region in found if region.key]
    assert any(region.stop - region.start > read_executor.LARGE_BYTES for region in chunks)
    for region in chunks:
        middle = (region.start + region.stop) // 2
        for at in (region.start, middle, region.stop - 1):
            with flipped(tmp_path / region.file, at, at % 8):
                (fault,) = faults_of(tmp_path)
                assert fault.details["key"] == region.key
                loaded = load_and_judge(tmp_path, wanted)
                assert isinstance(loaded.error, CorruptChunkError) and loaded.touched
                assert loaded.error.details["key"] == region.key
                assert "partly overwritten" in loaded.error.message
    assert load_and_judge(tmp_path, wanted).error is None


def test_verify_hashes_a_chunk_larger_than_its_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["shardproof.runs.maintenance.verify"], "_BATCH_BYTES", 1000)
    save(
        tmp_path, {"a": torch.arange(1000.0), "b": torch.arange(3.0)}, 1, LocalRendezvous(), chunk_bytes=4096
    )
    assert faults_of(tmp_path) == []
    for region in regions(tmp_path)[1]:
        if region.key:
            with flipped(tmp_path / region.file, region.stop - 1, 0):
                (fault,) = faults_of(tmp_path)
                assert fault.details["key"] == region.key


def test_every_fault_is_reported_at_once(folder: Path) -> None:
    chunks = [region for region in regions(folder)[1] if region.key]
    one, two = chunks[0], chunks[-1]
    with flipped(folder / one.file, one.start, 0), flipped(folder / two.file, two.start, 0):
        faults = faults_of(folder)
    assert [(f.details["file"], f.details["key"]) for f in faults] == [(c.file, c.key) for c in (one, two)]


def test_a_verified_report_counts_what_it_read(folder: Path) -> None:
    report = verify(LocalStorage(folder))
    chunks = [region for region in regions(folder)[1] if region.key]
    assert report.ok and report.chunks == len(chunks)
    assert report.bytes == sum(region.stop - region.start for region in chunks)
    with flipped(folder / chunks[0].file, chunks[0].start, 3):
        report = verify(LocalStorage(folder))
        assert not report.ok and report.to_json()["faults"][0]["details"]["key"] == chunks[0].key


def meet_damage_on_one_rank(root: str) -> dict[str, Any]:
    """Loads the damaged step 2, then restores; only the second rank's rows are damaged."""
    meeting = rendezvous(deadline=20.0)
    state = target_like(sample(2, rank(), world_size(), of_rank=True))
    result: dict[str, Any] = {}
    try:
        sp.load(_folder(root, 2), state, rendezvous=meeting)
    except ShardproofError as error:
        result["error"] = (type(error).__name__, error.message, error.details)
    result["plain"] = values_of({key: state[key] for key in ("plain", "blob", "own")})
    checkpointer = sp.Checkpointer(root, rendezvous=meeting)
    result["restored"] = checkpointer.restore(state)
    result["passed over"] = [(item.step, item.reason) for item in checkpointer.passed_over]
    result["right"] = values_of(state) == values_of(sample(1, rank(), world_size(), of_rank=True))
    return result


def test_damage_on_one_rank_fails_all_ranks_and_restore_takes_the_older_step(
    tmp_path: Path,
) -> None:
    assert [outcome.value for outcome in run_ranks(2, save_two_steps, str(tmp_path))] == [None, None]
    folder = _folder(tmp_path, 2)
    region = _chunk_of_second_half(folder)
    with flipped(folder / region.file, region.stop - 1, 2):
        first, second = (outcome.value for outcome in run_ranks(2, meet_damage_on_one_rank, str(tmp_path)))
    assert first["error"] == second["error"]
    kind, message, details = first["error"]
    assert kind == "CorruptChunkError"
    assert message.startswith("rank 1: ") and region.file in message and "'w'" in message
    assert "partly overwritten" in message
    assert (details["file"], details["key"], details["rank"]) == (region.file, "w", 1)
    blank = values_of({key: value for key, value in target_like(sample(2)).items() if key in first["plain"]})
    assert first["plain"] == second["plain"] == blank
    for result in (first, second):
        assert result["restored"] == 1 and result["right"]
        ((step, reason),) = result["passed over"]
        assert step == 2 and region.file in reason and "'w'" in reason


def _chunk_of_second_half(folder: Path) -> Region:
    storage = LocalStorage(folder)
    manifest = read_manifest(storage)
    table = read_index(storage, manifest)
    for row in range(len(table)):
        offsets = table.box_offsets[table.box_start[row] : table.box_start[row + 1]]
        if manifest.tensors[int(table.tensor[row])].key == "w" and offsets[0] >= ROWS // 2:
            start = int(table.byte_start[row])
            name = manifest.files[int(table.file[row])].name
            return Region(name, start, start + int(table.byte_count[row]), "w")
    raise AssertionError("no chunk of the second half")
