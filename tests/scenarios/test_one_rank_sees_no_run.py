"""A rank that does not see the run (a lost mount) or sees an older state of it is an error, not an empty run.

Every rank names the run by one path, below its own working directory. So each rank may see another folder
there, as nodes with different mounts do.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from tests.harness import rank, rendezvous, run_ranks

_RUN = "/proc/self/cwd/run"


def save(root: str) -> None:
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=10))
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.full((100,), float(step))}).result()


def restore(nodes: str, options: dict[str, Any], failing: int = -1, code: int = 0) -> dict[str, Any]:
    """Restores the run of this rank's node; the result. The first listing of rank `failing` fails."""
    os.chdir(Path(nodes, str(rank())))
    if rank() == failing:
        _fail_first_listing(code)
    checkpointer = sp.Checkpointer(_RUN, rendezvous=rendezvous(deadline=10))
    state = {"w": torch.zeros(100)}
    try:
        return {"step": checkpointer.restore(state, **options), "w": state["w"][0].item()}
    except sp.ShardproofError as error:
        return {
            "error": error.to_wire(),
            "w": state["w"][0].item(),
            "damaged": {item.step for item in checkpointer.passed_over if item.damaged},
        }


def _fail_first_listing(code: int) -> None:
    real = os.scandir

    def scandir(path: Any) -> Any:
        if os.fspath(path) == _RUN:
            os.scandir = real
            raise OSError(code, os.strerror(code), _RUN)
        return real(path)

    os.scandir = scandir  # type: ignore[assignment]


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """The working directories of two ranks, each with the whole run."""
    run_ranks(2, save, str(tmp_path / "0" / "run"))
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    return tmp_path


def _hide(node: Path, view: str) -> None:
    run = node / "run"
    if view in ("no folder", "empty folder", "a link to a lost mount"):
        shutil.rmtree(run)
    if view == "empty folder":
        run.mkdir()
    if view == "a link to a lost mount":
        run.symlink_to(node / "lost" / "run")
    if view == "an older state":
        shutil.rmtree(run / "step-00000002")


@pytest.mark.parametrize(
    ("view", "text"),
    [
        ("no folder", f"rank 0 sees no run at {_RUN}, rank 1 sees step 2"),
        ("empty folder", f"rank 0 sees no run at {_RUN}, rank 1 sees step 2"),
        ("an older state", "rank 0 sees no step after step 1, rank 1 sees step 2"),
        ("a link to a lost mount", "is a symbolic link to"),
    ],
)
def test_a_run_that_rank_0_does_not_see_is_an_error(nodes: Path, view: str, text: str) -> None:
    _hide(nodes / "0", view)
    for outcome in run_ranks(2, restore, str(nodes), {}):
        found = outcome.value
        assert found["error"]["type"] == "StorageError"
        assert text in found["error"]["message"]
        assert found["w"] == 0 and found["damaged"] == set()


@pytest.mark.parametrize(
    ("view", "text"),
    [
        ("no folder", "Rank 0 sees it"),
        ("empty folder", "Rank 0 sees it"),
        ("an older state", "Rank 0 sees it"),
        ("a link to a lost mount", "is a symbolic link to"),
    ],
)
def test_a_run_that_rank_1_does_not_see_is_an_error(nodes: Path, view: str, text: str) -> None:
    _hide(nodes / "1", view)
    for outcome in run_ranks(2, restore, str(nodes), {}):
        found = outcome.value
        assert found["error"]["message"].startswith("rank 1: ") and text in found["error"]["message"]
        assert found["w"] == 0 and found["damaged"] == set()


@pytest.mark.parametrize("file", ["index-*", "shards/*"])
def test_a_file_that_only_rank_0_does_not_see_is_an_error(nodes: Path, file: str) -> None:
    (hidden,) = (nodes / "0" / "run" / "step-00000002").glob(file)
    hidden.unlink()
    for outcome in run_ranks(2, restore, str(nodes), {}):
        found = outcome.value
        assert "rank 1: " in found["error"]["message"] and "can read step 2" in found["error"]["message"]
        assert found["w"] == 0
    (same,) = (nodes / "1" / "run" / "step-00000002").glob(file)
    same.unlink()
    for outcome in run_ranks(2, restore, str(nodes), {}):
        assert outcome.value == {"step": 1, "w": 1.0}, "damage that both ranks see is passed over"


def test_a_restore_finds_no_run_only_if_no_rank_sees_one(nodes: Path) -> None:
    _hide(nodes / "0", "no folder")
    _hide(nodes / "1", "empty folder")
    assert [outcome.value for outcome in run_ranks(2, restore, str(nodes), {})] == [
        {"step": None, "w": 0.0}
    ] * 2


def test_a_listing_that_finds_no_folder_is_no_empty_run(nodes: Path) -> None:
    for outcome in run_ranks(2, restore, str(nodes), {}, 0, errno.ENOENT):
        assert "rank 0 sees no run" in outcome.value["error"]["message"]
    for outcome in run_ranks(1, restore, str(nodes), {}, 0, errno.ENOENT):
        assert outcome.value == {"step": 2, "w": 2.0}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("code", [errno.ENOTCONN, errno.ESTALE])
def test_a_listing_that_fails_is_an_error_on_all_ranks(nodes: Path, failing: int, code: int) -> None:
    for outcome in run_ranks(2, restore, str(nodes), {}, failing, code):
        error = outcome.value["error"]
        assert error["type"] == "StorageError" and error["details"]["errno"] == errno.errorcode[code]
        assert ("rank 1: " in error["message"]) == (failing == 1)


def test_a_suspect_that_rank_0_does_not_see_is_an_error(nodes: Path) -> None:
    os.rename(nodes / "1" / "run" / "step-00000002", nodes / "1" / "run" / "suspect-00000002")
    shutil.rmtree(nodes / "0" / "run" / "step-00000002")
    for options in ({"suspect": True}, {"suspect": True, "step": 2}):
        for outcome in run_ranks(2, restore, str(nodes), options):
            assert "rank 1 sees suspect step 2" in outcome.value["error"]["message"]
