"""A lost or damaged manifest or index is rebuilt from the shard files, exactly, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, Manifest, index_name, read_manifest, shard_name
from shardproof.errors import (
    AlreadyCommittedError,
    CorruptChunkError,
    FormatError,
    NotCommittedError,
    ShardproofError,
    TilingError,
)
from shardproof.maintenance import repair
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.faults.damage import (
    faults_of,
    flipped,
    load_and_judge,
    open_and_judge,
    regions,
    resealed,
    sample,
    save,
)
from tests.faulty_storage import FaultyStorage
from tests.harness import rank, rendezvous, run_ranks, world_size


def save_on_ranks(folder: str, step: int) -> None:
    """Both ranks save the sample."""
    save(folder, sample(step, rank(), world_size(), of_rank=True), step, rendezvous(deadline=20.0))


@pytest.fixture(scope="module", params=["one process", "two ranks"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step"
    if request.param == "two ranks":
        assert [outcome.value for outcome in run_ranks(2, save_on_ranks, str(folder), 3)] == [None, None]
    else:
        save(folder, sample(3), 3, LocalRendezvous())
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "step"))


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _is_as_saved(folder: Path, saved: Path) -> Manifest:
    """Asserts that everything but the mark of the repair is as it was saved."""
    before, after = read_manifest(LocalStorage(saved)), read_manifest(LocalStorage(folder))
    assert after.repaired and not before.repaired
    assert after.writer == before.writer
    for field in (
        "attempt",
        "step",
        "time",
        "world_size",
        "metadata",
        "tensors",
        "aliases",
        "objects",
        "files",
    ):
        assert getattr(after, field) == getattr(before, field), field
    assert _files(folder).keys() == _files(saved).keys()
    assert _files(folder)[after.index.name] == _files(saved)[before.index.name]
    assert faults_of(folder) == []
    assert load_and_judge(folder, sample(3)).error is None
    assert open_and_judge(folder, sample(3)) == {}
    with sp.open(folder) as checkpoint:
        assert checkpoint.step == 3 and checkpoint.metadata == {"run": "run 3"}
        assert checkpoint.shape("nothing") == (0, 3) and checkpoint["plain.pair"] == (3, {"x": [3]})
        ranks = checkpoint.manifest.world_size
        assert [checkpoint[f"own.@rank-{number}"] for number in range(ranks)] == [30, 31][:ranks]
    return after


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


LOSSES: dict[str, Callable[[Path], Any]] = {
    "removed": Path.unlink,
    "cut": _cut,
    "flipped": _flip,
    "emptied": _empty,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("which", ["manifest", "index", "both"])
def test_a_lost_manifest_or_index_is_rebuilt_and_loads_the_same(
    folder: Path, saved: Path, which: str, loss: str
) -> None:
    manifest = read_manifest(LocalStorage(folder))
    if which != "index":
        LOSSES[loss](folder / MANIFEST_NAME)
    if which != "manifest":
        LOSSES[loss](folder / manifest.index.name)
    assert isinstance(load_and_judge(folder, sample(3)).error, FormatError | NotCommittedError)
    given = repair(LocalStorage(folder))
    assert given == _is_as_saved(folder, saved)


@pytest.mark.parametrize("operation", ["publish", "create"])
def test_a_repair_that_cannot_write_leaves_what_prune_keeps(
    folder: Path, saved: Path, operation: str
) -> None:
    """A full disk may be why the manifest is cut. Without a manifest, prune may remove the shard files."""
    _cut(folder / MANIFEST_NAME)
    before = _files(folder)
    full = sp.StorageError("No space left on device", errno="ENOSPC", missing=False)
    try:
        repair(FaultyStorage(LocalStorage(folder), 0, full, only=(operation,)))
    except sp.StorageError:
        assert _files(folder) == before
    assert (folder / MANIFEST_NAME).exists()


def test_a_whole_checkpoint_is_not_repaired(folder: Path) -> None:
    before = _files(folder)
    with pytest.raises(AlreadyCommittedError, match="nothing to repair"):
        repair(LocalStorage(folder))
    assert _files(folder) == before


@pytest.mark.parametrize("which", ["manifest", "index"])
def test_a_missing_shard_is_refused(folder: Path, which: str) -> None:
    manifest = read_manifest(LocalStorage(folder))
    (folder / (MANIFEST_NAME if which == "manifest" else manifest.index.name)).unlink()
    (folder / manifest.files[-1].name).unlink()
    _refused(folder, FormatError, manifest.attempt)


@pytest.mark.parametrize("loss", ["removed", "cut", "emptied"])
def test_a_lost_shard_beside_a_whole_manifest_is_refused(folder: Path, loss: str) -> None:
    name = read_manifest(LocalStorage(folder)).files[-1].name
    LOSSES[loss](folder / name)
    error = _refused(folder, FormatError, "cannot be repaired: restore another step")
    assert error.details["file"] == name


@pytest.mark.parametrize("which", ["manifest", "index"])
def test_damage_anywhere_in_a_shard_is_refused(folder: Path, saved: Path, which: str) -> None:
    """Flips bits all over a shard. Each error names the shard."""
    manifest, found = regions(folder)
    lost = folder / (MANIFEST_NAME if which == "manifest" else manifest.index.name)
    lost.unlink()
    for region in found[2:]:
        path = folder / region.file
        data = path.read_bytes()
        step = 1 if region.start else 13  # headers are long
        for at in [*range(region.start, region.stop, step), region.stop - 1]:
            with flipped(path, at, at % 7):
                if region.key:
                    error = _refused(folder, CorruptChunkError, region.file)
                    assert error.details["key"] == region.key
                else:
                    _refused(folder, ShardproofError, region.file)
        assert path.read_bytes() == data
    repair(LocalStorage(folder))
    _is_as_saved(folder, saved)


def test_a_shard_of_another_attempt_is_refused(folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "other", sample(4), 4, LocalRendezvous())
    ours, theirs = (read_manifest(LocalStorage(place)) for place in (folder, tmp_path / "other"))
    (folder / MANIFEST_NAME).unlink()
    shutil.copyfile(tmp_path / "other" / theirs.files[0].name, folder / ours.files[0].name)
    _refused(folder, FormatError, "copied or renamed")


def test_a_shard_of_another_rank_is_refused(folder: Path) -> None:
    manifest = read_manifest(LocalStorage(folder))
    (folder / MANIFEST_NAME).unlink()
    source = folder / manifest.files[0].name
    shutil.copyfile(source, folder / shard_name(7, manifest.attempt))
    found = repair(LocalStorage(folder))  # the copy declares rank 0, so it is none of the files
    assert [record.name for record in found.files] == [record.name for record in manifest.files]
    (folder / MANIFEST_NAME).unlink()
    (folder / manifest.files[-1].name).unlink()
    _refused(folder, FormatError, "copied or renamed")


def test_a_shard_that_differs_from_its_digest_in_the_manifest_is_refused(folder: Path) -> None:
    """Only the index is lost. A consistent shard of the right name is not the committed one."""
    manifest = read_manifest(LocalStorage(folder))
    (folder / manifest.index.name).unlink()
    name = manifest.files[0].name
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(resealed(data.replace(b'\\"run\\":\\"run 3\\"', b'\\"run\\":\\"run 5\\"')))
    assert (folder / name).read_bytes() != data
    _refused(folder, FormatError, name)


# Without both files nothing tells which of two whole attempts was committed: the newest is taken, see below.
@pytest.mark.parametrize(
    ("which", "leftover"),
    [("manifest", "older"), ("manifest", "newer"), ("index", "older"), ("index", "newer"), ("both", "older")],
)
def test_files_of_a_dead_attempt_are_not_taken(
    folder: Path, saved: Path, tmp_path: Path, which: str, leftover: str
) -> None:
    """The folder also has all shards of another attempt, which never wrote an index."""
    save(tmp_path / "other", sample(4), 4, LocalRendezvous())
    other = read_manifest(LocalStorage(tmp_path / "other"))
    ours = read_manifest(LocalStorage(folder))
    names = [record.name for record in other.files]
    for name in names:
        data = (tmp_path / "other" / name).read_bytes()
        if leftover == "older":
            data = data.replace(f'\\"time\\":{int(other.time)}'.encode(), b'\\"time\\":1000000000')
            assert b'\\"time\\":1000000000' in data
        (folder / name).write_bytes(resealed(data))
    if which != "index":
        (folder / MANIFEST_NAME).unlink()
    if which != "manifest":
        (folder / ours.index.name).unlink()
    found = repair(LocalStorage(folder))
    assert found.attempt == ours.attempt
    for name in names:
        (folder / name).unlink()
    _is_as_saved(folder, saved)


def test_of_two_whole_attempts_the_newest_is_taken(tmp_path: Path) -> None:
    save(tmp_path, sample(3), 3, LocalRendezvous())
    kept = {name: data for name, data in _files(tmp_path).items() if name.startswith("shards")}
    save(tmp_path, sample(4), 4, LocalRendezvous(), overwrite=True)
    newer = read_manifest(LocalStorage(tmp_path))
    for name, data in kept.items():
        (tmp_path / name).write_bytes(data)
    for name in (MANIFEST_NAME, newer.index.name):
        (tmp_path / name).unlink()
    assert repair(LocalStorage(tmp_path)).attempt == newer.attempt
    assert load_and_judge(tmp_path, sample(4)).error is None


def test_an_older_attempt_does_not_replace_a_damaged_newer_one(tmp_path: Path) -> None:
    """The newest attempt was committed and lost a shard since. Repair raises and restores no older one."""
    save(tmp_path, sample(3), 3, LocalRendezvous())
    kept = {name: data for name, data in _files(tmp_path).items() if name.startswith("shards")}
    save(tmp_path, sample(4), 4, LocalRendezvous(), overwrite=True)
    newer = read_manifest(LocalStorage(tmp_path))
    for name, data in kept.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / MANIFEST_NAME).unlink()
    shard = tmp_path / newer.files[0].name
    with flipped(shard, newer.files[0].data_start, 1):
        _refused(tmp_path, CorruptChunkError, newer.files[0].name)
    data = shard.read_bytes()
    for damage in (lambda: os.truncate(shard, 5000), shard.unlink):
        damage()
        _refused(tmp_path, FormatError, newer.attempt)
    shard.write_bytes(data)
    repair(LocalStorage(tmp_path))
    assert load_and_judge(tmp_path, sample(4)).error is None


def save_two_attempts(folder: str) -> None:
    """Both ranks save one attempt, then another one in a folder beside it."""
    meeting = rendezvous(deadline=20.0)
    save(folder, sample(3, rank(), world_size(), of_rank=True), 3, meeting)
    save(folder + "-other", sample(4, rank(), world_size(), of_rank=True), 4, meeting)


def test_shards_of_two_attempts_do_not_make_one(tmp_path: Path) -> None:
    assert run_ranks(2, save_two_attempts, str(tmp_path / "step"))[0].value is None
    ours = read_manifest(LocalStorage(tmp_path / "step"))
    theirs = read_manifest(LocalStorage(tmp_path / "step-other"))
    (tmp_path / "step" / ours.files[1].name).unlink()
    shutil.copyfile(tmp_path / "step-other" / theirs.files[1].name, tmp_path / "step" / theirs.files[1].name)
    (tmp_path / "step" / MANIFEST_NAME).unlink()
    error = _refused(tmp_path / "step", FormatError, "1 of 2 files")
    assert ours.attempt in error.message


def test_shards_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    assert run_ranks(2, save_on_ranks, str(tmp_path / "step"), 3)[0].value is None
    manifest = read_manifest(LocalStorage(tmp_path / "step"))
    (tmp_path / "step" / MANIFEST_NAME).unlink()
    path = tmp_path / "step" / manifest.files[1].name
    data = path.read_bytes()
    for one, two in (
        (b'\\"step\\":3', b'\\"step\\":4'),
        (b"run 3", b"run 4"),
        (b'\\"tied\\":', b'\\"tide\\":'),
    ):
        assert one in data
        path.write_bytes(resealed(data.replace(one, two)))
        _refused(tmp_path / "step", FormatError, manifest.files[1].name)


def test_a_hole_is_refused_although_every_file_is_there(folder: Path) -> None:
    """Two chunks name the same box: every digest is right, and the tensor is not covered."""
    manifest = read_manifest(LocalStorage(folder))
    (folder / MANIFEST_NAME).unlink()
    changed = 0
    for record in manifest.files:
        path = folder / record.name
        data = path.read_bytes()
        spoilt = data.replace(b'"w[6:8,', b'"w[5:7,')
        changed += spoilt != data
        path.write_bytes(resealed(spoilt))
    assert changed == 1
    _refused(folder, TilingError, "'w'")


def test_a_checkpoint_of_zero_size_tensors_alone_is_rebuilt(tmp_path: Path) -> None:
    nothing = torch.zeros(2, 0, dtype=torch.float64)
    state = {"a": nothing, "b": nothing, "c": torch.zeros(0), "note": 1}
    save(tmp_path, state, 1, LocalRendezvous())
    before = read_manifest(LocalStorage(tmp_path))
    (tmp_path / MANIFEST_NAME).unlink()
    after = repair(LocalStorage(tmp_path))
    assert (after.tensors, after.aliases, after.objects) == (before.tensors, before.aliases, before.objects)
    assert load_and_judge(tmp_path, state).error is None


def test_an_empty_folder_has_nothing_to_repair(tmp_path: Path) -> None:
    _refused(tmp_path, FormatError, "there are none")


def test_a_repair_that_fails_leaves_everything_as_it_was(folder: Path) -> None:
    manifest = read_manifest(LocalStorage(folder))
    _cut(folder / MANIFEST_NAME)
    _cut(folder / index_name(manifest.attempt))
    with flipped(folder / manifest.files[0].name, manifest.files[0].data_start, 0):
        _refused(folder, CorruptChunkError, "'")


def _refused(folder: Path, kind: type[ShardproofError], text: str) -> ShardproofError:
    before = _files(folder)
    with pytest.raises(kind) as caught:
        repair(LocalStorage(folder))
    assert text in caught.value.message, caught.value.message
    assert _files(folder) == before, "what cannot be repaired is left as it is"
    return caught.value
