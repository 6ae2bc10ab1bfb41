"""What a load fills counts as changed for torch, so that optimizers with masters notice it."""

from __future__ import annotations

from pathlib import Path

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
