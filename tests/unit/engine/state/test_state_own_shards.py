"""A module that describes its own shards. Its `state_loaded` runs after a load."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardproof as sp


class Half(torch.nn.Module):
    """The first elements of a weight, in a flat buffer, and a bias as it is."""

    def __init__(self, stop: int = 12) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.arange(3.0))
        self.flat = torch.arange(float(stop))
        self.loads: list[torch.Tensor] = []

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {"bias": self.bias, "weight": sp.FlatShard(self.flat, (4, 3), 0, len(self.flat))}

    def state_loaded(self) -> None:
        self.loads.append(self.flat.clone())


def test_shards_of_a_module_are_saved_and_loaded_in_place(tmp_path: Any) -> None:
    saved = Half()
    sp.save(tmp_path / "step", {"model": saved})
    plain = torch.nn.Linear(3, 4)
    plain.bias = torch.nn.Parameter(torch.zeros(3))
    sp.load(tmp_path / "step", {"model": plain})
    assert torch.equal(plain.weight, torch.arange(12.0).view(4, 3))
    part = Half(stop=7)
    part.flat.zero_()
    memory = part.flat.data_ptr()
    sp.load(tmp_path / "step", {"model": part})
    assert part.flat.data_ptr() == memory
    assert [weights.tolist() for weights in part.loads] == [list(range(7))], "once, after the weights are set"


def test_a_gap_in_the_shards_of_a_module_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(sp.TilingError, match=r"model\.weight"):
        sp.save(tmp_path / "step", {"model": Half(stop=7)})
