"""The tests that every storage must pass: subclass `StorageConformance` and provide a `storage` fixture.

This module needs pytest, which the package itself does not:

    class TestMyStorage(StorageConformance):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(tmp_path)
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardproof.engine.storage.base import FreeSpace, Sink, Storage, write_file
from shardproof.engine.storage.direct_io import ALIGNMENT, aligned_buffer
from shardproof.errors import AlreadyCommittedError, FormatError, StorageError

__all__ = ["StorageConformance"]

_BAD_NAMES = ["", "/a", "../a", "a/../../b", "a//b", "./a", "a/", "a\0b", "..", "a/.", "\ud800"]


class StorageConformance:
    """Tests of a `Storage`. A subclass provides an empty `storage` for each."""

    def test_has_the_methods(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)
        assert isinstance(storage.location, str)

    def test_create_then_read(self, storage: Storage) -> None:
        write_file(storage, "shards/a/0", b"0123456789")
        assert storage.size("shards/a/0") == 10
        assert storage.read("shards/a/0") == b"0123456789"
        assert storage.read("shards/a/0", 3) == b"3456789"
        assert storage.read("shards/a/0", 3, 5) == b"34"
        assert storage.read("shards/a/0", 10, 10) == b""

    def test_an_empty_file(self, storage: Storage) -> None:
        storage.create("empty").finish(0)
        assert storage.size("empty") == 0
        assert storage.read("empty") == b""

    def test_create_is_exclusive(self, storage: Storage) -> None:
        write_file(storage, "a", b"first")
        with pytest.raises(StorageError, match="a"):
            storage.create("a")
        assert storage.read("a") == b"first"

    @pytest.mark.parametrize("start", [0, 1, ALIGNMENT, ALIGNMENT + 8])
    @pytest.mark.parametrize("length", [0, 1, ALIGNMENT - 1, ALIGNMENT, 3 * ALIGNMENT, 3 * ALIGNMENT + 17])
    @pytest.mark.parametrize("shift", [0, 8])
    def test_ranges_of_any_alignment(self, storage: Storage, start: int, length: int, shift: int) -> None:
        memory = aligned_buffer(shift + length)
        memory[:] = bytes(i % 251 for i in range(shift + length))
        sink = storage.create("a")
        sink.write_at(start, memory[shift:])
        sink.finish(start + length)
        assert storage.read("a") == bytes(start) + bytes(memory[shift:])

    def test_disjoint_ranges_from_many_threads(self, storage: Storage) -> None:
        cuts = [0, 5, ALIGNMENT, 2 * ALIGNMENT + 1, 4 * ALIGNMENT, 8 * ALIGNMENT, 8 * ALIGNMENT + 3]
        data = aligned_buffer(cuts[-1])
        data[:] = bytes(i % 253 for i in range(len(data)))
        sink = storage.create("a")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda a, b: sink.write_at(a, data[a:b]), cuts[:-1], cuts[1:]))
        sink.finish(len(data))
        assert storage.read("a") == bytes(data)

    def test_finish_sets_the_size(self, storage: Storage) -> None:
        sink = storage.create("a")
        sink.write_at(0, memoryview(b"0123456789"))
        sink.finish(4)
        assert storage.read("a") == b"0123"

    def test_abort_leaves_nothing(self, storage: Storage) -> None:
        sink: Sink = storage.create("shards/a")
        sink.write_at(0, memoryview(b"0123456789"))
        sink.abort()
        sink.abort()
        assert storage.size("shards/a") is None
        write_file(storage, "shards/a", b"again")
        assert storage.read("shards/a") == b"again"

    def test_abort_after_finish_does_nothing(self, storage: Storage) -> None:
        sink = storage.create("a")
        sink.finish(0)
        sink.abort()
        assert storage.size("a") == 0

    def test_a_file_takes_the_place_of_another_when_it_is_finished(self, storage: Storage) -> None:
        write_file(storage, "shards/a", b"old")
        try:
            storage.replace("shards/a").abort()
        except StorageError:
            assert storage.read("shards/a") == b"old"
            pytest.skip("the storage does not replace large files")
        for name, before in (("shards/a", 3), ("shards/b", None)):
            for is_finished in (False, True):
                sink = storage.replace(name)
                sink.write_at(0, memoryview(b"new bytes"))
                assert storage.size(name) == before
                if is_finished:
                    sink.finish(9)
                sink.abort()
                assert storage.size(name) == (9 if is_finished else before)
            assert storage.read(name) == b"new bytes"
        assert storage.list() == ["shards/a", "shards/b"]

    def test_a_closed_sink_takes_nothing(self, storage: Storage) -> None:
        sink = storage.create("a")
        sink.finish(0)
        with pytest.raises(StorageError):
            sink.write_at(0, memoryview(b"late"))
        with pytest.raises(StorageError):
            sink.finish(4)

    def test_read_into(self, storage: Storage) -> None:
        write_file(storage, "a", b"0123456789")
        buffer = bytearray(4)
        storage.read_into("a", 3, memoryview(buffer))
        assert buffer == b"3456"
        storage.read_into("a", 0, memoryview(bytearray()))

    def test_short_reads_are_errors(self, storage: Storage) -> None:
        write_file(storage, "a", b"0123456789")
        with pytest.raises(StorageError, match="short"):
            storage.read("a", 5, 11)
        with pytest.raises(StorageError, match="short"):
            storage.read("a", 11)
        with pytest.raises(StorageError, match="short"):
            storage.read_into("a", 8, memoryview(bytearray(3)))

    def test_missing_files(self, storage: Storage) -> None:
        assert storage.size("a") is None
        assert storage.size("a/b") is None
        storage.delete("a")
        with pytest.raises(StorageError) as read:
            storage.read("a")
        with pytest.raises(StorageError) as into:
            storage.read_into("a", 0, memoryview(bytearray(1)))
        assert read.value.details["missing"] and into.value.details["missing"]

    def test_a_folder_is_no_file(self, storage: Storage) -> None:
        write_file(storage, "a/b", b"")
        assert storage.size("a") is None
        with pytest.raises(StorageError):
            storage.read("a")

    @pytest.mark.parametrize("name", _BAD_NAMES)
    def test_names_stay_inside(self, storage: Storage, name: str) -> None:
        for use in (
            lambda: storage.create(name),
            lambda: storage.publish(name, b""),
            lambda: storage.read(name),
            lambda: storage.read_into(name, 0, memoryview(bytearray(1))),
            lambda: storage.size(name),
            lambda: storage.flush(name),
            lambda: storage.delete(name),
            lambda: storage.within(name),
        ):
            with pytest.raises(StorageError, match="cannot name a file"):
                use()

    def test_publish(self, storage: Storage) -> None:
        storage.publish("run/manifest.json", b"one")
        assert storage.read("run/manifest.json") == b"one"
        with pytest.raises(AlreadyCommittedError):
            storage.publish("run/manifest.json", b"two")
        assert storage.read("run/manifest.json") == b"one"
        storage.publish("run/manifest.json", b"three", replace=True)
        assert storage.read("run/manifest.json") == b"three"
        assert storage.list() == ["run/manifest.json"]

    def test_publish_replace_needs_nothing_to_replace(self, storage: Storage) -> None:
        storage.publish("a", b"one", replace=True)
        assert storage.read("a") == b"one"

    def test_flush(self, storage: Storage) -> None:
        storage.publish("run/manifest.json", b"one")
        storage.flush("run/manifest.json")
        assert storage.read("run/manifest.json") == b"one"
        with pytest.raises(StorageError) as missing:
            storage.flush("run/none")
        assert missing.value.details["missing"]

    def test_flush_of_names(self, storage: Storage) -> None:
        storage.publish("run/manifest.json", b"one")
        for place in (storage, storage.within("run"), storage.within("none")):
            place.flush_names()
        assert storage.list() == ["run/manifest.json"]

    def test_one_publisher_of_many_wins(self, storage: Storage) -> None:
        ready = threading.Barrier(8)

        def publish(rank: int) -> bool:
            ready.wait()
            try:
                storage.publish("manifest.json", b"%d" % rank * 1000)
            except AlreadyCommittedError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(publish, range(8)))
        assert won.count(True) == 1
        assert storage.read("manifest.json") == b"%d" % won.index(True) * 1000
        assert storage.list() == ["manifest.json"]

    def test_list(self, storage: Storage) -> None:
        assert storage.list() == []
        assert storage.list("shards") == []
        for name in ("b", "shards/1", "shards/0", "shards/deep/er/2", "shards-more/3"):
            write_file(storage, name, b"")
        assert storage.list() == ["b", "shards-more/3", "shards/0", "shards/1", "shards/deep/er/2"]
        assert storage.list("shards") == ["shards/0", "shards/1", "shards/deep/er/2"]

    def test_folders(self, storage: Storage) -> None:
        assert storage.folders() == []
        for name in ("b", "shards/deep/er/2", "other/3"):
            write_file(storage, name, b"")
        assert storage.folders() == ["other", "shards"]
        assert storage.within("shards").folders() == ["deep"]
        assert storage.within("none").folders() == []

    def test_delete(self, storage: Storage) -> None:
        write_file(storage, "a/b/c", b"1")
        write_file(storage, "a/d", b"2")
        storage.delete("a/b/c")
        storage.delete("a/b/c")
        assert storage.list() == ["a/d"]
        storage.delete("a/d")
        assert storage.list() == []
        write_file(storage, "a", b"a file where a folder was")

    def test_within(self, storage: Storage) -> None:
        part = storage.within("steps/1")
        assert part.list() == []
        write_file(part, "shards/0", b"0")
        part.publish("manifest.json", b"{}")
        assert storage.list() == ["steps/1/manifest.json", "steps/1/shards/0"]
        assert part.list() == ["manifest.json", "shards/0"]
        assert part.location.startswith(storage.location)
        assert not part.linked

    def test_sibling(self, storage: Storage) -> None:
        part = storage.within("steps/1")
        write_file(part, "shards/0", b"0")
        sibling = part.sibling("2")
        assert sibling.list() == [] and sibling.folder == "2" and part.folder == "1"
        write_file(sibling, "shards/0", b"22")
        assert storage.list() == ["steps/1/shards/0", "steps/2/shards/0"]
        assert part.sibling("1").read("shards/0") == b"0" and sibling.sibling("1").size("shards/0") == 1
        assert part.siblings() == sibling.siblings() == ["1", "2"]
        assert sibling.location == storage.within("steps/2").location

    @pytest.mark.parametrize("folder", ["", ".", "..", "/", "a/b", "../2", "a/", "a\0b"])
    def test_a_sibling_is_one_folder(self, storage: Storage, folder: str) -> None:
        with pytest.raises(StorageError):
            storage.within("steps/1").sibling(folder)

    def test_every_way_to_read_gives_the_same_bytes(self, storage: Storage) -> None:
        data = b"0123456789"
        write_file(storage, "shards/a", data)
        assert storage.read_at_most("shards/a", 10) == data
        with pytest.raises(FormatError, match="10 bytes, expected at most 9"):
            storage.read_at_most("shards/a", 9)
        with pytest.raises(StorageError) as missing:
            storage.read_at_most("shards/b", 9)
        assert missing.value.details["missing"]
        assert bytes(storage.read_buffer("shards/a", 3, 4)) == b"3456"
        views = (storage.nearest("shards/a"), storage.past_cache(), storage.with_one_wait())
        for view in (*views, storage.with_contents({"shards/a": data})):
            assert view.read("shards/a") == data and view.size("shards/a") == 10
            assert view.list() == ["shards/a"]

    def test_the_optional_methods(self, storage: Storage) -> None:
        write_file(storage, "shards/a", b"0123456789")
        assert storage.is_cached("shards/a", 0, 10) in (True, False)
        assert storage.path is None or (storage.path / "shards/a").read_bytes() == b"0123456789"
        assert storage.free_space() is None or isinstance(storage.free_space(), FreeSpace)
        assert storage.uploads(parts_before=0.0) == []

    def test_times(self, storage: Storage) -> None:
        write_file(storage, "shards/a", b"0123456789")
        try:
            written = storage.modified("shards/a")
        except StorageError:
            pytest.skip("the storage does not tell when its files were written")
        now = storage.now()
        assert written is not None and now is not None and written <= now + 1.0
        assert storage.modified("shards/b") is None

    def test_usable_after_close(self, storage: Storage) -> None:
        write_file(storage, "a", b"0123")
        buffer = bytearray(4)
        storage.read_into("a", 0, memoryview(buffer))
        storage.close()
        storage.read_into("a", 0, memoryview(buffer))
        assert buffer == b"0123"
