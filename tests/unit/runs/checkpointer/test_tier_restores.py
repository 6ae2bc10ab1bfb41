"""Restores of a run with two tiers: the newest step, the nearest copy."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.storage import LocalStorage, MemoryStorage
from tests.faulty_storage import FaultyStorage
from tests.in_memory import private_tmpfs
from tests.unit.runs.checkpointer.two_tiers import (
    WAIT,
    assert_restores,
    blank,
    checkpointer,
    flip,
    remove,
    state,
)


def test_restore_takes_the_nearest_tier_and_the_newest_step(near: Path, far: Path) -> None:
    run = checkpointer(near, far)
    for step in (1, 2):
        run.save(step, state(step)).durable(WAIT)
    assert assert_restores(run, 2).tier == str(near)
    remove(near / "step-00000002")
    restored = assert_restores(checkpointer(near, far), 2)
    assert restored.tier == str(far)
    remove(near)
    assert assert_restores(checkpointer(near, far), 2).tier == str(far)
    assert checkpointer(near, far).steps() == [1, 2]


@pytest.mark.parametrize("what", ["manifest", "index", "chunk", "cut", "missing"])
def test_damaged_files_of_the_first_tier_are_read_from_the_second(
    what: str, near: Path, far: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = checkpointer(near, far)
    for step in (1, 2):
        run.save(step, state(step)).durable(WAIT)
    folder = near / "step-00000002"
    (shard,) = (folder / "shards").iterdir()
    if what == "manifest":
        flip(folder / "manifest.json", 100)
    elif what == "index":
        flip(next(folder.glob("index-*")), 50)
    elif what == "chunk":
        flip(shard, shard.stat().st_size // 2)
    elif what == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        shard.unlink()
    again = checkpointer(near, far)
    with caplog.at_level(logging.WARNING, "shardproof"):
        restored = assert_restores(again, 2)
    assert restored.tier == str(far if what == "manifest" else near)
    (passed,) = restored.passed_over
    assert passed.step == 2 and passed.tier == str(near) and passed.damaged
    assert f"step 2 on {near} is passed over" in caplog.text
    again.wait_for_uploads(WAIT)
    assert verify(LocalStorage(far / "step-00000002")).ok


def test_the_second_tier_is_restored_if_the_first_one_in_memory_is_lost(
    far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "memory://run"
    with private_tmpfs(monkeypatch):
        run = checkpointer(url, far)
        for step in (1, 2):
            run.save(step, state(step)).durable(WAIT)
        memory = MemoryStorage(url)
        assert assert_restores(checkpointer(url, far), 2).tier == memory.location
        assert memory.drop()
        assert assert_restores(checkpointer(url, far), 2).tier == str(far)


def test_damage_of_both_tiers_falls_back_to_the_older_step(near: Path, far: Path) -> None:
    run = checkpointer(near, far)
    for step in (1, 2):
        run.save(step, state(step)).durable(WAIT)
    for root in (near, far):
        (shard,) = (root / "step-00000002" / "shards").iterdir()
        flip(shard, shard.stat().st_size // 2)
    restored = assert_restores(checkpointer(near, far), 1)
    assert {(item.step, item.tier) for item in restored.passed_over} == {(2, "")}


@pytest.mark.parametrize("step", [2, None])
def test_a_copy_that_vanishes_during_the_restore_is_read_on_the_other_tier(
    step: int | None, near: Path, far: Path
) -> None:
    """The copy vanishes at each operation on the first tier in turn."""
    run = checkpointer(near, far)
    for number in (1, 2):
        run.save(number, state(number)).durable(WAIT)
    at = operations = 0
    while at <= operations:
        root = near.with_name(f"near {at}")  # uploads of the restored run may still use it in the background
        shutil.copytree(near, root)
        first = FaultyStorage(LocalStorage(root), at, lambda *_, root=root: remove(root / "step-00000002"))
        target = blank()
        restored = checkpointer(first, far).restore(target, step=step)
        operations = len(first.operations)
        assert (restored, target["n"]) == (2, 2), f"operation {at}"
        at += 1
    assert at > 10


def test_damage_at_two_places_of_a_file_loses_only_steps_that_need_both(near: Path, far: Path) -> None:
    """A file that three steps share is damaged in "a" on the first tier, and in "b" on the second."""
    options = {"incremental": sp.Incremental(scrub=None, full_every=None)}
    fixed = {"a": torch.arange(3000.0), "b": torch.arange(4000.0) + 0.5}
    run = checkpointer(near, far, **options)
    for step, saved in ((1, fixed), (3, fixed), (2, {**fixed, "a": torch.ones(3000)})):
        run.save(step, saved).result()
    run.wait_for_uploads(WAIT)
    for root, key in ((near, "a"), (far, "b")):
        (shard,) = (root / "step-00000001" / "shards").iterdir()
        flip(shard, shard.read_bytes().index(fixed[key].numpy().tobytes()))
    target = {"a": torch.zeros(3000), "b": torch.zeros(4000)}
    assert checkpointer(near, far, **options).restore(target) == 2
    assert torch.equal(target["a"], torch.ones(3000)) and torch.equal(target["b"], fixed["b"])


def test_the_best_step_is_found_on_any_tier(near: Path, far: Path) -> None:
    run = checkpointer(near, far, keep=sp.KeepLatest(1) | sp.KeepBest("loss"))
    for step, loss in ((1, 0.1), (2, 0.5)):
        run.save(step, state(step), metadata={"loss": loss}).durable(WAIT)
    remove(near / "step-00000001")
    target = blank()
    assert run.restore(target, step="best") == 1 and target["n"] == 1


class RemoteFolder(LocalStorage):
    """A folder that stands for a bucket: a load reads it in requests."""

    is_remote = True

    def read_buffer(self, name: str, start: int, count: int) -> memoryview:
        """Reads a range into new memory."""
        buffer = memoryview(bytearray(count))
        LocalStorage.read_into(self, name, start, buffer)
        return buffer

    def within(self, prefix: str) -> RemoteFolder:
        """The storage in a folder."""
        return RemoteFolder(self._path(prefix))

    def sibling(self, folder: str) -> RemoteFolder:
        """The storage in a sibling folder."""
        return RemoteFolder(self._root.parent / folder)


def test_a_step_whose_files_lie_on_a_disk_and_in_a_bucket_is_restored(tmp_path: Path) -> None:
    run = sp.Checkpointer(tmp_path / "near", second_tier=RemoteFolder(tmp_path / "far"), incremental=True)
    whole = torch.randn(1 << 18)
    for step in (1, 2):
        run.save(step, {"a": whole, "b": torch.full((1 << 17,), float(step))}).durable(60)
    (shard,) = (tmp_path / "near" / "step-00000002" / "shards").iterdir()
    shard.write_bytes(shard.read_bytes()[:-100] + bytes(100))
    target = {"a": torch.zeros(1 << 18), "b": torch.zeros(1 << 17)}
    assert run.restore(target) == 2
    assert torch.equal(target["a"], whole) and target["b"].eq(2).all()
