"""Each reader of `peers/` reads a checkpoint that its own package wrote, before one of shardproof."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.interop.expectations import assert_reads, expected_objects, expected_tensors
from tests.interop.peer import PeerFailed, assert_same_tensors, run_peer
from tests.unit.formats.peers import Golden

DCP = ["dcp_fsdp2_adamw_w3", "dcp_objects_w2", "dcp_dtypes_w2", "dcp22_zoo_w4", "dcp_stale_w3", "mfsdp_z3_w3"]


@pytest.mark.parametrize("golden", DCP, indirect=True)
def test_dcp_keys(golden: Golden) -> None:
    assert_reads(run_peer("torch", "read_dcp.py", "keys", golden.checkpoint), golden)


@pytest.mark.parametrize("golden", ["dcp_fsdp2_adamw_w3", "dcp_fsdp_tp_w4"], indirect=True)
def test_dcp_keys_into_two_ranks(golden: Golden) -> None:
    assert_reads(run_peer("torch", "read_dcp.py", "keys", golden.checkpoint, nproc=2), golden)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("golden", ["dcp_fsdp2_adamw_w3"], indirect=True)
def test_dcp_resumes_model_and_optimizer(golden: Golden, nproc: int) -> None:
    read = run_peer("torch", "read_dcp.py", "model", golden.checkpoint, nproc=nproc)
    assert_same_tensors(read.tensors, expected_tensors(golden))
    assert len(read.objects) > 20
    assert (
        read.objects.items() <= expected_objects(golden).items()
    )  # the scheduler and the step are not asked for
    assert read.facts["missing_keys"] == read.facts["unexpected_keys"] == []


def test_dcp_written_on_two_ranks_is_read_on_three(tmp_path: Path) -> None:
    written = run_peer("torch", "write_dcp.py", tmp_path / "dcp", nproc=2)
    read = run_peer("torch", "read_dcp.py", "keys", tmp_path / "dcp", nproc=3)
    assert_same_tensors(read.tensors, written.tensors)
    assert read.objects == written.objects
    assert read.facts["chunks"]["model.emb.weight"] == 2


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("golden", ["mc_handmade_w2", "mc08_handmade_w2"], indirect=True)
def test_torch_dist_sharded(golden: Golden, nproc: int) -> None:
    read = run_peer("megatron", "read_torch_dist.py", "sharded", golden.checkpoint, nproc=nproc)
    assert_reads(read, golden)
    assert read.facts["megatron_core"] == "0.19.2"


@pytest.mark.parametrize("golden", ["mc_handmade_w2"], indirect=True)
def test_torch_dist_plain(golden: Golden) -> None:
    assert_reads(run_peer("megatron", "read_torch_dist.py", "plain", golden.checkpoint), golden)


@pytest.mark.parametrize("mode", ["plain", "sharded"])
@pytest.mark.parametrize("golden", ["mc08_handmade_w2"], indirect=True)
def test_torch_dist_of_megatron_core_16(golden: Golden, mode: str) -> None:
    read = run_peer("megatron16", "read_torch_dist.py", mode, golden.checkpoint)
    assert_reads(read, golden)
    assert read.facts["megatron_core"] == "0.16.1"


@pytest.mark.parametrize("golden", ["mc_handmade_w2"], indirect=True)
def test_megatron_core_16_needs_common_pt(golden: Golden) -> None:
    with pytest.raises(PeerFailed, match="common.pt"):
        run_peer("megatron16", "read_torch_dist.py", "plain", golden.checkpoint)


@pytest.mark.parametrize("environment", ["megatron", "megatron16"])
def test_torch_dist_written_on_two_ranks(environment: str, tmp_path: Path) -> None:
    written = run_peer(environment, "write_torch_dist.py", tmp_path / "checkpoint", nproc=2)
    assert (tmp_path / "checkpoint" / "common.pt").exists() == (environment == "megatron16")
    read = run_peer("megatron", "read_torch_dist.py", "sharded", tmp_path / "checkpoint")
    assert_same_tensors(read.tensors, written.tensors)
    assert read.objects == written.objects


@pytest.mark.parametrize("nproc", [1, 3])
@pytest.mark.parametrize(("golden", "stage"), [("mfsdp_z3_w3", 3), ("mfsdp_z1_w2", 1)], indirect=["golden"])
def test_fsdp_dtensor_resumes(golden: Golden, stage: int, nproc: int) -> None:
    read = run_peer("megatron", "read_fsdp_dtensor.py", golden.checkpoint, stage, nproc=nproc)
    assert_same_tensors(read.tensors, expected_tensors(golden))
    assert read.objects | {"iteration": 2} == expected_objects(golden)
    if nproc == 3:  # uneven: rank 0 has no row of a bias
        assert read.facts["rank_0_shapes"]["module.a.bias"] == [0]


SAFETENSORS = ["safetensors_single", "hf_llama_sharded", "hf_llama_tied", "hf_peft_lora"]


@pytest.mark.parametrize("golden", SAFETENSORS, indirect=True)
def test_safetensors(golden: Golden) -> None:
    assert_reads(run_peer("torch", "read_safetensors.py", "safe_open", golden.checkpoint), golden)


@pytest.mark.parametrize("golden", ["hf_llama_sharded", "hf_llama_tied"], indirect=True)
def test_transformers(golden: Golden) -> None:
    read = run_peer("torch", "read_safetensors.py", "transformers", golden.checkpoint)
    assert_reads(read, golden)
    assert read.facts["missing_keys"] == read.facts["unexpected_keys"] == read.facts["mismatched_keys"] == []


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_transformers_reads_what_it_wrote(family: str, tmp_path: Path) -> None:
    written = run_peer("torch", "write_hf.py", tmp_path / "model", family, "20KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    read = run_peer("torch", "read_safetensors.py", "transformers", tmp_path / "model")
    assert_same_tensors(read.tensors, written.tensors)
    assert read.facts["missing_keys"] == read.facts["unexpected_keys"] == read.facts["mismatched_keys"] == []


@pytest.mark.parametrize("golden", ["hf_llama_sharded", "hf_llama_tied"], indirect=True)
def test_accelerate(golden: Golden) -> None:
    read = run_peer("torch", "read_safetensors.py", "accelerate", golden.checkpoint)
    expected = expected_tensors(golden)
    expected.setdefault("lm_head.weight", expected["model.embed_tokens.weight"])  # tied
    assert_same_tensors(read.tensors, expected)


@pytest.mark.parametrize("golden", ["hf_peft_lora"], indirect=True)
def test_peft(golden: Golden, tmp_path: Path) -> None:
    base = Golden("hf_llama_sharded", tmp_path).checkpoint
    assert_reads(run_peer("torch", "read_safetensors.py", "peft", golden.checkpoint, base), golden)


FILES = [("torch_zip", "model.pt"), ("torch_legacy", "model.pt"), ("lightning_ckpt", "last.ckpt")]


@pytest.mark.parametrize(("golden", "name"), FILES, indirect=["golden"])
def test_torch_save(golden: Golden, name: str) -> None:
    assert_reads(run_peer("torch", "read_torch_save.py", golden.checkpoint / name), golden)


@pytest.mark.parametrize("golden", ["evil_bin"], indirect=True)
def test_torch_save_runs_no_code(golden: Golden) -> None:
    with pytest.raises(PeerFailed, match="Weights only load failed"):
        run_peer("torch", "read_torch_save.py", golden.checkpoint / "pytorch_model.bin")


@pytest.mark.parametrize("script", ["read_zarr.py", "read_tensorstore.py"])
@pytest.mark.parametrize("golden", ["zarr3_group", "zarr2_group"], indirect=True)
def test_zarr(golden: Golden, script: str) -> None:
    read = run_peer("zarr", script, golden.checkpoint)
    assert_reads(read, golden)
    if script == "read_zarr.py":
        assert read.facts["group_attributes"] == {"config": {"layers": 2}, "step": 12}


@pytest.mark.parametrize("golden", ["zarr3_tensorstore"], indirect=True)
def test_zarr_python_refuses_bfloat16(golden: Golden) -> None:
    assert_reads(run_peer("zarr", "read_tensorstore.py", golden.checkpoint), golden)
    read = run_peer("zarr", "read_zarr.py", golden.checkpoint)
    expected = expected_tensors(golden)
    del expected["bf"]
    assert_same_tensors(read.tensors, expected)
    assert read.facts["refused"].keys() == {".", "bf"}


@pytest.mark.parametrize("golden", ["zarr_mc11_handmade_w2"], indirect=True)
def test_zarr_of_megatron_core(golden: Golden) -> None:
    expected = expected_tensors(golden)
    # Megatron-Core loads through float32, which changes the bits of a NaN from 0xffc0 in the file to 0xffff.
    assert expected["row"].view(torch.int16)[0, 3] == -1
    expected["row"].view(torch.int16)[0, 3] = 0xFFC0 - 0x10000
    assert_same_tensors(run_peer("zarr", "read_tensorstore.py", golden.checkpoint).tensors, expected)
    del expected["row"]  # bfloat16
    read = run_peer("zarr", "read_zarr.py", golden.checkpoint)
    assert_same_tensors(read.tensors, expected)
    assert read.facts["refused"].keys() == {"row"}
