"""Padding of vocabularies: not stored, not touched, different between runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardproof.errors import StructureError
from shardproof.layouts import vocabulary
from tests.unit.engine.state.fake_checkpoint import FakeCheckpoint
from tests.unit.engine.state.test_state_dtensor import every_rank
from tests.unit.training.layouts.reference import checkpoint_of, numbered

SIZE = 7


def tables(rows: int, ranks: int, padding: float, scale: float) -> list[torch.nn.Embedding]:
    """Rows of each rank, of which those beyond SIZE hold `padding`."""
    whole = torch.full((rows * ranks, 2), padding)
    whole[:SIZE] = scale * numbered(SIZE, 2)
    made = []
    for rank, own in enumerate(whole.chunk(ranks)):
        table = torch.nn.Embedding(rows, 2, _weight=own.clone())
        vocabulary(table, "weight", SIZE, rank=rank, ranks=ranks)
        made.append(table)
    return made


@pytest.mark.parametrize(("rows", "ranks"), [(7, 1), (12, 1), (3, 3), (2, 4), (4, 4), (7, 3)])
@pytest.mark.parametrize(("other_rows", "other_ranks"), [(7, 1), (3, 3), (2, 4), (8, 4)])
def test_padding_differs_between_runs(rows: int, ranks: int, other_rows: int, other_ranks: int) -> None:
    checkpoint = checkpoint_of(tables(rows, ranks, float("nan"), 1.0))
    assert torch.equal(checkpoint.full["weight"], numbered(SIZE, 2))
    expected = tables(other_rows, other_ranks, -5.0, 1.0)
    for table, other in zip(tables(other_rows, other_ranks, -5.0, 0.0), expected, strict=True):
        checkpoint.load(table)
        assert torch.equal(table.weight, other.weight)


def test_slots_of_padding_are_not_stored_and_stay() -> None:
    def trained(rows: int, ranks: int) -> list[Any]:
        states = []
        for rank, table in enumerate(tables(rows, ranks, 0.0, 1.0)):
            optimizer = torch.optim.AdamW(table.parameters())
            gradient = torch.full((rows * ranks, 2), 3.0)
            gradient[:SIZE] = numbered(SIZE, 2)
            table.weight.grad = gradient.chunk(ranks)[rank].clone()
            optimizer.step()
            states.append({"model": table, "optimizer": optimizer})
        return states

    checkpoint = checkpoint_of(trained(3, 3))
    assert torch.equal(checkpoint.full["optimizer.weight.exp_avg"], 0.1 * numbered(SIZE, 2))
    for rank, state in enumerate(trained(4, 4)):
        slot = state["optimizer"].state[state["model"].weight]["exp_avg"]
        slot.fill_(-1.0)
        checkpoint.load(state)
        expected = torch.full((16, 2), -1.0)
        expected[:SIZE] = 0.1 * numbered(SIZE, 2)
        assert torch.equal(slot, expected.chunk(4)[rank])


def test_a_tied_output_has_the_embeddings_layout() -> None:
    def model(rows: int, ranks: int, rank: int) -> torch.nn.Module:
        made = torch.nn.Module()
        made.head, made.table = torch.nn.Linear(2, rows, bias=False), tables(rows, ranks, 0.0, 1.0)[rank]
        made.head.weight = made.table.weight
        return made

    checkpoint = checkpoint_of([model(4, 4, rank) for rank in range(4)])
    assert checkpoint.aliases == {"table.weight": "head.weight"}
    assert torch.equal(checkpoint.full["head.weight"], numbered(SIZE, 2))


def test_a_dtensor_of_padded_rows() -> None:
    padded = torch.full((9, 2), 99.0)
    padded[:SIZE] = numbered(SIZE, 2)

    def tree(mesh: DeviceMesh) -> Any:
        table = torch.nn.Embedding(9, 2)
        own = padded.chunk(3)[mesh.get_local_rank()].clone()
        table.weight = torch.nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)], run_check=False))
        vocabulary(table, "weight", SIZE, rank=mesh.get_local_rank(), ranks=3)
        return table

    checkpoint = FakeCheckpoint(every_rank((3,), tree))
    assert torch.equal(checkpoint.full["weight"], numbered(SIZE, 2))
    assert (checkpoint.holders("weight") == 1).all()


def test_columns_may_be_the_tokens() -> None:
    head = torch.nn.Module()
    head.weight = torch.nn.Parameter(numbered(2, 9))
    vocabulary(head, "weight", SIZE, dim=-1)
    assert torch.equal(checkpoint_of([head]).full["weight"], numbered(2, 9)[:, :SIZE])


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(
        StructureError, match="has 3 rows, which makes 6 on 2 tensor parallel ranks: too few for 7 tokens"
    ):
        vocabulary(torch.nn.Embedding(3, 2), "weight", 7, rank=0, ranks=2)
