"""Bytes of a step rot on the disk, and later incremental steps refer to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import shardproof as sp
from shardproof import events
from shardproof.engine.format import MANIFEST_NAME, Manifest, encode_manifest, read_manifest
from shardproof.maintenance import verify
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.storage import LocalStorage
from tests.harness import rank, rendezvous, run_ranks
from tests.scenarios.states import Phases

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
    """Flips a bit of "frozen" in a shard file; returns the byte's position."""
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
    referenced = f"{step_name(1)}/shards/{shard_of(rotten, 1).name}"
    assert all(referenced in item.reason for item in checkpointer.passed_over)
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


# The chain of steps that share bytes is bounded.


def saved(
    root: Path, steps: Any, *, restart: bool = False, keep: Any = None, full_every: int | None = 20
) -> list[int]:
    """Saves steps in which "frozen" does not change; returns the bytes that each save reused."""

    def made() -> sp.Checkpointer:
        return sp.Checkpointer(root, incremental=sp.Incremental(full_every=full_every), keep=keep)

    reused, checkpointer = [], made()
    for step in steps:
        checkpointer = made() if restart else checkpointer
        reused.append(checkpointer.save(step, state(1, step)).result().reused)
    return reused


@pytest.mark.parametrize("keep", [None, sp.KeepLatest(1)], ids=["all kept", "one kept"])
@pytest.mark.parametrize("restart", [False, True], ids=["one process", "restarts"])
def test_one_save_of_full_every_is_written_in_full(
    tmp_path: Path, keep: sp.KeepLatest | None, restart: bool
) -> None:
    reused = saved(tmp_path, range(1, 9), full_every=3, keep=keep, restart=restart)
    assert reused == [0, FROZEN_BYTES, FROZEN_BYTES, 0, FROZEN_BYTES, FROZEN_BYTES, 0, FROZEN_BYTES]
    assert {record.folder for record in manifest_of(tmp_path, 8).referenced_files} == {step_name(7)}
    assert verify(LocalStorage(tmp_path / step_name(8))).ok


def manifest_of(root: Path, step: int) -> Manifest:
    return read_manifest(LocalStorage(root / step_name(step)))


def test_damage_reaches_no_step_after_the_next_that_is_written_in_full(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 8), full_every=3)
    flip_bit(shard_of(tmp_path, 4), 1)
    whole = [step for step in range(1, 8) if verify(LocalStorage(tmp_path / step_name(step))).ok]
    assert whole == [1, 2, 3, 7]


def test_the_default_bounds_the_chain(tmp_path: Path) -> None:
    reused = saved(tmp_path, range(1, 42))
    assert [step for step, count in enumerate(reused, 1) if count == 0] == [1, 21, 41]


@pytest.mark.parametrize(("full_every", "full"), [(None, [1]), (1, list(range(1, 25)))])
def test_a_chain_may_have_no_bound_or_no_references(
    tmp_path: Path, full_every: int | None, full: list[int]
) -> None:
    reused = saved(tmp_path, range(1, 25), full_every=full_every)
    assert [step for step, count in enumerate(reused, 1) if count == 0] == full


@pytest.mark.parametrize("full_every", [0, -1, True, 2.5, "3"])
def test_full_every_must_be_a_number_of_saves(full_every: Any) -> None:
    with pytest.raises(ValueError, match="full_every"):
        sp.Incremental(full_every=full_every)


def test_a_save_without_references_begins_a_chain(tmp_path: Path) -> None:
    saved(tmp_path, (1, 2), full_every=3)
    sp.Checkpointer(tmp_path).save(3, state(1, 3)).result()
    assert saved(tmp_path, (4, 5, 6), full_every=3) == [FROZEN_BYTES, FROZEN_BYTES, 0]


def test_a_chain_of_unknown_length_ends(tmp_path: Path) -> None:
    """A version without the bound names no length in the attempt."""
    saved(tmp_path, (1, 2), full_every=None)
    folder, manifest = tmp_path / step_name(2), manifest_of(tmp_path, 2)
    name = manifest.attempt.partition(".")[0]
    for path in list(folder.rglob("*.safetensors")):
        path.rename(path.with_name(path.name.replace(manifest.attempt, name)))
    renamed = [
        record if record.folder else replace(record, name=record.name.replace(manifest.attempt, name))
        for record in manifest.files
    ]
    index = replace(manifest.index, name=manifest.index.name.replace(manifest.attempt, name))
    text = encode_manifest(replace(manifest, attempt=name, files=tuple(renamed), index=index))
    (folder / MANIFEST_NAME).write_bytes(text)
    assert verify(LocalStorage(folder)).ok
    assert saved(tmp_path, (3, 4), full_every=1_000) == [0, FROZEN_BYTES]


def test_a_step_written_in_full_is_replaced_in_full(tmp_path: Path) -> None:
    """References to old bytes do not take the place of an independent copy."""
    saved(tmp_path, range(1, 6), full_every=3)
    checkpointer = sp.Checkpointer(tmp_path, incremental=True)
    assert checkpointer.save(4, state(1, 44), overwrite=True).result().reused == 0
    assert checkpointer.save(3, state(1, 33), overwrite=True).result().reused == FROZEN_BYTES


def trained(root: str, full_every: int | None) -> Any:
    meetings = Phases(rendezvous(deadline=20.0))
    own = full_every or 2 + rank()
    checkpointer = sp.Checkpointer(root, rendezvous=meetings, incremental=sp.Incremental(full_every=own))
    found = []
    try:
        for step in range(1, 5):
            meetings.met.clear()
            values = {"own": torch.full((3_000,), float(rank())), "all": torch.ones(900), "step": step}
            reused = checkpointer.save(step, {f"r{rank()}": values}).result().reused
            found.append((reused, list(meetings.met)))
    except sp.ShardproofError as error:
        return str(error)
    return found


def test_ranks_bound_the_chain_alike_and_meet_no_more_often(tmp_path: Path) -> None:
    one, other = (outcome.value for outcome in run_ranks(2, trained, str(tmp_path), 3))
    size = 2 * 4 * 3_900
    assert [reused for reused, _ in one] == [reused for reused, _ in other] == [0, size, size, 0]
    assert one[3][1] == other[3][1] == ["collect", "write"]


def test_ranks_with_different_bounds_all_get_the_error(tmp_path: Path) -> None:
    one, other = (outcome.value for outcome in run_ranks(2, trained, str(tmp_path), None))
    assert one == other and "full_every=2" in one and "full_every=3" in one
