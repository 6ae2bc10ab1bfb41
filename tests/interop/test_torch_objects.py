"""Objects of torchao, torchdata, schedulefree and peft, saved on n ranks and restored on m, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import shardproof as sp
from tests.interop.checkpoints import assert_same_checkpoints
from tests.interop.peer import FOLDER, PeerFailed, assert_same_tensors, run_peer
from tests.interop.training import EXAMPLES, train

SCRIPT = "torch_objects.py"
LATER = "a step later: "
pytestmark = pytest.mark.timeout(400)


def _before_the_step(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(LATER)}


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_low_bit_optimizer_state_is_resharded(optimizer: str, tmp_path: Path) -> None:
    saved = run_peer("torchao", SCRIPT, "save", optimizer, tmp_path / "c", nproc=2, timeout=180)
    assert "optimizer.0.weight.exp_avg.scale" in saved.facts["keys"]
    for ranks in (1, 4):
        loaded = run_peer("torchao", SCRIPT, "load", optimizer, tmp_path / "c", nproc=ranks, timeout=180)
        assert_same_tensors(_before_the_step(loaded.tensors), _before_the_step(saved.tensors))


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_low_bit_optimizer_state_of_compiled_steps_is_resharded(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each optimizer has a folder of its own for compiled code, as the page says."""
    if shutil.which("c++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    kind, folder = f"{optimizer} compiled", tmp_path / "c"
    saved = run_peer("torchao", SCRIPT, "save", kind, folder, nproc=2, timeout=600)
    assert (tmp_path / "compiled").exists()
    loaded = run_peer("torchao", SCRIPT, "load", kind, folder, nproc=1, timeout=600)
    assert_same_tensors(_before_the_step(loaded.tensors), _before_the_step(saved.tensors))


def test_low_bit_optimizer_state_of_columns_is_resharded(tmp_path: Path) -> None:
    """FSDP2 over tensor parallelism, to fewer ranks and back to more."""
    saved = run_peer("torchao", SCRIPT, "save", "AdamW8bit columns", tmp_path / "c", nproc=2, timeout=180)
    loaded = run_peer("torchao", SCRIPT, "load", "AdamW8bit columns", tmp_path / "c", nproc=4, timeout=180)
    assert_same_tensors(_before_the_step(loaded.tensors), _before_the_step(saved.tensors))


@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_quantised_weights_are_stored_by_their_parts(config: str, tmp_path: Path) -> None:
    saved = run_peer("torchao", SCRIPT, "save", config, tmp_path / "c", nproc=2)
    assert {"model.0.weight.qdata", "model.0.weight.scale", "model.0.weight.@subclass"} <= set(
        saved.facts["keys"]
    )
    loaded = run_peer("torchao", SCRIPT, "load", config, tmp_path / "c")
    assert_same_tensors(_before_the_step(loaded.tensors), _before_the_step(saved.tensors))


def test_weights_that_are_cast_when_they_are_gathered_have_the_keys_of_plain_ones(tmp_path: Path) -> None:
    saved = run_peer("torchao", SCRIPT, "save", "float8", tmp_path / "c", nproc=2)
    assert "model.0.weight" in saved.facts["keys"] and "model.0.weight.@subclass" not in saved.facts["keys"]
    loaded = run_peer("torchao", SCRIPT, "load", "float8", tmp_path / "c", nproc=4)
    assert_same_tensors(_before_the_step(loaded.tensors), _before_the_step(saved.tensors))


@pytest.mark.parametrize("kind", ["schedulefree", "peft"])
def test_state_of_other_packages_is_resharded(kind: str, tmp_path: Path) -> None:
    saved = run_peer("torchao", SCRIPT, "save", kind, tmp_path / "c", nproc=2)
    loaded = run_peer("torchao", SCRIPT, "load", kind, tmp_path / "c", nproc=4)
    assert_same_tensors(_before_the_step(loaded.tensors), _before_the_step(saved.tensors))


def test_adapters_are_saved_without_the_model_below_them(tmp_path: Path) -> None:
    page = (FOLDER.parents[1] / "docs" / "frameworks" / "torch.md").read_text()
    shown = page.split("## Adapters")[1].split("```")[1].removeprefix("python").strip().splitlines()
    script = (FOLDER / "peers" / SCRIPT).read_text()
    assert len(shown) == 2 and all(line in script for line in shown)
    saved = run_peer("torchao", SCRIPT, "save", "peft", tmp_path / "c", nproc=2)
    keys = [key for key in saved.facts["keys"] if key.startswith("adapter.")]
    assert keys and all("lora_" in key or ".modules_to_save." in key for key in keys)


def test_a_data_loader_with_workers_goes_on_after_the_batch_of_the_save(tmp_path: Path) -> None:
    saved = run_peer("torchao", SCRIPT, "save", "data loader", tmp_path / "c", nproc=2)
    loaded = run_peer("torchao", SCRIPT, "load", "data loader", tmp_path / "c", nproc=2)
    assert loaded.objects == saved.objects
    assert [len(batches) for batches in saved.objects["batches"]] == [5, 5]


def test_shards_that_cut_a_block_are_refused(tmp_path: Path) -> None:
    run_peer("torchao", SCRIPT, "save", "AdamW8bit cut", tmp_path / "c", timeout=180)
    with pytest.raises(
        PeerFailed, match="cuts a block of 256 elements that .*OptimState8bit quantises together"
    ):
        run_peer("torchao", SCRIPT, "load", "AdamW8bit cut", tmp_path / "c", nproc=2, timeout=180)


def test_example_of_torchao_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Without compilation, which takes minutes."""
    example, quick = EXAMPLES / "torchao_loop.py", {"TORCHDYNAMO_DISABLE": "1"}
    train("torchao", example, tmp_path / "whole", nproc=2, **quick)
    train("torchao", example, tmp_path / "run", nproc=2, kill_in_save=7, **quick)
    assert sp.Checkpointer(tmp_path / "run").steps() == [5, 6]
    shutil.copytree(tmp_path / "run", tmp_path / "narrow")
    train("torchao", example, tmp_path / "run", nproc=2, **quick)
    assert_same_checkpoints(tmp_path / "run" / "step-00000012", tmp_path / "whole" / "step-00000012")

    train("torchao", example, tmp_path / "narrow", nproc=1, **quick)
    assert sp.Checkpointer(tmp_path / "narrow").steps() == [11, 12]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_suspicious_step_goes_on_with_the_loader_and_the_batches_of_its_collator(
    workers: int, tmp_path: Path
) -> None:
    whole = run_peer("torchao", "rerun_batches.py", "whole", tmp_path / "whole", workers)
    first = run_peer("torchao", "rerun_batches.py", "first", tmp_path / "cut", workers)
    second = run_peer("torchao", "rerun_batches.py", "second", tmp_path / "cut", workers)
    assert first.facts["code"] == 16
    assert len(first.objects["seen"]) == 3
    assert first.objects["seen"] + second.objects["seen"] == whole.objects["seen"]
    assert {classes for *_, classes in whole.objects["seen"]} == {"BatchEncoding"}
    assert torch.equal(second.tensors["weight"], whole.tensors["weight"])
