"""Which way of writing is chosen, and what is remembered of it."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardproof.errors import StorageError
from shardproof.storage import ALIGNMENT, LocalStorage, aligned_buffer, known, probe, sink
from shardproof.storage.known import Speeds, recall, remember
from shardproof.storage.probe import Probe, Probes, Trial, users_choice

DEVICE = os.makedev(259, 7)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv(probe.VARIABLE, raising=False)
    return folder


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Disk:
    """Takes writes at a speed of each way, in windows a second."""

    def __init__(self, direct: float, buffered: float) -> None:
        self.clock = Clock()
        self.direct, self.buffered = direct, buffered
        self.ways = ""
        self.unflushed = 0

    def wait(self) -> None:
        self.clock.now += self.unflushed / probe.WINDOW / self.buffered
        self.unflushed = 0

    def run(self, trial: Trial, writes: int, count: int = probe.WINDOW // 8) -> None:
        for _ in range(writes):
            self.clock.now += 1000  # making the bytes takes long, and does not count
            with trial.write(count) as direct:
                self.ways += "d" if direct else "b"
                if direct:
                    self.clock.now += count / probe.WINDOW / self.direct
                else:
                    self.unflushed += count


@pytest.mark.parametrize(
    ("direct", "buffered", "expected"), [(10, 5, True), (10, 11, True), (10, 12.4, True), (10, 12.6, False)]
)
def test_the_way_that_proved_faster_is_kept(direct: float, buffered: float, expected: bool) -> None:
    found, disk = Probe(DEVICE), Disk(direct, buffered)
    disk.run(Trial(found, disk.wait, disk.clock), 48)
    way = "d" if expected else "b"
    assert disk.ways == "d" * 8 + "d" * 8 + "b" * 16 + "d" * 8 + way * 8
    assert found.answer is expected
    speeds = recall(DEVICE)
    assert speeds is not None
    assert speeds.direct == pytest.approx(direct * probe.WINDOW)
    assert speeds.buffered == pytest.approx(buffered * probe.WINDOW)


def test_what_was_remembered_is_used_after_the_first_window() -> None:
    remember(DEVICE, Speeds(1e9, 2e9))
    disk = Disk(10, 1)
    disk.run(Trial(Probe(DEVICE), disk.wait, disk.clock), 24)
    assert disk.ways == "d" * 8 + "b" * 16


def test_files_share_a_probe_and_windows_of_several_files_add_up() -> None:
    probes, disk = Probes(), Disk(1, 10)
    for _ in range(5):
        disk.run(Trial(probes.of(DEVICE), disk.wait, disk.clock), 16)
    assert disk.ways == "".join(way * 8 for way in "dddbdbdd" + "bb")
    assert probes.of(DEVICE + 1).answer is None


def test_a_small_file_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: int) -> None:
        raise AssertionError("a small save looked into the cache folder")

    monkeypatch.setattr(probe, "recall", fail)
    disk = Disk(1, 10)
    disk.run(Trial(Probe(DEVICE), disk.wait, disk.clock), 7)
    assert disk.ways == "d" * 7


def test_windows_do_not_overlap() -> None:
    found, clock = Probe(DEVICE), Clock()
    trial = Trial(found, lambda: None, clock)
    lock, inside, mixed = threading.Lock(), [], []

    def write(_: int) -> None:
        with trial.write(probe.WINDOW // 4) as direct:
            with lock:
                inside.append(direct)
                mixed.append(len(set(inside)) > 1 and found.answer is None)
                clock.now += 1
            with lock:
                inside.remove(direct)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(200)))
    assert found.answer is not None
    assert not any(mixed)


def test_a_failed_wait_is_told_and_holds_up_nobody() -> None:
    found, clock = Probe(DEVICE), Clock()

    def fail() -> None:
        raise OSError(5, "Input/output error")

    trial = Trial(found, fail, clock)
    for way in (True, True, False):
        if way:
            with trial.write(probe.WINDOW) as direct:
                assert direct
        else:
            with pytest.raises(OSError, match="Input/output"), trial.write(probe.WINDOW) as direct:
                assert not direct
    with trial.write(1):
        pass


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two blocks, so that a test writes little."""
    monkeypatch.setattr(probe, "WINDOW", 2 * ALIGNMENT)


@pytest.mark.usefixtures("small_windows")
def test_a_file_written_both_ways_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_WORTH", 0.0)  # buffered wins, however slow
    storage = LocalStorage(tmp_path / "root")
    file = storage.within("part").create("a")
    if not file.direct:
        pytest.skip("no unbuffered files here")
    data = aligned_buffer(32 * ALIGNMENT + 77)
    data[:] = os.urandom(len(data))
    direct = []
    original = file._write_direct

    def write_direct(start: int, part: memoryview) -> int:
        direct.append(start)
        return original(start, part)

    monkeypatch.setattr(file, "_write_direct", write_direct)
    with ThreadPoolExecutor(3) as pool:
        cuts = range(0, len(data), ALIGNMENT)
        list(pool.map(lambda at: file.write_at(at, data[at : at + ALIGNMENT]), cuts))
    file.finish(len(data))
    assert storage.read("part/a") == bytes(data)
    assert 4 <= len(direct) < 16
    other = storage.within("other").create("b")
    assert not other.direct, "the answer holds in every part of the storage"
    other.abort()
    assert recall(os.stat(tmp_path).st_dev) is not None


def test_the_user_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(os.stat(tmp_path).st_dev, Speeds(1e9, 9e9))
    can = LocalStorage(tmp_path).create("probe").direct
    for value, direct, expected in [
        ("0", None, False),
        ("1", None, True),
        ("0", True, True),
        ("1", False, False),
        ("", False, False),
    ]:
        monkeypatch.setenv(probe.VARIABLE, value)
        if expected and not can:
            continue
        file = LocalStorage(tmp_path, direct=direct).create("a")
        assert file.direct is expected, (value, direct)
        file.abort()


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("direct", [False, True])
def test_a_choice_of_the_user_is_not_tried_out(tmp_path: Path, direct: bool) -> None:
    if direct and not LocalStorage(tmp_path).create("probe").direct:
        pytest.skip("no unbuffered files here")
    file = LocalStorage(tmp_path, direct=direct).create("a")
    data = aligned_buffer(ALIGNMENT)
    for at in range(32):
        file.write_at(at * ALIGNMENT, data)
        assert file.direct is direct
    file.finish(32 * ALIGNMENT)
    assert recall(os.stat(tmp_path).st_dev) is None


def test_a_choice_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(probe.VARIABLE, "yes")
    with pytest.raises(ValueError, match="SHARDPROOF_DIRECT is 'yes': set it to 1"):
        users_choice()
    with pytest.raises(ValueError, match="SHARDPROOF_DIRECT"):
        LocalStorage(tmp_path).create("a")
    assert LocalStorage(tmp_path).list() == []


def test_a_system_without_the_flag_writes_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "_O_DIRECT", 0)
    file = LocalStorage(tmp_path).create("a")
    assert not file.direct
    file.abort()
    with pytest.raises(StorageError, match="no direct writes"):
        LocalStorage(tmp_path, direct=True).create("b")
    assert LocalStorage(tmp_path).list() == []


class TestMemory:
    def test_file_systems_are_kept_apart(self, cache: Path) -> None:
        remember(1, Speeds(1.0, 2.0))
        remember(2, Speeds(3.0, 4.0))
        assert (recall(1), recall(2), recall(3)) == (Speeds(1.0, 2.0), Speeds(3.0, 4.0), None)
        assert len(list(cache.rglob("*.json"))) == len([p for p in cache.rglob("*") if p.is_file()]) == 1

    def test_it_ends_after_a_week(self, monkeypatch: pytest.MonkeyPatch) -> None:
        remember(1, Speeds(1.0, 2.0))
        now = known.time.time()
        for days, there in [(6.9, True), (7.1, False), (-1, False)]:
            monkeypatch.setattr(known.time, "time", lambda days=days: now + days * 86400)
            assert (recall(1) is not None) is there, days

    def test_it_ends_when_the_node_starts_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        remember(1, Speeds(1.0, 2.0))
        other = tmp_path / "boot"
        other.write_text("another start")
        monkeypatch.setattr(known, "_BOOT", other)
        assert recall(1) is None
        remember(2, Speeds(3.0, 4.0))
        assert recall(1) is None and recall(2) == Speeds(3.0, 4.0)

    def test_nodes_that_share_a_folder_do_not_share_speeds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        remember(1, Speeds(1.0, 2.0))
        monkeypatch.setattr(known.platform, "node", lambda: "../other node")
        assert recall(1) is None

    @pytest.mark.parametrize(
        "damage",
        [
            b"",
            b"\xff\xfe",
            b"[]",
            b"{" * 100_000,
            b"[" * 100_000,
            b'{"boot": 1}',
            "entries",
            "texts",
            "negative",
        ],
    )
    def test_damage_is_measured_again(self, cache: Path, damage: bytes | str) -> None:
        remember(1, Speeds(1.0, 2.0))
        (file,) = cache.rglob("*.json")
        if isinstance(damage, str):
            content = json.loads(file.read_bytes())
            entry = content["file_systems"]["1"]
            if damage == "entries":
                content["file_systems"] = ["1"]
            else:
                entry["direct"] = "fast" if damage == "texts" else -1.0
            damage = json.dumps(content).encode()
        file.write_bytes(damage)
        assert recall(1) is None
        remember(1, Speeds(7.0, 8.0))
        assert recall(1) == Speeds(7.0, 8.0)

    def test_a_folder_that_cannot_be_written_is_done_without(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_bytes(b"")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        remember(1, Speeds(1.0, 2.0))
        assert recall(1) is None

    def test_a_user_without_a_home_is_done_without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("XDG_CACHE_HOME")

        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(known.Path, "home", homeless)
        remember(1, Speeds(1.0, 2.0))
        assert recall(1) is None

    def test_the_home_is_used_where_no_folder_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        remember(1, Speeds(1.0, 2.0))
        assert list((tmp_path / "home" / ".cache" / "shardproof").iterdir())
