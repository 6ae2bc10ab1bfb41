"""Small requests to a remote storage run in parallel."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import FileRecord, check_sizes
from shardproof.engine.storage import LocalStorage, file_sizes, map_requests, remote_requests
from shardproof.errors import StorageError
from tests.gate import LIMIT
from tests.thread_limit import limit_threads


class Remote(LocalStorage):
    """A folder with the interface of a remote storage."""

    is_remote = True


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
from shardproof.engine.storage import map_requests
from tests.unit.engine.storage.test_remote_requests import Remote
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


class Reversed(ThreadPoolExecutor):
    """Begins the last task first, as a system may that suspends the other threads."""

    def __init__(self, *args: Any) -> None:
        super().__init__(1)
        self.tasks: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Future[Any]:
        self.tasks.append((Future(), partial(work, *args, **options)))
        if len(self.tasks) == 2:
            for future, task in reversed(self.tasks):
                try:
                    future.set_result(task())
                except BaseException as error:
                    future.set_exception(error)
        return self.tasks[-1][0]


def test_the_first_failed_request_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_requests, "ThreadPoolExecutor", Reversed)

    def fail(number: int) -> None:
        raise StorageError(f"request {number}")

    with pytest.raises(StorageError, match="request 0"):
        list(map_requests(Remote(tmp_path), fail, range(2)))


def meeting_threads(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first `count` threads that ask for the size of a shard file wait for each other."""
    together = threading.Barrier(count)
    size = LocalStorage.size
    threads: set[int] = set()

    def asked(folder: LocalStorage, name: str) -> int | None:
        if name.startswith("shards/") and threading.get_ident() not in threads and len(threads) < count:
            threads.add(threading.get_ident())
            together.wait(LIMIT)
        return size(folder, name)

    monkeypatch.setattr(LocalStorage, "size", asked)


def test_sizes_of_many_files_are_asked_for_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LocalStorage(str(tmp_path))
    (tmp_path / "shards").mkdir()
    for number in range(0, 512, 3):
        (tmp_path / f"shards/{number}").write_bytes(b"x" * number)
    meeting_threads(32, monkeypatch)
    sizes = file_sizes([(folder, f"shards/{number}") for number in range(512)])
    assert sizes == [None if number % 3 else number for number in range(512)]


def test_sizes_in_a_remote_storage_are_asked_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting_threads(5, monkeypatch)
    assert file_sizes([(Remote(str(tmp_path)), f"shards/{number}") for number in range(5)]) == [None] * 5


def test_commit_and_restore_ask_for_all_sizes_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = LocalStorage.size
    alone: list[str] = []

    def asked(folder: LocalStorage, name: str) -> int | None:
        if name.startswith("shards/") and not threading.current_thread().name.startswith(
            "shardproof-requests"
        ):
            alone.append(name)
        return size(folder, name)

    tensors = {f"layer.{number}": torch.full((1 << 17,), -1.0) for number in range(24)}
    checkpointer = sp.Checkpointer(
        tmp_path, incremental=sp.Incremental(full_every=100, scrub=None), cache="none"
    )
    for step, tensor in enumerate(tensors.values()):
        tensor.fill_(step)
        if step == 23:  # the last manifest names a file of each step
            monkeypatch.setattr(LocalStorage, "size", asked)
        checkpointer.save(step, tensors).result()
    assert checkpointer.restore(tensors) == 23
    assert [tensor[0].item() for tensor in tensors.values()] == list(range(24))
    assert not alone


def test_the_error_names_the_file_without_its_size(tmp_path: Path) -> None:
    folder = LocalStorage(str(tmp_path))
    records = [FileRecord(f"shards/{number}", 4, "", 0, number) for number in range(64)]
    (tmp_path / "shards").mkdir()
    for record in records:
        (tmp_path / record.name).write_bytes(b"four")
    files = [(folder, record) for record in records]
    check_sizes(files)
    (tmp_path / "shards/41").write_bytes(b"six...")
    (tmp_path / "shards/50").unlink()
    with pytest.raises(StorageError, match=r"shards/41: expected 4 bytes, it has 6. Ask rank 41"):
        check_sizes(files, lambda record: f"Ask rank {record.rank}")
