"""Conversions to a bucket: every format, interrupted at every request, shared by ranks, and refused."""

from __future__ import annotations

import multiprocessing.util
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run as run_command
from shardproof.formats import WRITERS
from shardproof.rendezvous import Decide, LocalRendezvous
from shardproof.storage import ObjectStorage
from tests.harness import rank, rendezvous, run_ranks
from tests.object_store.seaweed import S3Server

pytestmark = pytest.mark.processes

STATE: dict[str, Any] = {"model": {f"layer.{at}": torch.arange(at, at + 64.0) for at in range(4)}, "epoch": 3}
FILE_BYTES = 600
"""Two tensors a file."""


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint. Temporary files go to a folder of the test."""
    (tmp_path / "temporary").mkdir()
    multiprocessing.util.get_temp_dir()  # chosen now: the path of a socket of multiprocessing must be short
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    sp.save(tmp_path / "source", STATE, step=7)
    return tmp_path / "source"


def objects(url: str) -> dict[str, bytes]:
    storage = ObjectStorage(url)
    return {name: storage.read(name) for name in storage.list()}


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "temporary").glob("shardproof-*")]


class PutHook:
    """Calls a function before the n-th PUT, and before all later ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
        self.left = -1
        lock = threading.Lock()
        put = obstore.put

        def counted(*arguments: Any, **how: Any) -> Any:
            with lock:
                self.left -= 1
            if self.left < 0:
                then()
            return put(*arguments, **how)

        monkeypatch.setattr(obstore, "put", counted)


def die() -> None:
    raise Killed("killed here")


@pytest.mark.parametrize("to", sorted(WRITERS))
def test_every_format_is_whole_or_invisible(
    to: str, source: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion dies before each of its PUTs. The next one makes that PUT, and dies before the next."""
    how: dict[str, Any] = {"to": to, "include": "model", "max_file_bytes": FILE_BYTES}
    sp.convert(source, tmp_path / "local", **how)
    ObjectStorage(f"{url}-other").publish("a", b"")  # tests the store with PUTs of its own, once
    expected = objects_of_folder(tmp_path / "local")
    there = f"{url}/run/there"
    with monkeypatch.context() as patch:
        puts = PutHook(patch, die)
        for interrupted in range(len(expected) + 1):  # before the marker object, and before each file
            puts.left = min(interrupted, 1)
            with pytest.raises((Killed, sp.ShardproofError), match="killed here"):
                sp.convert(source, there, **how)
            assert len(objects(there)) == max(interrupted - 1, 0)
            if to in ("hf", "safetensors") and interrupted == len(expected):
                assert_whole(there)  # names such as model-00001-of-00002 show that all files are there
            else:
                with pytest.raises(sp.ShardproofError):
                    sp.open(there)
            if interrupted == 2:
                shutil.rmtree(tmp_path / "temporary" / leftovers(tmp_path)[0])  # another machine continues
        puts.left = 1
        patch.setattr("shardproof.formats.conversion.work_folder.shutil.rmtree", lambda *_: die())
        with pytest.raises((Killed, sp.ShardproofError), match="killed here"):
            sp.convert(source, there, **how)
        assert_whole(there)
    with monkeypatch.context() as patch:
        PutHook(patch, die).left = 1  # of the last file, which the store refuses
        report = sp.convert(source, there, **how)
    assert report.location == there and report.verified == report.bytes == 4 * 64 * 4
    assert objects(there) == expected
    assert ObjectStorage(url).list("run") == sorted(f"run/there/{name}" for name in expected)
    assert leftovers(tmp_path) == []
    assert_whole(there)
    assert run_command(["verify", there]) == 0
    with pytest.raises(sp.AlreadyCommittedError, match="was not touched"):
        sp.convert(source, there, **how)


def assert_whole(url: str) -> None:
    with sp.open(url) as checkpoint:
        for key, value in STATE["model"].items():
            assert torch.equal(checkpoint[f"model.{key}"].read(), value)


def objects_of_folder(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_file_goes_to_one_object(
    source: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of several parts, by the command."""
    large = {"w": torch.arange(5_000_000)}  # 40 MB
    sp.save(tmp_path / "large", large)
    there = f"{url}/models/w.safetensors"
    assert run_command(["convert", str(tmp_path / "large"), there, "--to", "safetensors"]) == 0
    assert f"converted to {there}" in capsys.readouterr().out
    assert ObjectStorage(url).list() == ["models/w.safetensors"]
    assert torch.equal(sp.open(there)["w"].read(), large["w"])
    with pytest.raises(sp.AlreadyCommittedError):
        sp.convert(source, there, to="safetensors", include="model")
    with pytest.raises(sp.StructureError, match="names a file, and the checkpoint has [23] files"):
        sp.convert(source, f"{url}/m.safetensors", to="hf", include="model", max_file_bytes=FILE_BYTES)
    with pytest.raises(sp.StructureError, match="names a file of the format torch"):
        sp.convert(source, f"{url}/m.pt", to="hf", include="model")
    assert ObjectStorage(url).list() == ["models/w.safetensors"], "refused before the marker is written"


def _convert(
    source: str, there: str, temporary: str, environment: dict[str, str], dies: bool
) -> tuple[int, int]:
    """Converts on all ranks. Rank 1 may die in its first upload."""
    tempfile.tempdir = temporary
    os.environ.update(environment)  # the server that forks ranks may be older than the S3 server
    if dies and rank() == 1:
        ObjectStorage.create = lambda *arguments: os.kill(os.getpid(), 9)  # type: ignore[method-assign, assignment]
    report = sp.convert(
        source,
        there,
        to="shardproof",
        max_file_bytes=20 << 20,
        rendezvous=rendezvous(deadline=3.0 if dies else 60.0),
    )
    return report.units, report.resumed


def test_ranks_share_the_uploads_and_a_dead_rank_loses_nothing(
    source: Path, s3: S3Server, url: str, tmp_path: Path
) -> None:
    there, temporary = f"{url}/there", str(tmp_path / "temporary")
    given = str(tmp_path / "large"), there, temporary, s3.environment
    large = {"a": torch.arange(5 << 20, dtype=torch.int32), "b": torch.ones(5 << 20)}  # files of two parts
    sp.save(tmp_path / "large", large)
    killed = run_ranks(2, _convert, *given, True, timeout=60)
    assert killed[1].exit_code == -9 and isinstance(killed[0].error, sp.RankSilent)
    uploaded = set(objects(there))
    assert uploaded and "manifest.json" not in uploaded
    outcomes = run_ranks(2, _convert, *given, False, timeout=60)
    assert [outcome.value for outcome in outcomes] == [(2, 2), (2, 2)]
    assert uploaded < set(objects(there))
    assert torch.equal(sp.open(there)["a"].read(), large["a"]) and run_command(["verify", there]) == 0
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_workers_upload(source: Path, url: str, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = sp.convert(
        source,
        f"{url}/there",
        to="dcp",
        max_file_bytes=FILE_BYTES,
        workers=2,
        on_progress=lambda *counts: seen.append(counts),
    )
    assert report.units == 2 and seen == sorted(seen) and seen[-1] == (4 * report.bytes, 4 * report.bytes)
    assert torch.equal(sp.open(f"{url}/there")["model.layer.1"].read(), STATE["model"]["layer.1"])
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("is_file", [False, True])
def test_a_repeated_conversion_aborts_the_uploads_of_an_interrupted_one(
    is_file: bool,
    source: Path,
    url: str,
    begin_upload: Callable[[ObjectStorage, str], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Uploads of other objects stay. A conversion that was not interrupted lists no uploads."""
    storage = ObjectStorage(url)
    there, name = ("w.safetensors", "w.safetensors") if is_file else ("there", "there/model.safetensors")
    how: dict[str, Any] = {"to": "safetensors", "include": "model"}
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStorage, "uploads", lambda *arguments: die())
        sp.convert(source, f"{url}-first/{there}", **how)
        PutHook(patch, die).left = 1
        with pytest.raises(Killed):
            sp.convert(source, f"{url}/{there}", **how)
    begin_upload(storage, name)
    other = begin_upload(storage, f"{name}.mine")
    with monkeypatch.context() as patch:
        PutHook(patch, die).left = 0
        with pytest.raises(Killed):
            sp.convert(source, f"{url}/{there}", **how)
    assert len(storage.uploads(0.0)) == 2
    sp.convert(source, f"{url}/{there}", **how)
    assert [upload.id for upload in storage.uploads(0.0)] == [other]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_conversion_that_cannot_list_uploads_completes_with_a_warning(
    source: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {"to": "shardproof"}
    with monkeypatch.context() as patch:
        PutHook(patch, die).left = 2
        with pytest.raises(Killed):
            sp.convert(source, f"{url}/there", **how)

    def refuse(storage: ObjectStorage, parts_before: float) -> Any:
        raise sp.StorageError("403")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStorage, "uploads", refuse)
        sp.convert(source, f"{url}/there", **how)
    assert "there is complete. Parts of interrupted uploads may stay in the bucket" in caplog.text
    assert run_command(["verify", f"{url}/there"]) == 0
    assert ObjectStorage(url).size("there.converting") is None


class HookedRendezvous(LocalRendezvous):
    """Calls a function before the meeting of a phase."""

    def __init__(self, phase: str, action: Callable[[], None]) -> None:
        super().__init__()
        self._phase, self._action = phase, action

    def meet(self, operation: str, phase: str, post: bytes | BaseException, decide: Decide) -> bytes:
        if phase == self._phase:
            self._action()
        return super().meet(operation, phase, post, decide)


def test_objects_of_other_writers_are_not_touched(source: Path, url: str, tmp_path: Path) -> None:
    storage = ObjectStorage(f"{url}/there")

    def convert(phase: str, name: str, dtype: str | None = None) -> None:
        action = lambda: storage.publish(name, b"mine")  # noqa: E731
        sp.convert(
            source, storage.location, to="shardproof", dtype=dtype, rendezvous=HookedRendezvous(phase, action)
        )

    with pytest.raises(sp.AlreadyCommittedError, match=r"removed objects.*: mine\. Nothing was published"):
        convert("publish", "mine")
    storage.delete("mine")
    with pytest.raises(sp.StructureError, match=r"there\.converting is left from an interrupted conversion"):
        convert("verify", "mine", "float16")
    with pytest.raises(sp.AlreadyCommittedError, match="another save published it"):
        convert("publish", "manifest.json")
    storage.delete("manifest.json")
    (shard,) = storage.list("shards")
    shard_bytes = storage.read(shard)
    for other, match in (
        (shard_bytes[:-1] + b"?", "has other bytes between 0 and"),
        (b"mine", "has 4 bytes"),
    ):
        storage.publish(shard, other, replace=True)
        with pytest.raises(sp.StorageError, match=match):
            sp.convert(source, storage.location, to="shardproof")
        assert storage.read(shard) == other
    storage.delete(shard)
    assert sp.convert(source, storage.location, to="shardproof").resumed == 1
    assert storage.read(shard) == shard_bytes


def test_a_store_that_refuses_is_reported_before_anything_is_written(
    source: Path, url: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for location, match in (
        ("s3://nowhere-at-all/there", "There is no such bucket"),
        ("s3://tests", "is a whole bucket"),
        ("memory://run/there", "run in memory"),
        ("s5://tests/there", "no URL of a known store"),
    ):
        with pytest.raises(sp.ShardproofError, match=match):
            sp.convert(source, location, to="shardproof")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", s3.reader_options["access_key_id"])
        with pytest.raises(sp.StorageError, match="credentials do not allow"):
            sp.convert(source, f"{url}/there", to="shardproof")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(sp.StorageError, match="credentials"):
            sp.convert(source, f"{url}/there", to="shardproof")
    assert ObjectStorage(url).list() == [] and leftovers(tmp_path) == []
    (tmp_path / "temporary").chmod(0o500)
    try:
        if os.geteuid():
            with pytest.raises(sp.StorageError, match="TMPDIR chooses its place"):
                sp.convert(source, f"{url}/there", to="shardproof")
    finally:
        (tmp_path / "temporary").chmod(0o700)
