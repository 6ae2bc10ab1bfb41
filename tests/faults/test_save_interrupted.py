"""An interrupt on one rank never removes a file of a checkpoint that the others commit."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.saving import Saver
from shardproof.maintenance import verify
from shardproof.rendezvous import StoreRendezvous
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.harness import Job, rank, reach, rendezvous, run_ranks


def _state(value: float) -> dict[str, Any]:
    mine = torch.full((1000,), value)
    return {"w": sp.LocalShards((2000,), [(mine, (1000 * rank(),))])}


def _save_held(folder: str, overwrite: bool) -> str:
    """Rank 0 is held in its write. Rank 1 has written, and waits for the answer when its signal comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    meeting: StoreRendezvous = rendezvous(deadline=20)
    saver = Saver(meeting)
    if overwrite:
        saver.save(LocalStorage(folder), _state(1))
    storage: Any = LocalStorage(folder)
    if rank() == 0:
        storage = FaultyStorage(storage, 0, lambda *_: reach("a write"), only=("write_at",))
    elif rank() == 1:
        storage = _ReportsFinish(storage)
    try:
        saver.save(storage, _state(2), overwrite=overwrite)
    except SystemExit as caught:
        os._exit(caught.code)  # without the functions of `atexit`: that of shardproof waits for the save
    return "committed"


class _ReportsFinish(FaultyStorage):
    """Tells the parent when this rank finishes its shard. Then the rank waits for the others."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, 0, lambda *_: reach("finishing"), only=("finish",))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rank_that_exits_while_it_waits_leaves_a_whole_checkpoint(overwrite: bool, tmp_path: Path) -> None:
    def script(job: Job) -> None:
        job.until_held(0, "a write")
        job.until_held(1, "finishing")
        job.go(1)
        shards = tmp_path / "c" / "shards"
        while len([item for item in shards.iterdir() if item.name.startswith("00001-")]) < 1 + overwrite:
            job.pump(0.05)
        # The rank posts and waits. An earlier signal finds it in its own work, which is a valid case, too.
        job.pump(0.5)
        job.signal(1, signal.SIGTERM)
        job.until_done(1)
        job.go(0)

    outcomes = run_ranks(
        2,
        _save_held,
        str(tmp_path / "c"),
        overwrite,
        hold={0: "a write", 1: "finishing"},
        script=script,
        timeout=60,
    )
    assert outcomes[1].exit_code == 3
    if outcomes[0].error is None:
        assert outcomes[0].value == "committed"
    else:  # the signal was early, and rank 1 reported it; a removed file would be another error
        assert "SystemExit" in str(outcomes[0].error)
    if outcomes[0].error is None or overwrite:
        assert verify(LocalStorage(tmp_path / "c")).faults == []


def _save_apart(folder: str) -> str:
    """Saves to a folder of this rank alone, whose location is the same on all ranks."""
    meeting = rendezvous(deadline=10)
    storage = LocalStorage(f"{folder}/{rank()}")
    named = _SameLocation(storage.path)
    try:
        Saver(meeting).save(named, _state(1))
    except sp.RankFailure as error:
        return error.message
    return "committed"


class _SameLocation(LocalStorage):
    location = "/scratch/run"


def test_a_storage_that_is_not_shared_is_refused_before_the_commit(tmp_path: Path) -> None:
    for outcome in run_ranks(2, _save_apart, str(tmp_path), timeout=60):
        assert "check that all nodes share this storage" in outcome.value
    assert not list(tmp_path.rglob("manifest.json"))
