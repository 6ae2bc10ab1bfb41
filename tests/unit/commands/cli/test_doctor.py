"""`shardproof doctor` finds each fault, and names it with the command that repairs it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import fsspec
import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME
from shardproof.errors import StorageError
from shardproof.runs.checkpointer import probe_storage
from shardproof.runs.checkpointer.step_folders import NodeMark, write_node_mark, write_pin
from shardproof.storage import FreeSpace, FsspecStorage, LocalStorage
from tests.faulty_system import Fault, faulty_system
from tests.unit.commands.cli.samples import Sample, cut, write
from tests.unit.commands.cli.test_commands import STATE, call, make_old

__all__ = ["call"]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Whole steps 1, 2 and 3, saved two hours ago."""
    run = tmp_path / "run"
    for step in (1, 2, 3):
        write(run / f"step-0000000{step}", Sample(STATE, step=step, time=time.time() - 7200))
    return run


def findings(call: Any, run: Path, *options: object) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """The exit code, and the findings by their kind."""
    code, out, err = call("doctor", run, *options, "--json")
    assert err == ""
    report = json.loads(out)
    ranks = [["error", "warning", "note"].index(one["severity"]) for one in report["findings"]]
    assert ranks == sorted(ranks), "the worst first"
    assert report["healthy"] == (code == 0)
    kinds: dict[str, list[dict[str, str]]] = {}
    for one in report["findings"]:
        kinds.setdefault(one["kind"], []).append(one)
    return code, kinds


def test_a_healthy_run_has_no_findings(call: Any, run_folder: Path) -> None:
    files = sorted(run_folder.rglob("*"))
    assert findings(call, run_folder, "--probe", "--scrub", "--bandwidth", "1GB") == (0, {})
    assert sorted(run_folder.rglob("*")) == files, "the probe left nothing"
    code, out, _ = call("doctor", run_folder)
    assert code == 0
    assert out.startswith(f"healthy: {run_folder}: 3 committed steps, the newest is 3; ")


def test_the_folder_of_one_node_reports_that_files_of_other_nodes_are_not_here(
    call: Any, run_folder: Path
) -> None:
    write_node_mark(LocalStorage(run_folder), NodeMark(nodes=("a:/run", "b:/run"), own=0, replicas=0))
    others = "files of the other nodes (b:/run) are not here"
    newest = run_folder / "step-00000003"
    (shard,) = (newest / "shards").iterdir()
    data = shard.read_bytes()
    shard.unlink()  # as the file of a rank on the other node
    code, kinds = findings(call, run_folder)
    assert code == 0 and [one["where"] for one in kinds["partial"]] == ["step-00000003"]
    assert others in kinds["partial"][0]["what"]
    code, out, _ = call("ls", run_folder)
    assert code == 0 and others in " ".join(out.split())
    code, out, _ = call("verify", newest)
    assert code == 1 and others in out and "Traceback" not in out
    assert call("prune", run_folder, "--damaged", "--keep", "1", "--older-than", "0s", "--yes")[0] == 0
    assert (newest / MANIFEST_NAME).exists(), "its files may be whole on the other node"
    assert not (run_folder / "step-00000001").exists()
    shard.parent.mkdir()  # `prune` removes empty folders
    shard.write_bytes(data[:-1])  # a file that is here, and cut, is damage
    assert "damaged" in findings(call, run_folder)[1]


@pytest.fixture
def two_nodes(run_folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The same run in the folders of two nodes that are partners."""
    other = tmp_path / "other"
    shutil.copytree(run_folder, other)
    for number, folder in enumerate((run_folder, other)):
        mark = NodeMark(nodes=("a:/run", "b:/run"), own=number, replicas=1)
        write_node_mark(LocalStorage(folder), mark)
    return run_folder, other


def test_missing_and_stale_copies_on_other_nodes_are_named(call: Any, two_nodes: tuple[Path, Path]) -> None:
    run, other = two_nodes
    assert findings(call, run, "--node", other) == (0, {})
    code, kinds = findings(call, run)
    (note,) = kinds.pop("other nodes")
    assert code == 0 and kinds == {} and "1 other node" in note["what"]
    assert note["fix"] == "add --node FOLDER for each"
    assert call("doctor", run, "--node", run)[0] == 2, "one folder counts once"

    for step in (2, 3):
        next((other / f"step-0000000{step}" / "shards").iterdir()).unlink()
    code, kinds = findings(call, run, "--node", other)
    newest, older = kinds.pop("one copy")
    assert code == 1 and kinds == {}
    assert (newest["severity"], newest["where"]) == ("warning", "step-00000003")
    assert newest["what"].startswith("at most one of the 2 nodes has shards/00000-")
    assert "replicas=1" in newest["fix"]
    assert (older["severity"], older["where"]) == ("note", "step-00000002")
    # From the folder that lacks the files, the same is certain without the other one.
    code, kinds = findings(call, other)
    assert code == 1 and [one["where"] for one in kinds["one copy"]] == ["step-00000003", "step-00000002"]

    # Step 3 is stale on the other node, and that node was emptied of step 2. No node has a file of step 1.
    shutil.rmtree(other / "step-00000003")
    write(other / "step-00000003", Sample(STATE, step=3, attempt="old", time=time.time() - 9000))
    shutil.rmtree(other / "step-00000002")
    for node in (run, other):
        next((node / "step-00000001" / "shards").iterdir()).unlink()
    code, kinds = findings(call, run, "--node", other)
    (stale,), (emptied,) = kinds["stale"], kinds["no manifest"]
    assert stale["where"] == "step-00000003" and str(other) in stale["what"]
    assert emptied["where"] == "step-00000002" and str(other) in emptied["what"]
    assert [one["where"] for one in kinds["one copy"]] == ["step-00000003", "step-00000002"]
    assert [one["where"] for one in kinds["lost"]] == ["step-00000001"]


def flip(step: Path) -> Path:
    """Changes a byte of a tensor. Returns the file."""
    (shard,) = (step / "shards").iterdir()
    data = bytearray(shard.read_bytes())
    data[data.index(next(iter(STATE.values())).tobytes()) + 3] ^= 1
    shard.write_bytes(data)
    return shard


def test_the_scrub_reads_what_a_node_has_and_names_the_file_to_remove(
    call: Any, two_nodes: tuple[Path, Path]
) -> None:
    run, other = two_nodes
    next((run / "step-00000003").glob("index-*")).unlink()  # partial
    shards = [flip(run / f"step-0000000{step}") for step in (2, 3)]
    assert findings(call, run)[1].keys() == {"partial", "one copy", "other nodes"}
    code, kinds = findings(call, run, "--scrub")
    assert code == 1 and [one["where"] for one in kinds["damaged"]] == ["step-00000002", "step-00000003"]
    for one, shard in zip(kinds["damaged"], shards, strict=True):
        assert one["fix"].startswith(f"rm {shard}; the next restore of this step copies them again")
    assert "damaged" not in findings(call, other, "--scrub")[1]


def lose_the_manifest(step: Path) -> None:
    (step / MANIFEST_NAME).unlink()


def make_a_leftover(step: Path) -> None:
    lose_the_manifest(step)
    cut(step)
    make_old(step)


def damage_the_manifest(step: Path) -> None:
    (step / MANIFEST_NAME).write_text("{}")


def lose_a_shard(step: Path) -> None:
    next((step / "shards").iterdir()).unlink()


def become_a_suspect(step: Path) -> None:
    step.rename(step.with_name(step.name.replace("step", "suspect")))


def write_in_the_future(step: Path) -> None:
    later = time.time() + 7200
    os.utime(step / MANIFEST_NAME, (later, later))


def leave_in_the_future(step: Path) -> None:
    lose_the_manifest(step)
    later = time.time() + 7200
    for file in step.rglob("*"):
        os.utime(file, (later, later))


def pin(step: Path) -> None:
    write_pin(LocalStorage(step.parent), 2, "the good one")


CASES = {
    "in progress": (lose_the_manifest, "note", "a save may be in progress", "shardproof watch RUN"),
    "leftover": (make_a_leftover, "warning", "their save died", "shardproof prune RUN"),
    "repairable": (damage_the_manifest, "error", "manifest", "shardproof repair RUN/step-00000002"),
    "damaged": (lose_a_shard, "error", "cannot be repaired", "shardproof prune RUN --damaged --yes"),
    "suspect": (become_a_suspect, "warning", "validation failed", "settle_suspect(2,"),
    "clock": (write_in_the_future, "warning", "in the future", "timedatectl"),
    "clock of leftovers": (leave_in_the_future, "warning", "takes them for new", "timedatectl"),
    "pinned": (pin, "note", "the good one", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_each_fault_of_a_step_is_found(call: Any, run_folder: Path, case: str) -> None:
    change: Callable[[Path], None]
    change, severity, what, fix = CASES[case]
    change(run_folder / "step-00000002")
    code, kinds = findings(call, run_folder)
    (found,) = kinds.pop(case.split(" of ")[0])
    assert kinds == {}
    assert found["severity"] == severity
    assert found["where"] == ("suspect-00000002" if case == "suspect" else "step-00000002")
    assert what in found["what"]
    assert fix.replace("RUN", str(run_folder)) in found["fix"]
    assert code == (0 if severity == "note" else 1)
    text = call("doctor", run_folder)[1]
    assert found["what"] in text and found["fix"] in text


def test_the_scrub_finds_changed_bytes(call: Any, run_folder: Path) -> None:
    flip(run_folder / "step-00000002")
    assert findings(call, run_folder) == (0, {}), "sizes and manifests are right"
    code, kinds = findings(call, run_folder, "--scrub")
    (found,) = kinds["damaged"]
    assert (code, found["where"]) == (1, "step-00000002")
    assert "dmesg" in found["what"] and "step-00000003 is whole" in found["what"]
    for step in (1, 3):
        flip(run_folder / f"step-0000000{step}")
    _, kinds = findings(call, run_folder, "--scrub")
    assert kinds["no steps"][0]["what"].startswith("no step of the run can be restored")
    assert all("exclude=" in one["what"] and "rm" not in one["fix"] for one in kinds["damaged"])


def test_too_little_space_for_the_next_save(
    call: Any, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for space, severity in ((FreeSpace(1, 10, 20), "error"), (FreeSpace(1, 10, None), "warning")):
        monkeypatch.setattr(LocalStorage, "free_space", lambda self, space=space: space)
        code, kinds = findings(call, run_folder)
        (found,) = kinds["space"]
        assert (code, found["severity"]) == (1, severity)
        assert "10 B is free" in found["what"]
    monkeypatch.setattr(LocalStorage, "free_space", lambda self: None)
    assert findings(call, run_folder) == (0, {}), "not known"


def test_a_read_only_mount_is_one_finding(
    call: Any, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of statvfs replaces a mount, which needs root."""
    real = os.statvfs(run_folder)
    answer = SimpleNamespace(**{name: getattr(real, name) for name in dir(real) if name.startswith("f_")})
    answer.f_flag |= os.ST_RDONLY
    monkeypatch.setattr(os, "statvfs", lambda path: answer)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    _, kinds = findings(call, run_folder)
    (found,) = kinds["permissions"]
    assert (found["where"], "mounted read-only" in found["what"]) == (".", True)


def test_the_folder_of_a_node_has_parts_of_steps(call: Any, run_folder: Path) -> None:
    for step in (1, 2, 3):
        next((run_folder / f"step-0000000{step}" / "shards").iterdir()).unlink()
    write_node_mark(LocalStorage(run_folder), NodeMark(nodes=("a:/run", "b:/run"), own=0, replicas=0))
    code, out, _ = call("doctor", run_folder)
    assert code == 0, out
    assert "this node has its part of 3 steps, the newest is 3" in " ".join(out.split())
    assert "0 committed" not in out


def test_the_advice_for_a_bucket_names_no_mount() -> None:
    class Refusing(FsspecStorage):
        def create(self, name: str) -> NoReturn:
            raise StorageError("cannot write", file=name, damaged=False)

    found = probe_storage(Refusing(fsspec.filesystem("memory"), "/refused/run"))
    assert found and all("policy of the bucket" in one.fix and "mount" not in one.fix for one in found)


def test_the_probe_names_the_operation_that_is_refused(run_folder: Path) -> None:
    storage = LocalStorage(run_folder)
    with faulty_system(run_folder, Fault(None)) as calls:
        assert probe_storage(storage) == []
    names = [name for name, _ in calls]
    last_unlink = len(names) - 1 - names[::-1].index("unlink")
    operations = {
        "write": names.index("pwrite"),
        "publish": names.index("link"),
        "replace": names.index("replace"),
        "remove": last_unlink,
    }
    for doing, at in operations.items():
        with faulty_system(run_folder, Fault(at, errno.EACCES)):
            (found,) = probe_storage(storage)
        assert (found.severity, found.kind) == ("error", "permissions")
        assert f"this user cannot {doing} a file here" in found.what and "EACCES" in found.what
        left = list(run_folder.glob("*.probe*"))
        assert len(left) == (doing == "remove")
        for file in left:
            file.unlink()


def test_the_probe_compares_the_clock_of_the_storage(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hours, side in ((2, "ahead of"), (-2, "behind")):
        monkeypatch.setattr(
            LocalStorage, "modified", lambda self, name, hours=hours: time.time() + 3600 * hours
        )
        (found,) = probe_storage(LocalStorage(run_folder))
        assert (found.severity, found.kind) == ("warning", "clock")
        assert f"{side} the clock of this machine" in found.what


def test_folders_that_this_user_cannot_write_to(
    call: Any, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: "step-00000002" not in str(path))
    code, kinds = findings(call, run_folder)
    (found,) = kinds["permissions"]
    assert (code, found["where"]) == (1, "step-00000002")
    assert "cannot remove this step" in found["what"]


def test_steps_that_the_second_tier_lacks(call: Any, run_folder: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    write(second / "step-00000001", Sample(STATE, step=1))
    write(second / "step-00000002", Sample(STATE, step=2), commit=False)
    code, kinds = findings(call, run_folder, "--second-tier", second)
    assert code == 1
    assert [one["where"] for one in kinds["one copy"]] == ["step-00000002", "step-00000003"]
    fix = f"shardproof convert {run_folder}/step-00000003 {second}/step-00000003 --standalone"
    assert kinds["one copy"][1]["fix"] == fix
    assert call(*fix.split()[1:])[0] == 0, "the command fixes it"
    _, kinds = findings(call, run_folder, "--second-tier", second)
    assert [one["where"] for one in kinds["one copy"]] == ["step-00000002"]
    code, kinds = findings(call, run_folder, "--second-tier", second, "--older-than", "1d")
    assert (code, kinds["one copy"][0]["severity"]) == (0, "note"), "it may be on its way"
    write(second / "step-00000002", Sample(STATE, step=2, attempt="b2"))
    code, kinds = findings(call, run_folder, "--second-tier", second)
    (other,) = kinds["other copy"]
    assert (code, other["where"], other["fix"][:27]) == (1, "step-00000002", "remove the step there, then")
    (tmp_path / "elsewhere").mkdir()
    _, kinds = findings(call, run_folder, "--second-tier", tmp_path / "elsewhere")
    assert kinds["no copies"][0]["severity"] == "error"


def test_other_places_of_the_run_exist_and_are_not_the_run(
    call: Any, run_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(run_folder)
    for option, place, text in (
        ("--second-tier", tmp_path / "missing", "does not exist"),
        ("--node", tmp_path / "missing", "does not exist"),
        ("--second-tier", run_folder / "step-00000001" / MANIFEST_NAME, "is a file"),
        ("--second-tier", run_folder, "is RUN itself"),
        ("--second-tier", tmp_path / "link", "is RUN itself"),
        ("--node", tmp_path / "link", "are different folders"),
    ):
        code, out, err = call("doctor", run_folder, option, place)
        assert (code, out) == (2, ""), place
        assert text in err and option in err


def test_the_fix_of_a_suspect_is_a_line_of_python(call: Any, tmp_path: Path) -> None:
    run = tmp_path / "a 'run'"
    write(run / "suspect-00000040", Sample(STATE, step=40))
    (suspect,) = findings(call, run)[1]["suspect"]
    assert suspect["fix"] == f'sp.Checkpointer({str(run)!r}).settle_suspect(40, "...")'
    exec(f"import shardproof as sp; {suspect['fix']}")
    assert findings(call, run)[1]["settled"][0]["where"] == "suspect-00000040"


def test_a_run_that_cannot_be_used(call: Any, run_folder: Path, tmp_path: Path) -> None:
    assert call("doctor", tmp_path / "missing")[0] == 2
    assert call("doctor", run_folder, "--bandwidth", "1GB")[0] == 2
    with faulty_system(run_folder, Fault(0, errno.EIO, "onward", looks=True)):
        assert call("doctor", run_folder)[0] == 3
    code, kinds = findings(call, tmp_path)
    assert (code, kinds["no steps"][0]["severity"]) == (0, "note"), "an empty run is no fault"


def test_a_checkpoint_in_a_folder_of_another_name_is_no_step(call: Any, run_folder: Path) -> None:
    shutil.copytree(run_folder / "step-00000003", run_folder / "final")
    tier = run_folder.parent / "tier"
    shutil.copytree(run_folder, tier, ignore=shutil.ignore_patterns("final"))
    assert findings(call, run_folder, "--second-tier", tier) == (0, {}), "no upload takes it"
    report = json.loads(call("doctor", run_folder, "--json")[1])
    assert report["steps"] == [1, 2, 3]
    for step in (2, 3):
        shutil.rmtree(run_folder / f"step-0000000{step}")
    (shard,) = (run_folder / "step-00000001" / "shards").iterdir()
    shard.unlink()
    (error,) = findings(call, run_folder)[1]["no steps"]
    assert error["severity"] == "error" and error["what"].startswith("no step of the run can be restored. ")
    assert error["fix"] == f"sp.load({str(run_folder / 'final')!r}, state)"


@pytest.mark.parametrize("place", [".", "run/step-00000001"])
def test_a_checkpoint_itself_is_healthy(call: Any, tmp_path: Path, place: str) -> None:
    write(tmp_path / place, Sample(STATE, step=1, time=time.time() - 7200))
    assert findings(call, tmp_path / place, "--scrub") == (0, {})
    out = call("doctor", tmp_path / place)[1]
    assert out.startswith(f"healthy: {tmp_path / place}: a checkpoint; ")


def test_checkpoints_in_folders_of_other_names_are_named_with_the_line_that_loads_them(
    call: Any, tmp_path: Path
) -> None:
    run = tmp_path / "a run"
    for step, name in enumerate(("final", "best"), start=1):
        write(run / name, Sample({"w": np.full(4, step, np.float32)}, step=step, time=time.time() - 7200))
    code, kinds = findings(call, run, "--scrub")
    (note,) = kinds.pop("no steps")
    assert (code, kinds, note["severity"]) == (0, {}, "note")
    assert note["what"] == "the run has no step. A restore takes no folder of another name: best, final"
    state = {"w": torch.zeros(4)}
    assert sp.Checkpointer(run).restore(state) is None
    exec(note["fix"], {"sp": sp, "state": state})
    assert state["w"].tolist() == [2.0] * 4, "the newest"


def test_a_checkpoint_beside_the_steps_of_a_run_is_named_with_its_remedy(call: Any, run_folder: Path) -> None:
    write(run_folder, Sample(STATE, attempt="b2"))
    code, kinds = findings(call, run_folder)
    (warning,) = kinds.pop("beside steps")
    assert (code, kinds) == (1, {})
    assert (warning["severity"], warning["where"]) == ("warning", ".")
    assert call("verify", run_folder, 3)[0] == 2
    assert os.system(warning["fix"]) == 0
    assert call("verify", run_folder / "checkpoint")[0] == call("verify", run_folder, 3)[0] == 0
    assert findings(call, run_folder) == (0, {})


def test_all_commands_have_one_verdict_on_a_save_without_its_manifest(call: Any, tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(run := tmp_path / "run", keep=sp.KeepAll())
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.full((5,), float(step))}).result()
    last = run / "step-00000002"
    before = {file: file.read_bytes() for file in last.rglob("*.safetensors")}
    (last / MANIFEST_NAME).unlink()

    def verdicts() -> list[str]:
        steps = json.loads(call("ls", run, "--json")[1])["checkpoints"]
        saves = json.loads(call("watch", run, "--once", "--json")[1])["saves"]
        passed = call("inspect", run)[2].partition("step-00000002: ")[2].partition(",")[0]
        return [steps[-1]["status"], saves[-1]["state"], passed]

    assert verdicts() == ["writing"] * 3
    assert findings(call, run)[0] == 0, "a save may be in progress"
    make_old(last)
    assert verdicts() == ["repairable"] * 3
    code, kinds = findings(call, run)
    (error,) = kinds.pop("repairable")
    assert (code, kinds, error["severity"], error["where"]) == (1, {}, "error", last.name)
    plan = json.loads(call("prune", run, "--dry-run", "--json")[1])
    assert plan["leftovers"] == [] and [one["folder"] for one in plan["complete"]] == [last.name]
    restored = sp.Checkpointer(run).restore({"w": torch.zeros(5)})
    assert restored == 1
    assert "`shardproof repair` makes it a step, unless its save is" in restored.passed_over[0].reason
    assert call(*error["fix"].split()[1:])[0] == 0
    target = {"w": torch.zeros(5)}
    assert sp.Checkpointer(run).restore(target) == 2 and target["w"].tolist() == [2.0] * 5
    assert all(file.read_bytes() == data for file, data in before.items() if "shards" in file.parts)
