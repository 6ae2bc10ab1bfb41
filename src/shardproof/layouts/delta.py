"""Fused projections of linear attention by the gated delta rule."""

from __future__ import annotations

import torch

from shardproof.layouts.fused import fused
from shardproof.layouts.owned import Owned

__all__ = ["gated_delta_net"]


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
