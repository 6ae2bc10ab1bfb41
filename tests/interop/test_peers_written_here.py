"""Checkpoints that released packages write here read bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp
from tests.interop.peer import assert_same_tensors, run_peer


def read_all(path: Path, format: str | None = None) -> dict[str, torch.Tensor]:  # noqa: A002 as in sp.open
    with sp.open(path, format=format) as checkpoint:
        return {key: checkpoint[key].read() for key in checkpoint.catalogue().tensors}


def test_the_halves_of_megatron_core_are_one_tensor(tmp_path: Path) -> None:
    """Megatron-Core stores SwiGLU weights as `_w` and `_v`; `dcp_raw` reads them so."""
    written = run_peer("megatron", "write_fsdp_dtensor.py", tmp_path / "checkpoint", nproc=2)
    assert_same_tensors(read_all(tmp_path / "checkpoint"), written.tensors)
    raw = read_all(tmp_path / "checkpoint", "dcp_raw")
    key = "model.module.decoder.layers.1.mlp.linear_fc1.weight"
    assert torch.equal(torch.cat([raw[f"{key}_w"], raw[f"{key}_v"]]), written.tensors[key])
    assert key not in raw and len(raw) > len(written.tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deepspeed_at_stage_1(dtype: str, tmp_path: Path) -> None:
    """Weights, fp32 masters and moments, as DeepSpeed's own functions gather them from its ranks."""
    written = run_peer("deepspeed", "write_deepspeed.py", tmp_path / "run", 1, dtype, nproc=2, timeout=200)
    read = read_all(tmp_path / "run")
    assert_same_tensors({key: read[key] for key in written.tensors}, written.tensors)
    steps = {key: value for key, value in read.items() if key not in written.tensors}
    assert all(key.endswith(".step") and float(value) == 2 for key, value in steps.items()), steps.keys()


def test_experts_of_megatron_core(tmp_path: Path) -> None:
    """Two ranks hold two experts each; Megatron-Core's own reader gives the expected bits."""
    run_peer("megatron", "write_megatron_moe.py", tmp_path / "checkpoint", nproc=2)
    expected = run_peer("megatron", "read_torch_dist.py", "plain", tmp_path / "checkpoint")
    read = read_all(tmp_path / "checkpoint")
    experts = [key for key in read if ".experts." in key]
    assert experts and all(4 in read[key].shape[:2] for key in experts)
    assert_same_tensors(read, expected.tensors)
