"""The state that every way saves: a GPT with its Adam state, or many small tensors, as DTensors by rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from common import gpt_state, local_bytes, sharded, tensors_of, total_bytes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class Holder(nn.Module):
    """A module whose parameters are the given ones, under their dotted names."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            module: nn.Module = self
            *parents, last = name.split(".")
            for parent in parents:
                if parent not in dict(module.named_children()):
                    module.add_module(parent, nn.Module())
                module = module.get_submodule(parent)
            module.register_parameter(last, nn.Parameter(tensor))


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """The same tensors in the forms that peers take."""

    tree: dict[str, Any]
    """Nested: parameters under "model", moments and steps under "optimizer"; or the small tensors."""
    flat: dict[str, torch.Tensor]
    """The same, under dotted keys."""
    module: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """This rank's parts."""
        return tensors_of(self.tree)

    @property
    def local_bytes(self) -> int:
        return local_bytes(self.tree)

    @property
    def total_bytes(self) -> int:
        """Over all ranks; every rank must call it."""
        return total_bytes(self.tree)


def gpt(gib: float, mesh: DeviceMesh, *, filled: bool = True) -> Subject:
    """Blocks of GPT-2 medium in float32, with their Adam state, about `gib` GiB over all ranks."""
    tree = gpt_state(gib, mesh, filled=filled)
    module = Holder(tree["model"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    for name, parameter in module.named_parameters():
        optimizer.state[parameter] = tree["optimizer"][name]
    return Subject(tree, flattened(tree), module, optimizer)


def small(count: int, mesh: DeviceMesh, *, filled: bool = True) -> Subject:
    """`count` tensors, of 4 KiB on each rank."""
    tree = {
        f"layers.{at // 20}.part.{at % 20}": sharded((1024 * mesh.size(),), mesh, 0, filled)
        for at in range(count)
    }
    return Subject(tree, dict(tree))


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Leaves under dotted keys."""
    found: dict[str, torch.Tensor] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
