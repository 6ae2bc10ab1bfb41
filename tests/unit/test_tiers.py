"""Two tiers in one process: uploads, retention, restores from the nearest copy, failures of a tier."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import torch
from torch.distributed import HashStore

import shardproof as sp
from shardproof.checkpointer import open_run
from shardproof.checkpointer.tiers import Uploader, open_tiers
from shardproof.checkpointer.tiers.throttle import Throttle
from shardproof.checkpointer.tiers.upload_coordinator import UploadCoordinator
from shardproof.checkpointer.tiers.upload_messages import UploadAnswer, UploadReport
from shardproof.format import read_manifest
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous, StoreRendezvous
from shardproof.storage import LocalStorage, MemoryStorage, ObjectStorage
from tests.faulty_storage import FaultyStorage
from tests.golden.reader import read
from tests.in_memory import private_tmpfs

WAIT = 60.0


def state(step: int) -> dict[str, Any]:
    return {"w": torch.arange(100_000.0) + step, "b": torch.full((5,), float(step)), "n": step}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(100_000), "b": torch.zeros(5), "n": -1}


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


def checkpointer(
    near: Any, far: Any, keep_far: sp.Retention | None = None, **options: Any
) -> sp.Checkpointer:
    return sp.Checkpointer(
        near,
        second_tier=sp.SecondTier(far, keep=keep_far),
        rendezvous=LocalRendezvous(deadline=30.0),
        cache="none",
        **options,
    )


def alone(root: Path) -> sp.Checkpointer:
    return sp.Checkpointer(root, rendezvous=LocalRendezvous())


def unreachable(far: Path, at_first: bool) -> tuple[FaultyStorage, list[bool]]:
    """A storage whose every operation fails while ``down[0]`` is true."""
    down = [at_first]

    def fault(operation: str, name: str) -> None:
        if down[0]:
            raise sp.StorageError("no route to host", errno="EHOSTUNREACH")

    return FaultyStorage(LocalStorage(far), lambda: True, fault), down


class Silent(LocalStorage):
    """A tier that answers a request with an error, after `wait` returns."""

    wait: Callable[[str], object]

    def within(self, prefix: str) -> Silent:
        return self._with(Silent(self.path / prefix))

    def _with(self, other: Silent) -> Silent:
        other.wait = self.wait
        return other

    def size(self, name: str) -> int | None:
        self._fail("size")

    def folders(self) -> list[str]:
        self._fail("folders")

    def _fail(self, request: str) -> NoReturn:
        self.wait(request)
        raise sp.StorageError("no answer", file=self.location, damaged=False)


def assert_restores(checkpointer: sp.Checkpointer, step: int) -> sp.checkpointer.RestoredStep:
    target = blank()
    restored = checkpointer.restore(target)
    assert restored == step
    for key, value in state(step).items():
        assert torch.equal(target[key], value) if isinstance(value, torch.Tensor) else target[key] == value
    assert restored is not None
    return restored


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_second_tier_has_the_same_files_and_is_a_checkpoint(near: Path, far: Path) -> None:
    run = checkpointer(near, far)
    pending = run.save(7, state(7))
    assert pending.durable(WAIT) == pending.result()
    assert files(near) == files(far)
    assert verify(LocalStorage(far / "step-00000007")).ok
    with sp.open(far / "step-00000007") as opened:
        assert opened["n"] == 7
    assert_restores(alone(far), 7)


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


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


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


def test_storage_options_are_for_the_tier_in_a_bucket(far: Path) -> None:
    options = {"region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret"}
    bucket = "s3://bucket/run"
    for near, then in (("memory://run", bucket), (far, bucket), (bucket, far)):
        opened = open_tiers(near, sp.SecondTier(then), options)
        assert sum(isinstance(tier, ObjectStorage) for tier in opened) == 1
    with pytest.raises(sp.StorageError, match="storage_options are for object stores"):
        open_tiers("memory://run", sp.SecondTier(far), options)


def test_damage_of_both_tiers_falls_back_to_the_older_step(near: Path, far: Path) -> None:
    run = checkpointer(near, far)
    for step in (1, 2):
        run.save(step, state(step)).durable(WAIT)
    for root in (near, far):
        (shard,) = (root / "step-00000002" / "shards").iterdir()
        flip(shard, shard.stat().st_size // 2)
    restored = assert_restores(checkpointer(near, far), 1)
    assert {(item.step, item.tier) for item in restored.passed_over} == {(2, "")}


def test_a_step_that_was_not_uploaded_is_uploaded_by_the_next_process(near: Path, far: Path) -> None:
    for step in (1, 2):
        alone(near).save(step, state(step)).result()
    run = checkpointer(near, far)
    assert_restores(run, 2)
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [1, 2]
    assert files(near) == files(far)


def test_only_steps_that_keep_far_keeps_are_uploaded_newest_first(
    near: Path, far: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        alone(near).save(step, state(step)).result()
    counted = FaultyStorage(LocalStorage(far), only=("publish",))
    run = checkpointer(near, counted, keep_far=sp.KeepLatest(2))
    assert_restores(run, 3)
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [2, 3]
    published = [name for _, name in counted.operations if name.endswith("manifest.json")]
    assert published == ["step-00000003/manifest.json", "step-00000002/manifest.json"]


class _Gate:
    """Holds the first upload until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self, operation: str, name: str) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT)


def test_steps_that_wait_are_uploaded_newest_first_and_some_are_skipped(near: Path, far: Path) -> None:
    gate = _Gate()
    second = FaultyStorage(LocalStorage(far), 0, gate, only=("create",))
    run = checkpointer(near, second, keep=sp.KeepLatest(1), keep_far=sp.KeepLatest(1))
    pendings = [run.save(1, state(1))]
    assert gate.reached.wait(WAIT)
    pendings += [run.save(step, state(step)) for step in (2, 3)]
    pendings[-1].result()
    assert alone(near).steps() == [1, 3]  # step 1 is being uploaded
    with pytest.raises(TimeoutError):
        pendings[-1].durable(0.01)
    gate.opened.set()
    pendings[2].durable(WAIT)
    with pytest.raises(sp.SaveSkipped, match="step 2 is committed .*and is not uploaded"):
        pendings[1].durable(WAIT)
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [3]


def test_a_step_that_keep_far_keeps_stays_until_it_is_uploaded(near: Path, far: Path) -> None:
    gate = _Gate()
    second = FaultyStorage(LocalStorage(far), 0, gate, only=("create",))
    every = sp.KeepEvery(steps=10)
    run = checkpointer(near, second, keep=sp.KeepLatest(1), keep_far=every)
    run.save(9, state(9))
    assert gate.reached.wait(WAIT)
    for step in (10, 11, 12):
        run.save(step, state(step)).result()
    assert alone(near).steps() == [9, 10, 12]
    gate.opened.set()
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [10, 12]


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


def test_retention_of_the_second_tier_does_not_count_a_damaged_step(near: Path, far: Path) -> None:
    for step in (1, 2):
        alone(near).save(step, state(step)).result()
    (index,) = (near / "step-00000002").glob("index-*")
    flip(index, index.stat().st_size // 2)
    run = checkpointer(near, far, keep_far=sp.KeepLatest(1))
    assert_restores(run, 1)
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [1]


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


def test_an_overwritten_step_is_judged_by_its_new_metadata(near: Path, far: Path) -> None:
    run = checkpointer(near, far, keep_far=sp.KeepLatest(1) | sp.KeepBest("loss"))
    for step, loss in ((1, 0.1), (2, 0.5), (1, 0.9), (3, 0.7)):
        pending = run.save(step, state(step), metadata={"loss": loss}, overwrite=True)
        pending.result()
        run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [2, 3]


def test_a_save_that_is_overwritten_before_its_upload_names_the_reason(near: Path, far: Path) -> None:
    second, down = unreachable(far, True)
    run = checkpointer(near, second)
    first = run.save(1, {**state(1), "n": 7})
    first.result()
    later = run.save(1, state(1), overwrite=True)
    later.result()
    down[0] = False
    run.save(2, state(2)).durable(WAIT)
    later.durable(WAIT)
    with pytest.raises(sp.SaveSkipped, match="it was replaced by a later save in"):
        first.durable(WAIT)


@pytest.mark.parametrize("policy", [sp.KeepLatest(1), sp.KeepLatest(1) | sp.KeepBest("loss")])
def test_the_first_tier_does_not_fill_while_the_second_one_is_down(
    policy: sp.RetentionPolicy, near: Path, far: Path
) -> None:
    """Also if the second tier is down when the process starts."""
    second, down = unreachable(far, False)
    run = checkpointer(near, second, keep=policy, keep_far=policy)
    run.save(1, state(1), metadata={"loss": 0.9}).durable(WAIT)
    down[0] = True
    for step in range(2, 6):
        run.save(step, state(step), metadata={"loss": 1 / step}).result()
    assert alone(near).steps() == [5]
    with pytest.raises(sp.StorageError, match="no route"):
        run.wait_for_uploads(WAIT)
    again = checkpointer(near, second, keep=policy, keep_far=policy)
    for step in range(6, 9):
        again.save(step, state(step), metadata={"loss": 1 / step}).result()
    assert alone(near).steps() == [8]
    down[0] = False
    again.save(9, state(9), metadata={"loss": 0.0}).durable(WAIT)
    assert alone(far).steps() == [9]


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


class GatedStorage(LocalStorage):
    """Calls a hook before each publish and read, with the operation and the path below the root."""

    def __init__(self, path: Path, hook: Callable[[str, str], None]) -> None:
        super().__init__(path)
        self._hook = hook

    def _named(self, name: str) -> str:
        return f"{self.path.name}/{name}"

    def within(self, prefix: str) -> GatedStorage:
        return GatedStorage(self.path / prefix, self._hook)

    def sibling(self, folder: str) -> GatedStorage:
        return GatedStorage(self.path.parent / folder, self._hook)

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        self._hook("publish", self._named(name))
        super().publish(name, data, replace=replace)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        self._hook("read" if start or stop is not None else "read all", self._named(name))
        return super().read(name, start, stop)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._hook("read", self._named(name))
        super().read_into(name, start, buffer)


@pytest.mark.parametrize("part", ["manifest.json", "index-", "shards/"])
@pytest.mark.parametrize("code", ["EIO", "EACCES"])
def test_a_step_that_cannot_be_read_does_not_block_the_others(
    near: Path, far: Path, part: str, code: str
) -> None:
    """The round uploads the others, then fails with the error. A later round uploads the step."""
    broken = [True]

    def hook(operation: str, name: str) -> None:
        if broken[0] and operation != "publish" and name.startswith(f"step-00000002/{part}"):
            file = f"{near}/{name}"
            raise sp.StorageError(f"cannot read {file} ({code})", file=file, errno=code, missing=False)

    for step in (1, 2, 3):
        alone(near).save(step, state(step)).result()
    run = checkpointer(GatedStorage(near, hook), far)
    assert_restores(run, 3)
    with pytest.raises(sp.StorageError, match=rf"cannot read .*step-00000002.*\({code}\)"):
        run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [1, 3]
    run.save(4, state(4)).durable(WAIT)
    broken[0] = False
    run.save(5, state(5)).durable(WAIT)
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [1, 2, 3, 4, 5]


def broken_manifest(
    near: Path, *, at_first: bool, from_commit: bool = False
) -> tuple[GatedStorage, list[bool]]:
    """Cannot read the manifest of step 1 while ``broken[0]`` is true, which a commit may set."""
    broken = [at_first]

    def hook(operation: str, name: str) -> None:
        if name != "step-00000001/manifest.json":
            return
        if operation == "publish":
            broken[0] = broken[0] or from_commit
        elif broken[0]:
            file = f"{near}/{name}"
            raise sp.StorageError(f"cannot read {file} (EIO)", file=file, errno="EIO", missing=False)

    return GatedStorage(near, hook), broken


@pytest.mark.parametrize("keep_far", [None, sp.KeepLatest(9)])
def test_an_unreadable_manifest_fails_no_round_if_the_second_tier_has_the_step(
    near: Path, far: Path, caplog: pytest.LogCaptureFixture, keep_far: sp.Retention | None
) -> None:
    checkpointer(near, far).save(1, state(1)).durable(WAIT)
    run = checkpointer(broken_manifest(near, at_first=True)[0], far, keep_far=keep_far)
    for step in (2, 3):
        run.save(step, state(step)).durable(WAIT)
        run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [1, 2, 3]
    named = [
        record for record in caplog.records if "manifest of step 1 cannot be read" in record.getMessage()
    ]
    assert len(named) == 1


def test_a_round_does_not_fail_if_no_step_of_the_first_tier_can_be_read_and_the_second_has_all(
    near: Path, far: Path
) -> None:
    checkpointer(near, far).save(1, state(1)).durable(WAIT)
    coordinator = UploadCoordinator(
        broken_manifest(near, at_first=True)[0], LocalStorage(far), None, None, set()
    )
    (answer,) = coordinator.plan([], [msgspec.msgpack.encode(UploadReport())])
    assert msgspec.msgpack.decode(answer, type=UploadAnswer) == UploadAnswer()


@pytest.fixture
def only_seal(near: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """While its element is true, only the seal of the first tier's manifest of step 1 can be read."""
    broken, read = [False], LocalStorage.read

    def read_end(storage: LocalStorage, name: str, start: int = 0, *stop: Any) -> bytes:
        file = Path(storage.location, name)
        if broken[0] and file == near / "step-00000001" / "manifest.json" and not start:
            raise sp.StorageError(f"cannot read {file} (EIO)", file=str(file), errno="EIO", missing=False)
        return read(storage, name, start, *stop)

    monkeypatch.setattr(LocalStorage, "read", read_end)
    return broken


def test_a_skipped_step_whose_manifest_cannot_be_read_blocks_no_other(
    near: Path, far: Path, only_seal: list[bool]
) -> None:
    second, down = unreachable(far, True)
    run = checkpointer(near, second, keep_far=sp.KeepLatest(1))
    skipped = run.save(1, state(1))
    skipped.result()
    only_seal[0], down[0] = True, False
    run.save(2, state(2)).durable(WAIT)
    with pytest.raises(sp.SaveSkipped):
        skipped.durable(WAIT)
    run.wait_for_uploads(WAIT)


def test_a_missing_upload_fails_the_wait_if_the_tiers_are_known_to_differ(
    near: Path, far: Path, only_seal: list[bool]
) -> None:
    second, down = unreachable(far, False)
    run = checkpointer(near, second)
    run.save(1, state(2)).durable(WAIT)
    down[0] = True
    run.save(1, state(1), overwrite=True).result()
    with pytest.raises(sp.StorageError, match="no route"):
        run.wait_for_uploads(WAIT)
    only_seal[0] = True
    again = checkpointer(near, far)
    again.save(2, state(2)).durable(WAIT)
    with pytest.raises(sp.StorageError, match="EIO"):
        again.wait_for_uploads(WAIT)
    only_seal[0] = False
    again.save(3, state(3)).durable(WAIT)
    again.wait_for_uploads(WAIT)
    assert_restores(alone(far), 3)
    assert verify(LocalStorage(far / "step-00000001")).ok
    assert files(near / "step-00000001") == files(far / "step-00000001")


def test_an_overwriting_save_whose_manifest_cannot_be_read_waits(near: Path, far: Path) -> None:
    """The second tier has an earlier save of the step, so an upload is missing."""
    checkpointer(near, far).save(1, {**state(1), "n": 7}).durable(WAIT)
    first, broken = broken_manifest(near, at_first=False, from_commit=True)
    run = checkpointer(first, far)
    pending = run.save(1, state(1), overwrite=True)
    with pytest.raises(sp.StorageError, match=r"cannot read .*step-00000001/manifest.json \(EIO\)"):
        pending.durable(WAIT)
    run.save(2, state(2)).durable(WAIT)
    broken[0] = False
    run.save(3, state(3)).durable(WAIT)
    pending.durable(WAIT)
    assert len({(root / "step-00000001" / "manifest.json").read_bytes() for root in (near, far)}) == 1
    assert verify(LocalStorage(far / "step-00000001")).ok


def test_a_damaged_manifest_fails_no_round_if_the_second_tier_has_the_step(
    near: Path, far: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer(near, far).save(1, state(1)).durable(WAIT)
    manifest = near / "step-00000001" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-100])
    run = checkpointer(near, far)
    for step in (2, 3):
        run.save(step, state(step)).durable(WAIT)
        run.wait_for_uploads(WAIT)
    named = [record for record in caplog.records if "step 1 is" in record.getMessage()]
    assert len(named) == 1 and "step 1 is damaged, and is not uploaded" in named[0].getMessage()
    assert_restores(alone(far), 3)


def test_a_link_that_leads_nowhere_stops_neither_uploads_nor_retention(near: Path, far: Path) -> None:
    near.mkdir()
    (near / "step-00000001").symlink_to("/not/mounted/step-00000001")
    run = checkpointer(near, far, keep=sp.KeepLatest(1))
    for step in (4, 5):
        run.save(step, state(step)).durable(WAIT)
    assert alone(far).steps() == [4, 5]
    assert not (near / "step-00000004" / "manifest.json").exists()


@pytest.mark.parametrize("policy", [sp.KeepBest("loss", 3), sp.KeepEvery(hours=1)])
def test_retention_of_the_first_tier_reads_no_manifest_of_the_second(
    near: Path, far: Path, policy: sp.RetentionPolicy
) -> None:
    """The second tier fails after it was listed, at its first whole manifest."""
    down = [False]
    threads: set[str] = set()

    def hook(operation: str, name: str) -> None:
        threads.add(threading.current_thread().name)
        down[0] = down[0] or (operation == "read all" and name.endswith("manifest.json"))
        if down[0]:
            raise sp.StorageError("no route to host", errno="EHOSTUNREACH", missing=False)

    options = {"keep": sp.KeepLatest(1), "keep_far": policy}
    first = checkpointer(near, far, **options)
    for step in (1, 2, 3):
        first.save(step, state(step), metadata={"loss": 1 / step}).durable(WAIT)
    run = checkpointer(near, GatedStorage(far, hook), **options)
    for step in range(4, 12):
        run.save(step, state(step), metadata={"loss": 100.0 + step}).result()
        with pytest.raises(sp.StorageError, match="no route"):
            run.wait_for_uploads(WAIT)
    assert down[0] and not any(name.startswith("shardproof-save") for name in threads)
    assert len(alone(near).steps()) <= 4  # the newest, and as many as the policy selects


def test_a_pin_is_on_the_second_tier_before_the_manifest(near: Path, far: Path) -> None:
    """So that retention there never sees the step without its pin, also if the upload dies in between."""
    first = alone(near)
    first.save(1, state(1)).result()
    first.pin(1, "release")

    def hook(operation: str, name: str) -> None:
        if operation == "publish" and name == "step-00000001/manifest.json":
            assert (far / "step-00000001" / "pinned.json").exists()
            raise sp.StorageError("the process dies here")

    run = checkpointer(near, GatedStorage(far, hook), keep_far=sp.KeepLatest(1))
    assert_restores(run, 1)
    with pytest.raises(sp.StorageError, match="dies here"):
        run.wait_for_uploads(WAIT)
    again = checkpointer(near, far, keep_far=sp.KeepLatest(1))
    again.save(2, state(2)).durable(WAIT)
    again.wait_for_uploads(WAIT)
    again.save(3, state(3)).durable(WAIT)
    assert alone(far).steps() == [1, 3]


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_pin_that_changes_during_the_upload_is_copied(near: Path, far: Path, is_pinned: bool) -> None:
    first = alone(near)
    first.save(1, state(1)).result()
    if not is_pinned:
        first.pin(1, "old")

    def hook(operation: str, name: str) -> None:
        if operation == "publish" and name == "step-00000001/manifest.json":
            first.pin(1, "new") if is_pinned else first.unpin(1)

    run = checkpointer(near, GatedStorage(far, hook))
    assert_restores(run, 1)
    run.wait_for_uploads(WAIT)
    assert (far / "step-00000001" / "pinned.json").exists() is is_pinned


def test_a_pin_that_an_earlier_process_did_not_copy_is_copied(near: Path, far: Path) -> None:
    checkpointer(near, far).save(1, state(1)).durable(WAIT)
    alone(near).pin(1, "release")

    def hook(operation: str, name: str) -> None:
        uploads_again = operation == "publish" and name == "step-00000001/manifest.json"
        assert not uploads_again, "retention removed the step before it had the pin"

    run = checkpointer(near, GatedStorage(far, hook), keep_far=sp.KeepLatest(1))
    run.save(2, state(2)).durable(WAIT)
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [1, 2]


def test_retention_removes_no_step_whose_upload_begins(near: Path, far: Path) -> None:
    """Retention asks for the steps that stay, and removes the others later. The upload begins in between."""
    for step in (1, 2):
        alone(near).save(step, state(step)).result()
    coordinator = UploadCoordinator(LocalStorage(near), LocalStorage(far), None, None, set())
    report = msgspec.msgpack.encode(UploadReport())
    assert coordinator.protect([1, 2]) == set()
    (answer,) = coordinator.plan([], [report])
    assert msgspec.msgpack.decode(answer, type=UploadAnswer).next is None
    coordinator.committed(2)  # saved again
    (answer,) = coordinator.plan([], [report])
    share = msgspec.msgpack.decode(answer, type=UploadAnswer).next
    assert share is not None and share.step == 2
    assert coordinator.protect([1, 2]) == {2}
    coordinator.abandon_upload()
    assert coordinator.protect([1, 2]) == set()


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


@pytest.mark.parametrize(
    "options",
    [{}, {"keep_far": sp.KeepLatest(2)}, {"incremental": sp.Incremental(scrub=None)}, {"node_local": True}],
)
def test_an_overwriting_save_replaces_the_step_of_the_second_tier_after_a_restart(
    near: Path, far: Path, options: dict[str, Any]
) -> None:
    """The second tier is down until the process of the save has ended."""
    second, down = unreachable(far, False)
    run = checkpointer(near, second, **options)
    run.save(1, state(2)).durable(WAIT)
    run.save(2, {**state(2), "n": 7}).durable(WAIT)
    down[0] = True
    for number in (8, 2):
        run.save(2, {**state(2), "n": number}, overwrite=True).result()
    with pytest.raises(sp.StorageError, match="no route"):
        run.wait_for_uploads(WAIT)
    again = checkpointer(near, far, **options)
    assert_restores(again, 2)
    again.wait_for_uploads(WAIT)
    assert_restores(alone(far), 2)
    name = "step-00000002"
    assert files(near / name) == files(far / name)
    assert verify(LocalStorage(far / name)).ok
    assert "-overwrite" in read(far / name)["attempt"]


def test_a_save_of_a_step_that_is_damaged_on_both_tiers_replaces_it_after_a_restart(
    near: Path, far: Path
) -> None:
    second, down = unreachable(far, False)
    first = checkpointer(near, second)
    for step in (1, 2):
        first.save(step, state(step)).durable(WAIT)
    for root in (near, far):
        damage(root / "step-00000002", "shard")
    run = checkpointer(near, second)
    assert_restores(run, 1)
    run.wait_for_uploads(WAIT)
    down[0] = True
    run.save(2, state(2)).result()
    assert upload(near, far) is None
    assert_restores(alone(far), 2)


def test_a_restart_does_not_replace_a_later_save_of_another_job(
    near: Path, far: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The user allowed to replace the save that was there, and not one that another job made since."""
    second, down = unreachable(far, False)
    run = checkpointer(near, second)
    run.save(1, state(1)).durable(WAIT)
    down[0] = True
    run.save(1, {**state(1), "n": 7}, overwrite=True).result()
    alone(far).save(1, {**state(1), "n": 8}, overwrite=True).result()
    assert upload(near, far) is None
    assert "another save of this step" in caplog.text
    target = blank()
    assert alone(far).restore(target) == 1 and target["n"] == 8


def test_an_overwriting_save_that_fails_before_its_commit_replaces_nothing_after_a_restart(
    near: Path, far: Path
) -> None:
    """The first tier has another save of the step, which was not allowed to replace it."""
    alone(far).save(1, {**state(1), "n": 7}).result()
    alone(near).save(1, {**state(1), "n": 8}).result()

    def hook(operation: str, name: str) -> None:
        if (operation, name) == ("publish", "step-00000001/manifest.json"):
            raise sp.StorageError("the disk is full", errno="ENOSPC")

    run = checkpointer(GatedStorage(near, hook), far)
    with pytest.raises(sp.RankFailure, match="the disk is full"):
        run.save(1, state(1), overwrite=True).result()
    assert upload(near, far) is None
    target = blank()
    assert alone(far).restore(target) == 1 and target["n"] == 7
    assert alone(near).restore(target) == 1 and target["n"] == 8


def test_a_save_that_replaces_a_later_one_counts_as_later(
    near: Path, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock may have been set back. A restore takes the later save of a step."""
    checkpointer(near, far).save(1, state(1)).durable(WAIT)
    now = time.time() - 60
    monkeypatch.setattr("shardproof.saving.coordinator.time.time", lambda: now)
    alone(near).save(1, {**state(1), "n": 7}, overwrite=True).result()
    target = blank()
    assert checkpointer(near, far).restore(target) == 1
    assert target["n"] == 7


def test_a_save_replaces_a_step_of_the_second_tier_only_if_no_tier_has_it_whole(
    near: Path, far: Path
) -> None:
    first = checkpointer(near, far)
    for step in (1, 2):
        first.save(step, state(step)).durable(WAIT)
    flip(near / "step-00000002" / "manifest.json", 100)
    run = checkpointer(near, far)
    assert_restores(run, 2)
    with pytest.raises(sp.SaveSkipped, match="another save of this step"):
        run.save(2, state(7)).durable(WAIT)
    assert_restores(alone(far), 2)
    remove(near / "step-00000002")
    (shard,) = (far / "step-00000002" / "shards").iterdir()
    flip(shard, shard.stat().st_size // 2)
    run = checkpointer(near, far)
    assert_restores(run, 1)
    run.save(2, {**state(2), "n": 7}).durable(WAIT)
    target = blank()
    assert alone(far).restore(target) == 2 and target["n"] == 7


def test_a_save_of_a_damaged_step_is_uploaded_although_the_round_begins_at_once(
    near: Path, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is over before the save thread goes on."""
    for step in (1, 2):
        alone(near).save(step, state(step)).result()
    flip(near / "step-00000002" / "manifest.json", 100)
    run = checkpointer(near, far)
    assert_restores(run, 1)
    run.wait_for_uploads(WAIT)
    real = Uploader.committed

    def committed(self: Uploader, *arguments: Any) -> None:
        real(self, *arguments)
        self.wait_for_all(WAIT)

    monkeypatch.setattr(Uploader, "committed", committed)
    run.save(2, state(2)).durable(WAIT)
    assert alone(far).steps() == [1, 2]


def test_a_second_tier_that_is_the_first_under_another_name_is_refused(near: Path, tmp_path: Path) -> None:
    near.mkdir()
    (tmp_path / "link").symlink_to(near)
    with pytest.raises(ValueError, match="the second tier is the first one"):
        checkpointer(near, tmp_path / "link")
    with pytest.raises(ValueError, match="the second tier is the first one"):
        open_tiers("s3://bucket/run", sp.SecondTier("s3a://bucket/run"), {"region": "us-east-1"})


def test_another_save_of_a_step_is_replaced_only_with_overwrite(
    near: Path, far: Path, tmp_path: Path
) -> None:
    alone(far).save(1, state(5)).result()
    run = checkpointer(near, far)
    with pytest.raises(sp.SaveSkipped, match="another save of this step"):
        run.save(1, state(1)).durable(WAIT)
    target = blank()
    alone(far).restore(target)
    assert target["n"] == 5
    assert_restores(run, 1)  # the later save
    run.save(1, state(1), overwrite=True).durable(WAIT)
    assert_restores(alone(far), 1)
    assert files(near) == files(far)


def test_the_later_of_two_saves_of_one_step_is_restored(near: Path, far: Path) -> None:
    alone(near).save(1, state(5)).result()
    alone(far).save(1, state(1)).result()
    restored = assert_restores(checkpointer(near, far), 1)
    assert restored.tier == str(far)


@pytest.mark.parametrize("step", [1, None])
def test_an_earlier_save_on_the_nearer_tier_is_passed_over_with_the_reason(
    step: int | None, near: Path, far: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy of the first tier is whole, so a save must not replace it without `overwrite`."""
    alone(near).save(1, state(5)).result()
    alone(far).save(1, state(1)).result()
    run = checkpointer(near, far)
    restored = run.restore(blank(), step=step)
    assert restored is not None and restored.tier == str(far)
    (passed,) = restored.passed_over
    assert (passed.step, passed.tier, passed.damaged) == (1, str(near), False)
    assert passed.reason == "it is an earlier save of this step"
    assert f"step 1 on {near} is passed over: it is an earlier save of this step" in caplog.text
    with pytest.raises(sp.AlreadyCommittedError):
        run.save(1, state(1)).result()


def test_an_earlier_save_on_the_farther_tier_is_not_passed_over(near: Path, far: Path) -> None:
    alone(far).save(1, state(5)).result()
    alone(near).save(1, state(1)).result()
    restored = assert_restores(checkpointer(near, far), 1)
    assert (restored.tier, restored.passed_over) == (str(near), ())


@pytest.mark.parametrize("what", ["manifest", "index", "shard", "missing"])
@pytest.mark.parametrize("later_is_near", [True, False])
def test_the_earlier_of_two_saves_of_one_step_is_restored_if_the_later_is_damaged(
    later_is_near: bool, what: str, near: Path, far: Path
) -> None:
    """No older step is restored."""
    earlier, later = (far, near) if later_is_near else (near, far)
    alone(near).save(1, state(1)).result()
    alone(earlier).save(2, state(2)).result()
    alone(later).save(2, state(5)).result()
    damage(later / "step-00000002", what)
    run = checkpointer(near, far)
    restored = assert_restores(run, 2)
    assert restored.tier == str(earlier)
    (passed,) = restored.passed_over
    assert passed.tier == str(later) and passed.damaged == later_is_near
    run.wait_for_uploads(WAIT)
    again = checkpointer(near, far)
    assert_restores(again, 2)
    assert again.restore(blank(), step=2) == 2


def damage(folder: Path, what: str) -> None:
    """Changes or removes a file of a step of one shard."""
    (shard,), (index,) = (folder / "shards").iterdir(), folder.glob("index-*")
    path = {"manifest": folder / "manifest.json", "index": index}.get(what, shard)
    if what == "missing":
        path.unlink()
    else:
        flip(path, path.stat().st_size // 2)


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


def test_a_restore_without_the_second_tier_logs_its_wait_and_names_the_way_out(
    near: Path, far: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_run, "_LOG_SECONDS", 0.01)
    checkpointer(near, far).save(1, state(1)).durable(WAIT)
    alone(near).save(2, state(2)).result()
    second, told = Silent(far), threading.Event()
    second.wait = lambda request: told.wait(WAIT)
    monkeypatch.setattr(open_run._log, "warning", lambda text, *values: told.set())
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


def test_steps_that_a_rollback_gave_up_displace_no_others(near: Path, far: Path) -> None:
    keep = sp.KeepLatest(2)
    run = checkpointer(near, far, keep_far=keep)
    for step in (10, 20, 30):
        run.save(step, state(step)).durable(WAIT)
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [20, 30]
    run = checkpointer(near, far, keep=keep, keep_far=keep)
    assert run.restore(blank(), step=10) == 10
    for step in (11, 12, 13):
        run.save(step, state(step)).durable(WAIT)
    run.wait_for_uploads(WAIT)
    assert alone(near).steps() == alone(far).steps() == [12, 13, 20, 30]
    for step in (30, 31):
        run.save(step, state(step), overwrite=True).durable(WAIT)
    run.wait_for_uploads(WAIT)
    assert alone(near).steps() == alone(far).steps() == [30, 31]


def test_steps_that_wait_during_a_rollback_stay_and_are_uploaded(near: Path, far: Path) -> None:
    """Steps after the rollback are uploaded first."""
    down = [True]
    error = sp.StorageError("no route to host", errno="EHOSTUNREACH")
    second = FaultyStorage(LocalStorage(far), lambda: down[0], error, only=("create", "publish"))
    keep = sp.KeepLatest(1)
    run = checkpointer(near, second, keep_far=keep)
    for step in (1, 2, 5):
        pending = run.save(step, state(step))
        pending.result()
    assert run.restore(blank(), step=2) == 2
    run.save(3, state(3)).result()
    with pytest.raises(sp.StorageError, match="no route"):
        run.wait_for_uploads(WAIT)
    down[0] = False
    second.operations.clear()
    run.save(4, state(4)).durable(WAIT)
    pending.durable(WAIT)
    assert alone(far).steps() == [4, 5]
    committed = [name for _, name in second.operations if name.endswith("manifest.json")]
    assert committed == ["step-00000004/manifest.json", "step-00000005/manifest.json"]


def upload(near: Path, far: Any) -> sp.ShardproofError | None:
    """Uploads pending steps, as a restarted job does, and returns the error."""
    run = checkpointer(near, far)
    try:
        run.restore(blank())
        run.wait_for_uploads(WAIT)
    except sp.ShardproofError as error:
        return error
    return None


class _TwoUploads:
    """Two jobs upload one save. After one of them has ended, the step stays whole, whatever the other does.

    Args:
        near: the first tier of both.
        far: the second tier of both; is removed first.
        at: the second job begins before the first operation of this kind of the first job.
        stop: the second job stops before this operation, until the first job has ended.
    """

    def __init__(self, near: Path, far: Path, at: str, stop: int) -> None:
        if far.exists():
            remove(far)
        self.near, self.far, self.at, self.stop = near, far, at, stop
        self.stopped, self.first_ended = threading.Event(), threading.Event()
        self.second_ended = False
        self.broken: list[str] = []
        self.error: sp.ShardproofError | None = None
        self.first = FaultyStorage(LocalStorage(far), lambda: True, self.in_first)
        self.second = FaultyStorage(LocalStorage(far), lambda: True, self.in_second)

    def run(self) -> None:
        with ThreadPoolExecutor(1) as self.thread:
            self.error = upload(self.near, self.first)
            self.first_ended.set()
        self.look("at the end")

    def in_first(self, operation: str, name: str) -> None:
        if operation == self.at and not self.stopped.is_set():
            self.thread.submit(self.run_second)
            assert self.stopped.wait(WAIT)
        elif self.second_ended:
            self.look(f"the first job, {operation} {name}")

    def run_second(self) -> None:
        error = upload(self.near, self.second)
        self.second_ended = True
        self.stopped.set()
        self.error = self.error or error

    def in_second(self, operation: str, name: str) -> None:
        if len(self.second.operations) - 1 == self.stop:
            self.stopped.set()
            assert self.first_ended.wait(WAIT)
        if self.first_ended.is_set():
            self.look(f"the second job, {operation} {name}")

    def look(self, when: str) -> None:
        storage = LocalStorage(self.far / "step-00000001")
        if not verify(storage).ok:
            self.broken.append(when)


@pytest.mark.parametrize("at", ["write_at", "publish"])
def test_two_jobs_that_upload_one_save_lose_nothing(at: str, near: Path, far: Path) -> None:
    """In any order of their operations. So a job that dies in its upload does no harm to the other one."""
    alone(near).save(1, state(1)).result()
    stop = 0
    while True:
        jobs = _TwoUploads(near, far, at, stop)
        jobs.run()
        assert jobs.broken == [], f"the second job stops at {jobs.second.operations[stop:][:1]}"
        assert jobs.error is None
        assert {name: data for name, data in files(far).items() if not name.endswith(".tmp")} == files(near)
        if len(jobs.second.operations) <= stop:
            break
        stop += 1
    assert stop > 15


def test_one_of_two_jobs_that_upload_different_saves_of_a_step_wins_and_the_other_fails(
    near: Path, far: Path
) -> None:
    """One job uploads its save at each operation of the upload of the other."""
    at = won = 0
    while True:
        for root in (near, far, near.with_name("other")):
            if root.exists():
                remove(root)

        def save(root: Path, second: Any, number: int) -> sp.ShardproofError | None:
            pending = checkpointer(root, second).save(1, state(number))
            pending.result()
            try:
                pending.durable(WAIT)
            except sp.ShardproofError as error:
                return error
            return None

        ended: list[Any] = []

        def other_job(operation: str, name: str, ended: list[Any] = ended) -> None:
            ended.append(save(near.with_name("other"), far, 5))

        mine = save(near, FaultyStorage(LocalStorage(far), at, other_job), 1)
        if not ended:
            break
        target = blank()
        assert alone(far).restore(target) == 1
        assert verify(LocalStorage(far / "step-00000001")).ok, f"operation {at}"
        errors = {1: mine, 5: ended[0]}
        assert errors.pop(target["n"]) is None, f"operation {at}"
        (refusal,) = errors.values()
        assert isinstance(refusal, (sp.SaveSkipped, sp.AlreadyCommittedError)), f"operation {at}: {refusal!r}"
        won += target["n"] == 1
        at += 1
    assert 0 < won < at


def test_pins_reach_the_second_tier(near: Path, far: Path) -> None:
    run = checkpointer(near, far, keep_far=sp.KeepLatest(1), keep=sp.KeepLatest(1))
    alone(near).save(1, state(1)).result()
    alone(near).pin(1, "baseline")
    run.save(2, state(2)).durable(WAIT)
    run.wait_for_uploads(WAIT)
    run.pin(2, "second")
    run.save(3, state(3)).durable(WAIT)
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == alone(near).steps() == [1, 2, 3]
    assert {step: pin.label for step, pin in alone(far).pins().items()} == {1: "baseline", 2: "second"}


def test_suspects_stay_on_the_first_tier(near: Path, far: Path) -> None:
    run = checkpointer(near, far)
    run.save(1, state(1), suspect=True).durable(WAIT)
    assert run.suspects() == [1] and not far.exists()


def test_the_best_step_is_found_on_any_tier(near: Path, far: Path) -> None:
    run = checkpointer(near, far, keep=sp.KeepLatest(1) | sp.KeepBest("loss"))
    for step, loss in ((1, 0.1), (2, 0.5)):
        run.save(step, state(step), metadata={"loss": loss}).durable(WAIT)
    remove(near / "step-00000001")
    target = blank()
    assert run.restore(target, step="best") == 1 and target["n"] == 1


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
        monkeypatch.setattr("shardproof.checkpointer.checkpointer.Uploader", timed)
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


@pytest.mark.parametrize(
    ("second_tier", "message"),
    [
        ("near", "the second tier is the first one"),
        ("near/far", "one tier is inside the other"),
        (".", "one tier is inside the other"),
        ("link/far", "one tier is inside the other"),
    ],
)
def test_a_second_tier_is_apart_from_the_first(
    second_tier: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("near")
    with pytest.raises(ValueError, match=message):
        sp.Checkpointer("near", second_tier=second_tier)
    sp.Checkpointer("near", second_tier="near2")


def test_invalid_options_of_a_second_tier_are_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth is a positive number"):
        sp.SecondTier("a", bandwidth=0)
    with pytest.raises(ValueError, match="keep of the second tier is a policy"):
        sp.SecondTier("a", keep=3)  # type: ignore[arg-type]


class RemoteFolder(LocalStorage):
    """A folder that stands for a bucket: a load reads it in requests."""

    def read_buffer(self, name: str, start: int, count: int) -> memoryview:
        """Reads a range into new memory."""
        buffer = memoryview(bytearray(count))
        LocalStorage.read_into(self, name, start, buffer)
        return buffer

    def with_contents(self, files: Any) -> RemoteFolder:
        """This storage."""
        return self

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
