"""`shardproof.frameworks.accelerate` with the released Accelerate: killed, resumed, compared bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import shardproof as sp
from tests.interop.checkpoints import assert_same_checkpoints
from tests.interop.training import EXAMPLES, SCRIPTS, train

pytestmark = [pytest.mark.interop, pytest.mark.processes]

SCRIPT = SCRIPTS / "train_accelerate.py"


def test_example_is_killed_in_a_save_and_resumes(tmp_path: Path) -> None:
    """On the same number of ranks, training ends like an uninterrupted run."""
    example = EXAMPLES / "accelerate_loop.py"
    train("torch", example, tmp_path / "whole", nproc=2)
    train("torch", example, tmp_path / "run", nproc=2, kill_in_save=4)
    saved = tmp_path / "run" / "checkpoints"
    committed = sorted(folder.parent.name for folder in saved.glob("*/manifest.json"))
    assert committed == ["checkpoint_1", "checkpoint_2"], "older ones are removed only after the commit"
    shutil.copytree(tmp_path / "run", tmp_path / "narrow")
    train("torch", example, tmp_path / "run", nproc=2)
    for name in ("checkpoint_4", "checkpoint_5"):
        assert_same_checkpoints(saved / name, tmp_path / "whole" / "checkpoints" / name)

    train("torch", example, tmp_path / "narrow", nproc=1)
    with sp.open(tmp_path / "narrow" / "checkpoints" / "checkpoint_5") as checkpoint:
        assert checkpoint["optimizers.0.0.weight.step"].read() == 3 * 6 + 3 * 12


@pytest.mark.parametrize("model", ["ddp", "fsdp2"])
def test_a_save_is_restored_on_another_number_of_ranks(model: str, tmp_path: Path) -> None:
    train("torch", SCRIPT, model, "save", tmp_path / "saved", nproc=2)
    train("torch", SCRIPT, model, "restore", tmp_path / "saved", tmp_path / "restored", nproc=3)
    assert_same_checkpoints(tmp_path / "restored", tmp_path / "saved", ranks=2, but=["accelerate"])
    with sp.open(tmp_path / "restored") as checkpoint:
        assert checkpoint["custom.0"]["value"] == 3
        assert checkpoint["schedulers.0"]["last_epoch"] == 3 * 2  # Accelerate steps it once for each rank


def test_rotation_counts_committed_checkpoints(tmp_path: Path) -> None:
    train("torch", SCRIPT, "ddp", "rotate", tmp_path, nproc=1)
    committed = sorted(folder.parent.name for folder in tmp_path.glob("checkpoints/*/manifest.json"))
    assert committed == ["checkpoint_1", "checkpoint_3"]


def test_checkpoint_of_accelerate_loads(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    train("torch", SCRIPT, "ddp", "save-theirs", theirs, nproc=2)
    train("torch", SCRIPT, "ddp", "restore", theirs, ours, nproc=2)
    with sp.open(theirs) as old, sp.open(ours) as new:
        for number, name in enumerate(("0.weight", "0.bias", "2.weight", "2.bias")):
            assert torch.equal(new[f"models.0.{name}"].read(), old[name].read())
            for slot in ("exp_avg", "exp_avg_sq", "step"):
                found = new[f"optimizers.0.{name}.{slot}"].read()
                assert torch.equal(found, old[f"optimizer.state.{number}.{slot}"].read()), (name, slot)


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    text = train("torch", SCRIPT, "ddp", "refuse", tmp_path, nproc=1)
    assert "whose engine has the state. Use accelerator.save_state" in text
