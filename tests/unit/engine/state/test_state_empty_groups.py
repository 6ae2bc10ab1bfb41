"""The options of a parameter group that has no parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardproof as sp


def _optimizer(rates: tuple[float, ...], *, full: int, model: nn.Module | None = None) -> dict[str, Any]:
    """A state whose optimizer has one group with parameters."""
    model = model or nn.Linear(2, 2)
    groups = [
        {"params": list(model.parameters()) if number == full else [], "lr": rate}
        for number, rate in enumerate(rates)
    ]
    return {"model": model, "optimizer": torch.optim.AdamW(groups)}


def _rates(state: dict[str, Any]) -> list[float]:
    return [group["lr"] for group in state["optimizer"].param_groups]


@pytest.mark.parametrize("full", [0, 1])
def test_options_of_an_empty_group_are_restored(tmp_path: Path, full: int) -> None:
    sp.save(tmp_path / "c", _optimizer((0.5, 0.25), full=full))
    target = _optimizer((0.1, 0.1), full=full)
    sp.load(tmp_path / "c", target)
    assert _rates(target) == [0.5, 0.25]


def test_a_group_that_has_parameters_now_takes_their_options(tmp_path: Path) -> None:
    sp.save(tmp_path / "c", _optimizer((0.5, 0.25), full=1))
    target = _optimizer((0.1,), full=0)
    sp.load(tmp_path / "c", target)
    assert _rates(target) == [0.25]


def test_an_empty_group_that_is_not_stored_does_not_change(tmp_path: Path) -> None:
    sp.save(tmp_path / "c", _optimizer((0.5,), full=0))
    target = _optimizer((0.1, 0.125), full=0)
    sp.load(tmp_path / "c", target)
    assert _rates(target) == [0.5, 0.125]


def test_an_excluded_group_does_not_change(tmp_path: Path) -> None:
    sp.save(tmp_path / "c", _optimizer((0.5, 0.25), full=1))
    target = _optimizer((0.1, 0.1), full=1)
    sp.load(tmp_path / "c", target, exclude="optimizer.@group-0")
    assert _rates(target) == [0.1, 0.25]


def test_options_of_an_empty_group_in_a_state_dict_of_torch(tmp_path: Path) -> None:
    stored = _optimizer((0.5, 0.25), full=1)
    torch.save({"optimizer": stored["optimizer"].state_dict()}, tmp_path / "c.pt")
    target = _optimizer((0.1, 0.1), full=1)
    sp.load(tmp_path / "c.pt", target, include="optimizer")
    assert _rates(target) == [0.5, 0.25]


def test_an_empty_group_is_exported_at_its_position(tmp_path: Path) -> None:
    stored = _optimizer((0.5, 0.25), full=1)
    sp.save(tmp_path / "c", stored)
    sp.convert(tmp_path / "c", tmp_path / "c.pt", to="torch")
    with sp.open(tmp_path / "c.pt") as checkpoint:
        exported = [checkpoint[f"optimizer.param_groups.{number}.lr"] for number in (0, 1)]
        members = [checkpoint[f"optimizer.param_groups.{number}.params"] for number in (0, 1)]
    assert (exported, members) == ([0.5, 0.25], [[], ["bias", "weight"]])
