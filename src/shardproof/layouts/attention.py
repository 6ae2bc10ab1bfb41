"""Fused projections of attention.

Fused projections of linear attention by the gated delta rule.
"""

from __future__ import annotations

import torch

from shardproof.layouts.fused import fused
from shardproof.layouts.module_tensors import Owned, declare_along
from shardproof.layouts.parts import Part, blocks_of

__all__ = ["gated_delta_net", "latent_attention", "query_key_value"]


def query_key_value(
    module: torch.nn.Module,
    name: str,
    *,
    heads: int,
    groups: int | None = None,
    head_dim: int,
    interleaved: bool = False,
    rank: int = 0,
    ranks: int = 1,
    dim: int = 0,
) -> None:
    """Declares that a tensor is the query, key and value projection of attention.

    Separate, the model's tensor is all queries, then all keys, then all values. Interleaved, it is group
    after group, each the queries, the key and the value of one group, as Megatron-LM has it. A rank holds
    whole heads. With fewer groups than ranks, neighbouring ranks hold copies of a group's key and value, and
    each its own queries.

    Args:
        module: that owns the tensor, or has below it the one that does.
        name: of the tensor, with dots.
        heads: of queries in the whole model.
        groups: heads of keys, and of values; as many as of queries by default.
        head_dim: elements of a head.
        interleaved: the order of the model's tensor.
        rank: tensor parallel rank of this process.
        ranks: tensor parallel ranks.
        dim: dimension along which the heads are put together.

    Raises:
        ValueError: the ranks cannot share the heads.
        StructureError: there is no such tensor, it has other sizes, or its layout is declared already.

    Rank 1 of 2 of 4 heads of queries and 2 of keys and values:

    >>> query_key_value(torch.nn.Linear(2, 12), "weight", heads=4, groups=2, head_dim=3, rank=1, ranks=2)
    """
    groups = heads if groups is None else groups
    if groups < 1 or heads % groups:
        raise ValueError(f"{heads} heads of queries cannot share {groups} groups of keys and values evenly")
    if ranks < 1 or heads % ranks or (groups % ranks and ranks % groups):
        raise ValueError(
            f"{ranks} tensor parallel ranks cannot share {heads} heads of queries and {groups} groups of "
            "keys and values: ranks must divide heads, and divide groups or be a multiple of them"
        )
    pieces = min(groups, ranks)
    if not interleaved:
        key = Part(groups * head_dim, pieces=pieces)
        fused(module, name, (heads * head_dim, key, key), rank=rank, ranks=ranks, dim=dim)
        return
    queries = heads // groups * head_dim
    stride = queries + 2 * head_dim
    blocks = blocks_of((groups * stride,), ranks) if groups >= ranks else []
    for at in range(ranks if groups < ranks else 0):
        sharing = ranks // groups
        group, place, own = at // sharing, at % sharing, queries // sharing
        blocks.append([(group * stride + place * own, own), (group * stride + queries, 2 * head_dim)])
    declare_along(module, name, dim, blocks, groups * stride, rank)


def latent_attention(
    module: torch.nn.Module,
    *,
    heads: int,
    query_rank: int | None,
    key_value_rank: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    query_down: str | None = "q_down.weight",
    query_up: str | None = "q_up.weight",
    key_value_down: str | None = "kv_down.weight",
    key_value_up: str | None = "kv_up.weight",
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Declares the projections of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Down projections are whole on every rank: the query's latent; and the key's and value's latent with the
    rotary key after it. Up projections are cut by head: of queries, a part without and one with rotary
    embedding; of keys and values, the key's part without, and the value.

    Args:
        module: that has the projections below it.
        heads: in the whole model.
        query_rank: size of the query's latent; None where queries have no down projection.
        key_value_rank: size of the latent of keys and values.
        nope_dim: elements of a head's query and key without rotary embedding.
        rope_dim: elements with it.
        value_dim: elements of a head's value.
        query_down: name of this weight in the module, with dots; None where there is none.
        query_up: the same; of the only projection of queries where there is no latent.
        key_value_down: the same.
        key_value_up: the same.
        rank: tensor parallel rank of this process.
        ranks: tensor parallel ranks.

    Raises:
        ValueError: the ranks do not divide the heads.
        StructureError: there is no such weight, it has other sizes, or its layout is declared already.
    """
    if ranks < 1 or heads % ranks:
        raise ValueError(f"{ranks} tensor parallel ranks cannot share {heads} heads evenly")
    if query_down is not None and query_rank is not None:
        fused(module, query_down, (query_rank,), rank=rank, ranks=ranks, replicated=[0])
    if key_value_down is not None:
        fused(module, key_value_down, (key_value_rank, rope_dim), rank=rank, ranks=ranks, replicated=[0, 1])
    if query_up is not None:
        fused(module, query_up, (heads * (nope_dim + rope_dim),), rank=rank, ranks=ranks)
    if key_value_up is not None:
        fused(module, key_value_up, (heads * (nope_dim + value_dim),), rank=rank, ranks=ranks)


def gated_delta_net(
    module: torch.nn.Module,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    in_proj: str | None = "in_proj",
    conv1d: str | None = "conv1d",
    per_head: tuple[str, ...] = (),
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Declares the fused weights of a gated delta net (arXiv 2412.06464).

    The input projection is six parts (query, key, value, gate z, beta, alpha), the convolution three (query,
    key, value). Every part is cut by head. Biases are laid out as their weights.

    Args:
        module: that has the projection and the convolution below it.
        key_heads: of queries, and of keys, in the whole model.
        value_heads: of values, gates, betas and alphas.
        key_dim: elements of a head's query or key.
        value_dim: elements of a head's value or gate.
        in_proj: name of the projection in the module, with dots; None where there is none.
        conv1d: name of the convolution, likewise.
        per_head: names of tensors with one element for each head of values (``A_log``, ``dt_bias``).
        rank: tensor parallel rank of this process.
        ranks: tensor parallel ranks.

    Raises:
        ValueError: the ranks do not divide the heads.
        StructureError: there is no such tensor, it has other sizes, or its layout is declared already.
    """
    if ranks < 1 or key_heads % ranks or value_heads % ranks:
        raise ValueError(
            f"{ranks} tensor parallel ranks cannot share {key_heads} heads of keys and {value_heads} of "
            "values evenly"
        )
    keys, values = key_heads * key_dim, value_heads * value_dim
    for name, sizes in (
        (in_proj, (keys, keys, values, values, value_heads, value_heads)),
        (conv1d, (keys, keys, values)),
    ):
        if name is None:
            continue
        fused(module, f"{name}.weight", sizes, rank=rank, ranks=ranks)
        if Owned(module, f"{name}.weight").module._parameters.get("bias") is not None:
            fused(module, f"{name}.bias", sizes, rank=rank, ranks=ranks)
    for name in per_head:
        fused(module, name, (value_heads,), rank=rank, ranks=ranks)
