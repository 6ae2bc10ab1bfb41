"""The layouts in use, built from a known global tensor: the reference for saves and loads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardproof as sp
from shardproof.rendezvous import LocalRendezvous, Rendezvous, StoreRendezvous
from tests.harness import rank, world_size

Global = dict[str, torch.Tensor]
Builder = Callable[[Global, int, int, "Meshes"], dict[str, Any]]


@contextlib.contextmanager
def meetings_of_first_ranks() -> Iterator[dict[int, Rendezvous]]:
    """By n, the rendezvous of the first n ranks, if this rank is one of them. All ranks end together."""
    store = torch.distributed.distributed_c10d._get_default_store()
    meetings: dict[int, Any] = {1: LocalRendezvous()}
    for n in range(2, world_size() + 1):
        if rank() < n:
            meetings[n] = StoreRendezvous(store, rank(), n, deadline=60, name=f"of-{n}")
    yield meetings
    torch.distributed.barrier()
    for meeting in meetings.values():
        meeting.close()


class Meshes:
    """Device meshes over the first ranks. Making one is collective over all ranks, so all are made first."""

    def __init__(self, world_size: int) -> None:
        self.flat = {n: DeviceMesh("cpu", torch.arange(n)) for n in range(1, world_size + 1)}
        self.grid = {
            n: DeviceMesh(
                "cpu", torch.arange(n).reshape(-1, 2 if n % 2 == 0 else 1), mesh_dim_names=("a", "b")
            )
            for n in range(1, world_size + 1)
        }


def global_tensors(scale: float = 1.0) -> Global:
    """Even and uneven shapes, dimensions smaller than the number of ranks, a scalar, several dtypes."""
    shapes = {
        "w57": (5, 7),
        "w88": (8, 8),
        "thin": (1, 6),
        "b3": (3,),
        "b1": (1,),
        "cube": (2, 3, 4),
        "scalar": (),
        "bf16": (6, 5),
        "f64": (7, 2),
    }
    dtypes = {"bf16": torch.bfloat16, "f64": torch.float64}
    made = {}
    for number, (name, shape) in enumerate(shapes.items()):
        count = int(torch.Size(shape).numel())
        values = (torch.arange(count, dtype=torch.float64) + 100 * number + 1) * scale
        made[name] = values.reshape(shape).to(dtypes.get(name, torch.float32))
    return made


def _distributed(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> torch.Tensor:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def _dim(tensor: torch.Tensor, wanted: int) -> int:
    return min(wanted, tensor.dim() - 1)


def replicated(tensors: Global, rank: int, n: int, meshes: Meshes) -> dict[str, Any]:
    """Plain tensors, the same on every rank."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def sharded(dim: int) -> Builder:
    """One mesh dimension, `Shard(dim)`."""

    def build(tensors: Global, rank: int, n: int, meshes: Meshes) -> dict[str, Any]:
        return {
            name: _distributed(t, meshes.flat[n], [Shard(_dim(t, dim))]) if t.dim() else t.clone()
            for name, t in tensors.items()
        }

    return build


def shard_replicate(tensors: Global, rank: int, n: int, meshes: Meshes) -> dict[str, Any]:
    """Two mesh dimensions, sharded over one, replicated over the other."""
    return {
        name: _distributed(t, meshes.grid[n], [Replicate(), Shard(0)]) if t.dim() else t.clone()
        for name, t in tensors.items()
    }


def shard_shard(tensors: Global, rank: int, n: int, meshes: Meshes) -> dict[str, Any]:
    """Two mesh dimensions, sharded over both."""
    return {
        name: _distributed(t, meshes.grid[n], [Shard(0), Shard(_dim(t, 1))]) if t.dim() else t.clone()
        for name, t in tensors.items()
    }


class _Holder(nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def strided(tensors: Global, rank: int, n: int, meshes: Meshes) -> dict[str, Any]:
    """FSDP2 over tensor parallel, both on the first dimension: `_StridedShard`, as `fully_shard` makes it."""
    mesh = meshes.grid[n]
    if mesh.get_coordinate() is None:
        return {}
    ranked = {name: t for name, t in tensors.items() if t.dim()}
    holder = _Holder({name: _distributed(t, mesh["b"], [Shard(0)]) for name, t in ranked.items()})
    fully_shard(holder, mesh=mesh["a"])
    built: dict[str, Any] = {name: parameter.detach() for name, parameter in holder.named_parameters()}
    return built | {name: t.clone() for name, t in tensors.items() if not t.dim()}


def irregular(tensors: Global, rank: int, n: int, meshes: Meshes) -> dict[str, Any]:
    """Explicit boxes: rows cut unevenly, the last part's columns cut again; a rank may hold none."""
    built: dict[str, Any] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        boxes = [(tensor, (0,) * tensor.dim())]
        if tensor.dim() and tensor.shape[0] > 1:
            boxes = [
                (tensor[:1], (0,) * tensor.dim()),
                (tensor[1:], (1, *(0,) * (tensor.dim() - 1))),
            ]
        if tensor.dim() == 2 and tensor.shape[1] > 2:
            last, offsets = boxes.pop()
            boxes += [(last[:, :2], offsets), (last[:, 2:], (offsets[0], 2))]
        mine = [(view.clone(), at) for place, (view, at) in enumerate(boxes) if (place + number) % n == rank]
        built[name] = sp.LocalShards(tuple(tensor.shape), mine, dtype=tensor.dtype)
    return built


def flat(tensors: Global, rank: int, n: int, meshes: Meshes) -> dict[str, Any]:
    """One flat buffer for the tensors of a dtype, an equal range a rank: rows are cut, some hold none."""
    built: dict[str, Any] = {}
    for dtype in {t.dtype for t in tensors.values()}:
        group = {name: t for name, t in tensors.items() if t.dtype == dtype}
        total = sum(t.numel() for t in group.values())
        first, last = (total * rank // n, total * (rank + 1) // n)
        begin = 0
        for name, tensor in group.items():
            start = min(max(first - begin, 0), tensor.numel())
            stop = min(max(last - begin, 0), tensor.numel())
            buffer = tensor.reshape(-1)[start:stop].clone()
            built[name] = sp.FlatShard(buffer, tuple(tensor.shape), start, stop)
            begin += tensor.numel()
    return built


LAYOUTS: dict[str, Builder] = {
    "replicated": replicated,
    "shard 0": sharded(0),
    "shard 1": sharded(1),
    "shard x replicate": shard_replicate,
    "shard x shard": shard_shard,
    "strided": strided,
    "irregular": irregular,
    "flat": flat,
}


def local_values(value: Any) -> list[torch.Tensor]:
    """The memory of a built value, for comparing and for blanking."""
    if isinstance(value, DTensor):
        return [value.to_local()]
    if isinstance(value, sp.LocalShards):
        return [view for view, _ in value.pieces]
    if isinstance(value, sp.FlatShard):
        return [value.buffer]
    return [value]
