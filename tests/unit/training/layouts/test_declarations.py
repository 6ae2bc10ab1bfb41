"""Fused weights, each against shards cut by hand, and padded vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardproof.errors import StructureError
from shardproof.layouts import (
    Part,
    fused,
    gated_delta_net,
    latent_attention,
    query_key_value,
    swiglu,
    vocabulary,
)
from shardproof.training.layouts.parts import blocks_of
from tests.unit.engine.state.fake_checkpoint import FakeCheckpoint
from tests.unit.engine.state.test_state_dtensor import every_rank
from tests.unit.training.layouts.reference import check_fused, checkpoint_of, linear, numbered


def cut(parts: list[torch.Tensor], rank: int, ranks: int, dim: int = 0) -> torch.Tensor:
    return torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_swiglu(dim: int) -> None:
    full = numbered(16, 16)
    check_fused(
        full,
        lambda rank, ranks: cut(list(full.chunk(2, dim)), rank, ranks, dim),
        lambda module, rank, ranks: swiglu(module, "weight", 8, rank=rank, ranks=ranks, dim=dim),
        [1, 2, 4],
    )


@pytest.mark.parametrize("groups", [8, 4, 2, 1])
def test_separate_query_key_value(groups: int) -> None:
    heads, head_dim = 8, 3
    full = numbered((heads + 2 * groups) * head_dim, 4)
    query, key, value = full.split([heads * head_dim, groups * head_dim, groups * head_dim])

    def shard(rank: int, ranks: int) -> torch.Tensor:
        copies = max(1, ranks // groups)
        own = [part.chunk(ranks // copies)[rank // copies] for part in (key, value)]
        return torch.cat([query.chunk(ranks)[rank], *own])

    check_fused(
        full,
        shard,
        lambda module, rank, ranks: query_key_value(
            module, "weight", heads=heads, groups=groups, head_dim=head_dim, rank=rank, ranks=ranks
        ),
        [1, 2, 4, 8],
    )


@pytest.mark.parametrize("groups", [8, 4, 2, 1])
def test_interleaved_query_key_value(groups: int) -> None:
    heads, head_dim = 8, 3
    full = numbered((heads + 2 * groups) * head_dim, 4)

    def shard(rank: int, ranks: int) -> torch.Tensor:
        of_groups = full.chunk(groups)
        if ranks <= groups:
            return torch.cat(of_groups[rank * groups // ranks : (rank + 1) * groups // ranks])
        sharing = ranks // groups
        own = of_groups[rank // sharing]
        queries, key_value = own[: -2 * head_dim], own[-2 * head_dim :]
        return torch.cat([queries.chunk(sharing)[rank % sharing], key_value])

    check_fused(
        full,
        shard,
        lambda module, rank, ranks: query_key_value(
            module,
            "weight",
            heads=heads,
            groups=groups,
            head_dim=head_dim,
            interleaved=True,
            rank=rank,
            ranks=ranks,
        ),
        [1, 2, 4, 8],
    )


def test_uneven_and_replicated_parts() -> None:
    full = numbered(11, 2)
    a, b, c = full.split([5, 2, 4])

    def shard(rank: int, ranks: int) -> torch.Tensor:
        uneven = a.split([4, 1])[rank] if ranks == 2 else a
        return torch.cat([uneven, b, c.chunk(ranks)[rank]])

    check_fused(
        full,
        shard,
        lambda module, rank, ranks: fused(
            module,
            "weight",
            (Part(5, sizes=(4, 1) if ranks == 2 else (5,)), 2, 4),
            rank=rank,
            ranks=ranks,
            replicated=[1],
        ),
        [1, 2],
    )


KEYS, VALUES, KEY_DIM, VALUE_DIM = 4, 8, 3, 2
SIX = [KEYS * KEY_DIM] * 2 + [VALUES * VALUE_DIM] * 2 + [VALUES] * 2


def delta_net(rank: int, ranks: int, scale: float) -> torch.nn.Module:
    module = torch.nn.Module()
    projection, convolution = numbered(sum(SIX), 3), numbered(sum(SIX[:3]), 1, 4)
    module.in_proj = linear(scale * cut(list(projection.split(SIX)), rank, ranks))
    own = cut(list(convolution.split(SIX[:3])), rank, ranks)
    module.conv1d = torch.nn.Conv1d(len(own), len(own), 4, groups=len(own))
    module.conv1d.weight = torch.nn.Parameter(scale * own)
    bias = cut(list(numbered(sum(SIX[:3])).split(SIX[:3])), rank, ranks)
    module.conv1d.bias = torch.nn.Parameter(scale * bias)
    module.A_log = torch.nn.Parameter(scale * numbered(VALUES).chunk(ranks)[rank])
    gated_delta_net(
        module,
        key_heads=KEYS,
        value_heads=VALUES,
        key_dim=KEY_DIM,
        value_dim=VALUE_DIM,
        per_head=("A_log",),
        rank=rank,
        ranks=ranks,
    )
    return module


@pytest.mark.parametrize("saved", [1, 2, 4])
@pytest.mark.parametrize("loaded", [1, 2, 4])
def test_gated_delta_net(saved: int, loaded: int) -> None:
    checkpoint = checkpoint_of([delta_net(rank, saved, 1.0) for rank in range(saved)])
    assert torch.equal(checkpoint.full["in_proj.weight"], numbered(sum(SIX), 3))
    assert torch.equal(checkpoint.full["conv1d.weight"], numbered(sum(SIX[:3]), 1, 4))
    assert torch.equal(checkpoint.full["conv1d.bias"], numbered(sum(SIX[:3])))
    assert torch.equal(checkpoint.full["A_log"], numbered(VALUES))
    for rank in range(loaded):
        module = delta_net(rank, loaded, 0.0)
        checkpoint.load(module)
        expected = delta_net(rank, loaded, 1.0)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, expected.get_parameter(name)), name


@pytest.mark.parametrize("query_rank", [None, 5])
def test_latent_attention(query_rank: int | None) -> None:
    heads, latent, nope, rope, value = 4, 6, 3, 2, 5

    def module_of(rank: int, ranks: int, scale: float) -> torch.nn.Module:
        module = torch.nn.Module()
        if query_rank is not None:
            module.q_down = linear(scale * numbered(query_rank, 7))
        module.q_up = linear(scale * numbered(heads * (nope + rope), query_rank or 7).chunk(ranks)[rank])
        module.kv_down = linear(scale * numbered(latent + rope, 7))
        module.kv_up = linear(scale * numbered(heads * (nope + value), latent).chunk(ranks)[rank])
        latent_attention(
            module,
            heads=heads,
            query_rank=query_rank,
            key_value_rank=latent,
            nope_dim=nope,
            rope_dim=rope,
            value_dim=value,
            rank=rank,
            ranks=ranks,
        )
        return module

    checkpoint = checkpoint_of([module_of(rank, 2, 1.0) for rank in range(2)])
    assert torch.equal(checkpoint.full["kv_down.weight"], numbered(latent + rope, 7))
    assert torch.equal(checkpoint.full["kv_up.weight"], numbered(heads * (nope + value), latent))
    assert ("q_down.weight" in checkpoint.full) == (query_rank is not None)
    for rank in range(4):
        module = module_of(rank, 4, 0.0)
        checkpoint.load(module)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, module_of(rank, 4, 1.0).get_parameter(name)), name


@pytest.mark.parametrize("declared_before", [True, False])
@pytest.mark.parametrize("dp", [2, 3])
def test_fsdp_over_a_plain_tensor_parallel_weight(dp: int, declared_before: bool) -> None:
    """The DTensor is the tensor parallel shard: the layout of its rank."""
    full = numbered(20, 3)

    def tree(mesh: DeviceMesh) -> Any:
        mesh = DeviceMesh("cpu", torch.arange(dp * 2).reshape(dp, 2), mesh_dim_names=("dp", "tp"))
        rank = mesh["tp"].get_local_rank()
        module = linear(cut(list(full.chunk(2)), rank, 2))
        if declared_before:
            swiglu(module, "weight", 10, rank=rank, ranks=2)
        fully_shard(module, mesh=mesh["dp"])
        if not declared_before:
            swiglu(module, "weight", 10, rank=rank, ranks=2)
        return module

    checkpoint = FakeCheckpoint(every_rank((dp, 2), tree))
    assert torch.equal(checkpoint.full["weight"], full)
    assert (checkpoint.holders("weight") == 1).all()


@pytest.mark.parametrize("dp", [2, 3])
def test_fsdp_over_a_dtensor_of_fused_blocks(dp: int) -> None:
    """The DTensor holds the blocks of both tensor parallel ranks. Both blocks have the keys and values."""
    heads, groups, head_dim = 4, 1, 3
    full = numbered((heads + 2 * groups) * head_dim, 2)
    query, key, value = full.split([heads * head_dim, head_dim, head_dim])
    blocks = [torch.cat([half, key, value]) for half in query.chunk(2)]

    def tree(mesh: DeviceMesh) -> Any:
        mesh = DeviceMesh("cpu", torch.arange(dp * 2).reshape(dp, 2), mesh_dim_names=("dp", "tp"))
        module = linear(blocks[0])
        block = blocks[mesh["tp"].get_local_rank()]
        module.weight = torch.nn.Parameter(DTensor.from_local(block, mesh["tp"], [Shard(0)], run_check=False))
        query_key_value(
            module,
            "weight",
            heads=heads,
            groups=groups,
            head_dim=head_dim,
            rank=mesh["tp"].get_local_rank(),
            ranks=2,
        )
        fully_shard(module, mesh=mesh["dp"])
        return module

    checkpoint = FakeCheckpoint(every_rank((dp, 2), tree))
    assert torch.equal(checkpoint.full["weight"], full)
    assert (checkpoint.holders("weight")[: heads * head_dim] == 1).all()
    assert (checkpoint.holders("weight")[heads * head_dim :] == 2).all()


@given(st.integers(0, 6), st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 3, 6]))
def test_parts_in_fewer_pieces_than_ranks_are_held_by_neighbours(each: int, pieces: int, copies: int) -> None:
    held = [
        Part(each * pieces, pieces=pieces).segment(rank, pieces * copies) for rank in range(pieces * copies)
    ]
    assert held == [(at * each, each) for at in range(pieces) for _ in range(copies)]
    assert [blocks_of((each * pieces,), pieces)[rank][0] for rank in range(pieces)] == held[::copies]


def test_sizes_that_do_not_fit_are_refused() -> None:
    layer = torch.nn.Linear(4, 6)
    with pytest.raises(ValueError, match="part of 5 cannot be cut into 2"):
        fused(layer, "weight", (5, 7), ranks=2)
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        fused(layer, "weight", (6, 6), rank=2, ranks=2)
    with pytest.raises(
        StructureError, match=r"weight has shape \[6, 4\], with 6 .* need 8 for .* rank 1 of 2"
    ):
        swiglu(layer, "weight", 8, rank=1, ranks=2)
    with pytest.raises(StructureError, match="no such parameter or buffer. Expected one of"):
        swiglu(layer, "wieght", 6)
    with pytest.raises(StructureError, match="no module 'mlp'. Expected one of"):
        swiglu(layer, "mlp.weight", 6)
    with pytest.raises(StructureError, match="no dimension 2"):
        swiglu(layer, "weight", 3, dim=2)
    with pytest.raises(ValueError, match="must divide heads, and either divide groups or be a multiple"):
        query_key_value(layer, "weight", heads=6, groups=3, head_dim=1, ranks=2)
    with pytest.raises(ValueError, match="5 query heads cannot be divided evenly into 2 groups"):
        query_key_value(layer, "weight", heads=5, groups=2, head_dim=1)
    with pytest.raises(ValueError, match="add up to 3"):
        Part(4, sizes=(2, 1))
    with pytest.raises(ValueError, match="copies of 2 pieces evenly"):
        Part(4, pieces=2).segment(0, 3)
    swiglu(layer, "weight", 3)
    with pytest.raises(StructureError, match="already has a declared layout"):
        swiglu(layer, "weight", 3)


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
