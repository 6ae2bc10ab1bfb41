"""`examples/torch_loop.py` trains, is killed, and resumes on the same and on another number of ranks."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import shardproof as sp
from tests.harness import Job, run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_loop.py"
pytestmark = pytest.mark.timeout(200)


def run_example(folder: str) -> None:
    sys.argv = [str(EXAMPLE), folder]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def train(ranks: int, run: Path, steps: int) -> None:
    for outcome in run_ranks(ranks, run_example, str(run), environment={"STEPS": str(steps)}, timeout=60):
        assert outcome.value is None


def train_until_killed(ranks: int, run: Path, steps: int) -> None:
    """Ends all ranks with SIGKILL once a checkpoint of the run is committed, most often during a save."""

    def kill(job: Job) -> None:
        job.until(lambda: len(list(run.glob("step-*/manifest.json"))) >= 2)
        for rank in range(ranks):
            job.kill(rank)

    run_ranks(ranks, run_example, str(run), environment={"STEPS": str(steps)}, script=kill, timeout=60)


def contents(run: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors, but for the generators of Python and numpy, which the example does not seed."""
    with sp.open(run / f"step-{step:08d}") as checkpoint:
        keys = [key for key in checkpoint.catalogue().tensors if not re.search(r"\.(python|numpy)\b", key)]
        return {key: checkpoint[key][...] for key in keys}


def newest_of(run: Path) -> int:
    return max(int(path.parent.name[5:]) for path in run.glob("step-*/manifest.json"))


def test_a_killed_run_ends_like_one_that_was_not(tmp_path: Path) -> None:
    train_until_killed(2, tmp_path / "killed", 1_000_000)
    newest = newest_of(tmp_path / "killed")
    train(2, tmp_path / "killed", newest + 3)
    train(2, tmp_path / "whole", newest + 3)
    found, expected = (contents(tmp_path / run, newest + 3) for run in ("killed", "whole"))
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


def test_it_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    train_until_killed(3, tmp_path, 1_000_000)
    newest = newest_of(tmp_path)
    train(2, tmp_path, newest + 2)
    with sp.open(tmp_path / f"step-{newest + 2:08d}") as checkpoint:
        assert checkpoint["progress.samples"] == 12 * (newest + 2)
        assert checkpoint["schedule"]["last_epoch"] == newest + 2
        assert checkpoint["optimizer.0.weight.step"][...].item() == newest + 2


def test_the_page_shows_lines_of_the_example() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "frameworks" / "torch.md").read_text()
    lines = EXAMPLE.read_text().splitlines()
    added = re.findall(r"^\+(.*)$", page, re.MULTILINE)
    assert added and set(added) <= set(lines)
    assert len(lines) <= 40
