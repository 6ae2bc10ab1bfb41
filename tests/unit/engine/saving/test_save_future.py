"""A pending save as a future of `concurrent.futures`."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import pytest
import torch

from shardproof.engine.saving import Saver
from shardproof.engine.saving.background import Workers
from shardproof.errors import ShardproofError, StorageError
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.gate import LIMIT, Gate

STATE = {"w": torch.ones(4)}


def failing(path: Path) -> FaultyStorage:
    return FaultyStorage(LocalStorage(path), 0, StorageError("the disk is gone"), only=("finish",))


def test_a_failure_that_the_future_reported_is_not_raised_by_the_next_save(tmp_path: Path) -> None:
    saver = Saver(LocalRendezvous())
    future = saver.begin(failing(tmp_path / "a"), STATE).future()
    assert wait([future], 60, FIRST_COMPLETED).done == {future}
    assert "the disk is gone" in str(future.exception())
    with pytest.raises(ShardproofError, match="the disk is gone"):
        future.result()
    assert saver.begin(LocalStorage(tmp_path / "b"), STATE).future().result(60).tensors == 1


def test_the_next_save_raises_a_failure_that_no_caller_has_seen(tmp_path: Path) -> None:
    saver = Saver(LocalRendezvous())
    future = saver.begin(failing(tmp_path / "a"), STATE).future()
    wait([future], 60)
    with pytest.raises(ShardproofError, match="the disk is gone"):
        saver.begin(LocalStorage(tmp_path / "b"), STATE)
    assert saver.begin(LocalStorage(tmp_path / "c"), STATE).future().result(60).tensors == 1


def test_a_callback_that_exits_ends_neither_the_thread_nor_other_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, called = Gate(monkeypatch), threading.Event()
    saver = Saver(LocalRendezvous(deadline=5.0))
    future = saver.begin(LocalStorage(tmp_path / "a"), STATE).future()
    future.add_done_callback(lambda done: sys.exit(3))
    future.add_done_callback(lambda done: called.set())
    gate.open()
    assert called.wait(LIMIT)
    assert saver.begin(LocalStorage(tmp_path / "b"), STATE).future().result(LIMIT).tensors == 1
    assert "a callback of a future raised SystemExit(3)" in caplog.text
    with pytest.raises(SystemExit):  # in this thread
        future.add_done_callback(lambda done: sys.exit(3))


def test_a_thread_survives_a_callback_that_exits(caplog: pytest.LogCaptureFixture) -> None:
    workers, go, future = Workers("shardproof-test", 1), threading.Event(), Future[bool]()
    future.add_done_callback(lambda done: sys.exit(3))
    workers.submit(lambda: go.wait(LIMIT), future)
    go.set()
    assert workers.submit(lambda: 42).result(LIMIT) == 42
    assert future.result() and "raised SystemExit(3)" in caplog.text
