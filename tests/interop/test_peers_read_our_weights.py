"""Weights that shardproof writes are read by the libraries that users open them with, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import shardproof as sp
from tests.interop.expectations import assert_reads, converted, expected_tensors
from tests.interop.peer import PeerResult, assert_same_tensors, run_peer
from tests.unit.formats.peers import Golden

LLAMAS = ["hf_llama_sharded", "hf_llama_tied"]


def model_folder(golden: Golden, folder: Path, max_file_bytes: int | None) -> Path:
    """A model as Hugging Face stores it: our weights, and the model's own config."""
    path = converted(golden.checkpoint, "hf", folder, max_file_bytes=max_file_bytes)
    for name in ("config.json", "generation_config.json", "adapter_config.json"):
        if (golden.checkpoint / name).exists():
            shutil.copy(golden.checkpoint / name, path)
    assert (path / "model.safetensors.index.json").exists() == (max_file_bytes is not None)
    return path


@pytest.mark.parametrize("max_file_bytes", [None, 20_000])
@pytest.mark.parametrize("golden", LLAMAS, indirect=True)
def test_transformers(golden: Golden, max_file_bytes: int | None, tmp_path: Path) -> None:
    path = model_folder(golden, tmp_path, max_file_bytes)
    read = run_peer("torch", "read_safetensors.py", "transformers", path)
    assert_reads(read, golden)
    assert read.facts["missing_keys"] == read.facts["unexpected_keys"] == read.facts["mismatched_keys"] == []


def test_transformers_reads_the_experts_of_a_mixtral(tmp_path: Path) -> None:
    written = run_peer("torch", "write_hf.py", tmp_path / "model", "mixtral")
    path = converted(tmp_path / "model", "hf", tmp_path, max_file_bytes=20_000)
    shutil.copy(tmp_path / "model" / "config.json", path)
    read = run_peer("torch", "read_safetensors.py", "transformers", path)
    assert_same_tensors(read.tensors, written.tensors)
    assert read.facts["missing_keys"] == read.facts["unexpected_keys"] == read.facts["mismatched_keys"] == []


@pytest.mark.parametrize("golden", ["hf_llama_tied"], indirect=True)
def test_accelerate(golden: Golden, tmp_path: Path) -> None:
    read = run_peer("torch", "read_safetensors.py", "accelerate", model_folder(golden, tmp_path, 20_000))
    expected = expected_tensors(golden)
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert_same_tensors(read.tensors, expected)


@pytest.mark.parametrize("golden", ["hf_peft_lora"], indirect=True)
def test_peft(golden: Golden, tmp_path: Path) -> None:
    """peft looks for adapter_model.safetensors, which is the destination's name."""
    base = Golden("hf_llama_sharded", tmp_path).checkpoint
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    sp.convert(golden.checkpoint, tmp_path / "shardproof", to="shardproof")
    sp.convert(tmp_path / "shardproof", adapter / "adapter_model.safetensors", to="hf")
    shutil.copy(golden.checkpoint / "adapter_config.json", adapter)
    assert_reads(run_peer("torch", "read_safetensors.py", "peft", adapter, base), golden)


@pytest.mark.parametrize("to", ["safetensors", "hf"])
@pytest.mark.parametrize("max_file_bytes", [None, 500])
@pytest.mark.parametrize("golden", ["safetensors_single"], indirect=True)
def test_safe_open(golden: Golden, to: str, max_file_bytes: int | None, tmp_path: Path) -> None:
    """All dtypes, tensors without dimensions or without elements, odd keys, and texts beside them."""
    path = converted(golden.checkpoint, to, tmp_path, max_file_bytes=max_file_bytes)
    read = run_peer("torch", "read_safetensors.py", "safe_open", path)
    assert_reads(read, golden)
    assert (len(read.facts["files"]) > 1) == (max_file_bytes is not None)
    original = run_peer("torch", "read_safetensors.py", "safe_open", golden.checkpoint)
    assert texts(original) <= texts(read)


def texts(read: PeerResult) -> set[tuple[str, str]]:
    """The texts that the files have in ``__metadata__``."""
    return {pair for file in read.facts["metadata"].values() for pair in (file or {}).items()}


@pytest.mark.parametrize("golden", ["dcp_fsdp2_adamw_w3"], indirect=True)
def test_safe_open_of_training_state(golden: Golden, tmp_path: Path) -> None:
    path = converted(golden.checkpoint, "safetensors", tmp_path)
    assert_same_tensors(
        run_peer("torch", "read_safetensors.py", "safe_open", path).tensors, expected_tensors(golden)
    )


FOLDERS = [("dcp_fsdp2_adamw_w3", ""), ("dcp_dtypes_w2", ""), ("torch_zip", "model.pt")]


@pytest.mark.parametrize(("golden", "name"), FOLDERS, indirect=["golden"])
def test_torch_load(golden: Golden, name: str, tmp_path: Path) -> None:
    """torch.load(weights_only=True) reads tensors and values."""
    path = converted(golden.checkpoint / name, "torch", tmp_path)
    assert_reads(run_peer("torch", "read_torch_save.py", path / "checkpoint.pt"), golden)


@pytest.mark.parametrize("script", ["read_zarr.py", "read_tensorstore.py"])
@pytest.mark.parametrize("golden", ["zarr3_group", "zarr3_tensorstore", "dcp_dtypes_w2"], indirect=True)
def test_zarr(golden: Golden, script: str, tmp_path: Path) -> None:
    path = converted(golden.checkpoint, "zarr", tmp_path, max_file_bytes=100)
    read = run_peer("zarr", script, path)
    assert not read.facts.get("refused")
    assert_same_tensors(named_by_attributes(read.tensors, path), expected_tensors(golden))


def named_by_attributes(tensors: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Arrays under the keys and in the dtypes that the attributes of the arrays give."""
    found = {}
    for name, tensor in tensors.items():
        attributes = json.loads((path / name / "zarr.json").read_text())["attributes"]
        dtype = getattr(torch, attributes.get("shardproof:dtype", str(tensor.dtype).removeprefix("torch.")))
        found[attributes.get("shardproof:key", name)] = tensor.view(dtype)
    return found


CASTS = [
    ("dcp_dtypes_w2", "dcp", "torch", ("read_dcp.py", "keys")),
    ("dcp_fsdp2_adamw_w3", "hf", "torch", ("read_safetensors.py", "safe_open")),
    ("mc_gpt_fully_reshardable_w2", "torch_dist", "megatron", ("read_torch_dist.py", "sharded")),
]


@pytest.mark.parametrize(("golden", "to", "environment", "script"), CASTS, indirect=["golden"])
def test_a_cast_is_that_of_torch(
    golden: Golden, to: str, environment: str, script: tuple[str, str], tmp_path: Path
) -> None:
    """``--dtype bfloat16`` casts tensors of 16, 32 and 64 bits, and leaves integers and other floats."""
    path = converted(golden.checkpoint, to, tmp_path, dtype="bfloat16")
    cast = {torch.float16, torch.float32, torch.float64}
    expected = {
        key: tensor.to(torch.bfloat16) if tensor.dtype in cast else tensor
        for key, tensor in expected_tensors(golden).items()
    }
    assert_same_tensors(run_peer(environment, *script, path).tensors, expected)
