"""Second tiers that do not answer."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

import shardproof as sp
from shardproof.rendezvous import StoreRendezvous
from shardproof.runs.checkpointer import open_run
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.unit.runs.checkpointer.two_tiers import (
    WAIT,
    Silent,
    alone,
    assert_restores,
    blank,
    checkpointer,
    state,
)


def test_a_restore_without_the_second_tier_logs_its_wait_and_names_the_way_out(
    near: Path, far: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_run, "_LOG_SECONDS", 0.01)
    checkpointer(near, far).save(1, state(1)).durable(WAIT)
    alone(near).save(2, state(2)).result()
    second, told = Silent(far), threading.Event()
    second.wait = lambda request: told.wait(WAIT)

    def emit(record: logging.LogRecord) -> None:
        if "waits for the second tier" in record.getMessage():
            told.set()

    monkeypatch.setattr(caplog.handler, "emit", emit)
    with pytest.raises(
        sp.StorageError, match=f"restore the newest step of {near} now, leave out second_tier="
    ):
        checkpointer(near, second).restore(blank())
    assert told.is_set(), "the wait is logged"
    monkeypatch.undo()
    assert_restores(sp.Checkpointer(near), 2)
    again = checkpointer(near, far)
    assert_restores(again, 2)
    again.wait_for_uploads(WAIT)
    assert alone(far).steps() == [1, 2]


def test_all_ranks_wait_for_a_tier_at_the_same_time(near: Path, far: Path) -> None:
    store, asked = HashStore(), threading.Barrier(2)

    def restore(rank: int) -> str:
        second = Silent(far)
        second.wait = lambda request: asked.wait(WAIT)
        rendezvous = StoreRendezvous(store, rank, 2, deadline=WAIT)
        with pytest.raises(sp.StorageError) as caught:
            sp.Checkpointer(near, second_tier=second, rendezvous=rendezvous).restore(blank())
        return caught.value.message

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(restore, range(2))
    assert first == other and "no answer" in first and "leave out second_tier=" in first


def test_a_tier_that_does_not_answer_one_rank_is_not_asked_by_another(near: Path, far: Path) -> None:
    """Rank 1 gets no answer when it reads a shard, and rank 0 does not begin another choice of a step."""
    checkpointer(near, far).save(1, state(1)).durable(WAIT)
    shutil.rmtree(near / "step-00000001")
    store, asked = HashStore(), []

    class Counted(LocalStorage):
        def size(self, name: str) -> int | None:
            asked.append(name)
            return super().size(name)

    def fault(operation: str, name: str) -> None:
        if "/shards/" in name and operation.startswith("read"):
            raise sp.StorageError("no answer", file=f"{far}/{name}", damaged=False, unanswered=True)

    seconds = [Counted(far), FaultyStorage(LocalStorage(far), lambda: True, fault)]

    def restore(rank: int) -> str:
        rendezvous = StoreRendezvous(store, rank, 2, deadline=WAIT)
        with pytest.raises(sp.StorageError) as caught:
            sp.Checkpointer(near, second_tier=seconds[rank], rendezvous=rendezvous).restore(blank())
        return caught.value.message

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(restore, range(2))
    assert first == other and "rank 1: no answer" in first and "leave out second_tier=" in first
    assert asked == ["manifest.json"]


def test_a_second_tier_that_cannot_be_listed_is_an_error(near: Path, far: Path) -> None:
    alone(near).save(1, state(1)).result()

    class _Down(LocalStorage):
        def folders(self) -> list[str]:
            raise sp.StorageError("no route to host")

    with pytest.raises(sp.StorageError, match="no route to host"):
        checkpointer(near, _Down(far)).restore(blank())


def test_a_first_restore_that_fails_keeps_the_ranks_in_step(near: Path, far: Path) -> None:
    alone(near).save(1, state(1)).result()
    down = [True]
    fault = sp.StorageError("no route to host", errno="EHOSTUNREACH")
    second = FaultyStorage(LocalStorage(far), lambda: down[0], fault)
    store = HashStore()
    ranks = [StoreRendezvous(store, rank, 2, deadline=30.0) for rank in range(2)]
    runs = [sp.Checkpointer(near, second_tier=second, rendezvous=one, cache="none") for one in ranks]
    with ThreadPoolExecutor(2) as pool:

        def on_ranks(work: Callable[[sp.Checkpointer], Any]) -> list[Any]:
            futures = [pool.submit(work, run) for run in runs]
            return [future.exception(WAIT) or future.result() for future in futures]

        for error in on_ranks(lambda run: run.restore(blank(), step=1)):
            assert isinstance(error, sp.StorageError) and "no route" in str(error)
        down[0] = False
        assert on_ranks(lambda run: run.restore(blank(), step=1)) == [1, 1]
        assert on_ranks(lambda run: run.wait_for_uploads(WAIT)) == [None, None]
    for one in ranks:
        one.close()
    assert alone(far).steps() == [1]
