"""How the demo spreads its model over ranks, with tensor parallelism beneath where asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from shardproof import fsdp
from shardproof.demo.layout import Layout
from shardproof.demo.model import Transformer

__all__ = ["Place", "average_gradients", "spread"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in its layout."""

    mesh: DeviceMesh | None
    """None on a single rank."""
    data_rank: int

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Place:
        """This rank's place; all ranks of the default process group call it together."""
        if layout.ranks == 1:
            return cls(None, 0)
        names = ("data", "tensor")[: 2 if layout.tensor > 1 else 1]
        mesh = init_device_mesh(device.type, (layout.data, layout.tensor)[: len(names)], mesh_dim_names=names)
        return cls(mesh, mesh.get_local_rank("data"))

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same tensor-parallel part; None on a single rank."""
        return None if self.mesh is None else self.mesh.get_group("data")


class _Replicated(ParallelStyle):
    """A module whose parameters every tensor-parallel rank holds whole, as tensors of the mesh.

    Clipping the gradient takes the norm over all parameters, which must therefore lie on one mesh.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=_enter, output_fn=_leave)


def _enter(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    return tuple(DTensor.from_local(x, mesh, (Replicate(),), run_check=False) for x in inputs)


def _leave(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
    return output.to_local()


def spread(model: Transformer, place: Place, sharding: str) -> None:
    """Spread `model` in place: tensor parallel over the mesh's "tensor" dimension, `sharding` over "data".

    Rows of the projections into heads and hidden units go to tensor-parallel ranks. FSDP2 cuts each rank's
    rows again: what torch calls a strided shard, where a rank's rows are not one block of the tensor. The
    flat sharding cuts the buffer that a block's parameters lie in, so that ranks have unequal numbers of rows
    and, of many parameters, none.
    """
    mesh = place.mesh
    if mesh is None:
        return
    names = mesh.mesh_dim_names or ()
    if "tensor" in names:
        tensor = mesh["tensor"]
        for block in model.blocks:
            parallelize_module(block, tensor, _block_plan())
        parallelize_module(
            model,
            tensor,
            {
                "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
                "norm": _Replicated(),
                "head": ColwiseParallel(output_layouts=Replicate()),
            },
        )
    for module in (*model.blocks, model):
        if sharding == "fsdp2":
            fully_shard(module, mesh=mesh["data"])
        elif sharding == "flat":
            fsdp.fully_shard(module, mesh=mesh["data"])


def _block_plan() -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        name: _Replicated() for name in ("attention_norm", "attention_gain", "mlp_norm", "mlp_gain")
    }
    for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
        plan[name] = ColwiseParallel()
    for name in ("attention.out", "mlp.down"):
        plan[name] = RowwiseParallel()
    return plan


def average_gradients(model: nn.Module, place: Place) -> None:
    """The mean over data-parallel ranks, for parameters that each has whole and no optimizer reduces."""
    group = place.data_group
    if group is None:
        return
    gradients = [
        parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(group.size())
    dist.all_reduce(flat, group=group)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, torch.split(flat, sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))
