"""Modules of frameworks whose parameters are ranges of flat buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.frameworks.shared.partitions import Partition, PartitionedModule


def partitioned(
    value: float, kind: type[PartitionedModule] = PartitionedModule
) -> tuple[torch.nn.BatchNorm1d, PartitionedModule]:
    """A module of a framework: `weight` is a partition; the frozen `bias` and the buffer are plain values."""
    module = torch.nn.BatchNorm1d(4)
    module.bias.requires_grad_(False)
    for tensor in (module.weight, module.bias, module.running_mean):
        tensor.data.fill_(value)
    part = Partition("weight", (4,), 0, 4, module.weight.detach())
    return module, kind(module, {"weight": part}, lambda: None)


def test_values_that_are_no_partitions_are_loaded(tmp_path: Path) -> None:
    (_, saved), (module, target) = partitioned(1), partitioned(2)
    sp.save(tmp_path / "ckpt", {"model": saved})
    sp.load(tmp_path / "ckpt", {"model": target})
    for tensor in (module.weight, module.bias, module.running_mean):
        assert tensor.eq(1).all()


def test_a_value_that_the_module_does_not_take_is_an_error(tmp_path: Path) -> None:
    class Extra(PartitionedModule):
        def state_dict(self, *args: object, **options: object) -> dict[str, object]:
            return {**super().state_dict(), "more": torch.zeros(2)}

    sp.save(tmp_path / "ckpt", {"model": partitioned(1, Extra)[1]})
    with pytest.raises(sp.KeyMismatchError, match=r"did not take 1 stored values: more"):
        sp.load(tmp_path / "ckpt", {"model": partitioned(1, Extra)[1]})


def test_a_hook_of_the_framework_reads_masters_that_follow_the_weights(tmp_path: Path) -> None:
    """Megatron-FSDP copies its main weights to the weights after each load of the state dict."""

    def install(module: Framework, _: object) -> None:
        module.weight.data.copy_(module.master)

    install.__module__ = "megatron_fsdp.module"

    class Framework(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((4,), value, dtype=torch.bfloat16))
            self.extra = value
            self.master = torch.full((4,), value)
            self.register_load_state_dict_post_hook(install)

        def get_extra_state(self) -> float:
            return self.extra

        def set_extra_state(self, state: float) -> None:
            self.extra = state

    def made(module: Framework) -> PartitionedModule:
        part = Partition("weight", (4,), 0, 4, module.weight.detach(), module.master)
        return PartitionedModule(module, {"weight": part}, lambda: None)

    sp.save(tmp_path / "ckpt", {"model": made(Framework(3))})
    module = Framework(1)
    sp.load(tmp_path / "ckpt", {"model": made(module)})
    assert module.weight.eq(3).all() and module.master.eq(3).all() and module.extra == 3
