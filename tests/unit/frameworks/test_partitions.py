"""Modules of frameworks whose parameters are ranges of flat buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.frameworks.partitions import Partition, PartitionedModule


def partitioned(value: float) -> PartitionedModule:
    """A module of a framework: `weight` is a partition; the frozen `bias` and the buffer are plain values."""
    module = torch.nn.BatchNorm1d(4)
    module.bias.requires_grad_(False)
    for tensor in (module.weight, module.bias, module.running_mean):
        tensor.data.fill_(value)
    part = Partition("weight", (4,), 0, 4, module.weight.detach())
    return PartitionedModule(module, {"weight": part}, lambda: None)


def test_values_that_are_no_partitions_are_loaded(tmp_path: Path) -> None:
    saved, target = partitioned(1), partitioned(2)
    sp.save(tmp_path / "ckpt", {"model": saved})
    sp.load(tmp_path / "ckpt", {"model": target})
    module = target._inner[0]
    for tensor in (module.weight, module.bias, module.running_mean):
        assert tensor.eq(1).all()


def test_a_value_that_the_module_does_not_take_is_an_error(tmp_path: Path) -> None:
    class Extra(PartitionedModule):
        def state_dict(self, *args: object, **options: object) -> dict[str, object]:
            return {**super().state_dict(), "more": torch.zeros(2)}

    def extra() -> Extra:
        made = partitioned(1)
        return Extra(made._inner[0], made._partitions, lambda: None)

    sp.save(tmp_path / "ckpt", {"model": extra()})
    with pytest.raises(sp.KeyMismatchError, match=r"unexpected \(1\): more"):
        sp.load(tmp_path / "ckpt", {"model": extra()})
