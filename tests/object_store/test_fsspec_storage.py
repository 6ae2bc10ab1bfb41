"""`FsspecStorage`: the conformance suite, and file systems without exclusive creation."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import shardproof as sp
from shardproof.commands.cli.group import run as run_cli
from shardproof.engine.storage import FsspecStorage, time_at
from shardproof.storage.conformance import StorageConformance


class TestMemory(StorageConformance):
    @pytest.fixture
    def storage(self) -> FsspecStorage:
        return FsspecStorage(fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}")


@pytest.mark.processes
class TestS3fs(StorageConformance):
    @pytest.fixture
    def storage(self, url: str, s3: Any) -> FsspecStorage:
        s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
        options = s3.options
        fs = s3fs.S3FileSystem(
            key=options["access_key_id"],
            secret=options["secret_access_key"],
            endpoint_url=options["endpoint"],
            client_kwargs={"region_name": options["region"]},
        )
        return FsspecStorage(fs, url)

    def test_delete(self, storage: FsspecStorage) -> None:  # type: ignore[override]
        """SeaweedFS keeps an emptied folder for a while, so no object can have its name at once."""
        storage.create("a/b/c").finish(0)
        storage.delete("a/b/c")
        storage.delete("a/b/c")
        assert storage.list() == []


class _Replacing(MemoryFileSystem):
    """Ignores the mode, as file systems do that do not know it."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, **kwargs)


def test_a_run_is_saved_and_restored() -> None:
    run = FsspecStorage(fsspec.filesystem("memory"), f"memory://{uuid.uuid4().hex}/run")
    checkpointer = sp.Checkpointer(run, keep=sp.KeepLatest(2))
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": torch.full((10_000_000,), float(step))}).result()
    target = {"w": torch.zeros(10_000_000)}
    assert sp.Checkpointer(run).restore(target) == 3 and target["w"].unique().tolist() == [3.0]
    assert checkpointer.steps() == [2, 3]
    with pytest.raises(sp.AlreadyCommittedError):
        sp.save(run.within("step-00000003"), {"w": torch.zeros(1)})


def test_the_time_of_the_file_system() -> None:
    storage = FsspecStorage(fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}")
    assert abs(time_at(storage) - time.time()) < 60 and storage.list() == []


def test_commands_that_only_read_write_no_file_to_learn_the_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage replaces a store that tells its time only to a program that writes."""

    class ReadOnly(FsspecStorage):
        def modified(self, name: str) -> float | None:
            assert not name.startswith("time-"), "a file was written"
            return super().modified(name)

    place = f"/{uuid.uuid4().hex}"
    sp.Checkpointer(FsspecStorage(fsspec.filesystem("memory"), place)).save(1, {"w": torch.ones(1)}).result()
    storage = ReadOnly(fsspec.filesystem("memory"), place)
    monkeypatch.setattr("shardproof.engine.storage.storage_at", lambda text: storage)
    assert run_cli(["doctor", "memory://elsewhere"]) == 0
    assert "ages are by the clock of this machine" in capsys.readouterr().out
    assert run_cli(["watch", "memory://elsewhere", "--once"]) == 0
    assert "ages are by the clock of this machine" in capsys.readouterr().err
    with pytest.raises(sp.StorageError, match="a file was written"):
        time_at(storage)


def test_a_failed_write_leaves_no_file() -> None:
    storage = FsspecStorage(fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}")
    sink = storage.create("a")
    for number in range(3):
        sink.write_at(number << 24, memoryview(bytes(1 << 24)))
    sink.abort()
    assert storage.list() == []


def test_file_systems_without_exclusive_creation_are_refused(tmp_path: Path) -> None:
    with pytest.raises(sp.StorageError, match="LocalFileSystem has no.*Give the folder itself"):
        FsspecStorage(LocalFileSystem(), str(tmp_path))
    storage = FsspecStorage(_Replacing(), f"/{uuid.uuid4().hex}")
    with pytest.raises(sp.ShardproofError, match="_Replacing replaces a file that it was told to create"):
        sp.save(storage, {"epoch": 3})
    assert not [name for name in storage.list() if name.endswith((".probe", "manifest.json"))]
