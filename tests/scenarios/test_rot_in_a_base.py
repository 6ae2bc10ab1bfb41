"""Bytes of a step rot on the disk, and later incremental steps refer to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof import events
from shardproof.checkpointer.folders import step_name
from shardproof.loading import verify
from shardproof.storage import LocalStorage
from tests.harness import rendezvous, run_ranks

FROZEN_BYTES = 4 * 50_000


def state(frozen: float, moving: float) -> dict[str, Any]:
    return {
        "frozen": torch.full((50_000,), frozen + 0.5),
        "moving": torch.full((7_000,), float(moving)),
        "epoch": int(moving),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = all(torch.equal(one[key], other[key]) for key in ("frozen", "moving"))
    return tensors and one["epoch"] == other["epoch"]


def shard_of(root: Path, step: int) -> Path:
    (path,) = (root / step_name(step) / "shards").iterdir()
    return path


def flip_bit(path: Path, frozen: float) -> int:
    """Flips a bit of "frozen" in a shard file; the byte."""
    raw = bytearray(path.read_bytes())
    at = raw.index(state(frozen, 0)["frozen"].numpy().tobytes()) + 2_000
    raw[at] ^= 1
    path.write_bytes(raw)
    return at


def steps_read(seen: list[events.Event]) -> list[str]:
    """Folders of the steps whose tensors a load read, in order."""
    begun = [event for event in seen if (event.kind, event.action, event.phase) == ("begin", "load", "read")]
    return [event.operation.rpartition("/")[2] for event in begun]


# A restore passes over every step that needs the damaged bytes.


@pytest.fixture
def rotten(tmp_path: Path) -> Path:
    """A run whose steps 2 to 6 refer to bytes of step 1 that changed; step 0 does not."""
    checkpointer = sp.Checkpointer(tmp_path, incremental=True)
    sp.save(tmp_path / step_name(0), state(5, 0), step=0)
    for step in range(1, 7):
        reused = checkpointer.save(step, state(1, step)).result().reused
        assert reused == (FROZEN_BYTES if step > 1 else 0)
    flip_bit(shard_of(tmp_path, 1), 1)
    return tmp_path


def test_restore_falls_back_past_a_broken_base_to_an_older_whole_step(rotten: Path) -> None:
    checkpointer, target, seen = sp.Checkpointer(rotten), state(-1, -1), list[events.Event]()
    with events.subscribe(seen.append):
        assert checkpointer.restore(target) == 0
    assert same(target, state(5, 0))
    assert [(item.step, item.damaged) for item in checkpointer.passed_over] == [
        (step, True) for step in (6, 5, 4, 3, 2, 1)
    ]
    lent = f"{step_name(1)}/shards/{shard_of(rotten, 1).name}"
    assert all(lent in item.reason for item in checkpointer.passed_over)
    assert all(
        "which the load of step 6 found damaged" in item.reason for item in checkpointer.passed_over[1:]
    )
    assert steps_read(seen) == [step_name(6), step_name(0)], "damaged bytes are read once"


def test_restore_takes_a_newer_step_that_does_not_need_the_damaged_bytes(rotten: Path) -> None:
    sp.Checkpointer(rotten).save(7, state(1, 7)).result()
    checkpointer, target = sp.Checkpointer(rotten), state(-1, -1)
    assert checkpointer.restore(target) == 7 and same(target, state(1, 7))
    assert checkpointer.passed_over == ()


def test_a_step_that_needs_other_bytes_of_the_damaged_file_is_taken(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, incremental=True)
    checkpointer.save(1, state(1, 1)).result()
    checkpointer.save(3, state(1, 3)).result()  # refers to "frozen" of step 1
    checkpointer.save(2, state(2, 1)).result()  # refers to "moving" of step 1
    flip_bit(shard_of(tmp_path, 1), 1)
    target = state(-1, -1)
    assert checkpointer.restore(target) == 2 and same(target, state(2, 1))


def test_a_partial_restore_takes_a_step_whose_damaged_bytes_it_does_not_need(rotten: Path) -> None:
    checkpointer, target = sp.Checkpointer(rotten), state(-1, -1)
    assert checkpointer.restore(target, include=["moving", "epoch"]) == 6
    assert target["moving"][0] == 6 and target["frozen"][0] == -0.5


def restored(root: str) -> tuple[Any, ...]:
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=20.0))
    whole = {"moving": torch.zeros(7_000), "frozen": torch.zeros(50_000), "epoch": 0}
    step = checkpointer.restore(whole)
    return step, whole["frozen"][0].item(), [(item.step, item.damage) for item in checkpointer.passed_over]


def test_all_ranks_fall_back_past_a_broken_base_alike(rotten: Path) -> None:
    one, other = (outcome.value for outcome in run_ranks(2, restored, str(rotten)))
    assert one == other and one[:2] == (0, 5.5)
    assert [step for step, _ in one[2]] == [6, 5, 4, 3, 2, 1]
    assert one[2][0][1].file.startswith(step_name(1)) and verify(LocalStorage(rotten / step_name(0))).ok
