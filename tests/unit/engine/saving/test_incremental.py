"""Incremental saves of one process: written chunks, references, and files that retention keeps."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest, read_shard_header
from shardproof.engine.saving.base_chunks import match_base
from shardproof.engine.storage.sink import LocalSink
from shardproof.errors import CorruptChunkError, FormatError, StorageError
from shardproof.report import scan_run
from shardproof.runs.checkpointer.retention import delete_steps, leftovers, remove_leftover
from shardproof.runs.checkpointer.step_folders import step_name
from shardproof.runs.maintenance import make_standalone, repair, verify
from shardproof.storage import ALIGNMENT, LocalStorage
from tests.unit.engine.saving.incremental_samples import (
    MODEL_BYTES,
    assert_whole,
    files,
    loaded,
    same,
    save,
    saver,
    shard_of,
    spoil,
    state,
)


def test_large_changed_chunks_start_at_the_usual_offset_in_their_pages(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    frozen = torch.arange(464.0)  # 1856 bytes before all others, in the first step only
    for step in (1, 2, 3):
        changing = torch.full((64, 1024), float(step))
        what = {"kept": torch.arange(64 * 1024.0).view(64, 1024), "w": changing, "frozen": frozen}
        save(checkpointer, step, what)
        (shard,) = (tmp_path / step_name(step) / "shards").iterdir()
        header = read_shard_header(LocalStorage(shard.parent), shard.name)
        (start,) = [start for name, _, _, start, _ in header.entries if name.startswith("w[")]
        assert 1856 <= start % 4096 < 1856 + 64
        assert any(name.startswith("kept[") for name, *_ in header.entries) == (step == 1)
        assert verify(LocalStorage(tmp_path / step_name(step))).ok
        with safe_open(shard, "pt") as file:
            assert torch.equal(file.get_tensor("w[0:64,0:1024]"), changing)


def test_changed_chunks_are_written_from_a_page_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that direct I/O is possible. The header, before them in the file, is written last."""
    checkpointer = saver(tmp_path)
    save(checkpointer, 1, {"w": torch.zeros(64, 1024), "frozen": torch.zeros(464)})
    written: list[range] = []
    write = LocalSink.write_at

    def note(sink: LocalSink, start: int, buffer: memoryview) -> None:
        if sink._path.parent.name == "shards":
            written.append(range(start, start + len(buffer)))
        write(sink, start, buffer)

    monkeypatch.setattr(LocalSink, "write_at", note)
    save(checkpointer, 2, {"w": torch.ones(64, 1024), "frozen": torch.zeros(464)})
    *chunks, head = written
    assert head.start == 0 and head.stop == chunks[0].start and head.stop % ALIGNMENT == 0
    assert all(one.stop == other.start for one, other in pairwise(chunks))


def test_a_standalone_copy_has_the_layout_of_a_full_save(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    what = {"a": torch.zeros(7), "b": torch.zeros(64, 1024), "c": torch.zeros(9), "d": torch.zeros(64, 1024)}
    for step in (1, 2):
        save(checkpointer, step, what | {"e": torch.full((5,), float(step))})
    make_standalone(LocalStorage(tmp_path / step_name(2)), LocalStorage(tmp_path / "copy"))
    sp.save(tmp_path / "whole", what | {"e": torch.full((5,), 2.0)})
    (copy,), (whole,) = ([*(tmp_path / name / "shards").iterdir()] for name in ("copy", "whole"))
    found, expected = (read_shard_header(LocalStorage(path.parent), path.name) for path in (copy, whole))
    assert [name[0] for name, *_ in expected.entries[:5]] == ["a", "c", "e", "b", "d"]
    within = [[(entry[0], entry[3] % 4096) for entry in header.entries] for header in (found, expected)]
    assert within[0] == within[1]


def test_only_changed_chunks_are_written(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    first = save(checkpointer, 1, state(0, 1))
    second = save(checkpointer, 2, state(0, 2))
    third = save(checkpointer, 3, state(5, 2))
    assert first.reused == 0 and first.bytes > MODEL_BYTES + 28_000
    assert second.reused == MODEL_BYTES and 28_000 < second.bytes < 28_000 + 16_384
    assert third.reused == 28_000 and MODEL_BYTES < third.bytes < MODEL_BYTES + 16_384
    for step, expected in ((1, state(0, 1)), (2, state(0, 2)), (3, state(5, 2))):
        assert_whole(tmp_path, step, expected)
    manifest = read_manifest(LocalStorage(tmp_path / step_name(3)))
    assert {record.folder for record in manifest.referenced_files} == {step_name(2)}
    with sp.open(tmp_path / step_name(3)) as ckpt:
        assert torch.equal(ckpt["optimizer"][5:9], torch.full((4,), 2.0))
        assert torch.equal(ckpt["model.a"][7], state(5, 0)["model"]["a"][7])


def test_a_step_in_which_nothing_changed_has_no_file_of_its_own(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    tensors = state(0, 1)["model"]
    save(checkpointer, 1, tensors)
    again = save(checkpointer, 2, tensors)
    more = save(checkpointer, 3, tensors)
    assert (again.bytes, more.bytes, again.reused) == (0, 0, MODEL_BYTES)
    assert [name.split("-")[0] for name in files(tmp_path, 3)] == ["index", "manifest.json"]
    (referenced,) = read_manifest(LocalStorage(tmp_path / step_name(3))).files
    assert referenced.folder == step_name(1), "a reference leads to the file that has the bytes"
    target = {key: torch.zeros_like(value) for key, value in tensors.items()}
    assert checkpointer.restore(target) == 3 and same(target, tensors)
    assert verify(LocalStorage(tmp_path / step_name(3))).ok


def test_steps_of_full_saves_have_no_references(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    for step in (1, 2):
        committed = save(checkpointer, step, state(0, 1))
        assert committed.reused == 0
    text = (tmp_path / step_name(2) / MANIFEST_NAME).read_bytes()
    assert text.startswith(b'{"format":"shardproof","version":1,')


def test_the_first_incremental_save_of_a_run_is_full_and_of_version_1(tmp_path: Path) -> None:
    save(saver(tmp_path), 1, state(0, 1))
    text = (tmp_path / step_name(1) / MANIFEST_NAME).read_bytes()
    assert text.startswith(b'{"format":"shardproof","version":1,')


def test_a_new_checkpointer_takes_the_stored_step_as_its_base(tmp_path: Path) -> None:
    save(sp.Checkpointer(tmp_path), 1, state(0, 1))
    assert save(saver(tmp_path), 2, state(0, 2)).reused == MODEL_BYTES
    assert save(saver(tmp_path), 3, state(0, 2)).reused == MODEL_BYTES + 28_000
    assert_whole(tmp_path, 3, state(0, 2))


def test_the_base_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matched = []
    real = match_base
    monkeypatch.setattr(
        "shardproof.engine.saving.incremental.match_base",
        lambda *args: matched.append(args[3]) or real(*args),
    )
    save(saver(tmp_path), 1, state(0, 1))
    checkpointer = saver(tmp_path)
    for step in range(2, 6):
        assert save(checkpointer, step, state(0, step)).reused == MODEL_BYTES
    assert matched == [step_name(1)]
    save(saver(tmp_path), 6, state(0, 6))  # another job
    save(checkpointer, 7, state(0, 7))
    assert matched == [step_name(1), step_name(5), step_name(6)]


def test_a_save_with_a_changed_structure_writes_only_new_tensors(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    save(checkpointer, 1, state(0, 1))
    other = state(0, 1)
    other["model"]["c"] = torch.ones(50)
    other["optimizer"] = torch.full((7000,), 1.0, dtype=torch.float64)
    committed = save(checkpointer, 2, other)
    assert committed.reused == MODEL_BYTES
    target = state(-1, -1)
    target["model"]["c"] = torch.zeros(50)
    target["optimizer"] = torch.zeros(7000, dtype=torch.float64)
    assert checkpointer.restore(target) == 2 and same(target, other)


def test_the_same_bytes_under_another_shape_are_another_tensor(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    save(checkpointer, 1, {"w": torch.arange(12.0)})
    assert save(checkpointer, 2, {"w": torch.arange(12.0).reshape(3, 4)}).reused == 0
    assert save(checkpointer, 3, {"v": torch.arange(12.0).reshape(3, 4)}).reused == 0


def test_empty_and_scalar_tensors_round_trip(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    what = {"none": torch.zeros(0, 3), "one": torch.tensor(7), "odd": torch.ones(3, dtype=torch.uint8)}
    for step in (1, 2, 3):
        save(checkpointer, step, what)
    what["odd"] = torch.zeros(3, dtype=torch.uint8)
    save(checkpointer, 4, what)
    target = {"none": torch.zeros(0, 3), "one": torch.tensor(0), "odd": torch.ones(3, dtype=torch.uint8)}
    assert checkpointer.restore(target) == 4 and same(target, what)
    for step in (1, 2, 3, 4):
        assert verify(LocalStorage(tmp_path / step_name(step))).ok


def test_training_continues_while_a_save_compares_chunks(tmp_path: Path) -> None:
    """Values that change after `save` returned reach neither the file nor the comparison."""
    checkpointer = saver(tmp_path)
    model = torch.nn.ModuleDict({"moved": torch.nn.Linear(700, 700), "frozen": torch.nn.Linear(50, 60)})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model["moved"].parameters(), lr=0.1)
    expected: dict[int, dict[str, torch.Tensor]] = {}
    reused = []
    for step in range(1, 6):
        pending = checkpointer.save(step, {"model": model, "optimizer": optimizer})
        expected[step] = {key: value.clone() for key, value in model.state_dict().items()}
        for parameter in model["moved"].parameters():
            parameter.grad = torch.full_like(parameter, float(step))
        optimizer.step()
        reused.append(pending.result().reused)
    assert reused[1:] == [4 * 51 * 60] * 4
    for step, then in expected.items():
        target = {"model": {key: torch.zeros_like(value) for key, value in then.items()}}
        sp.load(tmp_path / step_name(step), target, strict=False)
        assert same(target["model"], then)
        assert verify(LocalStorage(tmp_path / step_name(step))).ok


# Retention.


def test_retention_keeps_files_that_a_kept_step_refers_to(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path, keep=sp.KeepLatest(2))
    for step in range(1, 6):
        save(checkpointer, step, state(0, step))
        checkpointer.wait_for_scrub(timeout=60)
        assert checkpointer.steps() == list(range(max(1, step - 1), step + 1))
        assert_whole(tmp_path, step, state(0, step))
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(step) for step in (1, 4, 5)]
    assert [name.split("/")[0] for name in files(tmp_path, 1)] == ["shards"]
    target = state(-1, -1)
    assert checkpointer.restore(target) == 5 and same(target, state(0, 5))
    assert checkpointer.passed_over == (), "a folder of referenced files is not a save that died"
    for step in (6, 7):
        save(checkpointer, step, state(1, step))
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(6), step_name(7)], (
        "the last step that referred to them is gone"
    )
    assert_whole(tmp_path, 7, state(1, 7))


def test_ls_shows_a_step_that_only_lends_files(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    for step in (1, 2):
        save(checkpointer, step, state(0, step))
    delete_steps(LocalStorage(tmp_path), [step_name(1)])
    removed, newer = scan_run(LocalStorage(tmp_path))
    assert (removed.status, removed.committed, removed.referenced_by) == (
        "referenced",
        False,
        (step_name(2),),
    )
    assert removed.reason is not None and "stay for step-00000002" in removed.reason
    assert (newer.status, newer.save.references) == ("committed", (step_name(1),))


def test_files_that_other_steps_refer_to_are_not_leftovers(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    for step in (1, 2):
        save(checkpointer, step, state(0, step))
    delete_steps(LocalStorage(tmp_path), [step_name(1)])
    dead = tmp_path / step_name(1) / "shards" / "00000-dead.safetensors"
    dead.write_bytes(b"begun")
    storage = LocalStorage(tmp_path)
    (found,) = leftovers(storage, lambda name: 0.0)
    assert found.files == ("shards/00000-dead.safetensors",)
    assert remove_leftover(storage, found) and not dead.exists()
    assert_whole(tmp_path, 2, state(0, 2))


def test_a_leftover_that_a_new_step_refers_to_is_not_removed(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    save(checkpointer, 1, state(0, 1))
    manifest = tmp_path / step_name(1) / MANIFEST_NAME
    text = manifest.read_bytes()
    manifest.unlink()
    found = leftovers(LocalStorage(tmp_path), lambda name: 0.0)[0]
    manifest.write_bytes(text)
    save(checkpointer, 2, state(0, 2))
    manifest.unlink()
    assert not remove_leftover(LocalStorage(tmp_path), found)
    assert_whole(tmp_path, 2, state(0, 2))


def test_an_unreadable_manifest_keeps_all_files_that_it_may_refer_to(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    for step in (1, 2, 3):
        save(checkpointer, step, state(0, step))
    broken = tmp_path / step_name(3) / MANIFEST_NAME
    broken.write_bytes(broken.read_bytes()[:-30])
    removal = delete_steps(LocalStorage(tmp_path), [step_name(1), step_name(2)])
    assert removal.unknown == (step_name(3),)
    assert [name.split("/")[0] for name in files(tmp_path, 1)] == ["shards"]
    assert leftovers(LocalStorage(tmp_path), lambda name: 0.0) == []


def test_a_replaced_step_keeps_files_that_others_refer_to(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    save(checkpointer, 1, state(0, 1))
    save(checkpointer, 2, state(0, 2))
    (old,) = (tmp_path / step_name(1) / "shards").iterdir()
    save(checkpointer, 1, state(9, 9), overwrite=True)
    assert old.exists() and len(files(tmp_path, 1)) == 4
    assert_whole(tmp_path, 1, state(9, 9))
    assert_whole(tmp_path, 2, state(0, 2))
    save(checkpointer, 2, state(9, 9), overwrite=True)
    assert not old.exists(), "the step that referred to it was replaced"
    assert_whole(tmp_path, 2, state(9, 9))


def test_sp_save_over_a_step_keeps_files_that_others_refer_to(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    save(checkpointer, 1, state(0, 1))
    save(checkpointer, 2, state(0, 2))
    sp.save(tmp_path / step_name(1), state(9, 9), overwrite=True)
    assert_whole(tmp_path, 2, state(0, 2))


def test_a_step_after_a_rollback_refers_to_no_step_that_the_rollback_gave_up(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    for step in (1, 2, 3, 4):
        save(checkpointer, step, state(0, step))
    save(checkpointer, 3, state(0, 33), overwrite=True)
    manifest = read_manifest(LocalStorage(tmp_path / step_name(3)))
    assert {record.folder for record in manifest.referenced_files} == {step_name(1)}
    for step, expected in ((1, 1), (2, 2), (3, 33), (4, 4)):
        assert_whole(tmp_path, step, state(0, expected))


# Damage.


def test_verify_follows_references(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    for step in (1, 2):
        save(checkpointer, step, state(0, step))
    referenced = shard_of(tmp_path, 1)
    spoil(referenced)
    for step in (1, 2):
        (fault,) = verify(LocalStorage(tmp_path / step_name(step))).faults
        assert isinstance(fault, CorruptChunkError) and referenced.name in fault.message
    assert fault.details["file"] == f"{step_name(1)}/shards/{referenced.name}"
    spoil(referenced)
    assert verify(LocalStorage(tmp_path / step_name(2))).ok
    spoil(referenced, 300)
    faults = verify(LocalStorage(tmp_path / step_name(2))).faults
    assert any(isinstance(fault, FormatError) for fault in faults), "the header of a referenced file"
    spoil(referenced, 300)
    spoil(referenced, -1)
    faults = verify(LocalStorage(tmp_path / step_name(2))).faults
    assert any(isinstance(fault, FormatError) for fault in faults), "the digests of a referenced file"


def test_damage_in_a_chunk_that_a_step_does_not_refer_to_is_no_fault_of_it(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    for step in (1, 2):
        save(checkpointer, step, state(0, step))
    referenced = shard_of(tmp_path, 1)
    raw = referenced.read_bytes()
    at = raw.find(torch.full((20,), 1.0).numpy().tobytes(), 4096)  # the optimizer of step 1
    spoil(referenced, at + 1000)
    assert len(verify(LocalStorage(tmp_path / step_name(1))).faults) == 1
    assert verify(LocalStorage(tmp_path / step_name(2))).ok


def test_a_missing_lent_file_is_named_and_an_older_step_is_restored(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    save(checkpointer, 1, state(7, 1))
    save(checkpointer, 2, state(0, 2))
    save(checkpointer, 3, state(0, 3))
    referenced = shard_of(tmp_path, 2)
    referenced.unlink()
    with pytest.raises(StorageError, match="saved incrementally") as caught:
        loaded(tmp_path, 3)
    assert referenced.name in caught.value.message and caught.value.details["missing"] is True
    report = verify(LocalStorage(tmp_path / step_name(3)))
    assert [fault.details["file"] for fault in report.faults] == [f"{step_name(2)}/shards/{referenced.name}"]
    with sp.open(tmp_path / step_name(3)) as ckpt, pytest.raises(StorageError, match="saved incrementally"):
        ckpt["model.a"].read()
    fresh = saver(tmp_path)
    target = state(-1, -1)
    assert fresh.restore(target) == 1 and same(target, state(7, 1))
    assert [(item.step, item.damaged) for item in fresh.passed_over] == [(3, True), (2, True)]
    infos = {info.step: info for info in scan_run(LocalStorage(tmp_path))}
    assert infos[3].status == "damaged"
    committed = save(fresh, 3, state(7, 3))
    assert committed.reused == MODEL_BYTES, "from step 1: steps that restore passed over are no base"
    assert_whole(tmp_path, 3, state(7, 3))


@pytest.mark.parametrize("damage", ["lost", "cut", "flipped"])
def test_repair_is_advised_only_if_it_helps(tmp_path: Path, damage: str) -> None:
    checkpointer = saver(tmp_path)
    for step in (1, 2):
        save(checkpointer, step, state(0, step))
    for step in (1, 2):
        (index,) = (tmp_path / step_name(step)).glob("index-*")
        data = index.read_bytes()
        if damage == "lost":
            index.unlink()
        else:
            index.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(FormatError) as caught:
            sp.open(tmp_path / step_name(step))
        assert ("`shardproof repair` writes it again" in caught.value.message) == (step == 1)
        if step == 1:
            repair(LocalStorage(tmp_path / step_name(step)))
        else:
            with pytest.raises(FormatError, match="cannot be repaired"):
                repair(LocalStorage(tmp_path / step_name(step)))


def test_restore_passes_over_steps_with_damage_in_a_lent_file(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    save(checkpointer, 1, state(7, 1))
    for step in (2, 3):
        save(checkpointer, step, state(0, step))
    referenced = shard_of(tmp_path, 2)
    spoil(referenced)
    target = state(-1, -1)
    fresh = saver(tmp_path)
    assert fresh.restore(target) == 1 and same(target, state(7, 1))


def test_chunks_of_a_missing_file_are_written_again(tmp_path: Path) -> None:
    checkpointer = saver(tmp_path)
    for step in (1, 2):
        save(checkpointer, step, state(0, step))
    shard_of(tmp_path, 1).unlink()
    assert save(checkpointer, 3, state(0, 3)).reused == 0
    assert_whole(tmp_path, 3, state(0, 3))
    assert save(saver(tmp_path), 4, state(0, 4)).reused == MODEL_BYTES
    assert_whole(tmp_path, 4, state(0, 4))


@pytest.mark.parametrize("loss", ["manifest.json", "index"])
def test_an_unreadable_base_is_not_used(tmp_path: Path, loss: str, caplog: pytest.LogCaptureFixture) -> None:
    save(saver(tmp_path), 1, state(0, 1))
    (path,) = (tmp_path / step_name(1)).glob(f"{loss}*")
    path.write_bytes(path.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING):
        assert save(saver(tmp_path), 2, state(0, 2)).reused == 0
    assert "step-00000001 cannot be restored" in caplog.text
    assert_whole(tmp_path, 2, state(0, 2))
