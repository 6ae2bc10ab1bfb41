"""Work of the coordinator that follows the commit, before any rank gets the result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.engine.saving import Saver, SaveRequest
from shardproof.errors import RankFailure
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage

STATE = {"w": torch.ones(4)}


def test_it_sees_the_committed_checkpoint_and_precedes_the_end_of_the_save(tmp_path: Path) -> None:
    calls = []

    def on_commit() -> None:
        calls.append(f"on_commit {sp.open(tmp_path)['w'].read().sum():g}")

    saver = Saver(LocalRendezvous())
    pending = saver.begin(
        LocalStorage(tmp_path),
        STATE,
        SaveRequest(on_commit=on_commit),
        after=lambda *_: calls.append("after"),
    )
    assert pending.result(60).tensors == 1
    assert calls == ["on_commit 4", "after"]


def test_its_error_is_that_of_the_save_and_the_checkpoint_stays(tmp_path: Path) -> None:
    def on_commit() -> None:
        raise OSError("the disk is gone")

    saver = Saver(LocalRendezvous())
    with pytest.raises(
        RankFailure, match=r"committed, but rank 0 failed .*: OSError: the disk is gone"
    ) as caught:
        saver.save(LocalStorage(tmp_path), STATE, on_commit=on_commit)
    assert caught.value.details["committed"] is True
    assert sp.open(tmp_path)["w"].read().sum() == 4
    assert saver.save(LocalStorage(tmp_path), STATE, overwrite=True).tensors == 1
