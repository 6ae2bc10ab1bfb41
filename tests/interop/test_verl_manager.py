"""The checkpoint manager of released verl, with shardproof behind it: saved, killed, restored elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import shardproof as sp
from tests.interop.checkpoints import assert_same_checkpoints
from tests.interop.peer import assert_same_tensors, python_of, run_peer
from tests.interop.training import EXAMPLES, SCRIPTS, train

pytestmark = [pytest.mark.interop, pytest.mark.processes]

SCRIPT = SCRIPTS / "train_verl.py"


@pytest.mark.parametrize(
    ("saved", "restored"), [(one, other) for one in ("fsdp", "fsdp2") for other in ("fsdp", "fsdp2")]
)
def test_a_save_is_restored_on_another_number_of_ranks(saved: str, restored: str, tmp_path: Path) -> None:
    """verl's own manager has a file for each rank, and finds none on another number of ranks."""
    train("verl", SCRIPT, saved, "save", tmp_path / "saved", nproc=2)
    with sp.open(tmp_path / "saved") as checkpoint:
        assert checkpoint.step == 3 and checkpoint["lr_scheduler"]["last_epoch"] == 3
        assert checkpoint["optimizer.lm_head.weight.step"].read() == 3
        weights = {
            record.key: checkpoint[record.key].read()
            for record in checkpoint.tensors
            if record.key.startswith("model.")
        }
    exported = load_file(tmp_path / "saved" / "huggingface" / "model.safetensors")
    assert_same_tensors({f"model.{name}": tensor for name, tensor in exported.items()}, weights)
    if saved == "fsdp2":
        assert_same_tensors(exported, load_file(tmp_path / "saved-own" / "huggingface" / "model.safetensors"))
    text = train("verl", SCRIPT, restored, "restore", tmp_path / "saved", tmp_path / "restored", nproc=3)
    assert_same_checkpoints(tmp_path / "restored", tmp_path / "saved", ranks=2)
    assert "model_world_size_3_rank_2.pt" in text


def test_checkpoints_of_verl_load_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Checkpoints of verl's own manager, with the values that ours saves at the same step."""
    train("verl", SCRIPT, "fsdp2", "save", tmp_path / "saved", nproc=2)
    with sp.open(tmp_path / "saved-own") as checkpoint:
        assert checkpoint.world_size == 2 and checkpoint["optimizer.state.0.step"].read() == 3
    train("verl", SCRIPT, "fsdp2", "restore_own", tmp_path / "saved", tmp_path / "restored", nproc=3)
    assert_same_checkpoints(tmp_path / "restored", tmp_path / "saved", but=["rng"])


def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    """The export of the first checkpoint also saves, so the third save is that of the second one."""
    train("verl", SCRIPT, "fsdp", "save", tmp_path / "saved", nproc=2, kill_in_save=3)
    assert not (tmp_path / "saved-next" / "manifest.json").exists()
    train("verl", SCRIPT, "fsdp", "restore", tmp_path / "saved", tmp_path / "restored", nproc=2)
    assert_same_checkpoints(tmp_path / "restored", tmp_path / "saved")


def test_the_page_shows_the_example() -> None:
    """The class that its diff imports is that of the example, which is short."""
    example = (EXAMPLES / "verl_manager.py").read_text()
    page = (EXAMPLES.parent / "docs" / "frameworks" / "verl.md").read_text()
    assert len(example.splitlines()) <= 45
    prefix = "+from verl_manager import "
    (added,) = [line for line in page.splitlines() if line.startswith(prefix)]
    name = added.removeprefix(prefix).removesuffix(" as FSDPCheckpointManager")
    assert f"class {name}(FSDPCheckpointManager):" in example and "](../../examples/verl_manager.py)" in page


def test_megatron_fsdp_is_saved_and_loaded_by_the_diffs_of_the_page(tmp_path: Path) -> None:
    """The methods of verl's manager after the diffs, on another number of ranks."""
    page = (EXAMPLES.parent / "docs" / "frameworks" / "verl.md").read_text()
    section = page.split("## Megatron-FSDP")[1].split("\n## ")[0]
    diffs = [block.split("```")[0].strip().splitlines() for block in section.split("```diff")[1:]]
    (site,) = python_of("megatron_fsdp").parents[1].glob("lib/python*/site-packages")
    arguments = (tmp_path / "c", json.dumps(diffs), site)
    saved = run_peer("verl", "train_verl_megatron.py", "save", *arguments, nproc=2, timeout=200)
    loaded = run_peer("verl", "train_verl_megatron.py", "load", *arguments, nproc=3, timeout=200)
    assert_same_tensors(loaded.tensors, saved.tensors)
    # The gradients are added in another order, in bfloat16.
    assert loaded.facts["losses"] == pytest.approx(saved.facts["losses"], rel=2e-2, abs=0)
