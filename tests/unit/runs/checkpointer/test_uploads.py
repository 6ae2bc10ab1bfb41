"""Uploads to a second tier in one process."""

from __future__ import annotations

import logging
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import shardproof as sp
from shardproof.engine.format import read_manifest
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous, StoreRendezvous
from shardproof.runs.checkpointer.tiers import Uploader
from shardproof.runs.checkpointer.tiers.uploader import Throttle
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.unit.runs.checkpointer.two_tiers import (
    WAIT,
    alone,
    assert_restores,
    checkpointer,
    files,
    flip,
    remove,
    state,
    unreachable,
)


def test_the_second_tier_has_the_same_files_and_is_a_checkpoint(near: Path, far: Path) -> None:
    run = checkpointer(near, far)
    pending = run.save(7, state(7))
    assert pending.durable(WAIT) == pending.result()
    assert files(near) == files(far)
    assert verify(LocalStorage(far / "step-00000007")).ok
    with sp.open(far / "step-00000007") as opened:
        assert opened["n"] == 7
    assert_restores(alone(far), 7)


def test_a_step_that_was_not_uploaded_is_uploaded_by_the_next_process(near: Path, far: Path) -> None:
    for step in (1, 2):
        alone(near).save(step, state(step)).result()
    run = checkpointer(near, far)
    assert_restores(run, 2)
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [1, 2]
    assert files(near) == files(far)


def test_a_failure_of_the_second_tier_does_not_affect_the_first(
    near: Path, far: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = sp.StorageError("the disk is full", errno="ENOSPC")
    second = FaultyStorage(LocalStorage(far), 0, full, only=("write_at",))
    run = checkpointer(near, second)
    with caplog.at_level(logging.ERROR, "shardproof"):
        pending = run.save(1, state(1))
        assert pending.result().step == 1
        with pytest.raises(sp.StorageError, match="the disk is full"):
            pending.durable(WAIT)
    assert "the next save tries it again" in caplog.text
    with pytest.raises(sp.StorageError, match="the disk is full"):
        run.wait_for_uploads(WAIT)
    assert alone(far).steps() == []
    run.save(2, state(2)).durable(WAIT)
    pending.durable(WAIT)
    assert alone(far).steps() == [1, 2]
    assert files(near) == files(far)


@pytest.mark.parametrize("what", ["manifest", "index", "lost index", "chunk"])
def test_damage_of_the_first_tier_is_not_uploaded(what: str, near: Path, far: Path) -> None:
    """The older steps, which wait behind the damaged one, are uploaded."""
    alone(near).save(1, state(1)).result()
    alone(near).save(2, state(2)).result()
    folder = near / "step-00000002"
    (shard,), (index,) = (folder / "shards").iterdir(), folder.glob("index-*")
    if what == "lost index":
        index.unlink()
    else:
        damaged = {"manifest": folder / "manifest.json", "index": index, "chunk": shard}[what]
        flip(damaged, damaged.stat().st_size // 2)
    run = checkpointer(near, far)
    run.save(3, state(3)).durable(WAIT)
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [1, 3]
    for step in (1, 3):
        assert verify(LocalStorage(far / f"step-0000000{step}")).ok


@pytest.mark.parametrize("left", [0, 100])
def test_a_manifest_that_is_cut_on_the_second_tier_is_written_again(left: int, near: Path, far: Path) -> None:
    checkpointer(near, far).save(1, state(1)).durable(WAIT)
    manifest = far / "step-00000001" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:left])
    run = checkpointer(near, far)
    restored = assert_restores(run, 1)
    (passed,) = restored.passed_over
    assert (passed.tier, passed.damaged) == (str(far), False)  # a save of this step must not replace it
    run.wait_for_uploads(WAIT)
    assert files(near) == files(far)


def test_bytes_that_change_between_read_and_write_are_not_uploaded(near: Path, far: Path) -> None:
    """In a chunk of one block, so that no table of the file depends on its bytes: only its digest does."""

    class _Flips(LocalStorage):
        def within(self, prefix: str) -> _Flips:
            return _Flips(self.path / prefix)

        def read_into(self, name: str, start: int, buffer: memoryview) -> None:
            super().read_into(name, start, buffer)
            buffer[len(buffer) // 2] ^= 1

    pending = checkpointer(_Flips(near), far).save(1, {"w": torch.arange(64.0)})
    with pytest.raises(sp.SaveSkipped, match="it is damaged in"):
        pending.durable(WAIT)
    assert alone(far).steps() == []
    again = checkpointer(near, far)
    assert again.restore({"w": torch.zeros(64)}) == 1
    again.wait_for_uploads(WAIT)
    assert alone(far).steps() == [1]


def test_files_of_a_killed_upload_are_read_again(near: Path, far: Path) -> None:
    for step in (1, 2):
        alone(near).save(step, state(step)).result()
    for step, byte in ((1, 0), (2, 1)):  # one is whole; the other has a byte that never reached the disk
        source = LocalStorage(near / f"step-0000000{step}")
        (record,) = read_manifest(source).files
        data = bytearray(source.read(record.name))
        data[len(data) // 2] ^= byte
        LocalStorage(far / f"step-0000000{step}").publish(record.name, bytes(data))
    counted = FaultyStorage(LocalStorage(far), only=("create",))
    run = checkpointer(near, counted)
    assert_restores(run, 2)
    run.wait_for_uploads(WAIT)
    created = [name for _, name in counted.operations if "shards" in name]
    assert len(created) == 1 and created[0].startswith("step-00000002")
    assert files(near) == files(far)


def test_files_that_steps_refer_to_are_uploaded_once(near: Path, far: Path) -> None:
    fixed = torch.arange(300_000.0)
    options = {"incremental": sp.Incremental(scrub=None), "keep": sp.KeepLatest(1)}
    near_only = sp.Checkpointer(near, rendezvous=LocalRendezvous(), **options)
    for step in (1, 2):
        near_only.save(step, {"fixed": fixed, "w": torch.full((4,), float(step))}).result()
    counted = FaultyStorage(LocalStorage(far), only=("create",))
    run = checkpointer(near, counted, **options)
    for step in (3, 4):
        run.save(step, {"fixed": fixed, "w": torch.full((4,), float(step))}).durable(WAIT)
    created = [name for _, name in counted.operations if "shards" in name]
    assert len(created) == len(set(created))
    assert any(name.startswith("step-00000001/") for name in created)
    assert verify(LocalStorage(far / "step-00000004")).ok
    remove(near)
    target = {"fixed": torch.zeros(300_000), "w": torch.zeros(4)}
    assert checkpointer(near, far).restore(target) == 4
    assert torch.equal(target["fixed"], fixed) and target["w"].tolist() == [4.0] * 4


def test_files_copied_for_a_newer_step_are_not_read_again(near: Path, far: Path) -> None:
    """After an outage, the newest waiting step is uploaded first, with the files of older steps."""
    second, down = unreachable(far, True)
    run = checkpointer(near, second, incremental=sp.Incremental(scrub=None))
    fixed = torch.arange(300_000.0)
    for step in (1, 2, 3):
        run.save(step, {"fixed": fixed, "w": torch.full((4,), float(step))}).result()
    with pytest.raises(sp.StorageError, match="no route"):
        run.wait_for_uploads(WAIT)
    down[0] = False
    before = len(second.operations)
    run.save(4, {"fixed": fixed, "w": torch.full((4,), 4.0)}).durable(WAIT)
    run.wait_for_uploads(WAIT)
    done = second.operations[before:]
    shards = [(operation, name) for operation, name in done if "shards/" in name]
    assert len({name for operation, name in shards if operation == "create"}) == 4
    assert not [name for operation, name in shards if "read" in operation]
    assert alone(far).steps() == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        assert verify(LocalStorage(far / f"step-0000000{step}")).ok


def test_damaged_files_that_a_later_step_kept_are_repaired_by_an_upload(near: Path, far: Path) -> None:
    fixed = torch.arange(300_000.0)
    run = checkpointer(near, far, incremental=sp.Incremental(scrub=None), keep_far=sp.KeepLatest(1))
    run.save(1, {"fixed": fixed}).durable(WAIT)
    (shard,) = (far / "step-00000001" / "shards").iterdir()
    flip(shard, shard.stat().st_size // 2)
    run.save(2, {"fixed": fixed}).durable(WAIT)
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [2]
    assert shard.exists()  # step 2 refers to it
    again = checkpointer(near, far, incremental=sp.Incremental(scrub=None), keep_far=sp.KeepLatest(1))
    assert again.restore({"fixed": torch.zeros(300_000)}, step=1) == 1
    again.wait_for_uploads(WAIT)
    assert alone(far).steps() == [1, 2]
    for step in (1, 2):
        assert verify(LocalStorage(far / f"step-0000000{step}")).ok


def test_a_check_of_uploaded_files_shows_signs_of_life(near: Path, far: Path) -> None:
    """Rank 1 reads a file of a killed upload for longer than the deadline."""
    store, deadline = HashStore(), 3.0

    class Slow(LocalStorage):
        def within(self, prefix: str) -> Slow:
            return Slow(self.path / prefix)

        def read_into(self, name: str, start: int, buffer: memoryview) -> None:
            if name.startswith("shards/00001"):
                threading.Event().wait(len(buffer) / (2 << 20))  # 2 MiB a second
            super().read_into(name, start, buffer)

    def of_rank(rank: int) -> dict[str, Any]:
        return {"w": sp.PerRank(torch.arange((12 if rank else 1) * (1 << 18), dtype=torch.float32))}

    def work(rank: int) -> None:
        rendezvous = StoreRendezvous(store, rank, 2, deadline=deadline)
        sp.Checkpointer(near, rendezvous=rendezvous, cache="none").save(1, of_rank(rank)).result()
        if rank == 0:
            shutil.copytree(near / "step-00000001" / "shards", far / "step-00000001" / "shards")
        run = sp.Checkpointer(near, second_tier=Slow(far), rendezvous=rendezvous, cache="none")
        run.restore(of_rank(rank))
        run.wait_for_uploads(WAIT)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, rank) for rank in range(2)]:
            future.result(WAIT)
    assert alone(far).steps() == [1]


def test_a_step_that_a_run_without_a_second_tier_overwrote_is_named_after_a_restart(
    near: Path, far: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run did not ask to replace the step on a second tier."""
    checkpointer(near, far).save(1, state(1)).durable(WAIT)
    alone(near).save(1, state(2), overwrite=True).result()
    run = checkpointer(near, far)
    run.save(3, state(3)).durable(WAIT)
    run.save(4, state(4)).durable(WAIT)
    run.wait_for_uploads(WAIT)
    named = [record for record in caplog.records if "step 1 is not uploaded" in record.getMessage()]
    assert len(named) == 1 and "another save of this step" in named[0].getMessage()


def test_all_ranks_of_an_upload_together_stay_within_the_bandwidth(
    near: Path, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a clock of its own, which only the throttle moves. Both clocks begin at 0."""
    bandwidth, ranks = 100_000, 2
    clocks = [[0.0] for _ in range(ranks)]
    sent: list[tuple[float, int]] = []

    class _Recording(LocalStorage):
        """Records when the bytes of a rank are passed to the upload."""

        clock: list[float]

        def within(self, prefix: str) -> _Recording:
            inner = _Recording(self.path / prefix)
            inner.clock = self.clock
            return inner

        def read_into(self, name: str, start: int, buffer: memoryview) -> None:
            sent.append((self.clock[0], len(buffer)))
            super().read_into(name, start, buffer)

    def of_rank(rank: int) -> sp.Checkpointer:
        clock, first = clocks[rank], _Recording(near)
        first.clock = clock

        def sleep(seconds: float) -> None:
            clock[0] += seconds

        timed = partial(Uploader, clock=lambda: clock[0], sleep=sleep)
        monkeypatch.setattr("shardproof.runs.checkpointer.checkpointer.Uploader", timed)
        rendezvous = StoreRendezvous(store, rank, ranks, deadline=30.0)
        return sp.Checkpointer(
            first, second_tier=sp.SecondTier(far, bandwidth=bandwidth), rendezvous=rendezvous, cache="none"
        )

    def save(rank: int) -> None:
        rows = (0, 6000) if rank == 0 else (6000, 8000)  # three quarters of the bytes, and one
        part = torch.arange(float(rows[0]), float(rows[1]))
        whole = sp.LocalShards((8000, 32), [(part[:, None].repeat(1, 32), (rows[0], 0))], dtype=part.dtype)
        runs[rank].save(1, {"w": whole}).durable(WAIT)

    store = HashStore()
    runs = [of_rank(rank) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(save, range(ranks)))
    total, piece = sum(count for _, count in sent), max(count for _, count in sent)
    assert total == 8000 * 32 * 4
    sent.sort()
    for at, (begin, _) in enumerate(sent):
        bytes_since = 0
        for moment, count in sent[at:]:
            bytes_since += count
            assert bytes_since <= bandwidth * (moment - begin) + ranks * piece
    for clock in clocks:  # both are busy to the end
        assert clock[0] == pytest.approx(total / bandwidth, rel=0.2)


def test_the_bandwidth_bounds_the_bytes_that_are_sent(near: Path, far: Path) -> None:
    sent: list[tuple[float, int]] = []
    now = [0.0]

    class _Clock:
        def __call__(self) -> float:
            return now[0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    throttle = Throttle(1000.0, clock=_Clock(), sleep=sleep)
    for count in (300, 300, 50, 5000, 1, 1):
        throttle.take(count)
        sent.append((now[0], count))
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            seconds = sent[last][0] - sent[first][0]
            assert sum(count for _, count in sent[first:last]) <= 1000.0 * seconds + 1e-6
    now[0] += 100.0
    throttle.take(10)
    throttle.take(10)
    assert now[0] == pytest.approx(sent[-1][0] + 100.01)
