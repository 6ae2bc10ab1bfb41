"""Checkpoints of steps whose validation failed are kept apart from the run's steps until they are settled."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.errors import StorageError
from shardproof.maintenance import verify
from shardproof.report import scan_run
from shardproof.runs.checkpointer.retention import leftovers, remove_leftover
from shardproof.runs.checkpointer.step_folders import parse_folder
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage
from tests.gate import Gate


def state(value: float) -> dict[str, Any]:
    return {"a": torch.full((7000,), float(value))}


def restored(checkpointer: sp.Checkpointer, **options: Any) -> tuple[int | None, float]:
    target = state(-1)
    return checkpointer.restore(target, **options), float(target["a"][0])


def damage(folder: Path, pattern: str) -> None:
    (file,) = folder.glob(pattern)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def long_ago(_name: str) -> float:
    return 0.0


@pytest.fixture
def run(tmp_path: Path) -> sp.Checkpointer:
    """Steps 1 and 2, and suspects of 2 and 3."""
    checkpointer = sp.Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, state(step)).result()
    for step in (2, 3):
        checkpointer.save(step, state(10 * step), suspect=True).result()
    return checkpointer


def test_a_suspect_is_not_listed_and_not_restored_as_a_step(run: sp.Checkpointer, tmp_path: Path) -> None:
    assert (run.steps(), run.suspects()) == ([1, 2], [2, 3])
    assert folders(tmp_path) == ["step-00000001", "step-00000002", "suspect-00000002", "suspect-00000003"]
    assert restored(run) == (2, 2)
    assert run.passed_over == ()
    with pytest.raises(sp.NotCommittedError):
        restored(run, step=3)


def test_a_restore_that_skips_newer_suspects_warns(
    run: sp.Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    restored(run)
    assert "suspect step 2, suspect step 3: its validation failed" in caplog.text
    caplog.clear()
    run.save(4, state(4)).result()
    restored(run)
    assert caplog.text == "", "a suspect older than the step causes no warning"


def test_suspects_are_restored_with_suspect_true(run: sp.Checkpointer) -> None:
    assert restored(run, suspect=True) == (3, 30)
    run.save(4, state(4)).result()
    assert restored(run, suspect=True) == (4, 4)
    run.save(4, state(40), suspect=True).result()
    assert restored(run, suspect=True) == (4, 40), "of one number the suspect comes first"


@pytest.mark.parametrize(("step", "suspect", "value"), [(2, True, 20), (2, False, 2), (1, True, 1)])
def test_a_step_number_selects_the_suspect_only_with_suspect_true(
    run: sp.Checkpointer, step: int, suspect: bool, value: float
) -> None:
    assert restored(run, step=step, suspect=suspect) == (step, value)


def test_a_run_of_suspects_alone_is_restored_only_with_suspect_true(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(5, state(5), suspect=True).result()
    assert restored(checkpointer) == (None, -1)
    assert "suspect step 5: its validation failed" in caplog.text
    assert restored(checkpointer, suspect=True) == (5, 5)


def test_a_settled_suspect_is_never_restored(run: sp.Checkpointer, tmp_path: Path) -> None:
    run.settle_suspect(3, "persistent fault: node 7")
    assert run.suspects() == [2]
    assert restored(run, suspect=True) == (2, 20)
    run.settle_suspect(2, "correct result")
    assert restored(run, suspect=True) == (2, 2)
    assert restored(run, step=2, suspect=True) == (2, 2)
    assert run.passed_over == ()
    settled = json.loads((tmp_path / "suspect-00000003" / "settled.json").read_text())
    assert settled.keys() == {"attempt", "verdict", "time"}
    assert settled["verdict"] == "persistent fault: node 7"
    assert abs(settled["time"] - time.time()) < 60


def test_a_suspect_may_be_settled_again(run: sp.Checkpointer, tmp_path: Path) -> None:
    for verdict in ("transient fault", "correct result"):
        run.settle_suspect(3, verdict)
    assert [info.verdict for info in scan_run(LocalStorage(tmp_path)) if info.step == 3] == ["correct result"]


def test_settling_a_missing_suspect_warns_and_changes_nothing(
    run: sp.Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = folders(tmp_path)
    run.settle_suspect(1, "correct result")
    assert "suspect-00000001: nothing to settle" in caplog.text
    assert folders(tmp_path) == before


@pytest.mark.parametrize(("step", "verdict"), [(-1, "correct"), (3, None), ("3", "correct")])
def test_an_invalid_step_or_verdict_is_refused(run: sp.Checkpointer, step: Any, verdict: Any) -> None:
    with pytest.raises(sp.ShardproofError, match="a whole number|a text as verdict"):
        run.settle_suspect(step, verdict)
    assert run.suspects() == [2, 3]


def test_a_suspect_is_replaced_without_overwrite_and_is_no_longer_settled(
    run: sp.Checkpointer, tmp_path: Path
) -> None:
    run.settle_suspect(3, "transient fault")
    run.save(3, state(33), suspect=True).result()
    assert run.suspects() == [2, 3]
    assert restored(run, suspect=True) == (3, 33)
    assert verify(LocalStorage(tmp_path / "suspect-00000003")).ok
    assert len(list((tmp_path / "suspect-00000003" / "shards").iterdir())) == 1


def test_a_settled_suspect_whose_replacement_died_stays_settled(run: sp.Checkpointer, tmp_path: Path) -> None:
    run.settle_suspect(3, "transient fault")
    full = FaultyStorage(LocalStorage(tmp_path), 0, StorageError("full"), only=("publish",))
    with pytest.raises(sp.ShardproofError):
        sp.Checkpointer(full).save(3, state(33), suspect=True).result()
    again = sp.Checkpointer(tmp_path)
    assert again.suspects() == [2]
    assert restored(again, suspect=True) == (2, 20)


def test_a_verdict_that_cannot_be_read_settles_nothing(
    run: sp.Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.settle_suspect(3, "transient fault")
    (tmp_path / "suspect-00000003" / "settled.json").write_text("{")
    assert run.suspects() == [2, 3]
    assert "counts as not settled" in caplog.text
    run.settle_suspect(3, "transient fault")
    assert run.suspects() == [2]


@pytest.mark.parametrize("pattern", ["shards/*", "index-*", MANIFEST_NAME])
def test_a_damaged_suspect_is_passed_over(run: sp.Checkpointer, tmp_path: Path, pattern: str) -> None:
    damage(tmp_path / "suspect-00000003", pattern)
    assert restored(run, suspect=True) == (2, 20)
    (passed,) = run.passed_over
    assert (passed.step, passed.suspect, passed.damaged) == (3, True, True)


def test_a_damaged_suspect_does_not_make_the_step_of_its_number_replaceable(
    run: sp.Checkpointer, tmp_path: Path
) -> None:
    for step in (2, 3):
        damage(tmp_path / f"suspect-0000000{step}", "shards/*")
    assert restored(run, suspect=True) == (2, 2)
    with pytest.raises(sp.AlreadyCommittedError):
        run.save(2, state(22)).result()


@pytest.mark.parametrize("pattern", ["index-*", MANIFEST_NAME])
def test_a_damaged_suspect_can_be_settled_and_is_removed(tmp_path: Path, pattern: str) -> None:
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(2))
    checkpointer.save(1, state(1), suspect=True).result()
    damage(tmp_path / "suspect-00000001", pattern)
    checkpointer.settle_suspect(1, "lost")
    assert checkpointer.suspects() == []
    checkpointer.save(2, state(2)).result()
    assert folders(tmp_path) == ["step-00000002"]


def test_an_unfinished_suspect_is_passed_over(run: sp.Checkpointer, tmp_path: Path) -> None:
    (tmp_path / "suspect-00000003" / MANIFEST_NAME).unlink()
    assert run.suspects() == [2]
    assert restored(run, suspect=True) == (2, 20)
    assert [(item.step, item.suspect, item.damaged) for item in run.passed_over] == [(3, True, False)]
    assert restored(run) == (2, 2)
    assert run.passed_over == ()
    run.settle_suspect(3, "lost")
    assert not (tmp_path / "suspect-00000003" / "settled.json").exists()


def test_a_renamed_suspect_is_not_taken_for_another(run: sp.Checkpointer, tmp_path: Path) -> None:
    (tmp_path / "suspect-00000003").rename(tmp_path / "suspect-00000009")
    assert restored(run, suspect=True) == (2, 20)
    assert "renamed" in run.passed_over[0].reason


@pytest.mark.parametrize("name", ["settled.json", "manifest.json"])
def test_an_unreadable_suspect_fails_only_a_restore_with_suspect_true(
    run: sp.Checkpointer, monkeypatch: pytest.MonkeyPatch, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: LocalStorage, file: str, *args: Any) -> Any:
        if "/suspect-" in self.location and file == name:
            raise StorageError("permission", errno="EACCES")
        return real(self, file, *args)

    run.settle_suspect(3, "transient fault")
    real = LocalStorage.read
    monkeypatch.setattr(LocalStorage, "read", refuse)
    assert restored(run) == (2, 2)
    with pytest.raises(StorageError):
        restored(run, suspect=True)
    keeping = sp.Checkpointer(run.root, keep=sp.KeepLatest(1))
    keeping.save(4, state(4)).result()
    assert keeping.steps() == [4], "retention of steps continues"


def test_retention_spares_suspects_until_they_are_settled(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(1))
    for step in (2, 3, 5):
        checkpointer.save(step, state(step), suspect=True).result()
    for step in (1, 2, 3, 4):
        checkpointer.save(step, state(step)).result()
    assert (checkpointer.steps(), checkpointer.suspects()) == ([4], [2, 3, 5])
    for step in (2, 5):
        checkpointer.settle_suspect(step, "transient fault")
    assert "suspect-00000002" in folders(tmp_path), "it goes when a step is committed"
    checkpointer.save(4, state(4), overwrite=True).result()
    assert folders(tmp_path) == ["step-00000004", "suspect-00000003", "suspect-00000005"]
    checkpointer.save(5, state(5)).result()
    assert folders(tmp_path) == ["step-00000005", "suspect-00000003", "suspect-00000005"], (
        "a newer step, not one of the same number"
    )


def test_retention_does_not_count_suspects(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        sp.Checkpointer(tmp_path).save(step, state(step)).result()
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(2))
    for step in (4, 5, 6):
        checkpointer.save(step, state(step), suspect=True).result()
    assert checkpointer.steps() == [1, 2, 3], "a suspect's commit lets nothing go"
    checkpointer.save(7, state(7)).result()
    assert (checkpointer.steps(), checkpointer.suspects()) == ([3, 7], [4, 5, 6])


def test_other_files_in_the_folder_of_a_settled_suspect_stay(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(1))
    checkpointer.save(1, state(1)).result()
    checkpointer.save(1, state(1), suspect=True).result()
    (tmp_path / "step-00000001" / "settled.json").write_text("the user's")
    (tmp_path / "suspect-00000001" / "notes.txt").write_text("the user's")
    checkpointer.settle_suspect(1, "transient fault")
    checkpointer.save(2, state(2)).result()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if path.is_file())
    assert [name for name in left if "00000001" in name] == [
        "step-00000001/settled.json",
        "suspect-00000001/notes.txt",
    ]


def test_a_suspect_is_a_full_save_and_no_base(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, incremental=True, keep=sp.KeepLatest(2))
    checkpointer.save(1, state(1)).result()
    suspect = checkpointer.save(2, state(1), suspect=True).result()
    assert (suspect.reused, suspect.bytes > 7000) == (0, True)
    following = checkpointer.save(3, state(1)).result()
    assert following.reused == 7000 * 4
    referenced = read_manifest(LocalStorage(tmp_path / "step-00000003")).referenced_files
    assert {record.folder for record in referenced} == {"step-00000001"}
    assert read_manifest(LocalStorage(tmp_path / "suspect-00000002")).referenced_files == ()
    checkpointer.settle_suspect(2, "transient fault")
    for step in (4, 5, 6):
        checkpointer.save(step, state(1)).result()
        checkpointer.wait_for_scrub(timeout=60)
    assert (checkpointer.steps(), checkpointer.suspects()) == ([5, 6], [])
    assert restored(checkpointer) == (6, 1)
    assert verify(LocalStorage(tmp_path / "step-00000006")).ok


def test_a_damaged_suspect_does_not_stop_retention(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(1))
    checkpointer.save(1, state(1), suspect=True).result()
    damage(tmp_path / "suspect-00000001", MANIFEST_NAME)
    for step in (2, 3):
        checkpointer.save(step, state(step)).result()
    assert folders(tmp_path) == ["step-00000003", "suspect-00000001"]


def test_a_suspect_waits_for_the_previous_save_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    checkpointer = sp.Checkpointer(tmp_path, when_busy="skip")
    checkpointer.save(1, state(1))
    assert checkpointer.save(2, state(2)).skipped
    assert checkpointer.save(2, state(2), suspect=True, when_busy="skip").skipped

    def open_gate(event: sp.events.Event) -> None:
        if event.kind == "begin" and event.operation.endswith("suspect-00000002"):
            gate.open()

    with sp.events.subscribe(open_gate):
        assert not checkpointer.save(2, state(2), suspect=True).skipped
    checkpointer.wait()
    assert (checkpointer.steps(), checkpointer.suspects()) == ([1], [2])


def test_leftovers_of_dead_saves_of_suspects_are_found(run: sp.Checkpointer, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    run.settle_suspect(3, "transient fault")
    assert leftovers(storage, long_ago) == []
    (tmp_path / "suspect-00000002" / "shards" / "00000-dead.safetensors").write_bytes(b"begun")
    (tmp_path / "suspect-00000003" / MANIFEST_NAME).unlink()  # died while it was deleted
    found = leftovers(storage, long_ago)
    assert [(one.folder, one.attempt, one.committed) for one in found if one.attempt in ("", "dead")] == [
        ("suspect-00000002", "dead", True),
        ("suspect-00000003", "", False),
    ]
    assert all(remove_leftover(storage, one) for one in found)
    assert folders(tmp_path) == ["step-00000001", "step-00000002", "suspect-00000002"]
    assert run.suspects() == [2]
    assert verify(storage.within("suspect-00000002")).ok


def test_a_scan_distinguishes_suspects_from_steps(run: sp.Checkpointer, tmp_path: Path) -> None:
    run.settle_suspect(3, "persistent fault: node 7")
    infos = scan_run(LocalStorage(tmp_path))
    assert [(info.name, info.step, info.status, info.committed, info.whole) for info in infos] == [
        ("step-00000001", 1, "committed", True, True),
        ("step-00000002", 2, "committed", True, True),
        ("suspect-00000002", 2, "suspect", False, True),
        ("suspect-00000003", 3, "settled", False, True),
    ]
    assert [info.verdict for info in infos] == [None, None, None, "persistent fault: node 7"]
    assert [info.unnamed for info in infos] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "name", ["suspect-7", "suspect-0000000001x", "suspects-00000001", "suspect-٠٠٠٠٠٠٠١"]
)
def test_other_names_are_no_suspects(name: str) -> None:
    assert parse_folder(name) is None


def test_an_event_names_the_folder_of_the_suspect(tmp_path: Path) -> None:
    seen: list[sp.events.Event] = []
    with sp.events.subscribe(seen.append):
        sp.Checkpointer(tmp_path).save(3, state(3), suspect=True).result()
    assert {event.operation.rpartition("/")[2] for event in seen} == {"suspect-00000003"}
    assert {event.step for event in seen} == {3}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"x":' + b"[" * 200_000,
        b'{"attempt":"\xff"}',
        b'{"attempt":1,"verdict":2,"time":3}',
        b'{"attempt":"a","verdict":"v","time":1e999}',
    ],
    ids=["empty", "nested", "no text", "numbers", "infinite"],
)
def test_an_invalid_verdict_file_settles_nothing_and_fails_no_restore(tmp_path: Path, content: bytes) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(3, {"w": torch.ones(2)}, suspect=True).result()
    settled = tmp_path / "suspect-00000003" / "settled.json"
    settled.write_bytes(content)
    assert checkpointer.suspects() == [3]
    assert checkpointer.restore({"w": torch.zeros(2)}, suspect=True) == 3


def test_a_huge_verdict_file_settles_nothing_and_is_not_read_whole(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(3, {"w": torch.ones(2)}, suspect=True).result()
    with (tmp_path / "suspect-00000003" / "settled.json").open("wb") as file:
        file.truncate(1 << 42)
    assert checkpointer.suspects() == [3]
