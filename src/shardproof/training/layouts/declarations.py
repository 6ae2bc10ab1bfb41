"""Declarations of weights that concatenate several weights, and of the weights of pipeline stages.

The first are SwiGLU and the projections of several kinds of attention. A pipeline stage has numbers of layers
in the whole model, shared parameters, and padded vocabularies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch

from shardproof.engine.state import Layout, is_dtensor, rename, share
from shardproof.errors import StructureError
from shardproof.training.layouts.parts import Owned, Part, blocks_of, check_rank, declare_along


def fused(
    module: torch.nn.Module,
    name: str,
    sizes: Sequence[int | Part],
    *,
    rank: int = 0,
    ranks: int = 1,
    dim: int = 0,
    replicated: Collection[int] = (),
) -> None:
    """Declares that a tensor concatenates parts, each divided over the tensor parallel ranks.

    The model's tensor is the concatenation of the whole parts. A single part is a tensor that the ranks
    divide without fusion.

    Args:
        module: the module that owns the tensor, or one above it.
        name: dotted name of the tensor in `module`.
        sizes: size of each part in the whole model, or a `Part` if the ranks do not divide it evenly.
        rank: tensor parallel rank of this process.
        ranks: number of tensor parallel ranks.
        dim: dimension along which the parts are concatenated.
        replicated: positions of the parts that every rank holds whole.

    Raises:
        ValueError: the ranks cannot divide the parts.
        StructureError: there is no such tensor, its sizes differ, or its layout is already declared.

    A plain parameter holds its rank's share of each part:

    >>> from shardproof.state import collect
    >>> linear = torch.nn.Linear(2, 5, bias=False)  # rank 1 of 2: half of 6 rows, half of 2, a copy of 1
    >>> fused(linear, "weight", (6, 2, 1), rank=1, ranks=2, replicated=[2])
    >>> [(entry.shape, [piece.offsets for piece in entry.pieces]) for entry in collect(linear).tensors]
    [((9, 2), [(3, 0), (7, 0), (8, 0)])]
    """
    parts = [part if isinstance(part, Part) else Part(part) for part in sizes]
    for at in replicated:
        parts[at] = replace(parts[at], pieces=1, sizes=None)
    declare_along(module, name, dim, blocks_of(parts, ranks), sum(part.size for part in parts), rank)


def swiglu(
    module: torch.nn.Module, name: str, size: int, *, rank: int = 0, ranks: int = 1, dim: int = 0
) -> None:
    """Declares that a tensor is the gate and the up projection of a SwiGLU layer: [gate; up].

    Args:
        module: the module that owns the tensor, or one above it.
        name: dotted name of the tensor in `module`.
        size: hidden size of the layer in the whole model, the number of rows of each projection.
        rank: tensor parallel rank of this process.
        ranks: number of tensor parallel ranks.
        dim: dimension along which the two projections are concatenated.

    Raises:
        ValueError: the ranks do not divide the size.
        StructureError: there is no such tensor, its sizes differ, or its layout is already declared.

    >>> swiglu(torch.nn.Linear(2, 4), "weight", 4, rank=1, ranks=2)
    """
    fused(module, name, (size, size), rank=rank, ranks=ranks, dim=dim)


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

    The model's tensor is all queries, then all keys, then all values. If `interleaved`, it is one group after
    the other, each with its queries, key and value, as in Megatron-LM. A rank holds whole heads. With fewer
    groups than ranks, neighbouring ranks hold copies of a group's key and value, and each its own queries.

    Args:
        module: the module that owns the tensor, or one above it.
        name: dotted name of the tensor in `module`.
        heads: query heads in the whole model.
        groups: key heads, and value heads, in the whole model. Default: as many as query heads.
        head_dim: elements of a head.
        interleaved: True if the model's tensor is ordered by group.
        rank: tensor parallel rank of this process.
        ranks: number of tensor parallel ranks.
        dim: dimension along which the heads are concatenated.

    Raises:
        ValueError: the ranks cannot divide the heads.
        StructureError: there is no such tensor, its sizes differ, or its layout is already declared.

    Rank 1 of 2, with 4 query heads and 2 key and value heads:

    >>> query_key_value(torch.nn.Linear(2, 12), "weight", heads=4, groups=2, head_dim=3, rank=1, ranks=2)
    """
    groups = heads if groups is None else groups
    if groups < 1 or heads % groups:
        raise ValueError(f"{heads} query heads cannot be divided evenly into {groups} groups")
    if ranks < 1 or heads % ranks or (groups % ranks and ranks % groups):
        raise ValueError(
            f"{ranks} tensor parallel ranks cannot divide {heads} query heads and {groups} groups of keys "
            "and values: ranks must divide heads, and either divide groups or be a multiple of groups"
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
        ranks_per_group = ranks // groups
        group, position, own = at // ranks_per_group, at % ranks_per_group, queries // ranks_per_group
        blocks.append([(group * stride + position * own, own), (group * stride + queries, 2 * head_dim)])
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

    Every rank holds the whole down projections. That of queries gives their latent. That of keys and values
    gives their latent, then the rotary key. Up projections are divided by head. A query head has a part
    without and a part with rotary embedding. A key and value head has the key without rotary embedding, and
    the value.

    Args:
        module: the module that contains the projections.
        heads: heads in the whole model.
        query_rank: size of the query latent; None if queries have no down projection.
        key_value_rank: size of the key and value latent.
        nope_dim: elements of a head's query and key without rotary embedding.
        rope_dim: elements of a head's query and key with rotary embedding.
        value_dim: elements of a head's value.
        query_down: dotted name of the query down projection's weight in `module`; None if there is none.
        query_up: dotted name of the query up projection's weight, or of the only query projection.
        key_value_down: dotted name of the key and value down projection's weight.
        key_value_up: dotted name of the key and value up projection's weight.
        rank: tensor parallel rank of this process.
        ranks: number of tensor parallel ranks.

    Raises:
        ValueError: the ranks do not divide the heads.
        StructureError: there is no such weight, its sizes differ, or its layout is already declared.
    """
    if ranks < 1 or heads % ranks:
        raise ValueError(f"{ranks} tensor parallel ranks cannot divide {heads} heads evenly")
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

    The input projection has six parts (query, key, value, gate z, beta, alpha). The convolution has three
    (query, key, value). Every part is divided by head. Biases have the layout of their weights.

    Args:
        module: the module that contains the projection and the convolution.
        key_heads: query heads, and key heads, in the whole model.
        value_heads: heads of values, gates, betas and alphas.
        key_dim: elements of a head's query or key.
        value_dim: elements of a head's value or gate.
        in_proj: dotted name of the projection in `module`; None if there is none.
        conv1d: dotted name of the convolution in `module`; None if there is none.
        per_head: names of tensors with one element per value head (``A_log``, ``dt_bias``).
        rank: tensor parallel rank of this process.
        ranks: number of tensor parallel ranks.

    Raises:
        ValueError: the ranks do not divide the heads.
        StructureError: there is no such tensor, its sizes differ, or its layout is already declared.
    """
    if ranks < 1 or key_heads % ranks or value_heads % ranks:
        raise ValueError(
            f"{ranks} tensor parallel ranks cannot divide {key_heads} key heads and {value_heads} value "
            "heads evenly"
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


def layers(modules: Iterable[torch.nn.Module], first: int) -> None:
    """Gives the layers of a pipeline stage, or depths of multi-token prediction, their numbers in the model.

    Args:
        modules: the layers of this stage, in order, for example a `ModuleList`.
        first: number of the stage's first layer in the model.

    >>> from shardproof.state import collect
    >>> stage = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
    >>> layers(stage, 6)
    >>> [entry.key for entry in collect(stage).tensors]
    ['6.weight', '7.weight']
    """
    if first < 0:
        raise ValueError(f"the number of the first layer must not be negative, found {first}")
    for number, module in enumerate(modules, first):
        rename(module, str(number))


def shared(module: torch.nn.Module, name: str, key: str) -> None:
    """Declares that a parameter is a copy of one with another key in the model.

    The last stage of a pipeline has a copy of the embedding for its output, or for multi-token prediction. A
    save stores the parameter once. A load fills all copies, on any rank.

    Args:
        module: the module that owns the parameter, or one above it.
        name: dotted name of the parameter in `module`.
        key: key of the parameter in the whole model, relative to the saved module: ``embedding.weight``.

    Raises:
        StructureError: there is no such parameter.

    >>> from shardproof.state import collect
    >>> stage = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 3, bias=False)})
    >>> shared(stage, "head.weight", "embedding.weight")
    >>> [entry.key for entry in collect(stage).tensors]
    ['embedding.weight']
    """
    item = Owned(module, name)
    if item.layout is None:
        item.declare(Layout.whole(item.tensor.shape))  # several tensors may have one key if they have layouts
    share(item.module, item.name, key)


def vocabulary(
    module: torch.nn.Module, name: str, size: int, *, rank: int = 0, ranks: int = 1, dim: int = 0
) -> None:
    """Declares that a tensor has a row for each token, then rows of padding.

    A save does not store padding, and a load does not change it. So runs may pad differently, and a rank may
    have only padding.

    Args:
        module: the module that owns the tensor, or one above it.
        name: dotted name of the tensor in `module`.
        size: number of tokens in the vocabulary, without padding.
        rank: tensor parallel rank of this process. All ranks have the same number of rows.
        ranks: number of tensor parallel ranks.
        dim: dimension of the tokens.

    Raises:
        StructureError: there is no such tensor, or the ranks together have fewer rows than tokens.

    Rank 1 of 2 has rows 4 to 7 of a vocabulary of 7 tokens, and one row of padding:

    >>> from shardproof.state import collect
    >>> table = torch.nn.Embedding(4, 2)
    >>> vocabulary(table, "weight", 7, rank=1, ranks=2)
    >>> [(entry.shape, entry.pieces[0].view.shape) for entry in collect(table).tensors]
    [((7, 2), torch.Size([3, 2]))]
    """
    check_rank(rank, ranks)
    item = Owned(module, name)
    axis = item.axis(dim)
    rows = item.tensor.shape[axis]
    whole = is_dtensor(item.tensor) and rows >= size
    start, total = (0, rows) if whole else (rank * rows, ranks * rows)
    if total < size:
        raise StructureError(
            f"{item.where} has {rows} rows, which makes {total} on {ranks} tensor parallel ranks: too few "
            f"for {size} tokens"
        )
    item.declare_axis(axis, [(start, min(max(size - start, 0), rows))], size)
