"""Small requests to a remote storage run in parallel."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardproof.storage import LocalStorage, map_requests
from tests.gate import LIMIT
from tests.thread_limit import limit_threads


class Remote(LocalStorage):
    """A folder with the interface of a remote storage."""

    def read_buffer(self, name: str, start: int, count: int) -> memoryview:
        raise NotImplementedError

    def with_contents(self, files: object) -> Remote:
        return self


def test_requests_to_a_remote_storage_are_in_flight_together(tmp_path: object) -> None:
    together = threading.Barrier(8)

    def request(number: int) -> int:
        together.wait(LIMIT)
        return -number

    assert list(map_requests(Remote(str(tmp_path)), request, range(8))) == [-number for number in range(8)]


def test_requests_to_a_folder_run_in_this_thread(tmp_path: object) -> None:
    threads = map_requests(LocalStorage(str(tmp_path)), lambda number: threading.current_thread(), range(8))
    assert set(threads) == {threading.current_thread()}


def test_the_first_error_is_raised_and_its_threads_end(tmp_path: object) -> None:
    before = threading.active_count()

    def request(number: int) -> int:
        if number >= 3:
            raise OSError(number)
        return number

    results = map_requests(Remote(str(tmp_path)), request, range(100))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="^3$"):
        next(results)
    assert threading.active_count() == before


AT_EXIT = """
import atexit, sys
from shardproof.storage import map_requests
from tests.unit.storage.test_remote_requests import Remote
atexit.register(lambda: print(list(map_requests(Remote(sys.argv[1]), lambda number: -number, range(20)))))
"""


def test_requests_at_the_end_of_the_interpreter_run_in_one_thread(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert ended.stdout == f"{[-number for number in range(20)]}\n" and not ended.stderr


@pytest.mark.parametrize("threads", [0, 3])
def test_requests_without_enough_threads_are_all_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    limit_threads(monkeypatch, threads)
    assert list(map_requests(Remote(tmp_path), lambda number: -number, range(20))) == [
        -number for number in range(20)
    ]
