"""Saves that replace a step on two tiers, and tiers with different saves of a step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import shardproof as sp
from shardproof.maintenance import verify
from shardproof.runs.checkpointer.tiers import Uploader
from shardproof.storage import LocalStorage
from tests.golden.reader import read
from tests.unit.runs.checkpointer.two_tiers import (
    WAIT,
    GatedStorage,
    alone,
    assert_restores,
    blank,
    broken_manifest,
    checkpointer,
    damage,
    files,
    flip,
    remove,
    state,
    unreachable,
    upload,
)


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
    monkeypatch.setattr("shardproof.engine.saving.coordinator.time.time", lambda: now)
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
