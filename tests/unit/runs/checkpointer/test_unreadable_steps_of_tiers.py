"""Steps that an upload cannot read, or whose manifest is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.runs.checkpointer.tiers.upload_coordinator import UploadCoordinator
from shardproof.runs.checkpointer.tiers.upload_messages import UploadAnswer, UploadReport
from shardproof.storage import LocalStorage
from tests.unit.runs.checkpointer.two_tiers import (
    WAIT,
    GatedStorage,
    alone,
    assert_restores,
    broken_manifest,
    checkpointer,
    files,
    state,
    unreachable,
)


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
    (answer,) = coordinator.plan([], [UploadReport()])
    assert answer == UploadAnswer()


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
