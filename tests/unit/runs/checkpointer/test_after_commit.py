"""`Checkpointer(cache=...)`: the newest step is in the page cache if that is cheap; older ones are not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import read_manifest
from shardproof.engine.storage import LocalStorage, cache_rule
from shardproof.runs.checkpointer.after_commit import NewestStep, is_on_local_disk
from tests.thread_limit import limit_threads

SIZE = 49 << 20  # more than a request and what the kernel reads ahead of it


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    """Two files of which the page cache has nothing."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(SIZE))
        with (tmp_path / name).open("rb") as file:
            os.fsync(file.fileno())
    storage = LocalStorage(tmp_path)
    for name in ("a", "b"):
        storage.drop_cached(name)
        if storage.is_cached(name, 0, SIZE):
            pytest.skip("this file system keeps pages when it is told that they are not needed")
    return storage


def test_the_newest_step_is_cached_and_the_previous_one_is_dropped(storage: LocalStorage) -> None:
    newest = NewestStep()
    newest.committed(storage, "a")
    assert newest.wait(60) and storage.is_cached("a", 0, SIZE) and not storage.is_cached("b", 0, SIZE)
    newest.committed(storage, "b")
    assert newest.wait(60) and storage.is_cached("b", 0, SIZE) and not storage.is_cached("a", 0, SIZE)


def test_older_steps_that_newer_ones_may_refer_to_stay_cached(storage: LocalStorage) -> None:
    newest = NewestStep(drop_older=False)
    for name in ("a", "b"):
        newest.committed(storage, name)
        assert newest.wait(60)
    assert storage.is_cached("a", 0, SIZE) and storage.is_cached("b", 0, SIZE)


def test_a_step_that_retention_removed_is_no_error(storage: LocalStorage, tmp_path: Path) -> None:
    newest = NewestStep()
    newest.committed(storage, "a")
    assert newest.wait(60)
    storage.delete("a")
    newest.committed(storage, "b")
    assert newest.wait(60) and storage.is_cached("b", 0, SIZE)
    newest.committed(storage, "missing")
    assert newest.wait(60)


def test_caching_stops_when_a_save_begins(storage: LocalStorage) -> None:
    newest = NewestStep(rate=1)  # the second request would be 194 days away
    newest.committed(storage, "a")
    newest.stop()
    assert newest.wait(60)
    assert not storage.is_cached("a", SIZE - 4096, 4096)


def test_a_step_is_not_cached_if_memory_is_scarce(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_rule, "available_memory", lambda: 2 * SIZE - 1)
    newest = NewestStep()
    newest.committed(storage, "a")
    assert newest.wait(60) and not storage.is_cached("a", 0, SIZE)


MOUNT = "36 35 {device} / / rw - {kind} /dev/vda rw\n"


@pytest.mark.parametrize(("kind", "is_read"), [("ext4", True), ("xfs", True), ("nfs4", False)])
def test_auto_reads_local_files(
    storage: LocalStorage,
    tmp_path: Path,
    kind: str,
    is_read: bool,
) -> None:
    mounts = tmp_path / "mountinfo"
    number = os.stat(tmp_path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    mounts.write_text(MOUNT.format(device="999:1", kind="nfs") + MOUNT.format(device=device, kind=kind))
    newest = NewestStep(only_if_local=True, mounts=mounts)
    newest.committed(storage, "a")
    assert newest.wait(60) and storage.is_cached("a", 0, SIZE) == is_read


@pytest.mark.parametrize("text", ["", "nonsense", "36 35 1:1 / /\n"])
def test_unknown_mounts_are_not_local(tmp_path: Path, text: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(text)
    assert not is_on_local_disk(str(tmp_path), mounts)
    assert not is_on_local_disk(str(tmp_path / "missing"), mounts)


@pytest.mark.parametrize("cache", ["newest", "none"])
def test_a_checkpointer_caches_the_newest_step_only_with_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("SHARDPROOF_DIRECT", "1")
    checkpointer = sp.Checkpointer(tmp_path, cache=cache)  # type: ignore[arg-type]
    state = {"w": torch.randn(1024, 1024)}
    try:
        for step in (1, 2):
            checkpointer.save(step, state).result()
            for thread in threading.enumerate():
                if thread.name == "shardproof-page-cache":
                    thread.join(60)
    except sp.ShardproofError as error:
        pytest.skip(f"no unbuffered files here: {error}")
    cached = []
    for step in (1, 2):
        folder = LocalStorage(tmp_path / f"step-{step:08d}")
        record = read_manifest(folder).files[0]
        cached.append(folder.is_cached(record.name, 0, record.size))
    assert cached == [False, cache == "newest"]


def test_an_unknown_cache_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'auto', 'newest' or 'none'"):
        sp.Checkpointer(tmp_path, cache="all")  # type: ignore[arg-type]


def test_without_a_thread_the_step_stays_out_of_the_cache(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = NewestStep()
    with monkeypatch.context() as limited:
        limit_threads(limited)
        newest.committed(storage, "a")
        assert newest.wait(60) and not storage.is_cached("a", 0, SIZE)
    newest.committed(storage, "b")
    assert newest.wait(60) and storage.is_cached("b", 0, SIZE)
