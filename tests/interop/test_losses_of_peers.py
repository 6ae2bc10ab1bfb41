"""Values that writers of other projects lose or refuse are complete in the files of shardproof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from tests.harness import rank, run_ranks
from tests.interop.expectations import converted, expected_tensors
from tests.interop.peer import assert_same_tensors, run_peer
from tests.unit.formats.peers import Golden

FILES = ["hf", "safetensors"]


def awkward() -> dict[str, torch.Tensor]:
    """Tensors without dimensions, integers, booleans, and odd numbers of bfloat16."""
    return {
        "scale": torch.tensor(0.375),
        "count": torch.tensor(7),
        "flag": torch.tensor(True),
        "ids": torch.arange(-3, 4),
        "bytes": torch.arange(250, dtype=torch.uint8),
        "mask": torch.tensor([True, False, True]),
        "odd": torch.arange(1, 8).to(torch.bfloat16),
        "one": torch.tensor([3.0], dtype=torch.bfloat16),
        "odd_rows": torch.arange(15, dtype=torch.bfloat16).reshape(5, 3),
        "weight": torch.randn(7, 6, generator=torch.Generator().manual_seed(0)),
    }


@pytest.mark.parametrize("to", FILES)
@pytest.mark.parametrize("max_file_bytes", [None, 40])
def test_scalars_integers_booleans_and_odd_sizes(to: str, max_file_bytes: int | None, tmp_path: Path) -> None:
    """DCP's Hugging Face writer stores 0.0 for scalars, and fails on integers and booleans."""
    sp.save(tmp_path / "saved", awkward())
    sp.convert(tmp_path / "saved", tmp_path / "files", to=to, max_file_bytes=max_file_bytes)
    read = run_peer("torch", "read_safetensors.py", "safe_open", tmp_path / "files")
    assert_same_tensors(read.tensors, awkward())


@pytest.mark.parametrize("to", FILES)
def test_full_state_on_all_ranks(to: str, tmp_path: Path) -> None:
    """Each rank saves all tensors, and both convert. DCP's ranks overwrite each other's files."""
    for outcome in run_ranks(2, save_and_convert, tmp_path, to):
        assert outcome.value is None
    read = run_peer("torch", "read_safetensors.py", "safe_open", tmp_path / "files")
    assert_same_tensors(read.tensors, awkward())
    assert len(read.facts["files"]) > 1


def save_and_convert(folder: Path, to: str) -> None:
    sp.save(folder / "saved", awkward())
    sp.convert(folder / "saved", folder / "files", to=to, max_file_bytes=100)


@pytest.mark.parametrize("to", FILES)
def test_several_chunks_of_a_key_on_a_rank(to: str, tmp_path: Path) -> None:
    """DCP's Hugging Face writer keeps the last chunk only."""
    whole = awkward()
    for outcome in run_ranks(2, save_in_chunks, tmp_path / "saved"):
        assert outcome.value is None
    sp.convert(tmp_path / "saved", tmp_path / "files", to=to)
    read = run_peer("torch", "read_safetensors.py", "safe_open", tmp_path / "files")
    assert_same_tensors(read.tensors, {"weight": whole["weight"], "odd": whole["odd"]})


def save_in_chunks(path: Path) -> None:
    """Saves rows 0, 2, 4, ... of a tensor on rank 0 and the others on rank 1."""
    whole = awkward()

    def alternate(tensor: torch.Tensor) -> Any:
        rows = [(at,) + (0,) * (tensor.dim() - 1) for at in range(rank(), len(tensor), 2)]
        return sp.LocalShards(tensor.shape, [(tensor[at[0] : at[0] + 1], at) for at in rows])

    sp.save(path, {"weight": alternate(whole["weight"]), "odd": alternate(whole["odd"])})


@pytest.mark.parametrize("to", FILES)
@pytest.mark.parametrize("golden", ["mc_handmade_w2"], indirect=True)
def test_several_chunks_of_a_key_in_a_megatron_checkpoint(golden: Golden, to: str, tmp_path: Path) -> None:
    path = converted(golden.checkpoint, to, tmp_path)
    read = run_peer("torch", "read_safetensors.py", "safe_open", path)
    assert_same_tensors(read.tensors, expected_tensors(golden))


@pytest.mark.parametrize(
    ("golden", "prefix"), [("ds_zero2_bf16_w2", "module"), ("ds_zero3_w3", "fp32")], indirect=["golden"]
)
def test_frozen_parameters_of_deepspeed(golden: Golden, prefix: str, tmp_path: Path) -> None:
    """zero_to_fp32 leaves frozen parameters out at stage 1, and ds_to_universal at stage 3."""
    path = converted(golden.checkpoint, "hf", tmp_path)
    read = run_peer("torch", "read_safetensors.py", "safe_open", path)
    frozen = {key: value for key, value in read.tensors.items() if ".frozen." in key}
    expected = {
        f"{prefix}.frozen.{name}": golden.tensor(f"fp32:frozen.{name}") for name in ("weight", "bias")
    }
    assert_same_tensors(frozen, expected)
    trained = {
        key for key in golden.kinds if key.startswith("fp32:") and "frozen" not in key and "count" not in key
    }
    for key in trained:
        name = key.removeprefix("fp32:")
        assert_same_tensors({name: read.tensors[f"fp32.{name}"]}, {name: golden.tensor(key)})
