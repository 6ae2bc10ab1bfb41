"""A pending save as a future of `concurrent.futures`."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path

import pytest
import torch

from shardproof.errors import ShardproofError, StorageError
from shardproof.rendezvous import LocalRendezvous
from shardproof.saving import Saver
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage

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
