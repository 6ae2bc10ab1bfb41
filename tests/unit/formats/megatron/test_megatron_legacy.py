"""Megatron's format ``torch``: goldens rank by rank and merged, missing ranks, and rules that do not fit."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import CorruptChunkError, FormatError, NotCommittedError
from shardproof.runs.maintenance import verify_foreign
from tests.unit.formats.peers import Golden, bits, check_tensors, tagged

GOLDENS = ["legacy_dp2_w2", "legacy_plain_bf16_tp2_w2"]


def opened(path: Path, **options: Any) -> ForeignCheckpoint:
    checkpoint = sp.open(path, **options)
    assert isinstance(checkpoint, ForeignCheckpoint)
    return checkpoint


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_ranks_read_to_their_expected_bits(name: str, tmp_path: Path) -> None:
    golden = Golden(name, tmp_path)
    with opened(golden.checkpoint) as checkpoint:
        assert checkpoint.reader.name == "megatron_legacy"
        assert checkpoint.step == 2
        check_tensors(golden, checkpoint)
        assert set(golden.kinds) == {*checkpoint.reader.tensors, *checkpoint.aliases}
        read = checkpoint.reader.object
        keys = {key for key in golden.objects if "np_rng_state" not in key}  # a tuple is one object
        assert {key: tagged(read(key)) for key in keys} == {key: golden.objects[key] for key in keys}
        state = checkpoint["mp_rank_00/model_optim_rng/rng_state.0.np_rng_state"]
        assert np.array_equal(state[1], np.arange(4, dtype=np.uint32))
        assert checkpoint["mp_rank_00/model_optim_rng/args.params_dtype"] == torch.float32
        report = verify_foreign(checkpoint)
        assert report.ok
        assert report.unproved == 0 < report.bytes
    with opened(golden.checkpoint / "iter_0000002") as checkpoint:
        check_tensors(golden, checkpoint)


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_models_merge_to_their_expected_bits(name: str, tmp_path: Path) -> None:
    golden = Golden(name, tmp_path)
    merged = golden.merged()
    with opened(golden.checkpoint, format="megatron_legacy_merged") as checkpoint:
        check_tensors(merged, checkpoint)
        rest = {key for key in golden.kinds if "/model." not in key}
        assert {*merged.kinds, *rest} == {*checkpoint.reader.tensors, *checkpoint.aliases}
        assert verify_foreign(checkpoint).ok


def test_a_merged_model_fills_a_target(tmp_path: Path) -> None:
    golden = Golden("legacy_plain_bf16_tp2_w2", tmp_path)
    key = "decoder.layers.self_attention.linear_qkv.weight"
    target = {key: torch.zeros(2, 64, 32, dtype=torch.bfloat16)}
    sp.load(golden.checkpoint, target, include=key, format="megatron_legacy_merged")
    assert bits(target[key]) == bits(golden.merged().tensor(key))


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    golden = Golden("legacy_dp2_w2", tmp_path)
    path = golden.checkpoint / "iter_0000002" / "mp_rank_00" / "distrib_optim.pt"
    key = "mp_rank_00/distrib_optim/0.(torch.float32, torch.float32).param"
    whole = bytearray(path.read_bytes())
    whole[whole.index(bytes(golden.tensor(key).numpy()))] ^= 1
    path.write_bytes(whole)
    with opened(golden.checkpoint) as checkpoint, pytest.raises(CorruptChunkError, match="distrib_optim"):
        checkpoint[key].read()


def save(folder: Path, rank: str, model: dict[str, Any], **more: Any) -> None:
    (folder / rank).mkdir(parents=True, exist_ok=True)
    state = {"model": model, "iteration": 3, "checkpoint_version": 3.0, **more}
    torch.save(state, folder / rank / "model_optim_rng.pt")


def pipeline(folder: Path, *, width: int = 2, depth: int = 2, gated: bool = True) -> dict[str, torch.Tensor]:
    """Saves a small model, and returns what it merges to."""
    torch.manual_seed(0)
    inner = 4 * (2 if gated else 1)
    whole = {
        "embedding.word_embeddings.weight": torch.randn(6, 4),
        "decoder.layers.mlp.linear_fc1.weight": torch.randn(2 * depth, inner, 4),
        "decoder.layers.mlp.linear_fc1.bias": torch.randn(2 * depth, inner),
        "decoder.layers.mlp.linear_fc2.weight": torch.randn(2 * depth, 4, 4),
        "decoder.layers.mlp.linear_fc2.bias": torch.randn(2 * depth, 4),
        "decoder.final_layernorm.weight": torch.randn(4),
    }
    axes = [0, 1, 1, 2, None, None]  # that tensor parallelism splits, counting the axis of layers
    for rank in range(width):
        parts = {}
        for (key, value), axis in zip(whole.items(), axes, strict=True):
            halves = list(value.chunk(2, 1)) if gated and "linear_fc1" in key else [value]
            cut = halves if axis is None else [half.chunk(width, axis)[rank] for half in halves]
            parts[key] = torch.cat(cut, axis or 0)
        for stage in range(depth):
            model = {
                f"decoder.layers.{at}.{key[15:]}": parts[key][2 * stage + at].clone()
                for key in parts
                if key.startswith("decoder.layers.")
                for at in range(2)
            }
            ends = {0: "embedding.word_embeddings.weight", depth - 1: "decoder.final_layernorm.weight"}
            model |= {key: parts[key] for at, key in ends.items() if at == stage}
            args = argparse.Namespace(
                tensor_model_parallel_size=width, pipeline_model_parallel_size=depth, world_size=8
            )
            save(folder, f"mp_rank_{rank:02d}_{stage:03d}", model, args=args)
    return whole


@pytest.mark.parametrize("gated", [True, False])
def test_tensor_and_pipeline_parallel_ranks_merge(tmp_path: Path, gated: bool) -> None:
    whole = pipeline(tmp_path, gated=gated)
    with opened(tmp_path, format="megatron_legacy_merged") as checkpoint:
        assert {key: bits(checkpoint[key].read()) for key in checkpoint.reader.tensors} == {
            key: bits(value) for key, value in whole.items()
        }
        assert (checkpoint.step, checkpoint.world_size) == (3, 8)


@pytest.mark.parametrize("rank", ["mp_rank_00_000", "mp_rank_01_001"])
def test_missing_ranks_are_found(tmp_path: Path, rank: str) -> None:
    pipeline(tmp_path)
    (tmp_path / rank / "model_optim_rng.pt").unlink()
    with pytest.raises(FormatError, match=f"{rank}/model_optim_rng.pt: it is missing"):
        opened(tmp_path)
    (tmp_path / rank).rmdir()
    with pytest.raises(FormatError, match="ranks"):
        opened(tmp_path)


def test_a_missing_rank_is_found_without_arguments(tmp_path: Path) -> None:
    for rank in ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_01_001"):
        save(tmp_path, rank, {})
    with pytest.raises(FormatError, match="not those of one set of ranks"):
        opened(tmp_path)


def test_a_whole_stage_that_is_missing_is_found_by_the_arguments(tmp_path: Path) -> None:
    pipeline(tmp_path)
    for rank in ("mp_rank_00_001", "mp_rank_01_001"):
        (tmp_path / rank / "model_optim_rng.pt").unlink()
        (tmp_path / rank).rmdir()
    with pytest.raises(FormatError, match="2 folders of ranks, expected 4"):
        opened(tmp_path)


MODELS: list[tuple[Callable[[], dict[str, torch.Tensor]], str]] = [
    (lambda: {"decoder.layers.0.mlp.router.weight": torch.zeros(2)}, "no rule"),
    (lambda: {"mlp.linear_fc2.bias": torch.zeros(2)}, "no rule"),
    (lambda: {"decoder.layers.1.mlp.linear_fc2.bias": torch.zeros(2)}, "expected 0 to 0"),
    (lambda: {"decoder.layers.0.mlp.linear_fc1.weight": torch.zeros(2, 2)}, "no mlp.linear_fc2.weight"),
    (
        lambda: {
            "decoder.layers.0.mlp.linear_fc1.weight": torch.zeros(5, 2),
            "decoder.layers.0.mlp.linear_fc2.weight": torch.zeros(2, 2),
        },
        "5 rows, expected 2 or 4",
    ),
    (lambda: {"output_layer.weight": torch.zeros(())}, "cannot be split"),
]


@pytest.mark.parametrize(("model", "text"), MODELS)
def test_models_without_a_rule_are_refused_and_read_by_rank(
    tmp_path: Path, model: Callable[[], dict[str, torch.Tensor]], text: str
) -> None:
    save(tmp_path, "mp_rank_00", model())
    with pytest.raises(FormatError, match=f'{text}.*format="megatron_legacy"'):
        opened(tmp_path, format="megatron_legacy_merged")
    with opened(tmp_path) as checkpoint:
        assert len(checkpoint.reader.tensors) == len(model())


def test_old_versions_and_unequal_ranks_are_not_merged(tmp_path: Path) -> None:
    save(tmp_path, "mp_rank_00", {"output_layer.weight": torch.zeros(2, 2)}, checkpoint_version=1.0)
    with pytest.raises(FormatError, match="below 3"):
        opened(tmp_path, format="megatron_legacy_merged")
    for rank in range(2):
        save(tmp_path, f"mp_rank_0{rank}", {"output_layer.weight": torch.zeros(2 + rank, 2)})
    with pytest.raises(FormatError, match="different dtypes or shapes"):
        opened(tmp_path, format="megatron_legacy_merged")


@pytest.mark.parametrize(
    ("text", "error"), [("../../etc", FormatError), ("", FormatError), ("9", NotCommittedError)]
)
def test_a_run_folder_without_its_iteration_is_an_error(tmp_path: Path, text: str, error: type) -> None:
    save(tmp_path / "iter_0000003", "mp_rank_00", {})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    assert opened(tmp_path).step == 3
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(error):
        opened(tmp_path, format="megatron_legacy")
