"""`examples/dcp.py` trains, is killed, and resumes on another number of ranks."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

import shardproof as sp
from tests.harness import Job, Outcome, reach, run_ranks
from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "dcp.py"
STEP = re.compile(r"step (\d+): loss (\S+)")


def run_example(folder: str) -> None:
    """Runs the example. What it prints is reported to the parent."""
    sys.argv = [str(EXAMPLE), folder, "12"]
    with mock.patch("builtins.print", lambda text, flush: reach(text)):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def train(run: Path, ranks: int, kill_at: int | None = None) -> dict[int, str]:
    """Runs the example, and kills all ranks at a step. Gives the loss of each step, as rank 0 prints it."""

    def kill(job: Job) -> None:
        job.until(lambda: kill_at in losses_of(job.outcomes[0]))
        for rank in range(ranks):
            job.kill(rank)

    outcomes = run_ranks(ranks, run_example, str(run), script=kill if kill_at else None, timeout=100)
    if kill_at is None:
        assert [outcome.value for outcome in outcomes] == [None] * ranks
    return losses_of(outcomes[0])


def losses_of(outcome: Outcome) -> dict[int, str]:
    return {int(step): loss for step, loss in STEP.findall("\n".join(outcome.reached))}


@pytest.mark.timeout(240)
def test_the_example_is_killed_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    killed = train(tmp_path, 3, kill_at=9)
    resumed = train(tmp_path, 2)
    first = min(resumed)
    assert first in {7, 9} and max(resumed) == 12
    assert resumed[first] == killed[first]  # the forward pass is that of the same weights, to the bit
    with sp.open(tmp_path / "step-00000012") as checkpoint:
        assert checkpoint["step"] == 12 and checkpoint.world_size == 2
        assert checkpoint["scheduler.last_epoch"] == 12
        assert checkpoint["optim.state.0.weight.step"].read() == 12


def test_the_page_shows_lines_of_the_example(tmp_path: Path) -> None:
    """The example is written for torch's DCP, but for one import. The Python block of the page runs."""
    page = (ROOT / "docs" / "frameworks" / "dcp.md").read_text()
    diff = page.split("```diff\n")[1].split("```")[0].splitlines()
    removed = [line[1:] for line in diff if line.startswith("-")]
    added = [line[1:] for line in diff if line.startswith("+")]
    assert removed == ["import torch.distributed.checkpoint as dcp"]
    assert added == ["from shardproof.frameworks import dcp"]
    block = page.split("```python\n")[1].split("```")[0]
    assert run_program(block, folder=tmp_path).returncode == 0
    example = EXAMPLE.read_text()
    assert example.count(added[0]) == 1 and example.count("shardproof") == 1
