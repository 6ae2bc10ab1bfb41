"""Retention, pins and rollbacks of two tiers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import shardproof as sp
from shardproof.runs.checkpointer.tiers.upload_coordinator import UploadCoordinator
from shardproof.runs.checkpointer.tiers.upload_messages import UploadReport
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.unit.runs.checkpointer.two_tiers import (
    WAIT,
    GatedStorage,
    _Gate,
    alone,
    assert_restores,
    blank,
    checkpointer,
    flip,
    state,
    unreachable,
)


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


def test_retention_of_the_second_tier_does_not_count_a_damaged_step(near: Path, far: Path) -> None:
    for step in (1, 2):
        alone(near).save(step, state(step)).result()
    (index,) = (near / "step-00000002").glob("index-*")
    flip(index, index.stat().st_size // 2)
    run = checkpointer(near, far, keep_far=sp.KeepLatest(1))
    assert_restores(run, 1)
    run.wait_for_uploads(WAIT)
    assert alone(far).steps() == [1]


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
    report = UploadReport()
    assert coordinator.protect([1, 2]) == set()
    (answer,) = coordinator.plan([], [report])
    assert answer.next is None
    coordinator.committed(2)  # saved again
    (answer,) = coordinator.plan([], [report])
    share = answer.next
    assert share is not None and share.step == 2
    assert coordinator.protect([1, 2]) == {2}
    coordinator.end_upload()
    assert coordinator.protect([1, 2]) == set()


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
