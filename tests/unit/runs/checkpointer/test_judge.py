"""All commands, restore and retention give one verdict on a step, and none of them removes good data."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run as run_cli
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.runs.checkpointer.judge import Verdict, judge
from shardproof.storage import LocalStorage
from tests.unit.commands.cli.samples import Sample, cut, write
from tests.unit.commands.cli.test_commands import make_old

STATE = {"w": np.arange(6, dtype=np.float32)}


def step_folder(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def save(run: Path, step: int, attempt: str = "a1", *, commit: bool = True) -> Path:
    """Writes a step. Its tensor has the number of the step as values."""
    tensors = {"w": np.full(6, step, np.float32)}
    sample = Sample(tensors, step=step, attempt=attempt, time=1_700_000_000.0 + step)
    write(step_folder(run, step), sample, commit=commit)
    return step_folder(run, step)


def restored(run: Path, step: int | None = None) -> int | None:
    """Restores a step, checks its values, and returns its number."""
    state = {"w": torch.zeros(6)}
    found = sp.Checkpointer(run).restore(state, step=step)
    if found is not None:
        assert state["w"].tolist() == [float(found)] * 6
    return found


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command with --json; returns its exit code and what it printed."""

    def run(*arguments: Any) -> tuple[int, Any]:
        code = run_cli([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out or err)

    return run


def findings(call: Any, run: Path, *options: str) -> dict[str, dict[str, str]]:
    """The findings of `doctor` by folder."""
    _, report = call("doctor", run, *options)
    return {one["where"]: one for one in report["findings"]}


def follow(fix: str) -> None:
    """Runs an advice as it is printed."""
    words = shlex.split(fix)
    if words[0] == "shardproof":
        with contextlib.redirect_stdout(io.StringIO()):
            assert run_cli(words[1:]) == 0, fix
    elif words[0] == "mv":
        _, source, target = words
        shutil.move(source, target)
    else:
        assert words[:2] == ["rm", "-r"], fix
        shutil.rmtree(words[2])


@pytest.mark.parametrize("how", ["renamed", "copied"])
def test_a_renamed_or_copied_step_displaces_no_other(call: Any, tmp_path: Path, how: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    source, target = step_folder(tmp_path, 2), step_folder(tmp_path, 20)
    shutil.move(source, target) if how == "renamed" else shutil.copytree(source, target)
    report = call("prune", tmp_path, "--keep", 1, "--yes")[1]
    assert step_folder(tmp_path, 3).exists() and report["misplaced"] == ["step-00000020"]
    assert target.exists(), "it may be the only copy"
    assert restored(tmp_path) == 3
    assert [one["status"] for one in call("ls", tmp_path)[1]["checkpoints"]] == ["committed", "misplaced"]
    found = findings(call, tmp_path)["step-00000020"]
    assert (found["severity"], found["kind"]) == ("error", "misplaced")
    follow(found["fix"])
    assert findings(call, tmp_path) == {} and restored(tmp_path, 2) == 2


def test_the_copy_beside_its_step_is_removed_and_another_save_is_not(call: Any, tmp_path: Path) -> None:
    save(tmp_path, 2)
    shutil.copytree(step_folder(tmp_path, 2), step_folder(tmp_path, 20))
    shutil.move(save(tmp_path / "other", 2, "a2"), step_folder(tmp_path, 30))
    found = findings(call, tmp_path)
    assert found["step-00000030"]["fix"] == ""
    assert f"restore(state, step='{tmp_path}/step-00000030')" in found["step-00000030"]["what"]
    assert sp.Checkpointer(tmp_path).restore({"w": torch.zeros(6)}, step=str(tmp_path / "step-00000030")) == 2
    follow(found["step-00000020"]["fix"])
    assert not step_folder(tmp_path, 20).exists() and restored(tmp_path) == 2


def test_retention_does_not_count_a_renamed_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(2))
    for step in (1, 5):
        checkpointer.save(step, {"w": torch.full((6,), float(step))}).result()
    shutil.move(step_folder(tmp_path, 1), step_folder(tmp_path, 6))
    checkpointer.save(7, {"w": torch.full((6,), 7.0)}).result()
    checkpointer.save(8, {"w": torch.full((6,), 8.0)}).result()
    checkpointer.wait()
    assert step_folder(tmp_path, 6).exists() and not step_folder(tmp_path, 5).exists()
    assert restored(tmp_path) == 8 and restored(tmp_path, 7) == 7, "two restorable steps stay"


def test_retention_of_a_job_counts_no_cut_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (shard,) = (step_folder(tmp_path, 2) / "shards").iterdir()
    os.truncate(shard, 100)
    sp.Checkpointer(tmp_path, keep=sp.KeepLatest(2)).save(3, {"w": torch.full((6,), 3.0)}).result()
    assert restored(tmp_path, 1) == 1 and restored(tmp_path) == 3
    save(tmp_path, 4)
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(2))
    checkpointer.save(5, {"w": torch.full((6,), 5.0)}).result()
    assert not step_folder(tmp_path, 1).exists() and step_folder(tmp_path, 2).exists()
    assert "step-00000002 cannot be restored. It stays, displaces no other step" in caplog.text


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("step_of_other", [3, 7])
def test_the_manifest_of_another_save_is_replaced_by_repair(
    call: Any, tmp_path: Path, with_index: bool, step_of_other: int
) -> None:
    """As a synchronisation of two runs or an old backup writes it."""
    run = tmp_path / "run"
    for step in (1, 2, 3):
        save(run, step)
    other = save(tmp_path / "other", step_of_other, "other")
    for file in other.glob("*.*" if with_index else MANIFEST_NAME):
        shutil.copy(file, step_folder(run, 3))
    make_old(run)
    found = findings(call, run)["step-00000003"]
    assert (found["kind"], found["fix"]) == ("repairable", f"shardproof repair {run}/step-00000003")
    assert restored(run) == 2
    for options in ((), ("--damaged",), ("--complete",), ("--keep", 1)):
        call("prune", run, "--yes", *options)
    assert not step_folder(run, 1).exists()
    follow(found["fix"])
    assert restored(run) == 3 and findings(call, run).keys() <= {"step-00000003"}
    assert read_manifest(LocalStorage(step_folder(run, 3))).attempt == "a1"


def test_prune_never_removes_a_complete_save(call: Any, tmp_path: Path) -> None:
    """Only --complete removes it, and only if a restorable step is as new."""
    for step in (1, 2):
        save(tmp_path, step)
    save(tmp_path, 1, "b", commit=False)
    for step in (2, 3):
        save(tmp_path, step, "c", commit=False)
    make_old(tmp_path)
    code, report = call("prune", tmp_path, "--yes")
    assert (code, report["removed"]) == (0, False)
    assert {(one["folder"], one["attempt"]) for one in report["complete"]} == {
        ("step-00000001", "b"),
        ("step-00000002", "c"),
        ("step-00000003", "c"),
    }
    found = findings(call, tmp_path)
    assert found["step-00000003"]["fix"] == f"shardproof repair {tmp_path}/step-00000003"
    follow(found["step-00000002"]["fix"])
    assert not list(tmp_path.glob("step-0000000[12]/shards/*-[bc].*"))
    follow(found["step-00000003"]["fix"])
    assert restored(tmp_path) == 3 and restored(tmp_path, 1) == 1 and findings(call, tmp_path) == {}


def test_files_beside_a_damaged_step_stay(call: Any, tmp_path: Path) -> None:
    """An incremental save cannot be repaired, but its manifest may come back from a backup."""
    run = tmp_path / "run"
    checkpointer = sp.Checkpointer(run, incremental=True)
    frozen = torch.arange(1000.0)
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.full((6,), float(step)), "frozen": frozen}).result()
    backup = (step_folder(run, 2) / MANIFEST_NAME).read_bytes()
    shutil.copy(save(tmp_path / "other", 2, "other") / MANIFEST_NAME, step_folder(run, 2))
    make_old(run)
    call("prune", run, "--yes")
    (step_folder(run, 2) / MANIFEST_NAME).write_bytes(backup)
    state = {"w": torch.zeros(6), "frozen": torch.zeros(1000)}
    assert sp.Checkpointer(run).restore(state) == 2 and torch.equal(state["frozen"], frozen)


def test_every_step_is_cut(call: Any, tmp_path: Path) -> None:
    """No command empties the run, and none is advised."""
    for step in (1, 2):
        (shard,) = (save(tmp_path, step) / "shards").iterdir()
        os.truncate(shard, 100)
    make_old(tmp_path)
    listed = call("ls", tmp_path)[1]["checkpoints"]
    assert [(one["status"], one["committed"]) for one in listed] == [("damaged", False)] * 2
    found = findings(call, tmp_path)
    assert found["."]["what"] == "no step of the run can be restored"
    assert not any("prune" in one["fix"] or "rm" in one["fix"] for one in found.values())
    call("prune", tmp_path, "--damaged", "--keep", 1, "--yes")
    assert all(list(step_folder(tmp_path, step).glob("shards/*")) for step in (1, 2))


def two_files(run: Path, step: int) -> list[Path]:
    """Writes a step whose tensors "a" and "b" are in the files of two ranks. Returns these files."""
    tensors = {key: np.full(6, step, np.float32) for key in "ab"}
    cuts = {key: [(rank, ((0,), (6,)))] for rank, key in enumerate("ab")}
    sample = Sample(tensors, cuts=cuts, world_size=2, step=step, time=1_700_000_000.0 + step)
    write(step_folder(run, step), sample)
    return sorted((step_folder(run, step) / "shards").iterdir())


@pytest.mark.parametrize("loss", ["missing", "cut"])
def test_the_remedies_help_if_a_file_of_each_step_is_lost(call: Any, tmp_path: Path, loss: str) -> None:
    run = tmp_path / "a run"
    copies = {}
    for step in (1, 2):
        file = two_files(run, step)[1]
        copies[file] = file.read_bytes()
        if loss == "cut":
            os.truncate(file, 100)
        else:
            file.unlink()
    make_old(run)
    found = findings(call, run)
    assert found["."]["what"] == "no step of the run can be restored"
    for step in (1, 2):
        one = found[f"step-{step:08d}"]
        assert call(*shlex.split(one["fix"])[1:])[0] == 1, "verify names the damage"
        (path,) = re.findall(r"sp\.open\('(.*?)'\)\[key\]\.read\(\)", one["what"])
        assert sp.open(path)["a"].read().tolist() == [float(step)] * 6
        with pytest.raises(sp.StorageError):
            sp.open(path)["b"].read()
    for file, data in copies.items():
        file.write_bytes(data)
    assert findings(call, run) == {}
    assert sp.Checkpointer(run).restore({key: torch.zeros(6) for key in "ab"}) == 2


def test_the_remedy_helps_if_bytes_of_each_step_have_changed(call: Any, tmp_path: Path) -> None:
    for step in (1, 2):
        file = two_files(tmp_path, step)[1]
        data = bytearray(file.read_bytes())
        data[data.index(np.full(6, step, np.float32).tobytes())] ^= 1
        file.write_bytes(data)
    found = {one["where"]: one for one in call("doctor", tmp_path, "--scrub")[1]["findings"]}
    assert found["."]["what"].startswith("no step of the run can be restored")
    one = found["step-00000002"]
    assert "sp.load(..., exclude=)" in one["what"]
    code, report = call(*shlex.split(one["fix"])[1:])
    damaged = [fault["details"]["key"] for fault in report["faults"]]
    assert (code, damaged) == (1, ["b"])
    state = {key: torch.zeros(6) for key in "ab"}
    sp.load(step_folder(tmp_path, 2), state, exclude=damaged)
    assert state["a"].tolist() == [2.0] * 6 and not state["b"].any()


def test_a_step_without_its_files_and_its_index_names_the_files(tmp_path: Path) -> None:
    """As after the loss of the nodes that had them."""
    for file in two_files(tmp_path, 1):
        file.unlink()
    (index,) = step_folder(tmp_path, 1).glob("index-*")
    index.unlink()
    found = judge(LocalStorage(tmp_path), "step-00000001")
    assert found is not None and found.verdict is Verdict.DAMAGED
    assert "shards/00000-a1.safetensors: expected" in found.reason
    assert "and 1 more such files and its index" in found.reason


def test_the_checkpointer_lists_and_pins_only_steps_that_can_be_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    checkpointer = sp.Checkpointer(tmp_path)
    assert checkpointer.steps() == [1, 2, 3]
    (shard,) = (step_folder(tmp_path, 3) / "shards").iterdir()
    os.truncate(shard, 50)
    shutil.copytree(step_folder(tmp_path, 1), step_folder(tmp_path, 4))
    assert sp.Checkpointer(tmp_path).steps() == [1, 2]
    assert "step-00000003 cannot be restored" in caplog.text and "step-00000004" in caplog.text
    with pytest.raises(
        sp.NotCommittedError, match="step-00000003 cannot be restored, so it cannot be pinned"
    ):
        sp.Checkpointer(tmp_path).pin(3, "best")
    checkpointer.pin(2, "best")
    assert list(checkpointer.pins()) == [2]


def test_verdicts_have_one_table() -> None:
    page = (Path(__file__).parents[4] / "docs" / "failures.md").read_text()
    section = page.partition("## The verdicts on a step\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert [(row[0].strip("`"), row[1]) for row in rows] == [(one.value, one.meaning) for one in Verdict]


def test_each_verdict(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)

    def verdict(step: int, depth: Any = "metadata") -> Verdict | None:
        found = judge(run, f"step-{step:08d}", depth=depth)
        return None if found is None else found.verdict

    assert verdict(1) is None
    folder = save(tmp_path, 1)
    assert verdict(1) is verdict(1, "bytes") is Verdict.COMMITTED
    (shard,) = (folder / "shards").iterdir()
    data = bytearray(shard.read_bytes())
    data[data.index(np.full(6, 1, np.float32).tobytes())] ^= 1
    shard.write_bytes(data)
    assert (verdict(1), verdict(1, "bytes")) == (Verdict.COMMITTED, Verdict.DAMAGED)
    index = save(tmp_path, 2) / "index-a1.safetensors"
    index.write_bytes(index.read_bytes()[:-1] + bytes([index.read_bytes()[-1] ^ 1]))
    assert (verdict(2, "sizes"), verdict(2)) == (Verdict.COMMITTED, Verdict.REPAIRABLE)
    (save(tmp_path, 3) / MANIFEST_NAME).unlink()
    assert verdict(3) is Verdict.REPAIRABLE
    now = time.time()
    found = [judge(run, "step-00000003", saves_since=lambda at=at: at) for at in (now - 60, now + 60)]
    assert [one and one.verdict for one in found] == [Verdict.WRITING, Verdict.REPAIRABLE]
    assert (one := judge(run, "step-00000003", plan_repairs=False)) and one.verdict is Verdict.LEFTOVER
    cut(tmp_path / "step-00000003")
    assert verdict(3) is Verdict.LEFTOVER
