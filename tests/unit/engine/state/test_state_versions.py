"""A load increments the version of each tensor that it fills, so that optimizers with masters notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp


def test_a_filled_parameter_has_a_new_version(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    sp.save(tmp_path / "step", {"model": model})
    other = torch.nn.Linear(3, 2)
    before = other.weight._version, other.bias._version
    sp.load(tmp_path / "step", {"model": other}, exclude="model.bias")
    assert torch.equal(other.weight, model.weight)
    assert other.weight._version > before[0]
    assert other.bias._version == before[1]


def test_a_parameter_that_a_failed_load_has_overwritten_has_a_new_version(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    sp.save(tmp_path / "step", {"model": model})
    (shard,) = (tmp_path / "step" / "shards").iterdir()
    content = shard.read_bytes()
    first = content.index(model.weight.detach().numpy().tobytes())
    shard.write_bytes(content[:first] + bytes(8) + content[first + 8 :])
    other = torch.nn.Linear(3, 2)
    before = other.weight._version
    with pytest.raises(sp.CorruptChunkError):
        sp.load(tmp_path / "step", {"model": other})
    assert other.weight._version > before
