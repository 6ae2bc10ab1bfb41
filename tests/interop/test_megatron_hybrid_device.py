"""Megatron-Core's HybridDeviceOptimizer, by itself: saved, and loaded by every optimizer with the same keys.

The optimizer and its sub-optimizers are the released ones. `offload_stubs.py` says what stands in for the
device. `test_megatron_offload.py` has the DistributedOptimizer around it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from tests.interop.peer import PeerResult, assert_same_tensors, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

ENVIRONMENTS = ["megatron", "megatron16"]
SLOTS = ("exp_avg", "exp_avg_sq", "step")
Run = dict[str, Any]


def run_all(*runs: Run, environment: str = "megatron", nproc: int = 1) -> PeerResult:
    """Runs `hybrid_device.py`."""
    text = json.dumps(
        [{name: str(at) if isinstance(at, Path) else at for name, at in run.items()} for run in runs]
    )
    return run_peer(environment, "hybrid_device.py", text, nproc=nproc, timeout=200)


def state(result: PeerResult, number: int, when: str) -> dict[str, torch.Tensor]:
    """The state of a run "loaded" or "trained", by the keys of a checkpoint."""
    prefix = f"{number}.{when}."
    return {key.removeprefix(prefix): item for key, item in result.tensors.items() if key.startswith(prefix)}


def values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state with the exact weights alone: those of the masters, if there are any."""
    exact = {
        f"model.{key.removeprefix('optimizer.').removesuffix('.master')}": item
        for key, item in tensors.items()
        if key.endswith(".master")
    }
    return {key: item for key, item in tensors.items() if not key.endswith(".master")} | exact


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_each_fraction_loads_from_each(environment: str, dtype: str, in_fp32: bool, tmp_path: Path) -> None:
    """Fresh and stepped optimizers, with overlap and without. The step counts come back, too.

    Some are saved and loaded by themselves, and some as `OptimizerState`.
    """
    how: Run = {"optimizer": "megatron", "dtype": dtype, "in_fp32": in_fp32}
    fractions = [0, 0.5, 1]
    runs = [
        {**how, "fraction": at, "train": 3, "save": tmp_path / str(at), "overlap": at != 1, "named": at == 0}
        for at in fractions
    ]
    runs += [{**run, "train": 5, "save": tmp_path / f"{run['fraction']}-on"} for run in runs]
    pairs = [(source, target) for source in fractions for target in fractions]
    for source, target in pairs:
        load = {
            "fraction": target,
            "load": tmp_path / str(source),
            "first": 3,
            "train": 2,
            "named": target == 0.5,
        }
        runs.append({**how, **load, "ahead": 2 if target == 1 else 0, "overlap": source != 1})
    result = run_all(*runs, environment=environment)
    assert not result.facts
    for number, (source, _) in enumerate(pairs, 2 * len(fractions)):
        saved = state(result, fractions.index(source), "trained")
        assert {key.rpartition(".")[2] for key in saved} >= {"weight", "bias", *SLOTS}
        assert ("optimizer.0.weight.master" in saved) == (dtype == "bfloat16" and in_fp32)
        assert_same_tensors(state(result, number, "loaded"), saved)
        goes_on = state(result, len(fractions) + fractions.index(source), "trained")
        assert_same_tensors(state(result, number, "trained"), goes_on)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_relatives_load_each_others_checkpoints(environment: str, dtype: str, tmp_path: Path) -> None:
    """From 2 ranks at 0.5 to 3 ranks at 1, 1 rank at 0, torch's AdamW and `sp.optim`, and from each back.

    AdamW has no masters, so its weights are float32. A master is then the weight.
    """
    how: Run = {"optimizer": "megatron", "dtype": dtype}
    start = {**how, "train": 3, "save": tmp_path / "start"}
    first = run_all(start, {**how, "train": 5}, environment=environment, nproc=2)
    saved, goes_on = state(first, 0, "trained"), state(first, 1, "trained")
    on: Run = {"first": 3, "train": 2, "cast": True}
    load: Run = {"load": tmp_path / "start", "cast": True}
    for name, nproc, target in [
        ("one", 3, {**how, "fraction": 1}),
        ("zero", 1, {**how, "fraction": 0}),
        ("ours", 1, {"optimizer": "ours", "dtype": dtype, "fraction": 0.7}),
        ("adamw", 1, {"optimizer": "adamw", "dtype": "float32"}),
    ]:
        again, back = {**target, **load, "save": tmp_path / name}, {**how, **on, "load": tmp_path / name}
        result = run_all({**target, **load, **on}, again, back, environment=environment, nproc=nproc)
        assert not result.facts, name
        assert_same_tensors(values(state(result, 0, "loaded")), values(saved))
        assert_same_tensors(values(state(result, 0, "trained")), values(goes_on))
        assert_same_tensors(values(state(result, 2, "loaded")), values(saved))
        assert_same_tensors(values(state(result, 2, "trained")), values(goes_on))
        with sp.open(tmp_path / "start") as one, sp.open(tmp_path / name) as other:
            keys = {record.key for record in one.tensors if not record.key.endswith(".master")}
            assert keys == {record.key for record in other.tensors if not record.key.endswith(".master")}
            stored = one["optimizer.1.bias.@options"], other["optimizer.1.bias.@options"]
            options = [item["options"] for item in stored]
            assert [item["class"] for item in stored] == ["AdamW", "AdamW"]
            assert [found["betas"] for found in options] == [(0.9, 0.999)] * 2


def test_a_side_that_counts_steps_in_its_groups(tmp_path: Path) -> None:
    """As Apex's and Transformer Engine's Adam do. `step` is a slot of each parameter there, too.

    FusedAdam rounds in another order than torch's AdamW. With a learning rate of 0.01, one step of Adam
    changes a weight by about as much, and float32 rounds that to 1e-9. The bound allows a thousand times
    that. One step more or less in the count changes the weights by 1e-4 and more.
    """
    how: Run = {"optimizer": "megatron", "dtype": "float32", "fused": True}
    runs = [
        {**how, "train": 3, "save": tmp_path / "half"},
        {**how, "train": 5},
        {**how, "load": tmp_path / "half", "first": 3, "train": 2, "ahead": 1},
        {**how, "fraction": 0, "load": tmp_path / "half", "first": 3, "train": 2, "save": tmp_path / "zero"},
        {**how, "fraction": 1, "load": tmp_path / "half", "first": 3, "train": 2},
        {**how, "fraction": 1, "load": tmp_path / "zero"},
    ]
    result = run_all(*runs)
    assert not result.facts
    saved, goes_on = state(result, 0, "trained"), state(result, 1, "trained")
    assert {float(item) for key, item in saved.items() if key.endswith(".step")} == {3}
    for number in (2, 3, 4):
        assert_same_tensors(state(result, number, "loaded"), saved)
    assert_same_tensors(state(result, 2, "trained"), goes_on)
    for number in (3, 4):
        for key, item in state(result, number, "trained").items():
            torch.testing.assert_close(item, goes_on[key], rtol=0, atol=1e-6, msg=key)
    assert {float(item) for key, item in state(result, 5, "loaded").items() if key.endswith(".step")} == {5}


def test_before_the_first_step(tmp_path: Path) -> None:
    """Masters exist, moments do not. The checkpoint takes those of a stepped target away."""
    how: Run = {"optimizer": "megatron", "fused": True}
    runs = [
        {**how, "save": tmp_path / "fresh"},
        {**how, "train": 2},
        {**how, "fraction": 1, "load": tmp_path / "fresh"},
        {**how, "load": tmp_path / "fresh", "ahead": 3, "train": 2},
    ]
    result = run_all(*runs)
    assert not result.facts
    saved = state(result, 0, "trained")
    assert {key.rpartition(".")[2] for key in saved} == {"weight", "bias", "master"}
    assert_same_tensors(state(result, 2, "loaded"), saved)
    assert_same_tensors(state(result, 3, "loaded"), saved)
    assert_same_tensors(state(result, 3, "trained"), state(result, 1, "trained"))


def test_classes_are_stored_by_name_and_come_from_the_target(tmp_path: Path) -> None:
    """Another class is a mismatch, and `strict=False` keeps the target's. Options of the rule are loaded."""
    how: Run = {"optimizer": "megatron", "dtype": "float32"}
    load: Run = {"load": tmp_path / "saved", "first": 1, "train": 1}
    runs = [
        {**how, "train": 1, "save": tmp_path / "saved", "betas": [0.5, 0.75]},
        {**how, "fused": True, **load},
        {**how, "fused": True, **load, "strict": False},
        {**how, "fraction": 1, **load},
        {"optimizer": "adamw", "dtype": "float32", **load},
    ]
    result = run_all(*runs)
    expected = "gpu_optimizer_cls=megatron_stubs.FusedAdam"
    error = result.facts.pop("1")
    assert error.startswith("KeyMismatchError") and expected in error
    assert "gpu_optimizer_cls=torch.optim.adamw.AdamW; strict=False keeps that of the target" in error
    assert not result.facts
    assert "<class 'megatron_stubs.FusedAdam'>" in result.objects["2.options"]
    assert "'offload_fraction': 1" in result.objects["3.options"]
    for number in (2, 3, 4):
        assert "'betas': (0.5, 0.75)" in result.objects[f"{number}.options"]
    assert "_optimizer_cls" not in result.objects["4.options"]
    assert "offload_fraction" not in result.objects["4.options"]
    with sp.open(tmp_path / "saved") as checkpoint:
        options = checkpoint["optimizer.0.weight.@options"]["options"]
    assert options["cpu_optimizer_cls"] == "torch.optim.adamw.AdamW"


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_flat_parameters_of_fsdp1_are_refused_and_the_advice_works(environment: str, tmp_path: Path) -> None:
    runs = [
        {"optimizer": "megatron", "sharded": "fsdp1", "fraction": 1, "save": tmp_path / "flat"},
        {"optimizer": "ours", "sharded": "fsdp2", "ahead": 1, "save": tmp_path / "advised"},
    ]
    facts = run_all(*runs, environment=environment, nproc=2).facts
    assert facts.keys() == {"0"}
    assert "trains flat parameters of FSDP1" in facts["0"]
    assert "Use fully_shard (FSDP2) and shardproof.optim.HybridDeviceOptimizer" in facts["0"]
    with sp.open(tmp_path / "advised") as checkpoint:
        assert "optimizer.0.weight.exp_avg" in checkpoint
