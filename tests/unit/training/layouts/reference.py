"""A slow reference for layouts: ranks in one process, whole weights sharded by hand with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shardproof.geometry import Boxes, deduplicate, tiling_faults
from shardproof.state import Collected, collect
from tests.unit.engine.state.fake_checkpoint import FakeCheckpoint


def numbered(*shape: int) -> torch.Tensor:
    """A tensor whose elements all differ."""
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.nn.Linear:
    """A layer of these weights."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = torch.nn.Parameter(weight.clone())
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias.clone())
    return layer


def checkpoint_of(trees: Sequence[Any]) -> FakeCheckpoint:
    """The checkpoint that ranks with these trees save. Replicas apart, boxes must tile every tensor."""
    return proved([collect(tree, rank=rank, world_size=len(trees)) for rank, tree in enumerate(trees)])


def proved(ranks: Sequence[Collected]) -> FakeCheckpoint:
    """The checkpoint, once its tiling is proved."""
    boxes: dict[str, list[Any]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for collected in ranks:
        for entry in collected.tensors:
            shapes[entry.key] = entry.shape
            of_rank = [(piece.offsets, tuple(piece.view.shape)) for piece in entry.pieces]
            assert len(set(of_rank)) == len(of_rank), entry.key
            boxes.setdefault(entry.key, []).extend(of_rank)
    for key, held in boxes.items():
        columns = Boxes.of(*held) if held else Boxes.empty(len(shapes[key]))
        first, _ = deduplicate(np.zeros(len(columns), np.int64), columns)
        distinct = columns.take(first)
        shape = np.array([shapes[key]], np.int64).reshape(1, -1)
        faults = tiling_faults(shape, np.zeros(len(distinct), np.int64), distinct)
        assert not faults, (key, faults)
    return FakeCheckpoint(ranks)


def check_fused(
    full: torch.Tensor,
    shard: Callable[[int, int], torch.Tensor],
    declare: Callable[[torch.nn.Module, int, int], None],
    ranks: Sequence[int],
) -> None:
    """Shards of a weight are saved as the whole one, and loaded into every other number of ranks.

    Args:
        full: the model's weight.
        shard: the shard of a rank, cut by hand.
        declare: the layout of a module's "weight" for a rank.
        ranks: numbers of ranks.
    """

    def modules(count: int, values: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.nn.Linear]:
        made = [linear(values(shard(rank, count))) for rank in range(count)]
        for rank, module in enumerate(made):
            declare(module, rank, count)
        return made

    checkpoints = {count: checkpoint_of(modules(count, torch.clone)) for count in ranks}
    for count, checkpoint in checkpoints.items():
        assert torch.equal(checkpoint.full["weight"], full), count
        for other in ranks:
            for rank, module in enumerate(modules(other, torch.zeros_like)):
                checkpoint.load(module)
                assert torch.equal(module.weight, shard(rank, other)), (count, other, rank)
