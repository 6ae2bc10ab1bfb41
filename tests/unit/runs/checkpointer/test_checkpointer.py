"""The steps of a run: which are restored, passed over, replaced and removed."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import pickle  # noqa: TID251 a restored step may cross processes
import re
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.checkpointer import delete_steps
from shardproof.commands.cli.group import run as run_cli
from shardproof.engine.saving import CheckReplicas, Saver
from shardproof.engine.storage.paths import storage_error
from shardproof.errors import CorruptChunkError, NotCommittedError, StorageError
from shardproof.storage import LocalStorage
from tests.describing import watch_described
from tests.faulty_storage import FaultyStorage


def state(value: float, *more: str) -> dict[str, Any]:
    return {key: torch.full((70_000,), value) for key in ("a", *more)}


def damage(root: Path, step: int) -> None:
    """One bit in the last chunk of a step."""
    (shard,) = (root / f"step-{step:08d}" / "shards").iterdir()
    raw = bytearray(shard.read_bytes())
    raw[-1000] ^= 1
    shard.write_bytes(raw)


def test_restore_of_an_empty_run_returns_none(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path / "run")
    target = state(7)
    assert checkpointer.restore(target) is None
    assert checkpointer.steps() == []
    assert (target["a"] == 7).all()


def test_damaged_and_unfinished_steps_are_passed_over_with_the_reason(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(step, state(step)).result()
    damage(tmp_path, 3)
    unfinished = tmp_path / "step-00000004" / "shards"
    unfinished.mkdir(parents=True)
    (unfinished / "00000-0123456789abcdef.safetensors").write_bytes(b"begun")
    target = state(0)
    assert checkpointer.restore(target) == 2
    assert (target["a"] == 2).all()
    assert [item.step for item in checkpointer.passed_over] == [4, 3]
    assert "no manifest" in checkpointer.passed_over[0].reason
    assert "digest" in checkpointer.passed_over[1].reason


def test_restore_returns_the_step_with_its_report_and_the_steps_passed_over(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, state(step)).result()
    damage(tmp_path, 2)
    found = checkpointer.restore(state(0))
    assert isinstance(found, sp.RestoredStep) and isinstance(found, int)
    assert (found, found + 1, f"{found:04d}", repr(found), json.dumps({"step": found})) == (
        *(1, 2, "0001", "1"),
        '{"step": 1}',
    )
    assert hash(found) == hash(1) and type(found + 1) is int
    assert found.report is checkpointer.last_restore
    assert found.passed_over == checkpointer.passed_over
    ((passed, reason),) = [(item.step, item.reason) for item in found.passed_over]
    assert passed == 2 and "digest" in reason
    copies = [copy.copy(found), copy.deepcopy(found)]
    copies += [pickle.loads(pickle.dumps(found, protocol)) for protocol in range(6)]
    for other in copies:
        assert type(other) is sp.RestoredStep and other == found
        assert (other.report, other.passed_over) == (found.report, found.passed_over)
    with pytest.raises(AttributeError, match="frozen"):
        found.passed_over = ()
    with pytest.raises(AttributeError, match="frozen"):
        del found.report
    checkpointer.save(3, state(3)).result()
    newest = checkpointer.restore(state(0))
    assert newest is not None and newest.passed_over == ()
    assert [item.step for item in found.passed_over] == [2], "an earlier result does not change"


def test_the_reason_of_a_step_that_was_passed_over_says_nothing_of_the_target(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An older step has filled the target."""
    checkpointer = sp.Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, state(step)).result()
    damage(tmp_path, 2)
    found = checkpointer.restore(state(0))
    assert found is not None and "digest" in found.passed_over[0].reason
    assert "overwritten" not in found.passed_over[0].reason + caplog.text and "is passed over" in caplog.text
    with pytest.raises(CorruptChunkError, match="partly overwritten from .*: load again, or another, before"):
        checkpointer.restore(state(0), step=2)
    damage(tmp_path, 1)
    with pytest.raises(NotCommittedError, match="partly overwritten from .*: restore again") as caught:
        checkpointer.restore(state(0))
    assert caught.value.message.count("overwritten") == 1


def test_a_removed_step_whose_files_stay_for_another_is_not_passed_over(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, incremental=sp.Incremental(scrub=None))
    for step, kept in enumerate((0.0, 1.0, 1.0)):
        checkpointer.save(step, {"kept": torch.full((512,), kept), "new": torch.full((512,), float(step))})
    checkpointer.wait()
    delete_steps(LocalStorage(tmp_path), ["step-00000001"])
    assert list((tmp_path / "step-00000001" / "shards").iterdir()), "step 2 needs its files"
    (shard,) = (tmp_path / "step-00000002" / "shards").iterdir()
    os.truncate(shard, 100)
    assert checkpointer.restore({"kept": torch.zeros(512), "new": torch.zeros(512)}) == 0
    assert [item.step for item in checkpointer.passed_over] == [2]


def test_a_step_that_was_passed_over_can_be_saved_again(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(2))
    for step in (1, 2, 3):
        checkpointer.save(step, state(step)).result()
    damage(tmp_path, 3)
    assert checkpointer.restore(state(0)) == 2
    checkpointer.save(3, state(30)).result()
    target = state(0)
    assert checkpointer.restore(target) == 3
    assert (target["a"] == 30).all()
    with pytest.raises(sp.AlreadyCommittedError):
        checkpointer.save(3, state(31)).result()


@pytest.mark.parametrize("lost", ["manifest.json", "index-*", "shards/*"])
def test_a_step_with_a_damaged_file_is_passed_over_and_can_be_saved_again(lost: str, tmp_path: Path) -> None:
    sp.Checkpointer(tmp_path).save(1, state(1)).result()
    sp.Checkpointer(tmp_path).save(2, state(2)).result()
    (file,) = (tmp_path / "step-00000002").glob(lost)
    file.write_bytes(file.read_bytes()[:-9])
    checkpointer = sp.Checkpointer(tmp_path)
    assert checkpointer.restore(state(0)) == 1
    assert [(item.step, item.damaged) for item in checkpointer.passed_over] == [(2, True)]
    checkpointer.save(2, state(20)).result()
    target = state(0)
    assert checkpointer.restore(target) == 2
    assert (target["a"] == 20).all()


def test_a_renamed_step_is_not_replaced(tmp_path: Path) -> None:
    sp.Checkpointer(tmp_path).save(1, state(1)).result()
    sp.Checkpointer(tmp_path).save(2, state(2)).result()
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000003")
    checkpointer = sp.Checkpointer(tmp_path)
    assert checkpointer.restore(state(0)) == 1
    with pytest.raises(sp.AlreadyCommittedError):
        checkpointer.save(3, state(30)).result()


def test_retention_does_not_count_a_damaged_step(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(2))
    checkpointer.save(10, state(1)).result()
    checkpointer.save(20, state(2)).result()
    damage(tmp_path, 20)
    assert checkpointer.restore(state(0)) == 10
    checkpointer.save(15, state(3)).result()
    assert checkpointer.steps() == [10, 15, 20]


def test_retention_keeps_the_steps_after_a_rollback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(2))
    for step in (100, 190, 200):
        checkpointer.save(step, state(step)).result()
    with caplog.at_level(logging.WARNING):
        checkpointer.save(110, state(110)).result()
        checkpointer.save(120, state(120)).result()
    assert checkpointer.steps() == [110, 120, 190, 200]
    assert f"`shardproof prune {tmp_path} --after 120 --dry-run`" in caplog.text


def test_a_step_that_another_checkpointer_saved_meanwhile_is_no_branch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart in place may save the next step while the thread of the former one retains."""

    class Slow(LocalStorage):
        def folders(self) -> list[str]:
            """Lists the run, in which another process saves step 3 after the commit of step 2."""
            if (tmp_path / "step-00000002" / "manifest.json").exists() and not (
                tmp_path / "step-00000003"
            ).exists():
                sp.Checkpointer(tmp_path).save(3, state(3)).result()
            return super().folders()

    former = sp.Checkpointer(Slow(tmp_path), keep=sp.KeepLatest(2))
    former.save(1, state(1)).result()
    with caplog.at_level(logging.WARNING):
        former.save(2, state(2)).result()
    assert (former.steps(), caplog.text) == ([1, 2, 3], "")


def test_the_command_that_restore_names_removes_an_abandoned_branch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    near, far = tmp_path / "near run", tmp_path / "far"
    first = sp.Checkpointer(near, second_tier=far)
    for step in (10, 20, 30):
        first.save(step, state(step)).durable(60)
    run = sp.Checkpointer(near, second_tier=far)
    assert run.restore(state(0), step=10) == 10
    run.save(11, state(11)).durable(60)
    caplog.clear()
    assert sp.Checkpointer(near, second_tier=far).restore(state(0)) == 30
    (warning,) = (one.getMessage() for one in caplog.records if "branch" in one.getMessage())
    commands = re.findall("`shardproof (.*?)`", warning)
    assert len(commands) == 2
    for command in commands:
        assert run_cli(shlex.split(command)) == 0
    assert sp.Checkpointer(near).steps() == sp.Checkpointer(far).steps() == [10, 11, 20, 30]
    assert "with --yes in place of --dry-run" in warning
    for command in commands:
        capsys.readouterr()
        assert run_cli(shlex.split(command.replace("--dry-run", "--yes"))) == 0
        assert capsys.readouterr().out.count("step-00000020") == 1, "removed, and not among those that stay"
    caplog.clear()
    assert sp.Checkpointer(near, second_tier=far).restore(state(0)) == 11
    assert sp.Checkpointer(near).steps() == sp.Checkpointer(far).steps() == [10, 11]
    assert "branch" not in caplog.text
    capsys.readouterr()
    assert run_cli(["prune", str(near), "--after", "10", "--yes"]) == 0  # once more removes nothing
    assert "step-00000011" in capsys.readouterr().out
    assert run_cli(["prune", str(near), "--after", "9", "--yes"]) == 1
    assert sp.Checkpointer(near).steps() == [10, 11]


def test_a_restore_plans_no_repair_of_a_damaged_step_of_another_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, planned = sp.Checkpointer(tmp_path), list[object]()
    for step in (10, 30, 11):
        run.save(step, state(step)).result()
    for file in (tmp_path / "step-00000011" / "shards").iterdir():
        file.unlink()
    monkeypatch.setattr("shardproof.runs.maintenance.plan_repair", planned.append)
    assert sp.Checkpointer(tmp_path).restore(state(0)) == 30
    assert "branch" not in caplog.text and planned == []


def test_a_pinned_step_of_an_abandoned_branch_stays_until_it_is_unpinned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = sp.Checkpointer(tmp_path)
    for step in (10, 20, 11, 12):
        run.save(step, state(step)).result()
    run.pin(20, "good")
    assert run_cli(["prune", str(tmp_path), "--after", "11", "--yes"]) == 1
    assert "unpin the step first" in capsys.readouterr().err
    run.unpin(20)
    assert run_cli(["prune", str(tmp_path), "--after", "11", "--yes"]) == 0
    assert run.steps() == [10, 11, 12]  # step 12 was saved after step 11


def test_a_restore_that_succeeded_stays_so_if_the_look_for_a_branch_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sp.Checkpointer(tmp_path)
    run.save(1, state(1)).result()

    def refused(*_: Any) -> None:
        raise StorageError("503")

    monkeypatch.setattr("shardproof.runs.checkpointer.open_run.steps_in", refused)
    assert run.restore(state(0)) == 1


def test_restore_fails_if_an_older_step_leaves_values_of_a_damaged_one(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(1, state(1)).result()
    checkpointer.save(2, state(2, "b")).result()
    damage(tmp_path, 2)
    for strict in (True, False):
        with pytest.raises(sp.StructureError, match="has values of both"):
            checkpointer.restore(state(0, "b"), strict=strict)


class Part:
    """Tensors that a checkpoint may have or not, filled in place."""

    def __init__(self, value: float) -> None:
        self.values = torch.full((70_000,), value)

    def state_tree(self) -> dict[str, Any]:
        return {"values": self.values}


def test_restore_fails_if_an_older_step_lacks_a_part_of_a_damaged_one(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(1, state(1)).result()
    checkpointer.save(2, {**state(2), "part": Part(2)}).result()
    damage(tmp_path, 2)
    with pytest.raises(sp.StructureError, match=r"it lacks part\.@part\n.*has values of both"):
        checkpointer.restore({**state(0), "part": Part(0)})


@pytest.mark.parametrize("more", [{"part": Part(0)}, {"b": torch.zeros(2)}])
def test_keys_that_the_damaged_step_lacks_too_do_not_fail_a_restore(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, state(step)).result()
    damage(tmp_path, 2)
    target = state(0)
    assert checkpointer.restore({**target, **more}, strict=False) == 1
    assert (target["a"] == 1).all()


def test_a_transient_failure_to_read_does_not_roll_the_run_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(1, state(1)).result()
    checkpointer.save(2, state(2)).result()

    def stale(*_: Any) -> None:
        raise StorageError("cannot read", file="x", errno=errno.errorcode[errno.ESTALE], missing=False)

    with monkeypatch.context() as patch:
        patch.setattr("shardproof.engine.storage.LocalStorage.read_into", stale)
        with pytest.raises(StorageError, match="cannot read"):
            checkpointer.restore(state(0))
    assert checkpointer.restore(state(0)) == 2


def test_a_folder_with_another_name_is_not_its_step(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(1, state(1)).result()
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000002")
    with pytest.raises(sp.NotCommittedError, match="renamed or copied"):
        checkpointer.restore(state(0))
    with pytest.raises(sp.FormatError, match="renamed or copied"):
        checkpointer.restore(state(0), step=2)


@pytest.mark.parametrize("folder", ["step-00000007", "last"])
def test_the_folder_of_a_checkpoint_is_not_a_run(folder: str, tmp_path: Path) -> None:
    sp.save(tmp_path / folder, state(7), step=7)
    for call in (
        lambda checkpointer: checkpointer.restore(state(0)),
        lambda checkpointer: checkpointer.restore(state(0), step=7),
        lambda checkpointer: checkpointer.save(8, state(8)).result(),
    ):
        with pytest.raises(sp.StorageError, match="is a checkpoint, and not the folder of a run"):
            call(sp.Checkpointer(tmp_path / folder))
    with pytest.raises(sp.StorageError, match="last is a checkpoint|step-00000007 is a checkpoint"):
        sp.Checkpointer(tmp_path / "near", second_tier=tmp_path / folder).restore(state(0))
    assert not (tmp_path / folder / "step-00000008").exists()


def test_a_run_may_have_a_checkpoint_beside_its_steps(tmp_path: Path) -> None:
    sp.Checkpointer(tmp_path).save(7, state(7)).result()
    sp.save(tmp_path / "other", state(9))
    for name in os.listdir(tmp_path / "other"):
        (tmp_path / "other" / name).rename(tmp_path / name)
    checkpointer = sp.Checkpointer(tmp_path)
    assert checkpointer.restore(state(0)) == 7
    assert checkpointer.save(8, state(8)).result().step == 8


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_without_a_run_refuses_the_folder_of_a_run(overwrite: bool, tmp_path: Path) -> None:
    sp.Checkpointer(tmp_path).save(7, state(7)).result()
    (tmp_path / "step-00000008").mkdir()  # of a save that died
    remedy = r"with step-00000007, .* Checkpointer\(.*\).save\(step, state\), or pass another folder"
    with pytest.raises(sp.StructureError, match=remedy):
        sp.save(tmp_path, state(9), overwrite=overwrite)
    assert sorted(os.listdir(tmp_path)) == ["step-00000007", "step-00000008"]
    (tmp_path / "step-00000007" / "manifest.json").unlink()
    assert sp.save(tmp_path, state(9), overwrite=overwrite).tensors, "no step is committed"


def test_a_dangling_link_with_the_name_of_a_step_is_no_step_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "step-00000003").symlink_to(tmp_path / "lost mount")
    sp.save(tmp_path / "here", state(9))
    assert sp.open(tmp_path / "here").keys()


def test_a_save_without_a_run_looks_for_steps_with_one_listing(tmp_path: Path) -> None:
    listings: list[str] = []

    class Watched(LocalStorage):
        def folders(self) -> list[str]:
            listings.append(self.location)
            return super().folders()

    sp.save(Watched(tmp_path), state(9))
    assert listings == [str(tmp_path)]


def test_the_check_of_the_run_costs_no_request_of_a_later_save(tmp_path: Path) -> None:
    looks: list[str] = []

    class Watched(LocalStorage):
        def size(self, name: str) -> int | None:
            looks.append(name)
            return super().size(name)

    checkpointer = sp.Checkpointer(Watched(tmp_path))
    for step in (1, 2, 3):
        checkpointer.save(step, state(step)).result()
    assert looks.count("manifest.json") == 1, "`within` gives a storage that is not watched"


def test_the_folder_of_a_run_is_not_a_checkpoint(tmp_path: Path) -> None:
    """Also with a newer step that is not committed."""
    run, other = tmp_path / "run", tmp_path / "other"
    for step in (9, 100):
        sp.Checkpointer(run).save(step, state(step)).result()
    (run / "step-00000200").mkdir()
    for call in (
        lambda: sp.open(run),
        lambda: sp.load(run, state(0)),
        lambda: sp.Checkpointer(other).restore(state(0), step=run),
    ):
        with pytest.raises(sp.NotCommittedError, match="folder of a run.*run/step-00000100"):
            call()


@pytest.mark.parametrize("step", ["newest", "5"])
def test_a_text_that_names_no_path_is_explained(step: str, tmp_path: Path) -> None:
    sp.Checkpointer(tmp_path).save(5, state(5)).result()
    with pytest.raises(sp.NotCommittedError, match="'latest', 'best', a whole number"):
        sp.Checkpointer(tmp_path).restore(state(0), step=step)


@pytest.mark.parametrize("step", [None, -1, True, 1.5, "3", 10**18])
def test_an_invalid_step_is_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(
        sp.StructureError, match=rf"^[^\"]*step is {re.escape(repr(step))}, not an int from 0"
    ):
        sp.Checkpointer(tmp_path).save(step, state(1)).result()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("step", [-1, 10**18, 10**30, True, 1.5])
def test_an_invalid_step_cannot_be_restored(step: Any, tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(1, state(1)).result()
    with pytest.raises(sp.StructureError, match="step"):
        checkpointer.restore(state(0), step=step)
    assert checkpointer.restore(state(0)) == 1


def test_a_numpy_integer_is_a_valid_step(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(np.int64(7), state(1)).result()  # type: ignore[arg-type]
    assert checkpointer.steps() == [7]


def test_a_retention_policy_that_fails_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def select(self, steps: Any) -> Any:
            raise TypeError("no policy")

    checkpointer = sp.Checkpointer(tmp_path, keep=Broken())
    checkpointer.save(1, state(1)).result()
    assert checkpointer.steps() == [1]
    assert "no policy" in caplog.text


def test_saves_of_several_threads_run_one_at_a_time(tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path)

    def save(first: int) -> None:
        for step in range(first, 40, 2):
            tree = {
                f"{'ab'[first]}{number}": torch.full((50,), float(step)) for number in range(1 + step % 5)
            }
            checkpointer.save(step, tree).result()

    threads = [threading.Thread(target=save, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for step in range(40):
        with sp.open(tmp_path / f"step-{step:08d}") as checkpoint:
            assert list(checkpoint) == [f"{'ab'[step % 2]}{number}" for number in range(1 + step % 5)]
            assert all((checkpoint[key].read() == step).all() for key in checkpoint)


def forbid(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a folder that no user may look into, not even root."""
    folder.mkdir()

    def checked(method: Any) -> Any:
        def call(storage: LocalStorage, *given: Any) -> Any:
            if storage.location == str(folder):
                cause = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                raise storage_error(cause, "look at", f"{storage.location}/{given[0]}")
            return method(storage, *given)

        return call

    for name in ("size", "read", "list"):
        monkeypatch.setattr(LocalStorage, name, checked(getattr(LocalStorage, name)))


def test_other_files_in_the_run_folder_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(tmp_path / "lost+found", monkeypatch)
    (tmp_path / "notes.txt").write_text("mine")
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(1))
    for step in (1, 2, 2):
        checkpointer.save(step, state(step), overwrite=True).result()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["lost+found", "notes.txt", "step-00000002"]
    assert len(list((tmp_path / "step-00000002" / "shards").iterdir())) == 1


def test_an_unreadable_folder_is_named_and_files_that_it_may_refer_to_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder could be a renamed step that refers to any file."""
    forbid(tmp_path / "of-another-user", monkeypatch)
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(1))
    checkpointer.save(1, state(1)).result()
    for step, owner in ((1, "the replaced checkpoint"), (2, "step-00000001")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            checkpointer.save(step, state(step), overwrite=True).result()
        assert f"shard files of {owner} stay: the manifest in of-another-user cannot be read" in caplog.text
    assert checkpointer.steps() == [2]
    assert len(list((tmp_path / "step-00000001" / "shards").iterdir())) == 2


def test_every_save_gets_the_mode_of_the_replica_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="check_replicas is 'sample', 'all' or None, not 'some'"):
        sp.Checkpointer(tmp_path, check_replicas="some")  # type: ignore[arg-type]
    seen_modes, begin = [], Saver.begin
    modes: tuple[CheckReplicas | None, ...] = (None, "sample", "all")

    def watched(saver: Saver, *args: Any, **options: Any) -> Any:
        seen_modes.append(args[2].check_replicas)
        return begin(saver, *args, **options)

    monkeypatch.setattr(Saver, "begin", watched)
    for mode in modes:
        sp.Checkpointer(tmp_path, check_replicas=mode).save(1, state(1), overwrite=True).result()
    assert seen_modes == [None, "sample", "all"]


def test_tensors_are_described_once_for_several_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = watch_described(monkeypatch)
    checkpointer = sp.Checkpointer(tmp_path)
    for step in range(3):
        checkpointer.save(step, {"w": torch.full((3,), float(step)), "epoch": step}).result()
    assert described == ["w"]
    state = {"w": torch.zeros(3), "epoch": 0}
    assert checkpointer.restore(state) == 2
    assert (state["w"].tolist(), state["epoch"]) == ([2.0, 2.0, 2.0], 2)


def test_plain_values_that_change_beside_the_same_tensors_are_saved(tmp_path: Path) -> None:
    """The cache of the previous save is valid for its own plain values only."""
    checkpointer, weights = sp.Checkpointer(tmp_path), torch.ones(3)
    checkpointer.save(1, {"w": weights, "epoch": 3})
    checkpointer.save(2, {"w": weights, "epoch": 4, "note": "x"})
    checkpointer.save(3, {"w": weights, "note": "y"}).result()
    for step, left in (
        (1, {"epoch": 3}),
        (2, {"epoch": 4, "note": "x"}),
        (3, {"note": "y"}),
    ):
        state = {"w": torch.zeros(3), **dict.fromkeys(left)}
        assert checkpointer.restore(state, step=step) == step
        assert torch.equal(state.pop("w"), weights)
        assert state == left


def test_a_restored_step_can_be_saved_like_any_int(tmp_path: Path) -> None:
    """As a value of the state, as a key, in metadata, and as the step itself."""
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.save(1, {"n": 1}).result()
    restored = checkpointer.restore({"n": 0})
    assert restored == 1
    state = {"n": restored, "by step": [restored, {restored: "x"}]}
    checkpointer.save(2, state, metadata={"from": restored}).result()
    checkpointer.save(restored, {"n": 5}, overwrite=True).result()
    target = {"n": 0, "by step": None}
    assert checkpointer.restore(target) == 2
    assert target == {"n": 1, "by step": [1, {1: "x"}]}
    assert type(target["n"]) is int
    assert checkpointer.steps() == [1, 2]


def test_retention_reads_the_metadata_of_a_step_that_another_job_saved_again(tmp_path: Path) -> None:
    """This job saved a step of that number before, with a worse metric, and has removed it."""
    keep = sp.KeepLatest(1) | sp.KeepBest("loss")
    this, other = (sp.Checkpointer(tmp_path, keep=keep) for _ in range(2))
    state = {"w": torch.ones(2)}
    this.save(1, state, metadata={"loss": 5.0}).result()
    this.save(2, state, metadata={"loss": 1.0}).result()
    assert this.steps() == [2]
    other.save(1, state, metadata={"loss": 0.5}).result()
    this.save(3, state, metadata={"loss": 2.0}).result()
    assert this.steps() == [1, 3]


def test_the_error_after_another_job_removed_the_base_says_that_the_step_is_committed(tmp_path: Path) -> None:
    """The other job saves the same step, and its retention removes the base of both."""

    def job(storage: Any) -> sp.Checkpointer:
        rendezvous = sp.rendezvous.LocalRendezvous()
        return sp.Checkpointer(
            storage, keep=sp.KeepLatest(1), incremental=sp.Incremental(scrub=None), rendezvous=rendezvous
        )

    state = {"fixed": torch.arange(100.0), "w": torch.zeros(4)}
    job(tmp_path).save(1, state).result()

    def other_job(operation: str, name: str) -> None:
        with ThreadPoolExecutor(1) as thread:
            run = job(tmp_path)
            thread.submit(
                lambda: run.save(2, {"fixed": torch.ones(100), "w": torch.ones(4)}).result()
            ).result(60)
        assert not list((tmp_path / "step-00000001").glob("**/*.safetensors"))

    storage = FaultyStorage(LocalStorage(tmp_path), 0, other_job, only=("finish",))
    with pytest.raises(sp.AlreadyCommittedError, match="another job has committed it meanwhile"):
        job(storage).save(2, {**state, "w": torch.full((4,), 2.0)}).result()
    target = {"fixed": torch.zeros(100), "w": torch.zeros(4)}
    assert job(tmp_path).restore(target) == 2
    assert target["w"].tolist() == [1.0] * 4


def save_and_fail(run: sp.Checkpointer) -> None:
    with run as checkpointer:
        checkpointer.save(3, state(3))
        raise KeyError("of the program")


def test_a_with_block_raises_the_failure_of_the_last_save(tmp_path: Path) -> None:
    with sp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(1))
    assert checkpointer.steps() == [1]
    for step in (2, 3):
        (tmp_path / f"step-{step:08d}").write_text("no folder")
    with pytest.raises(StorageError, match="step-00000002"), sp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, state(2))
    with pytest.raises(KeyError, match="of the program"):
        save_and_fail(sp.Checkpointer(tmp_path))
