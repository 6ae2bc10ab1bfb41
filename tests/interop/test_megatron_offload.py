"""Megatron-Core's DistributedOptimizer around its HybridDeviceOptimizer, and around torch's AdamW.

`test_megatron_hybrid_device.py` has the HybridDeviceOptimizer by itself, and says what stands in for the
device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.peer import PeerFailed, assert_same_tensors
from tests.interop.test_megatron_core import DP4, ENVIRONMENTS, EP2, EXPERTS, tensors, train

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]

SMALL: dict[str, Any] = {"num_layers": 1, "adam": "torch"}
"""Both sides of the offload have torch's AdamW, so that they compute the same bits."""
UNAWARE: dict[str, Any] = {"optimizer": {"use_precision_aware_optimizer": False}}
"""Main weights of the DistributedOptimizer; otherwise the HybridDeviceOptimizer has the masters.

0.16.1 makes a precision-aware optimizer only with Transformer Engine, which needs CUDA.
"""


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        pytest.param("megatron", {**SMALL, "overlap": True}, id="masters_and_overlap"),
        pytest.param("megatron", {**SMALL, **UNAWARE, "overlap": True}, id="main_weights_and_overlap"),
        pytest.param("megatron16", {**SMALL, **UNAWARE}, id="main_weights_0.16"),
    ],
)
def test_another_offload_on_other_ranks_goes_on(
    environment: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """From 2 ranks at 0.5 to 3 ranks at 1, to 1 rank at 0, and back. Every state has the same bits.

    Also every state two steps later, but on 3 ranks. There the gradients of a step are sums of other parts,
    rounded otherwise. Adam divides a gradient by its own size, so a difference of 1e-7 in it changes a weight
    by 1e-7 of the rate of 0.01, or by more where the gradient is almost 0. A state that is not loaded
    differs by 1e-2.
    """
    options = {**options, "batches": 6}
    names = ("first", "on", "three", "three_on", "one", "one_on", "two_on")
    at = {name: tmp_path / name for name in names}
    steps = [("train", 2), ("save_live", at["first"]), ("train", 2), ("save_live", at["on"])]
    train(environment, steps, dict(DP4), nproc=2, offload=0.5, **options)
    steps = [("load_live", at["first"]), ("save_live", at["three"])]
    steps += [("train", 2), ("save_live", at["three_on"])]
    train(environment, steps, dict(DP4), nproc=3, offload=1.0, seed=1, **options)
    steps = [("train", 1), ("load_live", at["three"]), ("save_live", at["one"])]
    steps += [("train", 2), ("save_live", at["one_on"])]
    train(environment, steps, dict(DP4), nproc=1, offload=0.0, seed=2, **options)
    steps = [("load_live", at["one"]), ("train", 2), ("save_live", at["two_on"])]
    train(environment, steps, dict(DP4), nproc=2, offload=0.5, seed=3, **options)
    for name, expected in (("three", "first"), ("one", "first"), ("one_on", "on"), ("two_on", "on")):
        assert_same_tensors(tensors(at[name]), tensors(at[expected]))
    goes_on = tensors(at["on"])
    for key, item in tensors(at["three_on"]).items():
        if key.startswith("optimizer.state.param."):
            torch.testing.assert_close(item, goes_on[key], rtol=0, atol=1e-3, msg=key)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_float32_weights_fail_in_the_constructor_of_megatron(environment: str) -> None:
    """So masters and main weights of bfloat16 weights are all that can be saved."""
    with pytest.raises(PeerFailed, match="can't optimize a non-leaf Tensor"):
        train(environment, [], dict(DP4), nproc=1, offload=0.5, dtype="float32", **SMALL, **UNAWARE)


def test_optimizers_without_an_offload_load_it_and_back(tmp_path: Path) -> None:
    """torch's AdamW, and a fused Adam, which counts steps in its groups."""
    at = {name: tmp_path / name for name in ("first", "on", "torch", "fused", "back")}
    steps = [("train", 2), ("save_live", at["first"]), ("train", 1), ("save_live", at["on"])]
    train("megatron", steps, dict(DP4), nproc=2, offload=0.5, **SMALL)
    for adam, source in (("torch", "first"), ("fused", "torch")):
        steps = [("load_live", at[source]), ("save_live", at[adam])]
        train("megatron", steps, dict(DP4), nproc=1, seed=1, **SMALL | {"adam": adam})
        assert_same_tensors(tensors(at[adam]), tensors(at["first"]))
    steps = [("load_live", at["fused"]), ("train", 1), ("save_live", at["back"])]
    train("megatron", steps, dict(DP4), nproc=2, offload=0.5, seed=2, **SMALL)
    assert_same_tensors(tensors(at["back"]), tensors(at["on"]))


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        pytest.param("megatron", SMALL, id="AdamW"),
        pytest.param("megatron", {**SMALL, "optimizer": {"decoupled_weight_decay": False}}, id="Adam"),
        pytest.param("megatron16", SMALL, id="AdamW_0.16"),
    ],
)
def test_optimizers_of_torch(environment: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Also before their first step, and into an optimizer that has taken steps."""
    at = {name: tmp_path / name for name in ("fresh", "first", "on", "again", "one_on")}
    steps = [("save_live", at["fresh"]), ("train", 2), ("save_live", at["first"])]
    steps += [("train", 1), ("save_live", at["on"])]
    steps += [("load_live", at["fresh"]), ("train", 2), ("save_live", at["again"])]
    train(environment, steps, dict(DP4), nproc=2, **options)
    steps = [("load_live", at["first"]), ("train", 1), ("save_live", at["one_on"])]
    train(environment, steps, dict(DP4), nproc=1, seed=1, **options)
    assert not [key for key in tensors(at["fresh"]) if "exp_avg" in key]
    assert_same_tensors(tensors(at["again"]), tensors(at["first"]))
    assert_same_tensors(tensors(at["one_on"]), tensors(at["on"]))


def test_dense_and_expert_weights(tmp_path: Path) -> None:
    """A chain of two, before the first step and after. Also to one optimizer on 1 rank, and back."""
    options = {**SMALL, **EXPERTS}
    names = ("fresh", "first", "on", "again", "loaded", "loaded_on", "single", "single_on")
    at = {name: tmp_path / name for name in names}
    steps = [("save_live", at["fresh"]), ("train", 2), ("save_live", at["first"])]
    steps += [("train", 1), ("save_live", at["on"])]
    train("megatron", steps, dict(EP2), nproc=2, offload=0.5, **options)
    steps = [("train", 1), ("load_live", at["fresh"]), ("train", 2), ("save_live", at["again"])]
    steps += [("load_live", at["first"]), ("save_live", at["loaded"])]
    steps += [("train", 1), ("save_live", at["loaded_on"])]
    train("megatron", steps, dict(EP2), nproc=2, offload=1.0, seed=1, **options)
    assert any("experts" in key for key in tensors(at["first"]))
    steps = [("load_live", at["first"]), ("save_live", at["single"])]
    train("megatron", steps, {}, nproc=1, offload=0.0, seed=2, **options)
    steps = [("load_live", at["single"]), ("train", 1), ("save_live", at["single_on"])]
    train("megatron", steps, dict(EP2), nproc=2, offload=0.5, seed=3, **options)
    for name in ("again", "loaded", "single"):
        assert_same_tensors(tensors(at[name]), tensors(at["first"]))
    for name in ("loaded_on", "single_on"):
        assert_same_tensors(tensors(at[name]), tensors(at["on"]))


@pytest.mark.parametrize("kind", ["fully_reshardable", "dp_reshardable"])
def test_sharding_types_of_megatron_with_the_drop_in(kind: str, tmp_path: Path) -> None:
    """`sharded_state_dict`, `save`, `load`, `load_state_dict`: also here, each parameter has its own count.

    The saved state is that of `live_state`, and so is the loaded one. `fully_reshardable` loads on other
    ranks, too.
    """
    at = {name: tmp_path / name for name in ("first", "live", "on", "loaded", "loaded_on")}
    layout = {**DP4, "kind": kind}
    steps = [("train", 2), ("save", at["first"]), ("save_live", at["live"])]
    train("megatron", [*steps, ("train", 2), ("save_live", at["on"])], layout, nproc=2, offload=0.5, **SMALL)
    steps = [("load", at["first"]), ("save_live", at["loaded"]), ("train", 2), ("save_live", at["loaded_on"])]
    train("megatron", steps, {**DP4, "kind": kind}, nproc=2, offload=0.5, seed=1, **SMALL)
    assert_same_tensors(tensors(at["loaded"]), tensors(at["live"]))
    assert_same_tensors(tensors(at["loaded_on"]), tensors(at["on"]))
    for ranks, fraction in ((3, 1.0), (1, 0.0)) if kind == "fully_reshardable" else ():
        steps = [("load", at["first"]), ("save_live", tmp_path / str(ranks))]
        train("megatron", steps, dict(layout), nproc=ranks, offload=fraction, seed=ranks, **SMALL)
        assert_same_tensors(tensors(tmp_path / str(ranks)), tensors(at["live"]))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_drop_in_before_the_first_step(ranks: int, tmp_path: Path) -> None:
    """Moments are saved as zeros. They replace those of a stepped target, and the count of its steps."""
    at = {name: tmp_path / name for name in ("fresh", "live", "on", "loaded", "loaded_on")}
    options = {**SMALL, "batches": 6}
    steps = [("save", at["fresh"]), ("save_live", at["live"]), ("train", 2), ("save_live", at["on"])]
    train("megatron", steps, dict(DP4), nproc=ranks, offload=0.5, **options)
    steps = [("train", 1), ("load", at["fresh"]), ("save_live", at["loaded"])]
    steps += [("train", 2), ("save_live", at["loaded_on"])]
    train("megatron", steps, dict(DP4), nproc=ranks, offload=1.0, seed=1, **options)
    saved, loaded = tensors(at["live"]), tensors(at["loaded"])
    assert_same_tensors({key: loaded[key] for key in saved}, saved)
    assert not any(item.any() for key, item in loaded.items() if key not in saved)
    assert_same_tensors(tensors(at["loaded_on"]), tensors(at["on"]))


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_an_error_names_what_loads_instead(environment: str, tmp_path: Path) -> None:
    """Megatron's own load fails for float32 main weights. What the error advises loads them."""
    at = {name: tmp_path / name for name in ("first", "live", "loaded")}
    options = {**SMALL, **UNAWARE, "offload": 0.5}
    steps = [("train", 1), ("save", at["first"]), ("save_live", at["live"])]
    train(environment, steps, dict(DP4), nproc=1, **options)
    steps = [("refused", at["first"]), ("load_live", at["first"]), ("save_live", at["loaded"])]
    errors = train(environment, steps, dict(DP4), nproc=1, seed=1, **options).facts["errors"]
    assert "`live_state` and `load_live_state`" in errors["refused"]
    assert_same_tensors(tensors(at["loaded"]), tensors(at["live"]))
