"""The commands on suspects: what they show, and what `prune` removes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardproof.engine.format import MANIFEST_NAME
from shardproof.runs.checkpointer.step_folders import write_settled
from shardproof.storage import LocalStorage
from tests.unit.commands.cli.samples import Sample, cut, write
from tests.unit.commands.cli.test_commands import STATE, call, make_old

__all__ = ["call"]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Steps 1 and 4; suspects 2, 3 and 9, of which 2 and 9 are settled."""
    for name in (
        "step-00000001",
        "step-00000004",
        "suspect-00000002",
        "suspect-00000003",
        "suspect-00000009",
    ):
        write(tmp_path / name, Sample(STATE, step=int(name[-8:])))
    for name in ("suspect-00000002", "suspect-00000009"):
        assert write_settled(LocalStorage(tmp_path / name), "persistent fault: node 7")
    return tmp_path


def test_ls_shows_suspects_as_such(call: Any, run_folder: Path) -> None:
    code, out, _ = call("ls", run_folder)
    assert code == 0
    by_folder = {line.split()[1]: " ".join(line.split()) for line in out.splitlines() if "-0000000" in line}
    assert list(by_folder) == [
        "step-00000001",
        "suspect-00000002",
        "suspect-00000003",
        "step-00000004",
        "suspect-00000009",
    ]
    assert f"{len(STATE)} 1 settled persistent fault: node 7" in by_folder["suspect-00000002"]
    assert f"{len(STATE)} 1 suspect validation failed" in by_folder["suspect-00000003"]
    report = json.loads(call("ls", run_folder, "--json")[1])["checkpoints"]
    assert [(one["suspect"], one["committed"], one["verdict"]) for one in report[:3]] == [
        (False, True, None),
        (True, False, "persistent fault: node 7"),
        (True, False, None),
    ]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_suspect_is_a_checkpoint_by_its_path(call: Any, run_folder: Path, command: str) -> None:
    assert call(command, run_folder / "suspect-00000003")[0] == 0


def test_prune_leaves_suspects_that_are_not_settled(call: Any, run_folder: Path) -> None:
    make_old(run_folder)
    plain = json.loads(call("prune", run_folder, "--yes", "--json")[1])
    assert (plain["settled"], plain["leftovers"], plain["suspect"]) == ([], [], ["suspect-00000003"])
    code, out, _ = call("prune", run_folder, "--keep", 1, "--dry-run")
    assert code == 0
    assert "settled suspect, older than a step that stays" in out
    assert "not removed: suspect-00000003: validation failed there" in out
    report = json.loads(call("prune", run_folder, "--keep", 1, "--yes", "--json")[1])
    assert (report["steps"], report["settled"]) == (["step-00000001"], ["suspect-00000002"])
    assert report["bytes"] == report["steps_bytes"] > sum(array.nbytes for array in STATE.values())
    assert sorted(path.name for path in run_folder.iterdir()) == [
        "step-00000004",
        "suspect-00000003",
        "suspect-00000009",
    ]


def test_prune_leaves_damaged_suspects_that_are_not_settled(call: Any, run_folder: Path) -> None:
    for name in ("suspect-00000002", "suspect-00000003"):
        (shard,) = (run_folder / name / "shards").iterdir()
        shard.unlink()
    make_old(run_folder)
    call("prune", run_folder, "--keep", 1, "--damaged", "--yes")
    assert sorted(path.parent.name for path in run_folder.glob(f"*/{MANIFEST_NAME}")) == [
        "step-00000004",
        "suspect-00000003",
        "suspect-00000009",
    ]


def test_prune_removes_leftovers_of_dead_saves_of_suspects(call: Any, run_folder: Path) -> None:
    write(run_folder / "suspect-00000003", Sample(STATE, attempt="dead"), commit=False)
    (run_folder / "suspect-00000002" / MANIFEST_NAME).unlink()
    cut(run_folder / "suspect-00000003", "dead")
    cut(run_folder / "suspect-00000002")
    (run_folder / "suspect-00000007" / "shards").mkdir(parents=True)
    assert "may be in progress" in call("prune", run_folder)[1]
    make_old(run_folder)
    report = json.loads(call("prune", run_folder, "--json")[1])
    assert [one["folder"] for one in report["leftovers"]] == ["suspect-00000002"] * 2 + ["suspect-00000003"]
    assert sorted(path.name for path in run_folder.iterdir()) == [
        "step-00000001",
        "step-00000004",
        "suspect-00000003",
        "suspect-00000009",
    ]
    assert call("verify", run_folder / "suspect-00000003")[0] == 0


def test_a_suspect_saved_again_meanwhile_is_spared(
    call: Any, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shardproof.runs.checkpointer

    plan_prune = shardproof.runs.checkpointer.plan_prune

    def planned(*args: Any, **options: Any) -> Any:
        plan = plan_prune(*args, **options)
        write(run_folder / "suspect-00000002", Sample(STATE, step=2, attempt="again"))
        return plan

    monkeypatch.setattr(shardproof.runs.checkpointer, "plan_prune", planned)
    report = json.loads(call("prune", run_folder, "--keep", 2, "--yes", "--json")[1])
    assert (report["settled"], report["committed_meanwhile"]) == (["suspect-00000002"], ["suspect-00000002"])
    assert call("verify", run_folder / "suspect-00000002")[0] == 0
