"""Declared layouts, saved to files and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import shardproof as sp
from shardproof.layouts import shared, vocabulary
from tests.unit.training.layouts.reference import linear, numbered
from tests.unit.training.layouts.test_experts import (
    BIAS,
    FC1,
    FC2,
    ExpertShards,
    grouped,
    sequential,
    state_of,
)


def table_and_head(scale: float, rows: int) -> torch.nn.ModuleDict:
    weight = torch.full((rows, 2), -1.0)
    weight[:7] = scale * numbered(7, 2)
    model = torch.nn.ModuleDict({"head": linear(weight), "table": linear(weight)})
    vocabulary(model, "table.weight", 7)
    vocabulary(model, "head.weight", 7)
    shared(model, "head.weight", "table.weight")
    return model


def test_sequential_experts_load_into_grouped_experts(tmp_path: Path) -> None:
    sp.save(tmp_path / "step", state_of(sequential, ExpertShards(0, 1, 1)))
    with sp.open(tmp_path / "step") as checkpoint:
        assert torch.equal(checkpoint["model.fc1.weight"][:], FC1)
        assert torch.equal(checkpoint["optimizer.fc1.bias.exp_avg"][:], 0.875 * BIAS)
        assert torch.equal(checkpoint["model.fc2.weight"][2], FC2[2])
    model = grouped(ExpertShards(0, 1, 1))
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    expected = state_of(grouped, ExpertShards(0, 1, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    sp.load(tmp_path / "step", state)
    for got, wanted in zip(model.parameters(), expected["model"].parameters(), strict=True):
        assert torch.equal(got, wanted)
        assert state["optimizer"].state[got].keys() == expected["optimizer"].state[wanted].keys()
        for slot, value in expected["optimizer"].state[wanted].items():
            assert torch.equal(state["optimizer"].state[got][slot], value), slot


def test_copies_are_one_tensor_in_the_files_and_padding_is_in_none(tmp_path: Path) -> None:
    sp.save(tmp_path / "step", {"model": table_and_head(1.0, 9)})
    with sp.open(tmp_path / "step") as checkpoint:
        assert list(checkpoint) == ["model.table.weight"]
        assert checkpoint["model.table.weight"].shape == (7, 2)
    target = table_and_head(0.0, 12)
    report = sp.load(tmp_path / "step", {"model": target})
    assert report is not None
    for name in ("head", "table"):
        assert torch.equal(target[name].weight[:7], numbered(7, 2))
        assert (target[name].weight[7:] == -1.0).all()
