"""`shardproof.frameworks.ray_train` with the released Ray: workers are killed in a save and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardproof as sp
from tests.interop.checkpoints import assert_same_checkpoints
from tests.interop.training import EXAMPLES, SCRIPTS, train

pytestmark = [pytest.mark.interop, pytest.mark.processes]

SCRIPT = SCRIPTS / "train_ray.py"
EXAMPLE = EXAMPLES / "ray_loop.py"


@pytest.mark.slow
@pytest.mark.timeout(900)  # each start of a cluster and its workers takes a minute
def test_killed_workers_restore_on_the_same_and_on_another_number(tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = train("ray_train", SCRIPT, run, 2, 4, 3, nproc=1, timeout=400, RAY_TMPDIR="/tmp")
    assert "reported {'step': 4}" in text
    restored = {folder.name for folder in tmp_path.glob("run-restored-*")}
    # Ray's controller may not have registered the report of step 2 when its workers die in step 3.
    assert len(restored) == 1 and restored <= {"run-restored-1", "run-restored-2"}
    remaining = sorted(folder.name for folder in run.glob("checkpoint_*/"))
    assert remaining == ["checkpoint_00000003", "checkpoint_00000004"]

    train("ray_train", SCRIPT, run, 3, 5, 0, nproc=1, timeout=400, RAY_TMPDIR="/tmp")
    assert_same_checkpoints(tmp_path / "run-restored-4", run / "checkpoint_00000004", ranks=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_resumes_on_another_number_of_workers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = train("ray_train", EXAMPLE, run, 2, 3, nproc=1, timeout=400, RAY_TMPDIR="/tmp")
    assert "'resumed_from': 0" in text
    text = train("ray_train", EXAMPLE, run, 1, 5, nproc=1, timeout=400, RAY_TMPDIR="/tmp")
    assert "'step': 5" in text and "'resumed_from': 3" in text
    with sp.open(run / "checkpoint_00000005") as checkpoint:
        assert checkpoint["optimizer.0.weight.step"].read() == 5


def test_the_added_lines_of_the_page_are_those_of_the_example() -> None:
    example = EXAMPLE.read_text().splitlines()
    assert len(example) <= 40
    page = (EXAMPLES.parent / "docs" / "frameworks" / "ray_train.md").read_text()
    added = [line[1:].strip() for line in page.splitlines() if line.startswith("+")]
    assert added and [line for line in added if line not in map(str.strip, example)] == []
