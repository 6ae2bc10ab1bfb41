"""``pytorch_model.bin`` of Hugging Face: the golden folder, its index, and a pickle that would run code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint
from shardproof.errors import FormatError, NotCommittedError, PlainDataError, StorageError
from tests.unit.formats.peers import Golden, bits, check_golden


def opened(path: Path, **options: Any) -> ForeignCheckpoint:
    checkpoint = sp.open(path, **options)
    assert isinstance(checkpoint, ForeignCheckpoint)
    return checkpoint


def test_the_golden_folder_reads_to_its_expected_bits(tmp_path: Path) -> None:
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
