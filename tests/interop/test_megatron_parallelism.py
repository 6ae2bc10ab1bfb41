"""Megatron-Core in the parallel layouts that it has on the CPU: saved, killed, loaded on other ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.peer import PeerFailed, assert_same_tensors, python_of
from tests.interop.test_megatron_core import EP2, EXPERTS, tensors, train

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}


NEEDS_GPU = {
    "layers of Transformer Engine": ("transformer_engine", {}, {"engine": True}),
    "grouped experts": ("transformer_engine", {}, {"engine": True, "moe_grouped_gemm": True, **EXPERTS}),
    "FP8 weights": ("transformer_engine", {}, {"engine": True, "fp8": "hybrid", "fp8_param": True}),
    "its context parallelism": ("transformer_engine", {"context_parallel_size": 2}, {"engine": True}),
    "precision-aware optimizer": (
        "transformer_engine",
        {},
        {"optimizer": {"use_precision_aware_optimizer": True}},
    ),
    "requests of nvrx": ("nvidia_resiliency_ext", {}, {}),
}
"""Features that Megatron-Core has on a GPU alone: the package that it needs, the layout, the options."""


def remembered(folder: Path) -> list[dict[str, Any]]:
    """The scheduler, random state and rerun state of each rank, from the operation `remember`."""
    return [json.loads((folder / f"rank-{at}.json").read_text()) for at in range(len(list(folder.iterdir())))]


@pytest.mark.parametrize(
    ("layout", "other", "options", "key"),
    [
        pytest.param(
            (EP2, 4), ({}, 2), EXPERTS, "decoder.layers.mlp.experts.experts.linear_fc1.weight", id="experts"
        ),
        pytest.param(
            ({"context_parallel_size": 2}, 2),
            ({}, 1),
            {},
            "decoder.layers.mlp.linear_fc1.weight",
            id="context",
        ),
        pytest.param(
            ({**PP2, "virtual_pipeline_model_parallel_size": 2}, 2),
            (TP2, 2),
            {},
            "decoder.layers.self_attention.linear_qkv.weight",
            id="virtual_stages",
        ),
        pytest.param(
            (TP2, 2),
            ({}, 1),
            {"sequence_parallel": True},
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
            id="sequence",
        ),
        pytest.param(
            (PP2, 2), (TP2, 2), {"mtp_num_layers": 1}, "mtp.layers.0.eh_proj.weight", id="predictions"
        ),
    ],
)
def test_other_layouts_load_bit_for_bit(
    layout: tuple[dict[str, Any], int],
    other: tuple[dict[str, Any], int],
    options: dict[str, Any],
    key: str,
    tmp_path: Path,
) -> None:
    """To another layout and back, where training goes on as if never stopped.

    The first run is killed in a save. Weights have SwiGLU and grouped queries. Megatron's own saves are
    compared.
    """
    at = {name: tmp_path / name for name in ("first", "second", "own1", "own2", "own3", "on", "on_again")}
    memory = {name: tmp_path / f"memory-{name}" for name in ("first", "other", "again", "on", "on_again")}
    steps = [("train", 2), ("save", at["first"]), ("reference", at["own1"]), ("remember", memory["first"])]
    steps += [
        ("train", 1),
        ("reference", at["on"]),
        ("remember", memory["on"]),
        ("killed", tmp_path / "lost"),
    ]
    with pytest.raises(PeerFailed, match="exit code -9"):
        train("megatron", steps, layout[0], nproc=layout[1], whole=True, **options)
    steps = [("load", at["first"]), ("remember", memory["other"])]
    steps += [("save", at["second"]), ("reference", at["own2"])]
    train("megatron", steps, other[0], nproc=other[1], seed=1, whole=True, **options)
    steps = [("load", at["second"]), ("reference", at["own3"]), ("remember", memory["again"]), ("train", 1)]
    steps += [("reference", at["on_again"]), ("remember", memory["on_again"])]
    train("megatron", steps, layout[0], nproc=layout[1], seed=2, whole=True, **options)
    saved = tensors(at["own1"])
    assert f"optimizer.state.exp_avg.{key}" in saved
    for name in ("first", "own2", "own3"):
        assert_same_tensors({key: item for key, item in tensors(at[name]).items() if key in saved}, saved)
    assert_same_tensors(tensors(at["on_again"]), tensors(at["on"]))
    assert not (tmp_path / "lost" / "manifest.json").exists()
    first, other_rank, again, on, on_again = (remembered(memory[name])[0] for name in memory)
    assert first["scheduler"] == other_rank["scheduler"] == again["scheduler"] != on["scheduler"]
    assert on_again["scheduler"] == on["scheduler"]
    if layout[0].keys() | other[0].keys() <= {*EP2, "context_parallel_size"}:  # the same TP and PP
        assert first["random"] == other_rank["random"] == again["random"] != on["random"]
        assert on_again["random"] == on["random"]


def test_each_sharding_type_of_the_optimizer(tmp_path: Path) -> None:
    """`dp_reshardable` loads on the same and on more data parallel ranks, and other layouts are refused.

    Everything else of a run comes back too, with a rerun that is asked for. Experts have an optimizer of
    their own.
    """
    kind = {**EP2, "kind": "dp_reshardable"}
    at = {name: tmp_path / name for name in ("first", "second", "own1", "own2", "own3")}
    memory = {name: tmp_path / f"memory-{name}" for name in ("first", "second", "third")}
    steps = [("train", 2), ("reject", "spiky loss"), ("save", at["first"]), ("remember", memory["first"])]
    steps += [("reference", at["own1"]), ("killed", tmp_path / "lost")]
    with pytest.raises(PeerFailed, match="exit code -9"):
        train("megatron", steps, kind, nproc=2, whole=True, **EXPERTS)
    steps = [("load", at["first"]), ("remember", memory["second"]), ("save", at["second"])]
    train("megatron", [*steps, ("reference", at["own2"])], kind, nproc=2, seed=1, whole=True, **EXPERTS)
    steps = [("load", at["second"]), ("remember", memory["third"]), ("reference", at["own3"])]
    train("megatron", steps, kind, nproc=4, seed=2, whole=True, **EXPERTS)
    saved = tensors(at["own1"])
    for name in ("own2", "own3"):
        assert_same_tensors(tensors(at[name]), saved)
    first, *_ = of_ranks = remembered(memory["first"])
    assert "WILL_RERUN_FROM_CHECKPOINT" in of_ranks[1]["rerun"]["state"]
    assert [rank["rerun"] for rank in remembered(memory["second"])] == [rank["rerun"] for rank in of_ranks]
    for rank in [*remembered(memory["second"]), *remembered(memory["third"])]:
        assert rank["scheduler"] == first["scheduler"]
        assert rank["random"] == first["random"]  # Megatron-LM stores that of one data parallel rank
    steps = [("describe", "fully_sharded_model_space"), ("refused", at["first"])]
    errors = train("megatron", steps, {"kind": "dp_reshardable"}, nproc=2, **EXPERTS).facts["errors"]
    assert "KeyMismatchError" in errors["refused"]
    assert "flattened_range is not supported" in errors["fully_sharded_model_space"]  # Megatron-Core itself


@pytest.mark.gpu
@pytest.mark.parametrize("part", NEEDS_GPU)
def test_features_that_need_a_gpu(part: str, tmp_path: Path) -> None:
    """Saved, and loaded with other weights. Megatron's own saves are compared."""
    package, layout, options = NEEDS_GPU[part]
    ranks = layout.get("context_parallel_size", 1)
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{part} needs {ranks} GPUs of CUDA")
    if subprocess.run([python_of("megatron"), "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(f"{part} needs {package} in the environment megatron, which is built for a CPU")
    at = {name: tmp_path / name for name in ("saved", "own1", "own2")}
    save = "nvrx" if package == "nvidia_resiliency_ext" else "save"
    steps = [("train", 2), ("reference", at["own1"]), (save, at["saved"])]
    train("megatron", steps, layout, nproc=ranks, **options)
    train(
        "megatron", [("load", at["saved"]), ("reference", at["own2"])], layout, nproc=ranks, seed=1, **options
    )
    assert_same_tensors(tensors(at["own2"]), tensors(at["own1"]))


@pytest.mark.parametrize("other", [pytest.param((EP2, 2), id="two"), pytest.param(({}, 1), id="one")])
def test_live_state_of_dense_and_expert_optimizers(other: tuple[dict[str, Any], int], tmp_path: Path) -> None:
    """It has the bits that Megatron gathers, and goes to another number of optimizers and back.

    Then training goes on as if never stopped, so the options of the optimizers are there, too.
    """
    at = {name: tmp_path / name for name in ("own", "ours", "loaded", "second", "on", "on_again")}
    steps = [("train", 2), ("reference", at["own"]), ("save_live", at["ours"])]
    train("megatron", [*steps, ("train", 1), ("reference", at["on"])], EP2, nproc=4, **EXPERTS)
    steps = [("load_live", at["ours"]), ("reference", at["loaded"]), ("save_live", at["second"])]
    train("megatron", steps, other[0], nproc=other[1], seed=3, **EXPERTS)
    steps = [("load_live", at["second"]), ("train", 1), ("reference", at["on_again"])]
    train("megatron", steps, EP2, nproc=4, seed=4, **EXPERTS)
    saved = tensors(at["own"])
    assert "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight" in saved
    for name in ("ours", "loaded", "second"):
        assert_same_tensors(tensors(at[name]), saved)
    assert_same_tensors(tensors(at["on_again"]), tensors(at["on"]))


def test_options_of_dense_and_expert_optimizers_in_checkpoints_of_megatron(tmp_path: Path) -> None:
    """Megatron's own saves, loaded by another number of optimizers. Its own load fails with a KeyError."""
    at = {name: tmp_path / name for name in ("two", "on", "one", "on_again", "again")}
    steps = [("train", 2), ("reference", at["two"]), ("train", 1), ("reference", at["on"])]
    train("megatron", steps, EP2, nproc=2, **EXPERTS)
    with pytest.raises(PeerFailed, match="KeyError: 'optimizer'"):
        train("megatron", [("own", at["two"])], {}, nproc=1, seed=1, **EXPERTS)
    steps = [("load", at["two"]), ("reference", at["one"])]
    train("megatron", steps, {}, nproc=1, seed=1, **EXPERTS)
    steps = [("load", at["one"]), ("reference", at["again"]), ("train", 1), ("reference", at["on_again"])]
    train("megatron", steps, EP2, nproc=2, seed=2, **EXPERTS)
    for name, expected in (("one", "two"), ("again", "two"), ("on_again", "on")):
        assert_same_tensors(tensors(at[name]), tensors(at[expected]))
