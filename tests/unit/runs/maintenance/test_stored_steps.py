"""Verification, repair and standalone copies of stored steps. Damage of every kind is in tests/faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.errors import CorruptChunkError, FormatError, NotCommittedError
from shardproof.runs.checkpointer.retention import delete_steps
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.runs.maintenance import make_standalone, repair, verify
from shardproof.storage import LocalStorage
from tests.unit.engine.saving.incremental_samples import (
    MODEL_BYTES,
    assert_whole,
    same,
    save,
    saver,
    shard_of,
    spoil,
    state,
)


def test_verify_counts_what_it_reads(tmp_path: Path) -> None:
    save(saver(tmp_path), 1, state(0, 1))
    seen: list[tuple[int, int]] = []
    report = verify(LocalStorage(tmp_path / step_name(1)), lambda *progress: seen.append(progress))
    total = MODEL_BYTES + 28_000
    assert (report.ok, report.step, report.files, report.chunks, report.bytes) == (True, 1, 1, 3, total)
    assert seen[-1] == (total, total)
    assert json.loads(json.dumps(report.to_json()))["faults"] == []
    with pytest.raises(NotCommittedError):
        verify(LocalStorage(tmp_path / "nothing"))


def test_verify_can_read_only_files_of_other_steps(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    for step in (1, 2):
        save(checkpointer, step, state(0, step))  # step 2 refers to the model of step 1
    storage = LocalStorage(tmp_path / step_name(2))
    spoil(shard_of(tmp_path, 2), 20_000)
    (fault,) = verify(storage).faults
    assert isinstance(fault, CorruptChunkError)
    report = verify(storage, referenced_only=True)
    assert (report.ok, report.files, report.bytes) == (True, 1, MODEL_BYTES)


def test_repair_writes_the_manifest_again(tmp_path: Path) -> None:
    save(saver(tmp_path), 1, state(0, 1), metadata={"loss": 1.5})
    folder = LocalStorage(tmp_path / step_name(1))
    before = read_manifest(folder)
    with pytest.raises(sp.AlreadyCommittedError, match="nothing to repair"):
        repair(folder)
    (tmp_path / step_name(1) / MANIFEST_NAME).unlink()
    after = repair(folder)
    assert after.repaired and not before.repaired
    for name in ("step", "time", "attempt", "metadata", "tensors", "aliases", "objects", "files"):
        assert getattr(after, name) == getattr(before, name)
    assert_whole(tmp_path, 1, state(0, 1))


def test_repair_of_an_incremental_step_needs_all_chunks_in_its_own_files(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    save(checkpointer, 1, state(0, 1))
    save(checkpointer, 2, state(3, 2))  # all changed: its own files have all
    save(checkpointer, 3, state(3, 3))
    save(checkpointer, 4, {"model": state(3, 3)["model"]})  # no file of its own
    (tmp_path / step_name(2) / MANIFEST_NAME).unlink()
    manifest = repair(LocalStorage(tmp_path / step_name(2)))
    assert manifest.repaired
    for step in (1, 2, 3):
        assert_whole(tmp_path, step, state(0, 1) if step == 1 else state(3, step))
    for lost in ("index", "manifest.json"):
        (path,) = (tmp_path / step_name(3)).glob(f"{lost}*")
        path.unlink()
        with pytest.raises(FormatError, match="saved incrementally.*restore another step"):
            repair(LocalStorage(tmp_path / step_name(3)))
    (tmp_path / step_name(4) / MANIFEST_NAME).unlink()
    with pytest.raises(FormatError, match="saved incrementally"):
        repair(LocalStorage(tmp_path / step_name(4)))


def test_a_standalone_copy_outlives_the_steps_it_was_made_of(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path / "run")
    for step in (1, 2, 3):
        save(checkpointer, step, state(step // 3, step), metadata={"loss": 1.5, "step": step})
    source = tmp_path / "run" / step_name(3)
    seen: list[tuple[int, int]] = []
    make_standalone(
        LocalStorage(source),
        LocalStorage(tmp_path / "whole"),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (MODEL_BYTES + 28_000, MODEL_BYTES + 28_000)
    one, other = read_manifest(LocalStorage(source)), read_manifest(LocalStorage(tmp_path / "whole"))
    for name in ("step", "time", "world_size", "metadata", "tensors", "aliases", "objects", "repaired"):
        assert getattr(one, name) == getattr(other, name)
    assert other.version == 1 and other.referenced_files == () and other.attempt != one.attempt
    delete_steps(LocalStorage(tmp_path / "run"), [step_name(step) for step in (1, 2, 3)])
    assert list((tmp_path / "run").iterdir()) == []
    assert verify(LocalStorage(tmp_path / "whole")).ok
    target = state(-1, -1)
    sp.load(tmp_path / "whole", target)
    assert same(target, state(1, 3))
    (tmp_path / "whole" / MANIFEST_NAME).unlink()
    assert repair(LocalStorage(tmp_path / "whole")).objects == one.objects
    assert verify(LocalStorage(tmp_path / "whole")).ok


@pytest.mark.parametrize(
    "what",
    [
        {"epoch": 3, "name": "only plain values"},
        {"none": torch.zeros(0, 3)},
        {"odd": torch.ones(3, dtype=torch.uint8), "z": torch.ones(2, 2, dtype=torch.complex64), "n": 1},
        {"big": torch.arange(5_000_000.0), "tied": torch.ones(3)},
    ],
    ids=["plain", "empty", "odd", "big"],
)
def test_a_standalone_copy_of_any_state_has_its_values(tmp_path: Path, what: dict[str, Any]) -> None:
    sp.save(tmp_path / "a", what, step=4)
    make_standalone(LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b"))
    assert verify(LocalStorage(tmp_path / "b")).ok
    with sp.open(tmp_path / "a") as one, sp.open(tmp_path / "b") as other:
        assert one.keys() == other.keys()
        for key in one:
            a, b = one[key], other[key]
            assert torch.equal(a.read(), b.read()) if hasattr(a, "read") else a == b


def test_a_copy_of_a_damaged_step_leaves_nothing(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path / "run")
    for step in (1, 2):
        save(checkpointer, step, state(0, step))
    spoil(shard_of(tmp_path / "run", 1))
    with pytest.raises(CorruptChunkError, match="copy another step"):
        make_standalone(LocalStorage(tmp_path / "run" / step_name(2)), LocalStorage(tmp_path / "b"))
    assert not list((tmp_path / "b").rglob("*.*"))
    with pytest.raises(NotCommittedError):
        make_standalone(LocalStorage(tmp_path / "nothing"), LocalStorage(tmp_path / "b"))
    with pytest.raises(sp.AlreadyCommittedError):
        make_standalone(
            LocalStorage(tmp_path / "run" / step_name(2)), LocalStorage(tmp_path / "run" / step_name(1))
        )
    assert json.loads((tmp_path / "run" / step_name(1) / MANIFEST_NAME).read_text())["step"] == 1
