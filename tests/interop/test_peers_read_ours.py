"""Training state that shardproof writes is read by the released loader of each format, optimizer included."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardproof as sp
from tests.harness import process_group, run_ranks
from tests.interop.expectations import assert_reads, converted, expected_objects, expected_tensors
from tests.interop.peer import FOLDER, assert_same_tensors, run_peer
from tests.unit.formats.peers import Golden

SMALL = 300
"""Bytes of tensors in a file, so that many tensors are in several chunks."""


@pytest.mark.parametrize("max_file_bytes", [None, SMALL])
@pytest.mark.parametrize(
    "golden",
    ["dcp_fsdp2_adamw_w3", "dcp_dtypes_w2", "mfsdp_z3_w3", "dcp_fsdp_tp_w4", "dcp22_zoo_w4"],
    indirect=True,
)
def test_dcp_keys(golden: Golden, max_file_bytes: int | None, tmp_path: Path) -> None:
    path = converted(golden.checkpoint, "dcp", tmp_path, max_file_bytes=max_file_bytes)
    read = run_peer("torch", "read_dcp.py", "keys", path)
    assert_reads(read, golden)
    assert (max(read.facts["chunks"].values()) > 1) == (max_file_bytes is not None)


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("golden", ["dcp_fsdp2_adamw_w3"], indirect=True)
def test_dcp_keys_into_more_ranks(golden: Golden, nproc: int, tmp_path: Path) -> None:
    path = converted(golden.checkpoint, "dcp", tmp_path, max_file_bytes=SMALL)
    assert_reads(run_peer("torch", "read_dcp.py", "keys", path, nproc=nproc), golden)


@pytest.mark.parametrize("golden", ["dcp_objects_w2"], indirect=True)
def test_dcp_objects(golden: Golden, tmp_path: Path) -> None:
    """The one value that is no plain data, an array of texts, is left out. A BytesIO comes back as one."""
    path = converted(golden.checkpoint, "dcp", tmp_path, exclude="objs.np_str")
    read = run_peer("torch", "read_dcp.py", "keys", path)
    assert_same_tensors(read.tensors, expected_tensors(golden))
    expected = {key: value for key, value in golden.objects.items() if key != "objs.np_str"}
    expected["objs.bytesio"] |= {"$": "BytesIO"}
    assert read.objects == expected


@pytest.mark.parametrize("golden", ["mc_gpt_fully_reshardable_w2", "mc_handmade_w2"], indirect=True)
def test_dcp_from_megatron(golden: Golden, tmp_path: Path) -> None:
    path = converted(golden.checkpoint, "dcp", tmp_path)
    read = run_peer("torch", "read_dcp.py", "keys", path)
    assert_same_tensors(read.tensors, expected_tensors(golden))
    assert read.objects.keys() == expected_objects(golden).keys()


@pytest.mark.parametrize("nproc", [1, 2, 3])
@pytest.mark.parametrize("golden", ["dcp_fsdp2_adamw_w3"], indirect=True)
def test_dcp_resumes_model_and_optimizer(golden: Golden, nproc: int, tmp_path: Path) -> None:
    path = converted(golden.checkpoint, "dcp", tmp_path, max_file_bytes=SMALL)
    assert_resumes(path, nproc, expected_tensors(golden), expected_objects(golden))


@pytest.mark.parametrize("nproc", [1, 3])
def test_dcp_from_a_save_of_two_ranks(nproc: int, tmp_path: Path) -> None:
    """FSDP2 with AdamW, saved by shardproof on two ranks, goes on in torch on other numbers of ranks."""
    outcomes = run_ranks(2, saved_training, tmp_path / "saved", timeout=120)
    sp.convert(tmp_path / "saved", tmp_path / "dcp", to="dcp", max_file_bytes=SMALL)
    tensors = {key: torch.as_tensor(array) for key, array in outcomes[0].value.items()}
    assert len(tensors) == 39
    assert_resumes(tmp_path / "dcp", nproc, tensors)


def assert_resumes(
    path: Path, nproc: int, tensors: dict[str, torch.Tensor], objects: dict[str, Any] | None = None
) -> None:
    read = run_peer("torch", "read_dcp.py", "model", path, nproc=nproc)
    assert_same_tensors(read.tensors, tensors)
    assert len(read.objects) > 20
    if objects is not None:  # the scheduler and the step are not asked for
        assert read.objects.items() <= objects.items()
    assert read.facts["missing_keys"] == read.facts["unexpected_keys"] == []


def saved_training(path: Path) -> dict[str, Any]:
    """Saves a trained model and its optimizer as `get_state_dict` names them. Gives the tensors, whole."""
    sys.path.insert(0, str(FOLDER / "peers"))
    from peer_result import flattened  # type: ignore[import-not-found]
    from tiny_model import fresh, gathered_state, train  # type: ignore[import-not-found]

    with process_group():
        model, optimizer = fresh(seed=0)
        train(model, optimizer, steps=2)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        sp.save(path, {"model": model_state, "optim": optimizer_state})
        leaves = flattened(gathered_state(model, optimizer))
        return {key: leaf.numpy() for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}


TORCH_DIST = ["mc_handmade_w2", "mc_gpt_fully_reshardable_w2"]
READS = [("megatron", "plain", 1), ("megatron", "sharded", 1), ("megatron", "sharded", 2)]
READS += [("megatron16", "plain", 1), ("megatron16", "sharded", 2)]


@pytest.mark.parametrize(("environment", "mode", "nproc"), READS)
@pytest.mark.parametrize("golden", TORCH_DIST, indirect=True)
def test_torch_dist(golden: Golden, environment: str, mode: str, nproc: int, tmp_path: Path) -> None:
    path = converted(golden.checkpoint, "torch_dist", tmp_path, max_file_bytes=SMALL)
    read = run_peer(environment, "read_torch_dist.py", mode, path, nproc=nproc)
    assert_reads(read, golden)


@pytest.mark.parametrize("environment", ["megatron", "megatron16"])
@pytest.mark.parametrize("golden", ["mc08_handmade_w2"], indirect=True)
def test_torch_dist_of_an_old_megatron(golden: Golden, environment: str, tmp_path: Path) -> None:
    path = converted(golden.checkpoint, "torch_dist", tmp_path)
    read = run_peer(environment, "read_torch_dist.py", "sharded", path)
    assert_reads(read, golden)


@pytest.mark.parametrize("environment", ["megatron", "megatron16"])
@pytest.mark.parametrize("golden", ["mc11_gpt_fsms_w2"], indirect=True)
def test_torch_dist_of_flat_ranges(golden: Golden, environment: str, tmp_path: Path) -> None:
    """Flat ranges, which the newer Megatron-Core writes no more, become parameters in their true shapes."""
    path = converted(golden.checkpoint, "torch_dist", tmp_path)
    read = run_peer(environment, "read_torch_dist.py", "sharded", path, nproc=2)
    assert_reads(read, golden)


@pytest.mark.parametrize("golden", ["dcp_fsdp2_adamw_w3"], indirect=True)
def test_torch_dist_from_dcp(golden: Golden, tmp_path: Path) -> None:
    path = converted(golden.checkpoint, "torch_dist", tmp_path)
    read = run_peer("megatron", "read_torch_dist.py", "sharded", path, nproc=2)
    assert_same_tensors(read.tensors, expected_tensors(golden))


@pytest.mark.parametrize(
    ("golden", "stage", "nproc"),
    [("mfsdp_z3_w3", 3, 3), ("mfsdp_z3_w3", 2, 2), ("mfsdp_z3_w3", 1, 1), ("mfsdp_z1_w2", 3, 2)],
    indirect=["golden"],
)
def test_fsdp_dtensor_resumes(golden: Golden, stage: int, nproc: int, tmp_path: Path) -> None:
    path = converted(golden.checkpoint, "fsdp_dtensor", tmp_path, max_file_bytes=SMALL)
    read = run_peer("megatron", "read_fsdp_dtensor.py", path, stage, nproc=nproc)
    assert_same_tensors(read.tensors, expected_tensors(golden))
    assert read.objects | {"iteration": 2} == expected_objects(golden)
