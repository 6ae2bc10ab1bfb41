"""`shardproof.frameworks.transformers` with the released Trainer: killed, resumed, compared bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import shardproof as sp
from tests.interop.checkpoints import assert_same_checkpoints
from tests.interop.training import EXAMPLES, SCRIPTS, train

pytestmark = [pytest.mark.interop, pytest.mark.processes]

SCRIPT = SCRIPTS / "train_transformers.py"


def test_example_is_killed_in_a_save_and_resumes(tmp_path: Path) -> None:
    """On the same number of ranks, training ends like an uninterrupted run."""
    example, last = EXAMPLES / "hf_trainer.py", "checkpoint-12/shardproof"
    train("torch", example, tmp_path / "whole", nproc=2)
    train("torch", example, tmp_path / "run", nproc=2, kill_in_save=4)
    assert (tmp_path / "run" / "checkpoint-8").exists(), "the save that was killed had begun"
    shutil.copytree(tmp_path / "run", tmp_path / "wide")
    train("torch", example, tmp_path / "run", nproc=2)
    assert_same_checkpoints(tmp_path / "run" / last, tmp_path / "whole" / last)

    train("torch", example, tmp_path / "wide", nproc=3)
    with sp.open(tmp_path / "wide" / last) as checkpoint:
        assert checkpoint["optimizer.lm_head.weight.step"].read() == 12


@pytest.mark.parametrize("who", ["ours", "ours-peft"])
def test_a_save_is_restored_on_another_number_of_ranks(who: str, tmp_path: Path) -> None:
    """The save that was killed is not resumed, and the checkpoint before it stays until the commit."""
    run, restored = tmp_path / "run", tmp_path / "restored"
    train("torch", SCRIPT, who, run, 8, nproc=2, kill_in_save=3)
    assert sorted(folder.name for folder in run.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    train("torch", SCRIPT, who, run, 8, restored, nproc=3)
    if who == "ours":
        assert_same_checkpoints(restored, run / "checkpoint-4" / "shardproof", ranks=2)
        return
    with sp.open(restored) as found, sp.open(run / "checkpoint-4" / "shardproof") as saved:
        names = [key for key in saved if "lora" in key and key.startswith("model.")]
        assert len(names) == 2
        assert not any("embed_tokens" in key for key in saved), "the frozen weights are not saved"
        for name in names:
            live = name.replace("model.default.", "model.").replace(".weight", ".default.weight")
            assert torch.equal(found[live].read(), saved[name].read()), name
        moments = [key for key in saved if key.endswith(".exp_avg")]
        assert len(moments) == 2
        assert all(torch.equal(found[key].read(), saved[key].read()) for key in moments)


@pytest.mark.parametrize(("who", "count"), [("ours-peft-prompt", 1), ("ours-peft-prefix", 5)])
def test_trained_prompt_is_restored(who: str, count: int, tmp_path: Path) -> None:
    """The values are those of the parameters of the encoder, which PEFT exports as a copy of its output."""
    run, restored = tmp_path / "run", tmp_path / "restored"
    train("torch", SCRIPT, who, run, 2, nproc=1)
    train("torch", SCRIPT, who, run, 4, restored, nproc=1)
    with sp.open(restored) as found, sp.open(run / "checkpoint-2" / "shardproof") as saved:
        names = [key for key in saved if key.startswith("model.")]
        assert len(names) == count
        for name in names:
            live = name.replace("model.default.prompt_encoder.", "model.prompt_encoder.default.")
            assert torch.equal(found[live].read(), saved[name].read()), name


def test_checkpoint_of_the_trainer_resumes(tmp_path: Path) -> None:
    """Training ends like the Trainer's own run."""
    train("torch", SCRIPT, "theirs", tmp_path / "theirs", 8, nproc=2)
    shutil.copytree(tmp_path / "theirs" / "checkpoint-4", tmp_path / "ours" / "checkpoint-4")
    train("torch", SCRIPT, "ours", tmp_path / "ours", 8, nproc=2)
    ours, theirs = tmp_path / "ours" / "checkpoint-8", tmp_path / "theirs" / "checkpoint-8"
    with sp.open(ours / "shardproof") as found, sp.open(theirs) as expected:
        names = [key for key in found if key.startswith("model.") and key != "model.lm_head.weight"]
        for name in names:
            assert torch.equal(found[name].read(), expected[name.removeprefix("model.")].read()), name
        assert len(names) == 11
        assert found["scheduler"]["last_epoch"] == 8
    history = [
        json.loads((folder / "trainer_state.json").read_text())["log_history"] for folder in (ours, theirs)
    ]
    assert len(history[0]) == len(history[1])


def test_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """The largest loss counts as best here, so it is not the last one."""
    text = train("torch", SCRIPT, "ours-best", tmp_path / "run", 8, nproc=2)
    best = text.split("best ")[1].split()[0]
    assert best != "checkpoint-8"
    with sp.open(tmp_path / "run-end") as end, sp.open(tmp_path / "run" / best / "shardproof") as saved:
        assert all(torch.equal(end[key].read(), saved[key].read()) for key in end)


def test_failed_last_save_removes_nothing(tmp_path: Path) -> None:
    """In the end, the Trainer removes all but the best checkpoint, which is not the newest one here."""
    text = train("torch", SCRIPT, "ours-best-fails", tmp_path / "run", 8, nproc=2)
    assert text.count("No space left on device") >= 2, "both ranks raise"
    assert (tmp_path / "run" / "checkpoint-6" / "shardproof" / "manifest.json").exists()
    assert not (tmp_path / "run" / "checkpoint-8" / "shardproof" / "manifest.json").exists()


def test_rotation_counts_committed_checkpoints(tmp_path: Path) -> None:
    """The files of a killed save are removed, and do not count as a checkpoint."""
    run = tmp_path / "run"
    train("torch", SCRIPT, "ours-two", run, 4, nproc=1)
    (run / "checkpoint-5" / "shardproof" / "shards").mkdir(parents=True)
    text = train("torch", SCRIPT, "ours-two", run, 6, nproc=1)
    assert sorted(folder.name for folder in run.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    assert "cannot be removed" not in text


def test_trainer_of_trl_is_killed_in_a_save_and_resumes(tmp_path: Path) -> None:
    script, last = SCRIPTS / "train_trl.py", "checkpoint-6/shardproof"
    train("trl", script, tmp_path / "whole", nproc=2)
    train("trl", script, tmp_path / "run", nproc=2, kill_in_save=2)
    train("trl", script, tmp_path / "run", nproc=2)
    assert_same_checkpoints(tmp_path / "run" / last, tmp_path / "whole" / last)
    assert (tmp_path / "run" / "checkpoint-6" / "tokenizer.json").exists()


def test_nothing_resumes_from_a_save_that_did_not_finish(tmp_path: Path) -> None:
    text = train("torch", SCRIPT, "ours-wrong", tmp_path / "run", 2, nproc=1)
    assert (
        "has no committed checkpoint. Leave resume_from_checkpoint out, or set it to last_checkpoint(" in text
    )
    assert "NotCommittedError" in text


def test_the_class_of_a_trainer_that_saves_with_shardproof_is_extended() -> None:
    assert "classes are made" in train("torch", SCRIPTS / "classes_with_shardproof.py", nproc=1)
