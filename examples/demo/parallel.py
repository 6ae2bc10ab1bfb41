"""How the demo's ranks shard the model and the optimizer, and the digests that compare whole tensors.

The digests prove a restore: the demo compares those taken at a save with those taken after a load. They are
independent of the checkpoint path: torch's collectives, which the engine does not use, gather the shards.
For an optimizer that describes its slots (`SlotProvider`), the digests cover the tensors that it describes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from examples.demo.model import Transformer
from examples.demo.story import RankLayout
from shardproof import fsdp, optim
from shardproof.state import LocalRange, SlotProvider, as_bytes

__all__ = [
    "RankPosition",
    "average_gradients",
    "clip_gradients",
    "digest_of",
    "make_optimizer",
    "spread",
    "state_digests",
]


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The position of a rank in its layout."""

    mesh: DeviceMesh | None
    """None on a single rank."""
    data_rank: int

    @classmethod
    def of(cls, layout: RankLayout, device: torch.device) -> RankPosition:
        """This rank's position. All ranks of the default process group must call it."""
        if layout.ranks == 1:
            return cls(None, 0)
        names = ("data", "tensor")[: 2 if layout.tensor > 1 else 1]
        mesh = init_device_mesh(device.type, (layout.data, layout.tensor)[: len(names)], mesh_dim_names=names)
        return cls(mesh, mesh.get_local_rank("data"))

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks with the same tensor-parallel part; None on a single rank."""
        return None if self.mesh is None else self.mesh.get_group("data")


class _Replicated(ParallelStyle):
    """A module whose parameters are replicated over the tensor-parallel ranks, as DTensors of the mesh.

    Gradient clipping computes the norm over all parameters, which requires one mesh.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=_enter, output_fn=_leave)


def _enter(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    return tuple(DTensor.from_local(x, mesh, (Replicate(),), run_check=False) for x in inputs)


def _leave(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
    return output.to_local()


def spread(model: Transformer, place: RankPosition, sharding: str) -> None:
    """Shard `model` in place: tensor parallel over the mesh's "tensor" dimension, `sharding` over "data".

    Tensor parallelism shards the rows of the projections into heads and hidden units. FSDP2 shards each
    rank's rows again, which gives strided shards: a rank's rows are not one block of the tensor. The flat
    sharding cuts the buffer of a block's parameters. So ranks have unequal numbers of rows, and no rows of
    many parameters.
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


def average_gradients(model: nn.Module, layout: RankLayout, place: RankPosition) -> None:
    """Average the gradients over the data-parallel ranks, unless backward or the optimizer's step does."""
    group = place.data_group
    if group is None or layout.sharding != "none" or layout.optimizer == "distributed":
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


LEARNING_RATE = 3e-3
BETAS = (0.9, 0.95)


def make_optimizer(model: nn.Module, layout: RankLayout, place: RankPosition) -> torch.optim.Optimizer:
    """Make an AdamW optimizer with weight decay for matrices, and none for norms and gains."""
    if layout.optimizer == "distributed":
        return optim.DistributedOptimizer(
            model,
            torch.optim.AdamW,
            param_groups=lambda _name, parameter: _options(parameter),
            process_group=place.data_group,
            lr=LEARNING_RATE,
            betas=BETAS,
        )
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": group, **_options(group[0])} for group in (matrices, vectors)]
    if layout.optimizer == "hybrid":
        return optim.HybridDeviceOptimizer(
            groups,
            torch.optim.AdamW,
            cpu_fraction=layout.cpu_fraction,
            lr=LEARNING_RATE,
            betas=BETAS,
            fused=False,  # equal bits in every layout
        )
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS)


def _options(parameter: torch.Tensor) -> dict[str, Any]:
    return {"weight_decay": 0.1 if parameter.ndim > 1 else 0.0}


def clip_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, most: float) -> None:
    """Scale all gradients so that their joint norm is at most `most`."""
    if isinstance(optimizer, optim.DistributedOptimizer):
        optimizer.clip_grad_norm_(most)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), most)


def state_digests(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None
) -> dict[str, tuple[str, int]]:
    """Name to (digest, bytes) of every parameter and every tensor of its optimizer state.

    All ranks of `group`, the data-parallel ranks, must call it. Digests compare bits, so 0.0 differs from
    -0.0, and NaN equals itself.
    """
    slots_of = list(_slots(optimizer))  # first, because this waits for parameters in transfer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {name: digest_of(_whole(each, each, group)) for name, each in model.named_parameters()}
    for parameter, slots in slots_of:
        for slot, value in sorted(slots.items()):
            if isinstance(value, Tensor | LocalRange):
                found[f"{names[id(parameter)]} · {slot}"] = digest_of(_whole(value, parameter, group))
    return found


def digest_of(tensor: Tensor) -> tuple[str, int]:
    """The xxh3_128 digest of dtype, shape and bytes in row-major order; and the number of bytes.

    >>> digest_of(torch.zeros(2)) == digest_of(torch.zeros(2).neg())
    False
    """
    whole = tensor.detach()
    data = as_bytes(whole.cpu()).numpy()
    hasher = xxhash.xxh3_128(f"{whole.dtype} {tuple(whole.shape)}".encode())
    hasher.update(data.data)
    return hasher.hexdigest(), data.nbytes


def _slots(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    if isinstance(optimizer, SlotProvider):
        for described in optimizer.describe_slots():
            yield described.parameter, described.tensors
    else:
        yield from optimizer.state.items()


def _whole(value: Tensor | LocalRange, parameter: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The whole tensor of a parameter, or of one of its slots, gathered from all ranks."""
    if isinstance(value, LocalRange):
        local = _joined_ranges(value, _local(parameter).shape, group)
    elif value.dim() == 0:
        return value
    else:
        local = _local(value)
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    if hasattr(parameter, "_shardproof_local"):  # uneven rows of the flat sharding
        local = torch.cat([rows.to(local.device) for rows in _of_all(local.cpu(), group)])
        if mesh.ndim == 1:
            return local
        mesh, placements = mesh["tensor"], placements[-1:]
    stride = torch.empty(parameter.shape, device="meta").stride()
    shards = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=stride
    )
    return shards.full_tensor()


def _local(tensor: Tensor) -> Tensor:
    whole = tensor.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def _joined_ranges(own: LocalRange, shape: torch.Size, group: dist.ProcessGroup | None) -> Tensor:
    """Join the ranks' ranges of row-major elements to a tensor."""
    joined = own.buffer.new_empty(shape.numel())
    reached = 0
    ranges = _of_all((own.start, own.stop, own.buffer.cpu()), group)
    for start, stop, elements in sorted(ranges, key=itemgetter(0, 1)):
        if start == stop:
            continue
        if start != reached:
            raise ValueError(f"the ranks' ranges omit or repeat elements between {reached} and {start}")
        joined[start:stop] = elements
        reached = stop
    if reached != shape.numel():
        raise ValueError(f"the ranks' ranges end at element {reached} of {shape.numel()}")
    return joined.view(shape)


def _of_all(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The value of each rank of the group, in rank order."""
    if group is None:
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return list(values)
