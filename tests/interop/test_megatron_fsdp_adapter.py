"""Released Megatron-FSDP saves and loads through `shardproof.frameworks.megatron_fsdp`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import shardproof as sp
from tests.interop.peer import PeerFailed, PeerResult, assert_same_tensors, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.processes]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron_fsdp.py"
CASES = [f"{stage}-{dtype}:{stage}:{dtype}" for stage in (0, 1, 2, 3) for dtype in ("float32", "bfloat16")]


def at_next_stage(case: str, by: int) -> str:
    name, stage, dtype = case.split(":")
    return f"{name}:{(int(stage) + by) % 4}:{dtype}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PeerResult]:
    """Checkpoints of three ranks at every stage, and the state that the ranks had."""
    folder = tmp_path_factory.mktemp("megatron-fsdp")
    return folder, run_peer("megatron", "train_megatron_fsdp.py", "save", folder, *CASES, nproc=3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_stage_loads_into_another_on_fewer_ranks(saved: tuple[Path, PeerResult], ranks: int) -> None:
    """The saves overlap the next steps. Some ranks have no element of a bias."""
    folder, before = saved
    for stage in (1, 2, 3):
        assert before.facts[f"{stage}-bfloat16.elsewhere"], "rank 0 has a part of every parameter"
    cases = [at_next_stage(case, ranks) for case in CASES]
    after = run_peer("megatron", "train_megatron_fsdp.py", "load", folder, *cases, nproc=ranks)
    assert_same_tensors(after.tensors, before.tensors)
    for case in CASES:
        name = case.split(":")[0]
        assert after.facts[f"{name}.output"], "the next forward pass does not use the loaded weights"
        assert after.facts[f"{name}.lr"] == [0.01]  # the run that loads was made with 0.02


def test_masters_are_the_steps_weights(saved: tuple[Path, PeerResult]) -> None:
    folder, before = saved
    with sp.open(folder / "3-bfloat16" / "step-00000002") as checkpoint:
        master, weight = checkpoint["optimizer.a.weight.master"].read(), checkpoint["model.a.weight"].read()
    assert torch.equal(master, before.tensors["3-bfloat16.optimizer.a.weight.master"])
    assert torch.equal(master.bfloat16(), weight) and not torch.equal(master, weight.float())


def test_through_fsdp2_and_back(saved: tuple[Path, PeerResult]) -> None:
    folder, before = saved
    cases = ["3-bfloat16:2:bfloat16", "2-float32:3:float32"]
    after = run_peer("megatron", "train_megatron_fsdp.py", "through_fsdp2", folder, *cases, nproc=2)
    names = tuple(case.split(":")[0] + "." for case in cases)
    expected = {key: tensor for key, tensor in before.tensors.items() if key.startswith(names)}
    frozen = {"3-bfloat16.model.frozen.weight", "3-bfloat16.model.frozen.bias"}
    assert {key for key in frozen if after.tensors[key].dtype != torch.bfloat16} == set()
    assert_same_tensors(after.tensors, expected)


def test_hybrid_shards_load_without_replication(tmp_path: Path) -> None:
    """Two groups of two ranks, each with all of the state."""
    before = run_peer("megatron", "train_megatron_fsdp.py", "save_hybrid", tmp_path, "x:3:bfloat16", nproc=4)
    after = run_peer("megatron", "train_megatron_fsdp.py", "load", tmp_path, "x:2:bfloat16", nproc=2)
    assert_same_tensors(after.tensors, before.tensors)


def test_masters_follow_a_load_of_the_model_alone(saved: tuple[Path, PeerResult]) -> None:
    folder, before = saved
    after = run_peer(
        "megatron", "train_megatron_fsdp.py", "model_alone", folder, "3-bfloat16:1:bfloat16", nproc=2
    )
    weight = before.tensors["3-bfloat16.model.a.weight"]
    assert torch.equal(after.tensors["3-bfloat16.model.a.weight"], weight)
    assert torch.equal(after.tensors["3-bfloat16.optimizer.a.weight.master"].bfloat16(), weight)


def test_wrong_use_says_what_to_change(tmp_path: Path) -> None:
    errors = run_peer("megatron", "train_megatron_fsdp.py", "wrong", tmp_path, "x:3:float32", nproc=3).facts
    assert "shardproof.frameworks.megatron_fsdp.module_state(model)" in errors["x.0"]
    assert "not the module inside" in errors["x.1"]
    assert "after fully_shard_model" in errors["x.2"]
    assert "whose state_dict is a collective" in errors["x.3"]
    assert "Save shardproof.frameworks.megatron_fsdp.optimizer_state(optimizer, model)" in errors["x.4"]
    assert "save `module_state(model)` and `optimizer_state(optimizer, model)`" in errors["x.5"]


def test_fp8_weights_are_refused(tmp_path: Path) -> None:
    """`test_fp8_weights_of_transformer_engine_are_refused` has real ones."""
    error = run_peer("megatron", "train_megatron_fsdp.py", "fp8", tmp_path, "x:3:bfloat16").facts["x"]
    assert "is stored in fp8" in error and "save with Megatron-FSDP's own state_dict" in error


def test_the_example_is_killed_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="exit code -9"):
        run_peer("megatron", "run_sharded_example.py", EXAMPLE, 4, tmp_path / "run", 6, nproc=3)
    committed = sp.Checkpointer(tmp_path / "run").steps()[-1]
    assert committed >= 3  # the save of step 4 may still have been running
    resumed = run_peer("megatron", "run_sharded_example.py", EXAMPLE, 0, tmp_path / "run", 6, nproc=2)
    lines = resumed.facts["lines"]
    assert [int(line.split()[1]) for line in lines] == list(range(committed + 1, 7))
    rates = [float(line.split()[-1]) for line in lines]
    assert all(
        math.isclose(rate, 0.01 * 0.5 ** (int(line.split()[1]) // 2), rel_tol=1e-3)
        for rate, line in zip(rates, lines, strict=True)
    )


def test_the_example_offloads_and_continues_without(tmp_path: Path) -> None:
    """`fully_shard` gives the optimizer the sharded parameters after it was made."""
    first = run_peer("megatron", "run_sharded_example.py", EXAMPLE, 0, tmp_path, 3, "offload", nproc=2)
    rest = run_peer("megatron", "run_sharded_example.py", EXAMPLE, 0, tmp_path, 5, nproc=3)
    steps = [int(line.split()[1]) for facts in (first.facts, rest.facts) for line in facts["lines"]]
    assert steps == [1, 2, 3, 4, 5]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40
