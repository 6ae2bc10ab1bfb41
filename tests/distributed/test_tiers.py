"""Uploads to a second tier by several ranks: killed in the upload, restarted on other ranks."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.harness import Job, rank, reach, rendezvous, run_ranks, world_size
from tests.scenarios.states import blanked, differences, rows, whole, whole_state

RANKS = 3


def part(salt: int) -> dict[str, Any]:
    """This rank's rows of the state that `RANKS` ranks save."""
    height = 4 * RANKS
    first, last = height * rank() // world_size(), height * (rank() + 1) // world_size()
    return {
        "model": {
            "weight": rows(whole((height, 3), salt), first, last),
            "bias": whole((5,), salt + 1),
        },
        "alone": whole((2, 2), salt + 2, torch.int64),
        "epoch": salt,
    }


def _save_and_upload(near: str, far: str) -> str:
    """Commits steps 1 and 2; rank 1 is held in the middle of the upload of step 2."""

    def hold(operation: str, name: str) -> None:
        reach("upload")

    second = FaultyStorage(LocalStorage(far), 1 if rank() == 1 else None, hold, only=("write_at",))
    run = sp.Checkpointer(near, second_tier=second, rendezvous=rendezvous(deadline=60.0), cache="none")
    run.save(1, part(1)).durable(60)
    run.save(2, part(2)).result()
    reach("committed")
    run.wait_for_uploads(60)
    return "ended"


def _resume(near: str, far: str) -> tuple[int, list[str], list[int]]:
    run = sp.Checkpointer(near, second_tier=far, rendezvous=rendezvous(deadline=60.0), cache="none")
    target = blanked(part(0))
    restored = run.restore(target)
    assert restored is not None and restored.tier == near
    wrong = differences(target, part(int(restored)))
    run.wait_for_uploads(60)
    pending = run.save(3, part(3))
    assert pending.durable(60).step == 3
    return int(restored), wrong, run.steps()


def _restore(near: str, far: str) -> tuple[int, str, list[str]]:
    run = sp.Checkpointer(near, second_tier=far, rendezvous=rendezvous(deadline=60.0), cache="none")
    target = blanked(part(0))
    restored = run.restore(target)
    assert restored is not None
    return int(restored), restored.tier, differences(target, part(int(restored)))


def test_a_killed_upload_is_completed_on_another_number_of_ranks(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"

    def kill_all(job: Job) -> None:
        job.until_held(1, "upload")
        for number in (0, 2):
            job.until_held(number, "committed")
        for number in range(RANKS):
            job.kill(number)

    outcomes = run_ranks(
        RANKS,
        _save_and_upload,
        str(near),
        str(far),
        hold={0: "committed", 1: "upload", 2: "committed"},
        script=kill_all,
        timeout=120,
    )
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * RANKS
    first, second = LocalStorage(near), LocalStorage(far)
    assert second.size(f"step-00000001/{MANIFEST_NAME}") is not None
    assert second.size(f"step-00000002/{MANIFEST_NAME}") is None
    assert second.list("step-00000002"), "the upload had begun"
    assert read_manifest(first.within("step-00000002")).step == 2

    for outcome in run_ranks(2, _resume, str(near), str(far), timeout=120):
        assert outcome.value == (2, [], [1, 2, 3])
    for step in (1, 2, 3):
        report = verify(second.within(f"step-0000000{step}"))
        assert report.ok and report.step == step
        folder = f"step-0000000{step}"
        assert first.list(folder) == second.list(folder)
        for name in first.list(folder):
            assert first.read(name) == second.read(name)
    shutil.rmtree(near)
    for outcome in run_ranks(2, _restore, str(near), str(far), timeout=120):
        assert outcome.value == (3, str(far), [])
    target = blanked(whole_state(RANKS, 0))
    assert sp.Checkpointer(far, rendezvous=LocalRendezvous()).restore(target) == 3
    assert differences(target, whole_state(RANKS, 3)) == []


def _one_rank_fails(near: str, far: str) -> tuple[str, str, int]:
    """The storage of rank 1 refuses the upload of step 1."""
    refused = sp.StorageError("no permission", errno="EACCES")
    second = FaultyStorage(LocalStorage(far), 0 if rank() == 1 else None, refused, only=("write_at",))
    run = sp.Checkpointer(near, second_tier=second, rendezvous=rendezvous(deadline=60.0), cache="none")
    pending = run.save(1, part(1))
    result = pending.result()
    try:
        pending.durable(60)
    except sp.ShardproofError as error:
        failed = str(error)
    committed = LocalStorage(far).size(f"step-00000001/{MANIFEST_NAME}")
    run.save(2, part(2)).durable(60)
    pending.durable(60)
    return failed, str(committed), result.step or 0


def _corrupt(near: str, far: str) -> tuple[int, str, list[str], list[tuple[int, str]]]:
    run = sp.Checkpointer(near, second_tier=far, rendezvous=rendezvous(deadline=60.0), cache="none")
    target = blanked(part(0))
    restored = run.restore(target)
    assert restored is not None
    passed = [(item.step, item.tier) for item in restored.passed_over]
    return int(restored), restored.tier, differences(target, part(int(restored))), passed


def test_all_ranks_report_the_failure_of_one_and_read_a_damaged_file_from_the_second_tier(
    tmp_path: Path,
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    outcomes = [
        outcome.value for outcome in run_ranks(RANKS, _one_rank_fails, str(near), str(far), timeout=120)
    ]
    assert len({failed for failed, _, _ in outcomes}) == 1
    assert "rank 1: no permission" in outcomes[0][0]
    assert {committed for _, committed, _ in outcomes} == {"None"}
    for step in (1, 2):
        assert verify(LocalStorage(far / f"step-0000000{step}")).ok
    # A byte of rank 2's file changes in the first tier; the ranks read that file from the second.
    (shard,) = (near / "step-00000002" / "shards").glob("00002-*")
    data = bytearray(shard.read_bytes())
    (record,) = (one for one in read_manifest(LocalStorage(near / "step-00000002")).files if one.rank == 2)
    data[record.data_start + 4] ^= 1
    shard.write_bytes(data)
    for outcome in run_ranks(2, _corrupt, str(near), str(far), timeout=120):
        assert outcome.value == (2, str(near), [], [(2, str(near))])


def _two_second_tiers(root: str) -> str:
    second = f"{root}/far-{rank()}"
    run = sp.Checkpointer(
        f"{root}/near", second_tier=second, rendezvous=rendezvous(deadline=60.0), cache="none"
    )
    with pytest.raises(sp.StructureError) as caught:
        run.save(1, part(1))
    return str(caught.value)


def test_ranks_with_different_second_tiers_are_refused(tmp_path: Path) -> None:
    for outcome in run_ranks(2, _two_second_tiers, str(tmp_path), timeout=120):
        assert f"{tmp_path}/far-0" in outcome.value and f"{tmp_path}/far-1" in outcome.value
    assert not list(tmp_path.glob("**/manifest.json"))


def _upload_as_one_of_two_jobs(near: str, far: str) -> None:
    """Uploads the waiting step, as a job of one rank."""

    def hook(operation: str, name: str) -> None:
        if "index-" in name:
            reach("index")
        elif operation == "write_at":
            reach("half")

    reach("begin")
    second = FaultyStorage(LocalStorage(far), lambda: True, hook, only=("create", "write_at", "publish"))
    run = sp.Checkpointer(near, second_tier=second, rendezvous=LocalRendezvous(), cache="none")
    run.restore(blanked(whole_state(1, 0)))
    run.wait_for_uploads(60)
    reach("end")


def test_a_job_that_dies_in_its_upload_removes_no_file_of_another_job(tmp_path: Path) -> None:
    """A second job uploads the save meanwhile. The first one dies after the second has committed."""
    near, far = tmp_path / "near", tmp_path / "far"
    sp.Checkpointer(near, rendezvous=LocalRendezvous()).save(1, whole_state(1, 1)).result()

    def script(job: Job) -> None:
        job.until_held(0, "half")
        job.until_held(1, "begin")
        job.go(1)
        job.until_held(1, "end")
        job.go(0)
        job.until_held(0, "index")
        job.kill(0)
        job.go(1)

    outcomes = run_ranks(
        2,
        _upload_as_one_of_two_jobs,
        str(near),
        str(far),
        hold={0: ["half", "index"], 1: ["begin", "end"]},
        script=script,
        timeout=120,
    )
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL, 0]
    assert verify(LocalStorage(far / "step-00000001")).ok
    shutil.rmtree(near)
    target = blanked(whole_state(1, 0))
    assert sp.Checkpointer(far, rendezvous=LocalRendezvous()).restore(target) == 1
    assert differences(target, whole_state(1, 1)) == []
