"""`shardproof.frameworks.fabric` with the released Fabric: saved on two ranks, restored on three."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import shardproof as sp
from tests.interop.checkpoints import assert_same_checkpoints
from tests.interop.training import EXAMPLES, SCRIPTS, train

pytestmark = [pytest.mark.interop, pytest.mark.processes]

SCRIPT = SCRIPTS / "train_fabric.py"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_save_is_restored_on_another_number_of_ranks(strategy: str, tmp_path: Path) -> None:
    train("torch", SCRIPT, strategy, "save", tmp_path / "saved", nproc=2)
    assert len(list((tmp_path / "saved" / "shards").iterdir())) == 2, "each rank writes its own part"
    train("torch", SCRIPT, strategy, "restore", tmp_path / "saved", tmp_path / "restored", nproc=3)
    assert_same_checkpoints(tmp_path / "restored", tmp_path / "saved", ranks=2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_wrapped_objects_are_saved_as_unwrapped_ones(strategy: str, tmp_path: Path) -> None:
    """Fabric's module and optimizer as they are, and with the names that an error recommends."""
    train("torch", SCRIPT, strategy, "save", tmp_path / "saved", nproc=2)
    train("torch", SCRIPT, strategy, "save-wrapped", tmp_path / "wrapped", nproc=2)
    assert_same_checkpoints(tmp_path / "wrapped", tmp_path / "saved")
    assert_same_checkpoints(tmp_path / "wrapped-named", tmp_path / "saved")
    train("torch", SCRIPT, strategy, "restore-wrapped", tmp_path / "saved", tmp_path / "restored", nproc=2)
    assert_same_checkpoints(tmp_path / "restored", tmp_path / "saved")


def test_checkpoint_of_fabric_loads(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.ckpt", tmp_path / "ours"
    train("torch", SCRIPT, "ddp", "save-theirs", theirs, nproc=2)
    train("torch", SCRIPT, "ddp", "restore", theirs, ours, nproc=2)
    with sp.open(theirs) as old, sp.open(ours) as new:
        for number, name in enumerate(("0.weight", "0.bias", "2.weight", "2.bias")):
            assert torch.equal(new[f"model.{name}"].read(), old[f"model.{name}"].read())
            for slot in ("exp_avg", "exp_avg_sq", "step"):
                found = new[f"optimizer.{name}.{slot}"].read()
                assert torch.equal(found, old[f"optimizer.state.{number}.{slot}"].read()), (name, slot)
        assert new["schedule"]["last_epoch"] == 3


def test_example_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    example = EXAMPLES / "fabric_loop.py"
    train("torch", example, tmp_path / "whole", nproc=2)
    train("torch", example, tmp_path / "run", nproc=2, kill_in_save=4)
    assert sp.Checkpointer(tmp_path / "run").steps() == [8, 12]
    shutil.copytree(tmp_path / "run", tmp_path / "wide")
    train("torch", example, tmp_path / "run", nproc=2)
    assert_same_checkpoints(tmp_path / "run" / "step-00000024", tmp_path / "whole" / "step-00000024")

    train("torch", example, tmp_path / "wide", nproc=3)
    assert sp.Checkpointer(tmp_path / "wide").steps() == [20, 24]
