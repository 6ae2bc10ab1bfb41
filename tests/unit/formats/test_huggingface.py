"""Hugging Face's files of torch.save: golden weights and training folders, several items, missing files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import CorruptChunkError, FormatError, NotCommittedError, PlainDataError, StorageError
from shardproof.runs.maintenance import verify_foreign
from tests.unit.formats.peers import Golden, bits, check_golden


def opened(path: Path, **options: Any) -> ForeignCheckpoint:
    checkpoint = sp.open(path, **options)
    assert isinstance(checkpoint, ForeignCheckpoint)
    return checkpoint


def test_the_golden_folder_reads_to_its_expected_bits(tmp_path: Path) -> None:
    golden = Golden("accelerate_state", tmp_path)
    saved = torch.load(golden.checkpoint / "optimizer.bin")  # noqa: TID251 what torch reads
    expected = json.loads((golden.checkpoint.parent / "expected.json").read_text())
    with opened(golden.checkpoint) as checkpoint:
        assert checkpoint.reader.name == "accelerate"
        assert {key: bits(checkpoint[key].read()) for key in golden.kinds} == {
            key: bits(golden.tensor(key)) for key in golden.kinds
        }
        optimizer = {key for key in checkpoint.keys() if key.startswith("optimizer.")}  # noqa: SIM118
        assert optimizer == {f"optimizer.{key}" for key in expected["facts"]["optimizer_keys"]}
        for at, state in saved["state"].items():
            for name, value in state.items():
                assert bits(checkpoint[f"optimizer.state.{at}.{name}"].read()) == bits(value)
        assert checkpoint["scheduler.last_epoch"] == 4
        kind, numbers, *rest = checkpoint["random_states_0.numpy_random_seed"]
        assert (kind, numbers.dtype, numbers.shape, rest) == ("MT19937", np.uint32, (624,), [624, 0, 0.0])
        report = verify_foreign(checkpoint)
        assert report.ok
        assert report.bytes > 0 < report.unproved
        assert any("missing optimizer" in note for note in report.notes)


def test_a_flipped_bit_of_an_optimizer_is_found(tmp_path: Path) -> None:
    golden = Golden("accelerate_state", tmp_path)
    path = golden.checkpoint / "optimizer.bin"
    whole = bytearray(path.read_bytes())
    value = torch.load(path)["state"][0]["exp_avg"]  # noqa: TID251
    whole[whole.index(bytes(value.numpy()))] ^= 1
    path.write_bytes(whole)
    with opened(golden.checkpoint) as checkpoint:
        with pytest.raises(CorruptChunkError, match=r"optimizer\.bin"):
            checkpoint["optimizer.state.0.exp_avg"].read()
        assert [type(fault) for fault in verify_foreign(checkpoint).faults] == [CorruptChunkError]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models, an optimizer, and the random states of two ranks."""
    save_file({"w": torch.arange(3)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.arange(4)}, tmp_path / "pytorch_model_1.bin")
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}}, tmp_path / "optimizer.bin")
    for rank in range(2):
        torch.save({"seed": rank}, tmp_path / f"random_states_{rank}.pkl")
    return tmp_path


def test_several_models_and_ranks(folder: Path) -> None:
    with opened(folder) as checkpoint:
        assert checkpoint.world_size == 2
        assert checkpoint.keys() == [
            "model_1.w",
            "optimizer.state.0.exp_avg",
            "random_states_0.seed",
            "random_states_1.seed",
            "w",
        ]
        assert checkpoint["model_1.w"].read().tolist() == [0, 1, 2, 3]
        target = {"w": torch.zeros(3, dtype=torch.int64)}
        sp.load(folder, target, include="w")
        assert target["w"].tolist() == [0, 1, 2]


def test_missing_files_are_found_where_the_format_allows(folder: Path) -> None:
    (folder / "random_states_1.pkl").rename(folder / "random_states_2.pkl")
    with pytest.raises(FormatError, match=r"random_states_1\.pkl"):
        opened(folder)
    (folder / "random_states_2.pkl").unlink()
    save_file({"w": torch.arange(3)}, folder / "pytorch_model.bin")
    with pytest.raises(FormatError, match="may differ"):
        opened(folder)
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(NotCommittedError, match="no model"):
        opened(folder)
    (folder / "pytorch_model_fsdp_0").mkdir()
    with opened(folder) as checkpoint:
        assert any("pytorch_model_fsdp_0" in note for note in checkpoint.reader.notes)


def test_a_key_of_the_model_that_another_item_has_is_refused(folder: Path) -> None:
    save_file({"optimizer.state.0.exp_avg": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(FormatError, match=r"two values have the key optimizer\.state\.0\.exp_avg"):
        opened(folder)


def test_a_folder_of_the_trainer(tmp_path: Path) -> None:
    golden = Golden("hf_llama_tied", tmp_path)
    folder = golden.checkpoint
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}}, folder / "optimizer.pt")
    torch.save({"cpu": torch.get_rng_state(), "python": (3, (1, 2), None)}, folder / "rng_state.pth")
    state = {"global_step": 500, "log_history": [{"loss": 1.5, "step": 1}]}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    with opened(folder) as checkpoint:
        assert (checkpoint.reader.name, checkpoint.step) == ("hf_trainer", 500)
        key = "model.layers.0.self_attn.q_proj.weight"
        assert bits(checkpoint[key].read()) == bits(golden.tensor(key))
        assert checkpoint["optimizer.state.0.exp_avg"].read().tolist() == [1, 1, 1]
        assert bits(checkpoint["rng_state.cpu"].read()) == bits(torch.get_rng_state())
        assert checkpoint["rng_state.python"] == (3, (1, 2), None)
        assert checkpoint["trainer_state.log_history"] == [{"loss": 1.5, "step": 1}]
        assert verify_foreign(checkpoint).ok
    (folder / "trainer_state.json").write_text("[]")
    with pytest.raises(FormatError, match="trainer_state"):
        opened(folder)


def test_the_golden_folder_of_weights_reads_to_its_expected_bits(tmp_path: Path) -> None:
    golden = Golden("hf_bin_sharded", tmp_path)
    check_golden(golden, "hf_bin")
    check_golden(golden, "hf_bin", golden.checkpoint / "pytorch_model.bin.index.json")


def test_a_pickle_that_would_run_code_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = Golden("evil_bin", tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with opened(golden.checkpoint) as checkpoint:
        assert checkpoint.reader.name == "hf_bin"
        refused = 0
        for key in checkpoint.reader.object_keys():
            try:
                checkpoint[key]
            except PlainDataError as error:
                assert "cannot be read as plain data" in error.message  # noqa: PT017
                refused += 1
        assert refused
    assert sorted(tmp_path.rglob("*")) == before


def test_ties_inside_a_shard_and_an_index_that_disagrees(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"embed": weight, "head": weight}, tmp_path / "a.bin")
    torch.save({"norm": torch.ones(3)}, tmp_path / "b.bin")
    index = {"weight_map": {"embed": "a.bin", "head": "a.bin", "norm": "b.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with opened(tmp_path) as checkpoint:
        assert checkpoint.aliases == {"head": "embed"}
        assert bits(checkpoint["head"].read()) == bits(weight)
    del index["weight_map"]["head"]
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"disagrees with a\.bin"):
        opened(tmp_path)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(StorageError, match=r"a\.bin is missing"):
        opened(tmp_path)
    torch.save({"embed": weight}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match="name the one file"):
        opened(tmp_path)


def test_a_folder_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError, match=r"no pytorch_model\.bin"):
        opened(tmp_path, format="hf_bin")
