"""The ranks that shard and replicate a unit, and the DTensor layout of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardproof.engine.geometry import IndexMap, row_major_strides
from shardproof.engine.state import dtensor_index_map
from shardproof.errors import StructureError
from shardproof.training.fsdp.row_layout import RowLayout


@dataclass(frozen=True, slots=True, eq=False)
class MeshRanks:
    """A mesh of one dimension (shard) or two (replicate, shard)."""

    mesh: DeviceMesh
    shards: int
    """Ranges of each flat buffer."""
    index: int
    """This rank's range."""
    shard_group: ProcessGroup
    replicate_groups: tuple[ProcessGroup, ...]

    @staticmethod
    def of(mesh: DeviceMesh) -> MeshRanks:
        """The groups of a mesh.

        Raises:
            ValueError: the mesh has more than two dimensions, or this rank is not in it.
        """
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard takes a mesh of one dimension (shard) or two (replicate, shard), not "
                f"{mesh.ndim}: pass the data parallel part of it, such as mesh['dp']"
            )
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(
                f"this rank is not in the mesh {mesh}: call fully_shard only on ranks of the mesh"
            )
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        return MeshRanks(mesh, mesh.size(mesh.ndim - 1), coordinate[-1], groups[-1], tuple(groups[:-1]))

    @property
    def size(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return int(self.mesh.size())

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """All groups of the mesh."""
        return (self.shard_group, *self.replicate_groups)

    def placements(self) -> tuple[Placement, ...]:
        """Placements of a sharded parameter on the mesh."""
        return (*(Replicate() for _ in self.replicate_groups), Shard(0))


@dataclass(frozen=True, slots=True, eq=False)
class TensorSpec:
    """The layout of a parameter, sharded and gathered."""

    shape: tuple[int, ...]
    """Shape of the whole parameter, across tensor parallel ranks, too."""
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    outer: IndexMap
    """Position of the packed tensor in the whole parameter."""
    shard_dim: int
    """Dimension of `mesh` over which `fully_shard` cuts the rows."""
    parallel: tuple[DeviceMesh, tuple[Placement, ...]] | None
    """Mesh and placements of tensor parallelism, if the parameter was a DTensor."""

    def gathered(self, whole: torch.Tensor) -> torch.Tensor:
        """The parameter that the module computes with: `whole`, or its tensor parallel DTensor."""
        if self.parallel is None:
            return whole
        mesh, placements = self.parallel
        shape = torch.Size(self.shape)
        stride = torch.empty(shape, dtype=torch.float32, device="meta").stride()
        return DTensor.from_local(whole, mesh, placements, run_check=False, shape=shape, stride=stride)

    def layout(self, bounds: tuple[tuple[int, int], ...], index: int) -> RowLayout:
        """The layout of the sharded parameter.

        Args:
            bounds: rows [first, stop) of the packed tensor in each range.
            index: this rank's range.
        """
        strides = tuple(row_major_strides(self.shape))
        return RowLayout(
            self.mesh, self.placements, self.shape, bounds, self.shard_dim, index, self.outer, strides
        )


def spec_of(parameter: torch.Tensor, ranks: MeshRanks, name: str) -> TensorSpec:
    """The layout of a parameter that is sharded over ranks.

    Raises:
        ValueError: the parameter is a scalar, is already sharded over these ranks, contains partial sums, or
            its placements define no layout.
    """
    if parameter.dim() == 0:
        raise ValueError(f"{name} is a scalar, which has no rows to shard: use shape [1]")
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        whole = IndexMap.whole(shape)
        return TensorSpec(shape, ranks.mesh, ranks.placements(), whole, ranks.mesh.ndim - 1, None)
    mesh, beneath = parameter.device_mesh, tuple(parameter.placements)
    if any(placement.is_partial() for placement in beneath):
        raise ValueError(f"{name} is a DTensor of partial sums: redistribute it before fully_shard")
    names = set(mesh.mesh_dim_names or ())
    if not names or names & set(ranks.mesh.mesh_dim_names or ("",)):
        raise ValueError(
            f"{name} is a DTensor on mesh dimensions {mesh.mesh_dim_names}, and fully_shard uses "
            f"{ranks.mesh.mesh_dim_names}: these must be different named dimensions of one mesh"
        )
    split = 1
    for dim, placement in enumerate(beneath):
        if isinstance(placement, Shard | _StridedShard) and placement.dim % len(shape) == 0:
            split *= mesh.size(dim)
    above: list[Placement] = list(ranks.placements())
    if split > 1:
        above[-1] = _StridedShard(0, split_factor=split)
    joint = (*above, *beneath)
    try:
        outer = dtensor_index_map(parameter, name)
    except StructureError as error:
        raise ValueError(str(error)) from error
    joined = _joined(ranks.mesh, mesh)
    return TensorSpec(shape, joined, joint, outer, ranks.mesh.ndim - 1, (mesh, beneath))


def _joined(over: DeviceMesh, beneath: DeviceMesh) -> DeviceMesh:
    """The mesh of both meshes' dimensions."""
    if hasattr(DeviceMesh, "_concatenate"):
        return DeviceMesh._concatenate([over, beneath])
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.10

    root: Any = _mesh_resources.get_root_mesh(over)
    return root[(*over.mesh_dim_names, *beneath.mesh_dim_names)]  # type: ignore[no-any-return,misc]
