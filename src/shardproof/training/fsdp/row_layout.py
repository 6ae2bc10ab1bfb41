"""The rows of a parameter that each rank of a mesh has, and the arithmetic and the collectives of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from torch._guards import detect_fake_mode
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardproof.engine.geometry import Boxes, IndexMap, compose, row_major_strides
from shardproof.engine.state import dtensor_index_map, local_segments
from shardproof.errors import StructureError
from shardproof.training.collectives import all_gather


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The rows of each rank, and what a gathered tensor is."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    bounds: tuple[tuple[int, int], ...]
    """Rows [first, stop) of each rank, ascending; (0, 0) if it has none."""
    mesh_dim: int
    """Dimension of the mesh whose ranks share the rows."""
    index: int
    """This rank's index in it."""
    outer: IndexMap
    """Position of the gathered local tensor in the whole tensor."""
    strides: tuple[int, ...]
    """Strides of the whole tensor."""
    dim: int = 0
    """Dimension of the tensor that is cut."""
    _permuted: dict[tuple[int, ...], RowLayout] = field(default_factory=dict, repr=False)
    _specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict, repr=False)

    def __deepcopy__(self, memo: Any) -> RowLayout:
        return self

    def equals(self, other: RowLayout) -> bool:
        """True if all ranks have the same rows of tensors with either layout."""
        if self is other:
            return True
        mine = (self.bounds, self.dim, self.shape, self.placements, self.mesh)
        return mine == (other.bounds, other.dim, other.shape, other.placements, other.mesh)

    @property
    def rows(self) -> tuple[int, int]:
        """This rank's rows."""
        return self.bounds[self.index]

    @property
    def gathered(self) -> tuple[Placement, ...]:
        """Placements of a gathered tensor."""
        return tuple(Replicate() if dim == self.mesh_dim else p for dim, p in enumerate(self.placements))

    @cached_property
    def index_map(self) -> IndexMap:
        """Position of this rank's rows in the whole tensor."""
        packed, (first, stop) = self.outer.local_shape, self.rows
        local = (*packed[: self.dim], stop - first, *packed[self.dim + 1 :])
        boxes, offsets = Boxes.whole(local), np.zeros((1, len(packed)), np.int64)
        offsets[0, self.dim] = first
        if 0 in local:
            boxes, offsets = Boxes.empty(len(packed)), offsets[:0]
        return compose(self.outer, IndexMap(local, packed, boxes, offsets))

    def permuted(self, dims: tuple[int, ...]) -> RowLayout:
        """The layout after a permutation of the dimensions, the same object for the same permutation."""
        if dims not in self._permuted:
            made = self._permute(dims)
            self._permuted[dims] = made
            made._permuted[tuple(map(dims.index, range(len(dims))))] = self
        return self._permuted[dims]

    def _permute(self, dims: tuple[int, ...]) -> RowLayout:
        def moved(placement: Placement) -> Placement:
            if isinstance(placement, _StridedShard):
                return _StridedShard(dims.index(placement.dim), split_factor=placement.split_factor)
            return Shard(dims.index(placement.dim)) if isinstance(placement, Shard) else placement

        order, outer = list(dims), self.outer
        return RowLayout(
            self.mesh,
            tuple(map(moved, self.placements)),
            tuple(self.shape[dim] for dim in dims),
            self.bounds,
            self.mesh_dim,
            self.index,
            IndexMap(
                tuple(outer.local_shape[dim] for dim in dims),
                tuple(outer.global_shape[dim] for dim in dims),
                Boxes(outer.local.offsets[:, order], outer.local.sizes[:, order]),
                outer.offsets[:, order],
            ),
            tuple(self.strides[dim] for dim in dims),
            dims.index(self.dim),
        )

    @cached_property
    def contiguous(self) -> RowLayout:
        """The layout of a contiguous tensor with these rows."""
        strides = tuple(row_major_strides(self.shape))
        return self if strides == self.strides else replace(self, strides=strides, _permuted={}, _specs={})

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """What torch knows of a tensor with this layout."""
        if dtype not in self._specs:
            meta = RowMeta(torch.Size(self.shape), self.strides, dtype)
            meta.layout = self
            self._specs[dtype] = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return self._specs[dtype]

    @cached_property
    def placements_of_part(self) -> tuple[Placement, ...]:
        """Placements from which torch computes the size and the offsets of this rank's part.

        Raises:
            RuntimeError: on all ranks, if the part of one of them is not one box.
        """
        if self._has_separate_parts():
            raise RuntimeError(
                f"a rank has several parts of a parameter of shardproof.fsdp with shape {list(self.shape)} "
                f"and placements {self.placements}, and torch asks for one. Save with shardproof.save, and "
                "load with shardproof.load or load_full_state_dict"
            )
        sizes, placed = self.index_map.local_shape, self.index_map.placed
        offsets = placed.pair(0)[0] if len(placed) else (0,) * len(sizes)
        last = {p.dim: dim for dim, p in enumerate(self.placements) if isinstance(p, Shard | _StridedShard)}
        made = list(self.placements)
        for dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard | _StridedShard):
                part = (sizes[placement.dim], offsets[placement.dim]) if last[placement.dim] == dim else None
                made[dim] = ShardOfRows(placement.dim, self, part)
        return tuple(made)

    def _has_separate_parts(self) -> bool:
        """True if a rank has several boxes of the tensor: it depends on the placements alone."""
        beneath = range(self.mesh_dim + 1, len(self.placements))
        shards = [(dim, self.placements[dim]) for dim in beneath if not self.placements[dim].is_replicate()]
        sharding = tuple((dim, p.dim, getattr(p, "split_factor", 0)) for dim, p in shards)  # type: ignore[attr-defined]
        mesh = (*(1 for _ in range(self.mesh_dim + 1)), *self.mesh.shape[self.mesh_dim + 1 :])
        cuts = (local_segments(self.shape, mesh, at, sharding, False) for at in product(*map(range, mesh)))
        return any(len(segments) > 1 for cut in cuts for segments in cut or ())

    def gather(self, local: torch.Tensor) -> DTensor:
        """The gathered tensor, a copy. A collective over the ranks that share the rows."""
        if detect_fake_mode(local) is not None:
            raise RuntimeError(
                f"torch.compile cannot gather a parameter of shardproof.fsdp, shape {list(self.shape)}, and "
                "the operation is not elementwise. Call optimizer.step() without torch.compile"
            )
        most = max(stop - first for first, stop in self.bounds)
        with torch.no_grad():
            rows = local.detach().movedim(self.dim, 0)
            part = rows.new_zeros((most, *rows.shape[1:]))
            part[: rows.shape[0]].copy_(rows)
            parts = part.new_empty((len(self.bounds), *part.shape))
            if part.numel():
                all_gather(parts.view(-1), part.view(-1), self.mesh.get_group(self.mesh_dim)).wait()
            known = [parts[rank, : stop - first] for rank, (first, stop) in enumerate(self.bounds)]
            joined = torch.cat(known).movedim(0, self.dim).contiguous()
            strides = tuple(row_major_strides(self.shape))
            meta = TensorMeta(torch.Size(self.shape), strides, joined.dtype)
            spec = DTensorSpec(self.mesh, self.gathered, tensor_meta=meta)
            whole: DTensor = dtensor(DTensor, joined, spec)
            return whole

    def take(self, whole: DTensor) -> torch.Tensor:
        """This rank's rows of a DTensor on the same mesh. A collective, unless it is gathered."""
        for placement in whole.placements:
            if isinstance(placement, ShardOfRows):
                if self.equals(placement.layout):
                    return whole._local_tensor
                raise RuntimeError(
                    f"a DTensor of shape {list(whole.shape)} was made with the placements of another "
                    "parameter of shardproof.fsdp. Make it with distribute_tensor and [Shard(0)]"
                )
        with torch.no_grad():
            if tuple(whole.placements) != self.gathered:
                whole = whole.redistribute(placements=self.gathered)
        first, stop = self.rows
        return whole._local_tensor.narrow(self.dim, first, stop - first)


class RowMeta(TensorMeta):
    """What torch knows of a tensor, with its layout. `torch.compile` keeps it and makes the tensor again."""

    layout: RowLayout


class ShardOfRows(Shard):
    """A `Shard` that computes the part that this rank has, and not the chunk that torch would cut.

    Args:
        dim: dimension of the tensor.
        layout: layout of the tensor.
        part: size and offset of the part in `dim`; None if a later dimension of the mesh has them.
    """

    layout: RowLayout
    part: tuple[int, int] | None

    def __init__(self, dim: int, layout: RowLayout, part: tuple[int, int] | None) -> None:
        super().__init__(dim)
        self.__dict__.update(layout=layout, part=part)  # torch 2.6: a frozen dataclass

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any, **options: Any
    ) -> tuple[int, int]:
        return self.part or (curr_local_size, 0)

    _local_shard_size_on_dim = _local_shard_size_and_offset  # its name in torch 2.6


def dtensor(kind: Any, local: torch.Tensor, spec: Any) -> Any:
    """A DTensor without a gradient. `DTensor.__init__` does nothing, and takes longer than all the rest."""
    return kind.__new__(kind, local, spec, requires_grad=False)


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
    """The layout of a parameter that is sharded over ranks."""
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
