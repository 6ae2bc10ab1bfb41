"""The rows of parameters as torch computes them from the placements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardproof.engine.state import LOCAL
from shardproof.fsdp import fully_shard


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The last of four ranks, without the others."""
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, shape: tuple[int, ...], placement: Placement | None) -> Any:
    module = nn.Module()
    weight = torch.zeros(shape)
    if placement is not None:
        weight = distribute_tensor(weight, mesh["tensor"], [placement], src_data_rank=None)
    module.weight = nn.Parameter(weight)
    module.other = nn.Parameter(torch.zeros(4, 5))
    return fully_shard(module, mesh=mesh["data"]).weight


@pytest.mark.parametrize("placement", [None, Shard(0), Shard(1)])
@pytest.mark.parametrize("shape", [(11, 5), (4, 4), (1, 7)])
def test_torch_computes_the_rows_of_a_parameter(
    mesh: DeviceMesh, shape: tuple[int, ...], placement: Placement | None
) -> None:
    weight = sharded(mesh, shape, placement)
    for tensor in (weight, weight.detach().T):
        sizes, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        assert tuple(sizes) == tuple(tensor.to_local().shape)
        placed = getattr(tensor, LOCAL).placed
        assert not len(placed) or placed.pair(0) == (tuple(offsets), tuple(sizes))


@pytest.mark.parametrize("rows", [8, 3])
def test_separate_parts_of_a_parameter_are_refused_on_all_ranks(mesh: DeviceMesh, rows: int) -> None:
    """Of three rows, this rank has the middle one, and its neighbour the two others."""
    weight = sharded(mesh, (rows, 2), _StridedShard(0, split_factor=2))
    with pytest.raises(
        RuntimeError, match=rf"several parts of a parameter.*shape \[{rows}, 2\].*shardproof.save"
    ):
        compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
