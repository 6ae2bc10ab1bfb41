"""LocalStorage: the conformance suite, and what only a file system can do."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import resource
import subprocess
import sys

import pytest

from shardproof.engine.storage import durable as durable_module
from shardproof.engine.storage.paths import RealFolder
from shardproof.errors import AlreadyCommittedError, StorageError
from shardproof.storage import ALIGNMENT, LocalStorage, UncachedStorage, aligned_buffer
from shardproof.storage.conformance import StorageConformance
from tests.harness import open_files


class TestBestEffort(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: pathlib.Path) -> LocalStorage:
        return LocalStorage(tmp_path / "root")


class TestBuffered(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: pathlib.Path) -> LocalStorage:
        return LocalStorage(tmp_path / "root", direct=False)


class TestDirect(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path: pathlib.Path) -> LocalStorage:
        storage = LocalStorage(tmp_path / "root", direct=True)
        try:
            storage.create("probe").abort()
        except StorageError as error:
            pytest.skip(f"no unbuffered files here: {error}")
        return LocalStorage(tmp_path / "other", direct=True)


def test_direct_falls_back_at_the_first_refused_write(tmp_path, monkeypatch):
    storage = UncachedStorage(tmp_path)
    sink = storage.create("a")
    if not sink.direct:
        pytest.skip("no unbuffered files here")
    real = os.pwrite

    def refuse(descriptor, data, start):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data, start)

    monkeypatch.setattr(os, "pwrite", refuse)
    data = aligned_buffer(2 * ALIGNMENT)
    data[:] = b"x" * len(data)
    sink.write_at(0, data)
    assert not sink.direct
    sink.finish(len(data))
    assert storage.read("a") == bytes(data)


def test_direct_falls_back_when_open_is_refused(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    sink = UncachedStorage(tmp_path).create("a")
    assert not sink.direct
    sink.write_at(0, aligned_buffer(ALIGNMENT))
    sink.finish(ALIGNMENT)
    with pytest.raises(StorageError, match="unbuffered"):
        LocalStorage(tmp_path, direct=True).create("b")
    assert LocalStorage(tmp_path).list() == ["a"]


def test_finish_flushes_the_file_and_every_new_folder(tmp_path, monkeypatch):
    flushed = _watch_flushes(monkeypatch)
    LocalStorage(tmp_path / "run" / "step").create("shards/0").finish(0)
    for folder in ("", "run", "run/step", "run/step/shards", "run/step/shards/0"):
        assert str(tmp_path / folder) in flushed, folder


def test_publish_flushes_before_and_after_the_name(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path / "run")
    (tmp_path / "run").mkdir()  # made by a peer that died before it flushed the folder
    events = _watch_flushes(monkeypatch)
    real = os.link

    def link(source, target, **folders):
        events.append("link")
        return real(source, target, **folders)

    monkeypatch.setattr(os, "link", link)
    storage.publish("manifest.json", b"{}")
    at = events.index("link")
    assert any(".tmp" in event for event in events[:at])
    assert {str(tmp_path / "run"), str(tmp_path)} <= set(events[at:])


def test_delete_is_durable(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    storage.publish("a/b/c", b"")
    flushed = _watch_flushes(monkeypatch)
    storage.delete("a/b/c")
    assert flushed == [str(tmp_path)]


def test_a_failed_flush_leaves_no_file(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    sink = storage.create("a")
    monkeypatch.setattr(os, "fsync", _fail(errno.EIO, "Input/output error"))
    with pytest.raises(StorageError, match="EIO") as caught:
        sink.finish(0)
    assert caught.value.details == {"file": str(tmp_path / "a"), "errno": "EIO", "missing": False}
    with pytest.raises(StorageError, match="EIO"):
        storage.publish("manifest.json", b"{}")
    assert storage.list() == []


def test_a_file_system_that_flushes_nothing_is_no_failure(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    storage.publish("manifest.json", b"{}")
    monkeypatch.setattr(os, "fsync", _fail(errno.EINVAL, "Invalid argument"))
    storage.flush("manifest.json")


@pytest.mark.parametrize("replace", [False, True])
def test_a_name_that_cannot_be_flushed_stays_and_the_error_says_so(tmp_path, monkeypatch, replace):
    storage = LocalStorage(tmp_path)
    real, calls = os.fsync, []

    def fail_on_folders(descriptor):
        calls.append(descriptor)
        if len(calls) > 1:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_on_folders)
        with pytest.raises(StorageError, match="EIO.* in place and readers see it") as caught:
            storage.publish("manifest.json", b"{}", replace=replace)
    assert caught.value.details["in_place"] and len(calls) == 2
    assert storage.list() == ["manifest.json"]
    assert storage.read("manifest.json") == b"{}"


def test_a_temporary_name_that_cannot_be_removed_is_no_failure(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", _fail(errno.EIO, "Input/output error"))
        storage.publish("manifest.json", b"{}")
    assert storage.read("manifest.json") == b"{}"
    assert [name for name in storage.list() if not name.endswith(".tmp")] == ["manifest.json"]


def test_flush_makes_a_file_and_all_folders_above_durable(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path / "run")
    storage.publish("manifest.json", b"{}")
    flushed = _watch_flushes(monkeypatch)
    storage.flush("manifest.json")
    assert flushed[:3] == [str(tmp_path / "run/manifest.json"), str(tmp_path / "run"), str(tmp_path)]


def test_a_flush_of_names_flushes_the_folder_alone(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path / "run")
    storage.publish("step/manifest.json", b"{}")
    flushed = _watch_flushes(monkeypatch)
    for place in (storage, storage.within("step"), storage.within("none")):
        place.flush_names()
    assert flushed == [str(tmp_path / "run"), str(tmp_path / "run/step")]


def test_publish_works_without_hard_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", _fail(errno.EPERM, "Operation not permitted"))
    storage = LocalStorage(tmp_path)
    storage.publish("a", b"one")
    with pytest.raises(AlreadyCommittedError):
        storage.publish("a", b"two")
    monkeypatch.setattr(durable_module.os.path, "exists", lambda path: False)
    monkeypatch.setattr(pathlib.Path, "exists", lambda path: path.name != "a" and os.access(path, os.F_OK))
    with pytest.raises(AlreadyCommittedError):
        storage.publish("a", b"three")
    assert storage.read("a") == b"one"
    assert storage.list() == ["a"]


def test_a_link_whose_answer_was_lost_counts_as_published(tmp_path, monkeypatch):
    real = os.link

    def link(source, target, **folders):
        real(source, target, **folders)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link)
    LocalStorage(tmp_path).publish("a", b"one")
    assert LocalStorage(tmp_path).list() == ["a"]


def test_the_error_names_a_full_disk(tmp_path, monkeypatch):
    sink = LocalStorage(tmp_path, direct=False).create("a")
    monkeypatch.setattr(os, "pwrite", _fail(errno.ENOSPC, "No space left on device"))
    with pytest.raises(StorageError, match=r"a: No space left on device \(ENOSPC\)\. .*free space"):
        sink.write_at(0, memoryview(b"x"))


def test_a_file_size_limit_is_an_error_not_a_signal(tmp_path):
    code = f"""
import resource
from shardproof.storage import LocalStorage, aligned_buffer
from shardproof.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
sink = LocalStorage({str(tmp_path)!r}).create("a")
try:
    sink.write_at(0, aligned_buffer(1 << 20))
except StorageError as error:
    print(error.details["errno"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "EFBIG\n", done.stderr


def test_a_pipe_in_the_way_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    storage = LocalStorage(tmp_path)
    assert storage.size("manifest.json") is None
    with pytest.raises(StorageError, match="regular"):
        storage.read("manifest.json")


def test_a_file_where_a_folder_is_needed_is_an_error(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.publish("shards", b"")
    with pytest.raises(StorageError, match="ENOTDIR"):
        storage.create("shards/0")
    with pytest.raises(StorageError, match="ENOTDIR"):
        storage.create("shards/0/1")
    with pytest.raises(StorageError, match="ENOTDIR") as caught:
        storage.publish("shards/0", b"")
    assert not isinstance(caught.value, AlreadyCommittedError)
    assert storage.size("shards/0") is None


def test_list_does_not_follow_links_in_a_circle(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path)
    storage = LocalStorage(tmp_path)
    storage.publish("a", b"")
    assert storage.list() == ["a"]


def test_read_sees_a_replaced_file(tmp_path):
    storage, other = LocalStorage(tmp_path), LocalStorage(tmp_path)
    storage.publish("manifest.json", b"one")
    buffer = bytearray(3)
    storage.read_into("manifest.json", 0, memoryview(buffer))
    other.publish("manifest.json", b"two", replace=True)
    assert storage.read("manifest.json") == b"two"


def test_a_file_longer_than_memory_is_a_storage_error(tmp_path):
    (tmp_path / "a").touch()
    os.truncate(tmp_path / "a", 1 << 43)
    with pytest.raises(
        StorageError, match=f"{1 << 43} bytes from byte 0 on do not fit into memory"
    ) as caught:
        LocalStorage(tmp_path).read("a")
    assert caught.value.details["damaged"] is False


def test_descriptors_are_bounded_and_given_back(tmp_path):
    storage = LocalStorage(tmp_path, direct=False)
    before = open_files()
    for i in range(200):
        storage.create(f"{i}").finish(0)
    for i in range(200):
        storage.read_into(f"{i}", 0, memoryview(b""))
    assert 0 < len(open_files()) - len(before) <= 64
    storage.close()
    assert open_files() == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64


def test_a_peer_that_removes_folders_does_not_stop_a_create(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    losses = iter([True, True, False])

    class Lost(RealFolder):
        def __init__(self, root, path, **options):
            super().__init__(root, path, **options)
            if next(losses):
                os.rmdir(path)

    monkeypatch.setattr(durable_module, "RealFolder", Lost)
    storage.create("shards/0").finish(0)
    assert storage.list() == ["shards/0"]


def _fail(code, text):
    def fail(*args, **kwargs):
        raise OSError(code, text)

    return fail


def _watch_flushes(monkeypatch) -> list[str]:
    flushed: list[str] = []
    real = os.fsync

    def fsync(descriptor):
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return flushed


@pytest.mark.parametrize("part", ["step", "step/shards"])
def test_nothing_is_written_or_removed_behind_a_link(tmp_path, part):
    other = LocalStorage(tmp_path / "other")
    other.publish("shards/a", b"whole")
    other.publish("step/shards/a", b"whole")
    run = LocalStorage(tmp_path / "run")
    run.publish("real/b", b"")
    (tmp_path / "run" / part).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / part).symlink_to(tmp_path / "other" / part.rpartition("/")[2])
    before = {file: file.read_bytes() for file in (tmp_path / "other").rglob("*") if file.is_file()}
    name = "step/shards/a" if part == "step/shards" else "step/a"
    deep = run.within("step") if part == "step/shards" else run
    for storage, file in ((run, name), (deep, name.removeprefix("step/") if deep is not run else name)):
        for change in (
            lambda storage=storage, file=file: storage.delete(file),
            lambda storage=storage, file=file: storage.create(f"{file}-new"),
            lambda storage=storage, file=file: storage.replace(file),
            lambda storage=storage, file=file: storage.publish(f"{file}-new", b""),
            lambda storage=storage, file=file: storage.publish(file, b"", replace=True),
        ):
            with pytest.raises(StorageError, match=f"run/{part} is a symbolic link"):
                change()
    if part == "step":
        with pytest.raises(StorageError, match="is a symbolic link"):
            LocalStorage(tmp_path / "run" / "real").sibling("step").delete("shards/a")
    assert before == {file: file.read_bytes() for file in (tmp_path / "other").rglob("*") if file.is_file()}
    assert run.read("step/shards/a") == b"whole", "reads follow links"


def test_the_root_of_a_storage_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    run = LocalStorage(tmp_path / "run")
    run.publish("step/a", b"1")
    run.delete("step/a")
    assert run.list() == [] and list((tmp_path / "disk").iterdir()) == []
