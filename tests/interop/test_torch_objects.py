"""What torchao, torchdata, schedulefree and peft hold is saved on n ranks and restored on m, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.peer import assert_same_tensors, run_peer

SCRIPT = "torch_objects.py"
pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_low_bit_optimizer_state_is_resharded(optimizer: str, tmp_path: Path) -> None:
    saved = run_peer("torchao", SCRIPT, "save", optimizer, tmp_path / "c", nproc=2, timeout=180)
    assert "optimizer.0.weight.exp_avg.scale" in saved.facts["keys"]
    for ranks in (1, 4):
        loaded = run_peer("torchao", SCRIPT, "load", optimizer, tmp_path / "c", nproc=ranks, timeout=180)
        assert_same_tensors(loaded.tensors, saved.tensors)


def test_low_bit_optimizer_state_of_columns_is_resharded(tmp_path: Path) -> None:
    """FSDP2 over tensor parallelism, to fewer ranks and back to more."""
    saved = run_peer("torchao", SCRIPT, "save", "AdamW8bit columns", tmp_path / "c", nproc=2, timeout=180)
    loaded = run_peer("torchao", SCRIPT, "load", "AdamW8bit columns", tmp_path / "c", nproc=4, timeout=180)
    assert_same_tensors(loaded.tensors, saved.tensors)


@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_quantised_weights_are_stored_by_their_parts(config: str, tmp_path: Path) -> None:
    saved = run_peer("torchao", SCRIPT, "save", config, tmp_path / "c", nproc=2)
    assert {"model.0.weight.qdata", "model.0.weight.scale", "model.0.weight.@subclass"} <= set(
        saved.facts["keys"]
    )
    loaded = run_peer("torchao", SCRIPT, "load", config, tmp_path / "c")
    assert_same_tensors(loaded.tensors, saved.tensors)


def test_weights_that_are_cast_when_they_are_gathered_have_the_keys_of_plain_ones(tmp_path: Path) -> None:
    saved = run_peer("torchao", SCRIPT, "save", "float8", tmp_path / "c", nproc=2)
    assert "model.0.weight" in saved.facts["keys"] and "model.0.weight.@subclass" not in saved.facts["keys"]
    loaded = run_peer("torchao", SCRIPT, "load", "float8", tmp_path / "c", nproc=4)
    assert_same_tensors(loaded.tensors, saved.tensors)
