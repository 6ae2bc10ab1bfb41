"""The probe chooses direct or buffered writes."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardproof.errors import StorageError
from shardproof.storage import ALIGNMENT, LocalStorage, aligned_buffer, local, probe, sink
from shardproof.storage.probe import Probe, Trial, users_choice

DEVICE = os.makedev(259, 7)


@pytest.fixture(autouse=True)
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has measured no file system, in an environment that makes no choice."""
    monkeypatch.setattr(local, "PROBES", {})
    monkeypatch.delenv(probe.VARIABLE, raising=False)


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Disk:
    """A disk with a speed for direct and one for buffered writes, in windows a second."""

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
            self.clock.now += 1000  # the time between writes does not count
            with trial.write(count) as direct:
                self.ways += "d" if direct else "b"
                if direct:
                    self.clock.now += count / probe.WINDOW / self.direct
                else:
                    self.unflushed += count


@pytest.mark.parametrize(
    ("direct", "buffered", "expected"), [(10, 5, True), (10, 11, True), (10, 12.4, True), (10, 12.6, False)]
)
def test_buffered_writes_are_chosen_only_if_clearly_faster(
    direct: float, buffered: float, expected: bool
) -> None:
    found, disk = Probe(DEVICE), Disk(direct, buffered)
    disk.run(Trial(found, disk.wait, disk.clock), 48)
    way = "d" if expected else "b"
    assert disk.ways == "d" * 8 + "d" * 8 + "b" * 16 + "d" * 8 + way * 8
    assert found.answer is expected


def test_files_share_a_probe_and_windows_of_several_files_add_up() -> None:
    found, disk = Probe(DEVICE), Disk(1, 10)
    for _ in range(5):
        disk.run(Trial(found, disk.wait, disk.clock), 16)
    assert disk.ways == "".join(way * 8 for way in "dddbdbdd" + "bb")


def test_a_small_file_is_not_measured() -> None:
    found, disk = Probe(DEVICE), Disk(1, 10)
    disk.run(Trial(found, disk.wait, disk.clock), 7)
    assert disk.ways == "d" * 7
    assert found.answer is None


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


def test_a_failed_wait_is_raised_and_blocks_no_later_write() -> None:
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
    monkeypatch.setattr(probe, "_MIN_GAIN", 0.0)  # buffered wins, however slow
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
    again = LocalStorage(tmp_path / "another").create("c")
    assert not again.direct, "and in every storage of the process"
    again.abort()
    answers = {device: found.answer for device, found in local.PROBES.items()}
    assert answers == {tmp_path.stat().st_dev: False}, "but not for other devices"


def test_the_choice_of_the_user_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_nothing_is_measured_where_the_user_chose(tmp_path: Path, direct: bool) -> None:
    if direct and not LocalStorage(tmp_path).create("probe").direct:
        pytest.skip("no unbuffered files here")
    file = LocalStorage(tmp_path, direct=direct).create("a")
    data = aligned_buffer(ALIGNMENT)
    for at in range(32):
        file.write_at(at * ALIGNMENT, data)
        assert file.direct is direct
    file.finish(32 * ALIGNMENT)


def test_an_invalid_choice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(probe.VARIABLE, "yes")
    with pytest.raises(ValueError, match="SHARDPROOF_DIRECT is 'yes': set it to 1"):
        users_choice()
    with pytest.raises(ValueError, match="SHARDPROOF_DIRECT"):
        LocalStorage(tmp_path).create("a")
    assert LocalStorage(tmp_path).list() == []


def test_a_system_without_the_flag_writes_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "O_DIRECT", 0)
    file = LocalStorage(tmp_path).create("a")
    assert not file.direct
    file.abort()
    with pytest.raises(StorageError, match="no direct writes"):
        LocalStorage(tmp_path, direct=True).create("b")
    assert LocalStorage(tmp_path).list() == []
